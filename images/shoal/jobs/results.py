"""The results of a job that has ended: its reports, which any program may have written, and its archives.

Nothing that a job leaves behind is an error: a file that cannot be read or packed becomes a message.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.docker_client.archive import count_steps, make_relative, stays_inside
from shoal.errors import ShoalError
from shoal.jobs.job import FinishedJob
from shoal.jobs.parallel_gzip import ParallelGzip
from shoal.limits import MOST_DEPTH, MOST_FAILURE, MOST_REPORT, Room, open_file, parse_json, read_file

FAILURE, REPORT, METRICS = "output/failure", "output/job.json", "output/data/metrics.json"
_SHOWN_PROBLEMS = 5  # of an archive
_Messages = dict[str, list[str]]
"""Problems by host."""


def read_result(
    name: str,
    exit_codes: Mapping[str, int],
    directory: Path,
    trees: Mapping[str, Path],
    notes: Mapping[str, str] | None = None,
) -> FinishedJob:
    """Packs the files of a job that has ended, and reads its reports.

    Args:
        name: The job's name.
        exit_codes: The exit code of each host.
        directory: The job's directory.
        trees: The /opt/ml tree of each host, in the hosts' order.
        notes: Problems of hosts that their files do not show, by host.

    Returns:
        The result, with the reports of the first host. Failure files of all hosts, and files that cannot be read or
        packed, become messages.
    """
    messages = {host: [note] for host, note in (notes or {}).items()}
    for host, tree in trees.items():
        if failure := _read(host, tree, FAILURE, messages, most=MOST_FAILURE, cut=True):
            messages.setdefault(host, []).append(failure.decode(errors="replace"))
    host, tree = next(iter(trees.items()))
    report = _read_object(host, tree, REPORT, messages)
    try:
        _check_report(report)
    except ValueError as error:
        report = {}
        messages.setdefault(host, []).append(f"{REPORT}: {error}")
    plan = report.pop("plan", None)
    metrics = _read_object(host, tree, METRICS, messages)
    archives = pack_results(directory, trees, messages)
    return FinishedJob(
        name=name,
        exit_code=next((code for code in exit_codes.values() if code), 0),
        directory=directory,
        archives=archives,
        launch=report,
        metrics=metrics,
        messages={host: "\n".join(lines) for host, lines in messages.items() if lines},
        restarts=report.get("restarts", ()),
        plan=plan if isinstance(plan, dict) else {},
    )


def _read(host: str, tree: Path, name: str, messages: _Messages, most: int, *, cut: bool = False) -> bytes:
    """Returns a file of a host; empty if there is none, or with a message if it cannot be read."""
    try:
        if not stays_inside(tree / name, tree, by_its_name=True):
            raise ValueError("a link that leaves the job's directory")
        return read_file(tree / name, most, cut=cut, follow=True)
    except FileNotFoundError:
        return b""
    except (OSError, ValueError) as error:
        messages.setdefault(host, []).append(f"{name}: cannot be read: {_describe(error)}")
        return b""


def _read_object(host: str, tree: Path, name: str, messages: _Messages) -> dict[str, Any]:
    """Returns the JSON object in a file of a host; empty if there is none, or with a message if it cannot be read."""
    content = _read(host, tree, name, messages, most=MOST_REPORT)
    try:
        document = parse_json(content) if content else {}
        if isinstance(document, dict):
            return document
        problem = "not a JSON object"
    except ValueError as error:
        problem = str(error)
    messages.setdefault(host, []).append(f"{name}: {problem}")
    return {}


def _check_report(report: Mapping[str, Any]) -> None:
    hosts, ranks = report.get("hosts", [""]), report.get("ranks")
    seconds = (report.get("launch_seconds"), report.get("training_seconds"))
    if not (isinstance(hosts, list) and hosts and (ranks is None or type(ranks) is int)):
        raise ValueError("not written by `train`: wrong hosts or ranks")
    if not all(value is None or isinstance(value, (int, float)) for value in seconds):
        raise ValueError("not written by `train`: wrong seconds")
    listed = report.get("restarts", [])
    if not (isinstance(listed, list) and all(isinstance(each, dict) for each in listed)):
        raise ValueError("not written by `train`: wrong restarts")


def pack_results(directory: Path, trees: Mapping[str, Path], messages: _Messages) -> dict[str, Path]:
    """Packs model/ and output/data/ of all hosts into model.tar.gz and output.tar.gz.

    If several hosts wrote the same path, the first host's file is packed. Links that stay in the directory stay links.

    Args:
        directory: Where to write the archives.
        trees: The /opt/ml tree of each host, in the hosts' order.
        messages: Gets the files that cannot be packed.

    Returns:
        The archives, by name. There is none for a directory without files, or if it does not fit on the disk.
    """
    archives = {}
    for name, part in (("model.tar.gz", "model"), ("output.tar.gz", "output/data")):
        problems: _Messages = {host: [] for host in trees}
        roots = {host: tree / part for host, tree in trees.items()}
        files = _merge_files(roots, problems)
        partial = directory / f".{name}.part"
        try:
            if files and _pack(partial, files, roots, problems):
                partial.replace(directory / name)
                archives[name] = directory / name
        except (OSError, ValueError, ShoalError, tarfile.TarError) as error:
            problems.setdefault(next(iter(trees)), []).append(f"not written: {_describe(error)}")
        finally:
            partial.unlink(missing_ok=True)
        for host, found in problems.items():
            more = [f"{len(found) - _SHOWN_PROBLEMS} more"] if len(found) > _SHOWN_PROBLEMS else []
            messages.setdefault(host, []).extend(f"{name}: {text}" for text in [*found[:_SHOWN_PROBLEMS], *more])
    return archives


def _merge_files(roots: Mapping[str, Path], problems: _Messages) -> dict[str, tuple[str, Path]]:
    """Returns the files and links of all hosts by their names in the archive, each with its host."""
    files: dict[str, tuple[str, Path]] = {}
    directories: set[str] = set()
    for host, root in roots.items():
        for path in list_files(root, problems[host]):
            name = path.relative_to(root)
            above = {str(parent) for parent in name.parents}
            # An archive with a name in a file or link would be unpacked through the link.
            if str(name) in directories or not above.isdisjoint(files):
                problems[host].append(f"{name}: not packed: a directory of one host is a file or link of another")
                continue
            directories |= above
            files.setdefault(str(name), (host, path))
    return files


def _pack(target: Path, files: Mapping[str, tuple[str, Path]], roots: Mapping[str, Path], problems: _Messages) -> int:
    """Packs files by their names in the archive, and returns how many. Those that cannot be become messages."""
    room = Room(target.parent)
    count = 0
    with (
        target.open("wb") as out,
        ParallelGzip(out) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,  # type: ignore[call-overload]  # it needs only `write`
    ):
        for arcname, (host, path) in sorted(files.items()):
            if path.is_symlink():
                link = archive.gettarinfo(path, arcname)
                link.linkname = make_relative(link.linkname, str(path.parent), str(roots[host]))
                archive.addfile(link)
                count += 1
                continue
            try:
                file = os.fdopen(open_file(path), "rb")
                room.take(arcname, path.lstat().st_size)
            except (OSError, ShoalError) as error:
                problems.setdefault(host, []).append(f"{arcname}: not packed: {_describe(error)}")
                continue
            with file:
                archive.addfile(archive.gettarinfo(arcname=arcname, fileobj=file), file)
            count += 1
    return count


def list_files(root: Path, problems: list[str]) -> Iterator[Path]:
    """Yields the files below a directory, and links to others below it; append the other entries to `problems`."""
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        problems.append("not a directory")
        return
    pending = [root] if root.exists() else []
    left = count_steps()
    while pending:
        directory = pending.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            problems.append(f"{directory.relative_to(root)}: not packed: {_describe(error)}")
            continue
        is_deep = len(directory.relative_to(root).parts) >= MOST_DEPTH
        for entry in entries:
            path = directory / entry.name
            if entry.is_dir(follow_symlinks=False) and not is_deep:
                pending.append(path)
            elif problem := _find_problem(entry, root, is_deep, left):
                problems.append(f"{path.relative_to(root)}: not packed: {problem}")
            else:
                yield path


def _find_problem(entry: os.DirEntry[str], root: Path, is_deep: bool, left: Iterator[int]) -> str:
    """Returns why an entry cannot be packed; empty for a file, and for a link to something below `root`."""
    if entry.is_file(follow_symlinks=False):
        return ""
    if not entry.is_symlink():
        return f"in more than {MOST_DEPTH} directories" if is_deep else "neither a file nor a directory"
    path = Path(entry.path)
    if not stays_inside(path, root, by_its_name=True, left=left):
        return f"a link to {path.readlink()}, which is outside the directory"
    return "" if path.exists() else f"a link to {path.readlink()}, which leads to nothing"


def _describe(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def remove_tree(path: Path) -> None:
    """Removes a directory of a job; of a link only the link. One that a script has made too deep stays in part."""
    if path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        return

"""No file that a job leaves behind changes its success, keeps its other files from being packed, or fills the disk."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from rich.console import Console

from shoal import limits
from shoal.commands.common import format_json
from shoal.docker_client import archive, containers
from shoal.errors import DiskError
from shoal.jobs import job_log, results, summary
from shoal.jobs.job import FinishedJob, JobRequest
from shoal.jobs.job_log import JobLog

NOBODY = 65534
REPORTS = ("output/job.json", "output/data/metrics.json", "output/failure")


def make_tree(root: Path) -> Path:
    tree = root / "algo-1"
    (tree / "model").mkdir(parents=True)
    (tree / "model" / "weights").write_text("w")
    (tree / "output" / "data").mkdir(parents=True)
    return tree


def read(tree: Path) -> FinishedJob:
    return results.read_result("j", {"algo-1": 0}, tree.parent, {"algo-1": tree})


def show(result: FinishedJob) -> str:
    screen = io.StringIO()
    summary.print_summary(Console(file=screen, width=300), JobRequest(), result)
    return screen.getvalue()


def check_success(result: FinishedJob) -> str:
    """Check that a result is a success with its model, and can be shown and written as JSON; return the shown text."""
    assert result.exit_code == 0
    with tarfile.open(result.archives["model.tar.gz"]) as packed:
        assert "weights" in packed.getnames()
    plain = {name: value for name, value in vars(result).items() if name != "plan"}
    json.loads(format_json(plain), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    format_json(plain).encode()
    shown = show(result)
    shown.encode()
    assert "\x1b" not in shown
    return shown


def make_directory(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.symlink_to("/etc/shadow")


def make_circle(path: Path) -> None:
    path.symlink_to(path.name)


def make_endless_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


ODD = [make_directory, make_link, make_circle, make_endless_link, os.mkfifo, make_hole]


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_a_report_that_is_no_plain_file_becomes_a_message(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    tree = make_tree(tmp_path)
    make(tree / name)
    result = read(tree)
    shown = check_success(result)
    if make is not make_hole or name != "output/failure":  # of a failure, the beginning is read
        assert f"{name}: cannot be read: " in shown
    assert "root:" not in shown


@pytest.mark.parametrize("part", ["output", "output/data", "model"])
@pytest.mark.parametrize("make", [make_link, os.mkfifo, Path.touch], ids=["link", "pipe", "file"])
def test_a_part_that_is_no_directory_becomes_a_message(tmp_path: Path, part: str, make: Callable[[Path], None]) -> None:
    tree = make_tree(tmp_path)
    if part == "output":
        (tree / "output" / "data").rmdir()
    elif part == "model":
        (tree / part / "weights").unlink()
    (tree / part).rmdir()
    make(tree / part)
    result = read(tree)
    assert result.exit_code == 0
    assert ("model.tar.gz" in result.archives) == (part != "model")
    assert result.messages["algo-1"]
    show(result).encode()


NUMBERS = {
    "1e999": "1e999",
    "-1e999": "-1e999",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "1" + "0" * 5000: "1" + "0" * 5000,
    "1" + "0" * 400: "1" + "0" * 400,
    "0.1": 0.1,
    "12": 12,
}


@pytest.mark.parametrize("text", NUMBERS, ids=lambda text: text[:12])
def test_numbers_that_are_not_of_json_become_text(tmp_path: Path, text: str) -> None:
    tree = make_tree(tmp_path)
    (tree / "output/data/metrics.json").write_text(f'{{"test_accuracy": {text}, "images_per_second": 5}}')
    (tree / "output/job.json").write_text(f'{{"hosts": ["a"], "training_seconds": {text}}}')
    result = read(tree)
    assert result.metrics["test_accuracy"] == NUMBERS[text]
    check_success(result)


CONTENTS = [
    b'{"test_accuracy": "\\ud800\\udfff\\udc00"}',
    b'{"\\ud800": 1}',
    b'{"test_accuracy": 1, "test_accuracy": 2}',
    b'{"test_accuracy": "\xff\xfe"}',
    b"\xef\xbb\xbf{}",
    b"\0",
    b'{"a": ' + b"[" * 100_000,
    b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"test_accuracy": "\\u001b]52;c;eA==\\u0007\\nexit code  1"}',
    b'{"restarts": [{"number": {}, "at": [], "reason": "\\u001b[2J\\nshoal: done"}]}',
    b'{"hosts": [1, {}], "ranks": -5}',
    b'{"hosts": [null], "ranks": true}',
    b'{"plan": [], "restarts": null}',
    b'"' + b"x" * 100 + b'"',
    b"[" + b"1," * 3_000_000 + b"1]",
    b'{"test_accuracy": "' + b"x" * (16 << 20) + b'"}',
]


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("content", CONTENTS, ids=[str(each[:24]) for each in CONTENTS])
def test_reports_with_odd_content_end_no_command(tmp_path: Path, name: str, content: bytes) -> None:
    tree = make_tree(tmp_path)
    (tree / name).write_bytes(content)
    shown = check_success(read(tree))
    assert "\nexit code  1" not in shown
    assert "\nshoal: done" not in shown
    assert len(shown) < 200_000


def test_a_failure_looks_like_no_line_of_shoal(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    (tree / "output/failure").write_text(
        "x\n\nexit code     0\rshoal: ok\nalgo-2 | epoch 1\n\x1b]0;t\x07" + "y" * 100_000
    )
    shown = check_success(read(tree))
    assert "\nalgo-2 |" not in shown
    assert len([line for line in shown.splitlines() if line.startswith("exit code")]) == 1
    assert len(shown) < 90_000


KEPT = {
    "best": ("step-2/", "step-2/"),
    "latest": ("best", "best"),
    "by-name": ("{model}/step-2", "step-2"),
    "by-name-of-a-link": ("{model}/latest", "latest"),
    "all": ("{model}", "."),
    "step-2/above": ("../weights", "../weights"),
    "step-2/by-name": ("{model}/step-2/w", "w"),
}
"""Links in a model, by name: as the script makes them, and in its archive."""
LOST = {
    "out": "../output",
    "checkpoint": "/opt/ml/checkpoints/step-2",
    "far": "best/../../output",
    "passwords": "/etc/passwd",
    "by-name-and-out": "{model}/../output",
}


@pytest.mark.parametrize("is_docker", [True, False])
def test_links_in_a_model_stay_links(tmp_path: Path, is_docker: bool) -> None:
    """They lead to files of the model, wherever the archive is unpacked; others are named."""
    tree = make_tree(tmp_path)
    model = tree / "model"
    (model / "step-2").mkdir()
    (model / "step-2" / "w").write_text("2")
    inside = "/opt/ml/model" if is_docker else str(model)
    for name, link in {**{name: link for name, (link, _) in KEPT.items()}, **LOST}.items():
        (model / name).symlink_to(link.format(model=inside))
    omitted: list[str] = []
    if is_docker:
        with TemporaryFile() as packed:
            archive.pack_tree(model, "model", packed)
            remove_deep(model)
            omitted = list(archive.unpack_safely(packed, tree, "/opt/ml"))
    result = read(tree)
    check_success(result)
    with tarfile.open(result.archives["model.tar.gz"]) as found:
        links = {entry.name: entry.linkname for entry in found if entry.issym()}
        found.extractall(tmp_path / "unpacked", filter="data")
    assert links == {name: link for name, (_, link) in KEPT.items()}
    assert (tmp_path / "unpacked" / "by-name-of-a-link" / "above").read_text() == "w"
    reported = "\n".join([*omitted, result.messages.get("algo-1", "")])
    assert all(f"{name}: " in reported for name in LOST), reported


def test_names_of_several_hosts_are_not_unpacked_through_a_link(tmp_path: Path) -> None:
    trees = {host: make_tree(tmp_path / host) for host in ("algo-1", "algo-2", "algo-3")}
    for host, tree in trees.items():
        (tree / "model" / f"step-{host}").mkdir()
        (tree / "model" / f"step-{host}" / "w").write_text(host)
    (trees["algo-1"] / "model" / "best").symlink_to("step-algo-1")
    (trees["algo-2"] / "model" / "best").mkdir()
    (trees["algo-2"] / "model" / "best" / "w").write_text("2")
    (trees["algo-3"] / "model" / "step-algo-1").mkdir()
    (trees["algo-3"] / "model" / "step-algo-2").symlink_to("step-algo-1")
    result = results.read_result("job", {"algo-1": 0}, tmp_path, trees)
    with tarfile.open(result.archives["model.tar.gz"]) as packed:
        names = set(packed.getnames())
        assert packed.getmember("best").linkname == "step-algo-1"
    assert names == {"best", "weights", "step-algo-1/w", "step-algo-2/w", "step-algo-3/w"}
    for host, name in {"algo-2": "best/w", "algo-3": "step-algo-2"}.items():
        expected = f"{name}: not packed: a directory of one host is a file or link of another"
        assert expected in result.messages[host]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_report_may_be_a_link_to_a_file_of_the_job_only(tmp_path: Path, by_name: bool) -> None:
    tree = make_tree(tmp_path)
    data = tree / "output/data"
    (data / "epoch-3.json").write_text('{"test_accuracy": 0.5}')
    (data / "metrics.json").symlink_to(data / "epoch-3.json" if by_name else "epoch-3.json")
    assert read(tree).metrics == {"test_accuracy": 0.5}
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    result = read(tree)
    assert not result.metrics
    assert "metrics.json: cannot be read: a link that leaves the job's directory" in result.messages["algo-1"]


def make_files_that_cannot_be_packed(model: Path) -> None:
    os.mkfifo(model / "pipe")
    (model / "outside").symlink_to("/etc/passwd")
    (model / "circle").symlink_to("circle")
    (model / "inside").symlink_to("weights")
    Path(os.fsdecode(os.fsencode(model) + b"/\xff\xfe\n\x1b[2J")).write_text("odd name")
    (model / ("n" * 255)).write_text("long name")
    place = os.open(model, os.O_RDONLY)
    for _ in range(1500):  # longer than the longest path, and deeper than Python's recursion
        os.mkdir("d", dir_fd=place)
        place, above = os.open("d", os.O_RDONLY, dir_fd=place), place
        os.close(above)
    os.close(place)


def remove_deep(path: Path) -> None:
    subprocess.run(["rm", "-rf", path], check=True)


def test_odd_files_of_a_model_do_not_affect_the_others(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    try:
        make_files_that_cannot_be_packed(tree / "model")
        result = read(tree)
        shown = check_success(result)
        with tarfile.open(result.archives["model.tar.gz"]) as packed:
            names = packed.getnames()
            assert packed.getmember("inside").linkname == "weights"
        assert {"weights", "inside", "n" * 255, os.fsdecode(b"\xff\xfe\n\x1b[2J")} == set(names)
        for name in ("pipe", "outside", "circle"):
            assert f"model.tar.gz: {name}: not packed" in shown
        assert "more than 100 directories" in shown
        results.remove_tree(tree / "model")  # raises nothing
    finally:
        remove_deep(tree)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_file_without_permission_does_not_affect_the_others(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from shoal.jobs import results
import gzip
os.setgid(65534)
os.setuid(65534)
tree = Path(sys.argv[1], "algo-1")
for name in ("model", "output/data", "model/closed-directory"):
    (tree / name).mkdir(parents=True)
for name in ("model/weights", "model/closed", "output/job.json"):
    (tree / name).write_text("{}")
for name in ("model/closed", "model/closed-directory", "output/job.json"):
    (tree / name).chmod(0)
result = results.read_result("j", {"algo-1": 0}, tree.parent, {"algo-1": tree})
print(result.exit_code, *result.archives, result.messages)
(tree / "model/closed-directory").chmod(0o700)
"""
    place = tmp_path / "nobody"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    for above in (place, *place.parents[:4]):  # pytest's directories are of root alone
        if above != Path("/tmp"):
            above.chmod(above.stat().st_mode | 0o011)
    ended = subprocess.run([sys.executable, "-c", program, place], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("0 model.tar.gz "), ended.stderr
    assert ended.stdout.count("Permission denied") == 3


def pack(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as packed:
        for entry, content in entries:
            packed.addfile(entry, io.BytesIO(content))
    out.seek(0)
    return out


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


def unpack(source: io.BytesIO, target: Path, origin: str | None = None) -> list[str]:
    return list(archive.unpack_safely(source, target, origin))


class Endless(io.RawIOBase):
    """An archive with a first entry that has more bytes than any disk, all of them zeros."""

    def __init__(self, info: tarfile.TarInfo) -> None:
        self.rest = info.tobuf(tarfile.GNU_FORMAT)
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        self.count += size
        assert self.count < 1 << 30, "the content was read"
        found, self.rest = self.rest[:size], self.rest[size:]
        return found + bytes(size - len(found))


@pytest.mark.parametrize("size", [1 << 50, (1 << 63) - 1])
def test_a_file_that_no_disk_holds_is_refused_before_it_is_read(tmp_path: Path, size: int) -> None:
    with pytest.raises(DiskError, match=r"model/hole: it has [\d,]+ bytes, and .* left\. Fix: free space"):
        list(archive.unpack_safely(Endless(entry("model/hole", size=size)), tmp_path))  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_many_files_that_no_disk_holds_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 96 * limits.MIB})())
    content = bytes(20 * limits.MIB)
    source = pack(*((entry(f"model/{number}", size=len(content)), content) for number in range(4)))
    with pytest.raises(DiskError, match="model/3: it has"):
        unpack(source, tmp_path)


def test_many_small_files_do_not_fill_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a block: 10,000 files of a byte took 40 MB and counted as 10 kB."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 64 * limits.MIB})())
    room = limits.Room(tmp_path)
    with pytest.raises(DiskError, match=r"it has 1 bytes, and .* has [0-9,]+ bytes left\. Fix: free space"):
        for number in range(10_000):
            room.take(f"model/{number}", 1)
    assert 7_000 < number < 8_500


def test_holes_stay_holes(tmp_path: Path) -> None:
    content = b"a" + bytes(200 * limits.MIB) + b"b" + bytes(limits.MIB)
    assert unpack(pack((entry("model/hole", size=len(content)), content)), tmp_path) == []
    found = tmp_path / "model" / "hole"
    assert found.stat().st_size == len(content)
    assert found.stat().st_blocks * 512 < limits.MIB
    with found.open("rb") as file:
        assert file.read(2) == b"a\0"
        file.seek(200 * limits.MIB + 1)
        assert file.read(2) == b"b\0"


def test_names_of_one_file_take_its_space_once(tmp_path: Path) -> None:
    content = os.urandom(limits.MIB)
    hard = [(entry(f"model/hard-{number}", tarfile.LNKTYPE, "model/file"), b"") for number in range(500)]
    soft = [(entry(f"model/soft-{number}", tarfile.SYMTYPE, "file"), b"") for number in range(500)]
    assert unpack(pack((entry("model/file", size=len(content)), content), *hard, *soft), tmp_path) == []
    used = int(subprocess.run(["du", "-sm", tmp_path], capture_output=True, check=True).stdout.split()[0])
    assert used <= 2
    assert (tmp_path / "model/hard-7").read_bytes() == (tmp_path / "model/soft-499").read_bytes() == content


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.Room.__init__, "__defaults__", (10,))
    with pytest.raises(DiskError, match="more than 1,000,000 files and directories"):
        unpack(pack(*((entry(f"model/{number}"), b"") for number in range(11))), tmp_path)


def test_a_huge_header_is_not_read_into_memory(tmp_path: Path) -> None:
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        with pytest.raises(tarfile.ReadError, match="a header of 1,099,511,627,776 bytes"):
            list(archive.unpack_safely(Endless(entry("x", kind, size=1 << 40)), tmp_path))  # type: ignore[arg-type]


ODD_ENTRIES = {
    "a directory over a file": [entry("model/a"), entry("model/a", tarfile.DIRTYPE), entry("model/a/b")],
    "a file twice": [entry("model/a"), entry("model/a")],
    "a file over a directory": [entry("model/a", tarfile.DIRTYPE), entry("model/a")],
    "a name that is too long": [entry("model/" + "n" * 300)],
    "a deep name": [entry("model/" + "d/" * 2000 + "f")],
    "a hard link out": [entry("model/a", tarfile.LNKTYPE, "../../etc/passwd")],
    "an absolute hard link": [entry("model/a", tarfile.LNKTYPE, "/etc/passwd")],
    "a hard link to itself": [entry("model/a", tarfile.LNKTYPE, "model/a")],
    "a symlink out": [entry("model/a", tarfile.SYMTYPE, "../../../../../etc/passwd")],
    "a circle": [entry("model/a", tarfile.SYMTYPE, "b"), entry("model/b", tarfile.SYMTYPE, "a")],
    "a device": [entry("model/a", tarfile.CHRTYPE)],
}


@pytest.mark.parametrize("entries", ODD_ENTRIES.values(), ids=ODD_ENTRIES)
def test_an_odd_entry_is_left_out_and_the_others_stay(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    content = (entry("model/weights", size=1), b"w")
    skipped = unpack(pack(*((each, b"") for each in entries), content), tmp_path / "out")
    assert skipped
    assert (tmp_path / "out/model/weights").read_text() == "w"
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize(
    "links",
    [
        {"sib": "../checkpoints/secret"},
        {"sib": "../other/../checkpoints/secret"},
        {"dot": ".", "sib": "dot/../../checkpoints/secret"},
        {"a": "b", "b": "../checkpoints"},
        {"sib": "/opt/ml/checkpoints/../../secret"},
        {"sib": "/opt/ml/checkpoints-of-others/secret"},
    ],
)
def test_a_checkpoint_leads_to_nothing_beside_its_directory(tmp_path: Path, links: dict[str, str]) -> None:
    """The user's directory has another name than the one in the container, and `checkpoints` may be beside it."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "secret").write_text("of somebody else")
    entries = [(entry("checkpoints/secret"), b"")]
    entries += [(entry(f"checkpoints/{name}", tarfile.SYMTYPE, link), b"") for name, link in links.items()]
    skipped = unpack(pack(*entries), tmp_path / ".mine.shoal-new", "/opt/ml")
    assert any("outside the directory" in line for line in skipped)
    (tmp_path / ".mine.shoal-new" / "checkpoints").rename(tmp_path / "mine")
    for path in (tmp_path / "mine").rglob("*"):
        assert path.resolve().is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize("name", [".", "./", ""])
def test_a_link_without_a_name_is_left_out(tmp_path: Path, name: str) -> None:
    entries = [(entry(name, tarfile.SYMTYPE, "x"), b""), (entry("checkpoints/a"), b"")]
    assert unpack(pack(*entries), tmp_path / "new", origin="/checkpoints") != []
    assert (tmp_path / "new" / "checkpoints" / "a").is_file()


def test_a_file_that_does_not_fit_is_left_out_of_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path)
    (tree / "model" / "large").write_bytes(os.urandom(2 * limits.MIB))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": limits.MIB})())
    result = read(tree)
    check_success(result)
    assert "model.tar.gz: large: not packed: large: it has" in result.messages["algo-1"]


def test_a_full_disk_leaves_no_half_archive(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing fails in the middle."""
    tree = make_tree(tmp_path)
    (tree / "model" / "large").write_bytes(os.urandom(3 * limits.MIB))
    program = """
import resource, signal, sys
from pathlib import Path
from shoal.jobs import results
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
tree = Path(sys.argv[1])
result = results.read_result("j", {"algo-1": 0}, tree.parent, {"algo-1": tree})
print(result.exit_code, result.messages)
"""
    ended = subprocess.run([sys.executable, "-c", program, tree], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("0 {'algo-1': 'model.tar.gz: not written: File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["algo-1"]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    def chunks() -> Iterator[bytes]:
        yield from (b"x" * 65536 for _ in range(1024))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(len(line) for line in containers.split_lines(chunks()))
    assert count == 64 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


def test_a_line_that_comes_byte_by_byte_is_searched_once() -> None:
    """Each byte made the whole line be searched again: 300 kB took 93 s."""
    began = time.monotonic()
    assert list(containers.split_pieces([b"x"] * 200_000 + [b"\r", b"y", b"\n"])) == [
        ("x" * 200_000, True),
        ("y", False),
    ]
    assert time.monotonic() - began < 5


def test_the_log_of_a_job_has_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.jobs.job_log.MOST_LOG", 100_000)
    log = JobLog(path=tmp_path / "log.jsonl")
    for _ in range(100):
        log.add("algo-1", "x" * 10_000)
    assert (tmp_path / "log.jsonl").stat().st_size < 120_000
    assert "log.jsonl has no further lines: it has 100,000 bytes" in capsys.readouterr().err
    assert len(log.lines) == 100


def test_a_log_of_another_form_is_no_traceback(tmp_path: Path) -> None:
    lines = [
        "[1, 2]",
        '{"a": 1}',
        "x",
        "[1e300, 5, 6]",
        "[" * 100_000,
        '["a", "b", "c"]',
        "[NaN, 1, 2]",
        '[5, "a", "ok"]',
    ]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, "y" * (9 << 20), '[5, "a", "last"]', ""]))
    found = list(job_log.read_lines(tmp_path, job_log.LineFilter()))
    assert found == ["a | ok", "a | last"]

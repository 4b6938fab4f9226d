"""The source of a job: the files that `shoal run` and `shoal deploy kubernetes` copy, refuse and leave out."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.commands import deploy, jobs
from shoal.commands.common import app
from shoal.errors import UsageError
from shoal.jobs import job, source_files
from shoal.jobs.hosts.kubernetes import manifest
from shoal.jobs.job import LOCAL
from shoal.jobs.source_files import (
    SECRET_RULES,
    Selection,
    SourceFile,
    copy_source,
    describe_source,
    list_source,
    matches,
)
from shoal.jobs.store import JobRecord, open_job

NOBODY = 65534
assert deploy  # it adds its command to the application
PRIVATE_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "code"
    (directory / "lib").mkdir(parents=True)
    (directory / "train.py").write_text("print(1)\n")
    (directory / "lib" / "data.txt").write_text("data")
    return directory


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the user with a private file."""
    directory = tmp_path / "home" / ".ssh"
    directory.mkdir(parents=True)
    (directory / "config").write_text("private")
    return directory


def select(source: Path, **options: object) -> Selection:
    return replace(Selection(source, "train.py"), **options)  # type: ignore[arg-type]


def copy(selection: Selection, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    copy_source(selection, target)
    return target


def pack(selection: Selection, tmp_path: Path) -> Path:
    """The code as pods get it."""
    target = tmp_path / "unpacked"
    with tarfile.open(fileobj=io.BytesIO(manifest.pack_source(selection))) as packed:
        packed.extractall(target)
    return target


READERS: list[Callable[[Selection, Path], Path]] = [copy, pack]
"""The readers of `shoal run` and `shoal deploy kubernetes`."""


def list_names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}


@pytest.mark.parametrize("read", READERS)
def test_links_inside_the_source_stay_links(
    source: Path, tmp_path: Path, read: Callable[[Selection, Path], Path]
) -> None:
    links = {"latest": "lib", "lib/up": "../train.py", "lib/again": "up", "lost": "nowhere", "loop": "loop"}
    for name, target in links.items():
        (source / name).symlink_to(target)
    found = read(select(source), tmp_path)
    assert {name: str((found / name).readlink()) for name in links} == links
    assert list_names(found) == {"train.py", "lib/data.txt", *links}


def test_a_link_that_trains_archive_reader_refuses_is_made_simpler(source: Path, tmp_path: Path) -> None:
    links = {"lib/a": "../lib/../train.py", "lib/b": "./../lib/data.txt", "c": "lib/../lib/d", "lib/d": "data.txt"}
    for name, target in links.items():
        (source / name).symlink_to(target)
    (tmp_path / "sent.tar.gz").write_bytes(manifest.pack_source(select(source)))
    pod = tmp_path / "pod"
    pod.mkdir()
    unpack = "import sys; from shoal_toolkit.sidecars.unpack import *; extract(*sys.argv[1:], Limits(2**20))"
    words: list[str | Path] = [sys.executable, "-c", unpack, tmp_path / "sent.tar.gz", pod]
    subprocess.run(words, check=True)
    found = {name: str((pod / name).readlink()) for name in links}
    assert found == {"lib/a": "../train.py", "lib/b": "data.txt", "c": "lib/data.txt", "lib/d": "data.txt"}


def test_a_link_to_what_is_left_out_is_noted(source: Path) -> None:
    """Otherwise the script would find nothing there, and nobody would know why."""
    (source / "jobs" / "first").mkdir(parents=True)
    (source / "jobs" / "first" / "model.pt").touch()
    (source / "init.pt").symlink_to("jobs/first/model.pt")
    selection = select(source, elsewhere=(source / "jobs",))
    (note,) = describe_source(selection, list_source(selection))
    assert note.startswith("links to files that are left out of the job: init.pt -> jobs/first/model.pt. Fix: ")


@pytest.mark.parametrize(
    ("links", "name"),
    [
        ({"readme.txt": "/etc/shadow"}, "readme.txt"),
        ({"lib/readme.txt": "../../home/.ssh/config"}, "lib/readme.txt"),
        ({"cfg": "../home/.ssh"}, "cfg"),
        ({"back": "../code/train.py"}, "back"),
        ({"lib/top": "..", "through": "lib/top/../home"}, "through"),
        ({"lib/deep": "./deeper/../..//../home/.ssh"}, "lib/deep"),
        ({"null": "/dev/zero"}, "null"),
        ({"absolute": "{source}/train.py"}, "absolute"),
        ({"lost": "/nowhere"}, "lost"),
        ({"magic": "/proc/self/root/etc/shadow"}, "magic"),
        ({"up": "lib", "lib/out": "../..", "through": "up/out/home"}, "lib/out"),
    ],
)
@pytest.mark.parametrize("read", READERS)
def test_a_link_out_of_the_source_is_refused_by_name(
    source: Path,
    outside: Path,
    tmp_path: Path,
    read: Callable[[Selection, Path], Path],
    links: dict[str, str],
    name: str,
) -> None:
    for each, target in links.items():
        (source / each).symlink_to(target.format(source=source))
    with pytest.raises(UsageError, match=rf"{name}: a link to .*, outside the source. Fix: .* --follow-links"):
        read(select(source), tmp_path)
    copied = [path for path in tmp_path.rglob("*") if path.is_file() and path.is_relative_to(tmp_path / "copy")]
    assert "private" not in [path.read_text() for path in copied]


def test_the_script_and_the_source_themselves_may_not_be_links_out(source: Path, outside: Path, tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to("code")
    with pytest.raises(UsageError, match=rf"--source .*name: a link to {source}. Fix: name {source} itself"):
        job.JobRequest(tmp_path / "name", "train.py").check()
    with pytest.raises(UsageError, match=r"name: a link to"):
        list_source(select(tmp_path / "name"))
    assert [each.name for each in list_source(select(tmp_path / "name", follow_links=True)) if each.is_packed] == [
        "lib/data.txt",
        "train.py",
    ]
    (source / "train.py").unlink()
    (source / "train.py").symlink_to(outside / "config")
    with pytest.raises(UsageError, match=r"train.py: a link to .*, outside the source"):
        list_source(select(source))
    for entry_point in ("../home/.ssh/config", str(outside / "config")):
        with pytest.raises(UsageError, match=r"--entry-point .*: not in --source"):
            job.JobRequest(source, entry_point).check()


@pytest.mark.parametrize("read", READERS)
def test_links_are_followed_if_asked(source: Path, tmp_path: Path, read: Callable[[Selection, Path], Path]) -> None:
    shared = tmp_path / "shared"
    (shared / "deep").mkdir(parents=True)
    (shared / "a.py").write_text("a")
    (shared / "deep" / "b.py").symlink_to("../a.py")
    (shared / "deep" / "around").symlink_to("..")
    os.mkfifo(shared / "pipe")
    (source / "shared").symlink_to(shared)
    (source / "one.py").symlink_to("../shared/a.py")
    (source / "pipe").symlink_to(shared / "pipe")
    (source / "inside").symlink_to("train.py")
    found = read(select(source, follow_links=True), tmp_path)
    texts = {name: (found / name).read_text() for name in ("shared/a.py", "shared/deep/b.py", "one.py")}
    assert set(texts.values()) == {"a"}
    links = {name for name in list_names(found) if (found / name).is_symlink()}
    assert links == {"inside"}
    assert list_names(found) == {"train.py", "lib/data.txt", "inside", *texts}


def test_a_followed_link_does_not_bring_private_keys(source: Path, outside: Path) -> None:
    """The rules know a file by its own name too, not only by the one that the link gives it."""
    (outside / "id_ed25519").write_text(PRIVATE_KEY)
    (source / "cfg").symlink_to(outside)
    (source / "notes.txt").symlink_to(outside / "id_ed25519")
    selection = select(source, follow_links=True)
    files = list_source(selection)
    assert {each.name for each in files if each.is_packed} == {"train.py", "lib/data.txt"}
    (note,) = describe_source(selection, files)
    assert note.startswith("left out of the job, as they may hold secrets: cfg/config, cfg/id_ed25519, notes.txt.")


def test_special_files_are_left_out_with_a_note(source: Path, tmp_path: Path) -> None:
    """Also under the name of a file that would be opened for another reason."""
    for name in ("events", "service.json"):
        os.mkfifo(source / name)
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(source):
        bound.bind("agent")
    if os.geteuid() == 0:
        os.mknod(source / "zero", 0o20666, os.makedev(1, 5))
    else:
        os.mkfifo(source / "zero")
    selection = select(source)
    assert list_names(copy(selection, tmp_path)) == {"train.py", "lib/data.txt"}
    assert list_names(pack(selection, tmp_path)) == {"train.py", "lib/data.txt"}
    (note,) = describe_source(selection, list_source(selection))
    assert "agent (a socket), events (a FIFO), service.json (a FIFO), zero (a" in note


def test_a_link_that_is_exchanged_while_files_are_read_is_not_followed(
    source: Path, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a name and its opening, a file and a directory become links."""
    real = os.open

    def exchange(name: str | Path, flags: int, *args: object, dir_fd: int | None = None) -> int:
        if name in ("data.txt", "lib") and dir_fd is not None:
            os.rename(name, f"{name}.old", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.symlink(outside / "config" if name == "data.txt" else outside, name, dir_fd=dir_fd)
        return real(name, flags, *args, dir_fd=dir_fd)  # type: ignore[arg-type]

    for name in ("lib/data.txt", "lib"):
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", exchange)
            with pytest.raises(UsageError, match=rf"{name}: cannot be read|lib: cannot be read"):
                copy_source(select(source), tmp_path / f"copy-{Path(name).name}")
        if (source / "lib").is_symlink():
            (source / "lib").unlink()
            (source / "lib.old").rename(source / "lib")
        (source / "lib" / "data.txt").unlink(missing_ok=True)
        (source / "lib" / "data.txt").write_text("data")
        (source / "lib" / "data.txt.old").unlink(missing_ok=True)


@pytest.fixture
def swapping(source: Path, outside: Path) -> Iterator[None]:
    """Exchanges a directory and a link to a private one, without end."""
    (source / "sub").mkdir()
    (source / "sub" / "config").write_text("public")
    (source.parent / "link").symlink_to(outside)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            (source / "sub").rename(source.parent / "kept")
            (source.parent / "link").rename(source / "sub")
            (source / "sub").rename(source.parent / "link")
            (source.parent / "kept").rename(source / "sub")

    thread = threading.Thread(target=swap)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_a_race_never_copies_a_private_file(source: Path, tmp_path: Path, swapping: None) -> None:
    for number in range(300):
        target = tmp_path / f"copy-{number}"
        with contextlib.suppress(UsageError):
            copy_source(select(source), target)
        assert not (target / "sub" / "config").exists() or (target / "sub" / "config").read_text() == "public"


SECRETS = {
    ".env": "",
    ".env.production": "",
    "deploy/prod.env": "",
    "id_rsa": "",
    "keys/id_ed25519_work": "",
    "server.pem": PRIVATE_KEY,
    "TLS.KEY": "",
    "cert.p12": "",
    ".aws/credentials": "",
    ".ssh/known_hosts": "",
    ".netrc": "",
    ".pypirc": "",
    ".npmrc": "",
    ".git-credentials": "",
    ".docker/config.json": "",
    "account.json": '{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----"}',
    "credentials.json": "",
    ".kube/config": "",
    "kaggle.json": "",
    ".huggingface/token": "",
    "old/request.json": '{\n"image": "a:1",\n"engine": "docker",\n"request": {"environment": {"KEY": "x"}}}',
    "new/request.json": '{\n"request": {\n"source": "/code",\n"environment": {"KEY": "x"}}}',
    "job.yaml": "# Job digits, written by `shoal deploy kubernetes`. It contains secrets",
}
PUBLIC = {
    "id_rsa.pub": "ssh-rsa AAAA",
    ".env.example": "KEY=",
    "ca.pem": "-----BEGIN CERTIFICATE-----",
    "config.json": '{"private_key_bits": 2048}',
    "environment.yml": "",
    "keys.py": PRIVATE_KEY,
    "env.py": "",
    "request.json": '{"request": {"url": "http://localhost"}, "engine": "search"}',
    "tokenizer.json": '{"token": 1}',
}


@pytest.mark.parametrize("read", READERS)
def test_files_with_secrets_are_left_out(source: Path, tmp_path: Path, read: Callable[[Selection, Path], Path]) -> None:
    for name, content in (SECRETS | PUBLIC).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    selection = select(source)
    assert list_names(read(selection, tmp_path)) == {"train.py", "lib/data.txt", *PUBLIC}
    notes = describe_source(selection, list_source(selection))
    assert len(notes) == 1
    assert notes[0].endswith(f"and {len(SECRETS) - 8} more (--list-files). To include one: --include .aws/credentials")


def test_each_rule_is_tested() -> None:
    """A rule that nothing tests could be wrong without notice."""
    for rule in SECRET_RULES:
        if rule.content:
            assert any(matches(rule.pattern, name) for name in SECRETS), rule.pattern


def test_jobs_of_another_output_directory_are_left_out(source: Path, tmp_path: Path) -> None:
    """Their hyperparameters and logs may have secrets, not only their record."""
    request = job.JobRequest(source, "train.py", hyperparameters={"password": "x"}, output=source / "old")
    with open_job(JobRecord(replace(request, image="any:1", engine=LOCAL)), None, "first") as opened:
        job.write_tree(opened.directory / "algo-1", request, "first")
        opened.log.add("algo-1", "password x")
    shutil.copy(source / "old" / "first" / "request.json", source / "request.json")  # a record alone is left out too
    now = replace(request, output=tmp_path / "jobs")
    assert list_names(copy(now.selection, tmp_path)) == {"train.py", "lib/data.txt"}


def test_files_are_included_by_name_path_and_directory(source: Path) -> None:
    for name in (".env", "a/.env", ".aws/credentials", ".aws/config", "env/pyvenv.cfg", "env/bin.py"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).touch()

    def packed(*include: str) -> set[str]:
        found = {each.name for each in list_source(select(source, include=include)) if each.is_packed}
        return found - {"train.py", "lib/data.txt"}

    assert packed() == set()
    assert packed(".env") == {".env", "a/.env"}
    assert packed("a/.env") == {"a/.env"}
    assert packed("./.AWS/") == {".aws/credentials", ".aws/config"}
    assert packed("env") == {"env/pyvenv.cfg", "env/bin.py"}
    selection = select(source, include=(".evn", ".env"))
    notes = describe_source(selection, list_source(selection))
    assert notes[-1] == f"--include .evn: no such file in {source}"


def test_the_script_is_never_left_out_silently(source: Path) -> None:
    (source / "train.env").write_text("echo")
    (source / "bad").mkdir()
    (source / "bad" / "pyvenv.cfg").touch()
    (source / "bad" / "train.py").touch()
    assert "train.env" in [
        each.name for each in list_source(select(source, entry_point="./train.env")) if each.is_packed
    ]
    with pytest.raises(
        UsageError, match=r"--entry-point bad/train.py: bad is left out \(a virtual environment\). Fix: "
    ):
        list_source(select(source, entry_point="bad/train.py"))


def test_unreadable_files_are_errors_with_a_fix() -> None:
    """As another user than root, who reads everything, and outside pytest's directory, which that user cannot enter."""
    with tempfile.TemporaryDirectory() as directory:
        check_unreadable_file(Path(directory))


def check_unreadable_file(source: Path) -> None:
    source.chmod(0o755)
    (source / "closed.txt").touch(mode=0o000)
    program = (
        "import os, sys; from pathlib import Path; from shoal.jobs.source_files import *\n"
        f"if not os.geteuid(): os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try: list_source(Selection(Path(sys.argv[1])))\n"
        "except UsageError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, source], capture_output=True, text=True, check=False)
    assert f"--source {source}: closed.txt: cannot be read: Permission denied. Fix: make it readable" in ended.stdout


def test_names_cannot_write_to_the_terminal(source: Path) -> None:
    os.mkfifo(source / "x\x1b]52;c;aGk=\x07\n\u202e")
    (source / "\udcff.key").touch()
    selection = select(source)
    files = list_source(selection)
    shown = "".join(
        [*describe_source(selection, files), *(cell for row in source_files.list_rows(files) for cell in row)]
    )
    assert shown.isprintable()
    shown.encode()
    (source / "\x1b[2Jlink").symlink_to("/etc")
    with pytest.raises(UsageError) as caught:
        list_source(selection)
    assert str(caught.value).isprintable()


def test_directories_without_end_are_an_error(source: Path) -> None:
    place = os.open(source, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=place)
        inside = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inside
    os.close(place)
    with pytest.raises(UsageError, match="more than 100 directories deep"):
        list_source(select(source))
    subprocess.run(["rm", "-r", source / "d"], check=True)  # deeper than shutil goes


def test_large_sources_are_noted_and_too_large_ones_refused(source: Path, tmp_path: Path) -> None:
    """Sparse files count with the size that a copy would have."""
    with (source / "weights").open("wb") as file:
        file.truncate(3 * 2**30)
        selection = select(source)
        (note,) = describe_source(selection, list_source(selection))
        assert "3.0 GiB in 3 files are copied to each host. --channel NAME=DIR mounts data instead" in note
        file.truncate(2**43)
    with pytest.raises(UsageError, match=r"8192.0 GiB do not fit on the disk of .* Fix: move data"):
        copy_source(selection, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    with pytest.raises(UsageError, match="do not fit into a ConfigMap"):
        manifest.pack_source(selection)


def test_a_file_that_grows_is_copied_as_it_was(source: Path, tmp_path: Path) -> None:
    (source / "grows.log").write_text("x" * 10)
    for each in source_files.read_source(select(source)):
        if each.name == "grows.log":
            (source / "grows.log").write_text("x" * 1000)
            source_files.copy_file(each, tmp_path / "copied")
    assert (tmp_path / "copied").stat().st_size == 10


def test_setuid_programs_lose_their_rights(source: Path, tmp_path: Path) -> None:
    (source / "tool").write_text("#!/bin/sh\n")
    (source / "tool").chmod(0o4755)
    assert (copy(select(source), tmp_path) / "tool").stat().st_mode & 0o7777 == 0o755


def test_a_file_full_of_beginnings_of_a_rule_is_read_at_once() -> None:
    began = time.monotonic()
    for _ in range(20):
        assert not source_files._find_secret_rule(Selection(Path("code")), ["request.json"], b'"engine":' * 7_000)
    assert time.monotonic() - began < 5
    assert source_files._find_secret_rule(Selection(Path("code")), ["request.json"], b'{"request": {"source": 1')


def test_a_time_that_no_system_keeps_is_left_out(source: Path) -> None:
    """A file system in memory has such times."""
    source_files.copy_file(SourceFile("a", 0o644, seconds=1e19), source / "copy")
    assert (source / "copy").exists()


@pytest.mark.parametrize("words", [["run", "any:1"], ["deploy", "kubernetes", "any:1"]])
def test_files_are_listed_and_nothing_starts(source: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    (source / ".env").write_text("KEY=x")
    (source / "latest").symlink_to("lib")
    (source / "env").mkdir()
    (source / "env" / "pyvenv.cfg").touch()
    monkeypatch.chdir(source.parent)
    monkeypatch.setattr(jobs, "open_job", None)
    monkeypatch.setattr(manifest, "write_manifest", None)
    before = set(source.parent.iterdir())
    ended = CliRunner().invoke(app, [*words, "code/train.py", "--list-files"])
    assert ended.exit_code == 0, ended.output
    assert [line.split() for line in ended.stdout.splitlines()] == [
        ["path", "bytes"],
        [".env", "5", "left", "out:", "may", "hold", "a", "secret"],
        ["env", "left", "out:", "a", "virtual", "environment"],
        ["latest", "->", "lib"],
        ["lib/data.txt", "4"],
        ["train.py", "9"],
        ["3", "files,", "13", "bytes"],
    ]
    assert set(source.parent.iterdir()) == before
    ended = CliRunner().invoke(app, [*words, "code/train.py", "--list-files", "--include", ".env"])
    assert "4 files, 18 bytes" in ended.stdout


def test_pods_get_the_included_files(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / ".env").write_text("KEY=x")
    monkeypatch.chdir(source.parent)
    for options, names in (([], set()), (["--include", ".env"], {".env"})):
        words = ["deploy", "kubernetes", "me/any:1", "code/train.py", "-o", "-", *options]
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 0, ended.output
        line = next(line for line in ended.stdout.splitlines() if "sourcedir.tar.gz: " in line)
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(line.split('"')[1]))) as packed:
            assert set(packed.getnames()) == {"train.py", "lib/data.txt", *names}
        assert ("left out of the job, as they may hold secrets: .env" in ended.stderr) == (not options)


def test_a_link_to_a_virtual_environment_elsewhere_is_left_out(source: Path, tmp_path: Path) -> None:
    """It would be left out as a directory too. With --include, it is a link out of the source as any other."""
    environment = tmp_path / "environments" / "torch"
    environment.mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (source / ".venv").symlink_to(environment)
    files = {each.name: each for each in list_source(select(source))}
    assert files[".venv"].left_out == "a virtual environment"
    assert not list_names(copy(select(source), tmp_path)) & {".venv", ".venv/pyvenv.cfg"}
    with pytest.raises(UsageError, match=r"\.venv: a link to .*, outside the source"):
        list_source(select(source, include=(".venv",)))

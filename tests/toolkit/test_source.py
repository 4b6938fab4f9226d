"""The user's code: from a directory, an archive or one file. Refused archives, and failures that leave nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.code import locate_code
from shoal_toolkit.sidecars import unpack

from .conftest import TRAIN, Run, Tree, alive, clean_environment

MiB = 1 << 20
ROOM = unpack.Limits(MiB)
SCRIPT = b"import os; print(os.getcwd(), open('data/words').read())"


def entry(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


CODE = (entry("train.py", SCRIPT, mode=0o644), entry("data/words", b"hello", mode=0o644))


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return path


def unpacked(path: Path, directory: Path) -> Path:
    """Unpack as the child of `train` does."""
    directory.mkdir()
    unpack.unpack(str(path), str(directory))
    return directory / "code"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# Where code may be


@pytest.mark.parametrize("name", ["code.tar.gz", "code.tgz", "code.tar", "code.tar.xz", "code"])
def test_an_archive_becomes_the_code_directory(tree: Tree, run: Run, tmp_path: Path, name: str) -> None:
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}.get(Path(name).suffix, "w")
    path = archive(tmp_path / name, *CODE, mode=mode)
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=str(path), SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (0, f"{tree.code} hello\n"), done.err
    assert f"the code is from {path} (SAGEMAKER_SUBMIT_DIRECTORY), in {tree.code}" in done.err
    assert sorted(path.name for path in tree.base.iterdir()) == ["code", "input", "model", "output"]


def test_one_file_becomes_the_code_directory(tree: Tree, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("import os; print(os.listdir())")
    tree.hyperparameters(sagemaker_submit_directory=str(path), sagemaker_program="one.py")
    done = run()
    assert (done.code, done.out) == (0, "['one.py']\n"), done.err


def test_the_code_directory_may_be_missing(tree: Tree, run: Run, tmp_path: Path) -> None:
    tree.code.rmdir()
    path = archive(tmp_path / "code.tar.gz", *CODE)
    assert run(SAGEMAKER_SUBMIT_DIRECTORY=f"file://{path}", SAGEMAKER_PROGRAM="train.py").out == f"{tree.code} hello\n"


def test_the_code_directory_itself_may_be_named(tree: Tree, run: Run) -> None:
    """The SDK's local mode does, also if nothing is there."""
    tree.hyperparameters(sagemaker_submit_directory=f"{tree.code}/", sagemaker_program="train.py")
    assert run().code == 2
    assert f"{tree.code} is empty. Fix: mount or copy the code there" in tree.failure
    tree.code.rmdir()
    assert run("--", "--help", SAGEMAKER_PROGRAM="-m json.tool").code == 0


def test_the_variable_beats_the_hyperparameter_and_both_the_code_directory(tree: Tree, tmp_path: Path) -> None:
    def found(variable: str = "", hyperparameter: object = None) -> str:
        toolkit = {"sagemaker_submit_directory": hyperparameter}
        return locate_code({"SAGEMAKER_SUBMIT_DIRECTORY": variable}, toolkit, str(tree.code)).address

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    assert found(str(here), str(there)) == str(here)
    assert found("", str(there)) == str(there)
    assert found() == found("", "") == str(tree.code)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("/no/such/place", "does not exist in this container"),
        ("https://example.com/code.tar.gz", "not a supported code location"),
        ("s3://bucket", "does not name an object"),
        ("s3://bucket/", "does not name an object"),
        ("s3://bucket/prefix/", "does not name an object"),
        ("s3:///key", "does not name an object"),
    ],
)
def test_a_place_that_holds_no_code_is_refused(tree: Tree, run: Run, address: str, reason: str) -> None:
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="train.py")
    assert done.code == 2
    assert tree.failure.startswith(f"SAGEMAKER_SUBMIT_DIRECTORY is {address!r}, which ")
    assert reason in tree.failure
    assert "s3://bucket/key" in tree.failure


# What is there already


def test_the_users_files_in_the_code_directory_stay_as_they_are(tree: Tree, run: Run, tmp_path: Path) -> None:
    tree.script("print('old')")
    path = archive(tmp_path / "code.tar.gz", *CODE)
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=str(path), SAGEMAKER_PROGRAM="train.py", TMPDIR=str(tmp_path))
    directory, word = done.out.split()
    assert (done.code, word, Path(directory).parent.parent) == (0, "hello", tmp_path)
    assert contents(tree.code) == {"train.py": b"print('old')"}
    assert f"in {directory}: {tree.code} is not empty" in done.err


def test_a_code_directory_that_cannot_be_replaced(tree: Tree, run: Run, tmp_path: Path) -> None:
    tree.code.rmdir()
    tree.code.symlink_to(tmp_path / "nowhere")
    path = archive(tmp_path / "code.tar.gz", *CODE)
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=str(path), SAGEMAKER_PROGRAM="train.py")
    directory, word = done.out.split()
    assert (done.code, word) == (0, "hello")
    assert f"in {directory}: {tree.code} cannot be replaced (Not a directory)" in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_base_directory_that_is_read_only_but_for_the_output(tree: Tree, tmp_path: Path) -> None:
    path = archive(tmp_path / "code.tar.gz", *CODE)
    tree.code.rmdir()
    tree.output.mkdir()
    mounts = f"mount --bind {tree.base} {tree.base} && mount -o remount,ro,bind {tree.base}"
    mounts += "".join(f" && mount -t tmpfs none {tree.base}/{name}" for name in ("output", "model"))
    environment = clean_environment(
        SAGEMAKER_BASE_DIR=str(tree.base),
        SAGEMAKER_PROGRAM="train.py",
        SAGEMAKER_SUBMIT_DIRECTORY=str(path),
        TMPDIR=str(tmp_path),
    )
    command = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *TRAIN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" hello\n")
    assert done.stdout.startswith(str(tmp_path))
    assert "cannot be made (Read-only file system)" in done.stderr


# Allowed archives


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (entry("/etc/cron.d/x", b"x"), "its name leaves the code directory"),
        (entry("../x", b"x"), "its name leaves the code directory"),
        (entry("a/../../x", b"x"), "its name leaves the code directory"),
        (entry("a/..", type=tarfile.DIRTYPE), "its name leaves the code directory"),
        (entry("x", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a link to '/etc/passwd', outside"),
        (entry("x", type=tarfile.SYMTYPE, linkname="../x"), "a link to '../x', outside"),
        (entry("a/x", type=tarfile.SYMTYPE, linkname="../../x"), "a link to '../../x', outside"),
        (entry("x", type=tarfile.SYMTYPE, linkname="link/.."), "a link to 'link/..', outside"),
        (entry("x", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "a link to '/etc/passwd', outside"),
        (entry("x", type=tarfile.LNKTYPE, linkname="../x"), "a link to '../x', outside"),
        (entry("x", type=tarfile.LNKTYPE, linkname="link/words"), "a link to 'link/words', outside"),
        (entry("x", type=tarfile.LNKTYPE, linkname="later"), "which is not an earlier file of the archive"),
        (entry("link/x", b"x"), "its path goes through something that is not a directory"),
        (entry("train.py/x", b"x"), "its path goes through something that is not a directory"),
        (entry("data", b"x"), "it has the name of a directory"),
        (entry("data", type=tarfile.SYMTYPE, linkname="link"), "it has the name of a directory"),
        (entry("x", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
        (entry("x", type=tarfile.BLKTYPE), "a device"),
        (entry("x", type=tarfile.FIFOTYPE), "a FIFO"),
        (entry("x", type=b"Z"), "unknown kind"),
        (entry(".", b"x"), "it has no name"),
        (entry("x", b"0" * (MiB + 1)), "Allowed are 500,000 members of 1,048,576 bytes"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[0].name,
)
def test_a_member_that_reaches_outside_is_refused_by_name(
    tmp_path: Path, member: tuple[tarfile.TarInfo, bytes], reason: str
) -> None:
    link = entry("link", type=tarfile.SYMTYPE, linkname="data")
    path = archive(tmp_path / "code.tar.gz", *CODE, link, member)
    into = tmp_path / "into" / "code"
    into.mkdir(parents=True)
    with pytest.raises(ContractError) as refused:
        unpack.extract(str(path), str(into), ROOM)
    assert f"the member {member[0].name!r} is refused: " in str(refused.value)
    assert reason in str(refused.value)
    assert [path.name for path in into.parent.iterdir()] == ["code"]


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "code.tar.gz", *(entry(str(number)) for number in range(5)))
    with pytest.raises(ContractError, match="the member '3' is refused: up to it the archive has 4 members"):
        unpack.extract(str(path), str(tmp_path), unpack.Limits(MiB, 3))


def test_links_inside_and_modes_are_kept(tmp_path: Path) -> None:
    """Each link is followed by tar's own rules: a symbolic one from where it is, a hard one from the top."""
    members = [
        entry("./", type=tarfile.DIRTYPE, mode=0o755),
        entry("./bin/go", b"#!/bin/sh\n", mode=0o7777),
        entry("./bin/same", type=tarfile.LNKTYPE, linkname="./bin/go"),
        entry("lib/up", type=tarfile.SYMTYPE, linkname="../bin/go"),
        entry("lib/twice", b"first", mode=0o600),
        entry("lib/twice", b"second", mode=0o444),
        entry("lib/bin", type=tarfile.SYMTYPE, linkname="../bin"),
    ]
    code = unpacked(archive(tmp_path / "code.tar.gz", *members), tmp_path / "stage")
    assert contents(code)["lib/twice"] == b"second"
    assert (code / "lib/up").read_bytes() == (code / "lib/bin/same").read_bytes() == b"#!/bin/sh\n"
    modes = {name: stat.S_IMODE((code / name).stat().st_mode) for name in ("bin/go", "lib/twice")}
    assert modes == {"bin/go": 0o755, "lib/twice": 0o644}, "no set-user-ID, writable for the owner alone"


NAMES = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=4).map("/".join)
MEMBERS = st.one_of(
    st.tuples(NAMES, st.binary(max_size=9)).map(lambda pair: entry(*pair)),
    st.tuples(NAMES, st.sampled_from([tarfile.SYMTYPE, tarfile.LNKTYPE]), NAMES).map(
        lambda of: entry(of[0], type=of[1], linkname=of[2])
    ),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.lists(MEMBERS, max_size=6))
def test_nothing_of_any_archive_ends_outside(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "outside").write_text("untouched")
    into = base / "b" / "a"  # names as they are generated, so that a link up would find something
    into.mkdir(parents=True)
    path = archive(base / "code.tar", *members, mode="w")
    with suppress(ContractError, OSError):  # refused, or a link that leads in a circle
        unpack.extract(str(path), str(into), ROOM)
    assert sorted(path.name for path in base.iterdir()) == ["b", "code.tar", "outside"]
    assert [path.name for path in (base / "b").iterdir()] == ["a"]
    assert (base / "outside").read_text() == "untouched"
    for found in into.rglob("*"):
        assert Path(os.path.realpath(found)).is_relative_to(into)


# Archives that are not whole


def test_an_archive_that_is_cut_short_anywhere_is_no_archive(tmp_path: Path) -> None:
    whole = archive(tmp_path / "code.tar.gz", *CODE).read_bytes()
    for size in range(len(whole)):
        path = tmp_path / f"{size}.tar.gz"
        path.write_bytes(whole[:size])
        with pytest.raises(ContractError, match=f"{size}.tar.gz is damaged or cut short"):
            unpacked(path, tmp_path / f"stage-{size}")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0), bit=st.integers(0, 7))
def test_an_archive_with_a_wrong_bit_is_refused_or_the_same(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    base = tmp_path_factory.mktemp("bit")
    path = archive(base / "code.tar.gz", *CODE)
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] ^= 1 << bit
    path.write_bytes(raw)
    try:
        code = unpacked(path, base / "stage")
    except ContractError:
        return
    assert contents(code) == {"train.py": SCRIPT, "data/words": b"hello"}


def test_a_broken_header_is_not_the_end(tmp_path: Path) -> None:
    """Python's tarfile stops there, and says nothing."""
    path = archive(tmp_path / "code.tar", *CODE, mode="w")
    raw = bytearray(path.read_bytes())
    second = raw.rindex(b"data/words")
    raw[second : second + 4] = b"DATA"  # its checksum is wrong now
    path.write_bytes(raw)
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["train.py"]
    with pytest.raises(ContractError, match="there is no end mark after the last member"):
        unpacked(path, tmp_path / "stage")


def test_a_refused_archive_fails_the_job_and_leaves_nothing(tree: Tree, run: Run, tmp_path: Path) -> None:
    path = archive(tmp_path / "code.tar.gz", *CODE, entry("../evil", b"x"))
    done = run(SAGEMAKER_SUBMIT_DIRECTORY=str(path), SAGEMAKER_PROGRAM="train.py")
    assert done.code == 2
    assert tree.failure == (
        f"SAGEMAKER_SUBMIT_DIRECTORY: {path}: the member '../evil' is refused: its name leaves the code directory. "
        "Fix: make the archive without it."
    )
    assert tree.outcome() == {"failure"}
    assert sorted(path.name for path in tree.base.iterdir()) == ["code", "input", "model", "output"]
    assert list(tree.code.iterdir()) == []


# While it is fetched


def test_a_stop_while_the_code_is_fetched_ends_the_job_at_once(tree: Tree) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = clean_environment(
            SAGEMAKER_BASE_DIR=str(tree.base),
            SAGEMAKER_PROGRAM="train.py",
            SAGEMAKER_SUBMIT_DIRECTORY="s3://bucket/code.tar.gz",
            AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{silent.getsockname()[1]}",
            AWS_ACCESS_KEY_ID="x",
            AWS_SECRET_ACCESS_KEY="y",
            AWS_REGION="us-east-1",
        )
        train = subprocess.Popen(TRAIN, env=environment, stderr=subprocess.PIPE)
        silent.settimeout(30)
        connection, _ = silent.accept()  # the child asks, and nobody answers
        with connection:
            (child,) = Path(f"/proc/{train.pid}/task/{train.pid}/children").read_text().split()
            began = time.monotonic()
            train.send_signal(signal.SIGTERM)
            train.communicate(timeout=30)
            assert time.monotonic() - began < 20  # the request itself ends after 60 s
    assert train.returncode == 128 + signal.SIGTERM
    assert not alive(int(child))
    assert "was stopped" in tree.failure
    assert sorted(path.name for path in tree.base.iterdir()) == ["code", "input", "model", "output"]


@pytest.mark.parametrize("address", ["s3://bucket/code.tar.gz", "{archive}"])
def test_explain_fetches_nothing(tree: Tree, run: Run, tmp_path: Path, address: str) -> None:
    address = address.format(archive=archive(tmp_path / "code.tar.gz", *CODE))
    tree.hyperparameters(sagemaker_submit_directory=address, lr=0.1)
    done = run("--explain", "--json", SAGEMAKER_PROGRAM="go.sh", AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert done.code == 0, done.err
    explained = json.loads(done.out)
    assert explained["script"] == ["/bin/sh", "./go.sh", "--lr", "0.1"]
    assert explained["cwd"] == str(tree.code)
    assert (
        f"the code will be fetched from {address} (sagemaker_submit_directory); --explain does not fetch it"
        in (explained["notes"])
    )
    assert list(tree.code.iterdir()) == []
    assert not tree.output.exists()


@pytest.mark.parametrize("kind", [(lambda path: os.mkfifo(path)), (lambda path: path.symlink_to("nowhere"))])
def test_a_local_place_that_is_neither_file_nor_directory(
    tree: Tree, run: Run, tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    kind(tmp_path / "code.tar.gz")
    assert run(SAGEMAKER_SUBMIT_DIRECTORY=str(tmp_path / "code.tar.gz"), SAGEMAKER_PROGRAM="train.py").code == 2
    assert "does not exist in this container" in tree.failure

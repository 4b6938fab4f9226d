"""The result's files and exit code: on every disk, and never a success that is none."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import shoal_toolkit
from shoal_toolkit.errors import LaunchError
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.result.result import Result, describe_exit_code, prepare_output, write_result

from .conftest import TRAIN, Run, Tree, clean_environment


@pytest.mark.parametrize(
    ("code", "words"),
    [(137, "was killed by signal 9 (SIGKILL)"), (139, "was killed by signal 11 (SIGSEGV)"), (3, "exited with code 3")],
)
def test_signals_are_named(code: int, words: str) -> None:
    assert describe_exit_code(code) == words


@pytest.mark.parametrize(("code", "status"), [(0, 0), (255, 255), (256, 1), (512, 1), (-9, 1)])
def test_no_failure_becomes_0_on_its_way_through_the_kernel(tmp_path: Path, code: int, status: int) -> None:
    assert write_result(Paths(str(tmp_path)), Result(code, "bad" if code else ""), {}) == status
    assert (tmp_path / "output" / "success").exists() == (status == 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_stop_by_a_signal_is_named_in_the_message(number: signal.Signals, code: int) -> None:
    stopped = Result.from_signal(number)
    assert stopped.exit_code == code
    assert f"was stopped: `train` received {number.name}" in stopped.message


def test_an_earlier_result_is_removed_and_only_one_is_written(tmp_path: Path) -> None:
    """The stock toolkit keeps a stale failure file beside the success."""
    paths = Paths(str(tmp_path))
    write_result(paths, Result(3, "bad"), {})
    (tmp_path / "output" / "metrics.jsonl").touch()
    prepare_output(paths, {})
    assert write_result(paths, Result(0), {}) == 0
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["data", "job.json", "success"]
    assert (tmp_path / "model").is_dir()


def test_a_job_that_ends_before_it_begins_leaves_no_other_result(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    write_result(paths, Result(0), {})
    assert write_result(paths, Result(3, "bad"), {}) == 3
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["failure", "job.json"]


def test_a_success_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a file is in the way")
    paths = Paths(str(tmp_path))
    with pytest.raises(LaunchError, match=r"\(uid \d+\) must be able to write into"):
        prepare_output(paths, {})
    assert write_result(paths, Result(0), {}) == 1
    assert write_result(paths, Result(42, "x"), {}) == 42


IN_THE_WAY = {
    "pipes": "os.mkfifo",
    "pipes behind links": "lambda path: (os.mkfifo(path + '.pipe'), os.symlink(path + '.pipe', path))",
    "links to an endless file": "lambda path: os.symlink('/dev/zero', path)",
    "directories with files": "lambda path: os.makedirs(path + '/sub')",
    "links to nothing": "lambda path: os.symlink('/nonexistent/x', path)",
}


@pytest.mark.parametrize("make", IN_THE_WAY.values(), ids=IN_THE_WAY)
@pytest.mark.parametrize("code", [0, 3])
def test_files_that_a_script_leaves_in_the_way_change_no_result(tree: Tree, run: Run, make: str, code: int) -> None:
    names = ("failure", "failure.part", "success", "success.part", "job.json.part", "metrics.jsonl")
    script = f"import os, sys\nfor name in {names}: ({make})('../output/' + name)\nprint('loss=1')\nsys.exit({code})"
    tree.script(script)
    tree.hyperparameters(sagemaker_metric_definitions=[{"Name": "loss", "Regex": "loss=(.)"}])
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == code, done.err
    assert tree.outcome() == ({"failure"} if code else {"success"})
    assert tree.report["exit_code"] == code
    assert all((tree.output / name).is_file() for name in tree.outcome())


def test_a_script_that_removes_packages_of_train_stays_a_success(tree: Tree) -> None:
    """`train` imported its description of the plan at the end, for job.json."""
    copied = shutil.copytree(Path(shoal_toolkit.__file__).parent, tree.base / "packages" / "shoal_toolkit")
    tree.script("import shutil; shutil.rmtree('../packages'); print('trained')")
    variables = {"SAGEMAKER_PROGRAM": "train.py", "PYTHONPATH": str(copied.parent)}
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), **variables)
    done = subprocess.run(TRAIN, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert tree.outcome() == {"success"}
    assert "job.json has no plan: No module named 'shoal_toolkit" in done.stderr


FILL = """try:
    with open("../output/data/x", "wb", buffering=0) as file:
        while True: file.write(bytes(4096))
except OSError:
    """
IN_A_SMALL_FILE_SYSTEM = (
    'mount -t tmpfs -o size=16k tmpfs "$BASE/output"; "$@"; code=$?; cp -r "$BASE/output" "$BASE/kept"; exit $code'
)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and util-linux")
@pytest.mark.parametrize(
    ("then", "code", "says"),
    [
        ("raise", 1, "OSError: [Errno 28] No space left on device"),
        ("pass", 1, "The script succeeded, but that cannot be recorded"),
        ("raise SystemExit(42)", 42, "exited with code 42"),
    ],
)
def test_a_full_disk_loses_no_result(tree: Tree, then: str, code: int, says: str) -> None:
    """The script has filled it, to the last page: the failure file is written all the same, and the log has it too."""
    tree.script(FILL + then)
    tree.output.mkdir()
    environment = clean_environment(
        SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py", BASE=str(tree.base)
    )
    command = ["unshare", "--mount", "sh", "-c", IN_A_SMALL_FILE_SYSTEM, "sh", *TRAIN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    kept = tree.base / "kept"
    assert says in (kept / "failure").read_text()
    assert not (kept / "success").exists()
    assert "the result cannot be written" in done.stderr
    assert says in done.stderr


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the disk full whenever a file of this name is written."""
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize("name", ["failure", "job.json"])
def test_a_failure_that_cannot_be_written_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fill_disk(monkeypatch, name)
    assert write_result(Paths(str(tmp_path)), Result(3, "ValueError: boom\n\nthe end of the traceback"), {}) == 3
    assert "No space left on device" in (printed := capfd.readouterr().err)
    assert "the end of the traceback" in printed
    assert not (tmp_path / "output" / "success").exists()


def test_a_success_that_cannot_be_recorded_is_a_failure_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, "job.json")
    assert write_result(Paths(str(tmp_path)), Result(0), {}) == 1
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["failure"]
    assert "The script succeeded" in (tmp_path / "output" / "failure").read_text()


def test_no_secret_reaches_the_failure_file(tmp_path: Path) -> None:
    write_result(Paths(str(tmp_path)), Result(1, "ValueError: MY_TOKEN=swordfish"), {})
    assert (tmp_path / "output" / "failure").read_text() == "ValueError: MY_TOKEN=******"

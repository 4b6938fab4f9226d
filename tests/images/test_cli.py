"""The command line: exit codes and messages of each kind of failure."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import urllib3.exceptions

import shoal as package
from shoal import cli, docker_client
from shoal.commands import common, dependencies, images
from shoal.commands.common import app
from shoal.errors import DiskError, SpecError
from shoal.matrix import selectors
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, load
from shoal.sources import lock, render

from .command import shoal_command

for _module in cli.MODULES:
    importlib.import_module(f"shoal.commands.{_module}")

NO_ENGINE = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def shoal(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run([*shoal_command(), *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_list_works_without_docker(small: Project) -> None:
    """On any terminal and in a pipe, tags are whole, as you copy them."""
    for width in ("20", "200"):
        result = shoal("list", cwd=small.root, COLUMNS=width, **NO_ENGINE)
        assert result.returncode == 0
        lines = [line.split() for line in result.stdout.splitlines()]
        assert lines[0] == ["image", "built", "default", "for"]
        assert ["pytorch-training:2.0.1-gpu-py311-cu117-debian12", "?", "pytorch"] in lines
        assert [line[0] for line in lines[1:]] == [image.tag for image in load(small.buildspec).images]


def test_unknown_image_exits_2_and_lists_choices(small: Project) -> None:
    result = shoal("build", "pytroch", cwd=small.root)
    assert result.returncode == 2
    assert "Did you mean 'pytorch'" in result.stderr
    assert "tensorflow" in result.stderr


def test_globs_and_skips_choose_images(small: Project) -> None:
    result = shoal("list", "*-training-2.1*", "--skip", "*gpu*", "--skip", "*-devel", cwd=small.root, **NO_ENGINE)
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == [
        "pytorch-training:2.13.0-cpu-py311-debian12",
        "tensorflow-training:2.14.1-cpu-py311-debian12",
    ]


def test_docker_not_answering_exits_4_with_a_fix(small: Project) -> None:
    result = shoal("build", "pytorch", cwd=small.root, **NO_ENGINE)
    assert result.returncode == 4
    assert "No Docker Engine answers at unix:///nonexistent/docker.sock" in result.stderr
    assert "make train ENGINE=none" in result.stderr
    assert "Traceback" not in result.stderr


def test_outside_a_project_the_shipped_definitions_count_and_stay_unchanged(project: Project, tmp_path: Path) -> None:
    assert shoal("list", cwd=tmp_path, **NO_ENGINE).stdout == shoal("list", cwd=project.root, **NO_ENGINE).stdout
    for command in (["render"], ["lock", "pytorch"], ["lock", "--bases"]):
        result = shoal(*command, cwd=tmp_path)
        assert result.returncode == 2
        assert f"No buildspec.yml in {tmp_path} or above it" in result.stderr
        assert "Fix: shoal init DIRECTORY" in result.stderr


def test_init_refuses_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "file").touch()
    for directory, words in ((tmp_path, "has dockerfiles already"), (tmp_path / "file", "is a file")):
        result = shoal("init", str(directory), cwd=tmp_path)
        assert (result.returncode, words in result.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dockerfiles", "file"]


def test_a_malformed_buildspec_exits_3(tmp_path: Path) -> None:
    (tmp_path / "buildspec.yml").write_text("images: []\n")
    result = shoal("list", cwd=tmp_path)
    assert result.returncode == 3
    assert f"{tmp_path / 'buildspec.yml'}:1: mpi: required, but missing" in result.stderr


def test_a_stale_dockerfile_fails_the_check(small_copy: Project) -> None:
    assert shoal("render", "--check", cwd=small_copy.root).returncode == 0
    template = small_copy.templates / "base.j2"
    template.write_text(template.read_text().replace("mkdir -m 1777 /opt/ml", "mkdir -m 1777 /opt/ml /opt/new"))
    result = shoal("render", "--check", cwd=small_copy.root)
    assert result.returncode == 3
    assert "Fix: shoal render" in result.stderr


def test_a_stale_lock_fails_the_checks_without_docker(small_copy: Project) -> None:
    assert shoal("lock", "--check", cwd=small_copy.root, **NO_ENGINE).returncode == 0
    versions = small_copy.templates / "versions.yml"
    versions.write_text(versions.read_text().replace("accelerate]", "accelerate, einops]"))
    lacking = next((small_copy.templates / "requirements").glob("pytorch-training-2.0.1-*/mpi.txt"))
    lacking.unlink()
    for command in ("lock", "render"):
        result = shoal(command, "--check", cwd=small_copy.root, **NO_ENGINE)
        assert result.returncode == 3
        assert (
            "framework.txt:1: made for other requirements than are asked for now. Fix: shoal lock huggingface"
            in result.stderr
        )
        assert result.stderr.count(f"{lacking}: missing. Fix: shoal lock pytorch-training:2.0.1-") == 1
        assert shoal(command, "--check", "tensorflow", cwd=small_copy.root, **NO_ENGINE).returncode == 0
    document = json.loads(shoal("lock", "--check", "--json", cwd=small_copy.root, **NO_ENGINE).stdout)
    assert {each["state"] for each in document["rendered"]} == {"same"}
    assert not [each for each in document["locks"] if "huggingface-training:5" in each["tag"]]
    assert not lacking.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--channel", "training"], "--channel training: expected NAME=VALUE"),
        (["--distribution", "{mpi}"], "--distribution: {mpi} is not JSON: Expecting property name"),
        (["--distribution", "[]"], "--distribution: expected a JSON object, found []"),
        (
            ["--distribution", "torchrun"],
            """Fix: for torchrun, --distribution '{"torch_distributed": {"enabled": true}}'""",
        ),
        (["--hyperparameter", "a=1", "--hyperparameter", "a=2"], "--hyperparameter a: given twice"),
    ],
)
def test_wrong_options_of_run_exit_2(project: Project, arguments: list[str], words: str) -> None:
    base = ["run", "pytorch", "--source", "examples/digits", "--entry-point", "train.py"]
    result = shoal(*base, *arguments, cwd=project.root, **NO_ENGINE)
    assert result.returncode == 2
    assert words in result.stderr


DEFINED = "sagemaker_metric_definitions"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "IMAGE, SCRIPT: missing. Fix: shoal run IMAGE SCRIPT"),
        (("pytorch", "--", "train.py"), "SCRIPT: missing, and the image pytorch-training:2.0.1-gpu-"),
        (("any:1", "--local"), "SCRIPT: missing, and without Docker no image names one. Fix: shoal run IMAGE SCRIPT"),
        (("pytorch", "train.yp"), "train.yp: no such script. Did you mean 'train.py'?"),
        (("pytorch", "train.py", "3"), "3: an argument for the script, but not after `--`. Fix: shoal run IMAGE"),
        (("pytorch", "train.py", "--epochs", "3"), "--epochs: no such option. Fix: if it is for the script, put it"),
        (("pytorch", "train.py", "--nnode", "3"), "--nnode: no such option. Did you mean --nnodes? Fix: "),
        (("pytorch", "train.py", "--instance-count", "2"), "--instance-count: no such option. Fix: --hosts, or for an"),
        (("pytorch", "train.py", "--metric", "loss=["), "--metric loss=[: not a regular expression: unterminated"),
        (("pytorch", "train.py", "--metric", "a=b"), "--metric a=b: has no group for the value. Fix: put the"),
        (("pytorch", "train.py", "--hyperparameter", rf"{DEFINED}=['\.']"), f"{DEFINED}: not JSON: Expecting value"),
        (("pytorch", "train.py", "--metric", "a=(b)", "--hyperparameter", f"{DEFINED}=[]"), "both define metrics"),
        (("pytorch", "train.py", "--local", "--engine", "docker"), "--local and --engine docker: contradict"),
        (("pytorch", "train.py", "--watch", "--detach"), "--watch and --detach: contradict each other"),
        (("pytorch", "train.py", "--watch", "--name", "a", "--json"), "--watch and --name, --json: contradict"),
        (("pytorch", "train.py", "--watch", "--checkpoints", "c"), "--watch and --checkpoints: contradict"),
        (("any:1", "--watch"), "--watch: the image has the code, so no file can change. Fix: name SCRIPT"),
        (("pytorch", "--source", "x"), "--entry-point: missing"),
        (("--resume", "x"), "--resume x: no such job in jobs. Fix: use the name of a directory in jobs"),
        (("--resume", "", "--output", "."), "--resume : . has no request.json"),
    ],
)
def test_run_needs_a_new_job_or_an_earlier_one(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "train.py").touch()
    result = shoal("run", *arguments, cwd=tmp_path, **NO_ENGINE)
    assert result.returncode == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("option", "size"), [("--memory", "1g"), ("--shm-size", "2g"), ("--cpus", "0.5"), ("-v", ".:/data")]
)
def test_a_limit_without_a_container_is_refused(project: Project, option: str, size: str) -> None:
    base = ["run", "pytorch", "--source", "examples/digits", "--entry-point", "train.py", "--engine", "none"]
    result = shoal(*base, option, size, cwd=project.root, **NO_ENGINE)
    assert result.returncode == 2
    name = {"-v": "--volume"}.get(option, option)
    assert f"{name}: has no effect without a container. Fix: " in result.stderr


def test_version_is_printed(project: Project) -> None:
    assert shoal("--version", cwd=project.root).stdout == f"shoal {package.__version__}\n"


def test_too_little_disk_is_reported_with_both_numbers(small_disk: Path) -> None:
    with pytest.raises(DiskError, match=r"0\.0 GiB free, and this build needs 16 GiB"):
        docker_client.check_free_space(small_disk, 16)
    docker_client.check_free_space(small_disk, 0)


def test_full_disk_exits_5(project: Project, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    result = shoal("new", str(small_disk / "mine"), cwd=project.root)
    assert result.returncode == 5
    assert "No space left on device. Fix: free space" in result.stderr
    assert "Traceback" not in result.stderr


def test_unwritable_path_exits_13_with_path_and_reason(project: Project, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    result = shoal("new", str(small_disk / "mine"), cwd=project.root)
    assert result.returncode == 13
    assert result.stderr == (
        f"shoal: {small_disk}/mine: Read-only file system. Fix: choose a path on a writable file system\n"
    )


def test_a_file_where_a_directory_is_needed_exits_13(project: Project, tmp_path: Path) -> None:
    shutil.copy(project.buildspec, tmp_path)
    shutil.copytree(project.templates, tmp_path / "dockerfiles", ignore=shutil.ignore_patterns("rendered"))
    (tmp_path / "dockerfiles" / "rendered").write_text("")
    result = shoal("render", "pytorch", cwd=tmp_path)
    assert result.returncode == 13
    assert "dockerfiles/rendered" in result.stderr
    assert "Not a directory. Fix: choose a directory; part of this path is a file" in result.stderr


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that names no file and is not from Docker is a defect. Its text may be foreign."""

    def wrong() -> None:
        raise OSError("of no file\x1b[2J")

    monkeypatch.setattr(common, "app", lambda **_: wrong())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "OSError: of no file\ufffd[2J" in shown


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (requests.ConnectionError("gone"), 4, "A request to Docker failed: gone"),
        (urllib3.exceptions.ProtocolError("broken off"), 4, "A request to Docker failed: broken off"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 13, "/x: Permission denied. Fix: give"),
        (OSError(errno.EIO, "Input/output error", "/x"), 13, "/x: Input/output error"),
        (OSError(errno.ENOSPC, "No space left on device"), 5, "No space left on device. Fix: free"),
    ],
)
def test_each_failure_is_converted_to_a_message_and_exit_code(
    error: Exception, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(common, "app", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(f"shoal: {words}")


@pytest.mark.parametrize("command", ["sbom", "inspect"])
def test_output_file_is_checked_before_docker_is_used(project: Project, tmp_path: Path, command: str) -> None:
    result = shoal(command, "pytorch", "-o", str(tmp_path / "no" / "page"), cwd=project.root, **NO_ENGINE)
    assert result.returncode == 2
    assert f"{tmp_path / 'no'} is not a directory. Fix: mkdir -p" in result.stderr


def test_advisories_are_checked_before_docker_is_used(project: Project, tmp_path: Path) -> None:
    result = shoal("audit", "pytorch", "--advisories", str(tmp_path), cwd=project.root, **NO_ENGINE)
    assert result.returncode == 3
    assert f"{tmp_path}: cannot be read: Is a directory" in result.stderr


def test_engine_script_refuses_to_replace_docker_host(project: Project) -> None:
    command = [project.root / "scripts" / "engine.sh"]
    env = {**os.environ, **NO_ENGINE}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "DOCKER_HOST" in result.stderr
    assert "make train ENGINE=none" in result.stderr


def test_list_as_json_has_the_axes(small: Project) -> None:
    result = shoal("list", "huggingface", "pytorch", "--json", cwd=small.root, **NO_ENGINE)
    huggingface, pytorch = json.loads(result.stdout)
    assert pytorch == {
        "tag": "pytorch-training:2.0.1-gpu-py311-cu117-debian12",
        "framework": "pytorch",
        "version": "2.0.1",
        "device": "gpu",
        "python": "py311",
        "cuda": "cu117",
        "os": "debian12",
        "variant": "runtime",
        "extends": None,
        "default_for": ["pytorch"],
        "state": "unknown",
        "image_id": None,
    }
    assert huggingface["extends"] == pytorch["tag"]


def test_render_as_json_has_the_state_of_each_file(small_copy: Project) -> None:
    dockerfile = next((small_copy.templates / "rendered" / "pytorch-training").glob("2.0.1-gpu*-debian12/Dockerfile"))
    dockerfile.write_text("# changed\n")
    states = {}
    for state, arguments in (("stale", ["--check"]), ("written", []), ("same", [])):
        result = shoal("render", "pytorch", "--json", *arguments, cwd=small_copy.root)
        states[state] = {file["path"]: file["state"] for file in json.loads(result.stdout)}
        assert result.returncode == (3 if state == "stale" else 0)
    assert [found[str(dockerfile)] for found in states.values()] == ["stale", "written", "same"]
    assert set(states["same"].values()) == {"same"}
    assert len(states["same"]) == 4


def test_lock_as_json_has_the_locks_and_the_rendered_files(
    small_copy: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip does not resolve anything here: the committed lock is used."""
    (path,) = (small_copy.templates / "requirements").glob("pytorch-training-2.0.1-gpu*/mpi.txt")
    monkeypatch.setattr(lock, "lock_image", lambda *_: [path])
    monkeypatch.chdir(small_copy.root)
    dependencies.lock_images(["pytorch"], as_json=True)
    document = json.loads(capsys.readouterr().out)
    tag = "pytorch-training:2.0.1-gpu-py311-cu117-debian12"
    assert document["locks"] == [{"tag": tag, "path": str(path), "pins": 1}]
    assert {file["state"] for file in document["rendered"]} == {"same"}


def test_a_locked_image_is_rendered_in_all_variants(small_copy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = [*(small_copy.templates / "rendered" / "pytorch-training").glob("2.0.1-*/Dockerfile")]
    assert len(rendered) == 2
    for path in rendered:
        path.unlink()
    monkeypatch.setattr(lock, "lock_image", lambda *_: [])
    monkeypatch.chdir(small_copy.root)
    dependencies.lock_images(["pytorch"])
    assert all(path.exists() for path in rendered)


@pytest.mark.parametrize(
    ("words", "skip", "changes", "locked"),
    [
        (["pytorch-*-2.13.0-cpu-*"], [], True, ["pytorch-*-cpu-*", "huggingface-*-cpu-*"]),
        (["pytorch-*-2.13.0-cpu-*"], [], False, ["pytorch-*-cpu-*"]),
        (["pytorch-*-2.13.0-cpu-*-devel"], [], True, ["pytorch-*-cpu-*-devel", "huggingface-*-cpu-*"]),
        (["huggingface-*-cpu-*", "pytorch-*-2.13.0-cpu-*"], [], False, ["pytorch-*-cpu-*", "huggingface-*-cpu-*"]),
        (["pytorch-*-2.13.0-cpu-*"], ["huggingface-*"], True, ["pytorch-*-cpu-*"]),
        (["huggingface-*-cpu-*"], [], True, ["huggingface-*-cpu-*"]),
        (["tensorflow"], [], True, ["tensorflow-*-gpu-*"]),
    ],
)
def test_child_images_are_locked_after_their_parent(
    small_copy: Project,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    skip: list[str],
    changes: bool,
    locked: list[str],
) -> None:
    """A child's lock records its parent's files, so it is invalid if they change."""
    made: list[str] = []

    def resolve(here: Project, _: BuildSpec, image: ImageSpec) -> list[Path]:
        made.append(image.tag)
        path = here.lock_directory(image) / "framework.txt"
        path.write_text(path.read_text() + (f"new==1 --hash=sha256:{64 * '0'}\n" if changes else ""))
        return [path]

    monkeypatch.setattr(lock, "lock_image", resolve)
    monkeypatch.setattr(render, "write_files", lambda _: [])
    monkeypatch.chdir(small_copy.root)
    dependencies.lock_images(words, skip)
    assert len(made) == len(locked)
    assert all(selectors.matches(glob, tag) for glob, tag in zip(locked, made)), made


def test_parent_stays_locked_if_a_child_cannot_be_locked(small_copy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (rendered,) = (small_copy.templates / "rendered/pytorch-training").glob("2.13.0-cpu-*-debian12/Dockerfile")
    rendered.unlink()

    def resolve(_: Project, __: BuildSpec, image: ImageSpec) -> list[Path]:
        if image.extends:
            raise SpecError("pip cannot resolve it")
        return []

    monkeypatch.setattr(lock, "lock_image", resolve)
    monkeypatch.chdir(small_copy.root)
    with pytest.raises(SpecError, match="pip cannot resolve it"):
        dependencies.lock_images(["pytorch-*-2.13.0-cpu-*", "huggingface-*-cpu-*"])
    assert rendered.exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("build nosuch", 2),
        ("build pytorch --dry-run", 4),
        ("list nosuch", 2),
        ("stop nosuch", 2),
        ("inspect nosuch:1", 4),
        ("audit nosuch:1 --advisories missing.json", 3),
        ("lock pytorch", 2),
        ("run nosuch:1 train.py", 2),
    ],
)
def test_a_failure_before_the_result_is_a_document(tmp_path: Path, words: str, code: int) -> None:
    """An empty output would be fine for jq, which ends with 0."""
    result = shoal(*words.split(), "--json", cwd=tmp_path, **NO_ENGINE)
    assert result.returncode == code, result.stderr
    document = json.loads(result.stdout)
    assert document["exit_code"] == code
    assert document["error"] in result.stderr.removeprefix("shoal: ").replace("\n  ", "\n")
    assert shoal(*words.split(), cwd=tmp_path, **NO_ENGINE).stdout == ""


def test_build_that_cannot_begin_is_reported_as_json(small: Project) -> None:
    result = shoal("build", "pytorch", "--json", cwd=small.root, **NO_ENGINE)
    assert result.returncode == 4
    (image,) = json.loads(result.stdout)
    assert (image["tag"], image["state"]) == ("pytorch-training:2.0.1-gpu-py311-cu117-debian12", "not tried")
    assert "No Docker Engine answers" in image["error"]
    assert "No Docker Engine answers" in result.stderr


def complete(cwd: Path, *words: str) -> list[str]:
    """Return the completions of the last word for bash, which splits words at spaces and colons."""
    line = {"COMP_WORDS": "\n".join(["shoal", *words]), "COMP_CWORD": str(len(words))}
    result = shoal(cwd=cwd, _SHOAL_COMPLETE="complete_bash", **line)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split()


@pytest.mark.parametrize("command", [["build"], ["run"], ["list", "--skip"], ["build", "tensorflow"]])
def test_bash_is_offered_frameworks_and_tags(small: Project, command: list[str]) -> None:
    assert complete(small.root, *command, "pytorch") == [
        "pytorch",
        "pytorch-training:2.0.1-gpu-py311-cu117-debian12",
        "pytorch-training:2.0.1-gpu-py311-cu117-debian12-devel",
        "pytorch-training:2.13.0-cpu-py311-debian12",
        "pytorch-training:2.13.0-cpu-py311-debian12-devel",
    ]


@pytest.mark.parametrize("command", [["run"], ["list", "--skip"], ["build", "tensorflow-training", ":", "2.14.1-cpu"]])
def test_after_a_colon_bash_is_offered_the_part_that_it_replaces(small: Project, command: list[str]) -> None:
    offered = complete(small.root, *command, "pytorch-training", ":", "2.13.0-c")
    assert offered == ["2.13.0-cpu-py311-debian12", "2.13.0-cpu-py311-debian12-devel"]


def test_bash_counts_a_colon_at_the_end_as_an_argument(small: Project) -> None:
    offered = complete(small.root, "build", "tensorflow-training", ":")
    gpu = "2.14.1-gpu-py311-cu118-debian12"
    assert offered == [gpu, f"{gpu}-devel", "2.14.1-cpu-py311-debian12"]


def test_a_space_after_a_colon_begins_another_argument(small: Project) -> None:
    assert "pytorch" in complete(small.root, "build", "tensorflow-training", ":", "")


def test_a_tag_in_quotes_is_one_argument(small: Project) -> None:
    assert complete(small.root, "build", "'pytorch-training:2.0") == [
        "pytorch-training:2.0.1-gpu-py311-cu117-debian12",
        "pytorch-training:2.0.1-gpu-py311-cu117-debian12-devel",
    ]


@pytest.mark.parametrize(("shell", "colon"), [("zsh", "\\\\:"), ("fish", ":")])
def test_other_shells_are_offered_tags(small: Project, shell: str, colon: str) -> None:
    line = {"_TYPER_COMPLETE_ARGS": "shoal build pytorch-training", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = shoal(cwd=small.root, _SHOAL_COMPLETE=f"complete_{shell}", **line)
    assert f"pytorch-training{colon}2.0.1-gpu-py311-cu117-debian12" in result.stdout


def test_the_shipped_images_are_offered_outside_a_project_and_nothing_with_a_wrong_buildspec(tmp_path: Path) -> None:
    assert "pytorch" in complete(tmp_path, "build", "")
    (tmp_path / "buildspec.yml").write_text("images: []\n")
    assert complete(tmp_path, "build", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_shown(tmp_path: Path, shell: str) -> None:
    result = shoal("--show-completion", shell, cwd=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert result.returncode == 0
    assert f"_SHOAL_COMPLETE=complete_{shell}" in result.stdout


def test_make_refuses_an_unknown_framework(project: Project) -> None:
    command = ["make", "--no-print-directory", "image", "FRAMEWORK=tensorflwo"]
    result = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "Did you mean 'tensorflow'" in result.stderr


_INTERRUPTED = """
import contextlib, os, signal, sys
from shoal import cli

class Interrupt:
    def find_spec(self, name, *_):
        if name == "pydantic":
            with contextlib.suppress(KeyboardInterrupt):  # as its compiler of schemas does
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["shoal", "list"]
cli.main()
"""


def test_interrupt_during_imports_is_not_swallowed(project: Project) -> None:
    command = [sys.executable, "-c", _INTERRUPTED]
    ended = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_only_what_a_command_needs_is_loaded() -> None:
    """`IMAGE_COMMANDS` are the commands of the module `images`, which imports less than the others."""
    commands = {command.name: command.callback.__module__ for command in app.registered_commands if command.callback}
    own = {name for name, module in commands.items() if module == images.__name__}
    assert own == cli.IMAGE_COMMANDS
    code = "import sys, shoal.commands.images; print({'shoal.builds.bundle', 'shoal.jobs.job'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

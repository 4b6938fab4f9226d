"""The secret of a job of several hosts: its source, and the warning without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal_toolkit import redact
from shoal_toolkit.job.settings import take_settings, warn_without_secret

from . import loopback
from .conftest import Run, Tree
from .loopback import two_trees

NOTE = "this job has no secret. Anybody who can send from the address of "
SECRET = "0123456789abcdef"


def write_secret(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_variable_is_taken_out_of_the_environment() -> None:
    environ = {"SHOAL_JOB_SECRET": "s3cret"}
    settings, problem = take_settings(environ)
    assert (settings.secret, problem, environ) == ("s3cret", None, {})


def test_the_secret_may_be_in_a_file(tmp_path: Path) -> None:
    place = write_secret(tmp_path, f"{SECRET}\n")
    environ = {"SHOAL_JOB_SECRET_FILE": place}
    settings, problem = take_settings(environ)
    assert (settings.secret, problem, environ) == (SECRET, None, {})


@pytest.mark.parametrize(("mode", "refused"), [(0o400, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_file_that_every_user_can_read_or_write_is_refused(tmp_path: Path, mode: int, refused: bool) -> None:
    place = write_secret(tmp_path, SECRET, mode)
    settings, problem = take_settings({"SHOAL_JOB_SECRET_FILE": place})
    assert (settings.secret != SECRET) == refused
    assert (f"can be read by every user (mode {mode:04o}). Fix: chmod 600 {place}" in str(problem)) == refused


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        (None, {}, "cannot be read: No such file or directory"),
        ("\n", {}, "is empty"),
        ("x" * 5000, {}, "is too long"),
        ("x" * 15, {}, "is too short. It must hold the job's secret, the same on every host, of 16 to 4096 characters"),
        ("s3cret", {"SHOAL_JOB_SECRET": "s3cret"}, "are both set. Fix: set one of them"),
    ],
)
def test_a_file_without_a_secret_is_an_error_and_proves_nothing(
    tmp_path: Path, text: str | None, more: dict[str, str], says: str
) -> None:
    if text is not None:
        write_secret(tmp_path, text)
    settings, problem = take_settings({"SHOAL_JOB_SECRET_FILE": str(tmp_path / "secret"), **more})
    assert problem is not None
    assert says in str(problem)
    assert len(settings.secret) == 32, "an empty one would let everybody in"


def test_variables_are_set_from_files_of_secrets(tmp_path: Path) -> None:
    """Their content is masked from now on, under any name."""
    (tmp_path / "plain").write_text("un-guessable\n\n")
    environ = {"SHOAL_SECRET_VARIABLES": "PLAIN", "PLAIN_FILE": str(tmp_path / "plain")}
    _, problem = take_settings(environ)
    assert problem is None
    assert environ == {"PLAIN": "un-guessable\n", "PLAIN_FILE": str(tmp_path / "plain")}
    assert redact.mask_text("it is un-guessable\n") == "it is ******"


def test_a_secret_without_a_file_is_an_error(tmp_path: Path) -> None:
    for more in ({}, {"PLAIN_FILE": str(tmp_path / "missing")}):
        _, problem = take_settings({"SHOAL_SECRET_VARIABLES": "PLAIN", **more})
        assert "the file of the secret PLAIN, cannot be read: No such file or directory" in str(problem)


def test_nothing_that_train_writes_has_the_value_of_a_secret_variable(tree: Tree, run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("un-guessable\n")
    tree.script("import os, sys\nprint(os.environ['PLAIN'])\nraise ValueError(os.environ['PLAIN'])")
    given = {
        "SHOAL_SECRET_VARIABLES": "PLAIN",
        "PLAIN_FILE": str(tmp_path / "plain"),
        "SHOAL_REPORTED_VARIABLES": "PLAIN",
    }
    done = run(**given, SAGEMAKER_PROGRAM="train.py")
    assert done.out == "un-guessable\n"
    explained = [run("--explain", *more, **given).out for more in ((), ("--json",))]
    lines = [line for line in done.err.splitlines() if line.startswith("train: ")]
    assert "un-guessable" not in "\n".join([*lines, tree.failure, (tree.output / "job.json").read_text(), *explained])


def test_only_a_job_of_several_hosts_without_a_secret_is_warned() -> None:
    without, _ = take_settings({})
    having, _ = take_settings({"SHOAL_JOB_SECRET": "s3cret"})
    assert warn_without_secret(having, ["a", "b"]) == warn_without_secret(without, ["a"]) == ()
    (note,) = warn_without_secret(without, ["a", "b"])
    assert note.startswith(f"{NOTE}a, or run a process there, can run programs on the other hosts.")
    assert "Fix: set SHOAL_JOB_SECRET to the same random text on every host" in note
    assert "SHOAL_JOB_SECRET_FILE" in note


def test_ranks_of_all_hosts_have_a_key_that_does_not_reveal_the_secret(tmp_path: Path) -> None:
    trees = two_trees(tmp_path)
    for tree in trees:
        tree.script("import os; print(sorted((n, v) for n, v in os.environ.items() if 'SECRET' in n))")
    with loopback.started(trees, SHOAL_JOB_SECRET="s3cret") as trains:
        one, other = (train.communicate(timeout=30)[0] for train in trains)
    assert one == other
    ((name, key),) = eval(one)
    assert name == "SMDDP_JOB_SECRET"
    assert len(bytes.fromhex(key)) == 32


@pytest.mark.parametrize("secret", [False, True])
def test_the_warning_is_in_the_log_of_every_host_and_the_job_runs(tmp_path: Path, secret: bool) -> None:
    trees = two_trees(tmp_path)
    for tree in trees:
        tree.script("print('trained')")
    place = write_secret(tmp_path, SECRET) if secret else ""
    with loopback.started(trees, SHOAL_JOB_SECRET_FILE=place) as trains:
        output = [train.communicate(timeout=30) for train in trains]
    assert [out for out, _ in output] == ["trained\n"] * 2
    assert [NOTE in err for _, err in output] == [not secret] * 2


@pytest.mark.parametrize("secret", [{}, {"SHOAL_JOB_SECRET": "s3cret"}])
def test_the_warning_is_in_the_explanation(tree: Tree, run: Run, secret: dict[str, str]) -> None:
    tree.script("")
    tree.hosts("algo-1", "algo-1", "algo-2")
    output = run("--explain", SAGEMAKER_PROGRAM="train.py", **secret)
    notes = json.loads(run("--explain", "--json", SAGEMAKER_PROGRAM="train.py", **secret).out)["notes"]
    assert (f"why          {NOTE}algo-1" in output.out) == (not secret)
    assert any(note.startswith(NOTE) for note in notes) == (not secret)

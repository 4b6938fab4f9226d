"""Variables and secrets of a job: where they come from, and that nothing that stays has their values."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.commands import deploy, jobs
from shoal.commands.common import app
from shoal.errors import UsageError
from shoal.jobs.job import JobRequest
from shoal.jobs.store import load_record
from shoal.jobs.variables import Secret, looks_secret, read_env_file, read_environment

assert deploy  # it adds its command to the application
SHOAL = Path(sys.executable).with_name("shoal")
VALUE = "s3cr3t-value-of-a-test"
SCRIPT = """\
import os, pathlib, sys, time
file = pathlib.Path(os.environ["MY_TOKEN_FILE"])
print(file.stat().st_mode & 0o7777 == 0o400, file.read_text() == pathlib.Path(sys.argv[1]).read_text(), flush=True)
print([name in os.environ for name in ("MY_TOKEN", "PLAIN", "FROM_FILE", "SHOAL_SECRET_VARIABLES")], flush=True)
print("same", os.environ["MY_TOKEN"] + "\\n" == file.read_text(), os.environ["PLAIN"] == os.environ["FROM_FILE"])
saved = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints", "saved")
if not saved.exists():
    saved.touch()
    sys.exit(3)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    return tmp_path


def find(directory: Path, value: str) -> list[Path]:
    """The files that have a value, in any encoding that a job uses."""
    return [path for path in directory.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]


def test_values_of_a_job_without_docker_stay_in_no_file(here: Path) -> None:
    """Neither record, log, report, plan nor result has them. A resumed job takes them again or names one."""
    (here / "token").write_text(VALUE + "\n")
    (here / "vars").write_text(f"FROM_FILE={VALUE}2\n")
    words = ["--local", "--name", "j", "-e", "PLAIN", "--env-file", "vars", "--secret", "MY_TOKEN=token,type=env"]
    env = {**os.environ, "PLAIN": VALUE + "2"}

    def run(*words: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        changed = {name: value for name, value in {**env, **changes}.items() if value is not None}
        return subprocess.run([SHOAL, "run", *words], env=changed, capture_output=True, text=True, check=False)

    ended = run("any:1", "code/train.py", *words, "--", str(here / "token"))
    assert ended.returncode == 3, ended.stdout + ended.stderr
    for line in ("True True", "[True, True, True, False]", "same True True"):
        assert line in ended.stdout
    directory = here / "jobs" / "j"
    assert find(directory, VALUE) == []
    assert VALUE not in ended.stdout + ended.stderr
    assert not (directory / ".secrets").exists()
    ended = run("--resume", "j", PLAIN=None)
    assert "--resume j: the job took PLAIN from the environment: the environment has no variable PLAIN" in ended.stderr
    (here / "token").rename(here / "moved")
    ended = run("--resume", "j")
    assert f"--secret MY_TOKEN={here / 'token'}: cannot be read: No such file or directory. Fix: " in ended.stderr
    (here / "vars").write_text("OTHER=1\n")
    ended = run("--resume", "j", "--secret", "MY_TOKEN=moved,type=env")
    assert f"--resume j: {here / 'vars'} has no variable FROM_FILE now" in ended.stderr
    again = ["--secret", "MY_TOKEN=moved,type=env", "-e", f"FROM_FILE={VALUE}2"]
    ended = run("--resume", "j", *again, "--", str(here / "moved"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert load_record(directory / "request.json", "j").request.environment == {"FROM_FILE": VALUE + "2"}


def test_a_detached_job_gets_its_secrets_but_no_process_shows_them(here: Path) -> None:
    """Their values are in the memory of its command, and in no list of arguments."""
    (here / "code" / "train.py").write_text(
        "import os, pathlib\n"
        "lines = [path.read_bytes() for path in pathlib.Path('/proc').glob('[0-9]*/cmdline')]\n"
        "print('seen', any(os.environ['MY_TOKEN'].encode() in line for line in lines), len(os.environ['MY_TOKEN']))\n"
    )
    words = ["run", "any:1", "code/train.py", "--local", "--detach", "--name", "j", "--secret", "MY_TOKEN,type=env"]
    env = {**os.environ, "MY_TOKEN": VALUE}
    started = subprocess.run([SHOAL, *words], env=env, capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr
    logs = subprocess.run([SHOAL, "logs", "--follow", "j"], capture_output=True, text=True, check=False)
    assert f"seen False {len(VALUE)}" in logs.stdout
    assert find(here / "jobs", VALUE) == []


@pytest.fixture
def open_to_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same outside pytest's directory, which other users cannot enter."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        shutil.copytree(here / "code", Path(directory, "code"))
        monkeypatch.chdir(directory)
        yield Path(directory)


def test_other_users_cannot_read_a_job(open_to_others: Path) -> None:
    """With the usual umask of 022, while it runs: hyperparameters, variables, secrets, code and results."""
    here = open_to_others
    (here / "code" / "train.py").write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(os.environ['SM_MODEL_DIR'], 'model.pt').write_text('weights')\n"
        "if not os.geteuid(): os.setgid(65534); os.setuid(65534)\n"
        "seen = []\n"
        "for directory, _, names in os.walk(sys.argv[1]):\n"
        "    seen += [name for name in names if os.access(os.path.join(directory, name), os.R_OK)]\n"
        "print('seen', seen)\n"
    )
    words = ["any:1", "code/train.py", "--local", "--name", "j", "--hyperparameter", "a=b", "-e", "MY_TOKEN=x"]
    command = f'umask 022 && exec "{SHOAL}" run {" ".join(words)} -- "{here / "jobs"}"'
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert "seen []" in ended.stdout, ended.stdout + ended.stderr
    directory = here / "jobs" / "j"
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*")}
    for name in ("hyperparameters.json", "resourceconfig.json", "inputdataconfig.json", "request.json", "log.jsonl"):
        assert modes[name] == 0o600, name
    assert [directory.stat().st_mode & 0o777, modes["algo-1"]] == [0o700, 0o700]
    assert modes["model.tar.gz"] & 0o400


ENV_FILE = """\
# a comment
PLAIN=a b = c
  INDENTED="quoted"
EMPTY=

DOS=x\r
TAKEN
PLAIN=last
"""


def test_files_of_variables_are_as_in_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN", "from outside")
    path = tmp_path / "vars"
    path.write_bytes(b"\xef\xbb\xbf" + ENV_FILE.encode())
    expected = {"PLAIN": "last", "INDENTED": '"quoted"', "EMPTY": "", "DOS": "x", "TAKEN": "from outside"}
    assert read_env_file(path) == expected
    values, taken = read_environment(["PLAIN=given", "TAKEN"], [path])
    assert values == {**expected, "PLAIN": "given"}
    assert taken == {"INDENTED": path, "EMPTY": path, "DOS": path, "TAKEN": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-e", "MISSING"], "--env MISSING: the environment has no variable MISSING. Fix: export MISSING, or give"),
        (["-e", "A B=1"], "--env 'A B': a name has only letters"),
        (["-e", "=1"], "--env '': a name has only letters"),
        (["-e", "A=1", "-e", "A=2"], "--env A: given twice"),
        (["--env-file", "bad"], "--env-file bad, line 3: expected NAME=VALUE, or NAME. Fix: "),
        (["--env-file", "missing"], "--env-file missing: cannot be read: No such file or directory. Fix: "),
        (["--env-file", "binary"], "--env-file binary: byte 3 is not UTF-8. Fix: "),
        (["--env-file", "unset"], "--env-file unset, line 1: the environment has no variable MISSING"),
        (["--secret", "MISSING"], "--secret MISSING: the environment has no variable MISSING. Fix: export it, or"),
        (["--secret", "../../etc/x=bad"], "--secret '../../etc/x': a name has only letters"),
        (["--secret", "A="], "--secret A=: nothing after '='. Fix: --secret A, or --secret A=FILE"),
        (["--secret", "A=/dev/zero"], "--secret A=/dev/zero: not a file. Fix: "),
        (["--secret", "A=large"], "--secret A=large: more than 500000 bytes. Fix: "),
        (["--secret", "A=binary,type=env"], "--secret A: not UTF-8. Fix: leave out ,type=env"),
        (["--secret", "A=zero,type=env"], "--secret A: has a NUL character. Fix: leave out ,type=env"),
        (["--secret", "A=bad", "--secret", "A=bad"], "--secret A: given twice"),
        (["--secret", "SHOAL_JOB_SECRET=bad"], "--secret SHOAL_JOB_SECRET: a variable of the platform. Fix: "),
        (["--secret", "A=bad,type=env", "-e", "A=1"], "--secret A and --env A: both set it. Fix: leave out one"),
    ],
)
def test_wrong_variables_and_secrets_are_errors(here: Path, words: list[str], message: str) -> None:
    """The line of a file is not in the error, as it may be the secret."""
    (here / "bad").write_text("A=1\n\nhunter2 hunter2=x\n")
    (here / "binary").write_bytes(b"A=\xff\n")
    (here / "zero").write_bytes(b"A\0")
    (here / "unset").write_text("MISSING\n")
    (here / "large").write_bytes(b"x" * 500_001)
    ended = CliRunner().invoke(app, ["run", "any:1", "code/train.py", "--local", *words])
    assert isinstance(ended.exception, UsageError), ended.output
    assert message in str(ended.exception)
    assert "hunter2" not in str(ended.exception)
    assert not (here / "jobs").exists()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "hf_short", True),
        ("AWS_SECRET_ACCESS_KEY", "abc", True),
        ("password", "hunter2", True),
        ("dbPassword", "x", True),
        ("api-key", "x", True),
        ("NOTES", "ghp_" + "a" * 36, True),
        ("URL", "https://me:pw@example.org", True),
        ("pad_token", "<pad>", False),
        ("max_tokens", "512", False),
        ("PASSWORD_FILE", "/run/secrets/x", False),
        ("use_auth_token", "true", False),
        ("author", "me", False),
        ("epochs", "3", False),
        ("URL", "https://example.org", False),
    ],
)
def test_values_that_look_like_secrets(name: str, value: str, expected: bool) -> None:
    assert looks_secret(name, value) == expected


def test_secrets_on_the_command_line_are_warned_of(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "open_job", None)
    words = ["-e", "HF_TOKEN=abc", "-e", "PATH", "--hyperparameter", "password=x", "--hyperparameter", "lr=0.1"]
    words += ["--", "--api-key", "x", "--epochs", "3", "--db-password=y", "--token"]
    shown = CliRunner().invoke(app, ["run", "any:1", "code/train.py", "--local", *words]).stderr
    assert [line.split(":")[:3] for line in shown.splitlines()] == [
        ["shoal", " warning", " --env HF_TOKEN"],
        ["shoal", " warning", " --hyperparameter password"],
        ["shoal", " warning", " argument --api-key"],
        ["shoal", " warning", " argument --db-password"],
    ]
    assert "let the script read a variable: -e API_KEY or --secret API_KEY" in shown
    assert "Fix: -e HF_TOKEN or --secret HF_TOKEN with a variable of your environment, or --env-file FILE" in shown
    words = ["-e", "HF_TOKEN=abc", "-o", "job.yaml"]
    shown = CliRunner().invoke(app, ["deploy", "kubernetes", "me/any:1", "code/train.py", *words]).stderr
    assert "warning: --env HF_TOKEN: looks like a secret" in shown


def test_a_request_has_no_value_of_a_secret(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could reach a report, a traceback or a document of --json."""
    monkeypatch.setenv("MY_TOKEN", VALUE)
    request = JobRequest(Path("code"), "train.py", secrets=(Secret("MY_TOKEN"),))
    request.check()
    assert VALUE not in repr(request)

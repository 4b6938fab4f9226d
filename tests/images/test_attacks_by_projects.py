"""Attacks with files that somebody else packed, or put in the place of a job: each command ends, and says why.

An archive of a project, and a shared directory, may have pipes, endless and huge files, and links to nothing.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shoal import trust
from shoal.builds import bundle
from shoal.commands import common
from shoal.docker_client import archive
from shoal.errors import SpecError, UsageError
from shoal.jobs import checkpoints, job_log, results, running, source_files, store
from shoal.jobs.job import LOCAL, JobRequest
from shoal.jobs.store import JobRecord, open_job
from shoal.limits import MOST_GIT, MOST_LOCK
from shoal.matrix import project as projects
from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal.report import output_files
from shoal.sources import lock, provenance, render
from shoal.sources.steps import StepCollector

from ..waiting import error_in_time
from .command import shoal_command

STRANGER = 65534
SECONDS, MEMORY = 30, 3 << 30
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user; CI runs as root")


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who trusts nothing by name, and has no job and no cache."""
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "home" / name))
    monkeypatch.delenv("SUDO_UID", raising=False)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 << 30)


def nested(path: Path) -> None:
    path.write_text("[" * 200_000)


def shoal(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with little memory. It must end soon, and without a traceback."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    ended = subprocess.run(
        [*shoal_command(), *words],
        cwd=directory,
        env={**os.environ, "DOCKER_HOST": "unix:///nonexistent/docker.sock"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        preexec_fn=limit,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


def write_job(directory: Path, hosts: int = 1) -> Path:
    """Write a job as a stranger would."""
    directory.mkdir(parents=True)
    document = {"request": {"image": "image:1", "hosts": hosts}, "exit_code": 1, "state": "failed"}
    (directory / store.RECORD).write_text(json.dumps(document))
    return directory


@needs_root
@pytest.mark.parametrize("make", [pipe, endless, huge])
@pytest.mark.parametrize("words", [("ps",), ("logs", "digits"), ("run", "image:1", "train.py", "--name", "digits")])
def test_a_stranger_in_the_place_of_a_removed_job_stops_no_command(
    tmp_path: Path, make: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    """As in /tmp, where a job was, and somebody else makes the directory again: all commands look at each job."""
    place = tmp_path / "removed" / "digits"
    place.mkdir(parents=True)
    make(place / store.RECORD)
    os.chown(place, STRANGER, STRANGER)
    links = tmp_path / "home" / "STATE" / "shoal" / "jobs" / socket.gethostname()
    links.mkdir(parents=True)
    (links / "0").symlink_to(place)
    (tmp_path / "train.py").touch()
    shoal(tmp_path, *words)


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        (store.RECORD, huge, ("logs", "digits")),
        (store.RECORD, huge, ("stop", "digits")),
        (store.RECORD, huge, ("run", "--resume", "digits")),
        (store.RECORD, nested, ("logs", "digits")),
        (job_log.LOG, pipe, ("logs", "digits")),
        (job_log.LOG, endless, ("logs", "digits")),
        (job_log.LOG, endless, ("logs", "--follow", "digits")),
        ("report.html", pipe, ("report", "compare", "jobs/digits", "jobs/digits")),
        ("report.html", endless, ("report", "compare", "jobs/digits", "jobs/digits")),
        ("report.html", huge, ("report", "compare", "jobs/digits", "jobs/digits")),
    ],
)
def test_files_of_a_job_in_a_project_do_not_keep_a_command(
    tmp_path: Path, name: str, make: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    path = write_job(tmp_path / "jobs" / "digits") / name
    path.unlink(missing_ok=True)
    make(path)
    ended = shoal(tmp_path, *words)
    assert ended.returncode == 2, ended.stderr
    assert str(path.relative_to(tmp_path)) in ended.stderr


def test_a_record_with_billions_of_hosts_is_refused(tmp_path: Path) -> None:
    write_job(tmp_path / "jobs" / "digits", hosts=2_000_000_000)
    ended = shoal(tmp_path, "logs", "digits", "--host", "algo-9")
    assert ended.returncode == 2
    assert "2000000000 hosts" in ended.stderr


@pytest.mark.parametrize("make", [pipe, endless, nested])
def test_an_odd_trace_is_an_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "smdataparallel_timeline.json")
    assert "expected a Chrome trace" in shoal(tmp_path, "timeline", ".").stderr


def test_an_endless_file_of_variables_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    ended = shoal(tmp_path, "run", "image:1", "train.py", "--env-file", "/dev/zero")
    assert ended.returncode == 2
    assert "/dev/zero: more than" in ended.stderr


@pytest.mark.parametrize("name", ["buildspec.yml", "dockerfiles"])
def test_init_does_not_write_through_a_link_to_nothing(tmp_path: Path, name: str) -> None:
    """Git keeps links: a clone may have one to a file that this user does not have yet, such as ~/.ssh/rc."""
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / name).symlink_to(tmp_path / "new")
    ended = shoal(tmp_path / "clone", "init")
    assert ended.returncode == 2
    assert not (tmp_path / "new").exists()


def run_child(code: str, *words: str) -> None:
    """Run Python code with little memory, as a hanging command of this process would end no test."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    subprocess.run([shoal_command()[0], "-c", code, *words], check=True, timeout=SECONDS, preexec_fn=limit)


@pytest.mark.parametrize("make", [pipe, endless, huge])
def test_locks_of_a_project_do_not_keep_a_command(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "dockerfiles" / "debian").mkdir(parents=True)
    make(tmp_path / "dockerfiles" / "debian" / "bookworm.txt")
    code = """
import pathlib, sys
from shoal.builds import debian_lock
from shoal.errors import SpecError
from shoal.limits import MOST_LOCK
from shoal.matrix import project as projects
from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal.sources import lock
root = pathlib.Path(sys.argv[1])
for read in (
    lambda: debian_lock.read_lock(Project(root), "bookworm"),
    lambda: lock.read_lock(root / "dockerfiles" / "debian" / "bookworm.txt"),
):
    try:
        read()
    except SpecError as error:
        assert "Fix: replace it by a text file" in str(error), error
    else:
        raise AssertionError
"""
    run_child(code, str(tmp_path))


@pytest.mark.parametrize("name", ["HEAD", "config", "index"])
def test_git_is_not_waited_for(tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    root = tmp_path / "project"
    shutil.copytree(project.templates, root / "dockerfiles")
    shutil.copy(project.buildspec, root)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".git" / name).unlink(missing_ok=True)
    pipe(root / ".git" / name)
    monkeypatch.setattr(provenance, "_PATIENCE", 0.5)
    began = time.monotonic()
    assert not provenance.read_provenance(Project(root)).revision
    assert time.monotonic() - began < SECONDS


@pytest.fixture
def local_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a job without Docker that has saved a checkpoint and failed."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(
        "import os, sys\nplace = os.environ['SAGEMAKER_BASE_DIR'] + '/checkpoints'\n"
        "open(place + '/step', 'w').close()\nsys.exit(3)\n"
    )
    monkeypatch.setenv("TOKEN_OF_TEST", "value-of-the-secret")
    words = ("run", "--engine", "none", "pytorch", "code/train.py", "--name", "digits", "--secret", "TOKEN_OF_TEST")
    ended = shoal(tmp_path, *words)
    assert ended.returncode == 3, ended.stderr
    return tmp_path / "jobs" / "digits"


def test_a_link_in_the_place_of_secrets_gets_none(tmp_path: Path, local_job: Path) -> None:
    """A job that was copied here, and is trusted, may have it; the resumed job goes on without it."""
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "kept").touch()
    (local_job / ".secrets").symlink_to(tmp_path / "public")
    assert shoal(tmp_path, "run", "--resume", "digits").returncode == 3
    assert [path.name for path in (tmp_path / "public").iterdir()] == ["kept"]
    assert not os.path.lexists(local_job / ".secrets")


def test_gaps_in_attempts_keep_no_job_from_going_on(tmp_path: Path, local_job: Path) -> None:
    (local_job / "attempt-2").mkdir()
    (local_job / "attempt-7").symlink_to("/nonexistent")
    (local_job / "attempt-x").touch()
    assert shoal(tmp_path, "run", "--resume", "digits").returncode == 3
    assert (local_job / "attempt-8" / "report.html").is_file()


def test_stop_of_a_lost_job_removes_its_secrets(tmp_path: Path) -> None:
    """Its command was killed, so it could not."""
    request = JobRequest(output=tmp_path / "jobs")
    with open_job(JobRecord(replace(request, image="image:1", engine=LOCAL)), None, "digits") as opened:
        (opened.checkpoints.path / "step").touch()
    (opened.directory / ".secrets").mkdir()
    (opened.directory / ".secrets" / "TOKEN").write_text("value-of-the-secret")
    assert shoal(tmp_path, "stop", "digits").returncode == 0
    assert not (opened.directory / ".secrets").exists()


def test_marks_of_a_script_do_not_end_its_job(tmp_path: Path) -> None:
    """A script can write any file to its checkpoints; in the checkpoints of another job, marks still count."""
    place = tmp_path / "checkpoints"
    with checkpoints.open_directory(place, "digits", "--checkpoints"):
        (place / "sub").mkdir()
        (place / "sub" / checkpoints.MARK).write_text('{"job": "other"}')
    with checkpoints.open_directory(place, "digits", "--checkpoints"):
        pass
    (place / checkpoints.MARK).unlink()
    with pytest.raises(UsageError, match="sub has the checkpoints"):
        checkpoints.open_directory(place, "digits", "--checkpoints").__enter__()


def test_many_links_with_long_ways_are_left_out_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MOST_STEPS_OF_ALL", 1000)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as out:
        for number in range(500):
            link = tarfile.TarInfo(f"output/{number:03}")
            link.type, link.linkname = tarfile.SYMTYPE, "a/../" * 2 + "none"
            out.addfile(link)
    packed.seek(0)
    left_out = [*archive.unpack_safely(packed, tmp_path, "/opt/ml")]
    made = list((tmp_path / "output").iterdir())
    assert 100 < len(made) < 400 and len(made) + len(left_out) == 500
    monkeypatch.setattr(archive, "_MOST_STEPS_OF_ALL", 100)
    problems: list[str] = []
    assert not list(results.list_files(tmp_path / "output", problems))
    assert "outside the directory" in problems[-1], "it has no steps left"


def test_links_with_long_ways_are_left_out_at_once(tmp_path: Path) -> None:
    """A script can make thousands, each of which takes a tenth of a second to follow."""
    top = tmp_path / "checkpoints"
    (top / "a").mkdir(parents=True)
    way = "a/../a/../" * 400
    for number in range(40):
        (top / f"link-{number}").symlink_to(f"{way}link-{number + 1}")
    (top / "near").symlink_to("a/../a")
    began = time.monotonic()
    assert not any(archive.stays_inside(top / "link-0", top) for _ in range(100))
    assert time.monotonic() - began < 5
    assert archive.stays_inside(top / "near", top)


def test_a_project_does_not_bring_its_own_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative settings would name files of the directory in which a command runs."""
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", "settings")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    directory = write_job(tmp_path / "clone" / "jobs" / "digits")
    settings = tmp_path / "clone" / "settings" / "shoal"
    links = settings / "jobs" / socket.gethostname()
    links.mkdir(parents=True)
    (links / running._link_name(directory, "digits")).symlink_to(directory)
    (settings / "trusted").write_text(f"{directory}\n")
    ended = shoal(tmp_path / "clone", "run", "--resume", "digits")
    assert ended.returncode == 2
    assert "is not a job of yours" in ended.stderr


@pytest.fixture
def copy(tmp_path: Path, project: Project) -> Path:
    """A project that this user has unpacked, so that all files are this user's."""
    root = tmp_path / "project"
    shutil.copytree(project.templates, root / "dockerfiles")
    shutil.copy(project.buildspec, root)
    return root


def replace_by(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).unlink()
        make(root / name)

    return change


def nest_directories(root: Path) -> None:
    (root / "toolkit" / "/".join("a" * 150)).mkdir(parents=True)


def define_millions_of_images(root: Path) -> None:
    keys = "device: cpu, requirements: [x], disk_gib: 1"
    systems = (f"  s{n}: {{suite: s{n}, upstream: d, sources: sources.list, python: py311}}" for n in range(60))
    releases = (f"  - {{framework: f{n}, version: '1.{n}', {keys}}}" for n in range(60))
    (root / "dockerfiles" / "versions.yml").write_text("\n".join(["systems:", *systems, "releases:", *releases]))


def name_a_framework_like_a_command(root: Path) -> None:
    text, tag = (root / "buildspec.yml").read_text(), "pytorch-training:2.0.1-gpu-py311-cu117-debian12"
    (root / "buildspec.yml").write_text(text.replace("defaults:\n", f"defaults:\n  '\\$(touch RAN)': {tag}\n"))


def too_large(path: Path) -> None:
    path.touch()
    os.truncate(path, MOST_LOCK + 1)


def read(root: Path) -> None:
    """Read a project as each command does, and write its generated files."""
    found = projects.find(root)
    render.write_files(render.render_all(found, load(found.buildspec).choose(["pytorch"])))


SCHEMA = "dockerfiles/schema/versions.json"
TEMPLATE = "dockerfiles/pytorch.j2"
PROJECTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe as a schema": (replace_by(SCHEMA, pipe), "not a file"),
    "a huge schema": (replace_by(SCHEMA, too_large), "larger than"),
    "a pipe as a template": (replace_by(TEMPLATE, pipe), "not a file"),
    "a huge template": (replace_by(TEMPLATE, too_large), "larger than"),
    "nested directories": (nest_directories, "in more than 100 directories"),
    "millions of images": (define_millions_of_images, "makes more than 2000 images"),
    "a command as a name": (name_a_framework_like_a_command, "buildspec.yml:"),
}


@pytest.mark.parametrize("name", PROJECTS)
def test_a_hostile_project_ends_a_command_with_an_error(name: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = PROJECTS[name]
    change(copy)
    error = error_in_time(lambda: read(copy))
    assert isinstance(error, SpecError) and message in str(error), error
    monkeypatch.chdir(copy)
    names = common.complete_images("")
    assert all(re.fullmatch(r"[a-z0-9.:_-]+", each) for each in names), "a shell may run what it is offered"


MODULES = (
    "pip",
    "json",
    "shoal",
    "sitecustomize",
    "usercustomize",
    "docker",
    "typer",
    "jinja2",
    "installer",
    "compileall",
    "logging",
)


def test_no_module_of_the_working_directory_is_imported(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds modules there if a program is started with `-m`, as pip is."""
    for name in MODULES:
        (copy / name).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (copy / name / file).write_text(f"open({str(copy / 'RAN')!r}, 'w')\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert shoal(copy, "lock", "pytorch-*-cu117-*").returncode == 3
    monkeypatch.chdir(copy)
    bundle._pip_download(copy, ["shoal-none"])
    assert not (copy / "RAN").exists()
    subprocess.run([sys.executable, "-m", "pip", "--version"], check=True)
    assert (copy / "RAN").exists(), "the attack of this test works"


@pytest.mark.parametrize(
    "pin",
    [
        "x@file:///tmp/x.tar.gz#==1",
        "x@https://example.org/x.tar.gz#==1",
        "-rhttps://example.org/requirements.txt#==1",
        "--index-url=https://example.org/==1",
        "x==1;python_version>'3'",
        "x==" + "1" * 5000,
        "x==none",
    ],
)
def test_a_lock_names_no_address_and_no_option(tmp_path: Path, pin: str) -> None:
    """pip would read the line on this machine, for a bundle, and build the package that an address names."""
    (tmp_path / "lock.txt").write_text(f"{pin} --hash=sha256:{'0' * 64}\n")
    with pytest.raises(SpecError, match=r"lock\.txt:1: expected 'name==version"):
        lock.read_lock(tmp_path / "lock.txt")


@pytest.mark.parametrize("name", ["x; touch /RAN", "$(touch /RAN)", "-oDir::Bin=x", "A", ""])
def test_a_debian_package_is_no_command(name: str) -> None:
    """`shoal lock --bases` and `shoal bundle` give the names to a shell."""
    with pytest.raises(SpecError, match="not the name of a Debian package"):
        StepCollector().functions()["debian"](["gcc", name])


@pytest.mark.parametrize("name", ["timeline.html", "comparison.html"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_report_does_not_write_through_a_link(
    tmp_path: Path, name: str, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are the files that commands write to the working directory if none is named."""
    private = tmp_path / "private"
    if exists:
        private.write_text("private")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / name).symlink_to("../private")
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(UsageError, match=rf"-o {name}: {name} is a link"):
        output_files.choose_files(Path(name), False, ())
    assert not exists or private.read_text() == "private"
    assert output_files.choose_files(Path("/dev/stdout"), False, ()) == [Path("/dev/stdout")]


@pytest.mark.parametrize("name", ["size.html", "timeline.html", "comparison.html"])
def test_a_pipe_in_the_place_of_a_report_is_not_waited_for(tmp_path: Path, name: str) -> None:
    pipe(tmp_path / name)
    error = error_in_time(lambda: output_files.write_files(Path(name), {tmp_path / name: "page"}))
    assert isinstance(error, UsageError) and "cannot be written" in str(error)


@pytest.mark.parametrize(
    "words",
    [
        ("--checkpoints", "link"),
        ("--checkpoints", "../clone/link/new"),
        ("--channel", "train=link"),
        ("--volume", "./link:/data"),
        ("--output", "link"),
        ("--env-file", "link/settings.env"),
        ("--secret", "KEY=link/id_rsa"),
    ],
)
def test_a_link_out_of_a_project_is_not_followed_on_the_command_line(tmp_path: Path, words: tuple[str, str]) -> None:
    """The project's page asks for `--checkpoints link`: the job would get, replace or change files of the user."""
    private, clone = tmp_path / "private", tmp_path / "clone"
    private.mkdir()
    (private / "id_rsa").write_text("key")
    (private / "settings.env").write_text("KEY=1")
    (clone / "code").mkdir(parents=True)
    (clone / "code" / "train.py").touch()
    (clone / "link").symlink_to("../private")
    ended = shoal(clone, "run", "image:1", "code/train.py", *words)
    assert ended.returncode == 2
    assert f"leads through a link to {private}" in ended.stderr
    assert {path.name for path in private.iterdir()} == {"id_rsa", "settings.env"}
    ended = shoal(clone, "run", "image:1", "code/train.py", words[0], words[1].replace("link", str(private), 1))
    assert "through a link" not in ended.stderr


@pytest.mark.parametrize("at", ["1e18", "1e308", "NaN", "-1e18", '"1"'])
def test_a_line_with_an_odd_time_is_left_out(tmp_path: Path, at: str) -> None:
    (write_job(tmp_path / "jobs" / "digits") / job_log.LOG).write_text(f'[{at}, "algo-1", "a"]\n[1, "algo-1", "b"]\n')
    assert shoal(tmp_path, "logs", "digits").stdout == "algo-1 | b\n"


@pytest.mark.parametrize("at", ["1e308", "NaN"])
@pytest.mark.parametrize("words", [("logs", "digits"), ("stop", "digits"), ("run", "--resume", "..")])
def test_a_record_with_odd_numbers_or_in_another_place_is_no_traceback(
    tmp_path: Path, at: str, words: tuple[str, ...]
) -> None:
    directory = write_job(tmp_path / "jobs" / "digits")
    text = (directory / store.RECORD).read_text().replace("{", f'{{"started": {at}, "ended": {at}, "pid": -1, ', 1)
    for path in (directory / store.RECORD, tmp_path / store.RECORD):
        path.write_text(text)
    assert (shoal(tmp_path, *words).returncode == 0) == (words[0] == "logs")


def test_a_name_in_a_command_that_is_printed_has_quotes(tmp_path: Path) -> None:
    """Somebody copies the command into a shell."""
    assert trust.advise_trust("/tmp/a;b") == "shoal trust '/tmp/a;b'"
    (tmp_path / "$(b).key").touch()
    selection = source_files.Selection(tmp_path)
    (note,) = source_files.describe_source(selection, source_files.list_source(selection))
    assert note.endswith("--include '$(b).key'")


def test_a_small_repository_with_billions_of_files_does_not_fill_the_memory(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of nine trees has the one below ten times."""

    def git(*words: str, given: str = "") -> str:
        command = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a", *words]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    item = f"100644 blob {git('hash-object', '-w', '--stdin')}"
    for _ in range(9):
        item = "040000 tree " + git("mktree", given="".join(f"{item}\tname{number}\n" for number in range(10)))
    tree = git("mktree", given=f"{item}\tdockerfiles\n")
    git("update-ref", "HEAD", git("commit-tree", "-m", "a", tree))
    monkeypatch.setattr(provenance, "_LIMITED", provenance._LIMITED.replace(str(MOST_GIT // 1024), "60000"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert not provenance.find_revision(copy)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 200_000), "kilobytes"


def declare(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "make",
    [
        pipe,
        huge,
        endless,
        declare("x ="),
        declare("project = 3"),
        declare("[project]\nurls = [1]"),
        declare("x = " + "[" * 5000),
        lambda path: path.symlink_to("../../private.toml"),
    ],
)
def test_a_hostile_pyproject_declares_no_source(tmp_path: Path, make: Callable[[Path], object]) -> None:
    (tmp_path / "private.toml").write_text('[project.urls]\nSource = "https://token@private.example"\n')
    package = tmp_path / "project" / "images"
    package.mkdir(parents=True)
    make(package / "pyproject.toml")
    assert provenance.read_provenance(Project(package.parent)).source == ""


def test_a_link_in_the_place_of_a_revision_is_not_read(tmp_path: Path) -> None:
    """It would be in a label of the image, which others get."""
    (tmp_path / "private").write_text("private")
    root = tmp_path / "project"
    root.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (root / provenance.REVISION).symlink_to("../private")
    assert provenance.read_provenance(Project(root)).revision == ""


@needs_root
@pytest.mark.parametrize("words", [("init",), ("new", "--image", "pytorch")])
def test_nothing_is_written_to_a_directory_of_another_user(tmp_path: Path, words: tuple[str, ...]) -> None:
    """They could put a link in the place of a file while the others are written."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    ended = shoal(tmp_path, *words, str(theirs))
    assert (ended.returncode, f"belongs to the user {'nobody'}" in ended.stderr) == (2, True), ended.stderr
    assert [*theirs.iterdir()] == []

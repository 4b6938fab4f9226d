"""Files of other users are data: projects, templates, YAML files, and the lists that commands believe."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import trust
from shoal.builds.plan import install_own_packages
from shoal.commands import common
from shoal.errors import SpecError
from shoal.matrix import project as projects
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, load
from shoal.sources import lock
from shoal.sources.provenance import read_provenance
from shoal.sources.render import read_steps, read_templates

from .command import shoal_command

STRANGER = 65534
RUNS_CODE = "{% set _ = cycler.__init__.__globals__.os.system('touch RAN') %}"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user; CI runs as root")


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who trusts nothing by name, and has no cache."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SUDO_UID", raising=False)


@pytest.fixture
def copy(tmp_path: Path, project: Project) -> Project:
    """A project of this user."""
    root = tmp_path / "parent" / "project"
    shutil.copytree(project.templates, root / "dockerfiles")
    shutil.copy(project.buildspec, root)
    return Project(root)


def give_away(path: Path) -> None:
    """Make a file, or a directory with all in it, another user's."""
    for each in (path, *path.rglob("*")):
        os.chown(each, STRANGER, STRANGER, follow_symlinks=False)


def shoal(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    return subprocess.run(
        [*shoal_command(), *words], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


@needs_root
@pytest.mark.parametrize(
    "words",
    [
        ("build", "--dry-run"),
        ("build", "pytorch"),
        ("render", "--check"),
        ("render",),
        ("list",),
        ("lock", "pytorch"),
        ("run", "--build", "pytorch", "train.py"),
        ("run", "pytorch", "train.py"),
    ],
)
def test_a_project_of_another_user_runs_nothing(copy: Project, words: tuple[str, ...]) -> None:
    """It is in a directory above the working directory, as a file in /tmp is."""
    ran = copy.root / "RAN"
    for template in copy.templates.glob("*.j2"):
        template.write_text(RUNS_CODE.replace("RAN", str(ran)) + template.read_text())
    give_away(copy.root)
    below = copy.root / "mine" / "code"
    below.mkdir(parents=True)
    (below / "train.py").touch()
    result = shoal(below, *words)
    assert result.returncode == 3, result.stdout + result.stderr
    assert f"{copy.root} belongs to the user" in result.stderr
    assert (
        f"Fix: work in another directory, or if you trust all that is in it: shoal trust {copy.root}" in result.stderr
    )
    assert not ran.exists()


@needs_root
def test_a_project_is_allowed_by_name(copy: Project) -> None:
    """As a checkout is in a container of CI that runs as another user."""
    give_away(copy.root)
    copy.root.parent.chmod(0o777)
    assert shoal(copy.root, "render", "--check").returncode == 3
    allowed = shoal(copy.root, "trust", ".")
    assert allowed.stdout == f"trusted: {copy.root}, in {trust.trusted_file()}\n"
    assert stat.S_IMODE(Path(trust.trusted_file()).stat().st_mode) == 0o600
    result = shoal(copy.root, "render", "--check")
    assert result.returncode == 0, result.stderr
    assert shoal(copy.root, "trust", ".").returncode == 0
    assert Path(trust.trusted_file()).read_text() == f"{copy.root}\n", "it is listed once"


def test_a_name_with_a_line_break_is_not_trusted(tmp_path: Path) -> None:
    """The second line would trust the whole disk."""
    (tmp_path / "name\n").mkdir()
    assert shoal(tmp_path, "trust", "name\n/").returncode == 2
    assert trust.read_trusted() == set()


def other_users_file(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def writable_for_all(path: Path) -> None:
    path.chmod(0o777)


def writable_for_a_group(path: Path) -> None:
    os.chown(path, -1, 100)
    path.chmod(0o770)


def writable_by_an_access_list(path: Path) -> None:
    """The user 65534 may write; the mode of the group shows it, and the group is root's own."""
    entries = [(1, 6, 0xFFFFFFFF), (2, 6, STRANGER), (4, 4, 0xFFFFFFFF), (16, 6, 0xFFFFFFFF), (32, 4, 0xFFFFFFFF)]
    packed = b"".join(
        tag.to_bytes(2, "little") + mode.to_bytes(2, "little") + who.to_bytes(4, "little") for tag, mode, who in entries
    )
    try:
        os.setxattr(path, "system.posix_acl_access", (2).to_bytes(4, "little") + packed)
    except OSError as error:
        pytest.skip(f"no access lists on this file system: {error}")


@needs_root
@pytest.mark.parametrize(
    "change", [other_users_file, writable_for_all, writable_for_a_group, writable_by_an_access_list]
)
@pytest.mark.parametrize("place", ["..", ".", "buildspec.yml", "dockerfiles", "dockerfiles/base.j2"])
def test_each_way_to_change_a_project_is_found(copy: Project, place: str, change: Callable[[Path], None]) -> None:
    projects.find(copy.root)
    change(copy.root / place)
    with pytest.raises(SpecError, match="shoal trust"):
        projects.find(copy.root)
    assert common.complete_images("pytorch") == [] or Path.cwd() != copy.root


@needs_root
def test_a_group_of_everybody_is_not_private_if_the_system_lists_nobody(
    copy: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a directory service: each user is found by name only, and has the same group."""
    user = pwd.struct_passwd(("alice", "x", STRANGER, 100, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(pwd, "getpwall", lambda: [user])
    monkeypatch.setattr(trust, "own_ids", lambda: {0, STRANGER})
    monkeypatch.setattr(trust, "_private_groups", {})
    for name, is_private in (("users", False), ("alice", True)):
        monkeypatch.setattr(grp, "getgrgid", lambda _, name=name: grp.struct_group((name, "x", 100, [])))
        trust._private_groups.clear()
        os.chown(copy.root, STRANGER, 100)
        copy.root.chmod(0o775)
        assert (trust.describe_stranger(str(copy.root), copy.root.stat()) is None) == is_private


@needs_root
def test_a_project_under_a_sticky_directory_is_the_users(copy: Project) -> None:
    """Others cannot replace it, as in /tmp. But in the sticky directory itself, they can add files."""
    copy.root.parent.chmod(0o1777)
    assert projects.find(copy.root).root == copy.root
    shutil.copy(copy.buildspec, copy.root.parent)
    with pytest.raises(SpecError, match="every user can write to"):
        projects.find(copy.root.parent)


@needs_root
def test_a_link_of_another_user_to_a_trusted_project_is_refused(copy: Project, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(copy.root)
    assert projects.find(shared / "link").root == shared / "link"
    os.chown(shared / "link", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(SpecError, match="link belongs to the user"):
        projects.find(shared / "link")


@needs_root
def test_files_of_the_user_who_called_sudo_are_trusted(copy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(copy.root)
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    assert projects.find(copy.root).root == copy.root


@needs_root
def test_a_list_of_another_user_is_no_list(copy: Project) -> None:
    give_away(copy.root)
    trust.add_trusted(copy.root)
    assert projects.find(copy.root).root == copy.root
    path = Path(trust.trusted_file())
    for change in (other_users_file, writable_for_all):
        os.chown(path, 0, 0)
        change(path)
        with pytest.raises(SpecError, match="belongs to"):
            projects.find(copy.root)


@pytest.mark.parametrize(
    "place", ["dockerfiles", "dockerfiles/private.txt", "toolkit", ".cache", ".cache/shoal", ".cache/shoal/logs"]
)
def test_links_that_leave_a_project_are_refused(copy: Project, tmp_path: Path, place: str) -> None:
    """`shoal cache prune` would remove files behind the last one."""
    (tmp_path / "private").mkdir()
    path = copy.root / place
    if path.is_dir():
        path.rename(tmp_path / "moved")
    path.parent.mkdir(exist_ok=True, parents=True)
    path.symlink_to(tmp_path / "private")
    with pytest.raises(SpecError, match=f"the link {path} leaves the project"):
        projects.find(copy.root)
    trust.add_trusted(tmp_path / "private")
    assert projects.find(copy.root).root == copy.root


ESCAPES = {
    "globals of a class": "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
    "globals by a filter": "{{ (lipsum|attr('__globals__')).os.system('touch RAN') }}",
    "a function's": "{{ step.__func__.__globals__ }}",
    "a function's object": "{{ step.__self__.steps }}",
    "a format": "{{ '{0.__class__.__mro__}'.format(image) }}",
    "a format's method": "{{ ('{0.__self__}'.format|attr('__call__'))(step) }}",
    "pydantic's pickle": (
        "{{ image.parse_raw(\"cos\\nsystem\\n(S'touch RAN'\\ntR.\", proto='pickle', allow_pickle=True) }}"
    ),
    "pydantic's files": "{{ image.parse_file('/etc/passwd') }}",
    "pydantic's fields": "{{ image.system.model_fields }}",
    "pydantic's classes": "{{ image.model_construct }}",
    "a change of the image": "{% set _ = image.update({'device': 'x'}) %}",
    "a change of a list": "{% set _ = dropped.append('x') %}",
    "a macro's function": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "the context": "{{ self._TemplateReference__context.environment }}",
    "an attribute of a filter": "{{ [1]|sum(attribute='__class__') }}",
    "a format of markup": "{{ ('{0.__class__}'|safe).format(1) }}",
    "a mapping for a format": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "a loop's object": "{% for _ in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "a generator's frame": "{{ (dropped|map('upper')).gi_frame }}",
}
LOOPS = {
    "a long range": "{% for _ in range(10**9) %}{% endfor %}",
    "a macro in itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a template in itself": "{% include 'pytorch.j2' %}",
    "a division by zero": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("name", [*ESCAPES, *LOOPS])
def test_a_template_cannot_leave_its_sandbox(
    name: str, copy: Project, matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a project that this user has cloned, so that all files are this user's."""
    monkeypatch.chdir(tmp_path)
    (copy.templates / "pytorch.j2").write_text({**ESCAPES, **LOOPS}[name])
    started = time.monotonic()
    with pytest.raises(SpecError, match=r"pytorch\.j2: "):
        read_steps(copy, matrix.select("pytorch"))
    assert time.monotonic() - started < 5
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("link", [False, True])
def test_templates_are_files_in_their_directory(copy: Project, matrix: BuildSpec, link: bool) -> None:
    (copy.root / "secret.txt").write_text("secret")
    name = "../secret.txt"
    if link:
        name = "inside.txt"
        (copy.templates / name).symlink_to("../secret.txt")
    (copy.templates / "pytorch.j2").write_text(f"{{% include '{name}' %}}")
    for read in (read_steps, read_templates):
        with pytest.raises(SpecError, match=r"leaves .*dockerfiles\. Fix: copy the file"):
            read(copy, matrix.select("pytorch"))


def nest(depth: int) -> str:
    lines = ["mpi: &a0 [x, x, x, x, x, x, x, x, x]"]
    for number in range(1, depth):
        lines.append(f"b{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]")
    return "\n".join(lines)


HOSTILE_YAML = {
    "aliases": (nest(12), "larger than 20000 values"),
    "merged mappings": (nest(12).replace("[", "{<<: [").replace("]", "]}"), "buildspec"),
    "an alias in itself": ("mpi: &a [*a]", "buildspec"),
    "a mapping in itself": ("indexes: &a {x: *a}", "buildspec"),
    "brackets": ("mpi: " + "[" * 50_000, "nested too deeply"),
    "levels": ("".join(" " * level + "-\n" for level in range(400)), "buildspec"),
    "a large file": ("#" * 200_000, "larger than 131072 bytes"),
    "a long number": ("mpi: " + "9" * 10_000, "not YAML"),
    "a date that is none": ("mpi: 2001-99-99", "not YAML"),
    "a hexadecimal number": ("indexes: 0x" + "f" * 100_000, "buildspec"),
    "a mapping as a key": ("? {a: [b]}\n: c\n", "not YAML"),
    "many short keys": ("{" + "a," * 50_000 + "}", "more than 5000 lines and signs"),
    "many short lists": ("mpi: " + "[]" * 50_000, "more than 5000 lines and signs"),
    "an object of Python": ("mpi: !!python/object/apply:os.system ['touch RAN']", "buildspec"),
}


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_a_hostile_yaml_file_is_an_error_at_once(name: str, copy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    text, words = HOSTILE_YAML[name]
    copy.buildspec.write_text(text)
    monkeypatch.chdir(copy.root)
    started = time.monotonic()
    with pytest.raises(SpecError, match=words) as caught:
        load(copy.buildspec)
    assert len(str(caught.value)) < 10_000
    assert common.complete_images("") == []
    assert time.monotonic() - started < 3
    assert not (copy.root / "RAN").exists()


def test_a_pipe_in_the_place_of_a_yaml_file_is_not_waited_for(copy: Project) -> None:
    (copy.templates / "versions.yml").unlink()
    os.mkfifo(copy.templates / "versions.yml")
    with pytest.raises(SpecError, match=r"versions\.yml: not a regular file"):
        load(copy.buildspec)


def test_only_plain_files_of_the_user_are_opened_to_write(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "link").symlink_to(target)
    os.link(target, tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "hard", "pipe", "."):
        with pytest.raises(PermissionError, match="a link, a special file"):
            trust.open_own(tmp_path / name, os.O_WRONLY)
    os.close(trust.open_own(target.with_name("new"), os.O_WRONLY | os.O_CREAT))
    assert stat.S_IMODE(target.with_name("new").stat().st_mode) == 0o600


def test_packages_of_a_project_are_not_built_unless_it_is_trusted(copy: Project, project: Project) -> None:
    """As of one that this user has cloned: hatchling runs Python that pyproject.toml names."""
    package = copy.root / "toolkit"
    package.mkdir()
    ran = copy.root / "RAN"
    (package / "version.py").write_text(f"open({str(ran)!r}, 'w')\n__version__ = '1'\n")
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "shoal-toolkit"\ndynamic = ["version"]\n'
        '[tool.hatch.version]\nsource = "code"\npath = "version.py"\n'
    )
    with pytest.raises(SpecError, match=f"{package}: to build this package runs code"):
        install_own_packages(copy, "3.11")
    assert not ran.exists()
    assert copy.part("library") == project.part("library")
    trust.add_trusted(copy.root)
    with pytest.raises(ValueError, match="which files to ship"):
        install_own_packages(copy, "3.11")
    assert ran.exists(), "the attack of this test works"


def test_a_cache_that_a_project_brings_is_not_used(copy: Project, project: Project, tmp_path: Path) -> None:
    """A base image in it would be the base of other projects too."""
    assert copy.cache == tmp_path / "cache" / "shoal"
    assert project.cache == project.root / ".cache" / "shoal"
    trust.add_trusted(copy.root)
    assert copy.cache == copy.root / ".cache" / "shoal"


@needs_root
@pytest.mark.parametrize("theirs", ["cache", "cache/shoal", "cache/shoal/installed", "cache/shoal/installed/x.tar"])
def test_a_cache_that_a_stranger_has_made_before_is_not_used(copy: Project, tmp_path: Path, theirs: str) -> None:
    """Names in it follow from public files, so it could bring packages and a base image to all images."""
    planted = tmp_path / "cache" / "shoal" / "installed" / "x.tar"
    planted.parent.mkdir(parents=True)
    planted.touch()
    os.chown(tmp_path / theirs, STRANGER, STRANGER)
    with pytest.raises(SpecError, match=rf"{tmp_path / theirs} belongs to .*Fix: .*XDG_CACHE_HOME"):
        _ = copy.cache
    trust.add_trusted(tmp_path / "cache" / "shoal")
    assert copy.cache == tmp_path / "cache" / "shoal"


@pytest.mark.parametrize(
    "line", ["--editable=.", "x @ file:///tmp/x.tar.gz", "x @ https://example.org/x.tar.gz", "./x"]
)
def test_a_requirement_that_pip_would_build_is_refused(line: str, matrix: BuildSpec) -> None:
    with pytest.raises(SpecError, match="expected a package's name and versions"):
        lock._resolve([line], "3.11", None)


PROGRAMS = {
    "file monitor": ("core.fsmonitor", "touch RAN; false"),
    "filter": ("filter.evil.clean", "touch RAN; cat"),
    "included file": ("include.path", "../evil"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_git_runs_no_program_of_a_repository(name: str, copy: Project) -> None:
    """An archive of a project may have a .git, with files of this user after it is unpacked."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=copy.root, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert read_provenance(copy).revision
    key, value = PROGRAMS[name]
    (copy.root / "evil").write_text("[core]\nfsmonitor = touch RAN; false\n")
    git("config", key, value)
    (copy.root / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    os.utime(copy.buildspec, (1, 1))
    (copy.root / "RAN").unlink(missing_ok=True)
    assert read_provenance(copy).revision == ""
    assert not (copy.root / "RAN").exists()
    trust.add_trusted(copy.root)
    read_provenance(copy)
    assert (copy.root / "RAN").exists(), "the attack of this test works"


WRITES = "#!/bin/sh\ntouch RAN\n"
GIT_HOOKS = ("post-index-change", "pre-commit", "post-checkout", "reference-transaction", "fsmonitor-watchman")


@pytest.mark.parametrize(
    "name", ["hooks", "a configuration of the work tree", "another repository", "a bare repository"]
)
def test_git_runs_no_hook_and_no_second_configuration(name: str, copy: Project, tmp_path: Path) -> None:
    """Each is in an archive of a project beside its usual configuration."""

    def git(*words: str, root: Path = copy.root) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=root, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monitor = f"touch {copy.root}/RAN; false"
    if name == "hooks":
        for hook in GIT_HOOKS:
            (copy.root / ".git" / "hooks" / hook).write_text(WRITES)
            (copy.root / ".git" / "hooks" / hook).chmod(0o755)
    elif name == "a configuration of the work tree":
        git("config", "extensions.worktreeConfig", "true")
        git("config", "--worktree", "core.fsmonitor", monitor)
    else:
        git("config", "core.fsmonitor", monitor)
        (copy.root / ".git").rename(copy.root / "elsewhere")
        if name == "another repository":
            (copy.root / ".git").write_text("gitdir: elsewhere\n")
        else:
            shutil.copytree(copy.root / "elsewhere", copy.root, dirs_exist_ok=True)
    os.utime(copy.buildspec, (1, 1))
    assert bool(read_provenance(copy).revision) == (name == "hooks")
    assert not (copy.root / "RAN").exists()


@pytest.mark.parametrize("is_submodule", [False, True])
def test_git_runs_no_program_of_a_shared_repository_or_a_submodule(copy: Project, is_submodule: bool) -> None:
    def git(*words: str, root: Path = copy.root) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=root, check=True)

    git("init", "-q")
    inside = copy.root / "dockerfiles" / "inside" if is_submodule else copy.root
    inside.mkdir(exist_ok=True)
    git("init", "-q", root=inside)
    (inside / "file").touch()
    git("add", ".", root=inside)
    git("commit", "-q", "-m", "first", root=inside)
    shared = "config" if is_submodule else "shared/config"
    if not is_submodule:
        shutil.copytree(copy.root / ".git", copy.root / ".git" / "shared")
        (copy.root / ".git" / "commondir").write_text("shared\n")
    git("config", "--file", str(inside / ".git" / shared), "core.fsmonitor", f"touch {copy.root}/RAN; false")
    if is_submodule:
        git("-c", "advice.addEmbeddedRepo=false", "add", ".")
        git("commit", "-q", "-m", "second")
    os.utime(inside / "file", (1, 1))
    (copy.root / "RAN").unlink(missing_ok=True)
    assert bool(read_provenance(copy).revision) == is_submodule
    assert not (copy.root / "RAN").exists()
    subprocess.run(["git", "status"], cwd=inside, check=False, capture_output=True)
    assert (copy.root / "RAN").exists(), "the attack of this test works"

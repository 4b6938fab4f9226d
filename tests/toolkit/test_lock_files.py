"""Lock files beside the script: uv.lock, pylock.toml, requirements.txt with hashes, pyproject.toml; no network."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit.errors import ContractError
from shoal_toolkit.files import read_table
from shoal_toolkit.job import code, contract
from shoal_toolkit.plan import sidecars
from shoal_toolkit.result import setup_failure
from shoal_toolkit.sidecars import locked
from shoal_toolkit.sidecars.locked import Locked

from .conftest import Finished, Tree
from .test_install import OURS, Environment, wheel
from .test_plan import MACHINE

UV = Path(sys.executable).with_name("uv")
TORCH = metadata.version("torch")
PROJECT = """
[project]
name = "demo"
version = "0.1"
requires-python = ">=3.9"
dependencies = ["needed", "torch"]
[project.optional-dependencies]
plots = ["drawn"]
[dependency-groups]
dev = ["tested"]
train = ["traced"]
[tool.uv]
index = [{url = "simple", default = true}]
"""
NAMES = ("needed", "drawn", "tested", "traced")
SCRIPT = """
from importlib import metadata
found = {dist.metadata["Name"] for dist in metadata.distributions()}
print("has", *sorted(found & {"needed", "drawn", "tested", "traced", "triton"}), metadata.version("torch"))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def run_uv(directory: Path, *words: str) -> str:
    command = [str(UV), *words, "--no-cache", "--quiet", "--python", sys.executable]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    return str(done.stdout)


def publish(tree: Tree, name: str, version: str = "1.0", needs: str = "") -> Path:
    """Adds a wheel to the index beside the script, with its hash."""
    directory = tree.code / "simple" / name
    directory.mkdir(parents=True, exist_ok=True)
    path = wheel(directory, name, version, needs)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with (directory / "index.html").open("a") as page:
        page.write(f'<a href="{path.name}#sha256={digest}">{path.name}</a>')
    return path


def write_project(tree: Tree, project: str = PROJECT) -> None:
    """A project and the wheels that it may need: of another torch, which needs triton, too."""
    for name in (*NAMES, "triton"):
        publish(tree, name)
    publish(tree, "torch", "99.0", "triton")
    tree.script(project, "pyproject.toml")
    tree.script(SCRIPT)


def lock_project(tree: Tree, kind: str) -> Path:
    """Locks the project into a file of this kind, and removes the files that a user of that kind would not have."""
    run_uv(tree.code, "lock")
    if kind != "uv.lock":
        form = "pylock.toml" if kind == "pylock.toml" else "requirements.txt"
        words = ("export", "--frozen", "--all-groups", "--no-dev", "--no-emit-project", "--format", form)
        tree.script(run_uv(tree.code, *words), kind)
        (tree.code / "uv.lock").unlink()
        (tree.code / "pyproject.toml").unlink()
    return tree.code / kind


def train(environment: Environment, tree: Tree, **variables: str) -> Finished:
    path = os.pathsep.join([str(UV.parent), os.environ["PATH"]])
    given = {"PATH": path, "SAGEMAKER_PROGRAM": "train.py", "PIP_INDEX_URL": f"file://{tree.code}/simple", **variables}
    return environment.train(tree, **given)


# It is installed


@pytest.mark.parametrize(
    ("kind", "groups", "expected"),
    [
        ("uv.lock", "", ["needed"]),
        ("uv.lock", "plots,train", ["drawn", "needed", "traced"]),
        ("pylock.toml", "", ["needed", "traced"]),
        ("requirements.txt", "", ["needed", "traced"]),
        ("pyproject.toml", "", ["needed"]),
        ("pyproject.toml", "plots train", ["drawn", "needed", "traced"]),
    ],
)
def test_a_lock_is_installed_without_its_framework(
    tree: Tree, environment: Environment, kind: str, groups: str, expected: list[str]
) -> None:
    write_project(tree)
    if kind != "pyproject.toml":
        lock_project(tree, kind)
    variables = {"SHOAL_DEPENDENCY_GROUPS": groups}
    done = train(environment, tree, **variables)
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == f"has {' '.join(expected)} {TORCH}"
    if kind == "pyproject.toml":
        return
    assert f"{kind} has torch 99.0, and this image {TORCH}, which stays" in done.out
    assert f"1 packages in {kind} belong to its framework and CUDA, and are left out" in done.out
    again = train(environment, tree, PATH=os.environ["PATH"], **variables)
    assert f"{kind}: its packages are installed already" in again.out
    assert f"{kind} has torch 99.0, and this image {TORCH}, which stays" in again.out
    assert again.out.splitlines()[-1] == done.out.splitlines()[-1], again.err


def test_a_changed_lock_is_installed_again(tree: Tree, environment: Environment) -> None:
    write_project(tree)
    lock_project(tree, "uv.lock")
    assert train(environment, tree).code == 0
    publish(tree, "needed", "2.0")
    run_uv(tree.code, "lock", "--upgrade")
    done = train(environment, tree)
    assert (done.code, "installed already" in done.out) == (0, False), done.err
    assert (environment.packages / "needed-2.0.dist-info").is_dir()


def test_modules_of_a_locked_project_are_imported_in_place(tree: Tree, environment: Environment) -> None:
    project = PROJECT.replace('["needed", "torch"]', '["needed", "member"]')
    member = '[project]\nname = "member"\nversion = "1"\n[build-system]\nrequires = []\nbuild-backend = "x"\n'
    write_project(tree, project + 'sources.member.workspace = true\nworkspace.members = ["packages/member"]\n')
    for place, name in (("src", "mine"), ("packages/member/src", "member")):
        (tree.code / place).mkdir(parents=True)
        (tree.code / place / f"{name}.py").write_text(f"print('{name} is imported')")
    (tree.code / "packages/member/pyproject.toml").write_text(member)
    lock_project(tree, "uv.lock")
    tree.script("import mine, member, needed")
    done = train(environment, tree)
    assert done.out.splitlines()[-2:] == ["mine is imported", "member is imported"], done.out + done.err


# Which file


@pytest.mark.parametrize(
    ("names", "program", "words", "unused"),
    [
        (("uv.lock", "pyproject.toml"), "train.py", ("--locked", "uv.lock"), ""),
        (("pylock.toml", "pyproject.toml"), "go.sh", ("--locked", "pylock.toml"), ""),
        (("uv.lock", "pylock.toml"), "-m pkg", ("--locked", "uv.lock"), "pylock.toml"),
        (("pyproject.toml",), "train.py", ("--locked", "pyproject.toml"), ""),
        (("requirements.txt", "uv.lock"), "train.py", ("-r", "requirements.txt"), "uv.lock"),
        (("setup.py", "uv.lock"), "train.py", (".", "--locked", "uv.lock"), ""),
    ],
)
def test_the_first_file_is_taken(
    tree: Tree, names: tuple[str, ...], program: str, words: tuple[str, ...], unused: str
) -> None:
    for name in ("train.py", "go.sh", *names):
        tree.script(PROJECT if name == "pyproject.toml" else "x", name)
    paths = contract.Paths(str(tree.base))
    job = contract.read_job(paths, contract.read_cluster(paths, "box"), {"SAGEMAKER_PROGRAM": program}, ())
    assert sidecars.install_commands(job, MACHINE) == [(*OURS, *words)]
    notes = [note for note in job.entry_notes if "is not read" in note]
    assert [f", and {unused} is not read." in note for note in notes] == ([True] if unused else [])


@pytest.mark.parametrize(
    "text", ["", "[tool.ruff]\n", "[project]\nname = 'x'\n", "[build-system]\nrequires = []\n", "dependencies = []\n"]
)
def test_a_pyproject_without_dependencies_installs_nothing(tree: Tree, text: str) -> None:
    tree.script(text, "pyproject.toml")
    assert code.inspect_code(str(tree.code)).lock == ""


def test_local_packages_stay_in_the_code(tree: Tree) -> None:
    sources = ("a", "../b", "/c", ".", "d/e")
    tree.script("".join(f'source = {{ editable = "{each}" }}\n' for each in sources), "uv.lock")
    (tree.code / "a" / "src").mkdir(parents=True)
    assert code.inspect_code(str(tree.code)).paths == (str(tree.code / "a/src"), str(tree.code / "d/e"))


# Versions that stay


def test_versions_that_the_image_needs_stay() -> None:
    table: dict[str, Any] = {
        "torch": ("2.0+cpu", "2.0"),
        "numpy": ("2.4", "1.26"),
        "rich": ("13.0", "14.0"),
        "same": ("1.0", "1.0"),
        "mpi4py": ("4.0", "3.1"),
    }
    pins = [Locked(name, wanted, f"{name}=={wanted}") for name, (_, wanted) in table.items()]
    pins += [Locked(name, "1.0", "") for name in ("nvidia-cublas-cu12", "nvidia-ml-py", "torch-nightly", "torchvision")]
    installed = {name: have for name, (have, _) in table.items()}
    found = locked.choose_pins("uv.lock", pins, installed, {"torch-nightly": "2.0+cpu"}, {"numpy": "<3,>=2"})
    assert [pin.name for pin in found.pins] == ["rich", "nvidia-ml-py", "torchvision"]
    assert found.notes == [
        "uv.lock has numpy 1.26, and packages of this image need <3,>=2: 2.4 stays",
        "uv.lock has mpi4py 3.1, and this image 4.0, which stays",
        "uv.lock has torch-nightly 1.0, and this image 2.0+cpu, which stays",
        "1 packages in uv.lock belong to its framework and CUDA, and are left out",
    ]
    other = [Locked("torch", "1.0", ""), Locked("torchvision", "1.0", "")]
    found = locked.choose_pins("uv.lock", other, installed, {}, {})
    assert found.pins == []
    assert found.notes[1] == "uv.lock has torchvision 1.0, which is left out: this image has another torch"


def test_without_a_framework_all_is_installed() -> None:
    pins = [Locked(name, "1.0", "") for name in ("torch", "nvidia-cublas-cu12", "torchvision")]
    assert locked.choose_pins("uv.lock", pins, {"rich": "1"}, {}, {}) == locked.Choice(pins, [])


# Errors


def change(path: Path, pattern: str, text: str) -> None:
    old = path.read_text()
    path.write_text(re.sub(pattern, text, old))
    assert path.read_text() != old


def swap_wheel(tree: Tree) -> None:
    """Somebody has changed a file of the index."""
    wheel(tree.code / "simple" / "needed", "needed", needs="more")
    page = tree.code / "simple" / "needed" / "index.html"
    change(page, "#sha256=[0-9a-f]*", "")


def rename_wheel(tree: Tree) -> None:
    """The lock was made where another wheel fits."""
    name, other = "needed-1.0-py3-none-any.whl", "needed-1.0-cp311-cp311-macosx_11_0_arm64.whl"
    directory = tree.code / "simple" / "needed"
    (directory / name).rename(directory / other)
    change(directory / "index.html", name, other)


@pytest.mark.parametrize(
    ("spoil", "variables", "code", "head"),
    [
        (swap_wheel, {}, 1, "The file of needed==1.0 on the index has another hash than the lock file says"),
        (rename_wheel, {}, 1, "needed==1.0 has no wheel for the "),
        (
            lambda tree: change(tree.code / "uv.lock", ">=3.9", "<3.9"),
            {},
            2,
            "ERROR: uv.lock is for Python <3.9, and this image has Python 3.",
        ),
        (
            lambda tree: shutil.rmtree(tree.code / "simple" / "needed"),
            {},
            1,
            "No index and no directory of wheels has needed",
        ),
        (
            lambda tree: (tree.code / "pyproject.toml").unlink(),
            {},
            2,
            "ERROR: uv.lock has no pyproject.toml beside it",
        ),
        (
            lambda tree: None,
            {"SHOAL_DEPENDENCY_GROUPS": "trian"},
            2,
            "ERROR: SHOAL_DEPENDENCY_GROUPS names 'trian', which pyproject.toml does not have. Did you mean 'train'?",
        ),
        (lambda tree: change(tree.code / "uv.lock", r"(?s)\A", "<<<<<<< HEAD\n"), {}, 2, "ERROR: uv.lock cannot be"),
        (lambda tree: None, {"PATH": os.defpath}, 1, "ERROR: uv 0."),
    ],
)
def test_the_cause_of_a_failure_is_in_the_first_line(
    tree: Tree,
    environment: Environment,
    spoil: Callable[[Tree], None],
    variables: dict[str, str],
    code: int,
    head: str,
) -> None:
    write_project(tree)
    lock_project(tree, "uv.lock")
    spoil(tree)
    done = train(environment, tree, **variables)
    assert done.code == 1, done.out + done.err
    assert tree.failure.startswith(head), tree.failure
    assert "Fix: " in tree.failure.split("\n")[0]
    assert environment.installed() == set()


@pytest.mark.parametrize(
    ("printed", "head"),
    [
        (
            "error: Failed to fetch: https://me:secret@index.test/simple/good/\n  cause: error sending request for url"
            " (https://index.test/simple/good/)\n  cause: client error (Connect)\n  cause: Connection refused (os 111)",
            "uv cannot reach index.test: Connection refused. Fix: ",
        ),
        (
            "error: Failed to fetch: https://pypi.org/simple/idna/\n  cause: invalid peer certificate: UnknownIssuer\n",
            "uv does not trust the certificate of pypi.org: UnknownIssuer. Fix: ",
        ),
        (
            "  cause: Because good was not found in the package registry and you require good==1.0, we can\n\nhint: An "
            "index URL (https://index.test/simple) could not be queried due to a lack of valid authentication",
            "The index https://index.test/simple asks for a login, or refuses this one, so good is missing. Fix: ",
        ),
        (
            "error: Failed to download and build `good @ git+https://x/y@01`\n  cause: Git operation failed\n  cause: "
            "Git executable not found.",
            "The lock file has good from Git, and the image has no git. Fix: ",
        ),
    ],
)
def test_the_cause_is_read_from_what_uv_prints(printed: str, head: str) -> None:
    found = setup_failure.explain_pip_failure(printed)
    assert found.startswith(head), found
    assert "secret" not in found


def test_a_downloaded_uv_must_have_its_hash(tree: Tree, environment: Environment) -> None:
    write_project(tree)
    lock_project(tree, "uv.lock")
    publish(tree, "uv", read_table("uv")["version"])
    done = train(environment, tree, PATH=os.defpath)
    assert done.code == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.out + done.err
    assert environment.installed() == set()


def test_files_for_hosts_without_a_network_are_downloaded(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tree)
    pins, _ = locked.parse_requirements(lock_project(tree, "requirements.txt").read_text())
    pins = [pin for pin in pins if pin.name in NAMES]
    monkeypatch.setattr(locked, "format_uv", lambda: "")
    environ = {**os.environ, "PIP_INDEX_URL": f"file://{tree.code}/simple", "PIP_EXTRA_INDEX_URL": ""}
    assert locked.download_pins(pins, (), str(tmp_path / "to"), environ) == 0
    assert {path.name.partition("-")[0] for path in (tmp_path / "to").iterdir()} == {"needed", "traced"}
    wrong = [pins[0]._replace(line="needed==1.0 --hash=sha256:" + "0" * 64)]
    assert locked.download_pins(wrong, (), str(tmp_path / "other"), environ) == 1
    with pytest.raises(ContractError, match="needed: without a hash, as from Git"):
        locked.download_pins([Locked("needed", "", "needed @ git+https://x@01")], (), str(tmp_path), environ)


# Reading


def test_markers_of_a_pylock_choose_groups(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.code)
    files = '[{{url = "x", hashes = {{sha256 = "a"}}}}]'
    entry = f'[[packages]]\nname = "{{0}}"\nversion = "1"\nmarker = "{{1}}"\nwheels = {files}\n'
    markers = {
        "a": "'train' in dependency_groups",
        "b": "'test' in dependency_groups or 'plots' in extras",
        "c": "python_version >= '3' and 'train' not in dependency_groups",
        "d": "sys_platform == 'win32'",
    }
    head = 'lock-version = "1.0"\nextras = ["plots"]\ndependency-groups = ["train", "test"]\n'
    tree.script(head + "".join(entry.format(*each) for each in markers.items()), "pylock.toml")
    names = {groups: [pin.name for pin in locked.read_pylock(groups)] for groups in ((), ("train",), ("plots",))}
    assert names == {(): ["c"], ("train",): ["a"], ("plots",): ["b", "c"]}
    assert locked.read_pylock(("train",))[0].line == "a==1 --hash=sha256:a"
    with pytest.raises(ContractError, match=r"'trane', which pylock.toml does not have\. Did you mean 'train'"):
        locked.read_pylock(("trane",))


def test_groups_of_a_pyproject_include_others(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.code)
    text = '[dependency-groups]\na = ["x", {include-group = "B_b"}]\nb-b = ["y"]\nc = [{include-group = "c"}]\n'
    tree.script(text, "pyproject.toml")
    assert locked.read_pyproject(["a"]) == ["x", "y"]
    with pytest.raises(ContractError, match="'c' is missing or includes itself"):
        locked.read_pyproject(["c"])


def test_requirements_with_hashes_are_a_lock() -> None:
    pinned = "# made by uv\n--index-url https://a/simple\nB_b[x]==1.0 ; python_version > '3' \\\n    --hash=sha256:a\n"
    assert locked.has_hashes(pinned)
    assert not locked.has_hashes("a==1\n# --hash=sha256:a")
    assert not locked.has_hashes(pinned + "-r other.txt\n")
    pins, options = locked.parse_requirements(pinned + "c==2 ; sys_platform == 'win32' --hash=sha256:b\n")
    assert [(pin.name, pin.version) for pin in pins] == [("b-b", "1.0")]
    assert options == ["--index-url https://a/simple"]
    with pytest.raises(ContractError, match="'a>=1' is not pinned"):
        locked.parse_requirements("a>=1 --hash=sha256:a")

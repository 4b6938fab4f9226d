"""`shoal bundle`: what it tells of what it has collected; the engine, apt and pip are not asked here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import docker_client
from shoal.builds import base_image, bundle, bundled, plan
from shoal.commands import dependencies
from shoal.docker_client import containers
from shoal.errors import BuildError, BundleError, DiskError, UsageError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec
from shoal.sources import lock

from ..tested_images import PYTORCH_CPU, PYTORCH_CU130, PYTORCH_PY313
from ..waiting import error_in_time


def write_bundle(directory: Path, *suites: str) -> Path:
    for suite in suites:
        (directory / suite / "debs").mkdir(parents=True)
        (directory / suite / "debs" / "Packages").touch()
        (directory / suite / "debs" / f"python3_{suite}.deb").touch()
        (directory / suite / "base.tar").touch()
    (directory / "wheels").mkdir()
    bundled.write_sums(directory)
    return directory


def test_a_build_is_given_the_packages_of_its_suite(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    host = bundled.read_settings(write_bundle(tmp_path, "bookworm", "trixie"))
    own = plan.install_own_packages(project, "3.11")
    for image in (matrix.select(PYTORCH_CU130), matrix.select(PYTORCH_PY313)):
        sources = plan.gather_sources(project, matrix, image, own)
        files = sources.context_files(matrix, host)
        names = {name for name in files if name.startswith("machine/debs/")}
        assert names == {"machine/debs/Packages", f"machine/debs/python3_{image.system.suite}.deb"}
        assert files["machine/sources.list"] == b"deb [trusted=yes] file:/run/machine/debs ./\n"


def test_a_bundle_that_lacks_a_system_is_reported(
    matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_image, "find_base", lambda *_: base_image.BaseImage("x", "sha256:1", "x"))
    directory = write_bundle(tmp_path, "bookworm")
    client: Any = None
    bundled.load_bases(client, directory, matrix.systems()[:1])
    with pytest.raises(UsageError, match=r"for Debian bookworm, not for trixie\. Fix: add the images .*shoal bundle"):
        bundled.load_bases(client, directory, matrix.systems())
    with pytest.raises(UsageError, match="not a bundle"):
        bundled.read_settings(directory / "wheels")


CHANGES: dict[str, Callable[[Path], object]] = {
    "bookworm/debs/python3_bookworm.deb: changed": lambda of: (of / "bookworm/debs/python3_bookworm.deb").write_text(
        "x"
    ),
    "bookworm/debs/Packages: changed": lambda of: (of / "bookworm/debs/Packages").write_text("Package: evil\n"),
    "bookworm/base.tar: changed": lambda of: (of / "bookworm/base.tar").write_text("another"),
    "bookworm/debs/python3_bookworm.deb: missing": lambda of: (of / "bookworm/debs/python3_bookworm.deb").unlink(),
    "wheels/new.whl: not listed": lambda of: (of / "wheels/new.whl").touch(),
    "trixie: not listed": lambda of: (of / "trixie").symlink_to(of.parent, target_is_directory=True),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_bundle_that_was_changed_on_the_way_is_refused(tmp_path: Path, words: str) -> None:
    """`sha256sum` refuses it too, where there is no `shoal` yet."""
    directory = write_bundle(tmp_path, "bookworm")
    command = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    subprocess.run(command, cwd=directory, check=True)
    CHANGES[words](directory)
    with pytest.raises(
        BundleError, match=rf"1 files are not as SHA256SUMS says:\n  {words}\nFix: copy the bundle again"
    ):
        bundled.check_bundle(directory, None)
    ended = subprocess.run(command, cwd=directory, capture_output=True, check=False)
    assert (ended.returncode != 0) == (not words.endswith("not listed"))


def test_a_bundle_whose_list_was_changed_too_has_another_digest(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path, "bookworm")
    digest = bundled.check_bundle(directory, None)
    assert bundled.check_bundle(directory, digest) == bundled.check_bundle(directory, f"sha256:{digest}") == digest
    (directory / "bookworm" / "base.tar").write_text("another")
    bundled.write_sums(directory)
    with pytest.raises(BundleError, match=rf"its digest is sha256:\w+, not {digest}"):
        bundled.check_bundle(directory, digest)


def test_a_changed_file_is_not_listed_as_one_that_was_made_here(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path, "bookworm")
    (directory / "wheels" / "of-an-interrupted-run.whl").touch()
    (directory / "bookworm" / "base.tar").unlink()
    bundle._check_unchanged(directory)
    (directory / "bookworm" / "debs" / "Packages").write_text("Package: evil\n")
    with pytest.raises(BundleError, match=r"changed since it was made: bookworm/debs/Packages\. Fix: remove"):
        bundle._check_unchanged(directory)


def add_file(path: str) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).touch()

    return change


def link(path: str, target: str) -> Callable[[Path], object]:
    return lambda of: (of / path).symlink_to(target)


ADDED: dict[str, Callable[[Path], object]] = {
    "a file elsewhere": add_file("notes.txt"),
    "a link to a directory": link("host", "../elsewhere"),
    "a link to a wheel": link("wheels/x-1-py3-none-any.whl", "../../private"),
    "a link to another suite": link("trixie", "/etc"),
    "a pipe": lambda of: os.mkfifo(of / "wheels" / "x-1-py3-none-any.whl"),
    "a name with a line break": add_file("wheels/x\n.whl/a"),
}


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ADDED)
def test_files_of_somebody_else_are_not_listed_as_made_here(tmp_path: Path, name: str, listed: bool) -> None:
    directory = write_bundle(tmp_path / "bundle", "bookworm")
    ADDED[name](directory)
    if not listed:
        (directory / "SHA256SUMS").unlink()
    with pytest.raises(BundleError, match="not made by this command"):
        bundle._check_unchanged(directory)


@pytest.mark.parametrize("target", ["new", "private"])
def test_a_list_that_is_a_link_is_not_written_through(tmp_path: Path, target: str) -> None:
    (tmp_path / "private").write_text("private")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "SHA256SUMS").symlink_to(f"../{target}")
    with pytest.raises(UsageError, match="not a bundle"):
        bundle._check_unchanged(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("path", "again"),
    [
        ("host/shoal-99-py3-none-any.whl", False),
        ("bookworm/debs/libc6_99_amd64.deb", False),
        ("wheels/torch-99-py3-none-any.whl", False),
        ("host/shoal-1-py3-none-any.whl", True),
    ],
)
def test_a_file_that_only_looks_like_one_of_a_bundle_is_refused(
    project: Project, matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, again: bool
) -> None:
    """`pip install --find-links` would take its version. What an interrupted command leaves is made again."""
    directory = write_bundle(tmp_path / "bundle", "bookworm")
    add_file(path)(directory)

    def make_again(*_: object) -> set[str]:
        if again:
            (directory / "new").write_text("made here")
            (directory / "new").replace(directory / path)
        return set()

    monkeypatch.setattr(docker_client, "connect", lambda: None)
    monkeypatch.setattr(bundle, "_add_system", lambda *_: "debian:bookworm-slim")
    monkeypatch.setattr(bundle, "_add_wheels", lambda *_: set())
    monkeypatch.setattr(bundle, "add_shoal", make_again)
    images = [matrix.select(PYTORCH_CPU)]
    with contextlib.nullcontext() if again else pytest.raises(BundleError, match=f"not made by this command: {path}"):
        bundle.fill_bundle(project, matrix, images, directory, print)
    assert (path in bundled.read_sums(directory)) == again


def test_files_of_a_scripts_lock_are_listed(
    project: Project, matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(directory: Path) -> None:
        (directory / "wheels").mkdir()
        (directory / "wheels" / "needed-1.0-py3-none-any.whl").write_text("x")

    monkeypatch.setattr(docker_client, "connect", lambda: None)
    monkeypatch.setattr(bundle, "_add_system", lambda *_: "debian:bookworm-slim")
    monkeypatch.setattr(bundle, "_add_wheels", lambda *_: set())
    monkeypatch.setattr(bundle, "add_shoal", lambda *_: None)
    for _ in range(2):  # the second time, they are there
        bundle.fill_bundle(project, matrix, [matrix.select(PYTORCH_CPU)], tmp_path / "b", print, [add])
        assert "wheels/needed-1.0-py3-none-any.whl" in bundled.read_sums(tmp_path / "b")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_list_that_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "SHA256SUMS")
    assert isinstance(error_in_time(lambda: bundled.check_bundle(tmp_path, None)), UsageError)


def test_huge_and_nested_bundles_are_refused(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path / "bundle", "bookworm")
    digest = bundled.check_bundle(directory, None)
    os.truncate(directory / "bookworm" / "base.tar", 1 << 40)
    with pytest.raises(BundleError, match="its digest is"):  # a terabyte of zeros is not read before
        bundled.check_bundle(directory, "0" * 64)
    (directory / "/".join("a" * 150)).mkdir(parents=True)
    with pytest.raises(BundleError, match="more than 100 directories"):
        bundled.check_bundle(directory, digest)


def test_a_huge_manifest_of_a_base_is_not_held_in_memory(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "base.tar", "w") as archive:
        add(archive, "manifest.json", bytes(17 << 20))
    with pytest.raises(BundleError, match="larger than"):
        bundled.copy_image(tmp_path / "base.tar", io.BytesIO())


def write_image(path: Path, **documents: object) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, document in documents.items():
            content = json.dumps(document).encode()
            entry = tarfile.TarInfo(f"./{name}.json" if name != "repositories" else name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


NAMED: dict[str, dict[str, object]] = {
    "manifest": {"manifest": [{"RepoTags": ["debian:bookworm-slim", "prod:1"]}]},
    "several": {"manifest": [{"RepoTags": ["debian:bookworm-slim"]}, {"RepoTags": ["prod:1"]}]},
    "legacy": {"manifest": [{"RepoTags": None}], "repositories": {"prod": {"1": "sha256:0"}}},
    "index": {"index": {"manifests": [{"annotations": {"io.containerd.image.name": "docker.io/library/prod:1"}}]}},
    "lower case": {"manifest": [{"repotags": ["prod:1"]}]},
    "other letters": {"index": {"manife\u017fts": [{"Annotations": {"org.opencontainers.image.ref.name": "prod:1"}}]}},
}


@pytest.mark.parametrize("form", NAMED)
def test_a_base_takes_no_other_images_name(
    matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(base_image, "find_base", lambda *_: None)
    directory = write_bundle(tmp_path, "bookworm")
    write_image(directory / "bookworm" / "base.tar", **NAMED[form])
    loaded: list[object] = []
    client: Any = SimpleNamespace(images=SimpleNamespace(load=loaded.append))
    with pytest.raises(
        BundleError, match=r"it would name images prod:1, and may hold the base of Debian bookworm alone"
    ):
        bundled.load_bases(client, directory, matrix.systems()[:1])
    assert loaded == []


@pytest.mark.parametrize("second", ["repotags", "RepoTags", "Repotag\u017f"])
def test_a_base_has_one_key_for_its_names(tmp_path: Path, second: str) -> None:
    """Docker 20.10 names the image as the last of these keys says."""
    with tarfile.open(tmp_path / "base.tar", "w") as archive:
        add(archive, "manifest.json", f'[{{"RepoTags": ["debian:bookworm-slim"], "{second}": ["prod:1"]}}]'.encode())
    with pytest.raises(BundleError, match=r"not an archive of images: manifest\.json has a key twice"):
        bundled.copy_image(tmp_path / "base.tar", io.BytesIO())


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("debian:bookworm-slim", True),
        ("docker.io/library/debian:bookworm-slim", True),
        ("shoal-base:bookworm-0123456789ab", True),
        ("shoal-base:trixie-0123456789ab", False),
        ("shoal-base:latest", False),
    ],
)
def test_a_base_has_its_own_name(
    matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fits: bool
) -> None:
    monkeypatch.setattr(base_image, "find_base", lambda *_: None)
    directory = write_bundle(tmp_path, "bookworm")
    write_image(directory / "bookworm" / "base.tar", manifest=[{"RepoTags": [name]}])
    loaded: list[object] = []
    client: Any = SimpleNamespace(images=SimpleNamespace(load=loaded.append))
    with contextlib.nullcontext() if fits else pytest.raises(BundleError):
        bundled.load_bases(client, directory, matrix.systems()[:1])
    assert len(loaded) == fits


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for field, value in fields.items():
        setattr(entry, field, value)
    archive.addfile(entry, io.BytesIO(content))


@pytest.mark.parametrize("name", ["/manifest.json", "../manifest.json", "link/manifest.json"])
def test_a_manifest_that_only_docker_would_find_is_refused(tmp_path: Path, name: str) -> None:
    """Docker 20.10 names images as each of them says, but for the second."""
    path = write_image(tmp_path / "base.tar", manifest=[{"RepoTags": ["debian:bookworm-slim"]}])
    with tarfile.open(path, "a") as archive:
        add(archive, "link", type=tarfile.SYMTYPE, linkname=".")
        add(archive, name, b'[{"RepoTags": ["prod:1"]}]')
    with pytest.raises(BundleError, match="not an archive of images"):
        bundled.copy_image(path, io.BytesIO())


def test_docker_is_given_the_checked_files(tmp_path: Path) -> None:
    """For Python a global header renames all entries after it; Go knows nothing of that."""
    own = [{"RepoTags": ["debian:bookworm-slim"]}]
    path = tmp_path / "base.tar"
    with tarfile.open(path, "w", pax_headers={"path": "other"}) as archive:
        add(archive, "manifest.json", b'[{"RepoTags": ["prod:1"]}]')
    hidden = path.read_bytes()
    write_image(path, manifest=own)
    path.write_bytes(path.read_bytes().rstrip(b"\0").ljust(1024, b"\0") + hidden)
    out = io.BytesIO()
    names = bundled.copy_image(path, out)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        assert archive.pax_headers == {}
        found = {entry.name: archive.extractfile(entry) for entry in archive}
    manifest = found["manifest.json"]
    assert manifest is not None
    assert json.load(manifest) == own
    assert names == {"debian:bookworm-slim"}
    assert found.keys() == {"manifest.json", "other"}


@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b"no archive"])
def test_a_file_that_is_no_archive_of_images_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "base.tar").write_bytes(content)
    with contextlib.suppress(BundleError):
        assert bundled.copy_image(tmp_path / "base.tar", io.BytesIO()) == set()
    write_image(tmp_path / "deep.tar", manifest=[1])
    with pytest.raises(BundleError, match="not an archive of images"):
        bundled.copy_image(tmp_path / "deep.tar", io.BytesIO())


def test_debian_packages_come_whole_out_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's own Python 3.11.2 has no `extractall(filter=…)`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (("debs", tarfile.DIRTYPE), ("debs/a.deb", tarfile.REGTYPE), ("debs/odd", tarfile.FIFOTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o755
            archive.addfile(entry)
    out.seek(0)
    monkeypatch.setattr(containers, "read_archive", lambda *_: contextlib.nullcontext(out))
    container: Any = None
    with pytest.raises(BuildError, match="/debs of a container: debs/odd: neither a file nor a directory"):
        bundle._fetch(container, "/debs", tmp_path)
    assert (tmp_path / "debs" / "a.deb").is_file()
    assert "filter=" not in Path(bundle.__file__).read_text()


def test_json_has_what_was_collected(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docker_client, "connect", lambda: None)
    monkeypatch.setattr(
        base_image, "provide_base", lambda *_, **__: base_image.BaseImage("debian:bookworm-slim", "sha256:1", "debian")
    )
    monkeypatch.setattr(bundle, "_save_image", lambda _, reference, path: path.write_text(reference))
    monkeypatch.setattr(bundle, "_add_debs", lambda *_: None)
    monkeypatch.setattr(bundle, "_add_wheels", lambda *_: set())
    monkeypatch.setattr(bundle, "add_shoal", lambda *_: None)
    monkeypatch.chdir(project.root)
    dependencies.bundle_images(tmp_path, ["huggingface"], as_json=True)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["directory"], document["bases"]) == (str(tmp_path), ["debian:bookworm-slim"])
    assert [tag.partition(":")[0] for tag in document["images"]] == ["pytorch-training", "huggingface-training"]
    assert "python3-venv" in document["packages"]
    assert document["bytes"] == len("debian:bookworm-slim") + (tmp_path / "SHA256SUMS").stat().st_size
    assert document["digest"] == bundled.check_bundle(tmp_path, f"sha256:{document['digest']}")
    assert f"shoal build huggingface --bundle {tmp_path} --bundle-digest sha256:{document['digest']}" in printed.err
    assert "wheels: huggingface-training" in printed.err
    assert f"pip install --no-index --find-links {tmp_path}/host shoal" in printed.err


def test_packages_that_lie_there_stay_in_the_index(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for directory, names in ((old, ("a_1.deb", "b_1.deb", "gone_1.deb")), (new, ("a_1.deb", "c_1.deb"))):
        directory.mkdir()
        entries = [f"Package: {name[0]}\nDescription: x\n .\n y\nFilename: ./{name}\nSize: 1\n\n" for name in names]
        (directory / "Packages").write_text("".join(entries))
        for name in names:
            (directory / name).touch()
    (old / "gone_1.deb").unlink()
    bundle._index_others(new, old)
    index = (new / "Packages").read_text()
    assert re.findall("Filename: ./(.*)", index) == ["a_1.deb", "c_1.deb", "b_1.deb"]
    assert index.endswith("Filename: ./b_1.deb\nSize: 1\n\n")


def test_a_file_is_refused_before_docker_is_asked(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("precious")
    monkeypatch.chdir(project.root)
    with pytest.raises(UsageError, match="file: is a file; expected a directory, new or of a bundle"):
        dependencies.bundle_images(tmp_path / "file", ["pytorch"])
    assert (tmp_path / "file").read_text() == "precious"


class Saved:
    """An engine with one image, whose archive comes in these chunks."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.images, self._chunks = self, chunks

    def get(self, _: str) -> Saved:
        return self

    def save(self, *, named: bool) -> Iterable[bytes]:
        assert named
        return self._chunks


def save(chunks: Iterable[bytes], path: Path) -> None:
    bundle._save_image(Saved(chunks), "base", path)  # type: ignore[arg-type]


def test_a_full_disk_is_reported_and_leaves_no_truncated_file(small_disk: Path) -> None:
    with pytest.raises(DiskError, match=rf"^{small_disk}: No space left on device. Fix: free some"):
        save([bytes(2**20)] * 2, small_disk / "base.tar")
    assert list(small_disk.iterdir()) == []


def test_an_interrupt_keeps_nothing_that_is_cut_off(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    (tmp_path / "base.tar").write_bytes(b"from before")
    with pytest.raises(KeyboardInterrupt):
        save(chunks(), tmp_path / "base.tar")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"base.tar": b"from before"}
    save([b"whole", b"!"], tmp_path / "base.tar")
    assert (tmp_path / "base.tar").read_bytes() == b"whole!"


@pytest.mark.parametrize(
    ("words", "kind"), [("ERROR: no such file", BuildError), ("OSError: [Errno 28] No space left on device", DiskError)]
)
def test_wheels_that_cannot_be_fetched_are_reported_with_pips_message(
    project: Project, matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, kind: type
) -> None:
    def download(scratch: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
        (scratch / "wheels").mkdir(exist_ok=True)
        (scratch / "wheels" / "half.whl").write_bytes(b"half")
        return subprocess.CompletedProcess([], 1, "", words)

    monkeypatch.setattr(bundle, "_pip_download", download)
    (tmp_path / "wheels").mkdir()
    with pytest.raises(kind, match=re.escape(words)):
        bundle._add_wheels(project, matrix, matrix.select("pytorch"), tmp_path / "wheels")
    assert list(tmp_path.rglob("*")) == [tmp_path / "wheels"]


def test_only_the_wheels_that_are_not_there_are_fetched(
    project: Project, matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = matrix.select("pytorch")
    asked: list[str] = []

    def download(scratch: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append((scratch / "requirements.txt").read_text())
        (scratch / "wheels").mkdir()
        (scratch / "wheels" / "one.whl").write_bytes(b"whole")
        return subprocess.CompletedProcess([], 0, "", "")

    wanted = [pin for layer in lock.read_image_pins(project, matrix, image).values() for pin in layer]
    first, *others = wanted
    monkeypatch.setattr(bundle, "_pip_download", download)
    monkeypatch.setattr(lock, "find_locked_wheels", lambda *_: iter([(first, tmp_path)]))
    (tmp_path / "wheels").mkdir()
    bundle._add_wheels(project, matrix, image, tmp_path / "wheels")
    assert asked == ["".join(f"{pin.name}==={pin.version} --hash=sha256:{pin.sha256}\n" for pin in others)]
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["one.whl"]
    monkeypatch.setattr(lock, "find_locked_wheels", lambda *_: ((pin, tmp_path) for pin in wanted))
    bundle._add_wheels(project, matrix, image, tmp_path / "wheels")
    assert len(asked) == 1

"""The labels that say where an image comes from: its base, and the commit of its sources."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from shoal.builds import base_image
from shoal.builds.base_image import BaseImage
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec
from shoal.sources import provenance
from shoal.sources.provenance import Provenance

OCI = "org.opencontainers.image"
DEBIAN = BaseImage("debian:bookworm-slim", "sha256:1", "docker.io/library/debian:bookworm-slim", "sha256:2")
PARENT = BaseImage("one:1.0", "sha256:3", "one:1.0")


def git(directory: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.check_output(["git", *names, "-C", directory, *arguments], text=True).strip()


def commit(directory: Path, **files: str) -> str:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        git(directory, "add", str(path))
    git(directory, "commit", "-qm", "more")
    return git(directory, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "checkout"
    directory.mkdir()
    git(directory, "init", "-q")
    return directory


@pytest.mark.parametrize(
    ("beneath", "inherited", "found", "labels"),
    [
        (DEBIAN, {}, Provenance(), {"base.name": DEBIAN.name, "base.digest": "sha256:2"}),
        (PARENT, {}, Provenance("ab", "https://example.org"), {"revision": "ab", "source": "https://example.org"}),
        # The labels of the image below are not true of the one on top of it.
        (PARENT, {"base.digest": "sha256:2", "revision": "ab"}, Provenance(), {"base.digest": "", "revision": ""}),
        (PARENT, {"base.digest": "sha256:2", "title": "one"}, Provenance("cd"), {"base.digest": "", "revision": "cd"}),
        (PARENT, {"base.digest": ""}, Provenance(), {}),
    ],
)
def test_labels_name_the_base_and_the_origin(
    beneath: BaseImage, inherited: dict[str, str], found: Provenance, labels: dict[str, str]
) -> None:
    below = {f"{OCI}.{name}": value for name, value in inherited.items()}
    expected = {"base.name": beneath.name, **labels}
    assert provenance.make_oci_labels(beneath.name, beneath.digest, below, found) == {
        f"{OCI}.{name}": value for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("digests", "digest"),
    [
        (["debian@sha256:2"], "sha256:2"),
        (["mirror.example.org/debian@sha256:3", "debian@sha256:2"], "sha256:2"),  # another registry's is another's
        ([], ""),
        (None, ""),
    ],
)
def test_a_base_that_was_pulled_has_a_digest(matrix: BuildSpec, digests: list[str] | None, digest: str) -> None:
    image = SimpleNamespace(id="sha256:1", attrs={"RepoDigests": digests})
    client: Any = SimpleNamespace(images=SimpleNamespace(get=lambda _: image))
    assert base_image.find_base(client, matrix.systems()[0]) == BaseImage(
        DEBIAN.reference, "sha256:1", DEBIAN.name, digest
    )


def test_a_base_made_here_has_the_engines_name_and_no_digest(matrix: BuildSpec) -> None:
    name, system = "shoal-base:bookworm-abc", matrix.systems()[0]

    def get(asked: str) -> object:
        if asked == system.upstream:
            raise docker.errors.ImageNotFound(asked)
        return SimpleNamespace(id="sha256:1")

    recipe = {"label": f"{base_image.RECIPE_LABEL}={base_image.recipe_digest(system)}"}
    lists = {base_image.REPOSITORY: [{"RepoTags": [name]}]}
    api = SimpleNamespace(images=lambda name, filters: lists[name] if filters == recipe else [])
    client: Any = SimpleNamespace(images=SimpleNamespace(get=get), api=api)
    assert base_image.find_base(client, system) == BaseImage(name, "sha256:1", name, "")


def test_the_revision_is_the_last_commit_of_what_goes_in(checkout: Path) -> None:
    assert provenance.find_revision(checkout) == ""
    commit(checkout, README="1")
    assert provenance.find_revision(checkout) == ""
    first = commit(checkout, toolkit__a="1")
    commit(checkout, README="2")
    assert provenance.find_revision(checkout) == first
    second = commit(checkout, toolkit__a="2")
    assert provenance.find_revision(checkout) == second
    (checkout / "README").write_text("3")
    assert provenance.find_revision(checkout) == second
    (checkout / "toolkit" / "b").touch()
    assert provenance.find_revision(checkout) == ""
    (checkout / "toolkit" / "b").unlink()
    (checkout / "toolkit" / "a").write_text("3")
    assert provenance.find_revision(checkout) == ""


def test_a_shallow_clone_says_none_that_it_cannot_know(checkout: Path, tmp_path: Path) -> None:
    commit(checkout, toolkit__a="1")
    commit(checkout, README="1")
    url = f"file://{checkout}"
    git(tmp_path, "clone", "-q", "--depth=1", url, "shallow")
    assert provenance.find_revision(tmp_path / "shallow") == ""
    head = commit(checkout, toolkit__a="2")
    git(tmp_path, "clone", "-q", "--depth=2", url, "deeper")
    assert provenance.find_revision(tmp_path / "deeper") == head


def test_without_git_there_is_no_revision(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(checkout, toolkit__a="1")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert provenance.find_revision(checkout) == ""


def test_installed_definitions_have_the_commit_of_their_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / provenance.REVISION).write_text("ab\n")
    assert provenance.find_revision(tmp_path) == "", "a project has no such file"
    monkeypatch.setattr(provenance, "INSTALLED", tmp_path)
    assert provenance.find_revision(tmp_path) == "ab"


def test_the_source_is_what_a_package_declares(tmp_path: Path) -> None:
    (tmp_path / "toolkit").mkdir()
    declared = tmp_path / "toolkit" / "pyproject.toml"
    declared.write_text('[project]\nname = "a"\n')
    assert provenance.read_provenance(Project(tmp_path)) == Provenance()
    declared.write_text('[project.urls]\nHomepage = "https://a.example"\nSource = "https://b.example"\n')
    assert provenance.read_provenance(Project(tmp_path)).source == "https://b.example"

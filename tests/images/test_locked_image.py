"""Which files of a source are a lock, and which images of earlier jobs are used for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import docker.errors
import pytest

from shoal.errors import UsageError
from shoal.jobs import locked_image
from shoal.jobs.job import JobRequest

PINNED = "a==1 --hash=sha256:0\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"uv.lock": "x", "pyproject.toml": "y", "pylock.toml": "z"}, ["uv.lock", "pyproject.toml"]),
        ({"pylock.toml": "z", "pyproject.toml": "y"}, ["pylock.toml"]),
        ({"requirements.txt": PINNED, "uv.lock": "x"}, ["requirements.txt"]),
        ({"requirements.txt": "a\n", "uv.lock": "x"}, []),
        ({"requirements.txt": f"-r other.txt\n{PINNED}"}, []),
        ({"requirements.txt": "\n", "pylock.toml": "x"}, ["pylock.toml"]),
        ({"pyproject.toml": "x"}, []),
        ({}, []),
    ],
)
def test_a_lock_is_read_as_train_does(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert list(locked_image.read_lock(tmp_path)) == expected


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "pylock.toml").symlink_to(tmp_path / "secret")
    assert locked_image.read_lock(tmp_path) == {}


class Images:
    """Docker's images, of which some are removed."""

    def __init__(self, *ids: str) -> None:
        self.ids = list(ids)

    def get(self, name: str) -> SimpleNamespace:
        if name not in self.ids:
            raise docker.errors.ImageNotFound(name)
        return SimpleNamespace(id=name)

    def remove(self, name: str) -> None:
        self.ids.remove(name)


def provide(images: Images, source: Path, image: str = "base", **variables: str) -> str:
    client = cast(Any, SimpleNamespace(images=images))
    request = JobRequest(source=source, entry_point="train.py", image=image, environment=variables)
    return locked_image.provide_image(client, request, "job", lambda _: None)


def test_an_image_is_used_for_its_lock_base_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[str] = []

    def install(*_: Any, **__: Any) -> Any:
        made.append(f"made{len(made)}")
        raise InterruptedError

    monkeypatch.setattr(locked_image, "_run_container", install)
    source, images = tmp_path / "code", Images("base", "other", "first")
    source.mkdir()
    assert provide(images, source) == "", "there is no lock"
    (source / "requirements.txt").write_text(PINNED)
    key = locked_image._compute_key("base", "", locked_image.read_lock(source))
    known = locked_image._List()
    known.add(key, "first", "owner", cast(Any, SimpleNamespace(images=images)))
    assert provide(images, source) == "first"
    assert provide(images, source, CA_REPOSITORY_ARN="arn") == "", "its token belongs to the job"
    for changed in ({"image": "other"}, {"SHOAL_DEPENDENCY_GROUPS": "train"}):
        with pytest.raises(InterruptedError):
            provide(images, source, **changed)
    known.directory.chmod(0o777)
    with pytest.raises(InterruptedError):
        provide(images, source)
    known.directory.chmod(0o700)
    images.ids.append("second")
    known.add("another", "second", "owner", cast(Any, SimpleNamespace(images=images)))
    assert "first" not in images.ids, "it has an earlier lock of the same owner"
    with pytest.raises(InterruptedError):
        provide(images, source)


def test_a_source_without_a_lock_cannot_be_bundled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no uv\.lock, pylock\.toml or requirements\.txt with hashes there"):
        locked_image.download_lock(cast(Any, None), "base", tmp_path, tmp_path, print)

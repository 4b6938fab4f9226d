"""The base images: a recipe for each system, and what mmdebstrap is given; no engine and no mirror are asked here."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import docker.errors
import pytest

from shoal.builds import base_image
from shoal.errors import BaseImageError
from shoal.matrix.spec import BuildSpec, System
from shoal.network.settings import NetworkSettings

HOST = NetworkSettings((), (), ("deb http://one.example/debian bookworm main",), (), None, (), (), release="bookworm")
MMDEBSTRAP = """\
#!/bin/sh
for word; do last=$word; echo "$word" >> {log}; done
cat "$last" >> {log}
for word; do case $word in */base.tar) tar -cf "$word" -T /dev/null;; esac; done
"""


@dataclass
class FakeImages:
    """An engine's images: none can be pulled; what is loaded is there, by its tag."""

    there: dict[str, dict[str, str]] = field(default_factory=dict)

    def get(self, tag: str) -> SimpleNamespace:
        if tag not in self.there:
            raise docker.errors.ImageNotFound(tag)
        return SimpleNamespace(id=f"sha256:{tag}", tags=[tag], attrs={})

    def pull(self, tag: str) -> None:
        raise docker.errors.APIError(f"no registry has {tag}")

    def list(self, repository: str, filters: dict[str, str]) -> list[dict[str, list[str]]]:
        name, _, value = filters["label"].partition("=")
        own = {tag: labels for tag, labels in self.there.items() if tag.startswith(f"{repository}:")}
        return [{"RepoTags": [tag]} for tag, labels in own.items() if labels.get(name) == value]

    def load(self, file: IO[bytes]) -> None:
        with tarfile.open(fileobj=file) as archive:
            config, manifest = (
                json.load(archive.extractfile(name))  # type: ignore[arg-type]
                for name in ("config.json", "manifest.json")
            )
        self.there[manifest[0]["RepoTags"][0]] = config["config"]["Labels"]


@pytest.fixture
def client() -> Any:
    images = FakeImages()
    return SimpleNamespace(images=images, api=SimpleNamespace(images=images.list))


@pytest.fixture
def systems(matrix: BuildSpec) -> dict[str, System]:
    return {system.suite: system for system in matrix.systems()}


def test_the_recipe_of_a_base_that_many_have_made_is_as_it_was(systems: dict[str, System]) -> None:
    """Another one is another image: all that stand on it would be built again, everywhere."""
    assert base_image.recipe_digest(systems["bookworm"]) == "800976e43a98"


def test_each_system_has_a_recipe_of_its_own(systems: dict[str, System]) -> None:
    """The sources of a base are where its apt looks for them, and no other is left there."""
    old, new = (base_image.make_recipe(systems[suite]) for suite in ("bookworm", "trixie"))
    assert (old[-1], new[-1]) == ("bookworm", "trixie")
    assert any(word.endswith('> "$1/etc/apt/sources.list"') for word in old)
    assert any(word.endswith('> "$1/etc/apt/sources.list.d/debian.sources"') for word in new)
    assert any('rm -rf "$1"/etc/apt/sources.list.d/*' in word and '"$1"/etc/apt/sources.list' in word for word in new)


def test_bases_are_bootstrapped_for_each_system_from_the_mirror_of_this_machine(
    client: Any, systems: dict[str, System], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    (tmp_path / "mmdebstrap").write_text(MMDEBSTRAP.format(log=log))
    (tmp_path / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(base_image, "explain_no_bootstrap", lambda _: "")
    progress: list[str] = []
    for suite in ("bookworm", "trixie"):
        made = base_image.provide_base(client, systems[suite], lambda: HOST, tmp_path / "cache", progress.append)
        assert made.reference.startswith(f"shoal-base:{suite}-")
        assert base_image.find_base(client, systems[suite]) == made
        *_, given, source = log.read_text().splitlines()
        assert (Path(given).name, source) == ("sources.list", f"deb http://one.example/debian {suite} main")
        assert suite in log.read_text().splitlines()
        log.unlink()
    assert [line for line in progress if line.startswith("base: pulling")] == [
        f"base: pulling debian:{suite}-slim" for suite in ("bookworm", "trixie")
    ]
    client.images.there.clear()
    assert base_image.provide_base(client, systems["trixie"], lambda: HOST, tmp_path / "cache", progress.append) == made
    assert not log.exists(), "it is kept, and not made again"


RECORDER = """#!/bin/sh
printf "%s\\n" "$@" >{log}
for word; do case $word in --aptopt=*) cat "${{word#--aptopt=}}" >{log}.conf;; esac; done
exit 1
"""


def test_no_password_of_a_proxy_is_on_a_command_line(
    systems: dict[str, System], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each user of the machine can read it."""
    (tmp_path / "mmdebstrap").write_text(RECORDER.format(log=tmp_path / "log"))
    (tmp_path / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(base_image, "explain_no_bootstrap", lambda _: "")
    line = 'Acquire::http::Proxy "http://me:hunter2@proxy:3128";'
    host = replace(HOST, apt_proxies=(line,))
    with pytest.raises(BaseImageError):
        base_image._run_mmdebstrap(systems["bookworm"], host, tmp_path / "base.tar", print)
    assert "hunter2" not in (tmp_path / "log").read_text()
    assert line in (tmp_path / "log.conf").read_text().splitlines()


def test_a_base_of_another_system_is_not_found(client: Any, systems: dict[str, System]) -> None:
    client.images.there["debian:trixie-slim"] = {}
    found = base_image.find_base(client, systems["trixie"])
    assert found is not None
    assert found.reference == "debian:trixie-slim"
    assert base_image.find_base(client, systems["bookworm"]) is None

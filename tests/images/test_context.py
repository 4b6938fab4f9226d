"""The build context: deterministic, fed by the machine's configuration, which never enters the fingerprint."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.builds import plan
from shoal.docker_client import archive
from shoal.matrix.project import LAYERS, Project
from shoal.matrix.spec import BuildSpec
from shoal.network import settings
from shoal.network.settings import NetworkSettings
from shoal.sources.lock import Pin, find_locked_wheels

from ..tested_images import PYTORCH_CPU

PLAIN = NetworkSettings((), (), (), (), None, (), ())


def gather(project: Project, matrix: BuildSpec, name: str) -> plan.Sources:
    image = matrix.select(name)
    own = plan.install_own_packages(project, image.python_version)
    return plan.gather_sources(project, matrix, image, own)


def tar_of(files: dict[str, archive.Content]) -> bytes:
    buffer = io.BytesIO()
    archive.write_tar(files, buffer)
    return buffer.getvalue()


def test_equal_contents_give_equal_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"2")
    one = tar_of({"a": b"1", "b/c": tmp_path / "x"})
    (tmp_path / "x").touch()
    two = tar_of({"b/c": tmp_path / "x", "a": b"1"})
    assert one == two
    with tarfile.open(fileobj=io.BytesIO(one)) as archive:
        assert {(entry.name, entry.uid, entry.mtime) for entry in archive} == {("a", 0, 0), ("b/c", 0, 0)}


def test_the_context_holds_what_the_dockerfile_mounts(project: Project, matrix: BuildSpec) -> None:
    image = matrix.select("pytorch")
    sources = gather(project, matrix, image.tag)
    files = sources.context_files(matrix, PLAIN)
    for name in LAYERS:
        assert f"{name}/requirements.txt" in files
        assert f"source={name}," in sources.dockerfile.decode()
    added = set(re.findall(r"^ADD (\S+)", sources.dockerfile.decode(), re.MULTILINE))
    assert added == {name for name in files if name.startswith(("checkpoint/", "library/", "rehearsal/", "toolkit/"))}
    assert len(added) == 4
    assert {"engine/engine.c", "engine/engine.h", "engine/options.txt"} <= set(files)
    assert {"machine/pip.conf", "machine/apt.conf"} <= set(files)


def test_the_fingerprint_follows_sources_and_base_but_not_the_machine(project: Project, matrix: BuildSpec) -> None:
    sources = gather(project, matrix, "pytorch")
    assert sources.make_record("a@1") == gather(project, matrix, "pytorch").make_record("a@1")
    others = [
        *(replace(sources, engine={**sources.engine, name: b"other"}) for name in sources.engine),
        replace(sources, locks={**sources.locks, "mpi": ()}),
        replace(sources, own={**sources.own, "toolkit": sources.own["library"]}),
        replace(sources, steps=sources.steps[:-1]),
    ]
    fingerprints = {made.make_record("a@1").fingerprint for made in (sources, *others)}
    assert len(fingerprints | {sources.make_record("a@2").fingerprint}) == len(others) + 2


def test_only_locked_files_are_taken_from_find_links(tmp_path: Path) -> None:
    good = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    good.write_bytes(b"wheel")
    (tmp_path / "torch-2.12.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"other version")
    (tmp_path / "numpy-2.0.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"other hash")
    (tmp_path / "not-a-wheel.whl").write_bytes(b"")
    pins = [Pin("torch", "2.13.0+cpu", hashlib.sha256(b"wheel").hexdigest()), Pin("numpy", "2.0.0", "0" * 64)]
    assert list(find_locked_wheels(pins, [tmp_path])) == [(pins[0], good)]


def test_the_foreign_index_is_asked_only_when_its_file_is_not_at_hand(
    project: Project, matrix: BuildSpec, tmp_path: Path
) -> None:
    image = matrix.select(PYTORCH_CPU)
    name = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    (tmp_path / name).write_bytes(b"wheel")
    sources = gather(project, matrix, image.tag)
    pin = Pin("torch", "2.13.0+cpu", hashlib.sha256(b"wheel").hexdigest())
    sources = replace(sources, locks={**sources.locks, "framework": (pin,)})
    index = f"--extra-index-url {matrix.indexes['cpu-wheels']}\n".encode()
    far = sources.context_files(matrix, PLAIN)["framework/requirements.txt"]
    near = sources.context_files(matrix, replace(PLAIN, find_links=(tmp_path,)))
    assert isinstance(far, bytes)
    assert far.startswith(index)
    assert near["framework/requirements.txt"] == f"{pin}\n".encode()
    assert near[f"framework/{name}"] == tmp_path / name


def test_pip_and_apt_configuration_enter_as_files() -> None:
    host = replace(
        PLAIN,
        pip=(("index-url", "https://index.example/simple"),),
        apt_sources=("deb http://mirror.example/debian bookworm main",),
        apt_proxies=('Acquire::http::Proxy "http://proxy.example:3128";',),
        ca_bundle=b"certificate",
    )
    files = host.build_files("bookworm")
    assert files["pip.conf"] == b"[global]\nindex-url = https://index.example/simple\ncert = /run/machine/ca.crt\n"
    assert b'Acquire::http::Proxy "http://proxy.example:3128";' in files["apt.conf"]
    assert b'Dir::Etc::SourceList "/run/machine/sources.list";' in files["apt.conf"]
    assert files["sources.list"] == b"deb http://mirror.example/debian bookworm main\n"
    assert files["ca.crt"] == b"certificate"


def test_sources_are_read_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "# deb http://old.example/debian bookworm main\n"
        "deb [arch=amd64] http://one.example/debian bookworm main contrib # comment\n"
        "deb-src http://one.example/debian bookworm main\n"
        "deb http://flat.example/debs ./\n"
        "deb http://one.example/debian bookworm-security main\n"
    )
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "debian.sources").write_text(
        "Types: deb\n# a comment\nURIs: http://two.example/debian\nSuites: bookworm bookworm-updates\n"
        "Components: main\nSigned-By: /usr/share/keyrings/x.gpg\n\n"
        "Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n"
    )
    (parts / "notes.txt").write_text("deb http://three.example/debian bookworm main\n")
    assert list(settings.read_apt_sources(tmp_path)) == [
        "deb http://one.example/debian bookworm main contrib",
        "deb http://flat.example/debs ./",
        "deb http://one.example/debian bookworm-security main",
        "deb http://two.example/debian bookworm main",
        "deb http://two.example/debian bookworm-updates main",
    ]


HERE = (
    "deb http://one.example/debian bookworm main contrib",
    "deb http://one.example/debian bookworm-updates main",
    "deb http://one.example/debian bookworm-backports main",
    "deb http://two.example/security bookworm-security main",
    "deb http://vendor.example/apt tool-bookworm main",
    "deb http://vendor.example/apt stable main",
)


def test_a_build_is_given_the_sources_of_its_suite() -> None:
    """Backports and other vendors' are none of it."""
    host = replace(PLAIN, apt_sources=HERE, release="bookworm")
    assert host.select_sources("bookworm") == (HERE[0], HERE[1], HERE[3])
    assert host.select_sources("trixie") == (
        "deb http://one.example/debian trixie main contrib",
        "deb http://one.example/debian trixie-updates main",
        "deb http://two.example/security trixie-security main",
    )
    assert host.build_files("trixie")["sources.list"].decode().splitlines() == list(host.select_sources("trixie"))


def test_sources_that_are_of_the_suite_already_are_not_made_of_another() -> None:
    both = (*HERE, "deb http://three.example/debian trixie main")
    host = replace(PLAIN, apt_sources=both, release="bookworm")
    assert host.select_sources("trixie") == ("deb http://three.example/debian trixie main",)
    assert host.select_sources("bookworm") == (HERE[0], HERE[1], HERE[3])


def test_a_machine_that_is_no_debian_leaves_the_sources_to_the_base_image() -> None:
    host = replace(PLAIN, apt_sources=("deb http://one.example/ubuntu noble main", "deb http://x.example/apt ./"))
    assert host.select_sources("trixie") == ()
    assert "sources.list" not in host.build_files("trixie")
    assert b"SourceList" not in host.build_files("trixie")["apt.conf"]


@pytest.mark.parametrize(
    ("release", "suite"),
    [
        ({"ID": "debian", "VERSION_CODENAME": "trixie"}, "trixie"),
        ({"ID": "ubuntu", "VERSION_CODENAME": "noble"}, ""),
        ({"ID": "debian"}, ""),
    ],
)
def test_the_release_of_this_machine(monkeypatch: pytest.MonkeyPatch, release: dict[str, str], suite: str) -> None:
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: release)
    assert settings.read_network_settings.__wrapped__().release == suite


def test_pips_configuration_is_read_with_its_own_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = https://file.example/simple\nfind-links = {links} /nowhere\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "none"))  # not the files of this machine
    monkeypatch.setenv("PIP_INDEX_URL", "https://env.example/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "false")
    monkeypatch.setenv("PIP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("PIP_CLIENT_CERT", "/etc/client.pem")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///srv/simple https://more.example/simple")
    host = settings.read_network_settings.__wrapped__()
    assert dict(host.pip) == {
        "index-url": "https://env.example/simple",
        "extra-index-url": "https://more.example/simple",
        "no-index": "false",
        "proxy": "http://proxy.example:3128",
    }
    assert host.find_links == (links,)
    assert host.left_out == (
        "pip's client-cert: not supported in builds",
        "pip's extra-index-url file:///srv/simple: a local directory, which a container cannot read",
    )

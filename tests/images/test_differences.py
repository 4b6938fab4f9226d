"""Differences between the files of two images: how files are read, compared and reported."""

from __future__ import annotations

import io
import json
import os
import py_compile
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fake_docker import FakeDocker

from shoal import docker_client
from shoal.commands import inspection
from shoal.docker_client import images as find_images
from shoal.errors import DifferenceError
from shoal.image import differences, filesystem
from shoal.image.differences import Differences
from shoal.image.filesystem import File, FileSystem
from shoal.matrix.project import Project

FILE: dict[str, Any] = {"mode": 0o100644, "uid": 0, "gid": 0, "time": 5, "content": "ab", "source_time": 0}


def archived(directory: Path) -> Iterator[bytes]:
    """Return, in chunks, the archive that Docker exports for a container with this root directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(directory.rglob("*")):
            archive.add(path, str(path.relative_to(directory)), recursive=False)
    content = out.getvalue()
    return (content[begin : begin + 999] for begin in range(0, len(content), 999))


def read(directory: Path) -> dict[str, File]:
    return filesystem.parse_archive(archived(directory)).files


def compare(old: dict[str, File], new: dict[str, File], *packages: dict[str, str]) -> Differences:
    before, after = packages or ({}, {})
    return differences.compare_images(
        "a:1", "a:2", FileSystem(files=old, packages=before), FileSystem(files=new, packages=after)
    )


def test_bytecode_is_the_same_but_for_its_sources_time(tmp_path: Path) -> None:
    for number, text in enumerate(("a = 1\n", "a = 1\n", "a = 2\n")):
        source = tmp_path / str(number) / "m.py"
        source.parent.mkdir()
        source.write_text(text)
        os.utime(source, (1000 + number, 1000 + number))
        made = str(source.with_suffix(".pyc"))
        py_compile.compile(str(source), made, dfile="m.py", invalidation_mode=PycInvalidationMode.TIMESTAMP)
    first, second, third = (read(tmp_path / str(number))["/m.pyc"] for number in range(3))
    assert (first.source_time, second.source_time) == (1000, 1001)
    assert first.content == second.content
    assert first.content != third.content


def test_links_directories_and_modes_are_read(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o750)
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "d" / "l").symlink_to("/nowhere")
    found = read(tmp_path)
    assert found.keys() == {"/d", "/d/f", "/d/l"}
    assert found["/d/l"].content == "/nowhere"
    assert stat.S_ISDIR(found["/d"].mode)
    assert stat.S_IMODE(found["/d"].mode) == 0o750


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"content": "cd", "mode": 0o100755, "time": 6}, "content"),
        ({"mode": 0o100755, "time": 6}, "owner or mode"),
        ({"gid": 7}, "owner or mode"),
        ({"attributes": {"security.capability": "01"}, "time": 6}, "extended attributes"),
        ({"source_time": 6, "time": 6}, "bytecode's time"),
        ({"time": 6}, "time"),
    ],
)
def test_first_difference_of_a_file_is_reported(changes: dict[str, Any], kind: str) -> None:
    same = File(**FILE)
    found = compare({"/f": same, "/g": same}, {"/f": File(**{**FILE, **changes}), "/g": same})
    assert found.found == {"/f": kind}
    assert bool(found.unexpected) == (kind not in ("bytecode's time", "time"))


@pytest.mark.parametrize(("more", "end"), [(0, "✗ added: /9"), (1, "✗ and 1 more, which --json lists")])
def test_number_of_listed_paths_is_limited(more: int, end: str) -> None:
    same = File(**FILE)
    lines = list(differences.format_differences(compare({}, {f"/{number}": same for number in range(50 + more)})))
    assert sum(line.startswith("✗ added: ") for line in lines) == 50
    assert lines[-1] == end


def test_report_of_differences() -> None:
    same, later = File(**FILE), File(**{**FILE, "time": 6})
    found = compare({"/f": same, "/g": same, "/old": same}, {"/f": same, "/g": later, "/new": same})
    lines = list(differences.format_differences(found))
    assert lines[0] == "a:1\na:2"
    assert lines[1].split()[0] == "1"
    assert any(line.endswith("1 differ in time (the time at which the file was installed)") for line in lines)
    assert lines[-2:] == ["✗ added: /new", "✗ removed: /old"]
    assert list(differences.format_differences(compare({"/f": same}, {"/f": later})))[-1].startswith("✓")


@pytest.mark.parametrize(
    ("changes", "fails"), [({"time": 6}, False), ({"source_time": 6}, False), ({"content": "cd"}, True)]
)
def test_check_fails_for_unexpected_differences(changes: dict[str, Any], fails: bool) -> None:
    found = compare({"/f": File(**FILE)}, {"/f": File(**{**FILE, **changes})})
    if not fails:
        found.check()
        return
    with pytest.raises(DifferenceError, match="a:1 and a:2 differ in 1 files and 0 packages"):
        found.check()


def test_command_fails_only_with_check(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = {"a:1": FileSystem(files={"/f": File(**FILE)}), "a:2": FileSystem(files={})}
    monkeypatch.setattr(docker_client, "connect", lambda: None)
    monkeypatch.setattr(differences, "read_image", lambda _, tag: images[tag])
    monkeypatch.setattr(find_images, "find_image", lambda *_: True)
    monkeypatch.chdir(project.root)
    inspection.report_differences("a:1", "a:2")
    capsys.readouterr()
    with pytest.raises(DifferenceError):
        inspection.report_differences("a:1", "a:2", check=True, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["unexpected"] == document["unexplained"] == {"/f": "removed"}


def test_files_of_changed_packages_are_counted_by_package() -> None:
    """A later build may get newer Debian packages."""
    libc, other = File(**FILE, package="libc6"), File(**FILE, package="bash")
    newer = File(**{**FILE, "content": "cd"}, package="libc6")
    wrong = File(**{**FILE, "content": "cd"}, package="bash")
    found = compare(
        {"/libc": libc, "/libm": libc, "/bash": other, "/same": libc},
        {"/libc": newer, "/libn": newer, "/bash": wrong, "/same": libc},
        {"libc6": "1", "bash": "5"},
        {"libc6": "2", "bash": "5", "zsh": "3"},
    )
    lines = list(differences.format_differences(found))
    assert lines[-3:] == [
        "✗ Debian package libc6: 1 → 2, 3 files",
        "✗ Debian package zsh: not installed → 3, 0 files",
        "✗ content: /bash",
    ]
    assert len(found.unexpected) == 4


def test_files_that_docker_creates_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for name in (".dockerenv", "etc/hosts", "etc/resolv.conf", "etc/passwd"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "etc", (1, 1))
    found = read(tmp_path)
    assert found.keys() == {"/etc", "/etc/passwd"}
    os.utime(tmp_path / "etc", (2, 2))
    assert read(tmp_path) == found, "the time of a container is not the image's"


def test_a_hard_link_has_the_content_that_it_shares(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    found = read(tmp_path)
    assert found["/a"] == found["/b"]
    assert found["/a"].content


def test_extended_attributes_are_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo("f")
        value = b"\x01\xff".decode("utf-8", "surrogateescape")
        entry.pax_headers = {"SCHILY.xattr.security.capability": value, "SCHILY.xattr.security.selinux": "the engine's"}
        archive.addfile(entry)
    assert filesystem.parse_archive([out.getvalue()]).files["/f"].attributes == {"security.capability": "01ff"}


def test_packages_and_their_files_are_those_of_dpkg(tmp_path: Path) -> None:
    """Files belong to packages by their real paths, even if dpkg lists them through a link. So do dpkg's own files."""
    info = tmp_path / "var" / "lib" / "dpkg" / "info"
    info.mkdir(parents=True)
    (tmp_path / "usr" / "lib").mkdir(parents=True)
    (tmp_path / "usr" / "lib" / "libc.so").touch()
    (tmp_path / "lib").symlink_to("usr/lib")
    (info.parent / "status").write_text(
        "Package: libc6\nStatus: install ok installed\nVersion: 2:2.36\nDescription: x\n y\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    (info / "libc6:amd64.list").write_text("/lib/libc.so\n")
    (info / "libc6:amd64.md5sums").write_text("")
    for name in ("python3", "python3.11"):
        (info / f"{name}.list").write_text("")
    found = filesystem.parse_archive(archived(tmp_path))
    assert found.packages == {"libc6": "2:2.36"}
    assert {path: file.package for path, file in found.files.items() if file.package} == {
        "/usr/lib/libc.so": "libc6",
        "/var/lib/dpkg/info/libc6:amd64.list": "libc6",
        "/var/lib/dpkg/info/libc6:amd64.md5sums": "libc6",
        "/var/lib/dpkg/info/python3.list": "python3",
        "/var/lib/dpkg/info/python3.11.list": "python3.11",
    }


def write_distribution(root: Path, name: str, version: str, *files: str) -> None:
    """Install a Python distribution with modules of the same content in all versions but its own."""
    info = root / "opt" / "site-packages" / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(
        "".join(f"{file},,\n" for file in (f"{info.name}/METADATA", f"{info.name}/RECORD", *files))
    )
    for file in files:
        (info.parent / file).parent.mkdir(parents=True, exist_ok=True)
        (info.parent / file).write_text(f"version = {version!r}\n")


def test_a_changed_python_package_explains_its_files_and_directories(tmp_path: Path) -> None:
    for number, version in enumerate(("1.0", "1.1")):
        root = tmp_path / str(number)
        write_distribution(root, "Same_Name", "3.0", "same.py")
        write_distribution(root, "einops", version, "einops/a.py", f"einops/x{number}/b.py", "bin.py")
    write_distribution(tmp_path / "1", "added", "2.0", "added/__init__.py")
    (tmp_path / "1" / "opt" / "site-packages" / "same.py").write_text("edited")
    old, new = (filesystem.parse_archive(archived(tmp_path / name)) for name in "01")
    found = differences.compare_images("a:1", "a:2", old, new)
    lines = [line for line in differences.format_differences(found) if line.startswith("✗")]
    assert lines == [
        "✗ Python package added: not installed → 2.0, 5 files",
        "✗ Python package einops: 1.0 → 1.1, 12 files",
        "✗ content: /opt/site-packages/same.py",
    ]


def test_image_is_not_run_to_read_its_files(tmp_path: Path) -> None:
    """The container is created and exported. This fake cannot start any."""
    (tmp_path / "file").write_text("x")
    client: Any = FakeDocker(
        SimpleNamespace(attrs={"Config": {}}), export=lambda: archived(tmp_path), start=pytest.fail
    )
    assert "/file" in differences.read_image(client, "foreign:1").files
    assert [made.settings["network_mode"] for made in client.made] == ["none"]

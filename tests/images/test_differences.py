"""Where the files of two images differ: what is read of a file, and what is told of it."""

from __future__ import annotations

import json
import os
import py_compile
import stat
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest

from shoal import engine
from shoal.commands import looking
from shoal.engine import images as find_images
from shoal.errors import DifferenceError
from shoal.inside import differences, files_probe
from shoal.inside.differences import Differences, File, Image
from shoal.matrix.project import Project

FILE: dict[str, Any] = {"mode": 0o100644, "uid": 0, "gid": 0, "time": 5, "content": "ab", "source_time": 0}


def read(directory: Path) -> dict[str, File]:
    """As in a container whose root the directory is."""
    found = files_probe.below(str(directory), ())
    return {path.removeprefix(str(directory)): File(**files_probe.about(path, about)) for path, about in found}


def compare(old: dict[str, File], new: dict[str, File], *packages: dict[str, str]) -> Differences:
    before, after = packages or ({}, {})
    return differences.compare("a:1", "a:2", Image(files=old, packages=before), Image(files=new, packages=after))


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
def test_a_file_differs_in_the_first_of_these(changes: dict[str, Any], kind: str) -> None:
    same = File(**FILE)
    found = compare({"/f": same, "/g": same}, {"/f": File(**{**FILE, **changes}), "/g": same})
    assert found.found == {"/f": kind}
    assert bool(found.unexpected) == (kind not in ("bytecode's time", "time"))


def test_only_some_are_told_by_name() -> None:
    same = File(**FILE)
    lines = list(differences.told(compare({}, {f"/{number}": same for number in range(60)})))
    assert sum(line.startswith("✗ added: ") for line in lines) == 50
    assert lines[-1] == "✗ and 10 more, which --json names"


def test_what_is_told() -> None:
    same, later = File(**FILE), File(**{**FILE, "time": 6})
    found = compare({"/f": same, "/g": same, "/old": same}, {"/f": same, "/g": later, "/new": same})
    lines = list(differences.told(found))
    assert lines[0] == "a:1\na:2"
    assert lines[1].split()[0] == "1"
    assert any(line.endswith("1 differ: time (a file has the time at which it was installed)") for line in lines)
    assert lines[-2:] == ["✗ added: /new", "✗ removed: /old"]
    assert list(differences.told(compare({"/f": same}, {"/f": later})))[-1].startswith("✓")


@pytest.mark.parametrize(
    ("changes", "fails"), [({"time": 6}, False), ({"source_time": 6}, False), ({"content": "cd"}, True)]
)
def test_the_check_fails_for_what_two_builds_do_not_differ_in(changes: dict[str, Any], fails: bool) -> None:
    found = compare({"/f": File(**FILE)}, {"/f": File(**{**FILE, **changes})})
    if not fails:
        found.check()
        return
    with pytest.raises(DifferenceError, match="a:1 and a:2 differ in 1 files and 0 of Debian's packages"):
        found.check()


def test_the_command_fails_with_the_check_alone(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = {"a:1": Image(files={"/f": File(**FILE)}), "a:2": Image(files={})}
    monkeypatch.setattr(engine, "connect", lambda: None)
    monkeypatch.setattr(differences, "read", lambda _, tag: images[tag])
    monkeypatch.setattr(find_images, "find", lambda *_: True)
    monkeypatch.chdir(project.root)
    looking.report_differences("a:1", "a:2")
    capsys.readouterr()
    with pytest.raises(DifferenceError):
        looking.report_differences("a:1", "a:2", check=True, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["unexpected"] == document["unexplained"] == {"/f": "removed"}


def test_files_of_packages_that_have_changed_are_told_by_package() -> None:
    """Debian's packages are not pinned: a later build may get newer ones."""
    libc, other = File(**FILE, package="libc6"), File(**FILE, package="bash")
    newer = File(**{**FILE, "content": "cd"}, package="libc6")
    wrong = File(**{**FILE, "content": "cd"}, package="bash")
    found = compare(
        {"/libc": libc, "/libm": libc, "/bash": other, "/same": libc},
        {"/libc": newer, "/libn": newer, "/bash": wrong, "/same": libc},
        {"libc6": "1", "bash": "5"},
        {"libc6": "2", "bash": "5", "zsh": "3"},
    )
    lines = list(differences.told(found))
    assert lines[-3:] == [
        "✗ Debian's libc6: 1 → 2, 3 files",
        "✗ Debian's zsh: not there → 3, 0 files",
        "✗ content: /bash",
    ]
    assert len(found.unexpected) == 4


def test_mounts_are_told_by_the_kernels_table() -> None:
    table = (
        "22 1 0:30 / / rw - overlay overlay rw\n"
        "23 22 0:31 / /proc rw,nosuid shared:1 - proc proc rw\n"
        "24 22 254:1 /var/lib/x/hosts /etc/hosts rw - ext4 /dev/vda1 rw\n"
        "25 22 0:32 / /a\\040b\\134c rw - tmpfs tmpfs rw\n"
    )
    assert files_probe.mounts(table) == {"/", "/proc", "/etc/hosts", "/a b\\c"}


def test_what_is_mounted_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "mounted" / "below").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "hosts").write_text("")
    mounted = {str(tmp_path), str(tmp_path / "mounted"), str(tmp_path / "hosts")}
    assert [path for path, _ in files_probe.below(str(tmp_path), mounted)] == [str(tmp_path / "file")]


def test_extended_attributes_are_read_and_links_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("")
    (tmp_path / "l").symlink_to("f")
    try:
        os.setxattr(path, "trusted.shoal", b"\x01\xff")
    except OSError:
        pytest.skip("this file system has no extended attributes, or this is not root")
    found = read(tmp_path)
    assert found["/f"].attributes == {"trusted.shoal": "01ff"}
    assert found["/l"].attributes == {}


def test_the_label_that_an_engine_gives_is_not_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listxattr", lambda *_, **__: ["security.selinux", "security.capability"])
    monkeypatch.setattr(os, "getxattr", lambda _, name, **__: name.encode())
    assert files_probe.attributes("/x") == {"security.capability": b"security.capability".hex()}


def test_packages_and_their_files_are_as_dpkg_has_them(tmp_path: Path) -> None:
    """By the real path, where a list names one through a link of the system's; also what dpkg keeps of a package."""
    dpkg, root = tmp_path / "dpkg", tmp_path / "root"
    (dpkg / "info").mkdir(parents=True)
    (root / "usr" / "lib").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (dpkg / "status").write_text(
        "Package: libc6\nStatus: install ok installed\nVersion: 2:2.36\nDescription: x\n y\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    (dpkg / "info" / "libc6:amd64.list").write_text(f"{root}/lib/libc.so\n")
    (dpkg / "info" / "libc6:amd64.md5sums").write_text("")
    for name in ("python3", "python3.11"):
        (dpkg / "info" / f"{name}.list").write_text("")
    assert files_probe.packages(str(dpkg)) == {"libc6": "2:2.36"}
    assert files_probe.owners(str(dpkg)) == {
        f"{root}/usr/lib/libc.so": "libc6",
        f"{dpkg}/info/libc6:amd64.list": "libc6",
        f"{dpkg}/info/libc6:amd64.md5sums": "libc6",
        f"{dpkg}/info/python3.list": "python3",
        f"{dpkg}/info/python3.11.list": "python3.11",
    }
    assert (files_probe.packages(str(root)), files_probe.owners(str(root))) == ({}, {})

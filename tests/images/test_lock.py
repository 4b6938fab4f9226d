"""`shoal lock`: which files pip chooses, for a Python that is not this one too; no index is asked here."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.sources import lock

DEPENDENCIES = (
    "early; python_version < '3.13'",
    "late; python_version >= '3.13'",
    "full; python_full_version < '3.12'",
)


def write_wheel(directory: Path, name: str, dependencies: tuple[str, ...] = ()) -> None:
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 1.0",
            *(f"Requires-Dist: {d}" for d in dependencies),
        ]
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.mark.parametrize(
    ("python_version", "names"),
    [("3.11", ["early", "full", "main"]), ("3.12", ["early", "main"]), ("3.13", ["late", "main"])],
)
def test_markers_are_read_for_the_python_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_version: str, names: list[str]
) -> None:
    write_wheel(tmp_path, "main", DEPENDENCIES)
    for name in ("early", "late", "full"):
        write_wheel(tmp_path, name)
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    for setting, value in settings.items():
        monkeypatch.setenv(setting, value)
    assert [pin.name for pin in lock._resolve(["main"], python_version, None)] == names


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SpecError, match="locking needs Linux and x86_64; this is Linux aarch64"):
        lock._resolve(["main"], "3.13", None)

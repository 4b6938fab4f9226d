"""What images leave out of the wheels, by dockerfiles/dropped.yml: it is gone, and nothing misses it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.matrix.project import Project
from shoal.sources.render import read_dropped

from . import dropped_probe
from .image_containers import DEVEL, LOWER, MATRIX, ImageContainer, ImageContainers, each

PROBE = Path(__file__).with_name("dropped_probe.py").read_text()
# Who imports what is not there, and when.
RUNNERS = {
    "h5py/__init__.py": "in h5py.run_tests()",
    "mpmath/__init__.py": "in mpmath.runtests()",
    "scipy/special/_precompute/hyp2f1_data.py": "a program of SciPy's developers, which makes a test's data",
}


@pytest.fixture
def globs(project: Project) -> list[str]:
    return [glob for entry in read_dropped(project).dropped for glob in entry.files]


def ask(container: ImageContainer, function: str, globs: list[str]) -> Any:
    """Return what a function of dropped_probe.py prints in an image."""
    return json.loads(container.python(f"{PROBE}\n{function}({globs!r})"))


@pytest.mark.parametrize("image", each(skip=[*DEVEL, *LOWER]))
def test_what_is_dropped_is_gone_and_nothing_imports_it(container: ImageContainer, globs: list[str]) -> None:
    found = ask(container, "print_missed", globs)
    assert (found["left"], found["top"], found["namers"]) == ([], [], {})
    unknown = {path: modules for path, modules in found["importers"].items() if path not in RUNNERS}
    # pytest's own files, which it alone imports
    assert {path for path in unknown if not path.endswith("/conftest.py")} == set(), unknown
    here = {path for path, count in ask(container, "print_listed", [*RUNNERS]).items() if count}
    assert found["importers"].keys() >= here, "is known to import what is dropped, and does not"


def test_each_entry_drops_something(image_containers: ImageContainers, globs: list[str]) -> None:
    """It is in the table because some wheel has it, and an importer is known because some image has it.

    Images are asked until everything has been found: some of them, those with the most wheels first.
    """
    missing = [*globs, *RUNNERS]
    for image in sorted(MATRIX.choose(skip=DEVEL), key=lambda image: image.device == "cpu"):
        counts = ask(image_containers.of(image.tag), "print_listed", missing)
        missing = [glob for glob in missing if not counts[glob]]
        if not missing:
            break
    assert missing == []


@pytest.mark.parametrize(
    ("glob", "missed"),
    [
        ("*/examples", {"importers": {"a/b.py": ["a.examples"], "a/c.py": ["a.examples", "a.examples.one"]}}),
        ("*/tests", {"importers": {"a/d.py": ["a.tests"]}, "top": ["tests/t.py"]}),
        ("a/*_static.a", {"namers": {"a/e.py": ["x_static.a"]}}),
        ("a/only.*", {}),
    ],
)
def test_the_probe_finds_who_misses_what(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    glob: str,
    missed: dict[str, object],
) -> None:
    """Whatever an entry takes, by its own words."""
    files = {
        "a/__init__.py": "",
        "a/b.py": "from a import examples",
        "a/c.py": "from .examples import (\n    one,\n)",
        "a/d.py": "def run():\n    import a.tests",
        "a/e.py": "LIBRARY = 'x_static.a'",
        "a/examples/__init__.py": "",
        "a/examples/one.py": "from . import two",
        "a/tests/__init__.py": "",
        "tests/t.py": "",
        "a/x_static.a": "",
        "a/only.txt": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    record = "\n".join(f"{name},," for name in files)
    monkeypatch.setattr(dropped_probe, "SITE", tmp_path)
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [SimpleNamespace(read_text={"RECORD": record}.get)])
    dropped_probe.print_missed([glob])
    report = json.loads(capsys.readouterr().out)
    assert report["listed"][glob] == len(report["left"]) > 0
    empty: dict[str, object] = {"importers": {}, "namers": {}, "top": []}
    assert {name: report[name] for name in empty} == {**empty, **missed}

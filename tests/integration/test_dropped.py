"""What images leave out of the wheels, by dockerfiles/dropped.yml: it is gone, and nothing misses it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TypedDict

import docker
import pytest

from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal.sources.render import read_dropped

from . import dropped_probe
from .conftest import ROOT

IMAGES = [image.tag for image in load(ROOT / "buildspec.yml").images if image.variant == "runtime"]
PROBE = Path(__file__).with_name("dropped_probe.py").read_text()
# Who imports what is not there, and when.
RUNNERS = {
    "h5py/__init__.py": "in h5py.run_tests()",
    "mpmath/__init__.py": "in mpmath.runtests()",
    "scipy/special/_precompute/hyp2f1_data.py": "a program of SciPy's developers, which makes a test's data",
}


class Looked(TypedDict):
    """What dropped_probe.py prints."""

    listed: dict[str, int]
    left: list[str]
    top: list[str]
    namers: dict[str, list[str]]
    importers: dict[str, list[str]]


@pytest.fixture(scope="module")
def looked(client: docker.DockerClient, project: Project) -> dict[str, Looked]:
    """By image."""
    globs = [glob for entry in read_dropped(project).dropped for glob in entry.files]
    command = ["python", "-c", PROBE, json.dumps(globs)]
    return {tag: json.loads(client.containers.run(tag, command, remove=True, network_mode="none")) for tag in IMAGES}


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_dropped_is_gone_and_nothing_imports_it(looked: dict[str, Looked], image: str) -> None:
    found = looked[image]
    assert (found["left"], found["top"], found["namers"]) == ([], [], {})
    unknown = {path: modules for path, modules in found["importers"].items() if path not in RUNNERS}
    # pytest's own files, which it alone imports
    assert {path for path in unknown if not path.endswith("/conftest.py")} == set(), unknown


def test_each_entry_drops_something(looked: dict[str, Looked]) -> None:
    """It is in the table because some wheel has it, and an importer is known because there is one."""
    for glob in looked[IMAGES[0]]["listed"]:
        assert any(found["listed"][glob] for found in looked.values()), glob
    assert {path for found in looked.values() for path in found["importers"]} >= RUNNERS.keys()


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
    wheel = SimpleNamespace(files=[Path(name) for name in files])
    monkeypatch.setattr(dropped_probe, "SITE", tmp_path)
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [wheel])
    dropped_probe.main([glob])
    told = json.loads(capsys.readouterr().out)
    assert told["listed"][glob] == len(told["left"]) > 0
    empty: dict[str, object] = {"importers": {}, "namers": {}, "top": []}
    assert {name: told[name] for name in empty} == {**empty, **missed}

"""What published scripts take for granted: how it is counted, and that the locks of the images have it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, load
from shoal.sources import lock, render

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from everyday import GOAL, find_reason, keep_general, list_specific, read_counts
from everyday_scripts import list_commands, measure, read_rules

from ..tested_images import PYTORCH_CPU

OURS = ("smdistributed", "smddpcommon", "sagemaker_training")
RULES = {
    "frameworks": {"tensorflow": ["tensorflow"], "pytorch": ["torch"]},
    "skipped": [{"reason": "tests", "files": ["*/test_*.py"]}],
    "shell": {"starts": ["python"], "outside": ["docker"]},
}
FILES = {
    "a/train.py": "import os, torch.nn as nn\nfrom yaml import load\nimport model\nfrom . import x\n"
    "def f():\n    import tqdm\nos.system('wget x | tar x')\nsubprocess.run(['git', 'log'])\n",
    "a/model.py": "import torch, yaml\n",
    "a/plot.py": "import matplotlib\n",
    "a/old.py": "import tensorflow\nprint 'Python 2'\n",
    "a/run.sh": "set -e\nexport A=1 && python train.py \\\n  --x 'a; b' | tee log\n",
    "a/image.sh": "python x.py\ndocker build .\n",
    "a/test_train.py": "import torch, pytest\n",
    "b/train.py": "import tensorflow as tf\nimport torch\n",
}


def test_scripts_are_counted_by_framework() -> None:
    found = measure({PurePosixPath(path): text for path, text in FILES.items()}, RULES)
    torch, tensorflow = found["pytorch"], found["tensorflow"]
    assert (torch.scripts, tensorflow.scripts) == (3, 1)
    assert torch.imports == {"os": 1, "torch.nn": 1, "torch": 1, "yaml": 2, "tqdm": 1}
    assert torch.commands == {"wget": 1, "tar": 1, "git": 1, "set": 1, "export": 1, "python": 1, "tee": 1}
    assert tensorflow.imports == {"tensorflow": 1, "torch": 1}


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("if [ -f x ]; then rm x; fi", ["rm"]),
        ("A=1 B=2 python x.py # pip", ["python"]),
        ("x=$(git log | head -1)", ["git", "head"]),
        ('echo "a; b && c"', ["echo"]),
        ("cat <<EOF\npip install x\nEOF\nls", ["cat", "ls"]),
        ("for i in a b; do sed s/x/y/ $i; done", ["sed"]),
    ],
)
def test_commands_of_shell_scripts(text: str, commands: list[str]) -> None:
    assert list_commands(text) == commands


def test_a_module_is_specific_with_all_that_it_contains() -> None:
    for_torch, for_tensorflow = (list_specific(read_rules(), name) for name in ("pytorch", "tensorflow"))
    assert find_reason("tensorflow.keras", for_torch) == "TensorFlow and its ecosystem"
    assert find_reason("tensorflow.keras", for_tensorflow) is None
    assert find_reason("torch.sagemaker.moe", for_torch)
    assert find_reason("torch.nn", for_torch) is None
    assert find_reason("transformers_extra", for_torch) is None


def test_the_locks_have_what_scripts_import(project: Project, matrix: BuildSpec) -> None:
    """By names alone: `make bench-everyday` imports the modules in the images."""
    rules, (_, needs) = read_rules(), read_counts()
    for image in matrix.images:
        if image.extends:
            continue
        general = keep_general(needs[image.framework], list_specific(rules, image.framework))
        names = {pin.name.replace("-", "_") for pin in lock.list_installed(project, matrix, image)}
        known = {*sys.stdlib_module_names, *OURS, *names, *rules["frameworks"][image.framework]}
        known |= {module for module, name in rules["distributions"].items() if name.replace("-", "_") in names}
        lacking = {name: n for name, n in general.imports.items() if name.partition(".")[0] not in known}
        assert 100 * sum(lacking.values()) / general.imports.total() <= GOAL, f"{image.tag}: {lacking}"
        assert {"tqdm", "yaml", "PIL", "pandas", "matplotlib"} <= known


def test_a_lean_image_is_one_axis_away(project: Project, tmp_path: Path) -> None:
    """It has the locks and the steps of its runtime variant, but for the everyday packages and the small compiler."""
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "dockerfiles" / "versions.yml").write_bytes((project.templates / "versions.yml").read_bytes())
    file = tmp_path / "buildspec.yml"
    file.write_text(
        project.buildspec.read_text().replace("variant: [runtime, devel]", "variant: [runtime, devel, lean]")
    )
    spec = load(file)
    tag = PYTORCH_CPU
    runtime, lean = spec.select(tag), spec.select(f"{tag}-lean")
    assert project.lock_directory(lean) == project.lock_directory(runtime)
    assert lock.are_current(project, spec, lean)
    everyday = {pin.name for pin in lock.read_image_pins(project, spec, runtime)["everyday"]}
    assert {pin.name for pin in lock.list_installed(project, spec, runtime)} - everyday == {
        pin.name for pin in lock.list_installed(project, spec, lean)
    }
    steps = [[step.text for step in render.read_steps(project, image)][:-1] for image in (runtime, lean)]
    assert [text for text in steps[0] if text not in steps[1]] == [
        step.text for step in render.read_steps(project, runtime) if step.name in ("everyday packages", "compilers")
    ]
    assert not [image for image in spec.images if image.extends and image.extends.endswith("-lean")]


def test_the_probe_says_what_is_missing() -> None:
    """With this Python, in place of an image's."""
    root = Path(__file__).resolve().parents[2]
    program = (root / "benchmarks" / "everyday_probe.py").read_text()
    call = "main(['json', 'os.path', 'no_such.module'], ['cd', 'sh', 'no-such-command'], ['packaging'])"
    done = subprocess.run([sys.executable, "-c", f"{program}\n{call}"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["modules"], found["commands"]) == (["no_such.module"], ["no-such-command"])
    assert found["distributions"]["packaging"]["bytes"] > 50_000
    assert "packaging" in found["distributions"]["packaging"]["modules"]

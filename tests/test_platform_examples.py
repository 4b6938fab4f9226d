"""examples/batch and examples/skypilot, checked offline against what the platforms' published tools accept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.validate import ParamValidator  # type: ignore[import-untyped]

from shoal_toolkit.discovery.host_list import SOURCES
from shoal_toolkit.job.settings import SECRET, VARIABLES

from . import cache

ROOT = Path(__file__).resolve().parents[1]
BATCH, SKYPILOT = ROOT / "examples" / "batch", ROOT / "examples" / "skypilot" / "train.yaml"
SKYPILOT_PACKAGES = (
    *("skypilot==0.14.1", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "referencing==0.37.0"),
    *("rpds-py==2026.9.1", "attrs==26.1.0"),
)
# Runs SkyPilot's own checks of a task. Importing the whole package needs 80 more packages, for its server and clouds:
# the modules that its schemas import for other sections are replaced.
VALIDATE = """\
import json, pathlib, sys, types
from unittest.mock import MagicMock
directory = sys.argv[1]
sys.path.insert(0, directory)
sky = sys.modules["sky"] = types.ModuleType("sky")
sky.__path__, sky.__version__ = [directory + "/sky"], "0"
for name in ("sky.skylet.autostop_lib", "sky.clouds", "sky.server", "sky.server.plugins"):
    sys.modules[name] = MagicMock()
from sky.utils import schemas
import jsonschema
task = json.load(sys.stdin)
found = []
for schema, part in ((schemas.get_task_schema(), task), (schemas.get_resources_schema(), task["resources"])):
    found += [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(part)]
from sky.skylet import constants
known = sorted(value for value in vars(constants).values() if isinstance(value, str) and value.startswith("SKYPILOT_"))
print(json.dumps([found, known]))
"""


def find_batch_errors(operation: str, parameters: dict[str, Any]) -> str:
    """Returns what botocore would refuse in a call of AWS Batch; empty for nothing."""
    model = boto3.client("batch", region_name="us-east-1").meta.service_model.operation_model(operation)
    return str(ParamValidator().validate(parameters, model.input_shape).generate_report())


def test_batch_accepts_the_job_definition_and_the_job() -> None:
    definition, job = (json.loads((BATCH / name).read_text()) for name in ("job-definition.json", "job.json"))
    assert find_batch_errors("RegisterJobDefinition", definition) == ""
    assert find_batch_errors("SubmitJob", job) == ""
    assert job["jobDefinition"] == definition["jobDefinitionName"]
    (nodes,) = definition["nodeProperties"]["nodeRangeProperties"]
    assert nodes["targetNodes"] == "0:", "every node, also if a job overrides their number"
    assert [secret["name"] for secret in nodes["container"]["secrets"]] == [SECRET]
    assert {each["name"] for each in nodes["container"]["environment"]} <= set(VARIABLES)


def test_what_checks_batch_finds_a_mistake() -> None:
    definition = json.loads((BATCH / "job-definition.json").read_text())
    (nodes,) = definition["nodeProperties"]["nodeRangeProperties"]
    nodes["container"]["linuxParameters"]["sharedMemory"] = "4g"
    assert "sharedMemory" in find_batch_errors("RegisterJobDefinition", definition)


@pytest.fixture(scope="module")
def skypilot() -> Path:
    """A directory with SkyPilot's package, and what its schemas need. Installed once."""
    return cache.install(SKYPILOT_PACKAGES[0].replace("==", "-"), "--no-compile", *SKYPILOT_PACKAGES)


def ask_skypilot(directory: Path, task: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns what SkyPilot's schemas refuse in a task, and the variables that it sets for tasks."""
    command = [sys.executable, "-c", VALIDATE, str(directory)]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=True)
    errors, variables = json.loads(done.stdout)
    return errors, variables


def read_yaml(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML

    task: dict[str, Any] = json.loads(json.dumps(YAML(typ="safe").load(path)))
    return task


@pytest.mark.xdist_group("skypilot")
def test_skypilot_accepts_the_task_and_sets_the_variables_that_train_reads(skypilot: Path) -> None:
    task = read_yaml(SKYPILOT)
    errors, variables = ask_skypilot(skypilot, task)
    assert errors == []
    assert {*SOURCES["platforms.find_skypilot"], "SKYPILOT_NUM_NODES"} <= set(variables)
    assert task["secrets"] == {SECRET: None}, "from the command line only"
    assert (SKYPILOT.parent / task["workdir"] / task["envs"]["SAGEMAKER_PROGRAM"]).is_file()


@pytest.mark.xdist_group("skypilot")
def test_what_checks_skypilot_finds_a_mistake(skypilot: Path) -> None:
    task = read_yaml(SKYPILOT)
    task["resources"]["image"] = task["resources"].pop("image_id")
    task["nodes"] = task.pop("num_nodes")
    errors, _ = ask_skypilot(skypilot, task)
    assert len(errors) == 2, errors

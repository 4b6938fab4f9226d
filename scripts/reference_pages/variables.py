"""docs/reference/variables.md: environment variables of `train`, with examples that `train` itself computes."""

from __future__ import annotations

import fnmatch
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomllib

from reference_pages.markdown import code, page, table
from shoal_toolkit.job.contract import Job, read_cluster, read_job, read_paths
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.job.settings import VARIABLES
from shoal_toolkit.plan.environment import build_contract_variables

MEANINGS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "variables.toml"
LONGEST_EXAMPLE = 60  # characters
_HEAD = """# Environment variables of `train`

`make reference` writes this page. `train` computed the examples for the second of two hosts with 4 GPUs each. The job
has the hyperparameters `epochs` and `learning-rate`, and the channel `training`.

Variables of the library are on the page of its [Python API](../api/dataparallel.md#environment-variables). Variables of
clusters, such as Slurm's, are on the page about [clusters](../clusters.md)."""
_FOR_SCRIPT = """`train` sets these for every rank. A value other than text is JSON. If a name has characters that a
shell can't use, there is also a copy with underscores."""
_CONFIG: Mapping[str, Any] = {
    "resourceconfig.json": {
        "current_host": "algo-2",
        "current_instance_type": "ml.g5.12xlarge",
        "current_group_name": "workers",
        "hosts": ["algo-1", "algo-2"],
        "network_interface_name": "eth0",
        "instance_groups": [
            {
                "instance_group_name": "workers",
                "instance_type": "ml.g5.12xlarge",
                "hosts": ["algo-1", "algo-2"],
            }
        ],
        "topology": {"switch": "a"},
    },
    "hyperparameters.json": {
        "epochs": "3",
        "learning-rate": "0.1",
        "sagemaker_program": '"train.py"',
        "sagemaker_job_name": '"digits"',
        "sagemaker_region": '"us-west-2"',
        "sagemaker_torch_distributed_enabled": "true",
    },
    "inputdataconfig.json": {"training": {"TrainingInputMode": "File"}},
}
_MACHINE = Machine(cpus=48, gpus=4, interface="eth0", interface_note="", python="python", mpirun="", torch="2.13.0")
_ARGUMENTS = ["--epochs", "3", "--learning-rate", "0.1"]


def write() -> str:
    """Returns the page.

    Returns:
        The page in Markdown.

    Raises:
        SystemExit: If a variable has no description, or a description has no variable.
    """
    meanings = tomllib.loads(MEANINGS.read_text())
    _require(meanings["settings"], VARIABLES)
    examples = compute_examples()
    _require(meanings["script"], examples)
    settings = table(("variable", "default", "meaning"), _settings(meanings["settings"]))
    inputs = table(("variable", "meaning"), ((code(name), text) for name, text in meanings["input"].items()))
    return page(
        _HEAD,
        "## For your script",
        _FOR_SCRIPT,
        table(("variable", "meaning", "example"), _rows(meanings["script"], examples)),
        "## To set for `train`",
        settings,
        "## Of SageMaker's contract",
        "`train` reads these. On SageMaker, the platform and the SDK set them.",
        inputs,
    )


def compute_examples() -> dict[str, str]:
    """Returns the variables that `train` computes for an example, with /opt/ml as the directory of the job."""
    with tempfile.TemporaryDirectory() as base:
        config = Path(base, "input", "config")
        config.mkdir(parents=True)
        for name, content in _CONFIG.items():
            (config / name).write_text(json.dumps(content))
        Path(base, "code").mkdir()
        Path(base, "code", "train.py").touch()
        job = _read_example(base)
        variables = build_contract_variables(job, _MACHINE, _ARGUMENTS, job.cluster.hosts)
        return {name: value.replace(base, "/opt/ml") for name, value in variables.items()}


def _read_example(base: str) -> Job:
    environ = {"SAGEMAKER_BASE_DIR": base}
    paths = read_paths(environ)
    return read_job(paths, read_cluster(paths, "algo-2", environ), environ, ())


def _require(patterns: Mapping[str, Any], names: Any) -> None:
    """Raises SystemExit if a name matches no pattern, or a pattern no name."""
    for name in names:
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            raise SystemExit(f"The variable {name} has no description. Fix: add it to {MEANINGS.name}.")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"`train` has no variable {pattern}. Fix: remove it from {MEANINGS.name}.")


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, (default, meaning) in settings.items():
        yield code(name), default, meaning


def _rows(meanings: Mapping[str, str], examples: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for pattern, meaning in meanings.items():
        name = sorted(fnmatch.filter(examples, pattern))[0]
        value = examples[name]
        shown = code(value if len(value) <= LONGEST_EXAMPLE else f"{value[:LONGEST_EXAMPLE]}…")
        yield code(pattern.replace("*", "NAME")), meaning, f"`{name}`: {shown}" if "*" in pattern else shown

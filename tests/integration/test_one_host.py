"""`docker run` as a training container: one host, of the oldest torch.

Without a configuration, with the image's own command: README.md and docs/start.md, by test_pages.py. Bad configurations
and failures of a single process: tests/conformance.
"""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import StartHost, write_tree

TWO_RANKS = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}


def test_any_user_trains_without_a_mount(start_host: StartHost, pytorch: str, tmp_path: Path) -> None:
    """The image has an /opt/ml in which a user without an account makes the directories of a job."""
    (tmp_path / "train.py").write_text(
        "import os\nopen(os.environ['SM_MODEL_DIR'] + '/m', 'w')\nprint('as', os.getuid())"
    )
    tmp_path.chmod(0o755)
    settings = {"SAGEMAKER_PROGRAM": "train.py", "SAGEMAKER_SUBMIT_DIRECTORY": "/code"}
    ended = start_host(pytorch, ["train"], volumes={tmp_path: "/code"}, env=settings, user="12345").wait()
    assert ended.code == 0, ended.output
    assert "as 12345" in ended.output


def test_arguments_variables_and_output(start_host: StartHost, pytorch: str, tmp_path: Path) -> None:
    script = (
        "import json, os, pathlib, sys\n"
        "facts = {'argv': sys.argv[1:], 'lr': os.environ['SM_HP_LR'], 'cwd': os.getcwd(), 'pid1': os.getppid()}\n"
        "pathlib.Path(os.environ['SM_OUTPUT_DATA_DIR'], 'facts.json').write_text(json.dumps(facts))\n"
    )
    host = start_host(pytorch, ["train", "--extra", "1"], tree=write_tree(tmp_path / "ml", script, {"lr": 0.1}))
    ended = host.wait()
    assert ended.code == 0, ended.output
    facts = json.loads(host.path("output/data/facts.json").read_text())
    assert facts["argv"] == ["--lr", "0.1", "--extra", "1"]
    assert facts["lr"] == "0.1"
    assert facts["cwd"] == "/opt/ml/code"
    assert host.path("output/success").exists()
    assert not host.path("output/failure").exists()


def test_mpi_ranks_on_one_host(start_host: StartHost, pytorch: str, tmp_path: Path) -> None:
    script = (
        "import os\nfrom mpi4py import MPI\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')\n"
        "print('sum', MPI.COMM_WORLD.allreduce(1), *(os.environ[name] for name in names))\n"
    )
    ended = start_host(pytorch, tree=write_tree(tmp_path / "ml", script, TWO_RANKS)).wait()
    assert ended.code == 0, ended.output
    assert "sum 2 0 0 2" in ended.output
    assert "sum 2 1 1 2" in ended.output


def test_the_scripts_exit_code_is_the_jobs(start_host: StartHost, pytorch: str, tmp_path: Path) -> None:
    host = start_host(pytorch, tree=write_tree(tmp_path / "ml", "raise SystemExit(42)", TWO_RANKS))
    ended = host.wait()
    assert ended.code == 42, ended.output
    assert "42" in host.path("output/failure").read_text()
    assert not host.path("output/success").exists()


def test_an_exception_comes_first_in_the_failure_file(start_host: StartHost, pytorch: str, tmp_path: Path) -> None:
    script = "import os\nif os.environ['RANK'] == '1':\n    raise KeyError('lost')\n"
    host = start_host(pytorch, tree=write_tree(tmp_path / "ml", script, TWO_RANKS))
    ended = host.wait()
    assert ended.code == 1, ended.output
    lines = host.path("output/failure").read_text().splitlines()
    assert lines[0] == "KeyError: 'lost'"
    assert "rank 1" in "\n".join(lines)
    assert any("train.py" in line and "line 3" in line for line in lines)

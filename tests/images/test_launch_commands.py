"""Commands that people type in place of the script: what they mean here, what is refused, and what has no effect."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from accelerate.commands.launch import launch_command_parser

from shoal.commands import typed_command
from shoal.errors import UsageError
from shoal.jobs.distribution import read_launcher_table

from .test_script import read

COMMANDS = read_launcher_table()["commands"]
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2}
num_machines: 1
num_processes: 4
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("train.py", "deep/train.py", "package/__init__.py", "src/laid/out.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    (tmp_path / "sagemaker.yaml").write_text("compute_environment: AMAZON_SAGEMAKER\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def torchrun(ranks: int | None = None, **more: Any) -> dict[str, Any]:
    return launched("torch_distributed", procs_per_host=ranks, **more)


def launched(launcher: str, options: str = "", **more: Any) -> dict[str, Any]:
    extra = {"launch_options": options} if options else {}
    return {"entry_point": "train.py", "distribution": {launcher: {"enabled": True, **extra}}, **more}


TYPED = {
    "torchrun --nproc_per_node=2 --nnodes=2 --rdzv_backend c10d --rdzv_endpoint=a:1 train.py -v --": torchrun(
        2, hosts=2, arguments=("-v", "--")
    ),
    "torchrun --standalone --nproc-per-node gpu train.py": torchrun(),
    "--hosts 2 torchrun --nnodes 2 --tee 3 train.py --hosts 3": torchrun(hosts=2, arguments=("--hosts", "3")),
    "torchrun --nnodes 1:3 --max-restarts 5 train.py": torchrun(hosts=3, min_hosts=1, max_restarts=5),
    "torchrun deep/train.py conf.yaml": torchrun(source=Path(), entry_point="deep/train.py", arguments=("conf.yaml",)),
    "--source deep torchrun deep/train.py": torchrun(source=Path("deep"), entry_point="train.py"),
    "--procs-per-host 3 torchrun -m package.run": torchrun(3, entry_point="-m package.run", source=Path()),
    "python -m torch.distributed.run --nproc_per_node 2 train.py": torchrun(2),
    "accelerate launch --multi_gpu --num_processes 4 --num_machines 2 train.py": launched(
        "accelerate", hosts=2, procs_per_host=2
    ),
    "accelerate launch --mixed-precision=bf16 --use_fsdp --fsdp_version 2 train.py --seed 1": launched(
        "accelerate", "--mixed-precision=bf16 --use_fsdp --fsdp_version 2", arguments=("--seed", "1")
    ),
    "accelerate launch --cpu train.py": launched("accelerate", environment={"ACCELERATE_USE_CPU": "true"}),
    "--hosts 2 accelerate launch --config_file fsdp.yaml train.py": launched(
        "accelerate", "--config_file fsdp.yaml --use_fsdp", hosts=2, procs_per_host=2
    ),
    "deepspeed --num_gpus=2 --hostfile=h train.py --deepspeed": launched(
        "deepspeed", procs_per_host=2, arguments=("--deepspeed",)
    ),
    "deepspeed --no_local_rank train.py": torchrun(),
    "python -u -Wignore train.py": {
        "environment": {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"},
        "entry_point": "train.py",
        "distribution": {},
    },
    "python3 -m laid.out --x": {"entry_point": "-m laid.out", "source": Path(), "arguments": ("--x",)},
    "-m laid.out -- --x": {"entry_point": "-m laid.out", "source": Path(), "arguments": ("--x",)},
    "-m json.tool": {"entry_point": "-m json.tool", "source": None},
}


@pytest.mark.parametrize("words", TYPED)
def test_a_typed_command_becomes_a_job(words: str) -> None:
    request = read("any:1", *shlex.split(words)).request
    assert {name: getattr(request, name) for name in TYPED[words]} == TYPED[words]


REFUSED = {
    "torchrun": "no script follows. Fix: ",
    "torchrun --nproc_per_nod 2 train.py": "no such option. Did you mean 'nproc_per_node'?",
    "torchrun --no-python train.sh": "has no equivalent in Shoal. Fix: name the program alone",
    "torchrun --nproc_per_node cpu train.py": "expected a number",
    "--hosts 3 torchrun --nnodes 2 train.py": "--hosts 3: but torchrun asks for 2",
    "--procs-per-host 3 deepspeed --num_gpus 2 train.py": "--procs-per-host 3: but deepspeed asks for 2",
    "--hosts 2 accelerate launch --num_processes 3 train.py": "3 ranks cannot be divided between 2 hosts",
    "accelerate launch --gpu_ids 0 train.py": "Fix: --gpus of shoal",
    "accelerate launch --config_file sagemaker.yaml train.py": "does not run here. Allowed: NO,",
    "accelerate launch --config_file /etc/hostname train.py": "not in ., which the job gets",
    "accelerate config": "not a command that starts a script. Fix: accelerate launch SCRIPT",
    "--distribution {} deepspeed --include a train.py": "has no equivalent",
    """--distribution '{"mpi": {"enabled": true}}' torchrun train.py""": "both select a launcher",
    "python -c pass": "write the program to a file",
    "-m package.run train.py": "both name a script",
    "-m package/run.py": "not the name of a module",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_meaning_here_is_refused(words: str) -> None:
    with pytest.raises(UsageError) as error:
        read("any:1", *shlex.split(words))
    assert REFUSED[words] in str(error.value)


def test_options_without_an_effect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(typed_command, "print_error", notes.append)
    read("any:1", *shlex.split("torchrun --master-port=1 -t 3 train.py --local"))
    assert [re.split(":|[.] ", note)[0] for note in notes] == [
        "torchrun --master-port has no effect",
        "torchrun -t has no effect",
        "--local goes to train.py",
    ]


def _list_actions(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """The options of a parser as the table names them, and whether each is a flag."""
    options = {name.lstrip("-").replace("-", "_"): each for each in parser._actions for name in each.option_strings}
    return {name: each.nargs == 0 for name, each in options.items() if name not in ("h", "help")}


@pytest.mark.parametrize("name", ["torchrun", "accelerate launch"])
def test_the_table_knows_the_options_of_the_installed_release(name: str) -> None:
    builders = {"torchrun": torch.distributed.run.get_args_parser, "accelerate launch": launch_command_parser}
    actions, entry = _list_actions(builders[name]()), COMMANDS[name]
    known = [*(option for each in entry["takes"].values() for option in each), *entry["refused"], *entry["flags"]]
    assert [option for option, is_flag in actions.items() if is_flag and option not in entry["flags"]] == []
    assert [option for option in entry["flags"] if not actions.get(option)] == []
    assert [option for option in actions if not entry.get("passes") and option not in known] == []


def test_each_command_has_a_launcher_of_the_table() -> None:
    launchers = read_launcher_table()["launchers"]
    assert [name for name, entry in COMMANDS.items() if entry.get("launcher", "process") not in launchers] == []
    assert json.dumps(COMMANDS)  # plain data

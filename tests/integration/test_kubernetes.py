"""The pods of `shoal deploy kubernetes`, as containers on a Docker network: the hosts find each other and train."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from testcontainers.core.network import Network
from typer.testing import CliRunner

from shoal.commands import deploy
from shoal.commands.common import app

from .. import kubelet
from ..repeats import in_soak
from ..tested_images import PYTORCH_CPU
from .conftest import StartHost

assert deploy  # it adds the command to `app`
IMAGE = PYTORCH_CPU
HOSTS = 2
NAMESPACE = "team"
SCRIPT = """\
import json, os, pathlib, sys
if "TORCHELASTIC_RUN_ID" in os.environ:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    total = int(total)
    dist.destroy_process_group()
else:
    from mpi4py import MPI

    total = MPI.COMM_WORLD.allreduce(1)

shm = os.statvfs("/dev/shm")
facts = {
    "ranks": total,
    "rank": os.environ["RANK"],
    "first": os.environ["MASTER_ADDR"],
    "user": os.getuid(),
    "shm": shm.f_blocks * shm.f_frsize,
    "data": pathlib.Path(os.environ["SM_CHANNEL_TRAINING"], "data.txt").read_text(),
    "arguments": sys.argv[1:],
    "dollars": os.environ["DOLLARS"],
}
pathlib.Path(os.environ["SM_MODEL_DIR"], "facts.json").write_text(json.dumps(facts))
"""
KINDS = {
    "job": ("{}", "digits-0.digits"),
    "jobset": ("{}", "digits-host-0-0.digits"),
    "trainjob": ('{"torch_distributed": {"enabled": true}}', "digits-node-0-0.digits"),
    "mpijob": ("{}", f"digits-launcher.digits.{NAMESPACE}.svc"),
}
"""The distribution that a job of a kind uses here, and the name of its first host."""
RESULTS = {"mpijob": "/mnt/models"}
"""A directory of the node for the results of a kind; other kinds keep them in the claim `models`."""


def render(kind: str, directory: Path) -> list[dict[str, Any]]:
    """Return the objects that the command writes for a job of two hosts."""
    (directory / "code").mkdir()
    (directory / "code" / "train.py").write_text(SCRIPT)
    distribution, _ = KINDS[kind]
    options = {
        "--kind": kind,
        "--name": "digits",
        "--namespace": NAMESPACE,
        "--hosts": str(HOSTS),
        "--distribution": distribution,
        "--channel": "training=data/set-1",
        "--results": RESULTS.get(kind, "models"),
        "--cpus": "1500m",
        "--hyperparameter": "epochs=3",
        "--env": "DOLLARS=$(HOME) $$",
        "--shm-size": "96m",
        "--memory": "2g",
        "-o": str(directory / "job.yaml"),
    }
    words = [word for pair in options.items() for word in pair]
    if kind != "trainjob":  # `train` starts one rank on a CPU, also with PET_NPROC_PER_NODE=2
        words += ["--procs-per-host", "1"]
    script = str(directory / "code" / "train.py")
    words = ["deploy", "kubernetes", IMAGE, script, *words, "--", "$(HOME)"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return list(yaml.safe_load_all((directory / "job.yaml").read_text()))


@pytest.mark.parametrize("kind", ["job", in_soak("jobset"), "trainjob", "mpijob"])  # two are alike but for names
def test_the_pods_of_a_manifest_find_each_other_and_train(
    start_host: StartHost, network: Network, tmp_path: Path, kind: str
) -> None:
    objects = render(kind, tmp_path)
    pods = kubelet.list_pods(objects)
    hostfile = {"hostfile": kubelet.make_hostfile(pods, NAMESPACE)}
    operators = [{"kind": "ConfigMap", "metadata": {"name": "digits-config"}, "data": hostfile}]
    domain = f".{NAMESPACE}.svc" if kind == "mpijob" else ""
    node = kubelet.Kubelet(start_host, network, [*objects, *operators], tmp_path, domain)
    (node.claim("data") / "set-1").mkdir(parents=True)
    (node.claim("data") / "set-1" / "data.txt").write_text("digits")
    kept = node.claim("models")
    if kind in RESULTS:
        kept = node.node_directory(RESULTS[kind])
        kept.mkdir(parents=True)
        os.chown(kept, 0, 1000)  # the fix in the note that the command prints
        kept.chmod(0o2775)

    started = [node.start(pod) for pod in pods]
    ended = [host.wait() for host in started]

    assert [end.code for end in ended] == [0] * HOSTS, ended
    secret = next(each["stringData"]["job-secret"] for each in objects if each["kind"] == "Secret")
    for rank, end in enumerate(ended):
        results = kept / "digits" / f"host-{rank}"
        assert json.loads((results / "model" / "facts.json").read_text()) == {
            "ranks": HOSTS,
            "rank": str(rank),
            "first": KINDS[kind][1],
            "user": 1000,
            "shm": 96 * 2**20,
            "data": "digits",
            "arguments": ["--epochs", "3", "$(HOME)"],
            "dollars": "$(HOME) $$",
        }
        assert (results / "output" / "success").exists()
        assert secret not in end.output
        assert "has no secret" not in end.output

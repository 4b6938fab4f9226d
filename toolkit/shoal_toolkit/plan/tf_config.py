"""Builds TF_CONFIG, in which TensorFlow's strategies find their cluster. Has the program of a parameter server.

Ports and task names are the same as in SageMaker's TensorFlow containers. In a parameter-server job the first host is
the `master`, the others are `worker`s, and every host runs a `ps`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

_TRAINING_PORT, _SERVER_PORT, _MIRRORED_PORT = 2222, 2223, 8890

# The program of a parameter server: a TensorFlow server without GPUs, because the script needs them.
SERVER = (
    "import json, os, tensorflow as tf; c = json.loads(os.environ['TF_CONFIG']); "
    "tf.distribute.Server(tf.train.ClusterSpec(c['cluster']), job_name='ps', task_index=c['task']['index'], "
    "config=tf.compat.v1.ConfigProto(device_count={'GPU': 0})).join()"
)


def build_mirrored_config(hosts: Sequence[str], current_host: str) -> str:
    """Returns TF_CONFIG for MultiWorkerMirroredStrategy: every host is a worker."""
    return _format_config({"worker": _add_port(hosts, _MIRRORED_PORT)}, "worker", hosts.index(current_host))


def build_script_config(hosts: Sequence[str], current_host: str) -> str:
    """Returns TF_CONFIG for the script on a host of a job with parameter servers."""
    index = hosts.index(current_host)
    if index == 0:
        return _format_config(_build_cluster(hosts), "master", 0)
    return _format_config(_build_cluster(hosts), "worker", index - 1)


def build_server_config(hosts: Sequence[str], current_host: str) -> str:
    """Returns TF_CONFIG for the parameter server on a host."""
    return _format_config(_build_cluster(hosts), "ps", hosts.index(current_host))


def _build_cluster(hosts: Sequence[str]) -> dict[str, list[str]]:
    return {
        "master": _add_port(hosts[:1], _TRAINING_PORT),
        "worker": _add_port(hosts[1:], _TRAINING_PORT),
        "ps": _add_port(hosts, _SERVER_PORT),
    }


def _add_port(hosts: Sequence[str], port: int) -> list[str]:
    return [f"{host}:{port}" for host in hosts]


def _format_config(cluster: dict[str, list[str]], task: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": {"index": index, "type": task}})

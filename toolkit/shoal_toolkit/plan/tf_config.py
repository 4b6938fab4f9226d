"""TF_CONFIG, with which TensorFlow's strategies find their cluster. Pure.

Ports and names of the tasks are those that SageMaker's TensorFlow containers use: the first host is the `master` of a
parameter-server job, the others are `worker`s, and a `ps` runs on every host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

_TRAINING_PORT, _SERVER_PORT, _MIRRORED_PORT = 2222, 2223, 8890

# What a parameter server runs: a TensorFlow server beside the script, without a GPU, which the script needs.
SERVER = (
    "import json, os, tensorflow as tf; c = json.loads(os.environ['TF_CONFIG']); "
    "tf.distribute.Server(tf.train.ClusterSpec(c['cluster']), job_name='ps', task_index=c['task']['index'], "
    "config=tf.compat.v1.ConfigProto(device_count={'GPU': 0})).join()"
)


def mirrored(hosts: Sequence[str], current_host: str) -> str:
    """Return TF_CONFIG for MultiWorkerMirroredStrategy: every host is a worker."""
    return _config({"worker": _at(hosts, _MIRRORED_PORT)}, "worker", hosts.index(current_host))


def parameter_server(hosts: Sequence[str], current_host: str) -> str:
    """Return TF_CONFIG of the script on a host of a job with parameter servers."""
    index = hosts.index(current_host)
    if index == 0:
        return _config(_cluster(hosts), "master", 0)
    return _config(_cluster(hosts), "worker", index - 1)


def server(hosts: Sequence[str], current_host: str) -> str:
    """Return TF_CONFIG of the parameter server on a host."""
    return _config(_cluster(hosts), "ps", hosts.index(current_host))


def _cluster(hosts: Sequence[str]) -> dict[str, list[str]]:
    return {
        "master": _at(hosts[:1], _TRAINING_PORT),
        "worker": _at(hosts[1:], _TRAINING_PORT),
        "ps": _at(hosts, _SERVER_PORT),
    }


def _at(hosts: Sequence[str], port: int) -> list[str]:
    return [f"{host}:{port}" for host in hosts]


def _config(cluster: dict[str, list[str]], task: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": {"index": index, "type": task}})

"""Finds a script that cannot know of the other ranks, so that each of them would train on its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

# A way to find the other ranks, or a library that does. A word that is there by chance only hides the note.
_WAYS = re.compile(
    rb"(?i)distribut|horovod|\bhvd\b|\bmpi|rank|world_size|parallel|strategy|tf_config|accelerate|transformers|lightning"
    rb"|deepspeed|fabric|composer|\bray\b|\bsmp\b|sm_hosts|sm_current_host|resourceconfig|hostname|subprocess|\bexec"
)
_SUFFIXES = (".py", ".sh")
_MOST_FILES = 500  # reading more would delay the launch


# A strategy of TensorFlow that finds its hosts in TF_CONFIG only, and other sources of hosts.
_BY_TF_CONFIG = re.compile(
    rb"\b(?P<name>MultiWorkerMirroredStrategy|CollectiveAllReduceStrategy|ParameterServerStrategy)\("
)
_OTHER_CONFIG = re.compile(rb"TF_CONFIG|ClusterResolver|setup_multi_worker|MirroredStrategy\(cluster_resolver")


def describe_lone_ranks(count: int, code: str, sets_tf_config: bool = False) -> list[str]:
    """Returns a note if no source file names a way to find the other ranks, or only TF_CONFIG, which is not set.

    Args:
        count: The number of ranks of the job, more than one.
        code: The directory of the code.
        sets_tf_config: Whether the launcher sets TF_CONFIG.
    """
    knows = has_config = False
    strategy = None
    for number, path in enumerate(_list_sources(code)):
        text = _read(path)
        knows = knows or number == _MOST_FILES or _WAYS.search(text) is not None
        has_config = has_config or _OTHER_CONFIG.search(text) is not None
        strategy = strategy or _BY_TF_CONFIG.search(text)
        if number == _MOST_FILES or (knows and sets_tf_config):
            break
    if strategy is not None and not (has_config or sets_tf_config):
        return [
            f"{strategy['name'].decode()} finds the other hosts in TF_CONFIG, which this launcher does not set: each "
            f"of the {count} ranks trains on its own. Fix: the hyperparameter "
            "sagemaker_multi_worker_mirrored_strategy_enabled=true, in an estimator "
            'distribution={"multi_worker_mirrored_strategy": {"enabled": True}} (docs/tensorflow.md#strategies)'
        ]
    if knows:
        return []
    return [
        f"{count} ranks start, and no file of the code names the others (such as torch.distributed, MPI, RANK or"
        " SM_HOSTS): each rank trains on its own. Fix: train together, as examples/ddp/train.py does, or start one rank"
    ]


def _list_sources(directory: str) -> Iterator[str]:
    for parent, _, names in os.walk(directory):
        yield from (os.path.join(parent, name) for name in names if name.endswith(_SUFFIXES))


def _read(path: str) -> bytes:
    """Returns the content of a file; if it cannot be read, a word that hides the note."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b"distributed"

"""Run in a container: prints what an image holds and can do, as JSON. `main` is called with the name of a function."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

SITE = Path(sysconfig.get_path("platlib"))
OUR_PACKAGES = {
    "shoal-toolkit": ("shoal_toolkit", "sagemaker_training"),
    "shoal-checkpoint": ("shoal_checkpoint",),
    "shoal-smdistributed": ("smdistributed", "smddpcommon.py"),
    "shoal-rehearsal": ("shoal_rehearsal",),
}
# In the environment of a rank, accelerate takes other ways.
RANK = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
EVERYDAY = (
    *("PIL.Image", "h5py", "matplotlib.pyplot", "packaging.version", "pandas", "psutil", "py3nvml", "requests"),
    *("safetensors", "tensorboard", "tqdm.auto", "yaml"),
)
COMMANDS = ("train", "smddprun", "smddpsinglenode", "smddp_singlenode_dev", "smddpmprun", "mpirun", "python", "pip")


def main(name: str) -> None:
    print(json.dumps(globals()[name]()))


def torch() -> dict[str, Any]:
    """The version, what it was built for, and the shape of a tensor that it makes."""
    framework: Any = importlib.import_module("torch")
    return {
        "version": framework.__version__,
        "cuda": framework.version.cuda,
        "nccl": framework.distributed.is_nccl_available(),
        "shape": list(framework.ones([2, 2]).shape),
    }


def tensorflow() -> dict[str, Any]:
    """As `torch`."""
    framework: Any = importlib.import_module("tensorflow")
    return {
        "version": framework.__version__,
        "cuda": framework.sysconfig.get_build_info().get("cuda_version"),
        "built_with_cuda": framework.test.is_built_with_cuda(),
        "shape": list(framework.ones([2, 2]).shape),
    }


def transformers() -> dict[str, Any]:
    """The version, whether it finds torch, what that says, and the steps that it trained a small model for.

    Packages may all be there and still not fit together at run time: torch, numpy and pyarrow did not.
    """
    os.environ.update(RANK)
    importlib.import_module("accelerate")
    datasets: Any = importlib.import_module("datasets")
    library: Any = importlib.import_module("transformers")
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": [0, 1] * 4})
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = library.BertForSequenceClassification(library.BertConfig(**sizes, intermediate_size=8))
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = library.TrainingArguments("/dev/shm/out", **options)
    return {
        "version": library.__version__,
        "is_torch_available": library.utils.is_torch_available(),
        "torch": torch(),
        "steps": library.Trainer(model, arguments, train_dataset=rows).train().global_step,
    }


def everyday() -> dict[str, Any]:
    """The everyday packages: the errors of their imports, and the results of torchvision and tensorboard."""
    lacking = {}
    for name in EVERYDAY:
        try:
            importlib.import_module(name)
        except Exception as error:
            lacking[name] = repr(error)
    found: dict[str, Any] = {"lacking": lacking}
    if importlib.util.find_spec("torchvision"):
        import torch
        import torchvision  # type: ignore[import-not-found, unused-ignore]
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined, unused-ignore]

        scaled = torchvision.transforms.Compose([torchvision.transforms.ToTensor()])
        picture, _ = torchvision.datasets.FakeData(1, (3, 32, 32), transform=scaled)[0]
        found["logits"] = list(torchvision.models.resnet18().eval()(picture[None]).shape)
        try:
            found["kept"] = torchvision.ops.nms(torch.tensor([[0.0, 0, 2, 2]]), torch.ones(1), 0.5).tolist()
        except RuntimeError as error:
            found["kept"] = str(error)
        SummaryWriter(os.environ["TMPDIR"] + "/events").add_scalar("loss", 0.5, 1)
        found["events"] = len(list(Path(os.environ["TMPDIR"], "events").iterdir()))
    return found


def nvidia() -> dict[str, Any]:
    """How many libraries NVIDIA's wheels have, and which fail to load. Nothing else has loaded any of them before."""
    paths = sorted(SITE.glob("nvidia/*/lib/lib*.so*"))
    failed = {}
    for path in paths:
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            failed[str(path)] = str(error)
    return {"count": len(paths), "failed": failed}


def ours() -> dict[str, Any]:
    """What our wheels brought."""
    found = {name: importlib.metadata.distribution(name) for name in OUR_PACKAGES}
    places = [SITE / name for names in OUR_PACKAGES.values() for name in names]
    modules = [path for place in places for path in ([place] if place.suffix else place.rglob("*.py"))]
    return {
        "versions": {name: distribution.version for name, distribution in found.items()},
        "files": [str(path) for path in found["shoal-smdistributed"].files or ()],
        "engine_bytes": importlib.import_module("smdistributed.core.native").load().engine_bytes(2, 4096),
        "modules": len(modules),
        "stale": [str(path) for path in modules if not has_bytecode(path)],
        "commands": [name for name in COMMANDS if shutil.which(name)],
        "finders": _finders_of_a_rank(),
    }


def _finders_of_a_rank() -> str:
    """The finders of modules in a Python that starts in a job."""
    rank = {**os.environ, "SM_CURRENT_HOST": "algo-1"}
    return subprocess.check_output([sys.executable, "-c", "import sys; print(sys.meta_path)"], env=rank, text=True)


def has_bytecode(path: Path) -> bool:
    """Return whether a module has bytecode of its own text, checked by content (PEP 552)."""
    begins = importlib.util.MAGIC_NUMBER + bytes([3, 0, 0, 0]) + importlib.util.source_hash(path.read_bytes())
    compiled = Path(importlib.util.cache_from_source(str(path)))
    return compiled.exists() and compiled.read_bytes().startswith(begins)

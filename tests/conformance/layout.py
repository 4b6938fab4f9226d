"""A job as a container sees it: the files that SageMaker mounts at /opt/ml, and the container's variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).with_name("record.py").read_text()
NONE, PYTORCH, TENSORFLOW = "none", "pytorch", "tensorflow"


class Tree(NamedTuple):
    """A job, and the framework toolkit that the stock one has with it.

    `files` lie in the code directory, `besides` anywhere below /opt/ml (None: the file is not there). Strings among the
    hyperparameters stand as in hyperparameters.json.
    """

    name: str
    hyperparameters: Mapping[str, Any] = {}
    files: Mapping[str, str] = {"train.py": RECORD}
    program: str = "train.py"
    hosts: tuple[str, ...] = ("algo-1",)
    resources: Mapping[str, Any] = {}  # further keys of resourceconfig.json
    group_of: Mapping[str, str] = {}  # host → its instance group
    channels: Mapping[str, Any] = {}  # inputdataconfig.json
    environ: Mapping[str, str] = {}
    besides: Mapping[str, str | bytes | None] = {}
    framework: str = NONE
    absent: tuple[str, ...] = ()  # hosts that never start
    cpus: float = 0  # 0: all
    memory_mib: int = 0  # 0: all
    devices: tuple[str, ...] = ()  # under /dev
    limit_s: float = 300

    @property
    def variables(self) -> dict[str, str]:
        """The container's variables; the scripts of several hosts take their time.

        The stock toolkit's workers look for mpirun's daemon once a second, and wait for ever when they miss it. Its
        hosts look up each other's names, which are gone when a container ends.
        """
        framework = {"SAGEMAKER_TRAINING_MODULE": ""} if self.framework == NONE else {}
        seconds = {"RECORD_SECONDS": "4"} if len(self.hosts) > 1 else {}
        return {**framework, **seconds, **self.environ}

    @property
    def uses_mpi(self) -> bool:
        """Whether the stock toolkit takes it for an MPI job."""
        launchers = (
            "sagemaker_mpi_enabled",
            "sagemaker_distributed_dataparallel_enabled",
            "sagemaker_pytorch_ddp_enabled",
        )
        return any(self.hyperparameters.get(name, "false") != "false" for name in launchers)

    def write(self, base: Path, host: str) -> None:
        """Lay out /opt/ml of a host."""
        for directory in ("code", "model", "output/data", *(f"input/data/{name}" for name in self.channels)):
            (base / directory).mkdir(parents=True)
        files: dict[str, str | bytes | None] = {f"code/{name}": text for name, text in self.files.items()}
        for name, document in self._configuration(host).items():
            files[f"input/config/{name}.json"] = json.dumps(document)
        for name, content in {**files, **self.besides}.items():
            if content is not None:
                path = base / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
                # The SDK's archives and copies keep the mode of executable files.
                path.chmod(0o755 if path.read_bytes().startswith(b"#!") else 0o644)

    def _configuration(self, host: str) -> dict[str, Mapping[str, Any]]:
        program = {"sagemaker_program": json.dumps(self.program)} if self.program else {}
        group = {"current_group_name": self.group_of[host]} if self.group_of else {}
        return {
            "hyperparameters": {**program, **self.hyperparameters},
            "resourceconfig": {"current_host": host, "hosts": list(self.hosts), **group, **self.resources},
            "inputdataconfig": self.channels,
        }

"""Reads the use of GPUs from nvidia-smi, which runs beside the script and prints a line for each GPU regularly."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal.jobs import gpus

_SECONDS = 2
_FIELDS = "index,utilization.gpu,memory.used"


@dataclass(frozen=True)
class GpuUse:
    """The use of all GPUs of a host."""

    percent: float | None
    """The mean of all GPUs; None if they do not report it, as parts of a GPU."""
    memory_bytes: int


@dataclass
class GpuMeter:
    """Keeps the last line of nvidia-smi for each GPU of each host. Threads may add lines at the same time."""

    _lines: dict[tuple[str, str], tuple[float | None, int]] = field(default_factory=dict)

    def add(self, host: str, line: str) -> None:
        """Keep a line such as `0, 95, 10240` of a host: index, percent and MiB. Other lines are ignored."""
        index, *values = (word.strip() for word in line.split(","))
        if len(values) == 2 and _is_number(index, 3) and _is_number(values[1], 8):
            percent = float(values[0]) if _is_number(values[0], 3) else None
            self._lines[host, index] = percent, int(values[1]) << 20

    def read(self, host: str) -> GpuUse | None:
        """Return the use of the GPUs of a host; None if it is unknown."""
        found = [use for (name, _), use in self._lines.copy().items() if name == host]
        if not found:
            return None
        percents = [percent for percent, _ in found if percent is not None]
        mean = sum(percents) / len(percents) if percents else None
        return GpuUse(mean, sum(memory for _, memory in found))


def _is_number(word: str, digits: int) -> bool:
    """Return whether a word is a number with at most `digits` digits. A script can replace nvidia-smi."""
    return len(word) <= digits and word.isascii() and word.isdecimal()


def smi_command(devices: Iterable[str] = ()) -> list[str]:
    """Return the command that prints the use of these GPUs, or of all, until it is ended."""
    ids = [f"--id={','.join(devices)}"] if devices else []
    return ["nvidia-smi", *ids, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--loop={_SECONDS}"]


@contextlib.contextmanager
def measure_machine(host: str, option: str | None) -> Iterator[GpuMeter]:
    """Yield a meter of this machine's GPUs, which knows nothing if there is no GPU or no nvidia-smi.

    Args:
        host: The name under which they are measured.
        option: The checked value of `--gpus`.
    """
    meter = GpuMeter()
    has_gpus = option != gpus.NONE and any(Path("/dev").glob("nvidia[0-9]*"))
    if not (has_gpus and shutil.which("nvidia-smi")):
        yield meter
        return
    process = _start(smi_command(option.split(",") if option and option != gpus.ALL else ()), host, meter)
    try:
        yield meter
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a broken driver may hold it
            process.wait(timeout=2)


def _start(command: list[str], host: str, meter: GpuMeter) -> subprocess.Popen[str]:
    """Start nvidia-smi, and a thread that reads its lines."""
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, text=True, errors="replace")
    threading.Thread(target=read_lines, args=(process.stdout or (), host, meter), name="GPUs", daemon=True).start()
    return process


def read_lines(lines: Iterable[str], host: str, meter: GpuMeter) -> None:
    """Body of a thread: add lines to a meter until their source ends."""
    for line in lines:
        meter.add(host, line)

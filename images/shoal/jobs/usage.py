"""Measures CPU, memory and GPUs while a job runs, about once per second and with less than 1 % of a core."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.jobs import gpus
from shoal.jobs.job_log import Key, Series

_SMI_SECONDS = 2
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
        """Keeps a line such as `0, 95, 10240` of a host: index, percent and MiB. Other lines are ignored."""
        index, *values = (word.strip() for word in line.split(","))
        if len(values) == 2 and _is_number(index, 3) and _is_number(values[1], 8):
            percent = float(values[0]) if _is_number(values[0], 3) else None
            self._lines[host, index] = percent, int(values[1]) << 20

    def read(self, host: str) -> GpuUse | None:
        """Returns the use of the GPUs of a host; None if it is unknown."""
        found = [use for (name, _), use in self._lines.copy().items() if name == host]
        if not found:
            return None
        percents = [percent for percent, _ in found if percent is not None]
        mean = sum(percents) / len(percents) if percents else None
        return GpuUse(mean, sum(memory for _, memory in found))


def _is_number(word: str, digits: int) -> bool:
    """Returns whether a word is a number with at most `digits` digits. A script can replace nvidia-smi."""
    return len(word) <= digits and word.isascii() and word.isdecimal()


def smi_command(devices: Iterable[str] = ()) -> list[str]:
    """Returns the command that prints the use of these GPUs, or of all, until it is ended."""
    ids = [f"--id={','.join(devices)}"] if devices else []
    return ["nvidia-smi", *ids, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--loop={_SMI_SECONDS}"]


@contextlib.contextmanager
def measure_machine(host: str, option: str | None) -> Iterator[GpuMeter]:
    """Yields a meter of this machine's GPUs, which knows nothing if there is no GPU or no nvidia-smi.

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
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, text=True, errors="replace")
    threading.Thread(target=read_lines, args=(process.stdout or (), host, meter), name="GPUs", daemon=True).start()
    return process


def read_lines(lines: Iterable[str], host: str, meter: GpuMeter) -> None:
    """Body of a thread: add lines to a meter until their source ends."""
    for line in lines:
        meter.add(host, line)


CPU, MEMORY = "CPU (% of a core)", "memory (MB)"
GPU, GPU_MEMORY = "GPU (%)", "GPU memory (MB)"
MACHINE = "this machine"
_SECONDS = 1.0
_MAX_SHARE = 0.01
"""The largest part of a core that measuring may take."""


@dataclass(frozen=True)
class Usage:
    """CPU time, memory and GPUs of a host."""

    cpu_seconds: float
    """Since its start."""
    memory_bytes: int
    gpu: GpuUse | None = None
    """None: it has no GPU, or its use is unknown."""


Reader = Callable[[], Mapping[str, Usage]]
"""Returns the usage of each host now; none if that is unknown."""


@contextlib.contextmanager
def sample_usage(series: dict[Key, Series], began: float, read: Reader) -> Iterator[None]:
    """Measures in a thread while the body runs, and adds the values to `series`.

    Args:
        began: When the job began, as time.time().
        read: Reads the usage. An error ends the measuring, and never the job.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(series, began, read, ended), name="usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=2)


def _sample(series: dict[Key, Series], began: float, read: Reader, ended: threading.Event) -> None:
    """Body of a thread: reads the usage until `ended` is set. It waits longer if reading takes more of the CPU."""
    earlier: dict[str, tuple[float, float]] = {}
    wait = _SECONDS
    while True:
        cpu_before = time.thread_time()
        try:
            usages = read()
        except Exception:  # Docker may be gone, and the job's own error says so
            return
        now = time.time()
        for host, usage in usages.items():
            if host in earlier and (seconds := now - earlier[host][0]) > 0:
                share = max((usage.cpu_seconds - earlier[host][1]) / seconds * 100, 0.0)
                series.setdefault((CPU, host, None), Series()).add(round(now - began, 1), round(share, 1))
            series.setdefault((MEMORY, host, None), Series()).add(round(now - began, 1), usage.memory_bytes // 10**6)
            if usage.gpu and usage.gpu.percent is not None:
                series.setdefault((GPU, host, None), Series()).add(round(now - began, 1), round(usage.gpu.percent, 1))
            if usage.gpu:
                memory = usage.gpu.memory_bytes // 10**6
                series.setdefault((GPU_MEMORY, host, None), Series()).add(round(now - began, 1), memory)
            earlier[host] = now, usage.cpu_seconds
        wait = max(_SECONDS, (time.thread_time() - cpu_before) / _MAX_SHARE)
        if ended.wait(wait):
            return


def read_machine(gpus: GpuMeter, proc: Path = Path("/proc")) -> Mapping[str, Usage]:
    """Returns the CPU time and memory that are in use on this machine, from /proc; none on systems without it.

    Adds the use of GPUs that a meter has.
    """
    try:
        ticks = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1:8]]
        memory = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        used = int(memory["MemTotal"].split()[0]) - int(memory["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError, IndexError):
        return {}
    busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait
    return {MACHINE: Usage(busy / 100, used * 1024, gpus.read(MACHINE))}

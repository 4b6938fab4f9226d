"""Measures CPU, memory and GPUs while a job runs, about once per second and with less than 1 % of a core."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.jobs.gpu_usage import GpuMeter, GpuUse
from shoal.jobs.job_log import Key, Series

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
    """Measure in a thread while the body runs, and add the values to `series`.

    Args:
        series: The series by name and host.
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
    """Body of a thread: read the usage until `ended` is set. It waits longer if reading takes more of the CPU."""
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
    """Return the CPU time and memory that are in use on this machine, from /proc; none on systems without it.

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

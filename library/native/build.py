"""Build hook: compiles the C engine, TensorFlow operations and peer filter into the package when its wheel is built.

The compiler is `cc`, or the command in CC, with the options in options.txt. The results are linked to neither Python
nor TensorFlow. So one wheel serves all versions. They are recompiled only when a source or the command has changed.
Image builds compile the same sources in a stage of their own (dockerfiles/macros.j2).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
CORE = HERE.parent / "smdistributed" / "core"
RESULTS = {
    CORE / "_engine.so": ("engine.c", "counter.c", "reduce.c", "compress.c"),
    CORE / "tensorflow" / "_operations.so": ("tensorflow.c",),
    CORE / "_peer_filter.so": ("peer_filter.c",),
}
OPTIONS = HERE / "options.txt"


class EngineHook(BuildHookInterface):  # type: ignore[type-arg]
    """The hook that hatchling calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and tags the wheel for this platform."""
        compile_engine()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"] += [str(result.relative_to(HERE.parent)) for result in RESULTS]


def compile_engine() -> None:
    """Compiles what has changed. Raises SystemExit if there is no compiler, or it fails."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *OPTIONS.read_text().split()]
    digest = hashlib.sha256(repr(command).encode())
    for path in sorted(HERE.glob("*.[ch]")):
        digest.update(path.read_bytes())
    stamp = HERE / "engine.stamp"
    found = all(result.exists() for result in RESULTS)
    if found and stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    for result, sources in RESULTS.items():
        _compile(command, result, sources)
    stamp.write_text(digest.hexdigest())


def _compile(command: list[str], result: Path, sources: tuple[str, ...]) -> None:
    """Compiles sources into a file that appears when it is complete. Raises SystemExit if that fails."""
    unfinished = result.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run([*command, "-o", str(unfinished), *sources], cwd=HERE, check=True)
    except FileNotFoundError:
        raise SystemExit(
            f"{command[0]}: C compiler not found; smdistributed's C engine needs one. "
            "Fix: install one (Debian: apt-get install gcc libc6-dev), or name it in CC."
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"The C engine of smdistributed does not compile: {error}") from None
    unfinished.replace(result)

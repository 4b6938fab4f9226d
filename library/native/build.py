"""Compiles the engine into the package when its wheel is built: a build hook of hatchling.

The compiler is `cc`, or what CC names, with the options in options.txt. The result knows no Python: one wheel serves
all versions. It is compiled anew only when a source, or the command, has changed. Images compile the same in a stage of
their build (dockerfiles/base.j2), and take the wheel without it.
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
RESULT = HERE.parent / "smdistributed" / "core" / "_engine.so"
PTH = "shoal-rehearsal.pth"
OPTIONS = HERE / "options.txt"


class EngineHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one of this platform."""
        compile_engine()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(str(RESULT.relative_to(HERE.parent)))
        build_data["force_include_editable"][str(HERE.parent / PTH)] = PTH


def compile_engine() -> Path:
    """Return the engine, compiled. Raises SystemExit where there is no compiler, or it fails."""
    sources = sorted(HERE.glob("*.c"))
    command = [*shlex.split(os.environ.get("CC") or "cc"), *OPTIONS.read_text().split()]
    digest = hashlib.sha256(repr(command).encode())
    for path in [*sources, *sorted(HERE.glob("*.h"))]:
        digest.update(path.read_bytes())
    stamp = HERE / "engine.stamp"
    if RESULT.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
        return RESULT
    unfinished = RESULT.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run([*command, "-o", str(unfinished), *map(str, sources)], check=True)
    except FileNotFoundError:
        raise SystemExit(
            f"{command[0]}: there is no such C compiler, which the engine of smdistributed needs: "
            "install one (Debian: apt-get install gcc libc6-dev), or name it in CC."
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"The engine of smdistributed does not compile: {error}") from None
    unfinished.replace(RESULT)
    stamp.write_text(digest.hexdigest())
    return RESULT

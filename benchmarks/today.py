"""Public training scripts of today, unmodified: `make today SOURCES=DIRECTORY`.

tests/integration/data/today.toml names them. DIRECTORY has one directory for each repository, such as karpathy+nanoGPT,
with the files of its commit. Each script runs in a job of `shoal run`, plain on the CPU and in a rehearsal of GPUs. It
must print the same numbers as under torchrun or python in the CPU image.

`--image` and `--rehearsal-image` are child images with the packages of tests/integration/data/today.txt, and the torch
of the base. Requirements files beside scripts are left out. `--only WORD` runs scripts with this word in their name,
and `--quick` the first layout of each. Results are kept in `--work`; `--again` makes them again.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomllib
from report import MISSED, print_machine

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "integration" / "data" / "today.toml"
WRITER = Path(__file__).with_name("today_data.py")
LIMIT = 600
GOALS = {"plain": 12, "rehearsal": 23, "more": 16, "curve": 24}
_TOLERANCE = 1e-4
_DEVICES = {"plain": "cpu", "rehearsal": "gpu"}


@dataclass(frozen=True)
class Script:
    """An entry of the table. The head of the table describes the fields."""

    name: str
    repository: str
    entry: str
    arguments: str = ""
    source: str = "."
    cpu: str | None = None
    gpu: str | None = None
    plain: tuple[str, ...] = ()
    rehearsal: tuple[str, ...] = ()
    losses: str | None = None
    same: bool = True
    alike: bool = True
    original: bool = False
    data: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: str | None = None

    def arguments_for(self, device: str, layout: str) -> list[str]:
        hosts, per_host = map(int, layout.split("x"))
        more = {"cpu": self.cpu, "gpu": self.gpu}[device] or ""
        text = f"{self.arguments} {more}"
        for name, value in (("world", hosts * per_host), ("hosts", hosts), ("per_host", per_host)):
            text = text.replace(f"{{{name}}}", str(value))
        return shlex.split(text)


@dataclass(frozen=True)
class Run:
    """How a script ended: its exit code, the numbers that it printed, and the names of curves in the job's report."""

    code: int
    losses: tuple[str, ...]
    curves: tuple[str, ...] = ()
    last: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """The directories of sources, data and results, and the images."""

    sources: Path
    work: Path
    images: Mapping[str, str]

    @property
    def data(self) -> Path:
        return self.work / "data"


def main() -> int:
    options = _read_options()
    place = Place(
        options.sources.resolve(),
        options.work.resolve(),
        {"plain": options.image, "rehearsal": options.rehearsal_image},
    )
    place.data.mkdir(parents=True, exist_ok=True)
    print_machine()
    write_data(place)
    scripts = [Script(**entry) for entry in tomllib.loads(TABLE.read_text())["script"]]
    for script in scripts:
        if any(word in script.name for word in options.only or [""]):
            try:
                record(place, script, options.again, list(_choose_runs(script, options)))
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{script.name}: not judged: {error}", flush=True)
    rows = [(script, _read_results(place, script)) for script in scripts]
    print_rows(rows)
    return print_figures(rows)


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "today")
    parser.add_argument("--image", default="pytorch-training:2.13.0-cpu-py311-debian12-devel")
    parser.add_argument("--rehearsal-image", default="pytorch-training:2.13.0-gpu-py311-cu130-debian12")
    parser.add_argument("--only", action="append")
    parser.add_argument("--mode", choices=("plain", "rehearsal"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the first layout of each mode only")
    return parser.parse_args()


def write_data(place: Place) -> None:
    """Write the data that are missing, in the image."""
    mounts = ["-v", f"{WRITER}:/today_data.py:ro", "-v", f"{place.data}:/data"]
    command = ["docker", "run", "--rm", "--network", "none", *mounts, place.images["plain"], "python", "/today_data.py"]
    subprocess.run([*command, "/data"], check=True, stderr=subprocess.DEVNULL)


def _choose_runs(script: Script, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for mode, layout in _list_runs(script):
        if options.mode in (None, mode) and (not options.quick or layout == getattr(script, mode)[0]):
            yield mode, layout


def record(place: Place, script: Script, again: bool, runs: Iterable[tuple[str, str]]) -> None:
    """Run a script in each layout that has no result yet, and keep the results."""
    results = _read_results(place, script)
    file = place.work / "results" / f"{_slug(script)}.json"
    file.parent.mkdir(exist_ok=True)
    code = copy_source(place, script)
    prepare(place, script, code)
    for mode, layout in runs:
        if again or f"{mode} {layout}" not in results:
            if script.cpu is not None and script.losses and script.same:
                world = _world(layout)
                if f"reference {world}" not in results:
                    results[f"reference {world}"] = asdict(run_reference(place, script, code, world))
            results[f"{mode} {layout}"] = asdict(run_job(place, script, code, mode, layout))
            file.write_text(json.dumps(results, indent=1))
            print(f"{script.name}: {mode} {layout}: {judge(script, results, mode, layout)}", flush=True)


def _list_runs(script: Script) -> Iterator[tuple[str, str]]:
    yield from (("plain", layout) for layout in script.plain)
    yield from (("rehearsal", layout) for layout in script.rehearsal)


def _world(layout: str) -> int:
    hosts, per_host = layout.split("x")
    return int(hosts) * int(per_host)


def _slug(script: Script) -> str:
    return re.sub(r"[\W_]+", "-", script.name)


def _read_results(place: Place, script: Script) -> dict[str, Any]:
    file = place.work / "results" / f"{_slug(script)}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def copy_source(place: Place, script: Script) -> Path:
    """Copy a script's directory, and the data that belong beside it. Requirements are in the image already."""
    code = place.work / "code" / _slug(script)
    shutil.rmtree(code, ignore_errors=True)
    repository = place.sources / script.repository.replace("/", "+")
    shutil.copytree(repository / script.source, code, symlinks=True)
    for file in ("requirements.txt", "pyproject.toml", "uv.lock", "setup.py"):
        (code / file).unlink(missing_ok=True)
    for target, name in script.beside.items():
        shutil.copytree(place.data / name, code / target, dirs_exist_ok=True)
    return code


def prepare(place: Place, script: Script, code: Path) -> None:
    """Run a script's preparation once."""
    done = place.work / "prepared" / _slug(script)
    if script.prepare and not done.exists():
        subprocess.run([*_start_container(place, script, code), "bash", "-c", script.prepare], check=True)
        done.parent.mkdir(exist_ok=True)
        done.touch()


def _start_container(place: Place, script: Script, code: Path) -> list[str]:
    volumes = [f"{code}:/opt/ml/code", f"{place.data}:/data"]
    volumes += [f"{place.data / name}:{target}" for target, name in script.data.items()]
    environment = [f"{name}={value}" for name, value in {**script.environment, "OMP_NUM_THREADS": "1"}.items()]
    return [
        *("docker", "run", "--rm", "--init", "--shm-size", "1g", "-w", "/opt/ml/code"),
        *(word for volume in volumes for word in ("-v", volume)),
        *(word for variable in environment for word in ("-e", variable)),
        place.images["plain"],
    ]


def run_reference(place: Place, script: Script, code: Path, world: int) -> Run:
    """Run a script by torchrun, or by python for one rank, in the CPU image."""
    copy = code.with_name(f"{code.name}-reference")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(code, copy, symlinks=True)
    launcher = ["python"] if world == 1 else ["torchrun", "--standalone", f"--nproc-per-node={world}"]
    words = [*launcher, *script.entry.split(), *script.arguments_for("cpu", f"1x{world}")]
    return _run([*_start_container(place, script, copy), *words], script)


def run_job(place: Place, script: Script, code: Path, mode: str, layout: str) -> Run:
    """Run a script by `shoal run`."""
    name = f"{_slug(script)}-{mode}-{layout}".lower()
    jobs = place.work / "jobs"
    shutil.rmtree(jobs / name, ignore_errors=True)
    hosts, per_host = layout.split("x")
    command = [Path(sys.executable).with_name("shoal"), "run", place.images[mode], "--source", code]
    command += ["--entry-point", script.entry, "--name", name, "--output", jobs, "--plain"]
    command += ["-e", "OMP_NUM_THREADS=1", "-v", f"{place.data}:/data"]
    if layout != "1x1":
        command += ["--hosts", hosts, "--procs-per-host", per_host]
    for variable, value in script.environment.items():
        command += ["-e", f"{variable}={value}"]
    for target, source in script.data.items():
        command += ["-v", f"{place.data / source}:{target}"]
    if mode == "rehearsal":
        command += ["-e", "SHOAL_REHEARSE=1"]
    return _run([*command, "--", *script.arguments_for(_DEVICES[mode], layout)], script, jobs / name / "report.html")


def _run(command: Iterable[object], script: Script, report: Path | None = None) -> Run:
    started = time.monotonic()
    words = ["timeout", "--kill-after", "30", str(LIMIT), *map(str, command)]
    ended = subprocess.run(words, cwd=ROOT, text=True, errors="replace", capture_output=True)
    text = ended.stdout + ended.stderr
    losses = sorted(re.findall(script.losses, text)) if script.losses else []
    curves = read_curves(report) if report and report.exists() else []
    last = "" if ended.returncode == 0 else text[-1500:]
    return Run(ended.returncode, tuple(losses), tuple(curves), last, round(time.monotonic() - started, 1))


def read_curves(report: Path) -> list[str]:
    """Return the names of curves of a loss with several points in a job's report."""
    text, found = report.read_text(errors="replace"), []
    for name in ("metrics", "scalars"):
        for match in re.finditer(rf'"{name}":(?=\[)', text):
            curves = json.JSONDecoder().raw_decode(text, match.end())[0]
            found += [curve for curve in curves if "loss" in curve["name"].lower() and len(curve["values"]) > 1]
    return sorted({curve["name"] for curve in found})


def judge(script: Script, results: Mapping[str, Any], mode: str, layout: str) -> str:
    """Return `equal`, `ends 0` (there is nothing to compare with), or what is wrong."""
    run, reference = results.get(f"{mode} {layout}"), results.get(f"reference {_world(layout)}")
    if run is None:
        return "not run"
    if reference and reference["code"] and mode == "plain":
        return f"not judged: the reference fails: {reference['last'].strip().splitlines()[-1][:120]}"
    if run["code"]:
        lines = [line for line in run["last"].splitlines() if re.search(r"Error|error|failed|Fix:", line)] or ["?"]
        return f"fails ({run['code']}): {lines[-1].strip()[:160]}"
    if script.losses and not run["losses"]:
        return "wrong: prints no loss"
    if reference is None or reference["code"] or not (script.alike or mode == "plain"):
        return "ends 0"  # a script may have no path for several ranks on the CPU
    return _compare(reference["losses"], run["losses"])


def _compare(expected: list[str], found: list[str]) -> str:
    if len(expected) != len(found):
        return f"wrong: {len(found)} numbers, and {len(expected)} in the reference"
    pairs = list(zip(sorted(map(float, expected)), sorted(map(float, found)), strict=True))
    difference = max((abs(a - b) / max(abs(a), 1e-6) for a, b in pairs), default=0.0)
    return "equal" if difference <= _TOLERANCE else f"wrong: differs by {difference:.1e}"


def is_right(script: Script, results: Mapping[str, Any], mode: str) -> bool:
    """Whether a script ends right in all layouts of a mode."""
    layouts = [layout for each, layout in _list_runs(script) if each == mode]
    return all(judge(script, results, mode, layout) in ("equal", "ends 0") for layout in layouts)


def has_curve(script: Script, results: Mapping[str, Any]) -> bool:
    """Whether a job of a script has a curve of its loss."""
    return any(results.get(f"{mode} {layout}", {}).get("curves") for mode, layout in _list_runs(script))


def print_rows(rows: Iterable[tuple[Script, Mapping[str, Any]]]) -> None:
    """Print a line for each script and layout."""
    for script, results in rows:
        runs = "; ".join(
            f"{mode} {layout} {judge(script, results, mode, layout)}" for mode, layout in _list_runs(script)
        )
        print(f"{script.name}: {runs}; loss curve: {'yes' if has_curve(script, results) else 'no'}")


def print_figures(rows: Sequence[tuple[Script, Mapping[str, Any]]]) -> int:
    """Print the goals and the counts. Return 0 if all are."""
    original = [(script, results) for script, results in rows if script.original]
    more = [(script, results) for script, results in rows if not script.original]
    reached = {
        "plain": sum(bool(script.plain) and is_right(script, results, "plain") for script, results in original),
        "rehearsal": sum(is_right(script, results, "rehearsal") for script, results in original),
        "more": sum(all(is_right(script, results, mode) for mode in _DEVICES) for script, results in more),
        "curve": sum(has_curve(script, results) for script, results in original),
    }
    for name, count in reached.items():
        met = "yes" if count >= GOALS[name] else "no"
        print(f"RESULT name=today-{name} ours={count} unit=scripts goal=>={GOALS[name]} met={met}")
    return 0 if all(count >= GOALS[name] for name, count in reached.items()) else MISSED


if __name__ == "__main__":
    sys.exit(main())

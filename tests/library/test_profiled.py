"""A training job with the recorder on, and what `shoal timeline` makes of its files."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tests.library.conftest import Python, clean_environment

from shoal.report import trace
from shoal.report.timeline_analysis import RankReport, analyse, list_caveats

SCRIPT = Path(__file__).parent / "ranks" / "profiled.py"
AHEAD = 5.0  # seconds, of the second host's clock


def train(python: Python, port: int, arguments: list[Path], timeline: str = "", **of_second: str) -> None:
    """Run the job on two ranks; the second has these variables as well. `timeline`: SMDDP_TIMELINE."""
    common = {**clean_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common["SMDDP_TIMELINE"] = timeline
    ranks = [
        subprocess.Popen(
            [*python(**of_second), SCRIPT, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(of_second if rank else {})},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]


def test_the_report_shows_how_much_communication_is_hidden(python: Python, tmp_path: Path, free_port: int) -> None:
    train(python, free_port, [tmp_path])
    page = tmp_path / "page.html"
    shoal = [str(Path(sys.executable).with_name("shoal")), "timeline", str(tmp_path), "-o", str(page)]
    output = subprocess.run(
        shoal, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("2 ranks on 1 host: ")
    assert re.search(r"\d+% of the communication is hidden behind computation", output)
    assert "clocks" not in output
    text = page.read_text()
    assert all(word in text for word in ("all_reduce", "hidden behind computation", "</html>"))
    timeline = trace.read_timeline(trace.find_files([tmp_path]))
    assert [rank.complete for rank in timeline.ranks] == [True, True]
    for report in analyse(timeline).ranks:
        assert report.overlap is not None
        assert 0 <= report.overlap <= 1
        spans = report.rank.spans_of("communication")
        assert {span.args["engine"] for span in spans} == {"shm"}
        buckets = {span.args.get("bucket") for span in spans}
        assert len(buckets) > 1
        assert sum(span.args.get("bucket") == 0 for span in spans) == 20
        ready = [event for event in report.rank.instants if event.name == "bucket ready"]
        assert len(ready) == sum("bucket" in span.args for span in spans)
        check_steps(report, json.loads((tmp_path / f"seconds_{report.rank.number}.json").read_text()))


def check_steps(report: RankReport, seconds: list[float]) -> None:
    """Check the steps of a rank against the script's own seconds, and what is in them."""
    steps = report.rank.spans_of("step")
    recorded = [step.duration / 1e9 for step in steps]
    # A busy machine may pause the script between the end of a step and its own look at the clock.
    assert statistics.median(abs(one - other) for one, other in zip(recorded, seconds, strict=True)) < 0.005
    assert sum(recorded) == pytest.approx(sum(seconds), rel=0.2)
    computed = report.rank.spans_of("compute")
    for number, step in enumerate(steps):
        names = [span.name for span in computed if step.begin <= span.begin < step.end]
        assert names == (1 + number % 2) * ["forward", "loss", "backward"] + ["gradients", "optimizer"]
    assert report.shares is not None
    assert report.shares.idle * sum(recorded) >= 19 * 0.0999  # seconds that the script sleeps in its steps
    assert report.shares.computing > 0


@pytest.mark.long
def test_clocks_of_hosts_are_compared(python: Python, tmp_path: Path, free_port: int) -> None:
    other = {"SMDDP_HOST": "another", "SMDDP_STALL_SECONDS": "2", "SKEW_SECONDS": str(AHEAD)}
    train(python, free_port, [], timeline=str(tmp_path), **other)
    timeline = trace.read_timeline(trace.find_files([tmp_path]))
    first, second = timeline.ranks
    assert first.clock_offset == 0
    assert second.clock_offset == pytest.approx(-1e6 * AHEAD, abs=20_000)
    found = analyse(timeline)
    assert found.collectives
    assert all(collective.skew < 1e9 for collective in found.collectives)
    assert not [note for note in list_caveats(found) if "were not compared" in note]

"""Metrics from the log, as SageMaker's metric definitions make them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.job.metrics import MetricPattern, read_metric_definitions
from shoal_toolkit.output import metrics
from shoal_toolkit.output.metrics import MetricsFile

from .conftest import TRAIN, Run, Tree, clean_environment

LOSS = {"Name": "loss", "Regex": r"loss: ([0-9.eE+-]+|nan|inf)"}


def records(tree: Tree) -> list[dict[str, Any]]:
    path = tree.output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def values(tree: Tree) -> list[tuple[str, object]]:
    return [(record["name"], record["value"]) for record in records(tree)]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_each_match_is_a_record(tree: Tree, run: Run, stream: str, ranks: int) -> None:
    tree.script(f"import sys\nfor n in range(3): print('loss: %.2f' % (1 / (n + 1)), file=sys.{stream})")
    mpi = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": ranks} if ranks else {}
    tree.hyperparameters(sagemaker_metric_definitions=[LOSS], **mpi)
    tree.hosts("algo-1", "algo-1")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0, done.err
    assert (done.out if stream == "stdout" else done.err).count("loss: 0.33\n") == max(1, ranks)
    for rank in range(max(1, ranks)):
        mine = [record for record in records(tree) if record["rank"] == rank]
        assert [record["value"] for record in mine] == [1.0, 0.5, 0.33]
        assert list(mine[0]) == ["time", "name", "value", "rank", "host"]
        assert (mine[0]["name"], mine[0]["host"]) == ("loss", "algo-1")
        assert mine[0]["time"].endswith("Z")


@pytest.mark.parametrize(
    ("regex", "text", "expected"),
    [
        (r"a=(\d+)", "a=1 a=2\na=3", [1.0, 2.0, 3.0]),  # every match of a line
        (r"a=(\d+)(\.\d)?", "a=1.5", [1.0]),  # the first group of several
        (r"a=(\w+)", "a=x\na=2", [2.0]),  # no number
        (r"a=(\S+)", "a=nan a=inf a=-Infinity a=1e-3", ["nan", "inf", "-inf", 0.001]),  # JSON has no such numbers
        (r"b|a=(\d+)", "b a=1", [1.0]),  # a group that takes no part
        (r"^a=(\d+)$", "x a=1\na=2\na=3 x", [2.0]),  # a line is looked at by itself
        (r"a=\s*(\d+)", "a=\n5", []),
        (r"a=(\d+)", "10% a=1\r20% a=2\r\n", [1.0, 2.0]),  # a progress bar
        (r"é=(\d+)", "é=1", [1.0]),
        (r"a=(\d+)", "a=1", [1.0]),  # the last line has no end
    ],
)
def test_what_counts_as_a_match(tree: Tree, run: Run, regex: str, text: str, expected: list[object]) -> None:
    tree.script(f"import os; os.write(1, {text.encode()!r})")
    tree.hyperparameters(sagemaker_metric_definitions=[{"Name": "a", "Regex": regex}])
    assert run(SAGEMAKER_PROGRAM="train.py").code == 0
    assert [value for _, value in values(tree)] == expected


def test_the_first_place_that_has_definitions_counts(tree: Tree, run: Run) -> None:
    tree.script("print('hyperparameter 1, config 2, code 3')")
    found = []
    (tree.code / "metrics.json").write_text(json.dumps([{"Name": "code", "Regex": "code (.)"}]))
    for place in ("code", "config", "hyperparameter"):
        definitions = [{"Name": place, "Regex": f"{place} (.)"}]
        if place == "config":
            tree.configure("metrics", definitions)
        elif place == "hyperparameter":
            tree.hyperparameters(sagemaker_metric_definitions=definitions)
        assert run(SAGEMAKER_PROGRAM="train.py").code == 0
        found.append(values(tree))
    assert found == [[("code", 3.0)], [("config", 2.0)], [("hyperparameter", 1.0)]], "an earlier job's are removed"


def test_the_script_sees_nothing_of_the_definitions(tree: Tree, run: Run) -> None:
    tree.script("import os, sys; print(sys.argv, dict(os.environ))")
    tree.hyperparameters(sagemaker_metric_definitions=[LOSS], lr=1)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert "'--lr', '1'" in done.out
    assert "metric_definitions" not in done.out


def test_a_file_beside_the_code_may_be_something_else(tree: Tree, run: Run) -> None:
    """Results of an evaluation are often called so."""
    tree.script("print('loss: 1')")
    (tree.code / "metrics.json").write_text('{"accuracy": 0.9}')
    assert run(SAGEMAKER_PROGRAM="train.py").code == 0
    assert not (tree.output / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("definitions", "says"),
    [
        ([{"Name": "loss", "Regex": "loss: ("}], "the Regex of the metric 'loss' is 'loss: (', which is not a regular"),
        ([{"Name": "loss", "Regex": "loss: 1"}], "the Regex of the metric 'loss' is 'loss: 1', which has no group"),
        ([LOSS, {"Name": "x"}], "definition 2 is {'Name': 'x'}; it must have a Name and a Regex"),
        (["loss"], "definition 1 is 'loss'; it must have a Name and a Regex"),
        ({"loss": "x"}, "is not a list of metric definitions"),
    ],
)
def test_definitions_that_are_wrong_start_nothing(tree: Tree, run: Run, definitions: object, says: str) -> None:
    tree.script("print('trained')")
    tree.hyperparameters(sagemaker_metric_definitions=definitions)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (2, "")
    assert says in tree.failure
    assert "sagemaker_metric_definitions" in tree.failure
    explained = run("--explain", SAGEMAKER_PROGRAM="train.py")
    assert explained.code == 2
    assert says in explained.err


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    Path(paths.config).mkdir(parents=True)
    (Path(paths.config) / "metrics.json").write_text("[")
    with pytest.raises(ContractError, match=r"input/config/metrics\.json cannot be read as JSON"):
        read_metric_definitions(paths.config, str(tmp_path), None)


def test_records_come_as_the_lines_do(tree: Tree) -> None:
    tree.script("import os, time\nprint('loss: 1')\nwhile not os.path.exists('go'): time.sleep(.01)")
    tree.hyperparameters(sagemaker_metric_definitions=[LOSS])
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    with subprocess.Popen(TRAIN, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as train:
        deadline = time.monotonic() + 20
        while values(tree) != [("loss", 1.0)]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (tree.code / "go").touch()
        assert train.wait(20) == 0


def test_a_full_disk_is_reported_once_and_the_job_continues(tree: Tree, run: Run) -> None:
    tree.script(
        "import os, time\nos.symlink('/dev/full', '../output/metrics.jsonl')\n"
        "for n in range(3): print('loss: 1'); time.sleep(.05)"
    )
    tree.hyperparameters(sagemaker_metric_definitions=[LOSS])
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (0, "loss: 1\n" * 3)
    assert done.err.count("metrics.jsonl cannot be written any more: No space left on device") == 1


def test_many_lines_are_read_in_linear_time(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    Path(paths.config).mkdir(parents=True)
    (Path(paths.config) / "metrics.json").write_text(json.dumps([LOSS]))
    (tmp_path / "output").mkdir()
    definitions = read_metric_definitions(paths.config, str(tmp_path), None)
    metrics = MetricsFile(str(tmp_path / "output" / "metrics.jsonl"), definitions)
    meter = metrics.reader(0, "h")
    began = time.process_time()  # CPU time, to which a busy machine adds little: 0.3 s
    for n in range(0, 100_000, 1000):
        meter.feed(b"".join(b"step %d without a number\n" % (n + m) for m in range(999)) + b"loss: %d\n" % n)
    metrics.close()
    assert time.process_time() - began < 5
    assert len((tmp_path / "output" / "metrics.jsonl").read_text().splitlines()) == 100


def test_an_expression_that_takes_years_ends_neither_the_log_nor_other_metrics(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "_MAX_SECONDS", 0.2)
    file = MetricsFile(
        str(tree.base / "metrics.jsonl"),
        [MetricPattern(name, re.compile(regex)) for name, regex in (("bad", "((a+)+)$"), ("loss", "loss=(.)"))],
    )
    reader = file.reader(0, "algo-1")
    reader.feed(f"{'a' * 60}b loss=1\n".encode())
    reader.feed(f"{'a' * 60} loss=2\n".encode())
    file.close()
    lines = (tree.base / "metrics.jsonl").read_text().splitlines()
    assert [(json.loads(line)["name"], json.loads(line)["value"]) for line in lines] == [("loss", 1), ("loss", 2)]
    assert capfd.readouterr().err.count("the expression of the metric 'bad' takes too long") == 1


def test_a_job_without_definitions_does_not_read_them(tree: Tree, run: Run) -> None:
    """Its stdout is the script's own descriptor."""
    tree.script("import os; print(os.readlink('/proc/self/fd/1') == os.readlink(f'/proc/{os.getppid()}/fd/1'))")
    assert run(SAGEMAKER_PROGRAM="train.py").out == "True\n"
    assert not (tree.output / "metrics.jsonl").exists()

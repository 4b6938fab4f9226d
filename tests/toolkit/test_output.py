"""The output of ranks on its way through `train`."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit import log
from shoal_toolkit.output.output import Output
from shoal_toolkit.output.pipes import FlowControl
from shoal_toolkit.system.loop import Loop

from .conftest import TRAIN, Run, Tree, clean_environment
from .loopback import NAMES, started, two_trees
from .netns import UNAVAILABLE, running, two_hosts

# Indentation, UTF-8, a progress bar, colours, bytes that are not UTF-8, and no newline at the end.
ODD = "  two\n\ttab\né\n 10%|█ |\r 20%|██|\r\n\x1b[1;31mred\x1b[0m\n".encode() + b"\xff\x00\n\nlast"
LAUNCHERS = ["process", pytest.param("mpi", marks=pytest.mark.mpi)]
JSON = {"SHOAL_LOG_FORMAT": "json", "SAGEMAKER_PROGRAM": "train.py"}


def launch_by(tree: Tree, launcher: str, ranks: int = 1) -> None:
    tree.hosts("algo-1", "algo-1")
    if launcher == "mpi":
        tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=ranks)


def children_cpu_seconds() -> float:
    """The CPU time of the processes that have ended, to which a busy machine adds little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def output(tree: Tree, **variables: str) -> tuple[bytes, bytes]:
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py", **variables)
    done = subprocess.run(TRAIN, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_the_bytes_of_one_rank_stay_as_they_are(tree: Tree, launcher: str, piece: int) -> None:
    """Defect 11: the stock toolkit's capture strips indentation and splits UTF-8."""
    launch_by(tree, launcher)
    pieces = [ODD[start : start + piece] for start in range(0, len(ODD), piece)]
    tree.script(f"import os\nfor fd in (1, 2):\n    for piece in {pieces!r}: os.write(fd, piece)")
    out, err = output(tree)
    assert out == ODD
    assert err.endswith(b"\n" + ODD)


@pytest.mark.mpi
def test_the_lines_of_several_ranks_are_marked_and_else_stay_as_they_are(tree: Tree) -> None:
    launch_by(tree, "mpi", 2)
    tree.script(f"import os; os.write(1, {ODD!r})")
    out, _ = output(tree)
    for rank in (0, 1):
        mark = b"[%d,algo-1] " % rank
        mine = b"".join(line.partition(mark)[2] for line in out.splitlines(keepends=True) if line.startswith(mark))
        assert mine.replace(b"\r" + mark, b"\r") == ODD + b"\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_line_with_an_error_in_it_costs_no_more_than_another(tree: Tree, launcher: str) -> None:
    """Defect 10: the stock toolkit takes 51 s for these 80,000 lines, as it is quadratic in them."""
    launch_by(tree, launcher)
    tree.script("import sys\nfor n in range(80_000): sys.stderr.write(f'ValueError: {n}\\n')")
    began = children_cpu_seconds()
    _, err = output(tree)
    assert err.count(b"\nValueError: ") == 80_000
    assert children_cpu_seconds() - began < 10  # 0.6 s


@pytest.mark.mpi
def test_lines_stay_whole_where_both_streams_are_one_pipe(tree: Tree) -> None:
    """`train 2>&1 | ...`, with a reader that is late: a write then ends within a line."""
    launch_by(tree, "mpi", 2)
    tree.script(
        "import sys\nfor n in range(20_000):\n"
        "    for out, name in ((sys.stdout, 'out'), (sys.stderr, 'err')): out.write(f'{name} {n} {\"x\" * 50}\\n')"
    )
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    with subprocess.Popen(TRAIN, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as train:
        assert train.stdout
        seen = b""
        while data := os.read(train.stdout.fileno(), 5000):
            seen += data
    marked = [line for line in seen.decode().splitlines() if not line.startswith("train: ")]
    assert all(re.fullmatch(r"\[[01],algo-1\] (?:out|err) \d+ x{50}", line) for line in marked)
    assert len(marked) == 80_000


def test_a_plain_job_that_succeeds_loads_nothing_for_those_that_do_not(tree: Tree) -> None:
    tree.script("")
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    code = "import sys; from shoal_toolkit.cli import main; assert main([]) == 0; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    loaded = {name.partition(".")[2] for name in done.stdout.split() if name.startswith("shoal_toolkit.")}
    assert "output.output" in loaded
    assert not loaded & {"result.diagnosis", "output.metrics"}


# Several writers


@pytest.fixture
def speak(capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[Callable[..., tuple[bytes, bytes]]]:
    """Let ranks and `train` speak: speak((stream, rank, data) or a text ..., marked=True)."""
    loop = Loop()

    def together(*words: tuple[int, int, bytes] | str, marked: bool) -> tuple[bytes, bytes]:
        out = Output(loop, FlowControl(), marked, as_json=False, metrics=None)
        for word in words:
            if isinstance(word, str):
                log.write_log(word)
            else:
                stream, rank, data = word
                out.write_rank(stream, rank, "h", data)
        out.flush()
        out.close()
        captured = capfdbinary.readouterr()
        return captured.out, captured.err

    yield together
    loop.close()


Speak = Callable[..., tuple[bytes, bytes]]


def test_lines_of_ranks_do_not_mix(speak: Speak) -> None:
    words = [(1, 0, b"a"), (1, 1, b"b\nc"), (1, 0, b"a\n"), (1, 1, b"c")]
    assert speak(*words, marked=True) == (b"[1,h] b\n[0,h] aa\n[1,h] cc\n", b"")


def test_progress_bars_of_ranks_do_not_overwrite_each_other(speak: Speak) -> None:
    words = [(1, 0, b"10%\r"), (1, 0, b"20%\r"), (1, 1, b"5%\r"), (1, 0, b"done\n")]
    assert speak(*words, marked=True)[0] == b"[0,h] 10%\r[0,h] 20%\r\n[1,h] 5%\r\n[0,h] done\n"


def test_messages_of_train_do_not_split_a_line(speak: Speak) -> None:
    words = [(2, 0, b"half a "), "asked to stop", (2, 0, b"line\n"), "and", "over"]
    assert speak(*words, marked=False)[1] == b"half a \ntrain: asked to stop\nline\ntrain: and\ntrain: over\n"


def test_a_last_line_without_an_end_is_kept(speak: Speak) -> None:
    assert speak((1, 0, b"a\nb"), marked=False)[0] == b"a\nb"
    assert speak((1, 0, b"a\nb"), marked=True)[0] == b"[0,h] a\n[0,h] b\n"


def test_messages_of_train_follow_the_end_of_the_ranks(speak: Speak, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    speak(marked=False)
    log.write_log("over")
    assert capfdbinary.readouterr().err == b"train: over\n"


# JSON


def objects(text: str) -> list[dict[str, Any]]:
    """The log's objects; every line is one."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_line_is_one_object(tree: Tree, run: Run, launcher: str, ranks: int) -> None:
    if launcher == "process":
        ranks = 1
    launch_by(tree, launcher, ranks)
    tree.script(
        "import os, sys\nprint('  é \"x\"')\nos.write(1, b'\\xff\\n10%\\r20%\\r\\n\\nlast')\n"
        "print('err', file=sys.stderr)"
    )
    before = datetime.now(timezone.utc)
    done = run(**JSON)
    assert done.code == 0, done.err
    for rank in range(ranks):
        mine = [line for line in objects(done.out) if line["rank"] == rank]
        assert [line["message"] for line in mine] == ['  é "x"', "\\xff", "10%", "20%", "", "last"]
        assert {(line["host"], line["stream"]) for line in mine} == {("algo-1", "stdout")}
        moment = datetime.strptime(mine[0]["time"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
        assert -0.01 < (moment - before).total_seconds() < 60
        assert list(mine[0]) == ["time", "host", "rank", "stream", "message"]
    lines = objects(done.err)
    assert [line["message"] for line in lines if line["rank"] is not None] == ["err"] * ranks
    assert all(line["stream"] == "stderr" for line in lines)
    assert f"train: launcher {launcher}" in next(line["message"] for line in lines if "launcher" in line["message"])


def test_a_failure_is_reported_in_json_too(tree: Tree, run: Run) -> None:
    tree.script("raise ValueError('boom')")
    done = run(**JSON)
    assert done.code == 1
    assert tree.failure.startswith("ValueError: boom\n")
    messages = [line["message"] for line in objects(done.err)]
    assert "ValueError: boom" in messages
    assert "train: the job failed with exit code 1: ValueError: boom" in messages


def test_json_comes_as_it_is_written(tree: Tree) -> None:
    tree.script("import os, time\nprint('now')\nwhile not os.path.exists('go'): time.sleep(.01)")
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), **JSON)
    with subprocess.Popen(TRAIN, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as train:
        assert train.stdout
        assert json.loads(train.stdout.readline())["message"] == "now"
        (tree.code / "go").touch()
        assert train.wait(20) == 0


@pytest.mark.mpi
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_objects_and_metrics_of_other_hosts_name_them(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        for host in hosts:
            host.tree.script("print('loss: 1')")
            loss = {"Name": "loss", "Regex": "loss: (.)"}
            host.tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_metric_definitions=[loss])
        processes = [host.start(SHOAL_LOG_FORMAT="json") for host in hosts]
        with running(*processes):
            first, worker = (host.finished(process) for host, process in zip(hosts, processes))
        assert (first.code, worker.code, worker.out) == (0, 0, "")
        lines = {(line["host"], line["rank"], line["message"]) for line in objects(first.out)}
        assert lines == {("algo-1", 0, "loss: 1"), ("algo-2", 1, "loss: 1")}
        assert {line["host"] for line in objects(worker.err)} == {"algo-2"}
        records = objects((hosts[0].tree.output / "metrics.jsonl").read_text())
        assert {(record["host"], record["rank"], record["value"]) for record in records} == {
            ("algo-1", 0, 1.0),
            ("algo-2", 1, 1.0),
        }


# Enough of TensorFlow for a parameter server, which says something and serves until it is ended.
TENSORFLOW = """
import os, time
from types import SimpleNamespace

class Server:
    def __init__(self, *_, **__):
        os.write(1, b"serv")
        os.write(1, b"ing\\n")
        open(os.path.join(os.environ["SM_MODULE_DIR"], "serving"), "w").close()

    def join(self):
        time.sleep(60)

distribute = SimpleNamespace(Server=Server)
train = SimpleNamespace(ClusterSpec=dict)
compat = SimpleNamespace(v1=SimpleNamespace(ConfigProto=dict))
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_processes_beside_the_script_print_in_the_same_form(tmp_path: Path, form: str) -> None:
    trees = two_trees(tmp_path)
    for tree in trees:
        tree.script(TENSORFLOW, "tensorflow.py")
        tree.script("import os, time\nwhile not os.path.exists('serving'): time.sleep(.01)\nprint('trained')")
        tree.hyperparameters(sagemaker_parameter_server_enabled=True)
    with started(trees, SHOAL_LOG_FORMAT=form) as trains:
        done = [(*train.communicate(timeout=60), train.returncode) for train in trains]
    for rank, (out, err, code) in enumerate(done):
        assert code == 0, err
        lines = out + err if form == "text" else "".join(f"{line['message']}\n" for line in objects(out + err))
        assert "serving\n" in lines
        assert "trained\n" in lines
        if form == "json":
            assert {line["host"] for line in objects(out + err)} == {NAMES[rank]}
            assert {line["message"]: line["rank"] for line in objects(out)}["trained"] == rank


# Events, for `shoal run`

EVENTS = {"SHOAL_LOG_EVENTS": "1", "SAGEMAKER_PROGRAM": "train.py"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("form", "expected"), [("text", "plain"), ("json", "json")])
def test_all_output_becomes_events_without_losing_a_byte(
    tree: Tree, run: Run, launcher: str, form: str, expected: str
) -> None:
    launch_by(tree, launcher)
    data = ODD + bytes(range(256)) * 300
    tree.script(f"import os\nfor fd in (1, 2): os.write(fd, {data!r})\nassert 'SHOAL_LOG_EVENTS' not in os.environ")
    done = run(**EVENTS, SHOAL_LOG_FORMAT=form)
    assert (done.code, done.err) == (0, ""), "both streams are in order"
    written = {1: b"", 2: b""}
    for event in objects(done.out):
        assert event["form"] == expected
        if event["shoal_event"] == "output":
            assert (event["host"], event["rank"]) == ("algo-1", 0)
            written[event["stream"]] += event["text"].encode("utf-8", "surrogateescape")
    assert written == {1: data, 2: data}
    own = [event["text"] for event in objects(done.out) if event["shoal_event"] == "log"]
    assert any(text.startswith(f"train: launcher {launcher}") and text.endswith("\n") for text in own)


@pytest.mark.mpi
def test_events_of_several_ranks_ask_for_a_prefix(tree: Tree, run: Run) -> None:
    launch_by(tree, "mpi", 2)
    tree.script("print('one')")
    texts = {(event["rank"], event["form"]): event["text"] for event in objects(run(**EVENTS).out)}
    assert {key for key in texts if key[0] is not None} == {(0, "prefixed"), (1, "prefixed")}


def test_a_metric_is_an_event_too_even_if_its_file_cannot_be_written(tree: Tree, run: Run) -> None:
    tree.hosts("algo-1", "algo-1")
    tree.hyperparameters(sagemaker_metric_definitions=[{"Name": "loss", "Regex": "loss: (.*)"}])
    tree.script("print('loss: 0.5')\nprint('loss: nan')")
    (tree.output / "metrics.jsonl").mkdir(parents=True)
    done = run(**EVENTS)
    found = [event for event in objects(done.out) if event["shoal_event"] == "metric"]
    assert [(event["name"], event["value"], event["rank"], event["host"]) for event in found] == [
        ("loss", 0.5, 0, "algo-1"),
        ("loss", "nan", 0, "algo-1"),
    ]


def test_a_failure_before_the_plan_is_an_event(tree: Tree, run: Run) -> None:
    done = run(SHOAL_LOG_EVENTS="1", SAGEMAKER_PROGRAM="missing.py")
    assert done.code != 0
    assert done.err == ""
    assert all(event["text"].startswith("train: ") for event in objects(done.out))


def test_a_form_that_there_is_not(tree: Tree, run: Run) -> None:
    tree.script("print('trained')")
    done = run(SAGEMAKER_PROGRAM="train.py", SHOAL_LOG_FORMAT="jsn")
    assert (done.code, done.out) == (2, "")
    assert "SHOAL_LOG_FORMAT is 'jsn'; allowed are text and json. Did you mean 'json'?" in tree.failure

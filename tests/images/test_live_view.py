"""The live view of `shoal run`: its panel, hostile and chatty logs, slow terminals, and a job on a pseudo terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

from shoal.clean_text import clean_log_line
from shoal.docker_client.containers import split_lines, split_pieces
from shoal.jobs import usage
from shoal.jobs.job_log import JobLog, Line, Series
from shoal.jobs.usage import (
    CPU,
    GPU,
    GPU_MEMORY,
    MEMORY,
    GpuMeter,
    GpuUse,
    Usage,
    read_lines,
    sample_usage,
    smi_command,
)
from shoal.jobs.view import LiveView, PanelState, can_show_panel, render_panel, render_result

SHOAL = Path(sys.executable).with_name("shoal")
SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make_state(hosts: int = 2, metrics: int = 2) -> PanelState:
    return PanelState(
        name="digits-20260131-101500-3f2a1c",
        hosts=str(hosts),
        ranks=2 * hosts,
        seconds=3725.9,
        lines=12_345,
        metrics={f"loss{at}": [0.25, 0.5] for at in range(metrics)},
        usage={
            f"algo-{at}": {CPU: 199.6, MEMORY: 2048.0, GPU: 95.0, GPU_MEMORY: 10_240.0} for at in range(1, hosts + 1)
        },
    )


def test_panel_shows_job_metrics_and_hosts() -> None:
    lines = render_panel(make_state(), 60, 24).plain.split("\n")
    assert lines[0].startswith("── digits-20260131-101500-3f2a1c ──")
    assert lines[0].endswith(" 1:02:05 ─")
    assert lines[1:] == [
        "2 hosts · 4 ranks · 12,345 lines of log",
        "loss0 0.25 … 0.5   loss1 0.25 … 0.5",
        "algo-1   CPU 200 %   memory 2.0 GB   GPU 95 %   10.2 GB",
        "algo-2   CPU 200 %   memory 2.0 GB   GPU 95 %   10.2 GB",
    ]
    assert render_result(make_state(), 60).plain.split("\n")[-1] == lines[2]


@pytest.mark.parametrize(("hosts", "metrics"), [(1, 0), (64, 300), (3, 40)])
@pytest.mark.parametrize(("width", "height"), [(60, 24), (20, 6), (200, 50), (5, 2)])
def test_panel_fits_on_the_terminal(hosts: int, metrics: int, width: int, height: int) -> None:
    lines = render_panel(make_state(hosts, metrics), width, height).plain.split("\n")
    assert len(lines) <= max(height // 2, 4)
    assert max(map(len, lines)) <= max(width - 4, 8)
    if hosts == 64 and width >= 60:
        shown = sum(line.startswith("algo-") for line in lines)
        assert lines[-1] == f"{64 - shown} more hosts, CPU 200 % on average"
        assert any(line.endswith(" more") for line in lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[2J\x1b[Hcleared\x1b[?1049h", "cleared"),
        ("\x1b]0;title\x07named\x1b]8;;http://x\x1b\\link", "namedlink"),
        ("\x1bcreset\x1b7", "reset"),
        ("bell\x07 back\x08 \x9b2J", "bell\ufffd back\ufffd \ufffd2J"),
        ("a\tb\xa0c\u202ed\u2028", "a       b c\ufffdd\ufffd"),
        ("cut \x1b[", "cut \ufffd["),
        ("x" * 5000, f"{'x' * 4096}… (904 characters more)"),
    ],
)
def test_lines_change_nothing_but_their_row(text: str, shown: str) -> None:
    assert clean_log_line(text) == shown


def test_only_a_capable_terminal_has_a_live_view() -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as terminal:
        capable = {"TERM": "xterm-256color"}
        for environment, expected in [
            (capable, True),
            ({**capable, "CI": "false", "NO_COLOR": ""}, True),
            ({**capable, "CI": "true"}, False),
            ({**capable, "NO_COLOR": "1"}, False),
            ({"TERM": "dumb"}, False),
        ]:
            assert can_show_panel(Console(file=terminal, _environ=environment), environment) is expected
        forced = Console(file=io.StringIO(), force_terminal=True, _environ=capable)
        assert not can_show_panel(forced, capable)


def make_view(file: int, **options: object) -> LiveView:
    console = Console(file=os.fdopen(file, "w"), force_terminal=True, width=80, height=24)
    return LiveView(console, JobLog(), "digits-1", "1", 1, **options)  # type: ignore[arg-type]


def read_all(file: int, into: list[bytes]) -> None:
    with os.fdopen(file, "rb", buffering=0) as stream:
        into.extend(iter(lambda: stream.read(1 << 16), b""))


def test_a_chatty_log_is_shown_in_order_and_a_slow_terminal_delays_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.jobs.view._MAX_WAITING", 2_000)
    receiver, sender = os.pipe()
    view = make_view(sender)
    with view:
        for at in range(50_000):  # nobody reads: lines wait, or are left out
            view.add(f"line {at} {'.' * 60}", Line(0.0, "algo-1", 0, ""))
        received: list[bytes] = []
        reader = threading.Thread(target=read_all, args=(receiver, received))
        reader.start()
    view.console.file.close()
    reader.join(timeout=60)
    text = SEQUENCES.sub("", b"".join(received).decode())
    numbers = [int(number) for number in re.findall(r"^line (\d+)", text, re.MULTILINE)]
    skipped = sum(int(count.replace(",", "")) for count in re.findall(r"… ([\d,]+) lines are not shown", text))
    assert skipped > 0
    assert (len(numbers) + skipped, numbers) == (50_000, sorted(numbers))
    assert numbers[-1] == 49_999
    assert "50,000 lines of log" in text


def test_a_progress_bar_is_in_the_panel_until_its_last_state() -> None:
    chunks = [b"start\r", b"\n\r 10%\r 20", b"%\r 30%", b"\r100%\nend"]
    pieces = list(split_pieces(chunks))
    assert pieces == [
        *(("start", False), ("", True)),
        *((f" {at}%", True) for at in (10, 20, 30)),
        *(("100%", False), ("end", False)),
    ]
    assert list(split_lines(chunks)) == [text for text, _ in pieces]
    for count, expected in ((5, [" 30%"]), (7, [])):
        receiver, sender = os.pipe()
        view = make_view(sender)
        for shown, is_overwritten in pieces[:count]:
            view.add(shown, view.log.add("algo-1", shown), is_overwritten)
        with view:
            pass
        view.console.file.close()
        received: list[bytes] = []
        read_all(receiver, received)
        text = SEQUENCES.sub("", b"".join(received).decode())
        assert [line for line in text.splitlines() if line.endswith("0%")] == [*["100%"] * (count > 5), *expected]


def test_definitions_replace_the_numbers_of_the_log() -> None:
    receiver, sender = os.pipe()
    view = make_view(sender)
    with view:
        view.add("", view.log.add("algo-1", "loss is 0.5 other=2", rank=3))
        view.log.add_metric(("loss", "algo-1", 3), 0.5)
    view.console.file.close()
    received: list[bytes] = []
    read_all(receiver, received)
    text = SEQUENCES.sub("", b"".join(received).decode())
    assert "1 host · 4 ranks" in text
    assert "loss 0.5" in text
    assert "other" not in text


def test_use_of_gpus_becomes_the_mean_and_the_sum_of_a_host() -> None:
    meter = GpuMeter()
    read_lines(
        ["0, 90, 1024\n", "1, [N/A], 1024\n", "2, 20, 1\n", "2, 100, 1024\n", "exec failed\n", ""], "algo-1", meter
    )
    assert meter.read("algo-1") == GpuUse(95.0, 3072 << 20)
    assert meter.read("algo-2") is None
    assert "--id=0,1" in smi_command(["0", "1"])
    series: dict[tuple[str, str, int | None], Series] = {}
    with sample_usage(series, 0.0, lambda: {"algo-1": Usage(1.0, 5_000_000, meter.read("algo-1"))}):
        pass
    assert {name: values.last for (name, _, _), values in series.items()} == {
        MEMORY: 5.0,
        GPU: 95.0,
        GPU_MEMORY: 3221.0,
    }
    assert usage.MACHINE in usage.read_machine(meter)


SCRIPT = """\
import sys, time
print("\\x1b[2Jstep=1 loss=0.5", flush=True)
print("ready", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_job_on_a_terminal_is_resized_and_interrupted(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        for name in ("CI", "NO_COLOR", "COLUMNS", "LINES"):
            os.environ.pop(name, None)
        os.execve(SHOAL, ["shoal", "run", "any:1", "code/train.py", "--local"], {**os.environ, "TERM": "xterm"})
    try:
        resize(terminal, 80, 24)
        output = wait_for(terminal, r"(?s)ready\r\n.*loss 0\.5")  # a line of stderr, then a panel with the metric
        assert "step=1 loss=0.5\r\n" in output
        assert "\x1b[2J" not in output
        resize(terminal, 60, 20)  # the log is written again, and a panel of the new width
        wait_for(terminal, r"\x1b\[H\x1b\[J[^─]*step=1 loss=0.5\r\n[^─]*── .{51} ─\r\n")
        os.write(terminal, b"\x03")
        output = wait_for(terminal, None)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)  # a job that still runs gets SIGHUP
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    shown, report = output.rsplit("\x1b[?25h", 1)
    assert "shoal: stopping" in shown
    assert re.search(r"^report: \S+/report.html\r$", report, re.MULTILINE)


def resize(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def wait_for(terminal: int, pattern: str | None) -> str:
    """Return the output of a terminal until it matches a pattern, without colours; with None, until the end."""
    received = b""
    while True:
        try:
            received += os.read(terminal, 1 << 16)
        except OSError:  # all programs on the terminal have ended
            assert pattern is None, f"{pattern!r} is not in {received!r}"
            return received.decode(errors="replace")
        shown = re.sub(r"\x1b\[[0-9;]*m", "", received.decode(errors="replace"))
        if pattern is not None and re.search(pattern, shown):
            return shown

"""No text of a job, an image, a file or a program controls a terminal, hides itself, or looks like a line of Shoal."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from shoal.clean_text import clean_log_line, clean_message, clean_text
from shoal.console import CleanConsole, console, print_line
from shoal.jobs.job_log import Line
from shoal.report.job_page import render_job_page
from shoal.report.job_report import JobReport

PACKAGE = Path(__file__).resolve().parents[2] / "images" / "shoal"
BAD = "\ufffd"
ATTACKS = {
    "clears the screen": ("\x1b[2J\x1b[H", f"{BAD}[2J{BAD}[H"),
    "writes the clipboard (OSC 52)": ("\x1b]52;c;cm0gLXJm\x07", f"{BAD}]52;c;cm0gLXJm{BAD}"),
    "the same with C1": ("\x9d52;c;cm0gLXJm\x9c", f"{BAD}52;c;cm0gLXJm{BAD}"),
    "overwrites its line": ("failed\rexit code 0", f"failed{BAD}exit code 0"),
    "goes back": ("1\x08" + "0", f"1{BAD}0"),
    "turns text around": ("\u202e0 edoc tixe\u202c", f"{BAD}0 edoc tixe{BAD}"),
    "isolates text": ("\u2067a\u2069", f"{BAD}a{BAD}"),
    "marks a direction": ("a\u200fb\u061cc", f"a{BAD}b{BAD}c"),
    "hides a letter": ("model\u200b.tar\u2060.gz\ufeff", f"model{BAD}.tar{BAD}.gz{BAD}"),
    "hides tags": ("a\U000e0041\U000e0042", f"a{BAD}{BAD}"),
    "an invisible letter": ("algo\u3164-1\u2800", f"algo{BAD}-1{BAD}"),
    "ends a line in another way": ("a\u2028b\u2029c\x85d\x0be\x0cf", f"a{BAD}b{BAD}c{BAD}d{BAD}e{BAD}f"),
    "a lone surrogate": ("a\ud800\udcffb", f"a{BAD}{BAD}b"),
    "stacks marks over other lines": ("e" + "\u0301" * 500, "e" + "\u0301" * 4),
    "the same in another script": ("\u0e01" + "\u0e49" * 500, "\u0e01" + "\u0e49" * 4),
    "the same with marks of two scripts": ("a" + "\u064b\u0301" * 9 + "b", "a" + "\u064b\u0301" * 2 + "b"),
    "hides a text in selectors of variants": ("a\U000e0100\U000e01efb", f"a{BAD}{BAD}b"),
    "invisible letters of rare scripts": ("a\U0001d159b\U00016fe4", f"a{BAD}b{BAD}"),
    "a null byte": ("a\0b", f"a{BAD}b"),
    "tabs and wide spaces": ("a\tb\u3000c", "a b c"),
    "ordinary text": ("naïve 日本 ✔️ € ｱ", "naïve 日本 ✔️ € ｱ"),
}


@pytest.mark.parametrize(("text", "shown"), ATTACKS.values(), ids=ATTACKS)
def test_text_controls_no_terminal_and_hides_nothing(text: str, shown: str) -> None:
    assert clean_text(text) == shown
    assert clean_text(shown) == shown


def test_further_lines_of_a_message_do_not_look_like_lines_of_shoal() -> None:
    text = clean_message("algo-1: failed\nshoal: stopped, exit code 0\nalgo-2 | epoch 3\r\n\nexit code  0")
    assert [line for line in text.split("\n")[1:] if line and not line.startswith("  ")] == []


def test_a_log_line_stays_in_its_row_and_its_colour() -> None:
    text = clean_log_line("\x1b[31mred\nexit code 0\x1b]52;c;eA==\x07\x1b[3A\u202e")
    assert text == f"\x1b[31mred exit code 0{BAD}\x1b[0m"


@pytest.mark.parametrize(
    ("color", "stays"),
    [("8", False), ("1;08", False), ("38;5;8;8", False), ("1;31", True), ("38;5;8", True), ("48;2;8;8;8", True)],
)
def test_no_color_of_a_log_hides_its_letters(color: str, stays: bool) -> None:
    assert (color in clean_log_line(f"a\x1b[{color}mb")) == stays


def test_a_line_of_megabytes_is_cut() -> None:
    assert len(clean_message("x" * 10_000_000)) < 25_000
    assert len(clean_log_line("\x1b[31m" * 1_000_000)) < 5_000


def render(*objects: object) -> str:
    target = CleanConsole(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    target.print(*objects)
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_tables_are_clean() -> None:
    table = Table("name\x1b]0;title\x07")
    table.add_row("\x1b[2Jimage\u202e")
    shown = render(table)
    assert "\x1b[2J" not in shown and "\x1b]" not in shown and "\u202e" not in shown and "image" in shown


def test_a_progress_bar_shows_no_controls_of_a_build() -> None:
    target = CleanConsole(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Progress(TextColumn("{task.fields[command]}", markup=False), console=target) as progress:
        progress.add_task("", command="RUN \x1b]52;c;eA==\x07[red]x[/red]\u202e")
    assert isinstance(target.file, io.StringIO)
    shown = target.file.getvalue()
    assert f"RUN {BAD}]52;c;eA==[red]x" in shown  # rich itself drops the bell
    assert "\x1b]" not in shown and "\u202e" not in shown


def test_markup_and_names_of_emoji_are_text() -> None:
    text = "[link=file:///etc/passwd][bold]:white_check_mark: a:key:b[/bold]"
    for target in (CleanConsole(file=io.StringIO(), width=200), Console(file=io.StringIO(), width=200)):
        print_line(text, target)
        assert isinstance(target.file, io.StringIO)
        assert target.file.getvalue() == text + "\n"


def test_a_page_hides_and_turns_around_no_text() -> None:
    text = "\u202egnp.exe\u2067\x1b]52;c;eA==\x07\u200b</script><b onload=alert(1)>"
    page = render_job_page(
        JobReport("j", text, 0, [(text, text)], [(text, text)], reasons=[text], log=[Line(0.0, "a", None, text)])
    )
    page.encode()
    assert not re.search("[\u202e\u2067\u200b\x1b\x07]", page)
    assert "<b onload" not in page
    assert "gnp.exe" in page


def on_a_terminal(program: str, *arguments: str) -> bytes:
    """Return the output of a program on a terminal that changes nothing but ends of lines."""
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=slave, stderr=slave, stdin=slave):
        os.close(slave)
        found = b""
        try:
            while chunk := os.read(master, 1 << 16):
                found += chunk
        except OSError:  # the end, on Linux
            pass
        os.close(master)
    return found


LOG = "from shoal.clean_text import *; import sys; print_log_line('a \\x1b[32mb\\x1b]52;c;eA==\\x07\\x1b[2A\\ud800')"


def test_a_log_is_clean_on_a_terminal_only() -> None:
    assert on_a_terminal(LOG) == "a \x1b[32mb�\x1b[0m\r\n".encode()
    piped = subprocess.run([sys.executable, "-c", LOG], capture_output=True, check=True)
    assert piped.stdout == b"a \x1b[32mb\x1b]52;c;eA==\x07\x1b[2A?\n"


def test_json_has_no_controls_on_a_terminal() -> None:
    program = (
        "from shoal.commands.common import print_json; print_json(['\\x1b]52;c;eA==\\x07\\x9d\\x7f\\u202e\\ud800'])"
    )
    shown = on_a_terminal(program)
    assert json.loads(shown) == ["\x1b]52;c;eA==\x07\x9d\x7f\u202e\ud800"]
    assert all(byte in b"\r\n" or 32 <= byte < 127 for byte in shown)


def test_errors_are_clean(tmp_path: Path) -> None:
    name = "x\x1b]52;c;eA==\x07\nshoal: done, exit code 0"
    program = "import sys; from shoal.cli import main; sys.argv = ['shoal', *sys.argv[1:]]; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "logs", name], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == 2
    assert "\x1b" not in ended.stderr and "\x07" not in ended.stderr
    assert "\nshoal: done" not in ended.stderr


ALLOWED = {
    ("cli.py", "print_document"),
    # The user's own terminal in a container: `shoal exec` and `shoal shell`.
    ("jobs/inside.py", "os.write"),
    # Without Docker, the script runs as this user and has the terminal; its bytes are passed on.
    ("jobs/hosts/local.py", "os.write"),
    ("jobs/processes.py", "os.write"),  # a pipe to the parent
    ("jobs/inside.py", "subprocess.Popen(command, cwd=tree / 'code', env=environment)"),
    ("commands/estimate.py", "subprocess.run([sys.executable, *_arguments(factory, options, as_json)], check=False)"),
    # Rendered by the console of `shoal.console`, which cleans what it renders.
    ("image/size.py", "console.print(table)"),
    ("report/timeline_page.py", "console.print(table, soft_wrap=True)"),
    ("jobs/view.py", "self.console.print(LogLines(text), soft_wrap=True, end='')"),
    ("jobs/summary.py", "console.print()"),
    ("jobs/view.py", "self.console.file.write('\\x1b[J')"),
    ("jobs/view.py", "sys.stderr"),
    ("doctor.py", "sys.stderr"),  # of a script of this package's own checkout
    ("image/probe.py", "print"),  # runs in the image; its output is read, not shown
}
"""Places that write in another way, and why they may."""


PRINTS = ("print", "rprint", "pprint", "os.write", "input")
STREAMS = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")
PROCESSES = ("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call")
METHODS = re.compile(
    r"(.*\.)?(echo|secho|echo_via_pager|Console|print_exc|prompt|confirm)|.*console\.(print|out|log|file\.write)"
)


def find_prints(tree: ast.Module) -> Iterator[str]:
    """Yield each way to write to a terminal without `shoal.clean_text` and `shoal.console`."""
    harmless = {id(node.value) for node in ast.walk(tree) if is_harmless(node)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_inherited = not {each.arg for each in node.keywords} & {"stdout", "capture_output", None}
            if name in PRINTS:
                yield name
            elif METHODS.fullmatch(name) or (name in PROCESSES and is_inherited):
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and id(node) not in harmless and ast.unparse(node) in STREAMS:
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module in ("rich", "sys", "click", "typer"):
            yield from (alias.name for alias in node.names if alias.name in ("print", "stdout", "stderr", "echo"))


def is_harmless(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("flush", "isatty", "fileno")


def test_only_console_and_clean_text_print() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), place)
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("clean_text.py", "console.py")
        for place in find_prints(ast.parse(path.read_text()))
    }
    assert found - ALLOWED == set()


@pytest.mark.parametrize(
    "source",
    [
        "print(name)",
        "import sys\nsys.stdout.write(name)",
        "import sys\nprint_to = sys.stderr",
        "typer.echo(name)",
        "console.print(name)",
        "self.view.console.print(name, markup=False)",
        "Console(stderr=True)",
        "from rich import print",
        "subprocess.run(['foreign'])",
        "os.write(1, name)",
        "traceback.print_exc()",
    ],
)
def test_other_ways_to_print_are_found(source: str) -> None:
    assert list(find_prints(ast.parse(source)))


def test_the_console_of_commands_is_the_clean_one() -> None:
    assert isinstance(console, CleanConsole)

"""Why a script failed, from the end of its stderr, its exit code and its machine: the text of the failure file.

The exception comes first, then who failed and with which command, then what to do where that is known, then the end of
the traceback. SageMaker shows the first 1,024 characters of the file; the text keeps within as many bytes, so that it
does not matter which of the two is counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from shoal_toolkit import redact
from shoal_toolkit.light_typing import Any, NamedTuple
from shoal_toolkit.result.result import Failure, exit_description
from shoal_toolkit.system import disks
from shoal_toolkit.tables import read_table

_SHOWN = 1024
_LONGEST_LINE = 300
_LONGEST_COMMAND = 200
_LEAST_END = 40  # less than that of a traceback tells nothing
_AFTER_EXCEPTION = 8  # lines: a message may have several
# "Original": torch's, of the process that loads data, within the message of the one that waits for it.
_TRACEBACK = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$", re.MULTILINE)
# TensorFlow's frames, the operation, and the cause below it, of which there may be several.
_IN_GRAPH = re.compile(r"^Node: .*\n(?:\d+ root error\(s\) found\.\n *\(0\) )?(?P<cause>.+)", re.MULTILINE)
_EXCEPTION = re.compile(r"[\w.]+(:|$)")
# Colours; what torchrun and torch put in front of a rank's lines; the frame that Python draws around a group.
_DRESS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^\[(?:rank|default)\d+\]: ?", re.MULTILINE)
# Frames of what starts the script under MPI; each is a line that names the file, its source line, and maybe carets.
_STARTER = re.compile(
    r'^  File "(?:<frozen runpy>|[^"]*/runpy\.py|[^"]*/mpi4py/(?:run|__main__)\.py)".*\n(?:    .*\n)*', re.MULTILINE
)
_FRAME = re.compile(r"^ *[|+] ?", re.MULTILINE)
_GROUP = "Exception Group Traceback (most recent call last):"


class Words(NamedTuple):
    """What a script said of its failure: the line that names it, and the end of what it wrote."""

    head: str
    end: str
    known: bool = True  # the head is known to name the failure, and is not just what came last


def message(failure: Failure) -> str:
    """Return the text of the failure file."""
    stderr = redact.text(failure.stderr)
    reason = redact.text(failure.reason)
    words = Words(reason, stderr) if reason else last_words(stderr, failure.exit_code)
    ended = exit_description(failure.exit_code)
    head, advice = _advice(failure, words)
    if not head and words.head and (words.known or failure.exit_code <= 128):
        head = words.head
    if not head:
        who = failure.where if failure.launcher else "The script"
        head = f"{who} {ended}{'.' if words.head else ', and wrote nothing to stderr.'}"
    command = _clip(" ".join(redact.arguments(failure.command)), _LONGEST_COMMAND)
    lines = (head, f"{failure.where} {ended}: {command}", advice)
    top = "\n".join(_clip(line, _LONGEST_LINE) for line in lines if line)
    left = _SHOWN - len(top.encode()) - 2
    return f"{top}\n\n{_last_lines(words.end, left)}" if words.end and left >= _LEAST_END else top


def last_words(stderr: str, exit_code: int) -> Words:
    """Find what names the failure in the end of a script's stderr."""
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in _DRESS.sub("", stderr).split("\n"))
    text = _STARTER.sub("", text)
    native = _native(text)
    traceback, start = _traceback(text)
    group = text.rfind(_GROUP)
    if group > start:
        return _group(text[group:])
    if native is not None and (traceback is None or (exit_code > 128 and native.start() > start)):
        return Words(_clip(native["head"], _LONGEST_LINE), text[native.start() :].strip("\n"))
    return traceback or _said_last(text)


def _native(text: str) -> re.Match[str] | None:
    """Return the last of what other languages end with."""
    found = [match for form in table()["heads"] for match in re.finditer(form, text, re.MULTILINE)]
    return max(found, key=lambda match: match.start(), default=None)


def _traceback(text: str) -> tuple[Words | None, int]:
    """Return the last traceback that is no mere aside, and where it starts."""
    aside, chosen = table()["aside"], None
    starts = [match.start() for match in _TRACEBACK.finditer(text)]
    for index, start in enumerate(starts):
        words = _exception(text[start : [*starts, len(text)][index + 1]])
        before = text[:start].rstrip("\n").rpartition("\n")[2]
        mere = re.search(aside["before"], before) or re.search(aside["named"], words.head)
        if chosen is None or not mere:
            chosen = words, start
    return chosen or (None, -1)


def _exception(block: str) -> Words:
    """Read one traceback: frames are indented, and the first line that is not names the exception."""
    lines = block.rstrip("\n").split("\n")
    for index, line in enumerate(lines[1:], start=1):
        if line.strip() and not line[0].isspace() and _EXCEPTION.match(line):
            end, line = index + _AFTER_EXCEPTION, line.rstrip()
            more = _below(lines[index + 1 :]) if line.endswith(":") else ""
            return Words(_clip(f"{line} {more}".strip(), _LONGEST_LINE), "\n".join(lines[:end]))
    return _said_last(block)


def _below(lines: Sequence[str]) -> str:
    """Return what an exception says whose own line ends with a colon: the next line that is not empty."""
    in_graph = _IN_GRAPH.search("\n".join(lines))
    return in_graph["cause"] if in_graph else next(filter(None, map(str.strip, lines[:_AFTER_EXCEPTION])), "")


def _group(framed: str) -> Words:
    """Read an exception group: its own line, and those of the exceptions in it."""
    named = [line for line in _FRAME.sub("", framed).split("\n") if re.match(r"[A-Za-z_][\w.]*(: |$)", line)]
    if not named:
        return _said_last(framed)
    return Words(_clip(f"{named[0]}: {'; '.join(named[1:])}", _LONGEST_LINE), framed.strip("\n"))


def _said_last(text: str) -> Words:
    """Take the last line that says something: no rule of dashes."""
    lines = [line.strip() for line in text.split("\n") if any(character.isalnum() for character in line)]
    return Words(_clip(lines[-1], _LONGEST_LINE) if lines else "", text.strip("\n"), known=False)


class _Named(dict[str, str]):
    """What a text of the table may name."""

    def __missing__(self, name: str) -> str:
        return "unknown"


def _advice(failure: Failure, words: Words) -> tuple[str, str]:
    """Return a better head, if there is one, and what to do, if that is known."""
    for entry in table()["advice"]:
        match = _fits(entry, failure, words)
        if match is not None:
            named = _Named({name: _shown(name, value) for name, value in failure.facts.items()}, **match.groupdict())
            named["full"] = disks.named(failure.facts)
            if "channel" in named:  # a variable has its name in capitals
                named["channel"] = named["channel"].lower()
            return entry.get("head", "").format_map(named), entry["advice"].format_map(named)
    return "", ""


def _fits(entry: Mapping[str, Any], failure: Failure, words: Words) -> re.Match[str] | None:
    facts = failure.facts
    if any(facts.get(name, 0) < least for name, least in entry.get("least", {}).items()):
        return None
    if any(facts.get(name, most + 1) > most for name, most in entry.get("most", {}).items()):
        return None
    if failure.exit_code in entry.get("codes", ()):
        return re.match("", "")
    if "words" not in entry:
        return None
    # Where nothing names the failure, what was said before the last line may be any warning.
    return re.search(entry["words"], words.head) or (
        re.search(entry["words"], words.end, re.MULTILINE) if words.known else None
    )


def _shown(name: str, value: int) -> str:
    """Return a fact in words: sizes are in bytes."""
    if name in ("memory_limit", "shm"):
        return f"{value >> 20:,} MiB" if value else "unknown size"
    return str(value)


@cache
def table() -> dict[str, Any]:
    """Return what is known of failures."""
    return read_table("failures")


def _clip(text: str, length: int) -> str:
    """Return the start of a text, in at most so many bytes."""
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= length else data[: length - 3].decode("utf-8", "ignore") + "…"


def _last_lines(text: str, length: int) -> str:
    """Return the last whole lines that fit into so many bytes, and at least the end of the last one."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= length:
        return data.decode()
    kept = data[-length:]
    return (kept.partition(b"\n")[2] or kept).decode("utf-8", "ignore")

"""Explains why a script failed, from the end of its stderr, its exit code and facts about its host.

The text of the failure file has the exception first, then the rank that failed and its command. Advice follows if the
cause is known, and then the end of the traceback. SageMaker shows its first 1,024 characters. The text has at most as
many bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from shoal_toolkit import redact
from shoal_toolkit.light_typing import Any, NamedTuple
from shoal_toolkit.result.result import Failure, describe_exit_code
from shoal_toolkit.system import disks
from shoal_toolkit.tables import read_table

# All in bytes, but for the last.
_MAX_TEXT = 1024
_MAX_LINE = 300
_MAX_COMMAND = 200
_MIN_END = 40  # a shorter end of a traceback is useless
_MAX_EXCEPTION_LINES = 8  # of a message below the name of the exception
# "Original" is torch's: the traceback of a data loader, in the message of the process that waits for it.
_TRACEBACK = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$", re.MULTILINE)
# TensorFlow's message of an operation in a graph, and the first cause below it.
_IN_GRAPH = re.compile(r"^Node: .*\n(?:\d+ root error\(s\) found\.\n *\(0\) )?(?P<cause>.+)", re.MULTILINE)
_EXCEPTION = re.compile(r"[\w.]+(:|$)")
# Colours, and the prefixes of torchrun and torch.
_DECORATION = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^\[(?:rank|default)\d+\]: ?", re.MULTILINE)
# Traceback frames of runpy and mpi4py: the line with the file, the source line, and maybe carets.
_STARTER_FRAMES = re.compile(
    r'^  File "(?:<frozen runpy>|[^"]*/runpy\.py|[^"]*/mpi4py/(?:run|__main__)\.py)".*\n(?:    .*\n)*', re.MULTILINE
)
_FRAME = re.compile(r"^ *[|+] ?", re.MULTILINE)
_GROUP = "Exception Group Traceback (most recent call last):"


class Cause(NamedTuple):
    """The cause of a failure, as the script wrote it."""

    head: str  # the line that names the failure
    end: str  # the end of its output, with the traceback
    known: bool = True  # False if the head is only the last line


def explain_failure(failure: Failure) -> str:
    """Returns the text of the failure file, secrets masked: the cause, the command, advice and the end of stderr.

    It has at most 1,024 bytes.
    """
    stderr = redact.mask_text(failure.stderr)
    reason = redact.mask_text(failure.reason)
    cause = Cause(reason, stderr) if reason else find_cause(stderr, failure.exit_code)
    ended = describe_exit_code(failure.exit_code)
    head, advice = _find_advice(failure, cause)
    if not head and cause.head and (cause.known or failure.exit_code <= 128):
        head = cause.head
    if not head:
        who = failure.where if failure.launcher else "The script"
        head = f"{who} {ended}{'.' if cause.head else ', and wrote nothing to stderr.'}"
    command = _clip(" ".join(redact.mask_arguments(failure.command)), _MAX_COMMAND)
    lines = (head, f"{failure.where} {ended}: {command}", advice)
    top = "\n".join(_clip(line, _MAX_LINE) for line in lines if line)
    left = _MAX_TEXT - len(top.encode()) - 2
    return f"{top}\n\n{_last_lines(cause.end, left)}" if cause.end and left >= _MIN_END else top


def find_cause(stderr: str, exit_code: int) -> Cause:
    """Returns the cause of a failure, from the end of a script's stderr; without an error that it knows, the last line.

    Args:
        stderr: Its end.
        exit_code: Above 128 if a signal ended the script.
    """
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in _DECORATION.sub("", stderr).split("\n"))
    text = _STARTER_FRAMES.sub("", text)
    native = _find_native_error(text)
    traceback, start = _find_traceback(text)
    group = text.rfind(_GROUP)
    if group > start:
        return _read_exception_group(text[group:])
    if native is not None and (traceback is None or (exit_code > 128 and native.start() > start)):
        return Cause(_clip(native["head"], _MAX_LINE), text[native.start() :].strip("\n"))
    return traceback or _read_last_line(text)


def _find_native_error(text: str) -> re.Match[str] | None:
    """Returns the last error of another language than Python, as in data/failures.json."""
    found = [match for form in _read_failures()["heads"] for match in re.finditer(form, text, re.MULTILINE)]
    return max(found, key=lambda match: match.start(), default=None)


def _find_traceback(text: str) -> tuple[Cause | None, int]:
    """Returns the cause in the last traceback that is not a side effect, and where that starts; (None, -1) if none.

    If all are side effects, it is the first.
    """
    side_effects, chosen = _read_failures()["aside"], None
    starts = [match.start() for match in _TRACEBACK.finditer(text)]
    for index, start in enumerate(starts):
        cause = _read_exception(text[start : [*starts, len(text)][index + 1]])
        before = text[:start].rstrip("\n").rpartition("\n")[2]
        is_side_effect = re.search(side_effects["before"], before) or re.search(side_effects["named"], cause.head)
        if chosen is None or not is_side_effect:
            chosen = cause, start
    return chosen or (None, -1)


def _read_exception(block: str) -> Cause:
    """Returns the cause in one traceback: the first line after the frames that looks like an exception's name.

    Frames are indented. Without such a line it is the last line, as not known.
    """
    lines = block.rstrip("\n").split("\n")
    for index, line in enumerate(lines[1:], start=1):
        if line.strip() and not line[0].isspace() and _EXCEPTION.match(line):
            end, line = index + _MAX_EXCEPTION_LINES, line.rstrip()
            more = _read_message_below(lines[index + 1 :]) if line.endswith(":") else ""
            return Cause(_clip(f"{line} {more}".strip(), _MAX_LINE), "\n".join(lines[:end]))
    return _read_last_line(block)


def _read_message_below(lines: Sequence[str]) -> str:
    """Returns the message of an exception if its line ends with a colon: the next line that is not empty.

    For an operation in a TensorFlow graph it is the first cause. Empty without a message.
    """
    in_graph = _IN_GRAPH.search("\n".join(lines))
    return in_graph["cause"] if in_graph else next(filter(None, map(str.strip, lines[:_MAX_EXCEPTION_LINES])), "")


def _read_exception_group(framed: str) -> Cause:
    """Reads an exception group: its own line, and the lines of the exceptions in it."""
    named = [line for line in _FRAME.sub("", framed).split("\n") if re.match(r"[A-Za-z_][\w.]*(: |$)", line)]
    if not named:
        return _read_last_line(framed)
    return Cause(_clip(f"{named[0]}: {'; '.join(named[1:])}", _MAX_LINE), framed.strip("\n"))


def _read_last_line(text: str) -> Cause:
    """Takes the last line with a letter or digit."""
    lines = [line.strip() for line in text.split("\n") if any(character.isalnum() for character in line)]
    return Cause(_clip(lines[-1], _MAX_LINE) if lines else "", text.strip("\n"), known=False)


class _Placeholders(dict[str, str]):
    """Values for the placeholders of an advice; "unknown" if there is none."""

    def __missing__(self, name: str) -> str:
        return "unknown"


def _find_advice(failure: Failure, cause: Cause) -> tuple[str, str]:
    """Returns a better head and the advice from data/failures.json; both empty if the cause is unknown there."""
    for entry in _read_failures()["advice"]:
        match = _match_advice(entry, failure, cause)
        if match is not None:
            values = _Placeholders(
                {name: _format_fact(name, value) for name, value in failure.facts.items()}, **match.groupdict()
            )
            values["full"] = disks.list_full_mounts(failure.facts)
            if "channel" in values:  # the name of the variable is in capitals
                values["channel"] = values["channel"].lower()
            return entry.get("head", "").format_map(values), entry["advice"].format_map(values)
    return "", ""


def _match_advice(entry: Mapping[str, Any], failure: Failure, cause: Cause) -> re.Match[str] | None:
    """Returns a match if the facts, and the exit code or the words, fit an entry of data/failures.json; else None."""
    facts = failure.facts
    if any(facts.get(name, 0) < least for name, least in entry.get("least", {}).items()):
        return None
    if any(facts.get(name, most + 1) > most for name, most in entry.get("most", {}).items()):
        return None
    if failure.exit_code in entry.get("codes", ()):
        return re.match("", "")
    if "words" not in entry:
        return None
    # If the head is only the last line, the lines before it may be any warnings.
    return re.search(entry["words"], cause.head) or (
        re.search(entry["words"], cause.end, re.MULTILINE) if cause.known else None
    )


def _format_fact(name: str, value: int) -> str:
    """Returns a fact as text. Sizes are in bytes."""
    if name in ("memory_limit", "shm"):
        return f"{value >> 20:,} MiB" if value else "unknown size"
    return str(value)


@cache
def _read_failures() -> dict[str, Any]:
    return read_table("failures")


def _clip(text: str, length: int) -> str:
    """Returns a text, or if it is longer than `length` bytes, its start and "…" in at most that many."""
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= length else data[: length - 3].decode("utf-8", "ignore") + "…"


def _last_lines(text: str, length: int) -> str:
    """Returns the last whole lines that fit into `length` bytes, or the end of the last line."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= length:
        return data.decode()
    kept = data[-length:]
    return (kept.partition(b"\n")[2] or kept).decode("utf-8", "ignore")

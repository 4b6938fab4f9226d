"""Explains why a script failed, from the end of its stderr, its exit code and facts about its host.

The text of the failure file has the exception first, then the rank that failed and its command. Advice follows if the
cause is known, and then the end of the traceback. SageMaker shows its first 1,024 characters. The text has at most as
many bytes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cache

from shoal_toolkit import redact
from shoal_toolkit.fast_typing import Any, NamedTuple
from shoal_toolkit.files import read_table
from shoal_toolkit.result.newer_torch import find_newer_torch
from shoal_toolkit.result.result import Failure, describe_exit_code
from shoal_toolkit.system import failure_facts

# All in bytes, but for the last.
_MAX_TEXT = 1024
_MAX_LINE = 300
_MAX_COMMAND = 200
_MIN_END = 40  # a shorter end of a traceback is useless
_MAX_INSIDE = 40  # lines of a message that may have the text of another error
_MAX_EXCEPTION_LINES = 8  # of a message below the name of the exception
# "Original" is torch's: the traceback of a data loader, in the message of the process that waits for it.
_TRACEBACK = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$", re.MULTILINE)
# An exception inside the message of another one, as TensorFlow shows the code of a graph and its error.
_NESTED = re.compile(r" +[\w.]*(?:Error|Exception|Interrupt|Iteration|Warning|Exit): .")
# Messages that name only the place of an error: its text is in a paragraph below.
_PLACE_ONLY = re.compile(r":$|, but found$|: Exception encountered when calling .+\.$")
# Lines of such a message without the text: frames, which are indented, and headings.
_NO_TEXT = re.compile(r" +(?:File \"|\S.* File \")|Detected at node |Node: |\d+ root error\(s\) found\.$|\s*$")
_FIRST_CAUSE = re.compile(r"^ *\(0\) ")
# Additions of TensorFlow to a message.
_NOISE = re.compile(r"\{\{function_node \S+\}\} |(?:\s*\[\[\{\{node [^\]]*\]\])?(?: \[Op:\w+\](?: name:)?)? *$")
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
    """Returns the last cause that is not a side effect, otherwise the first, and its start; (None, -1) if none."""
    side_effects, chosen = _read_failures()["aside"], None
    starts = [match.start() for match in _TRACEBACK.finditer(text)]
    for index, start in enumerate(starts):
        cause = _read_exception(text[start : [*starts, len(text)][index + 1]])
        before = text[:start].rstrip("\n").rpartition("\n")[2]
        is_side_effect = re.search(side_effects["before"], before) or re.search(side_effects["named"], cause.head)
        if chosen and re.search(side_effects["child"], chosen[0].end):
            is_side_effect = is_side_effect or re.search(side_effects["of_child"], cause.head)
        if chosen is None or not is_side_effect:
            chosen = cause, start
    return chosen or (None, -1)


def _read_exception(block: str) -> Cause:
    """Returns the first line after the frames that looks like an exception; otherwise the last line, as not known."""
    lines = block.rstrip("\n").split("\n")
    for index, line in enumerate(lines[1:], start=1):
        if line.strip() and not line[0].isspace() and _EXCEPTION.match(line):
            head, used = _read_message(lines[index:])
            end = index + max(used, _MAX_EXCEPTION_LINES)
            return Cause(_clip(head, _MAX_LINE), "\n".join(lines[:end]))
    return _read_last_line(block)


def _read_message(lines: Sequence[str]) -> tuple[str, int]:
    """Returns an exception's name with the text that says what is wrong, and the number of lines up to that text."""
    line = _NOISE.sub("", lines[0])
    own = list(itertools.takewhile(lambda text: not text or text[0].isspace(), lines[1:]))
    nested = [index for index, text in enumerate(own, start=1) if _NESTED.match(text)]
    # The message of a graph of TensorFlow has the exception inside.
    if line.endswith(": in user code:") and nested:
        head, used = _read_message([text.strip() for text in lines[nested[-1] :]])
        return head, nested[-1] + used
    message = "\n".join(lines[:_MAX_INSIDE])
    for form in _read_failures()["inside"]:
        if inside := re.search(form, message):
            name = line.partition(":")[0]
            return f"{name}: {inside['text']}", message.count("\n", 0, inside.end()) + 1
    # If the line only says where, the text is the first paragraph below without frames.
    if not _PLACE_ONLY.search(line):
        return line, 1
    start = next((index for index, text in enumerate(lines[1:], start=1) if _is_text(lines, index)), 0)
    if not start:
        return line, 1
    paragraph = list(itertools.takewhile(str.strip, lines[start:]))
    if lines[start][0] not in " \t-":  # neither indented nor a list
        paragraph = paragraph[:1]
    text = " ".join(_FIRST_CAUSE.sub("", words).strip() for words in paragraph)
    return f"{line} {_NOISE.sub('', text)}", start + len(paragraph)


def _is_text(lines: Sequence[str], index: int) -> bool:
    """Whether a line of a message is neither a frame, nor a source line below one, nor a heading."""
    is_source = lines[index - 1].lstrip().startswith('File "') and lines[index][:1].isspace()
    return not _NO_TEXT.match(lines[index]) and not is_source


def _read_exception_group(framed: str) -> Cause:
    named = [line for line in _FRAME.sub("", framed).split("\n") if re.match(r"[A-Za-z_][\w.]*(: |$)", line)]
    if not named:
        return _read_last_line(framed)
    return Cause(_clip(f"{named[0]}: {'; '.join(named[1:])}", _MAX_LINE), framed.strip("\n"))


def _read_last_line(text: str) -> Cause:
    lines = [line.strip() for line in text.split("\n") if any(character.isalnum() for character in line)]
    return Cause(_clip(lines[-1], _MAX_LINE) if lines else "", text.strip("\n"), known=False)


class _Placeholders(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "unknown"


def _find_advice(failure: Failure, cause: Cause) -> tuple[str, str]:
    """Returns a better head and the advice; both empty if neither data/failures.json nor a later torch explains it."""
    if advice := find_newer_torch(cause.head):
        return "", advice
    for entry in _read_failures()["advice"]:
        match = _match_advice(entry, failure, cause)
        if match is not None:
            values = _Placeholders(
                {name: _format_fact(name, value) for name, value in failure.facts.items()}, **match.groupdict()
            )
            values["full"] = failure_facts.list_full_mounts(failure.facts)
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

"""A Dockerfile's steps and what goes into each: what an image remembers, as labels, of how it was made. Pure.

A step is a block of the Dockerfile, named by its heading. Its key covers its instructions, the files of the context
that it reads and the steps that it stands on, so two builds share a step where they share its key. The machine's
configuration is no part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

Contents = Mapping[str, Mapping[str, str]]
"""By folder of the context: the identity of each file in it, a SHA-256 (hexadecimal), or `version@SHA-256`."""

FINGERPRINT = "shoal.fingerprint"
STEPS = "shoal.steps"
_BASE = "${BASE}"
_READS = re.compile(r"--mount=type=bind,source=(\w+)|^(?:ADD|COPY) (\w+)[ /]")
_TAKES = re.compile(r"\bfrom=(\w+)")
_FROM = re.compile(r"^FROM (\S+)(?: AS (\w+))?$")


@dataclass(frozen=True)
class Step:
    """One step: digests of its instructions (`text`) and of each of its `inputs`, shortened; its `key` is whole."""

    name: str
    text: str
    inputs: Mapping[str, str]
    key: str


@dataclass(frozen=True)
class Record:
    """How an image is made: its steps in order, and the templates that the Dockerfile was rendered from."""

    steps: tuple[Step, ...]
    templates: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """The SHA-256 (hexadecimal) over all steps."""
        return digest("".join(step.key for step in self.steps))

    def labels(self) -> dict[str, str]:
        """Return the labels of an image that is made so."""
        return {FINGERPRINT: self.fingerprint, STEPS: json.dumps(asdict(self), separators=(",", ":"))}

    def made(self, labels: Mapping[str, str]) -> bool:
        """Return whether an image with these labels is made so."""
        return labels.get(FINGERPRINT) == self.fingerprint


def read(labels: Mapping[str, str]) -> Record | None:
    """Return the record that the labels of an image hold; None where they hold none."""
    try:
        document = json.loads(labels[STEPS])
        return Record(tuple(Step(**step) for step in document["steps"]), document["templates"])
    except (KeyError, TypeError, ValueError):
        return None


def record(dockerfile: str, contents: Contents, base: str, templates: Mapping[str, str]) -> Record:
    """Return the record of a build: `base` is the identity of the image that `${BASE}` stands for (`reference@ID`)."""
    stages = {_BASE: ""}
    stage = ""
    steps: list[Step] = []
    for name, instructions in _blocks(dockerfile):
        below: list[str] = []
        inputs: dict[str, str] = {}
        for instruction in instructions:
            if match := _FROM.match(instruction):
                stage, beneath = match[2] or "", match[1]
                stages[stage] = stages.get(beneath, beneath)
                inputs |= {"base": base} if beneath == _BASE else {}
            below += [stages[other] for other in _TAKES.findall(instruction) if other in stages]
            for folder in ("".join(groups) for groups in _READS.findall(instruction)):
                inputs |= {f"{folder}/{file}": identity for file, identity in contents.get(folder, {}).items()}
        text = digest("\n".join(instructions))
        key = digest(json.dumps([stages[stage], below, text, sorted(inputs.items())]))
        stages[stage] = key
        short = {path: _short(identity) for path, identity in sorted(inputs.items())}
        steps.append(Step(_unique(name, {step.name for step in steps}), _short(text), short, key))
    return Record(tuple(steps), {name: _short(identity) for name, identity in templates.items()})


def digest(content: str | bytes) -> str:
    """Return the SHA-256 (hexadecimal)."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _blocks(dockerfile: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, instructions) of each block: its heading, else its first instruction's word."""
    begun = False
    for block in re.split(r"\n\s*\n", dockerfile.replace("\\\n", " ")):
        lines = [line.strip() for line in block.splitlines()]
        comments = [line for line in lines if line.startswith("#")]
        instructions = []
        for line in lines:
            begun = begun or line.startswith("FROM ")
            if begun and line and not line.startswith("#"):  # ARG before FROM is what the build names anyway
                instructions.append(line)
        if instructions:
            yield comments[0].lstrip("# ").partition(":")[0] if comments else instructions[0].split()[0], instructions


def _unique(name: str, taken: set[str]) -> str:
    number = 2
    while name in taken:
        name, number = f"{name.partition(' (')[0]} ({number})", number + 1
    return name


def _short(identity: str) -> str:
    version, at, sha256 = identity.rpartition("@")
    return f"{version}{at}{sha256[:12]}"


def one_line(command: str, width: int = 120) -> str:
    """Return a Dockerfile instruction as one line of at most `width` characters, mounts left out."""
    words = [word for word in command.replace("\\\n", " ").split() if not word.startswith("--mount=")]
    text = " ".join(words)
    return text if len(text) <= width else text[: width - 1] + "…"

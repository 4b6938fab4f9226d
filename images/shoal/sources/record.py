"""The record in an image's labels of how it was made. Only this module decides whether an image is up to date.

The record has a key for each step. It covers the step's instructions, the files that these read, and the steps before:
two builds share a step if they share its key. It does not cover the machine's configuration. Compared with the record
of a new build, it shows which steps would run, and why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import pydantic

from shoal.sources.steps import BuildStep

Contents = Mapping[str, Mapping[str, str]]
"""By folder of the context: the identity of each file in it, a SHA-256 (hexadecimal), or `version@SHA-256`."""

FINGERPRINT = "shoal.fingerprint"
STEPS = "shoal.steps"


@dataclass(frozen=True)
class RecordedStep:
    """A step: shortened digests of its instructions (`text`) and of each of its `inputs`; its `key` is whole."""

    name: str
    text: str
    inputs: Mapping[str, str]
    key: str


@dataclass(frozen=True)
class Record:
    """How an image is made: its steps in order, and the digests of the templates that declare them."""

    steps: tuple[RecordedStep, ...]
    templates: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """How the image is made: the SHA-256 (hexadecimal) over its steps. An image with the same one is up to date."""
        return sha256("".join(step.key for step in self.steps))

    def labels(self) -> dict[str, str]:
        """Returns the labels of an image that is made so."""
        return {FINGERPRINT: self.fingerprint, STEPS: json.dumps(asdict(self), separators=(",", ":"))}

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Returns whether the image with these labels is up to date: it was made as this record says."""
        return labels.get(FINGERPRINT) == self.fingerprint


@dataclass(frozen=True)
class Decision:
    """Whether a build makes an image: which steps it runs (`rebuilt`), out of how many (`steps`), and why."""

    tag: str
    state: Literal["up to date", "rebuilt", "new"]
    steps: int
    rebuilt: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.state == "up to date":
            return f"{self.tag}: up to date"
        if self.state == "new":
            where = f"new, {self.steps} steps"
        elif not self.rebuilt:
            where = "rebuilt, from its layers as they are"
        else:
            where = f"rebuilt from {self.rebuilt[0]!r} on, {len(self.rebuilt)} of {self.steps} steps"
            where += f" ({', '.join(self.rebuilt)})"
        return "\n    ".join([f"{self.tag}: {where}", *self.reasons])


def make_record(steps: Iterable[BuildStep], contents: Contents, base: str, templates: Mapping[str, bytes]) -> Record:
    """Returns the record of a build: for each step its inputs, and a key that also depends on the steps before it.

    Args:
        base: The identity of the image that `${BASE}` stands for (`reference@ID`).
        templates: The files that declare the steps, by name.
    """
    last: dict[str, str] = {}  # the key of each stage's last step
    stage = ""
    recorded = []
    for step in steps:
        stage = stage if step.begins is None else step.begins
        inputs = {} if step.begins is None else {"base": base}
        for folder in step.folders:
            inputs |= {f"{folder}/{file}": identity for file, identity in contents.get(folder, {}).items()}
        inputs = dict(sorted(inputs.items()))
        before = [last[name] for name in (stage, *step.stages) if name in last]
        last[stage] = sha256(json.dumps([before, step.text, inputs]))
        short = {path: _shorten(identity) for path, identity in inputs.items()}
        recorded.append(RecordedStep(step.name, sha256(step.text)[:12], short, last[stage]))
    return Record(tuple(recorded), {name: sha256(content)[:12] for name, content in templates.items()})


def read_record(labels: Mapping[str, str]) -> Record | None:
    """Returns the record that the labels of an image hold; None if they hold none, or a damaged one."""
    try:
        return pydantic.TypeAdapter(Record).validate_json(labels[STEPS])
    except (KeyError, ValueError):
        return None


def decide(tag: str, labels: Mapping[str, str] | None, wanted: Record) -> Decision:
    """Returns whether a build makes the image with these labels again: which steps run, and why.

    Labels of None: Docker has no such image.
    """
    names = tuple(step.name for step in wanted.steps)
    if labels is None:
        return Decision(tag, "new", len(names), names, ("Docker does not have it",))
    if wanted.matches(labels):
        return Decision(tag, "up to date", len(names))
    present = read_record(labels)
    if present is None:
        return Decision(tag, "rebuilt", len(names), names, ("the image has no record of its steps",))
    keys = {step.key for step in present.steps}
    rebuilt = tuple(step.name for step in wanted.steps if step.key not in keys)
    return Decision(tag, "rebuilt", len(names), rebuilt, tuple(_reasons(present, wanted)))


def sha256(content: str | bytes) -> str:
    """Returns the SHA-256 (hexadecimal)."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _shorten(identity: str) -> str:
    version, at, sha256 = identity.rpartition("@")
    return f"{version}{at}{sha256[:12]}"


def _reasons(present: Record, wanted: Record) -> Iterator[str]:
    """Yields a line for each difference between two records; an input that several steps read is named once."""
    before = {step.name: step for step in present.steps}
    templates = [name for name, identity in wanted.templates.items() if present.templates.get(name) != identity]
    cause = ", ".join(templates) or "by versions.yml, buildspec.yml, another Python here, or shoal itself"
    known: set[str] = set()
    for step in wanted.steps:
        if step.name not in before:
            yield f"{step.name}: a new step ({cause})"
            continue
        new = [line for line in _describe_inputs(before[step.name], step) if line not in known]
        known.update(new)
        yield from new
        if step.text != before[step.name].text:
            yield f"{step.name}: other instructions ({cause})"
    for name in before.keys() - {step.name for step in wanted.steps}:
        yield f"{name}: no longer a step ({cause})"


def _describe_inputs(before: RecordedStep, now: RecordedStep) -> Iterator[str]:
    """Yields a line for each input that differs; of a pin or a base image, with both versions."""
    for path in sorted({*before.inputs, *now.inputs}):
        old, new = before.inputs.get(path), now.inputs.get(path)
        if old is None:
            yield f"{path} added"
        elif new is None:
            yield f"{path} removed"
        elif old != new:
            versions = old.rpartition("@")[0], new.rpartition("@")[0]
            yield f"{path} {versions[0]} → {versions[1]}" if versions[0] != versions[1] else f"{path} changed"

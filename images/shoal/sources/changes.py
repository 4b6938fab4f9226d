"""What a build would do to an image, and why: the record on the engine's image against that of its sources. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.sources import steps
from shoal.sources.steps import Record, Step


@dataclass(frozen=True)
class Plan:
    """What a build would do: the steps that it would run (`rebuilt`) of all (`steps`), and why."""

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


def plan(tag: str, labels: Mapping[str, str] | None, wanted: Record) -> Plan:
    """Return the plan for an image whose labels are `labels`; None: the engine has no such image."""
    names = tuple(step.name for step in wanted.steps)
    if labels is None:
        return Plan(tag, "new", len(names), names, ("not on the engine",))
    if wanted.made(labels):
        return Plan(tag, "up to date", len(names))
    present = steps.read(labels)
    if present is None:
        return Plan(tag, "rebuilt", len(names), names, ("the image on the engine has no record of its steps",))
    keys = {step.key for step in present.steps}
    rebuilt = tuple(step.name for step in wanted.steps if step.key not in keys)
    return Plan(tag, "rebuilt", len(names), rebuilt, tuple(_reasons(present, wanted)))


def _reasons(present: Record, wanted: Record) -> Iterator[str]:
    before = {step.name: step for step in present.steps}
    templates = [name for name, identity in wanted.templates.items() if present.templates.get(name) != identity]
    cause = ", ".join(templates) or "by versions.yml, buildspec.yml, another Python here, or shoal itself"
    told: set[str] = set()
    for step in wanted.steps:
        if step.name not in before:
            yield f"{step.name}: a new step ({cause})"
            continue
        new = [line for line in _differences(before[step.name], step) if line not in told]
        told.update(new)
        yield from new
        if step.text != before[step.name].text:
            yield f"{step.name}: other instructions ({cause})"
    for name in before.keys() - {step.name for step in wanted.steps}:
        yield f"{name}: no longer a step ({cause})"


def _differences(before: Step, now: Step) -> Iterator[str]:
    """Yield what is different about the inputs; a pin or a base is told with both its versions."""
    for path in sorted({*before.inputs, *now.inputs}):
        old, new = before.inputs.get(path), now.inputs.get(path)
        if old is None:
            yield f"{path} added"
        elif new is None:
            yield f"{path} removed"
        elif old != new:
            versions = old.rpartition("@")[0], new.rpartition("@")[0]
            yield f"{path} {versions[0]} → {versions[1]}" if versions[0] != versions[1] else f"{path} changed"

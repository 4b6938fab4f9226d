"""A partition: which stage has which module, the share of each stage in the cost, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """Which stage has which module."""

    stages: dict[str, int]
    """The stage of every module, by name."""
    shares: tuple[float, ...]
    """The share of every stage in the model's cost."""
    gap: float
    """The cost of the largest stage, relative to the largest stage of the best cut."""

    def __str__(self) -> str:
        count = len(self.shares)
        stages = "1 stage" if count == 1 else f"{count} stages"
        lines = [f"The model is on {stages}, the largest {self.gap:.3f} times the largest of the best cut."]
        for stage, share in enumerate(self.shares):
            roots = ", ".join(_roots(self.stages, stage)) or "code of the model itself"
            lines.append(f"  stage {stage}: {share:6.1%}  {roots}")
        return "\n".join(lines)


def shares(costs: Sequence[float], stages: Sequence[int], count: int) -> tuple[float, ...]:
    """The share of each of `count` stages in the cost of all items; `stages` has the stage of every item."""
    total = sum(costs) or 1
    return tuple(sum(cost for cost, at in zip(costs, stages) if at == stage) / total for stage in range(count))


def _roots(stages: Mapping[str, int], stage: int) -> Iterator[str]:
    """Yields the names of the largest modules that are completely on a stage."""
    whole = {name for name in stages if all(s == stage for other, s in stages.items() if _is_in(other, name))}
    roots = (name for name in stages if name in whole and (not name or name.rpartition(".")[0] not in whole))
    return (name or "the model" for name in roots)


def _is_in(name: str, container: str) -> bool:
    return not container or name == container or name.startswith(f"{container}.")

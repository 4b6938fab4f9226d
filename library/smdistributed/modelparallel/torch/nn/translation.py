"""Translations of state dicts between names of Hugging Face and of `smp.nn`, by the tables of `families`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from smdistributed.modelparallel.torch.nn.families import Family

Weights = Mapping[str, torch.Tensor]


class _Rule(NamedTuple):
    """A module's name there, and its names here. `{}` is the number of a layer."""

    theirs: str
    ours: tuple[str, ...]
    is_inside: bool


class _Found(NamedTuple):
    """The rule for the name of a tensor, and the name's other parts."""

    rule: _Rule
    before: str
    number: str
    kind: str

    def name(self, template: str) -> str:
        return f"{self.before}{template.format(self.number)}.{self.kind}"


def to_smdistributed(
    family: Family, weights: Weights, heads: int = 1, prefix: str | None = None
) -> dict[str, torch.Tensor]:
    """Translates Hugging Face's state dict. Other names stay. Tensors are views of the given ones.

    `heads`: the number of attention heads, for families with `per_head`. `prefix`: the part of names before the
    model's; None: anything before layers, and nothing before other names.
    """
    found: dict[str, torch.Tensor] = {}
    rules = [(rule.theirs, rule) for rule in _rules(family) if rule.theirs]
    for name, tensor in weights.items():
        place = _find_rule(rules, name, prefix)
        if place is None:
            found[name] = tensor
            continue
        targets = [place.name(ours) for ours in place.rule.ours]
        if targets:
            whole = tensor.t() if _is_transposed(family, place, tensor) else tensor
            found.update(zip(targets, _divide(whole, len(targets), heads if family.per_head else 1)))
    return found


def to_huggingface(
    family: Family, weights: Weights, heads: int = 1, prefix: str | None = None
) -> dict[str, torch.Tensor]:
    """Translates a state dict of `smp.nn` back. The inverse of `to_smdistributed`."""
    found: dict[str, torch.Tensor] = {}
    rules = [(ours, rule) for rule in _rules(family) for ours in rule.ours]
    for name, tensor in weights.items():
        place = _find_rule(rules, name, prefix)
        if place is None:
            found[name] = tensor
        elif place.rule.theirs and place.name(place.rule.theirs) not in found:
            parts = [weights[place.name(ours)] for ours in place.rule.ours]
            whole = _join(parts, heads if family.per_head else 1)
            is_transposed = _is_transposed(family, place, whole)
            found[place.name(place.rule.theirs)] = whole.t().contiguous() if is_transposed else whole
    return found


def _rules(family: Family) -> Iterator[_Rule]:
    theirs, ours = family.layer
    for name, names in family.inside.items():
        inside = names if isinstance(names, tuple) else (names,)
        yield _Rule(_join_names(theirs, name), tuple(_join_names(ours, each) for each in inside), True)
    for name, other in family.outside.items():
        yield _Rule(name, (other,), False)


def _join_names(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer and name else name


def _find_rule(rules: list[tuple[str, _Rule]], name: str, prefix: str | None) -> _Found | None:
    for template, rule in rules:
        match = _pattern(template).fullmatch(name)
        if match:
            before = match["before"]
            if before == prefix or (prefix is None and (rule.is_inside or not before)):
                return _Found(rule, before, match.groupdict().get("number", ""), match["kind"])
    return None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    module = re.escape(template).replace(r"\{\}", r"(?P<number>\d+)")
    return re.compile(rf"(?P<before>(.*\.)?){module}\.(?P<kind>weight|bias|masked_bias|inv_freq)")


def _is_transposed(family: Family, place: _Found, tensor: torch.Tensor) -> bool:
    return family.transposed and place.rule.is_inside and tensor.dim() == 2


def _divide(tensor: torch.Tensor, count: int, heads: int) -> list[torch.Tensor]:
    """Divides rows into `count` tensors. With `heads`, each head has its rows of all of them together."""
    if count == 1:  # it may be a part of a sharded tensor
        return [tensor]
    apart = tensor.reshape(heads, count, -1, *tensor.shape[1:])
    return [apart[:, place].flatten(0, 1) for place in range(count)]


def _join(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """The inverse of `_divide`."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.reshape(heads, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 2)

"""`python -m smdistributed.modelparallel plan FACTORY`: estimates configurations for a model, without running it.

    plan FILE.py:NAME [--mp-parameters JSON] [--devices N] [--memory GIB] [--optimizer sgd|momentum|adam] [--json]

NAME is a function without arguments that returns a module and its inputs: `(module, batch)`, `(module, args)` or
`(module, args, kwargs)`. A batch is a tensor, or a dict of keyword arguments. NAME is called on the meta device, so
that the model needs no memory. `partitions`, `microbatches` and `active_microbatches` are varied if mp_parameters do
not set them. With --json, the result is one document on standard output, and all other output, such as prints of the
function, goes to standard error.

It exits with 0 if a configuration fits, with 1 if none does, and with 2 if the model cannot be planned.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from smdistributed.modelparallel.backend.exceptions import SMPError
from smdistributed.modelparallel.backend.partition import Partition

_GIB = 1 << 30
_DECIDED = ("partitions", "microbatches", "active_microbatches")


@dataclasses.dataclass(frozen=True)
class PlanEstimate:
    """A configuration that was tried."""

    partitions: int
    microbatches: int
    active_microbatches: int
    idle: float
    """The share of a step in which a device idles, from 0 to 1."""
    stage_bytes: Sequence[int]
    """The memory of each stage."""
    fits: bool


@dataclasses.dataclass(frozen=True)
class Estimate:
    """All configurations that were tried, and the best one."""

    plans: Sequence[PlanEstimate]
    recommended: dict[str, Any] | None
    """The mp_parameters of the best one; None if nothing fits. The exit code is then 1."""
    partition: Partition | None
    """The stages of the best one; None if nothing fits."""


def main(arguments: Sequence[str]) -> int:
    """Prints the estimates. Returns 0 if one fits, 1 if none does, 2 without a plan or with an empty batch."""
    options = _parsed(arguments)
    planning: Any = importlib.import_module("smdistributed.modelparallel.torch.plan.planning")
    memory = None if options.memory is None else int(options.memory * _GIB)
    try:
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            model = planning.load(options.factory)
        plans = list(planning.candidates(model, options.mp_parameters, options.devices, options.optimizer))
    except SMPError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if not plans:
        print(f"plan: {options.factory} gives an empty batch: there is nothing to split.", file=sys.stderr)
        return 2
    best = planning.recommended(plans, memory)
    if options.json:
        print(json.dumps(dataclasses.asdict(_document(plans, best, memory, options.mp_parameters)), indent=2))
        return 0 if best else 1
    _show(plans, memory)
    return _recommend(plans, best, options)


def _recommend(plans: Sequence[Any], best: Any, options: argparse.Namespace) -> int:
    """Prints the best plan, or that none fits, and returns the exit code: 0 or 1."""
    if best is None:
        smallest = min(found.largest for found in plans) / _GIB
        print(
            f"\nNothing fits {options.memory:g} GiB on up to {options.devices} devices: {smallest:.2f} GiB would be "
            "needed. Smaller batches, activation checkpointing or more devices need less."
        )
        return 1
    print(f"\n{best.partition}\n")
    print(f"recommended: {json.dumps({**options.mp_parameters, **_decided(best)})}")
    return 0


def _decided(found: Any) -> dict[str, int]:
    return {name: getattr(found.config, name) for name in _DECIDED}


def _document(plans: Sequence[Any], best: Any, memory: int | None, given: dict[str, Any]) -> Estimate:
    documents = [
        PlanEstimate(**_decided(found), idle=found.idle, stage_bytes=found.stage_bytes, fits=_fits(found, memory))
        for found in plans
    ]
    return Estimate(documents, {**given, **_decided(best)} if best else None, best and best.partition)


def _fits(found: Any, memory: int | None) -> bool:
    return memory is None or bool(found.largest <= memory)


def _show(plans: Sequence[Any], memory: int | None) -> None:
    """Prints a table of the plans. Those that need more than `memory` bytes are marked; without it, none."""
    print("partitions  microbatches  active    idle  GiB of each stage")
    for found in plans:
        config = found.config
        sizes = " ".join(f"{size / _GIB:.2f}" for size in found.stage_bytes)
        fits = "" if _fits(found, memory) else "  does not fit"
        numbers = f"{config.partitions:10} {config.microbatches:13} {config.active_microbatches:7}"
        print(f"{numbers} {found.idle:7.1%}  {sizes}{fits}")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("smdistributed.modelparallel", allow_abbrev=False)
    plan = parser.add_subparsers(required=True).add_parser(
        "plan", help="Estimate memory and idle time of configurations for a model"
    )
    plan.add_argument(
        "factory",
        metavar="FILE.py:NAME",
        help="A function that returns (module, batch) or (module, args, kwargs)",
    )
    plan.add_argument(
        "--mp-parameters",
        metavar="JSON",
        default={},
        type=_object,
        help="Keys to keep fixed, as a JSON object; default: {}",
    )
    plan.add_argument(
        "--devices",
        metavar="N",
        type=_positive,
        default=8,
        help="How many devices partitions and replicas may use; default: 8",
    )
    plan.add_argument(
        "--memory", metavar="GIB", type=float, help="The memory of each device, in GiB; default: unlimited"
    )
    plan.add_argument(
        "--optimizer",
        choices=("sgd", "momentum", "adam"),
        default="adam",
        help="The optimizer, for the memory of its state; default: adam",
    )
    plan.add_argument("--json", action="store_true", help="Print JSON on standard output")
    return parser.parse_args(arguments)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text}")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m smdistributed.modelparallel plan FACTORY`: what a configuration would do to a model, without running it.

    plan FILE.py:NAME [--mp-parameters JSON] [--devices N] [--memory GIB] [--optimizer sgd|momentum|adam]

NAME is a function without arguments that gives a module and a batch: `(module, args)` or `(module, args, kwargs)`. It is
called on the meta device, so that any size will do. `partitions` and `microbatches` are tried in powers of two where
mp_parameters do not say them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from smdistributed.modelparallel.backend.exceptions import SMPError

_GIB = 1 << 30


def main(arguments: Sequence[str]) -> int:
    """0: a configuration is recommended; 1: none fits; 2: the model cannot be planned."""
    options = _parsed(arguments)
    planning: Any = importlib.import_module("smdistributed.modelparallel.torch.planning")
    memory = None if options.memory is None else int(options.memory * _GIB)
    try:
        given = json.loads(options.mp_parameters)
        plans = list(planning.candidates(planning.load(options.factory), given, options.devices, options.optimizer))
    except (SMPError, ValueError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print("partitions microbatches  largest stage     idle  stages, GiB")
    for found in plans:
        sizes = " ".join(f"{size / _GIB:.2f}" for size in found.stage_bytes)
        config, fits = found.config, "" if memory is None or found.largest <= memory else "  does not fit"
        print(
            f"{config.partitions:10} {config.microbatches:12} {found.largest / _GIB:10.2f} GiB {found.idle:8.1%}  {sizes}{fits}"
        )
    best = planning.recommended(plans, memory)
    if best is None:
        print(f"Nothing fits {options.memory:g} GiB on up to {options.devices} devices.")
        return 1
    values = {name: getattr(best.config, name) for name in ("partitions", "microbatches", "active_microbatches")}
    print(f"\n{best.partition}\nrecommended: {json.dumps({**given, **values})}")
    return 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("smdistributed.modelparallel", allow_abbrev=False)
    plan = parser.add_subparsers(required=True).add_parser("plan", help="what a configuration would do to a model")
    plan.add_argument("factory", metavar="FILE.py:NAME", help="gives (module, args) or (module, args, kwargs)")
    plan.add_argument("--mp-parameters", metavar="JSON", default="{}", help="what is decided already")
    plan.add_argument("--devices", metavar="N", type=int, default=8, help="at most so many partitions (8)")
    plan.add_argument("--memory", metavar="GIB", type=float, help="of each device")
    plan.add_argument("--optimizer", choices=("sgd", "momentum", "adam"), default="adam")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Lays two runs of one job side by side, thing by thing. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .commands import launch_command
from .lab import HostRun, Process, Run

SAME, MISSING, ADDITIONAL, DIFFERENT = "same", "missing", "additional", "different"
# Variables that mpirun and torchrun set differently each time (identities, addresses, directories), and the options of
# mpirun, which are compared separately.
_OF_THE_LAUNCHER = re.compile(
    r"OMPI_(?!COMM_WORLD_(LOCAL_)?(RANK|SIZE)$)|PMIX_|PRTE|ORTE|HFI_|IPATH_|TORCHELASTIC_(RUN_ID|ERROR_FILE)"
)
_OF_THE_TEST = ("RECORD_SECONDS", "SHOAL_STANDBY")
_OBJECTS = ("SM_TRAINING_ENV", "TF_CONFIG")  # compared key by key
_KEPT = ("model/", "output/data/", "checkpoints/")  # files that the script writes for its user

Items = Mapping[str, str]


class Pair(NamedTuple):
    """One thing, such as `env SM_HPS` or `mpirun -mca btl`, as the two toolkits have it; None: one has it not."""

    where: str
    item: str
    stock: str | None
    ours: str | None

    @property
    def kind(self) -> str:
        """How our value differs from the stock one."""
        if self.stock == self.ours:
            return SAME
        if self.stock is None:
            return ADDITIONAL
        return MISSING if self.ours is None else DIFFERENT

    def __str__(self) -> str:
        sides = [
            f"{name}: {value}" for name, value in (("stock", self.stock), ("ours", self.ours)) if value is not None
        ]
        return f"{self.where}: {self.item} {self.kind}; {'; '.join(sides)}"


def compare(stock: Run, ours: Run) -> list[Pair]:
    """Return everything that is compared of a job's two runs, on the same hosts."""
    pairs: list[Pair] = []
    for host in stock:
        theirs, mine = _by_role(stock[host].scripts), _by_role(ours[host].scripts)
        pairs += _side_by_side(host, _outcome(stock[host], theirs), _outcome(ours[host], mine))
        common = sorted(set(theirs) & set(mine))
        for role in common:
            pairs += _side_by_side(f"{host} {role}", _facts(theirs[role]), _facts(mine[role]))
        for role in common[:1]:  # the ranks of a host have one launcher
            commands = launch_command(theirs[role].parents), launch_command(mine[role].parents)
            pairs += _side_by_side(f"{host} launcher", *commands)
    return pairs


def _outcome(host: HostRun, roles: Iterable[str]) -> dict[str, str]:
    items = {"exit code": "still running" if host.code is None else str(host.code)}
    items |= {f"script {role}": "started" for role in roles}
    items |= {f"file {name}": "there" for name in host.files}
    # The texts of the result are each toolkit's own.
    kept = {name: content for name, content in host.files.items() if name.startswith(_KEPT)}
    return items | {f"content {name}": content.decode(errors="replace") for name, content in kept.items()}


def _by_role(scripts: Iterable[Process]) -> dict[str, Process]:
    roles: dict[str, Process] = {}
    for script in scripts:
        role = _rank(script.environ)
        while role in roles:
            role += "'"  # a second one in the same place is a difference of its own
        roles[role] = script
    return roles


def _rank(environ: Mapping[str, str]) -> str:
    if "OMPI_COMM_WORLD_RANK" in environ:
        return f"rank {environ['OMPI_COMM_WORLD_RANK']}"
    return f"rank {environ['RANK']}" if "TORCHELASTIC_RUN_ID" in environ else "alone"


def _facts(script: Process) -> dict[str, str]:
    items = {"cwd": script.cwd, "interpreter": script.interpreter}
    return items | dict(_arguments(script.argv)) | dict(_environment(script.environ))


def _arguments(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The contract gives the script pairs of an option and its value."""
    yield "argv script", argv[0]
    pairs = [argv[index : index + 2] for index in range(1, len(argv), 2)]
    yield "argv order", " ".join(pair[0] for pair in pairs)
    for pair in pairs:
        yield f"argv {pair[0]}", repr(pair[1:])


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environ.items():
        if _OF_THE_LAUNCHER.match(name) or name in _OF_THE_TEST:
            continue
        if name in _OBJECTS:
            for key, entry in json.loads(value).items():
                yield f"env {name}.{key}", json.dumps(entry, sort_keys=True)
        else:
            yield f"env {name}", _search_path(value) if name == "PATH" else value


def _search_path(value: str) -> str:
    """Returns the directories of a search path once each: mpirun puts its own directory first, once on each level."""
    return ":".join(dict.fromkeys(value.split(":")))


def _side_by_side(where: str, stock: Items, ours: Items) -> list[Pair]:
    return [Pair(where, item, stock.get(item), ours.get(item)) for item in sorted({**stock, **ours})]

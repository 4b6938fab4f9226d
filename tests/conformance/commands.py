"""Launch commands as parsed options: two commands that differ in order or spelling are one. Pure.

Written for the comparison alone, from the manuals of Open MPI 4.1 and torchrun; no code is shared with the toolkit's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

_VALUES = {
    **dict.fromkeys(("host", "H", "np", "n", "c", "bind-to", "map-by", "rank-by", "wdir", "wd", "path", "prefix"), 1),
    **dict.fromkeys(("hostfile", "machinefile", "timeout", "tune", "am", "x"), 1),
    **dict.fromkeys(("mca", "gmca", "omca"), 2),
}
_RANK_SHELL = "shoal-rank"


def launch_command(parents: Iterable[Sequence[str]]) -> dict[str, str]:
    """Returns the options of mpirun or torchrun among the command lines above a script; empty if there is none.

    `mpirun -mca btl`, `mpirun -x PATH`, `torchrun --nnodes` and so on; `program` is the script's command, `wrapper`
    the words before it.
    """
    for argv in parents:
        names = [word.rpartition("/")[2] for word in argv[:3]]
        if names[:1] == ["mpirun"]:
            return {f"mpirun {option}": value for option, value in _mpirun(argv[1:]).items()}
        if "torchrun" in names[:2] or "torch.distributed.run" in names:
            words = argv[names.index("torchrun") + 1 :] if "torchrun" in names else argv[3:]
            return {f"torchrun {option}": value for option, value in _torchrun(words).items()}
    return {}


def _mpirun(words: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name = rest.pop(0).lstrip("-")
        values = [rest.pop(0) for _ in range(_VALUES.get(name, 0))]
        _set(options, *_named(name, values))
    return options | _program(rest)


def _named(name: str, values: Sequence[str]) -> tuple[str, str]:
    if name == "x":
        variable, equals, value = values[0].partition("=")
        return f"-x {variable}", value if equals else "(as it is)"
    if len(values) == 2:
        return f"-{name} {values[0]}", values[1]
    return f"-{name}", "".join(values)


def _torchrun(words: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        if rest[0] == "--":
            del rest[0]
            break
        name, equals, value = rest.pop(0).lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not equals:
            value = "" if name in ("no_python", "standalone", "m") else rest.pop(0)
        _set(options, f"--{name}", value)
    return options | _program(rest)


def _set(options: dict[str, str], name: str, value: str) -> None:
    options[name] = f"{options[name]} {value}" if name in options else value


def _program(words: Sequence[str]) -> dict[str, str]:
    wrapper: list[str] = []
    rest = list(words)
    if _RANK_SHELL in rest:
        wrapper, rest = ["sh"], rest[rest.index(_RANK_SHELL) + 1 :]
    elif rest and rest[0] in ("smddprun", "smddpmprun"):
        length = 1 if rest[0] == "smddprun" else 4
        wrapper, rest = rest[:length], rest[length:]
    return {"wrapper": " ".join(wrapper), "program": shlex.join(rest)}

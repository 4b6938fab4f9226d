"""Expands lists of host names as Slurm writes them, without `scontrol`: n[01-03,7],login → n01, n02, n03, n7, login.

The form is described in Slurm's manual, "hostlist expressions" (scontrol, "show hostnames"). A name may have several
brackets: of these the last varies fastest. The digits of the first number of a range set the padding.
"""

from __future__ import annotations

import re

from shoal_toolkit.errors import ContractError

_MAX_HOSTS = 65536
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand_hosts(text: str, variable: str) -> tuple[str, ...]:
    """Returns the names of a list in which commas or spaces separate names, and brackets hold numbers.

    Args:
        text: Such as "n[1-3],m".
        variable: The name of the variable that holds it, for errors.

    Raises:
        ContractError: If the text has another form, or more than 65,536 names.
    """
    items = _ITEM.findall(text)
    if re.sub(r"[,\s]", "", _ITEM.sub("", text)) or not items:
        raise _wrong(text, variable, "is not a list of host names")
    names: list[str] = []
    for item in items:
        found = [""]
        for ranges, literal in _PART.findall(item):
            ends = [literal] if literal else _expand_ranges(ranges, text, variable)
            if len(found) * len(ends) + len(names) > _MAX_HOSTS:
                raise _wrong(text, variable, f"names more than {_MAX_HOSTS:,} hosts")
            found = [name + end for name in found for end in ends]
        names += found
    return tuple(names)


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    """Returns the numbers between two brackets, padded: "08-10,3" → 08, 09, 10, 3."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _wrong(text, variable, f"has [{ranges}], and {part!r} is neither a number nor a range")
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < low + _MAX_HOSTS:
            raise _wrong(text, variable, f"has the range {part}, which must go up, by less than {_MAX_HOSTS:,}")
        numbers += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return numbers


def _wrong(text: str, variable: str, problem: str) -> ContractError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ContractError(
        f"The variable {variable} {problem}: {shown!r}. Fix: write names, separated by commas, with ranges in "
        "brackets, such as node[01-04],login1."
    )

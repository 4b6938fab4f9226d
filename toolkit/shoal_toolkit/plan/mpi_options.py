"""Parses the user's custom options for mpirun, checks them, and translates them for the installed Open MPI.

The table data/mpirun.json lists the options of Open MPI 4.1 and 5.0 with the number of their values, options that would
break the job, and names that differ in 5.0. Unknown options are refused before anything starts: mpirun itself would
take an extra word for the program, or end with exit code 0 without training.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.fast_typing import Any, NamedTuple

SERIES = (4, 5)  # of Open MPI, in the order of the table
RELEASE = {4: "4.1", 5: "5.0"}
MCA_VARIABLES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
_GENERIC_MCA = ("mca", "gmca", "omca", "gomca", "prtemca")  # `--mca` replaces them all, because there is one program
_SPELLING = re.compile(r"--?(?P<name>[A-Za-z?][\w?-]*)(?:=(?P<value>.*))?", re.DOTALL)
# Variables that every host sets for its own ranks. With -x, mpirun would pass on the first host's values.
_HOST_VARIABLES = re.compile(r"SM_.*|CURRENT_HOST|PYTHONPATH")


class McaValue(NamedTuple):
    """The value of an MCA parameter, and the option that sets it."""

    option: str  # "mca" or "pmixmca"
    value: str


class MpiOptions(NamedTuple):
    """Options of mpirun, each mentioned once."""

    named: Mapping[str, tuple[str, ...]]  # name → values
    mca: Mapping[str, McaValue]
    exports: Mapping[str, str]  # NAME → "NAME" or "NAME=value"
    notes: tuple[str, ...]  # for the log: what was changed or left out


def parse_mpi_options(text: str, key: str, series: int, table: Mapping[str, Any]) -> MpiOptions:
    """Parses custom options for mpirun, with quotes as in a shell, and returns each option once.

    Args:
        text: The options.
        key: The hyperparameter that holds them, for errors.
        series: The installed series of Open MPI, 4 or 5.
        table: The content of data/mpirun.json.

    Raises:
        ContractError: If an option is not allowed; gives the reason and the fix.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:  # the text may contain a secret
        raise ContractError(
            f"hyperparameters.json, {key}: the options cannot be split into words: {str(error).lower()}. Fix: check "
            "quotes."
        ) from None
    parser = _Parser(key, series, table)
    start = 0
    while start < len(words):
        start = parser.parse_option(words, start)
    return MpiOptions(parser.named, parser.mca, parser.exports, tuple(parser.notes))


class _Parser:
    """Collects the options that have been parsed so far."""

    def __init__(self, key: str, series: int, table: Mapping[str, Any]) -> None:
        self.named: dict[str, tuple[str, ...]] = {}
        self.mca: dict[str, McaValue] = {}
        self.exports: dict[str, str] = {}
        self.notes: list[str] = []
        self._key, self._series, self._table = key, series, table

    def parse_option(self, words: Sequence[str], start: int) -> int:
        """Adds the option at `start`, or notes that it is left out; returns the start of the next one."""
        word = words[start]
        spelled = _SPELLING.fullmatch(word)
        if spelled is None:
            shown = redact.MASK if start and redact.is_secret(words[start - 1], word) else word
            raise self._refusal(shown, "mpirun would run it instead of the script; a value with spaces needs quotes")
        name, option = self._find(spelled["name"])
        if not option:
            hint = did_you_mean(f"--{name}", [f"--{known}" for known in self._table["options"]])
            raise self._refusal(word, f"mpirun does not know it.{hint}".rstrip("."))
        if "refused" in option:
            raise self._refusal(word, self._table["reasons"][option["refused"]])
        values, end = self._parse_values(option, words, start, spelled["value"])
        if "left_out" in option:
            self._note(f"{word} is left out: {self._table['reasons'][option['left_out']]}")
        else:
            self._add(word, name, option, values)
        return end

    def _refusal(self, word: str, reason: str) -> ContractError:
        shown = redact.mask_arguments([word])[0]
        return ContractError(f"hyperparameters.json, {self._key}: the option {shown!r} is not allowed: {reason}.")

    def _note(self, text: str) -> None:
        self.notes.append(f"{self._key}: {text}")

    def _find(self, name: str) -> tuple[str, Mapping[str, Any]]:
        for main, option in self._table["options"].items():
            if name == main or name in option.get("also", ()):
                return main, option
        return name, {}

    def _parse_values(
        self, option: Mapping[str, Any], words: Sequence[str], start: int, joined: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Returns the values, which follow the option or are in --name=value, and the start of the next option."""
        word = words[start]
        width = option["values"][SERIES.index(self._series)]
        if width is None:
            width = max(known for known in option["values"] if known is not None)
        if joined is not None:
            if width != 1:
                raise self._refusal(word, "its values are separate words" if width else "it takes no value")
            return (joined,), start + 1
        values = tuple(words[start + 1 : start + 1 + width])
        another = next((value for value in values if self._is_option(value)), "")
        if len(values) < width or another:
            needs = "a name and a value" if width == 2 else "a value"
            found = f"and {another!r} is the next option" if another else "and nothing follows"
            raise self._refusal(word, f"it needs {needs} after it, {found}")
        return values, start + 1 + width

    def _is_option(self, word: str) -> bool:
        spelled = _SPELLING.fullmatch(word)
        return spelled is not None and bool(self._find(spelled["name"])[1])

    def _add(self, word: str, name: str, option: Mapping[str, Any], values: tuple[str, ...]) -> None:
        """Adds an option to the named ones, the MCA parameters or the exports. Of two, the last counts."""
        if name == "NCCL_DEBUG":  # an option of the contract, not of mpirun
            self._add_export(f"NCCL_DEBUG={values[0]}")
        elif name == "x":
            self._add_export(values[0])
        elif name in _GENERIC_MCA:
            self._add_mca(word, "mca", *values)
        elif option["values"][SERIES.index(self._series)] is None:
            self._add_of_other_series(word, option)
        elif name == "pmixmca":
            self._add_mca(word, name, *values)
        else:
            if self.named.pop(name, values) != values:
                self._note(f"--{name} is given twice: the last counts")
            self.named[name] = values

    def _add_of_other_series(self, word: str, option: Mapping[str, Any]) -> None:
        """Translates an option that only the other series has, or leaves it out, with a note."""
        if self._series == 4 or "as5" not in option:
            own, other = (RELEASE[series] for series in (self._series, 9 - self._series))
            raise self._refusal(word, f"it is one of Open MPI {other}, and {own} is installed here")
        if option["as5"]:
            name, *values = option["as5"]
            self.named[name] = tuple(values)
            self._note(f"{word} is --{' '.join(option['as5'])} in Open MPI {RELEASE[5]}")
        else:
            self._note(f"{word} is left out: it is not needed in Open MPI {RELEASE[5]}")

    def _add_export(self, export: str) -> None:
        """Adds `-x NAME` or `-x NAME=value`. A variable of Open MPI with a value becomes an MCA parameter."""
        name, equals, value = export.partition("=")
        if not name or name.startswith("SHOAL_"):
            raise self._refusal("-x", "its value is NAME or NAME=value, and SHOAL_ variables are internal")
        for prefix in MCA_VARIABLES:
            if equals and name.startswith(prefix):
                self._add_mca(f"-x {name}", "mca", name[len(prefix) :], value)
                return
        if not equals and _HOST_VARIABLES.fullmatch(name):
            self._note(f"-x {name} is left out: every host sets its own")
            return
        if self.exports.get(name, export) != export:
            self._note(f"{name} is set twice: the last counts")
        self.exports[name] = export

    def _add_mca(self, word: str, option: str, key: str, value: str) -> None:
        """Adds a parameter with its name in the installed series. One that it does not have is left out."""
        if "=" in key:
            raise self._refusal(f"{word} {key}", f"write {word} {key.replace('=', ' ', 1)}")
        refused = self._table["mca"]["refused"].get(key)
        if refused and value not in refused.get("except", ()):
            raise self._refusal(f"{word} {key}", self._table["reasons"][refused["reason"]])
        new, release = translate_parameter(self._table, key, value, self._series), RELEASE[self._series]
        if new is None:
            self._note(f"{word} {key} is left out: Open MPI {release} has no such parameter")
            return
        if new != (key, value):
            self._note(f"{word} {key} {value} is {new[0]} {new[1]} in Open MPI {release}, installed here")
        key, value = new
        if key in self.mca and self.mca[key].value != value:
            self._note(f"--mca {key} is given twice: the last counts")
        self.mca[key] = McaValue(option, value)


def translate_parameter(table: Mapping[str, Any], key: str, value: str, series: int) -> tuple[str, str] | None:
    """Translates an MCA parameter to a series of Open MPI. One that is not in the table stays as it is.

    Args:
        table: The content of data/mpirun.json.
        key: The parameter, with its name in either series.
        value: Its value.
        series: 4 or 5.

    Returns:
        Name and value there; None if that series does not have the parameter.
    """
    old, new = ("4", "5") if series == 5 else ("5", "4")
    for rename in table["mca"]["renamed"]:
        if rename[old] is None:
            continue
        stem = rename[old].rstrip("*")
        if key != stem and not (rename[old] != stem and key.startswith(stem)):
            continue
        if rename[new] is None:
            return None
        return rename[new].rstrip("*") + key[len(stem) :], _translate_value(rename.get("values", {}), value, series)
    names = table["mca"]["components"].get(key)
    return key, _translate_components(names, value, series) if names else value


def _translate_value(values: Mapping[str, str], value: str, series: int) -> str:
    translated = values if series == 5 else {new: old for old, new in values.items()}
    return translated.get(value, value)


def _translate_components(names: Sequence[str], value: str, series: int) -> str:
    """Returns a list of components, such as `^vader,tcp`, with the names of a series."""
    old, new = names if series == 5 else reversed(names)
    listed = value.lstrip("^").split(",")
    return value[: len(value) - len(value.lstrip("^"))] + ",".join(new if name == old else name for name in listed)

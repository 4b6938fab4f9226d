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
from shoal_toolkit.light_typing import Any, NamedTuple

SERIES = (4, 5)  # of Open MPI, in the order of the table
RELEASE = {4: "4.1", 5: "5.0"}
MCA_VARIABLES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
_GENERIC_MCA = ("mca", "gmca", "omca", "gomca", "prtemca")  # `--mca` replaces them all, because there is one program
_SPELLING = re.compile(r"--?(?P<name>[A-Za-z?][\w?-]*)(?:=(?P<value>.*))?", re.DOTALL)
# Variables that every host sets for its own ranks. With -x, mpirun would pass on those of the first host.
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


class _Parser(NamedTuple):
    """What stays the same while options are parsed."""

    key: str  # the hyperparameter
    series: int
    table: Mapping[str, Any]

    def refusal(self, word: str, reason: str) -> ContractError:
        shown = redact.mask_arguments([word])[0]
        return ContractError(f"hyperparameters.json, {self.key}: the option {shown!r} is not allowed: {reason}.")

    def find(self, name: str) -> tuple[str, Mapping[str, Any]] | None:
        """Returns the main name of an option and its entry in the table; None if it is unknown."""
        for main, option in self.table["options"].items():
            if name == main or name in option.get("also", ()):
                return main, option
        return None

    def reason(self, option: Mapping[str, Any], field: str) -> str:
        return str(self.table["reasons"][option[field]])

    def note(self, text: str) -> str:
        return f"{self.key}: {text}"


def parse_mpi_options(text: str, key: str, series: int, table: Mapping[str, Any]) -> MpiOptions:
    """Parses custom options for mpirun, with quotes as in a shell.

    Args:
        text: The options.
        key: The hyperparameter that holds them, for errors.
        series: The installed series of Open MPI, 4 or 5.
        table: The content of data/mpirun.json.

    Raises:
        ContractError: If an option is not allowed; says why, and what to use instead.
    """
    parser = _Parser(key, series, table)
    try:
        words = shlex.split(text)
    except ValueError as error:  # the text may hold a secret
        raise ContractError(
            f"hyperparameters.json, {key}: the options cannot be split into words: {str(error).lower()}. Check quotes."
        ) from None
    options, taken = MpiOptions({}, {}, {}, ()), 0
    while taken < len(words):
        options, taken = _parse_option(parser, options, words, taken)
    return options


def _parse_option(parser: _Parser, options: MpiOptions, words: Sequence[str], start: int) -> tuple[MpiOptions, int]:
    """Adds the option at `start`; returns the options and the start of the next one."""
    word = words[start]
    spelled = _SPELLING.fullmatch(word)
    if spelled is None:
        raise _refuse_bare_word(parser, words, start)
    found = parser.find(spelled["name"])
    if found is None:
        raise _refuse_unknown(parser, word, spelled["name"])
    name, option = found
    if "refused" in option:
        raise parser.refusal(word, parser.reason(option, "refused"))
    values, end = _parse_values(parser, option, words, start, spelled["value"])
    if "left_out" in option:
        left_out = parser.note(f"{word} is left out: {parser.reason(option, 'left_out')}")
        return options._replace(notes=(*options.notes, left_out)), end
    return _add_option(parser, options, word, name, option, values), end


def _refuse_bare_word(parser: _Parser, words: Sequence[str], start: int) -> ContractError:
    before = words[start - 1] if start else ""
    shown = redact.MASK if redact.is_secret(before, words[start]) else words[start]
    return parser.refusal(shown, "mpirun would run it instead of the script; a value with spaces needs quotes")


def _refuse_unknown(parser: _Parser, word: str, name: str) -> ContractError:
    names = [f"--{known}" for known in parser.table["options"]]
    return parser.refusal(word, f"mpirun does not know it.{did_you_mean(f'--{name}', names)}".rstrip("."))


def _parse_values(
    parser: _Parser, option: Mapping[str, Any], words: Sequence[str], start: int, joined: str | None
) -> tuple[tuple[str, ...], int]:
    """Returns the values of an option, which follow it or are in --name=value, and the start of the next option."""
    word = words[start]
    widths: list[int | None] = option["values"]
    width = widths[SERIES.index(parser.series)]
    if width is None:
        width = max(known for known in widths if known is not None)
    if joined is not None:
        if width != 1:
            raise parser.refusal(word, "its values are separate words" if width else "it takes no value")
        return (joined,), start + 1
    values = tuple(words[start + 1 : start + 1 + width])
    another = next((value for value in values if _is_option(parser, value)), "")
    if len(values) < width or another:
        needs = "a name and a value" if width == 2 else "a value"
        found = f"and {another!r} is the next option" if another else "and nothing follows"
        raise parser.refusal(word, f"it needs {needs} after it, {found}")
    return values, start + 1 + width


def _is_option(parser: _Parser, word: str) -> bool:
    spelled = _SPELLING.fullmatch(word)
    return spelled is not None and parser.find(spelled["name"]) is not None


def _add_option(
    parser: _Parser, options: MpiOptions, word: str, name: str, option: Mapping[str, Any], values: tuple[str, ...]
) -> MpiOptions:
    if name == "NCCL_DEBUG":  # an option of the contract, not of mpirun
        return _add_export(parser, options, f"NCCL_DEBUG={values[0]}")
    if name == "x":
        return _add_export(parser, options, values[0])
    if name in _GENERIC_MCA:
        return _add_mca(parser, options, word, "mca", *values)
    if option["values"][SERIES.index(parser.series)] is None:
        return _add_of_other_series(parser, options, word, option)
    if name == "pmixmca":
        return _add_mca(parser, options, word, name, *values)
    named = dict(options.named)
    replaced = named.pop(name, values)
    again = [parser.note(f"--{name} is given twice: the last counts")] if replaced != values else []
    return options._replace(named={**named, name: values}, notes=(*options.notes, *again))


def _add_of_other_series(parser: _Parser, options: MpiOptions, word: str, option: Mapping[str, Any]) -> MpiOptions:
    """Translates an option that only the other series of Open MPI has, or refuses it."""
    other = next(series for series in SERIES if series != parser.series)
    if other == 5 or "as5" not in option:
        raise parser.refusal(
            word, f"it is one of Open MPI {RELEASE[other]}, and {RELEASE[parser.series]} is installed here"
        )
    instead = option["as5"]
    said = f"is --{' '.join(instead)} in" if instead else "is left out: it is not needed in"
    named = {**options.named, instead[0]: tuple(instead[1:])} if instead else options.named
    return options._replace(named=named, notes=(*options.notes, parser.note(f"{word} {said} Open MPI {RELEASE[5]}")))


def _add_export(parser: _Parser, options: MpiOptions, export: str) -> MpiOptions:
    """Adds `-x NAME` or `-x NAME=value`."""
    name, equals, value = export.partition("=")
    if not name or name.startswith("SHOAL_"):
        raise parser.refusal("-x", "its value is NAME or NAME=value, and SHOAL_ variables are internal")
    for prefix in MCA_VARIABLES:
        if equals and name.startswith(prefix):
            return _add_mca(parser, options, f"-x {name}", "mca", name[len(prefix) :], value)
    notes = list(options.notes)
    if not equals and _HOST_VARIABLES.fullmatch(name):
        notes.append(parser.note(f"-x {name} is left out: every host sets its own"))
        return options._replace(notes=tuple(notes))
    if options.exports.get(name, export) != export:
        notes.append(parser.note(f"{name} is set twice: the last counts"))
    return options._replace(exports={**options.exports, name: export}, notes=tuple(notes))


def _add_mca(parser: _Parser, options: MpiOptions, word: str, option: str, key: str, value: str) -> MpiOptions:
    if "=" in key:
        raise parser.refusal(f"{word} {key}", f"write {word} {key.replace('=', ' ', 1)}")
    refused = parser.table["mca"]["refused"].get(key)
    if refused and value not in refused.get("except", ()):
        raise parser.refusal(f"{word} {key}", parser.reason(refused, "reason"))
    notes = list(options.notes)
    new = translate_parameter(parser.table, key, value, parser.series)
    if new is None:
        notes.append(parser.note(f"{word} {key} is left out: Open MPI {RELEASE[parser.series]} has no such parameter"))
        return options._replace(notes=tuple(notes))
    if new != (key, value):
        notes.append(
            parser.note(
                f"{word} {key} {value} is {new[0]} {new[1]} in Open MPI {RELEASE[parser.series]}, installed here"
            )
        )
    key, value = new
    if key in options.mca and options.mca[key].value != value:
        notes.append(parser.note(f"--mca {key} is given twice: the last counts"))
    return options._replace(mca={**options.mca, key: McaValue(option, value)}, notes=tuple(notes))


def translate_parameter(table: Mapping[str, Any], key: str, value: str, series: int) -> tuple[str, str] | None:
    """Translates an MCA parameter to a series of Open MPI.

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

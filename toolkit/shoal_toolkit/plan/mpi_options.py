"""The user's own options for mpirun: read, checked against a table of all of them, and spelled for what is installed.

The table (data/mpirun.json) holds the options of Open MPI 4.1 and 5.0 with the number of their values, those that
would break the job, and what 5.0 has renamed. Whatever is not in it is refused before anything starts: mpirun itself
would take a word too many for the program, or end with exit code 0 and no training.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.light_typing import Any, NamedTuple

SERIES = (4, 5)  # of Open MPI, in the order of the table's pairs
RELEASE = {4: "4.1", 5: "5.0"}
MCA_VARIABLES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
_GENERIC_MCA = ("mca", "gmca", "omca", "gomca", "prtemca")  # `--mca` says them all, as there is one program
_SPELLING = re.compile(r"--?(?P<name>[A-Za-z?][\w?-]*)(?:=(?P<value>.*))?", re.DOTALL)
# What every host sets for its own ranks: a value that mpirun carries over would be the first host's.
_EACH_HOSTS_OWN = re.compile(r"SM_.*|CURRENT_HOST|PYTHONPATH")


class Mca(NamedTuple):
    """How an MCA parameter is set."""

    option: str  # "mca" or "pmixmca"
    value: str


class Options(NamedTuple):
    """Options of mpirun, each mentioned once. `notes` say what has been made of the user's words."""

    named: Mapping[str, tuple[str, ...]]  # name → values
    mca: Mapping[str, Mca]
    exports: Mapping[str, str]  # NAME → "NAME" or "NAME=value"
    notes: tuple[str, ...]


class _Reader(NamedTuple):
    """What does not change while options are read."""

    key: str  # the hyperparameter
    series: int
    table: Mapping[str, Any]

    def refusal(self, word: str, reason: str) -> ContractError:
        shown = redact.arguments([word])[0]
        return ContractError(f"hyperparameters.json, {self.key}: the option {shown!r} is not allowed: {reason}.")

    def find(self, name: str) -> tuple[str, Mapping[str, Any]] | None:
        """Return an option's main name, and what is known of it."""
        for main, option in self.table["options"].items():
            if name == main or name in option.get("also", ()):
                return main, option
        return None

    def reason(self, option: Mapping[str, Any], field: str) -> str:
        return str(self.table["reasons"][option[field]])

    def note(self, text: str) -> str:
        return f"{self.key}: {text}"


def parse(text: str, key: str, series: int, table: Mapping[str, Any]) -> Options:
    """Read the custom MPI options of the hyperparameter `key` for the installed series; quotes are honoured.

    Raises ContractError naming the option, why it cannot be, and what to do instead.
    """
    reader = _Reader(key, series, table)
    try:
        words = shlex.split(text)
    except ValueError as error:  # the text may hold a secret
        raise ContractError(
            f"hyperparameters.json, {key}: the options cannot be split into words: {str(error).lower()}. Check quotes."
        ) from None
    options, taken = Options({}, {}, {}, ()), 0
    while taken < len(words):
        options, taken = _take(reader, options, words, taken)
    return options


def _take(reader: _Reader, options: Options, words: Sequence[str], start: int) -> tuple[Options, int]:
    """Add one option to those that are read; returns where the next one starts."""
    word = words[start]
    spelled = _SPELLING.fullmatch(word)
    if spelled is None:
        raise _bare_word(reader, words, start)
    found = reader.find(spelled["name"])
    if found is None:
        raise _unknown(reader, word, spelled["name"])
    name, option = found
    if "refused" in option:
        raise reader.refusal(word, reader.reason(option, "refused"))
    values, end = _values(reader, option, words, start, spelled["value"])
    if "left_out" in option:
        left_out = reader.note(f"{word} is left out: {reader.reason(option, 'left_out')}")
        return options._replace(notes=(*options.notes, left_out)), end
    return _added(reader, options, word, name, option, values), end


def _bare_word(reader: _Reader, words: Sequence[str], start: int) -> ContractError:
    before = words[start - 1] if start else ""
    shown = redact.MASK if redact.is_secret(before, words[start]) else words[start]
    return reader.refusal(
        shown, "mpirun would run it in the script's place; a value with spaces in it needs quotes around it"
    )


def _unknown(reader: _Reader, word: str, name: str) -> ContractError:
    names = [f"--{known}" for known in reader.table["options"]]
    return reader.refusal(word, f"mpirun does not know it.{did_you_mean(f'--{name}', names)}".rstrip("."))


def _values(
    reader: _Reader, option: Mapping[str, Any], words: Sequence[str], start: int, joined: str | None
) -> tuple[tuple[str, ...], int]:
    """Return an option's values, given after it or as --name=value, and where the next option starts."""
    word = words[start]
    widths: list[int | None] = option["values"]
    width = widths[SERIES.index(reader.series)]
    if width is None:
        width = max(known for known in widths if known is not None)
    if joined is not None:
        if width != 1:
            raise reader.refusal(word, "its values follow as words of their own" if width else "it takes no value")
        return (joined,), start + 1
    values = tuple(words[start + 1 : start + 1 + width])
    another = next((value for value in values if _is_option(reader, value)), "")
    if len(values) < width or another:
        needs = "a name and a value" if width == 2 else "a value"
        found = f"and {another!r} is the next option" if another else "and nothing follows"
        raise reader.refusal(word, f"it needs {needs} after it, {found}")
    return values, start + 1 + width


def _is_option(reader: _Reader, word: str) -> bool:
    spelled = _SPELLING.fullmatch(word)
    return spelled is not None and reader.find(spelled["name"]) is not None


def _added(
    reader: _Reader, options: Options, word: str, name: str, option: Mapping[str, Any], values: tuple[str, ...]
) -> Options:
    if name == "NCCL_DEBUG":  # no option of mpirun, but one of the contract
        return _export(reader, options, f"NCCL_DEBUG={values[0]}")
    if name == "x":
        return _export(reader, options, values[0])
    if name in _GENERIC_MCA:
        return _set_mca(reader, options, word, "mca", *values)
    if option["values"][SERIES.index(reader.series)] is None:
        return _foreign(reader, options, word, option)
    if name == "pmixmca":
        return _set_mca(reader, options, word, name, *values)
    named = dict(options.named)
    replaced = named.pop(name, values)
    again = [reader.note(f"--{name} is given twice: the last counts")] if replaced != values else []
    return options._replace(named={**named, name: values}, notes=(*options.notes, *again))


def _foreign(reader: _Reader, options: Options, word: str, option: Mapping[str, Any]) -> Options:
    """An option that only the other series of Open MPI has."""
    other = next(series for series in SERIES if series != reader.series)
    if other == 5 or "as5" not in option:
        raise reader.refusal(
            word, f"it is one of Open MPI {RELEASE[other]}, and {RELEASE[reader.series]} is installed here"
        )
    instead = option["as5"]
    said = f"is --{' '.join(instead)} in" if instead else "is left out: it is not needed in"
    named = {**options.named, instead[0]: tuple(instead[1:])} if instead else options.named
    return options._replace(named=named, notes=(*options.notes, reader.note(f"{word} {said} Open MPI {RELEASE[5]}")))


def _export(reader: _Reader, options: Options, export: str) -> Options:
    """`-x NAME` or `-x NAME=value`."""
    name, equals, value = export.partition("=")
    if not name or name.startswith("SHOAL_"):
        raise reader.refusal("-x", "its value is NAME or NAME=value, and SHOAL_ variables are this toolkit's own")
    for prefix in MCA_VARIABLES:
        if equals and name.startswith(prefix):
            return _set_mca(reader, options, f"-x {name}", "mca", name[len(prefix) :], value)
    notes = list(options.notes)
    if not equals and _EACH_HOSTS_OWN.fullmatch(name):
        notes.append(reader.note(f"-x {name} is left out: every host sets its own"))
        return options._replace(notes=tuple(notes))
    if options.exports.get(name, export) != export:
        notes.append(reader.note(f"{name} is set twice: the last counts"))
    return options._replace(exports={**options.exports, name: export}, notes=tuple(notes))


def _set_mca(reader: _Reader, options: Options, word: str, option: str, key: str, value: str) -> Options:
    if "=" in key:
        raise reader.refusal(f"{word} {key}", f"write {word} {key.replace('=', ' ', 1)}")
    refused = reader.table["mca"]["refused"].get(key)
    if refused and value not in refused.get("except", ()):
        raise reader.refusal(f"{word} {key}", reader.reason(refused, "reason"))
    notes = list(options.notes)
    new = renamed(reader.table, key, value, reader.series)
    if new is None:
        notes.append(reader.note(f"{word} {key} is left out: Open MPI {RELEASE[reader.series]} has no such parameter"))
        return options._replace(notes=tuple(notes))
    if new != (key, value):
        notes.append(
            reader.note(
                f"{word} {key} {value} is {new[0]} {new[1]} in Open MPI {RELEASE[reader.series]}, installed here"
            )
        )
    key, value = new
    if key in options.mca and options.mca[key].value != value:
        notes.append(reader.note(f"--mca {key} is given twice: the last counts"))
    return options._replace(mca={**options.mca, key: Mca(option, value)}, notes=tuple(notes))


def renamed(table: Mapping[str, Any], key: str, value: str, series: int) -> tuple[str, str] | None:
    """Return an MCA parameter under its name in a series of Open MPI, None where that does not have it."""
    old, new = ("4", "5") if series == 5 else ("5", "4")
    for rename in table["mca"]["renamed"]:
        if rename[old] is None:
            continue
        stem = rename[old].rstrip("*")
        if key != stem and not (rename[old] != stem and key.startswith(stem)):
            continue
        if rename[new] is None:
            return None
        return rename[new].rstrip("*") + key[len(stem) :], _value(rename.get("values", {}), value, series)
    names = table["mca"]["components"].get(key)
    return key, _components(names, value, series) if names else value


def _value(values: Mapping[str, str], value: str, series: int) -> str:
    translated = values if series == 5 else {new: old for old, new in values.items()}
    return translated.get(value, value)


def _components(names: Sequence[str], value: str, series: int) -> str:
    """Return a list of components, such as `^vader,tcp`, with the names of a series."""
    old, new = names if series == 5 else reversed(names)
    listed = value.lstrip("^").split(",")
    return value[: len(value) - len(value.lstrip("^"))] + ",".join(new if name == old else name for name in listed)

"""docs/reference/mp-parameters.md: the keys of `mp_parameters`, from the library's Config and its tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomllib

from reference_pages.markdown import code, page, table
from reference_pages.names import OURS, read_versions
from smdistributed.modelparallel.backend import config

EFFECTS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "mp-parameters.toml"
_HEAD = """# `mp_parameters`

`make reference` writes this page from the library. These keys configure [model parallelism](../modelparallel.md). Give
them to `smp.init(…)`, or in the launch:

```console
$ shoal run pytorch train.py --procs-per-host 2 --distribution '{"mpi": {"enabled": true}, "smdistributed":
    {"modelparallel": {"enabled": true, "parameters": {"partitions": 2, "microbatches": 4}}}}'
```

Keys of the launch override keys of the script, one by one. An unknown key is an error that suggests the right name.

`shoal estimate` recommends values: [plan memory first](../modelparallel.md#plan-memory-first). The column "AWS" has the
[version of AWS's interface](python.md) that has the key first."""
_WITHOUT = """## No effect here

Any value but the neutral one warns."""
_DEFAULTS = {
    "memory_weight": "0.8; 0.2 with `optimize: speed`",
    "active_microbatches": "stages + 2",
    "ddp_port": "not set",
}
"""Defaults that depend on other keys or variables."""
_REQUIRED = "pipeline_parallel_degree"


def write() -> str:
    """Returns the page.

    Returns:
        The page in Markdown.

    Raises:
        SystemExit: If a key has no description, or a description has no key.
    """
    effects = tomllib.loads(EFFECTS.read_text())
    without = config._WITHOUT_EFFECT
    working = [each for each in fields(config.Config) if each.name not in without]
    for name in sorted({each.name for each in working} ^ effects.keys()):
        raise SystemExit(f"{name} is only in the library's Config, or only in {EFFECTS.name}. Fix: describe it there.")
    versions = read_versions("mp_parameters")
    rows = (_row(each.name, versions, each.default, " ".join(effects[each.name].split())) for each in working)
    keys = table(("key", "AWS", "type", "default", "effect"), rows)
    return page(_HEAD, "## Keys that work", keys, _WITHOUT, _reasons(without))


def _row(name: str, versions: dict[str, str], default: Any, effect: str) -> tuple[str, str, str, str, str]:
    names = [name, *(alias for alias, full in config._ALIASES.items() if full == name)]
    shown = "required" if name == _REQUIRED else _DEFAULTS.get(name) or code(_show(default))
    since = ", ".join(versions.get(each, OURS) for each in names)
    return ", ".join(map(code, names)), since, _kind(name, default), shown, effect


def _kind(name: str, default: Any) -> str:
    """The type of a key, or its allowed values."""
    if name in config._CHOICES:
        return " ".join(code(each) for each in config._CHOICES[name])
    words = {bool: "true, false", int: "integer", float: "0.0 to 1.0", type(None): "integer"}
    return words[type(default)]


def _show(value: Any) -> str:
    """A value as in JSON; a large number with a power of ten."""
    if isinstance(value, float) and value >= 1e6:
        return f"{value:.0e}".replace("e+0", "e")
    return str(value) if value and isinstance(value, str) else json.dumps(value)


def _reasons(keys: dict[str, tuple[Any, str]]) -> str:
    return table(("key", "AWS", "neutral value", "reason"), _reason_rows(keys))


def _reason_rows(keys: dict[str, tuple[Any, str]]) -> Iterator[tuple[str, str, str, str]]:
    versions = read_versions("mp_parameters")
    for name, (neutral, reason) in keys.items():
        text = re.sub(r"'(\w+)'|(smp\.\w+)", lambda found: code(found[1] or found[2]), reason)
        yield code(name), versions.get(name, OURS), code(_show(neutral)), f"{text[:1].upper()}{text[1:]}."

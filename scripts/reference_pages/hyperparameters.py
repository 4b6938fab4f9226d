"""docs/reference/hyperparameters.md: the hyperparameters that `train` reads, from its lists of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import tomllib

from reference_pages.markdown import code, page, table
from shoal_toolkit.job.contract import TOOLKIT_KEYS
from shoal_toolkit.job.launchers import LAUNCHER_KEYS

MEANINGS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "hyperparameters.toml"
_HEAD = """# Hyperparameters that `train` reads

`make reference` writes this page from the lists of `train`. All other hyperparameters become arguments of your script
([toolkit](../toolkit.md#the-code)). The SageMaker SDK and `shoal run` set these from their own options, such as
`distribution`. `mp_parameters` has [its own page](mp-parameters.md)."""


def write() -> str:
    """Returns the page.

    Raises:
        SystemExit: If a hyperparameter has no description, or a description has no hyperparameter.
    """
    meanings = tomllib.loads(MEANINGS.read_text())
    return page(
        _HEAD,
        "## For `train` itself",
        _table(TOOLKIT_KEYS, meanings["toolkit"]),
        "## To choose and tune a launcher",
        "If several launchers are enabled, the order on the page about [launchers](../toolkit.md#launchers) counts.",
        _table(LAUNCHER_KEYS, meanings["launcher"]),
    )


def _table(keys: Iterable[str], meanings: Mapping[str, list[str]]) -> str:
    for name in sorted({*keys} ^ {*meanings}):
        raise SystemExit(f"{name} is only in the lists of `train`, or only in {MEANINGS.name}. Fix: describe it there.")
    return table(
        ("hyperparameter", "type", "default", "meaning"), ((code(name), *row) for name, row in meanings.items())
    )

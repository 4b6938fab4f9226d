"""Writes docs/reference, docs/api, and tables of a guide, from the code and its data. `--check` writes nothing.

It is an error if a variable or a key is in the code, but has no description in docs/reference, or the other way round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from reference_pages import (
    api,
    build_files,
    commands,
    dataparallel,
    documents,
    exit_codes,
    hyperparameters,
    images,
    launchers,
    migration,
    mp_parameters,
    names,
    releases,
    variables,
)

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "shoal.md": commands.write,
    "variables.md": variables.write,
    "images.md": images.write,
    "buildspec.md": build_files.write,
    "json.md": documents.write,
    "../exit-codes.md": exit_codes.write,
    "hyperparameters.md": hyperparameters.write,
    "launchers.md": launchers.write,
    "mp-parameters.md": mp_parameters.write,
    "python.md": names.write,
    "releases.md": releases.write,
    "../migrate/smdistributed.md": migration.write,
    "../api/dataparallel.md": dataparallel.write,
    **{f"../api/{name}": partial(api.write, name) for name in api.PAGES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    stale: list[str] = []
    for name, write in PAGES.items():
        path, text = (DIRECTORY / name).resolve(), write()
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
    if stale:
        sys.exit(f"{', '.join(stale)}: stale. Fix: run `make reference` and commit the pages.")


if __name__ == "__main__":
    main()

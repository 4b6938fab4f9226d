"""Runs the cells of a notebook as Jupyter does, in its directory, and prints what they print.

    python run_notebook.py NOTEBOOK [NAME=VALUE ...]

IPython runs them, so that `!command` works. NAME=VALUE replaces a setting: a name of the
first cell with code.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell


def run_cells(notebook: Path, settings: dict[str, str]) -> None:
    """Runs the cells with code, one after the other. Raises what a cell raises.

    A replaced setting keeps its type, a text or a number.
    """
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    os.chdir(notebook.parent)
    shell = InteractiveShell.instance()
    for number, cell in enumerate(cells):
        shell.run_cell("".join(cell["source"]), store_history=True).raise_error()
        if number == 0:
            shell.user_ns.update({name: type(shell.user_ns[name])(value) for name, value in settings.items()})


if __name__ == "__main__":
    run_cells(Path(sys.argv[1]).resolve(), dict(argument.split("=", 1) for argument in sys.argv[2:]))

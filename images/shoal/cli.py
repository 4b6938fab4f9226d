"""The command `shoal`: says at once what is known already, else loads the commands and runs one."""

from __future__ import annotations

import os
import sys

from shoal.build import unchanged


def main() -> None:
    """Run the command line; every expected failure prints its text and exits with its own code."""
    asked = unchanged.question(sys.argv[1:], os.getcwd())
    if asked and (lines := unchanged.answer(asked)):
        print("\n".join(lines))
        return
    # Not at the top: this takes far longer than the answer above.
    from shoal.commands import application

    application.main(asked)

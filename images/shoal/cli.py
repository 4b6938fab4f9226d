"""The command `shoal`: says at once what is known already, else loads the commands and runs one."""

from __future__ import annotations

import gc
import os
import signal
import sys

from shoal.builds import noop_cache


def main() -> None:
    """Run the command line; every expected failure prints its text and exits with its own code."""
    command = noop_cache.read_command(sys.argv[1:], os.getcwd())
    if command and (lines := noop_cache.find_answer(command)):
        print("\n".join(lines))
        return
    # While all is loaded there is nothing to undo, and extensions swallow a KeyboardInterrupt: pydantic would go on
    # with a broken schema. So the signal ends the process, until a command runs.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What is loaded stays: to look through it for garbage takes time and finds none.
    gc.disable()
    # Not at the top: this takes far longer than the answer above.
    from shoal.commands import application

    application.main(command)

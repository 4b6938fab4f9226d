"""The command `shoal`: answers a repeated build from a cache, or loads the commands and runs one."""

from __future__ import annotations

import gc
import os
import signal
import sys

from shoal.builds import noop_cache
from shoal.clean_text import print_document


def main() -> None:
    """Run the command line. Print expected failures, and exit with their codes.

    A repeated `build` with nothing to do is answered from a cache. Otherwise, while modules are imported, an interrupt
    ends the process at once, and the garbage collector is off.
    """
    command = noop_cache.read_command(sys.argv[1:], os.getcwd())
    if command and (lines := noop_cache.find_answer(command)):
        print_document("\n".join(lines))
        return
    # During imports, an interrupt ends the process: there is nothing to clean up, and extensions swallow a
    # KeyboardInterrupt. pydantic would continue with a broken schema.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Modules stay loaded, so a search for garbage takes time and finds none.
    gc.disable()
    # Imported here, because this takes far longer than the answer above.
    from shoal.commands import application

    application.main(command)

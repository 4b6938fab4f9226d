"""The command `shoal`: loads the commands and runs one."""

from __future__ import annotations

import gc
import signal


def main() -> None:
    """Runs the command line. Prints expected failures, and exits with their codes.

    While modules are imported, an interrupt ends the process at once, and the garbage collector is off.
    """
    # During imports, an interrupt ends the process: there is nothing to clean up, and extensions swallow a
    # KeyboardInterrupt. pydantic would continue with a broken schema.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Modules stay loaded, so a search for garbage takes time and finds none.
    gc.disable()
    from shoal.commands import application

    application.main()

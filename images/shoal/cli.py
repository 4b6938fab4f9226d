"""The command `shoal`: loads the commands, runs one, and prints each expected failure with its exit code.

Signals that end the process raise an exception, so that commands clean up.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback

from shoal.clean_text import print_error

MODULES = ("setup", "images", "dependencies", "jobs", "running_jobs", "estimate", "deploy", "inspection")
"""The modules that define commands; importing one adds its commands to the application."""
IMAGE_COMMANDS = frozenset({"build", "list", "push", "render"})
"""The commands in the module `images`. Importing the other modules takes longer than running these commands."""
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""The signals that end a command as SIGINT does, with 128 + their number."""


def main() -> None:
    """Runs the command line. Prints expected failures, and exits with their codes.

    Imports the modules with commands; for a command of `images`, that module alone. Meanwhile, an interrupt ends the
    process at once, and the garbage collector is off. Later, SIGTERM and SIGHUP end a command as an interrupt does:
    running containers are stopped and removed.
    """
    # During imports, an interrupt ends the process: there is nothing to clean up, and extensions swallow a
    # KeyboardInterrupt. pydantic would continue with a broken schema.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Modules stay loaded, so a search for garbage takes time and finds none.
    gc.disable()
    from shoal.commands import common

    common.join_words(os.environ)
    for module in ("images",) if IMAGE_COMMANDS & {*sys.argv[1:2]} else MODULES:
        importlib.import_module(f"shoal.commands.{module}")
    _install_signal_handlers()
    gc.freeze()
    gc.enable()
    try:
        common.app(standalone_mode=True)
    except Exception as error:
        failure = common.convert_error(error)
        if failure is None:  # a defect: the traceback is most helpful
            print_error(traceback.format_exc())
            sys.exit(1)
        common.print_failure(failure)
        sys.exit(failure.exit_code)


def _install_signal_handlers() -> None:
    """Makes SIGTERM and SIGHUP exit, so that a command cleans up. An ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in EXIT_SIGNALS:
        signal.signal(number, _exit_on_signal)


def _exit_on_signal(number: int, _frame: object) -> None:
    """Exits with 128 + the signal's number, as a shell does. A signal handler."""
    sys.exit(128 + number)

"""Runs `train` as a child process if it is PID 1 of a container; PID 1 passes signals on and reaps all orphans.

The kernel drops signals for which PID 1 has no handler. It makes PID 1 the parent of every orphaned process, and no
other process can reap these.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from shoal_toolkit.fast_typing import NoReturn
from shoal_toolkit.system.loop import to_exit_code
from shoal_toolkit.system.process import signal_process

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_as_child(main: Callable[[], int]) -> NoReturn:
    """Runs `main` in a child process, passes signals on, and ends with its exit code. Then the container ends.

    The child process has a session of its own. Meanwhile this process reaps all orphans.
    """
    # Blocked during the fork, so that no signal is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        os.setsid()  # so that Ctrl-C at the terminal reaches only PID 1: a second SIGINT would kill the job
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os._exit(_run_main(main))
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: signal_process(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(to_exit_code(status))


def _run_main(main: Callable[[], int]) -> int:
    try:
        return main()
    except BaseException:  # nothing above this frame would print it
        import traceback

        traceback.print_exc()
        return 1

"""As PID 1 of a container: a small init. The real `train` is its child; it passes signals on and reaps every orphan.

The kernel ignores signals that PID 1 has no handler for, and hands PID 1 every orphaned process; nobody else would
reap them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from shoal_toolkit.light_typing import NoReturn
from shoal_toolkit.system.loop import exit_code
from shoal_toolkit.system.process import signal_process

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_as_child(main: Callable[[], int]) -> NoReturn:
    """Run main in a child, and end as it ends; whatever else runs in the container then ends with PID 1."""
    # Blocked over the fork: a signal that comes in between reaches the child all the same.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        os.setsid()  # a Ctrl-C at the terminal reaches PID 1 alone: it would else arrive twice, and a second one kills
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        os._exit(_code_of(main))
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: signal_process(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(exit_code(status))


def _code_of(main: Callable[[], int]) -> int:
    try:
        return main()
    except BaseException:  # nothing is above this frame: the traceback is written here, and the exit code is not 0
        import traceback

        traceback.print_exc()
        return 1

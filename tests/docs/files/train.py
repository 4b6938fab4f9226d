"""A training of one step, for commands in pages. If the job may restart, its first process is killed after the step."""

import os
import signal

restart = int(os.environ.get("SHOAL_RESTART", "0"))
print(f"step {351 + restart}", flush=True)
if "SHOAL_MAX_RESTARTS" in os.environ and restart == 0:
    os.kill(os.getpid(), signal.SIGKILL)

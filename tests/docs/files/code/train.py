"""A training of two steps for commands in pages. A job that may restart is killed once, after its first step."""

import os
import signal

print("step 351", flush=True)
if os.environ.get("SHOAL_MAX_RESTARTS") and os.environ["SHOAL_RESTART"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
print("step 352", flush=True)

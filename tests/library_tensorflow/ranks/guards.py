"""A rank whose fellow does something else: python guards.py different|killed|late. Prints its error."""

from __future__ import annotations

import os
import signal
import sys
import time

import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp
from smdistributed.core.exceptions import SMDDPError

sdp.init()
sdp.oob_allreduce(tf.ones([3]))
last = sdp.rank() == sdp.size() - 1


def fellow(what: str) -> None:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "late":
        time.sleep(60)
    else:
        sdp.oob_allreduce(tf.ones([5]))


def main(what: str, in_graph: bool) -> None:
    if last:
        fellow(what)
    began = time.monotonic()
    try:
        (tf.function(sdp.oob_allreduce) if in_graph else sdp.oob_allreduce)(tf.ones([4]))
    except (SMDDPError, tf.errors.InternalError) as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "graph")

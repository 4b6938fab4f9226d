"""Hooks for tf.compat.v1 sessions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Sets all global variables to the values of one rank, after a session has initialized or restored them.

    Args:
        root_rank: The rank, from 0.
    """

    def __init__(self, root_rank: int) -> None:
        self._root_rank = root_rank
        self._broadcast: Any = None

    def begin(self) -> None:
        """Adds the broadcast to the graph."""
        self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast; all ranks wait for each other."""
        session.run(self._broadcast)

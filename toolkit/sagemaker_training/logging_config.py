"""The logger of the toolkit."""

from __future__ import annotations

import logging

from sagemaker_training._absent import refuse_others


def get_logger() -> logging.Logger:
    """Returns the logger that AWS's toolkit writes to. Nothing here configures it."""
    return logging.getLogger("sagemaker-training-toolkit")


__getattr__ = refuse_others(__name__, (), {}, "logging.basicConfig, with the level of the variable SM_LOG_LEVEL")

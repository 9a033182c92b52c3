"""How much a service writes: HEADRACE_LOG_LEVEL (debug, info, warning, error), which a run file's cluster.logging.level sets. Imports nothing of ours."""

from __future__ import annotations

import logging
import os

VARIABLE = "HEADRACE_LOG_LEVEL"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def level() -> int:
    """Of the environment, info where it says nothing. Raises ValueError for another word."""
    word = os.environ.get(VARIABLE, "info").lower()
    if word not in LEVELS:
        raise ValueError(f"{VARIABLE}={word}: no level; use one of {', '.join(LEVELS)}")
    return LEVELS[word]

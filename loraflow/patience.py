"""Waiting for another thread so that an interrupt is noticed.

One that comes just before a wait does not end it: Python hands it over between two instructions, and the wait is one.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from typing import Any

__all__ = ["over_within"]

_NOTICED = 0.1
"""Seconds after which an interrupt is noticed at the latest."""


def over_within(work: Future[Any], patience: float | None = None) -> bool:
    """Wait until ``work``, under way in another thread, has returned or raised; whether it has.

    Args:
        work: It.
        patience: Seconds to wait at most; without end where None.
    """
    until = None if patience is None else time.monotonic() + patience
    while not work.done():
        left = _NOTICED if until is None else until - time.monotonic()
        if left <= 0:
            return False
        wait([work], min(_NOTICED, left))
    return True

"""Waiting for another thread so that an interrupt is noticed.

One that comes just before a wait does not end it: Python hands it over between two instructions, and the wait is one.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["outcome_of"]

T = TypeVar("T")
_NOTICED = 0.1
"""Seconds after which an interrupt is noticed at the latest."""


def outcome_of(work: Future[T], patience: float | None = None) -> T:
    """What ``work`` returns, once it is over; raises what it raised.

    Args:
        work: Under way in another thread.
        patience: Seconds to wait at most; without end where None.

    Raises:
        TimeoutError: It takes longer. It goes on.
    """
    until = None if patience is None else time.monotonic() + patience
    while not work.done():
        left = _NOTICED if until is None else until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        wait([work], min(_NOTICED, left))
    return work.result()

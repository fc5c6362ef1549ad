"""`Behind`: one delivery at a time, behind the training step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from loraflow.errors import SyncTimeout
from loraflow.patience import over_within

__all__ = ["Behind"]

T = TypeVar("T")


class Behind(Generic[T]):
    """Deliveries in a thread of their own, which there is from the first one to `close`.

    Args:
        patience: Seconds that `take` waits for one.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[T] | None = None

    @property
    def pending(self) -> bool:
        """Whether a delivery was begun, and its outcome not taken."""
        return self._pending is not None

    @property
    def over(self) -> bool:
        """Whether there is an outcome to take without a wait."""
        return self._pending is not None and self._pending.done()

    def begin(self, delivery: Callable[[], T]) -> None:
        """Start ``delivery``; the outcome of the one before was taken."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="loraflow-sync")
        self._pending = self._thread.submit(delivery)

    def take(self) -> T | None:
        """The outcome of the delivery that was begun, once it is there; None where there is none to take.

        Raises:
            SyncTimeout: It takes too long. It stays pending: what it may yet bring about is not to be missed.
        """
        pending = self._pending
        if pending is None:
            return None
        if not over_within(pending, self._patience):
            raise SyncTimeout(f"the delivery behind the training step took more than {self._patience:.0f} s")
        self._pending = None
        return pending.result()

    def close(self) -> T | None:
        """End the thread, once it is done; returns the outcome that nobody took."""
        thread, self._thread = self._thread, None
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                over_within(pending)
        finally:
            if thread is not None:
                thread.shutdown(wait=True)
        return None if pending is None else pending.result()

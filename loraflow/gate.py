"""Where rollouts enter and leave: which versions are in use, and when what is served may change."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loraflow.errors import LoraflowError, SyncTimeout
from loraflow.policy import Policy

__all__ = ["Gate"]


class Gate:
    """Rollouts pass it from any thread.

    Args:
        patience: Seconds that a rollout waits while it is closed.

    Attributes:
        lock: Hold it to change what a rollout that enters is given.
    """

    def __init__(self, patience: float) -> None:
        self.lock = threading.Condition()
        self._patience = patience
        self._inside: Counter[Policy] = Counter()
        self._closed = False

    @contextmanager
    def rollout(self, current: Callable[[], Policy]) -> Iterator[Policy]:
        """Inside, ``current()`` is in use, and the gate cannot be closed.

        Raises:
            SyncTimeout: It stayed closed for too long.
        """
        with self.lock:
            if not self.lock.wait_for(lambda: not self._closed, self._patience):
                raise SyncTimeout(f"another thread's delivery of merged weights took more than {self._patience:.0f} s")
            policy = current()
            self._inside[policy] += 1
        try:
            yield policy
        finally:
            with self.lock:
                self._inside[policy] -= 1
                self._inside += Counter()  # keeps what is above zero

    def in_use(self) -> frozenset[Policy]:
        """The versions that rollouts are inside with."""
        with self.lock:
            return frozenset(self._inside)

    def close(self) -> None:
        """Rollouts wait from now on: merged weights serve every version under one name, and none may see two of them.

        Raises:
            LoraflowError: One is under way.
        """
        with self.lock:
            if self._inside:
                raise LoraflowError(
                    "a rollout is under way, and merged weights would change in the middle of it",
                    hint="sync after the rollout, or serve adapters (transport='adapter'), whose versions have names",
                )
            self._closed = True

    def open(self) -> None:
        """Let the waiting ones in; nothing where it is open."""
        with self.lock:
            self._closed = False
            self.lock.notify_all()

"""`GroupFlag`: payloads of a broadcast group that are announced before they are there.

Whoever waits inside a broadcast cannot be called off without an end of the group. So the call for a payload carries a
serial, and its workers wait for a word on that first, in the store that the group was joined through: it is there, or
it will not come. Workers wait for a moment only; one that gives up says so in the same place. The first word counts,
for the trainer and for all workers: never does one wait in a broadcast that another one has given up on.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed

from loraflow_server.beside import beside
from loraflow_server.errors import PluginError

_c10d: Any = torch.distributed  # bindings that its stubs leave out

__all__ = ["OFF", "PATIENCE", "SPARED", "THERE", "GroupFlag", "Pulse", "forget", "say"]

PATIENCE = 0.25
"""Seconds that a worker, and with it the engine, waits for a payload that was announced."""
_GRACE, _POLL = 0.25, 1e-4
"""Seconds beyond that for the store's answer: that of a trainer which is stopped never comes."""
THERE, OFF, _LATE, _NOTHING = "there", "off", "late", "nothing"
SPARED = frozenset({"late", "called_off"})
"""Codes of errors that leave a group as it was: nobody has begun to receive."""


def say(store: Any, serial: int, word: str) -> str:
    """Say a word on what was announced as ``serial``; the one that counts, which may be another.

    Args:
        store: The group's, a ``torch.distributed.TCPStore``.
        serial: From 1 on; another one for each payload.
        word: A trainer's `THERE` or `OFF`.
    """
    return bytes(store.compare_set(_key(serial), "", word)).decode()


def forget(store: Any, serial: int) -> None:
    """Remove what was said of ``serial``, which nobody waits for any more."""
    store.delete_key(_key(serial))


class GroupFlag:
    """The end of those who wait.

    Args:
        store: A connection to the group's store, used for nothing else meanwhile.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def connected(cls, address: str, port: int, timeout: float) -> GroupFlag:
        """On a connection of its own; `RuntimeError` where there is none within ``timeout`` seconds."""
        limit = timedelta(seconds=timeout)
        return cls(_c10d.TCPStore(address, port, None, is_master=False, timeout=limit, wait_for_workers=False))

    def wait(self, serial: int) -> None:
        """Wait until the payload is there; it is to be received then.

        Raises:
            PluginError: ``late`` (409): it did not come in time, and will not. ``called_off``. ``broadcast_failed``
                (502): the trainer has gone, or is stopped.
        """
        try:
            word = self._heard(serial).result(PATIENCE + _GRACE)
        except Exception as error:
            raise _gone(error) from error
        _judge(word)

    async def arrival(self, serial: int) -> None:
        """`wait`, in an event loop."""
        try:
            word = await asyncio.wait_for(asyncio.wrap_future(self._heard(serial)), PATIENCE + _GRACE)
        except Exception as error:
            raise _gone(error) from error
        _judge(word)

    def _heard(self, serial: int) -> Future[str]:
        """In a thread: the store of a trainer that is stopped answers nothing, for ever."""
        store, deadline = self._store, time.monotonic() + PATIENCE

        def hear() -> str:
            # Looked for, not waited for: torch does not wake who waits for what is compared and set, and a connection
            # whose wait is cancelled as the word comes hangs.
            while (word := bytes(store.compare_set(_key(serial), _NOTHING, _NOTHING)).decode()) == _NOTHING:
                if time.monotonic() > deadline:
                    return say(store, serial, _LATE)
                time.sleep(_POLL)
            return word

        return beside(hear, name="flag")


class Pulse:
    """Raises where a trainer's store has gone; never waits for one that does not answer.

    Args:
        store: It.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asked: Future[Any] | None = None

    def __call__(self) -> None:
        """Look at what the last call asked, and ask again."""
        if self._asked is not None and not self._asked.done():
            return
        asked, self._asked = self._asked, beside(lambda: self._store.check(["alive"]), name="pulse")
        if asked is not None:
            asked.result(0)


def _key(serial: int) -> str:
    return f"loraflow/payload/{serial}"


def _judge(word: str) -> None:
    if word == OFF:
        raise PluginError("called_off", "the version was called off before its payload came")
    if word != THERE:
        raise PluginError("late", f"the payload did not come within {PATIENCE:g} s", status=409)


def _gone(error: Exception) -> PluginError:
    what = "it does not answer" if isinstance(error, TimeoutError) else str(error)
    return PluginError("broadcast_failed", f"the trainer has gone, or is stopped: {what}", status=502)

"""`Knock`: servers that idle are woken while the trainer takes its snapshot.

Between two syncs the processes of a server may sleep, and the first call after that pays for cold cores and caches. A
knock goes the way of the call that follows it, through the API server to every worker; nobody waits for its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loraflow.errors import LoraflowError
from loraflow.hotline import Hotline

if TYPE_CHECKING:
    from loraflow.server import VLLMServer

__all__ = ["Knock"]

_PATIENCE = 1.0
"""Seconds: a server that has not answered a knock by then has not answered the call behind it either."""


class Knock:
    """One knock at each of ``servers`` that knows what it is."""

    def __init__(self, servers: Sequence[VLLMServer]) -> None:
        self._answers: list[Callable[[], Any]] = []
        for server in servers:
            plugin = server.info.plugin
            if plugin is None or "wake" not in plugin.capabilities or not Hotline.serves(server.url):
                continue
            try:
                self._answers.append(server.begin("/loraflow/v1/wake", json={}, timeout=_PATIENCE))
            except LoraflowError:
                continue  # the call that follows will say why

    def settle(self) -> None:
        """Take the answers, which are there by now, so that the connections serve again."""
        for take in self._answers:
            try:
                take()
            except LoraflowError:
                continue
        self._answers.clear()

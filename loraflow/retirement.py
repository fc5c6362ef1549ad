"""Freeing the versions that nothing uses any more (rule 7), behind the training step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from loraflow.errors import LoraflowError
from loraflow.patience import over_within
from loraflow.policy import Policy
from loraflow.server import VLLMServer
from loraflow.store import Recovered
from loraflow.transports.base import Transport

__all__ = ["Retirement"]

_log = logging.getLogger(__name__)
_SWEEPS = 5
_HEAD_START = 0.02
"""Seconds that the caller has before an old version is freed: two threads share the interpreter."""


class Retirement:
    """The committed versions of a run, and the thread that frees the oldest of them.

    Args:
        transport: Its carrier.
        run_id: The run.
        retain: This many newest versions stay.
    """

    def __init__(self, transport: Transport, run_id: str, retain: int) -> None:
        self._transport = transport
        self._run_id = run_id
        self._retain = retain
        self._committed: list[Policy] = []
        self._sweeps = 0  # how many times more to look for names that should not be there
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loraflow-retire")
        self._running: Future[None] | None = None
        self._awaited = threading.Event()

    def adopt(self, found: Recovered, servers: Sequence[VLLMServer]) -> None:
        """Take over what an earlier process of this run left: versions of no use are freed now, the committed ones
        as newer ones follow them."""
        for policy in found.burnt:
            self._free(policy, servers)
        self._committed = [policy for policy in found.live if policy not in found.burnt]
        self.untidy()
        self._sweep(servers)

    def untidy(self) -> None:
        """A server may list a version that is none: its trainer was killed, or it answered nobody while it loaded."""
        self._sweeps = _SWEEPS

    def committed(self, policy: Policy, servers: Sequence[VLLMServer], in_use: Collection[Policy]) -> None:
        """A new version is in force: free the old ones on ``servers``, behind the caller, except those ``in_use``."""
        self._committed.append(policy)
        self._awaited.clear()
        self._running = self._thread.submit(self._retire, tuple(servers), frozenset(in_use))

    def settle(self) -> None:
        """Wait until that is done."""
        running, self._running = self._running, None
        self._awaited.set()
        if running is not None:
            over_within(running)  # bounded by the timeouts of its calls
            running.result()

    def close(self) -> None:
        """End the thread."""
        self._awaited.set()
        self._thread.shutdown(wait=True)

    def _retire(self, servers: Sequence[VLLMServer], in_use: Collection[Policy]) -> None:
        self._awaited.wait(_HEAD_START)
        while len(self._committed) > self._retain and self._committed[0] not in in_use:
            if not self._free(self._committed[0], servers):
                break  # the store fails: the next version tries again
            self._committed.pop(0)
        self._sweep(servers)

    def _free(self, policy: Policy, servers: Sequence[VLLMServer]) -> bool:
        try:
            self._transport.retire(policy, servers)
        except LoraflowError:
            _log.exception("%s could not be retired now", policy)
            return False
        return True

    def _sweep(self, servers: Sequence[VLLMServer]) -> None:
        if not self._sweeps or self._transport.kind != "adapter":
            return
        self._sweeps -= 1
        for server in servers:
            try:
                named = [policy for model in server.models() if model.parent and (policy := Policy.parse(model.id))]
                for policy in named:
                    if policy.run_id == self._run_id and policy not in self._committed:
                        _log.warning("%s: %s was left there, unloading it", server.url, policy)
                        server.unload_adapter(policy.name)
            except LoraflowError as error:
                _log.warning("%s: could not look for names that were left there: %s", server.url, error)

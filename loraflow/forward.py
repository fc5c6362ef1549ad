"""`Forward`: the trainer's own forward for a canary, made while the version that it is of is on its way.

The forward stays in the thread that trains, where its autocast, streams and hooks are; the delivery gets another one,
and waits for the forward where it needs it: for the first comparison, once the server has answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from loraflow.adapter import AdapterSnapshot
from loraflow.errors import LoraflowError
from loraflow.patience import over_within
from loraflow.plan import Plan
from loraflow.records import SyncRecord
from loraflow.verify import Expected, Prover

__all__ = ["Forward", "Wanted", "deliver_with", "forward_for", "unless_failed"]

Outcome: TypeAlias = tuple[SyncRecord, Exception | None]


class Forward:
    """One forward, not made yet; for one process, since nothing orders it among collectives of a delivery.

    Args:
        work: Makes it.

    Attributes:
        ms: Milliseconds that it took; 0 before.
        wait_ms: The longest that `timed` waited for it.
    """

    def __init__(self, work: Callable[[], Expected]) -> None:
        self.ms = 0.0
        self.wait_ms = 0.0
        self._work = work
        self._made: Future[Expected] = Future()
        self._broken_off = False

    def beside(self, delivery: Callable[[], Outcome]) -> Outcome:
        """Run ``delivery`` in a thread, and the forward here; returns once both are over.

        ``delivery`` asks for `result`: where the forward fails, it fails. Where this is interrupted, asking fails from
        then on, and the interrupt is raised once ``delivery`` has cleaned up.

        Returns:
            What ``delivery`` returned; the forward's error, where it has one, in the place of its own.
        """
        with ThreadPoolExecutor(1, "loraflow-delivery") as thread:
            try:
                moving = thread.submit(delivery)
                with suppress(Exception):  # told in what is returned
                    self._make()
                over_within(moving)
                record, error = moving.result()
            except BaseException as interrupt:
                self._broken_off = True
                if not self._made.done():
                    self._made.set_exception(interrupt)
                raise
        return record, self.error or error

    def result(self) -> Expected:
        """The forward, once it is made; raises its error, or `LoraflowError` where the sync was interrupted."""
        made = self._made.result()
        if self._broken_off:
            raise LoraflowError("the sync was interrupted")
        return made

    def timed(self) -> Expected:
        """`result`, the wait for it noted."""
        began = time.perf_counter()
        made = self.result()
        self.wait_ms = max(self.wait_ms, (time.perf_counter() - began) * 1e3)
        return made

    @property
    def error(self) -> Exception | None:
        """Why it failed; None where it did not, or is not over."""
        found = self._made.exception() if self._made.done() else None
        return found if isinstance(found, Exception) else None

    def _make(self) -> None:
        began = time.perf_counter()
        try:
            made = self._work()
        except BaseException as error:
            self.ms = (time.perf_counter() - began) * 1e3
            self._made.set_exception(error)
            raise
        self.ms = (time.perf_counter() - began) * 1e3
        self._made.set_result(made)


Wanted: TypeAlias = Expected | Forward | None
"""What a version's canary is compared with; None where it has none."""


def forward_for(prover: Prover, plan: Plan) -> Expected | Forward:
    """The trainer's forward on the probe: made now, or with the delivery where that is safe. Collective.

    Safe is one process, which waits for the delivery (with ``overlap`` it trains on meanwhile), and a carrier that
    does not read the model, only the snapshot, which is whole on the host before the two begin.
    """
    if prover.ranks.world_size == 1 and not prover.config.overlap and plan.carrier == "filesystem":
        return Forward(prover.expect)
    return prover.ranks.together(prover.expect)


def deliver_with(expected: Wanted, snapshot: AdapterSnapshot, delivery: Callable[[], Outcome]) -> Outcome:
    """Run ``delivery``, and the forward of ``expected`` beside it where that is to be made.

    The record then gets the phases ``host`` and ``forward``, in milliseconds; the latter runs beside the others.
    """
    if not isinstance(expected, Forward):
        return delivery()
    began = time.perf_counter()
    _ = snapshot.finite  # looked at before the forward has the device
    snapshot.host()  # off the device in this thread, in the order of its stream
    host_ms = (time.perf_counter() - began) * 1e3
    record, error = expected.beside(delivery)
    return replace(record, phases_ms={"host": host_ms, "forward": expected.ms, **record.phases_ms}), error


def unless_failed(expected: Wanted, record: SyncRecord) -> SyncRecord:
    """``record``; raises what the forward raised, which no server's failing excuses, whatever ``on_failure`` says."""
    if isinstance(expected, Forward) and expected.error is not None:
        raise expected.error
    return record

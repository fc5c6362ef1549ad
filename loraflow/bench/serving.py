"""The effect on generation: tokens per second of each way of serving, without syncs and with one each second.

A host's own speed may drift by more than what is looked for, so what is compared is measured in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from loraflow.bench.compare import SYNCING, TWO_SLOTS, UNTOUCHED
from loraflow.bench.generation import Arm, Rate, generation_rates
from loraflow.bench.presets import draw_policy, nudge_policy
from loraflow.bench.scenarios import Failure, LoraflowWay, Sample
from loraflow.bench.session import Session
from loraflow.bench.streams import Asked
from loraflow.costs import BASE, FOLDED, SLOT
from loraflow.errors import LoraflowError
from loraflow.server import VLLMServer

__all__ = ["Serving"]

_TWO_SLOTS_EACH = 3


@dataclass
class Serving:
    """Measures on the servers of a session, and keeps what it saw.

    Requests that run while a sync happens end on the version that they began with, so that batches hold two versions
    for a while. What that alone costs is measured too: half of the requests on each of two versions, without a sync.

    Attributes:
        session: The run.
        window: Seconds of a window.
        streams: Numbers of requests under way to try without syncs.
        sync_streams: The number to try with syncs.
        tokens: Range of tokens per request.
        turns: How often arms of a comparison with syncs get their turn; two versions at once in each third.
        settle: Seconds before each window.
        rates: Every window.
        samples: Every sync: alone on the server, and while it generates.
        failures: What failed.
    """

    session: Session
    window: float
    streams: tuple[int, ...]
    sync_streams: int
    tokens: tuple[int, int]
    turns: int = 2
    settle: float = 2.0
    rates: list[Rate] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    _warm: set[str] = field(default_factory=set)

    def slots(self) -> None:
        """The LoRA-enabled server: its base, and a policy in a slot."""
        self._guarded("generation from slots", lambda: self._before_and_after("lora", "direct", BASE, SLOT))

    def folded(self) -> None:
        """The plain server: before a fold, and with one."""
        what = "generation from folded weights"
        self._guarded(what, lambda: self._before_and_after("plain", "fold", UNTOUCHED, FOLDED))

    def slots_syncing(self) -> None:
        """A policy in a slot, without syncs and with one each second, in turns."""
        self._guarded("generation from slots with syncs", lambda: self._with_syncs("lora", "direct", SLOT))

    def folded_syncing(self) -> None:
        """Folded weights, without syncs and with one each second, in turns."""
        self._guarded("generation from folded weights with syncs", lambda: self._with_syncs("plain", "fold", FOLDED))

    # ---------------------------------------------------------------- parts

    def _before_and_after(self, kind: str, carrier: str, before: str, after: str) -> None:
        url = self.session.server(kind)
        base = VLLMServer(url).info.model
        for streams in self.streams:
            self._measure(url, [Arm(before, lambda: [(base, {})])], streams)
        with self._opened(carrier, url) as way:
            for streams in self.streams:
                self._measure(url, [Arm(after, _policy_of(way))], streams)

    def _with_syncs(self, kind: str, carrier: str, served: str) -> None:
        url = self.session.server(kind)
        with self._opened(carrier, url) as way:
            self._idle(way)
            target = _policy_of(way)
            arms = [Arm(served, target), Arm(f"{served}, {SYNCING}", target, self._syncs(way))]
            two = Arm(TWO_SLOTS, lambda: [(r.policy, dict[str, Any]()) for r in way.started.records[-2:]])
            turns: list[Arm] = []
            for turn in range(self.turns):
                now = [*arms, two] if carrier == "direct" and turn % _TWO_SLOTS_EACH == 0 else arms
                turns += now if turn % 2 == 0 else now[::-1]
            self._measure(url, turns, self.sync_streams)

    @contextmanager
    def _opened(self, carrier: str, url: str) -> Iterator[LoraflowWay]:
        way = self.session.way(carrier, url)
        if not isinstance(way, LoraflowWay):
            raise LoraflowError(f"{carrier} is not a way of loraflow's")
        way.open()
        try:
            yield way
        finally:
            way.close()

    def _measure(self, url: str, arms: Sequence[Arm], streams: int) -> None:
        vocabulary = self.session.settings.preset.vocabulary
        warm = [] if url in self._warm else [arms[0]]  # a server's first steps compile what later ones use
        self._warm.add(url)
        windows = generation_rates(
            url,
            [*warm, *arms],
            streams=streams,
            seconds=self.window,
            vocabulary=vocabulary,
            tokens=self.tokens,
            settle=self.settle,
        )
        for found in islice(windows, len(warm), None):
            self.rates.append(found)
            told = f"{found.tokens_per_second:,.0f} tokens/s, {found.syncs} syncs, {found.failed} failed"
            self.session.tell(f"{found.arm}, {streams} streams: {told}")

    def _idle(self, way: LoraflowWay) -> None:
        for step in range(1, self.session.settings.block + 2):
            draw_policy(self.session.model, step)
            self.samples.append(Sample(way.name, 0, step == 1, way.sync(step)))
            time.sleep(self.session.settings.pause)

    def _syncs(self, way: LoraflowWay) -> Callable[[], None]:
        steps = iter(range(10_000, 1_000_000))

        def sync() -> None:
            step = next(steps)
            nudge_policy(self.session.model, step)
            self.samples.append(Sample(f"{way.name}, while generating", 0, False, way.sync(step)))

        return sync

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told in the report; the other parts go on
            self.failures.append(Failure.of(what, error, self.session.log_tails()))
            self.session.tell(f"{what}: FAILED {self.failures[-1].error[:300]}")


def _policy_of(way: LoraflowWay) -> Callable[[], Asked]:
    """What requests for the newest policy ask for."""
    manager = way.started

    def target() -> Asked:
        salt = {"cache_salt": str(manager.policy)} if way.carrier == "fold" else {}
        return [(manager.policy_name, salt)]

    return target

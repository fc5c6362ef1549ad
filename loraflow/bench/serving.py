"""The effect on generation: tokens per second of each way of serving, without syncs and with one each second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from loraflow.bench.generation import BreakEven, Rate, break_even, generation_rate
from loraflow.bench.presets import draw_policy
from loraflow.bench.report import Summary
from loraflow.bench.scenarios import Failure, LoraflowWay, Sample
from loraflow.bench.session import Session
from loraflow.bench.streams import Asked
from loraflow.errors import LoraflowError
from loraflow.server import VLLMServer

__all__ = ["BASE", "FOLDED", "SLOT", "TWO_SLOTS", "UNTOUCHED", "Serving", "break_evens", "mean_rate", "ratios"]

BASE, SLOT, TWO_SLOTS = "base, LoRA server", "slot", "two versions at once, no syncs"
UNTOUCHED, FOLDED = "untouched, plain server", "folded"
SYNCING, DRAWING = "a sync each second", "the policy drawn anew each second"


@dataclass
class Serving:
    """Measures on the servers of a session, and keeps what it saw.

    What a sync each second costs is measured in its parts too, once:

    - two versions at once: requests that run while a sync happens end on the version that they began with, so that
      batches hold two for a while; here half of the requests are on each of two, without a sync;
    - the policy drawn anew each second: the trainer's own work beside the server;
    - the base, with a sync each second: the calls alone, of which no request takes notice.

    Attributes:
        session: The run.
        window: Seconds per measurement.
        streams: Numbers of requests under way to try; the first is measured with syncs too.
        tokens: Range of tokens per request.
        rates: Every window.
        samples: Every sync: alone on the server, and while it generates.
        failures: What failed.
    """

    session: Session
    window: float
    streams: tuple[int, ...]
    tokens: tuple[int, int]
    rates: list[Rate] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def slots(self) -> None:
        """The LoRA-enabled server: its base, and a policy in a slot."""
        self._guarded("generation from slots", lambda: self._measure("lora", "direct", BASE, SLOT))

    def merged(self) -> None:
        """The plain server: before a fold, and with one."""
        self._guarded("generation from folded weights", lambda: self._measure("plain", "fold", UNTOUCHED, FOLDED))

    def _measure(self, kind: str, carrier: str, before: str, after: str) -> None:
        url = self.session.server(kind)
        base = VLLMServer(url).info.model
        way = self.session.way(carrier, url)
        if not isinstance(way, LoraflowWay):
            raise LoraflowError(f"{carrier} is not a way of loraflow's")
        for streams in self.streams:
            self._rate(url, before, lambda: [(base, {})], streams)
        way.open()
        try:
            manager = way.started
            self._idle(way)

            def target() -> Asked:
                salt = {"cache_salt": str(manager.policy)} if carrier == "fold" else {}
                return [(manager.policy_name, salt)]

            for streams in self.streams:
                self._rate(url, after, target, streams)
            syncs = self._syncs(way)
            if carrier == "direct" and not any(rate.arm == TWO_SLOTS for rate in self.rates):
                versions = [(record.policy, dict[str, Any]()) for record in manager.records[-2:]]
                self._rate(url, TWO_SLOTS, lambda: versions, self.streams[0])
                draws = partial(draw_policy, self.session.model, 1)
                self._rate(url, f"{after}, {DRAWING}", target, self.streams[0], every=1.0, sync=draws)
                self._rate(url, f"{before}, {SYNCING}", lambda: [(base, {})], self.streams[0], every=1.0, sync=syncs)
            for _ in range(2):  # with, without, with, without: the machine's own drift is in both
                self._rate(url, f"{after}, {SYNCING}", target, self.streams[0], every=1.0, sync=syncs)
                self._rate(url, after, target, self.streams[0])
        finally:
            way.close()

    def _rate(self, url: str, arm: str, target: Callable[[], Any], streams: int, **more: Any) -> None:
        vocabulary = self.session.settings.preset.vocabulary
        found = generation_rate(
            url, arm, target, streams=streams, seconds=self.window, vocabulary=vocabulary, tokens=self.tokens, **more
        )
        self.rates.append(found)
        told = f"{found.tokens_per_second:,.0f} tokens/s, {found.syncs} syncs, {found.failed} failed"
        self.session.tell(f"{arm}, {streams} streams: {told}")

    def _idle(self, way: LoraflowWay) -> None:
        for step in range(1, self.session.settings.block + 2):
            draw_policy(self.session.model, step)
            self.samples.append(Sample(way.name, 0, step == 1, way.sync(step)))
            time.sleep(self.session.settings.pause)

    def _syncs(self, way: LoraflowWay) -> Callable[[], None]:
        steps = iter(range(10_000, 1_000_000))

        def sync() -> None:
            step = next(steps)
            draw_policy(self.session.model, step)
            self.samples.append(Sample(f"{way.name}, while generating", 0, False, way.sync(step)))

        return sync

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told in the report; the other server's part goes on
            self.failures.append(Failure.of(what, error, self.session.log_tails()))
            self.session.tell(f"{what}: FAILED {self.failures[-1].error[:300]}")


def mean_rate(rates: Sequence[Rate], arm: str, streams: int) -> float | None:
    """Mean tokens per second of an arm over its windows; None where it was not measured."""
    found = [rate.tokens_per_second for rate in rates if rate.arm == arm and rate.streams == streams]
    return sum(found) / len(found) if found else None


def ratios(rates: Sequence[Rate]) -> dict[str, float]:
    """What the report compares: with syncs against without, folded against slot, and each against what came before."""
    pairs = (
        (f"{SLOT}, {SYNCING}", SLOT),
        (TWO_SLOTS, SLOT),
        (f"{SLOT}, {DRAWING}", SLOT),
        (f"{BASE}, {SYNCING}", BASE),
        (f"{FOLDED}, {SYNCING}", FOLDED),
        (FOLDED, SLOT),
        (FOLDED, UNTOUCHED),
        (SLOT, BASE),
    )
    found = {}
    for streams in sorted({rate.streams for rate in rates}):
        for above, below in pairs:
            one, other = mean_rate(rates, above, streams), mean_rate(rates, below, streams)
            if one and other:
                found[f"{streams} streams: ({above}) / ({below})"] = one / other
    return found


def break_evens(summary: Sequence[Summary], rates: Sequence[Rate]) -> tuple[BreakEven, ...]:
    """From which rollout length on fold is better than direct, for every number of streams that was measured."""
    p50 = {item.way: item.p50_ms for item in summary}
    found = []
    for streams in sorted({rate.streams for rate in rates}):
        slot, folded = mean_rate(rates, SLOT, streams), mean_rate(rates, FOLDED, streams)
        if slot and folded and {"direct", "fold"} <= p50.keys():
            found.append(
                break_even(
                    adapter_ms=p50["direct"],
                    merged_ms=p50["fold"],
                    adapter_rate=slot,
                    merged_rate=folded,
                    streams=streams,
                    adapter="direct",
                    merged="fold",
                )
            )
    return tuple(found)

"""What windows of generation say of each other, how surely, and the rollout length from which merging pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraflow.bench.generation import Rate
from loraflow.bench.summary import Summary
from loraflow.costs import BASE, FOLDED, SLOT

__all__ = [
    "SYNCING",
    "TWO_SLOTS",
    "UNTOUCHED",
    "BreakEven",
    "Comparison",
    "Pause",
    "break_even",
    "break_evens",
    "comparisons",
    "mean_rate",
    "pauses",
]

TWO_SLOTS = "two versions at once, no syncs"
UNTOUCHED = "untouched, plain server"
SYNCING = "a sync each second"

_PAIRS = (
    (f"{SLOT}, {SYNCING}", SLOT),
    (TWO_SLOTS, SLOT),
    (f"{FOLDED}, {SYNCING}", FOLDED),
    (FOLDED, SLOT),
    (FOLDED, UNTOUCHED),
    (SLOT, BASE),
)
_FEWEST = 3


def mean_rate(rates: Sequence[Rate], arm: str, streams: int) -> float | None:
    """Mean tokens per second of an arm over its windows; None where it was not measured."""
    found = [rate.tokens_per_second for rate in _of(rates, arm, streams)]
    return sum(found) / len(found) if found else None


def _of(rates: Sequence[Rate], arm: str, streams: int) -> list[Rate]:
    return [rate for rate in rates if rate.arm == arm and rate.streams == streams]


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of one arm over another's, from pairs of windows that lie near each other in time.

    Attributes:
        above: One arm.
        below: The other.
        streams: Requests under way.
        ratio: Mean of the first over mean of the second.
        low: Lower end of the ratio's 95 % interval: bootstrap over the pairs, percentile method (Efron and Tibshirani,
            An Introduction to the Bootstrap, 1993). None below three pairs.
        high: Its upper end.
        pairs: How many pairs.
    """

    above: str
    below: str
    streams: int
    ratio: float
    low: float | None
    high: float | None
    pairs: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.3f} ({self.pairs} windows each: too few to say how sure)"
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs of windows)"


def comparisons(rates: Sequence[Rate]) -> tuple[Comparison, ...]:
    """With syncs against without, folded against slot, and each against what came before."""
    found = []
    for streams in sorted({rate.streams for rate in rates}):
        for above, below in _PAIRS:
            one, other = _of(rates, above, streams), _of(rates, below, streams)
            if one and other:
                found.append(_compare(above, below, streams, one, other))
    return tuple(found)


def _compare(above: str, below: str, streams: int, one: list[Rate], other: list[Rate]) -> Comparison:
    fewer, more = (one, list(other)) if len(one) <= len(other) else (other, list(one))
    nearest = []
    for rate in fewer:
        nearest.append(min(more, key=lambda found: abs(found.began - rate.began)))
        more.remove(nearest[-1])
    tops, bottoms = (fewer, nearest) if fewer is one else (nearest, fewer)
    top = np.array([rate.tokens_per_second for rate in tops])
    bottom = np.array([rate.tokens_per_second for rate in bottoms])
    low = high = None
    if len(top) >= _FEWEST:
        drawn = _drawn(len(top))
        low, high = (float(end) for end in np.quantile(top[drawn].sum(1) / bottom[drawn].sum(1), (0.025, 0.975)))
    return Comparison(above, below, streams, float(top.sum() / bottom.sum()), low, high, len(top))


def _drawn(count: int) -> np.ndarray:
    """Indices of bootstrap samples, one row each."""
    return np.random.default_rng(0).integers(count, size=(10_000, count))


@dataclass(frozen=True)
class Pause:
    """What one sync takes from generation.

    Attributes:
        arm: What was served.
        streams: Requests under way.
        ms: Mean over the syncs, see `loraflow.bench.generation.lost_seconds`; in an arm without syncs what is lost by
            itself, which should be nothing.
        low: Lower end of its 95 % interval, as in `Comparison`.
        high: Its upper end.
        syncs: How many.
    """

    arm: str
    streams: int
    ms: float
    low: float
    high: float
    syncs: int

    def __str__(self) -> str:
        return f"{self.ms:.1f} ms ({self.low:.1f} to {self.high:.1f}, {self.syncs} times)"


def pauses(rates: Sequence[Rate]) -> tuple[Pause, ...]:
    """Of every arm that was measured with syncs, and of those without them beside it."""
    found = []
    for streams in sorted({rate.streams for rate in rates if rate.syncs}):
        for arm in dict.fromkeys(rate.arm for rate in rates if rate.streams == streams):
            lost = np.array([ms for rate in _of(rates, arm, streams) for ms in rate.lost_ms])
            if len(lost) >= _FEWEST:
                low, high = (float(end) for end in np.quantile(lost[_drawn(len(lost))].mean(1), (0.025, 0.975)))
                found.append(Pause(arm, streams, float(lost.mean()), low, high, len(lost)))
    return tuple(found)


@dataclass(frozen=True)
class BreakEven:
    """Which way is better for rollouts of which length.

    Attributes:
        streams: Sequences generated per sync, at once.
        tokens: Tokens per sequence at which both take the same time in all; 0 where the merged way is never slower,
            None where the adapter way never is.
        sentence: The same, in words.
    """

    streams: int
    tokens: float | None
    sentence: str


def break_even(
    *,
    adapter_ms: float,
    merged_ms: float,
    adapter_rate: float,
    merged_rate: float,
    streams: int,
    adapter: str,
    merged: str,
) -> BreakEven:
    """Where ``sync + streams · length / rate`` of both ways are equal.

    Args:
        adapter_ms: One sync of the adapter way.
        merged_ms: One sync of the merged way.
        adapter_rate: Tokens per second over all streams, served from a slot.
        merged_rate: The same, served merged.
        streams: Sequences per sync.
        adapter: Name of the adapter way.
        merged: Name of the merged way.
    """
    saved_per_token = streams * (1 / adapter_rate - 1 / merged_rate) * 1e3
    dearer = merged_ms - adapter_ms
    if dearer <= 0 and saved_per_token >= 0:
        tokens: float | None = 0.0
        sentence = f"{merged} is better at any length: its sync is no slower, nor its generation"
    elif dearer > 0 and saved_per_token <= 0:
        tokens = None
        sentence = f"{adapter} is better at any length: its sync is faster, and its generation no slower"
    else:
        tokens = dearer / saved_per_token
        better_long, better_short = (merged, adapter) if saved_per_token > 0 else (adapter, merged)
        sentence = f"{better_long} is better from {tokens:.1f} tokens per rollout on, {better_short} below"
    return BreakEven(streams, tokens, sentence)


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

"""Tokens per second of N streams, with and without syncs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loraflow.bench.streams import Asked, Streams
from loraflow.errors import LoraflowError
from loraflow.server import VLLMServer

__all__ = ["Arm", "Rate", "generation_rates", "generation_tokens", "lost_seconds"]

_COUNTER = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})?\s+([0-9.eE+]+)\s*$", re.MULTILINE)
_FEWEST_TOKENS = 8


@dataclass(frozen=True)
class Rate:
    """One measured window.

    Attributes:
        arm: What was served: ``base``, ``slot``, ``folded``, …
        streams: Requests under way at once.
        tokens: Tokens generated in the window.
        seconds: Length of the window.
        syncs: Syncs inside of it.
        failed: Requests that failed.
        began: When the window began, in seconds since 1970.
        lost_ms: What each sync took from generation, see `lost_seconds`; in a window without syncs what is lost by
            itself at such a time. Empty where nothing could be seen.
    """

    arm: str
    streams: int
    tokens: int
    seconds: float
    syncs: int = 0
    failed: int = 0
    began: float = 0.0
    lost_ms: tuple[float, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """The rate."""
        return self.tokens / self.seconds


def generation_tokens(metrics: str) -> int:
    """The server's counter of generated tokens, over all engines, from the text of ``/metrics``."""
    found = _COUNTER.findall(metrics)
    if not found:
        raise LoraflowError("the server counts no generated tokens in /metrics")
    return int(sum(float(value) for value in found))


@dataclass(frozen=True)
class Arm:
    """What is measured beside others.

    Attributes:
        name: As `Rate.arm`.
        target: What requests ask for; asked at the start, and after each sync.
        sync: Called once a second, by the thread that measures; None without syncs.
    """

    name: str
    target: Callable[[], Asked]
    sync: Callable[[], object] | None = None


def generation_rates(
    url: str,
    arms: Iterable[Arm],
    *,
    streams: int,
    seconds: float,
    vocabulary: int,
    tokens: tuple[int, int] = (128, 256),
    settle: float = 2.0,
) -> Iterator[Rate]:
    """Keep ``streams`` requests under way, and count what the server generates, for one arm after another.

    The requests never stop in between, so that neighbours in time differ in their arm alone.

    Args:
        url: The server.
        arms: One window each, in this order.
        streams: Requests under way.
        seconds: Length of a window.
        vocabulary: Prompts are random ids below it, so that no prefix is cached.
        tokens: Each request asks for a number of tokens in this range, so that the streams do not beat in time.
        settle: Seconds before the window of an arm that follows another, that count for nothing: requests of the arm
            before end in it.

    Yields:
        Each window, once it has ended.
    """
    load = Streams.to(url, streams=streams, vocabulary=vocabulary, tokens=tokens)
    with VLLMServer(url) as watcher, load as requests:
        last = None
        for arm in arms:
            requests.ask(arm.target())
            if arm.name != last:
                _pass(settle, arm, requests)
                requests.ask(arm.target())  # what failed before does not count
            last = arm.name
            requests.seen()
            before, began, clock = _count(watcher), time.perf_counter(), time.time()
            times, failed = _pass(seconds, arm, requests)
            after, ended = _count(watcher), time.perf_counter()
            failed += requests.ask(arm.target())
            seen = requests.seen()
            found = [lost_seconds(at, seen) for at in times]
            lost = tuple(round(1e3 * value, 3) for value in found if value is not None)
            syncs = len(times) if arm.sync is not None else 0
            yield Rate(arm.name, streams, after - before, ended - began, syncs, failed, clock, lost)


def lost_seconds(at: float, seen: Sequence[Sequence[float]], width: float = 0.2, beside: float = 0.4) -> float | None:
    """Generation that was lost in ``width`` seconds from ``at`` on, against the time just before and after.

    All streams of an engine advance together, so the tokens of one tell of all. A host whose own speed drifts within
    seconds does not matter to it.

    Args:
        at: When, on the clock of ``seen``.
        seen: When tokens came, one sequence per request, in order.
        width: Seconds in which something may be lost.
        beside: Seconds before and after them that say how fast generation is otherwise.

    Returns:
        Seconds of generation; the mean over the requests that were under way all the time. None where none was.
    """
    end, found = at + width, list[float]()
    for times in seen:
        if len(times) < _FEWEST_TOKENS or times[0] > at or times[-1] < end:
            continue
        edges = [max(times[0], at - beside), at, end, min(times[-1], end + beside)]
        tokens = np.interp(edges, times, np.arange(len(times)))
        before, inside, after = np.diff(tokens)
        rate = (before + after) / (edges[1] - edges[0] + edges[3] - edges[2])
        if edges[3] - edges[0] >= 2 * width and rate > 0:
            found.append(width - float(inside / rate))
    return sum(found) / len(found) if found else None


def _pass(seconds: float, arm: Arm, requests: Streams) -> tuple[list[float], int]:
    """Let so many seconds go by, with the arm's syncs; when they began, or would have, and requests that failed."""
    began, failed, times = time.perf_counter(), 0, list[float]()
    for number in range(math.ceil(seconds - 0.5)):
        _sleep_until(began + number + 0.5)
        times.append(time.perf_counter())
        if arm.sync is not None:
            arm.sync()
            failed += requests.ask(arm.target())
    _sleep_until(began + seconds)
    return times, failed


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


def _count(server: VLLMServer) -> int:
    return generation_tokens(str(server.request("GET", "/metrics", retry=True)))

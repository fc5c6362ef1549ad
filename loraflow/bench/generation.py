"""Tokens per second of N streams, with and without syncs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from loraflow.bench.streams import Asked, Streams
from loraflow.errors import LoraflowError
from loraflow.server import VLLMServer

__all__ = ["Arm", "Rate", "generation_rates", "generation_tokens"]

_COUNTER = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})?\s+([0-9.eE+]+)\s*$", re.MULTILINE)


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
    """

    arm: str
    streams: int
    tokens: int
    seconds: float
    syncs: int = 0
    failed: int = 0
    began: float = 0.0

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
            before, began, clock = _count(watcher), time.perf_counter(), time.time()
            syncs, failed = _pass(seconds, arm, requests)
            after, ended = _count(watcher), time.perf_counter()
            failed += requests.ask(arm.target())
            yield Rate(arm.name, streams, after - before, ended - began, syncs, failed, clock)


def _pass(seconds: float, arm: Arm, requests: Streams) -> tuple[int, int]:
    """Let so many seconds go by, with the arm's syncs; how many there were, and requests that failed meanwhile."""
    began, failed = time.perf_counter(), 0
    syncs = round(seconds) if arm.sync is not None else 0
    for number in range(syncs):
        _sleep_until(began + number + 0.5)
        assert arm.sync is not None  # noqa: S101 - there are none without
        arm.sync()
        failed += requests.ask(arm.target())
    _sleep_until(began + seconds)
    return syncs, failed


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


def _count(server: VLLMServer) -> int:
    return generation_tokens(str(server.request("GET", "/metrics", retry=True)))

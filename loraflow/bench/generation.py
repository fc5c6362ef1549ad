"""Tokens per second of N streams, with and without syncs, and the rollout length from which merging pays."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from loraflow.bench.streams import Asked, Streams
from loraflow.errors import LoraflowError
from loraflow.server import VLLMServer

__all__ = ["BreakEven", "Rate", "break_even", "generation_rate", "generation_tokens"]

_COUNTER = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})?\s+([0-9.eE+]+)\s*$", re.MULTILINE)
Target = Callable[[], Asked]
"""What requests ask for now."""


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
    """

    arm: str
    streams: int
    tokens: int
    seconds: float
    syncs: int = 0
    failed: int = 0

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


def generation_rate(
    url: str,
    arm: str,
    target: Target,
    *,
    streams: int,
    seconds: float,
    vocabulary: int,
    tokens: tuple[int, int] = (128, 256),
    warm: float = 2.0,
    every: float | None = None,
    sync: Callable[[], object] | None = None,
) -> Rate:
    """Keep ``streams`` requests under way, and count what the server generates in a window.

    Args:
        url: The server.
        arm: Name for the result.
        target: Asked at the start, and after each sync.
        streams: Requests under way.
        seconds: Length of the window, after ``warm`` seconds.
        vocabulary: Prompts are random ids below it, so that no prefix is cached.
        tokens: Each request asks for a number of tokens in this range, so that the streams do not beat in time.
        warm: Seconds before the window.
        every: Seconds between calls of ``sync`` in the window.
        sync: What to do then, in this thread.
    """
    load = Streams.to(url, target(), streams=streams, vocabulary=vocabulary, tokens=tokens)
    with VLLMServer(url) as watcher, load as requests:
        time.sleep(warm)
        count = 0
        before, began = _count(watcher), time.perf_counter()
        while (left := began + seconds - time.perf_counter()) > 0:
            if sync is None or every is None:
                time.sleep(left)
                continue
            time.sleep(min(left, max(0.0, began + (count + 1) * every - time.perf_counter())))
            if began + seconds > time.perf_counter():
                sync()
                count += 1
                requests.ask(target())
        after, ended = _count(watcher), time.perf_counter()
    return Rate(arm, streams, after - before, ended - began, count, requests.failed)


def _count(server: VLLMServer) -> int:
    return generation_tokens(str(server.request("GET", "/metrics", retry=True)))


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

"""Pack a stream of weights into buckets and send them to several servers; while one is under way the next is filled.

The first ones are filled while the servers are being told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from loraflow.adapter import AdapterSnapshot
from loraflow.errors import LoadError, LoraflowError
from loraflow.merge import WireTensor
from loraflow.transports.groups import Pending
from loraflow.transports.link import Link
from loraflow.transports.wire import Bucket, fill, place_of, plan_buckets

__all__ = ["Grouped", "buckets_of", "send"]


class Grouped(Protocol):
    """What merges many weights of a bucket at once (`loraflow.transports.grouped`).

    Attributes:
        names: The weights that it writes.
    """

    names: frozenset[str]

    def prepare(self, snapshot: AdapterSnapshot) -> frozenset[str]:
        """Make ready to merge ``snapshot``; `names`."""
        ...

    def write(self, bucket: Bucket, buffer: Tensor) -> None:
        """Write those of ``bucket`` into their places in ``buffer`` (uint8, 1-D)."""
        ...


def buckets_of(tensors: Sequence[WireTensor], bucket_bytes: int, *, capped: bool = False) -> list[Bucket]:
    """Cut ``tensors`` into the buckets of one update; see `plan_buckets`.

    ``capped``: a tensor larger than a bucket makes the bucket larger.
    """
    if capped:
        bucket_bytes = max(bucket_bytes, *(tensor.nbytes for tensor in tensors))
    return plan_buckets(tensors, bucket_bytes, capped=capped)


def send(
    links: Sequence[Link],
    buckets: Sequence[Bucket],
    stream: Iterator[tuple[str, Tensor]],
    errors: dict[str, Exception],
    *,
    seen: Callable[[Sequence[tuple[str, Tensor]]], None] | None = None,
    grouped: Grouped | None = None,
    begun: Callable[[], Mapping[str, Exception]] | None = None,
    buffers: Sequence[Tensor] | None = None,
) -> dict[str, float]:
    """Send ``buckets``, filled with what ``stream`` yields, to every link that has no error yet.

    Memory: the carrier's number of buckets, and what the stream holds for one tensor.

    Args:
        links: Servers that have been told what comes, or are being told.
        buckets: What comes, in order; see `buckets_of`.
        stream: Yields exactly that; but for what ``grouped`` writes.
        errors: By URL; a link that fails is entered here, and left out from then on.
        seen: Given the tensors of each bucket as they lie there, before it leaves.
        grouped: Writes some of the tensors of a bucket by itself.
        begun: Waits until the servers have been told, and gives the errors of those that could not be. Meanwhile the
            first buckets are filled, where every link has its group already.
        buffers: Where to fill buckets (uint8, 1-D); new memory, as the carrier asks for it, where not given.

    Returns:
        Milliseconds spent on ``merge`` (the stream, and packing) and on waiting for the ``broadcast``.
    """
    early = begun is not None and all(link.group is not None for link in links)
    if begun is not None and not early:
        errors.update(begun())
    groups = [link.group for link in links if link.group is not None and link.server.url not in errors]
    if not groups:
        return {}
    if buffers is None:
        size = max((bucket.nbytes for bucket in buckets), default=0)
        many = min(len(buckets), *(group.buffers for group in groups))
        buffers = [torch.empty(size, dtype=torch.uint8, device=groups[0].device) for _ in range(many)]
    count = min(len(buckets), len(buffers))
    under_way: list[list[tuple[Link, Pending]]] = [[] for _ in range(count)]
    spent = {"merge": 0.0, "broadcast": 0.0}

    def pack(number: int) -> None:
        begin = time.perf_counter()
        _pack(buffers[number % count], buckets[number], stream, grouped, seen)
        spent["merge"] += (time.perf_counter() - begin) * 1e3

    if begun is not None and early:
        for number in range(count):
            pack(number)
        errors.update(begun())
    for number, bucket in enumerate(buckets):
        slot = number % count
        begin = time.perf_counter()
        _settle(under_way[slot], errors)
        if all(link.server.url in errors for link in links):
            break  # nobody listens any more
        free = time.perf_counter()
        if not early or number >= count:
            pack(number)
        filled = time.perf_counter()
        under_way[slot] = _start(links, buffers[slot], bucket, errors)
        spent["broadcast"] += (free - begin + time.perf_counter() - filled) * 1e3
    begin = time.perf_counter()
    for number in range(len(buckets), len(buckets) + count):  # oldest first
        _settle(under_way[number % count], errors)
    spent["broadcast"] += (time.perf_counter() - begin) * 1e3
    return spent


def _pack(
    buffer: Tensor,
    bucket: Bucket,
    stream: Iterator[tuple[str, Tensor]],
    grouped: Grouped | None,
    seen: Callable[[Sequence[tuple[str, Tensor]]], None] | None,
) -> None:
    apart = frozenset[str]() if grouped is None else grouped.names
    placed: list[tuple[str, Tensor]] = []
    if grouped is not None:
        grouped.write(bucket, buffer)
    for slot in bucket.slots:
        if slot.tensor.name in apart:
            placed.append((slot.tensor.name, place_of(buffer, slot)))
            continue
        name, tensor = next(stream)
        if name != slot.tensor.name:
            raise LoadError(f"the stream gave {name} where {slot.tensor.name} was announced")
        placed.append((name, fill(buffer, slot, tensor)))
        del tensor  # before the next one is made
    if seen is not None:
        seen(placed)


def _start(
    links: Sequence[Link], buffer: Tensor, bucket: Bucket, errors: dict[str, Exception]
) -> list[tuple[Link, Pending]]:
    started = []
    for link in links:
        if link.server.url in errors:
            continue
        try:
            started.append((link, link.send(buffer, bucket)))
        except LoraflowError as error:
            errors[link.server.url] = error
    return started


def _settle(pending: Sequence[tuple[Link, Pending]], errors: dict[str, Exception]) -> None:
    for link, one in pending:
        try:
            link.wait(one)
        except LoraflowError as error:
            errors[link.server.url] = error

"""Pack a stream of weights into buckets and send them to several servers; while one is under way the next is filled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from loraflow.errors import LoadError, LoraflowError
from loraflow.merge import WireTensor
from loraflow.transports.groups import Pending
from loraflow.transports.link import Link
from loraflow.transports.wire import Bucket, fill, plan_buckets

__all__ = ["send"]


def send(
    links: Sequence[Link],
    tensors: Sequence[WireTensor],
    stream: Iterator[tuple[str, Tensor]],
    errors: dict[str, Exception],
    *,
    bucket_bytes: int,
    capped: bool = False,
    seen: Callable[[str, Tensor], None] | None = None,
) -> dict[str, float]:
    """Send what ``stream`` yields to every link that has no error yet.

    Memory: the carrier's number of buckets, and what the stream holds for one tensor.

    Args:
        links: Servers that have been told what comes.
        tensors: What comes, in order.
        stream: Yields exactly that.
        errors: By URL; a link that fails is entered here, and left out from then on.
        bucket_bytes: See `plan_buckets`.
        capped: See `plan_buckets`; a tensor larger than a bucket makes the bucket larger.
        seen: Given each tensor as it lies in its bucket, before the bucket leaves.

    Returns:
        Milliseconds spent on ``merge`` (the stream, and packing) and on waiting for the ``broadcast``.
    """
    groups = [link.group for link in links if link.group is not None]
    if not groups:
        return {}
    if capped:
        bucket_bytes = max(bucket_bytes, *(tensor.nbytes for tensor in tensors))
    buckets = plan_buckets(tensors, bucket_bytes, capped=capped)
    count = min(len(buckets), *(group.buffers for group in groups))
    size = max((bucket.nbytes for bucket in buckets), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=groups[0].device) for _ in range(count)]
    under_way: list[list[tuple[Link, Pending]]] = [[] for _ in buffers]
    spent = {"merge": 0.0, "broadcast": 0.0}
    for number, bucket in enumerate(buckets):
        slot = number % count
        begin = time.perf_counter()
        _settle(under_way[slot], errors)
        if all(link.server.url in errors for link in links):
            break  # nobody listens any more
        free = time.perf_counter()
        _pack(buffers[slot], bucket, stream, seen)
        filled = time.perf_counter()
        under_way[slot] = _start(links, buffers[slot], bucket, errors)
        spent["merge"] += (filled - free) * 1e3
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
    seen: Callable[[str, Tensor], None] | None,
) -> None:
    for slot in bucket.slots:
        name, tensor = next(stream)
        if name != slot.tensor.name:
            raise LoadError(f"the stream gave {name} where {slot.tensor.name} was announced")
        placed = fill(buffer, slot, tensor)
        if seen is not None:
            seen(name, placed)


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

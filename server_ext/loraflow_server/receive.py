"""A merged broadcast straight into the served weights, where their places are known (`ServedWeights`).

vLLM's own engines load what they receive through the model's loaders, each layer rebuilt and put back: most of the time
of an update. Here a bucket is copied to where its weights are served while the next one arrives, and nothing else is
touched. No step may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from loraflow_server.collective import GlooLine, Line, NcclLine, Receiving
from loraflow_server.errors import PluginError
from loraflow_server.lifeline import still_wanted
from loraflow_server.served import ServedWeights

__all__ = ["DTYPES", "Incoming", "line_of", "receive"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What may travel."""


@dataclass(frozen=True)
class Incoming:
    """What a trainer is about to send.

    Attributes:
        layout_id: Places that were agreed on for these weights, or for more.
        names: Checkpoint names, in the order of travel.
        dtypes: Names of their dtypes.
        buckets: How many of them each bucket holds, packed without gaps.
        lifeline: See `loraflow_server.lifeline`.
        mapped: ``{"name", "first"}`` where they lie in memory that was mapped: which (`MappedBuffers.name`), and the
            number of the bucket before. None where they are broadcast.
    """

    layout_id: str
    names: Sequence[str]
    dtypes: Sequence[str]
    buckets: Sequence[int]
    lifeline: str | None = None
    mapped: Mapping[str, Any] | None = None


def line_of(engine: Any, device: torch.device, timeout: float, lifeline: str | None = None) -> Receiving:
    """The group that vLLM's weight-transfer ``engine`` has joined; ``timeout`` seconds for one bucket.

    Raises:
        PluginError: ``no_group`` (409): it has joined none.
    """
    communicator, group = getattr(engine, "model_update_group", None), getattr(engine, "process_group", None)
    if communicator is not None:

        def forget() -> None:
            engine.model_update_group = None

        return NcclLine(communicator, device, timeout, aborted=forget, alive=still_wanted(lifeline))
    if group is not None:
        return GlooLine(group, timeout)
    raise PluginError("no_group", "this worker has joined no broadcast group", status=409)


def receive(line: Line, incoming: Incoming, served: ServedWeights, model: Any) -> None:
    """Receive all of it, and write it.

    A bucket that cannot be written is no reason to leave the others on the line: the trainer and the other workers
    count on this one, and the error is raised at the end.

    Raises:
        PluginError: As `Line.pieces`; ``moved``, or ``bad_request``: the weights are not those of the layout.
    """
    places = served.places(model)
    buckets = _buckets(incoming, served.shapes)
    failed: Exception | None = None
    pieces = line.pieces([bucket.nbytes for bucket in buckets])
    for piece, bucket in zip(pieces, buckets, strict=True):
        try:
            if failed is None:
                _write(bucket, piece, places)
        except Exception as error:  # noqa: BLE001 - raised below
            failed = error
    if failed is not None:
        raise failed


@dataclass(frozen=True)
class _Slot:
    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    start: int
    nbytes: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        part = buffer[self.start : self.start + self.nbytes]
        if self.start % self.dtype.itemsize:
            part = part.clone()  # a view in another dtype must be aligned to it
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Bucket:
    slots: Sequence[_Slot]
    nbytes: int


def _buckets(incoming: Incoming, shapes: Mapping[str, tuple[int, int]]) -> list[_Bucket]:
    unknown = next((name for name in incoming.names if name not in shapes), None)
    if unknown is not None:
        raise PluginError("bad_request", f"{unknown} is not of the layout that was agreed on")
    coming = iter(zip(incoming.names, incoming.dtypes, strict=True))
    return [_bucket(islice(coming, count), shapes) for count in incoming.buckets]


def _bucket(tensors: Iterator[tuple[str, str]], shapes: Mapping[str, tuple[int, int]]) -> _Bucket:
    slots: list[_Slot] = []
    filled = 0
    for name, dtype_name in tensors:
        dtype, shape = DTYPES[dtype_name], shapes[name]
        slots.append(_Slot(name, dtype, shape, filled, shape[0] * shape[1] * dtype.itemsize))
        filled += slots[-1].nbytes
    return _Bucket(slots, filled)


@torch.no_grad()
def _write(bucket: _Bucket, buffer: torch.Tensor, places: Mapping[str, Sequence[Any]]) -> None:
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for slot in bucket.slots:
        matrix = slot.of(buffer)
        for rect, view in places[slot.name]:
            targets.append(view)
            sources.append(rect.of(matrix))
    if targets:
        # From the host it waits: the next bucket is received into the same memory.
        torch._foreach_copy_(targets, sources, non_blocking=buffer.is_cuda)

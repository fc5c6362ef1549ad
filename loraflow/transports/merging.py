"""`Merging`: how the weights of an update get into its buckets; plain products of a bucket at once where that works.

Where it does not (no GPU, no Triton, an update that is no plain product), `MergeSource` streams them one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraflow.adapter import AdapterSnapshot
from loraflow.merge import MergeSource, WireTensor
from loraflow.transports.pipeline import Grouped, buckets_of

__all__ = ["Merge", "Merging"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merge:
    """One update's weights on their way.

    Attributes:
        tensors: What travels, in order.
        stream: Yields it, but for what ``grouped`` writes.
        grouped: See `loraflow.transports.pipeline.send`.
    """

    tensors: Sequence[WireTensor]
    stream: Iterator[tuple[str, Tensor]]
    grouped: Grouped | None


class Merging:
    """Begins merges; what it learns of one update serves the next one of the same weights.

    Args:
        source: The trainer's weights.
        device: Where buckets lie.
        bucket_bytes: See `loraflow.transports.pipeline.buckets_of`.
        capped: Likewise.
    """

    def __init__(self, source: MergeSource, device: torch.device, *, bucket_bytes: int, capped: bool) -> None:
        self._source, self._device = source, device
        self._bucket_bytes, self._capped = bucket_bytes, capped
        self._enabled = device.type == "cuda"
        self._known: tuple[list[WireTensor], Grouped] | None = None

    def begin(self, snapshot: AdapterSnapshot | None, names: Sequence[str]) -> Merge:
        """The weights ``names`` with ``snapshot`` merged in; the pristine ones without.

        Raises:
            AdapterError: As `MergeSource.merged` does.
        """
        tensors = self._source.announce(names)
        if snapshot is None:
            return Merge(tensors, self._source.pristine(names, rounded=False), None)
        grouped = self._grouped(tensors) if self._enabled else None
        apart = frozenset[str]() if grouped is None else grouped.prepare(snapshot)
        rest = [tensor.name for tensor in tensors if tensor.name not in apart]
        return Merge(tensors, self._source.merged(snapshot, rest, rounded=False), grouped)

    def _grouped(self, tensors: list[WireTensor]) -> Grouped | None:
        if self._known is None or self._known[0] != tensors:
            try:
                from loraflow.transports.grouped import GroupedMerge
            except ImportError as error:
                _log.info("each merged weight takes its own launches: %s", error)
                self._enabled = False
                return None
            buckets = buckets_of(tensors, self._bucket_bytes, capped=self._capped)
            self._known = tensors, GroupedMerge(self._source, buckets, self._device)
        return self._known[1]

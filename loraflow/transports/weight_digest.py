"""Proof of merged weights by digest: what travelled, against what every rank of a server holds of it.

The server says once where it serves each checkpoint weight: which rectangles on which rank, in which dtype. While an
update is packed, the trainer checksums the same rectangles of what leaves; afterwards the workers checksum what they
serve, on their own device. Equal bits or no proof; it costs one call and no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loraflow.errors import LoadError
from loraflow.http_errors import understood
from loraflow.layout import Rect, dtype_of
from loraflow.merge import WireTensor
from loraflow.plugin_answers import ServedSums
from loraflow.plugin_client import PluginClient
from loraflow.server import VLLMServer
from loraflow_server.checksum import StreamSums

__all__ = ["WeightDigest", "WeightLayout"]

_SHOWN = 3

Piece = tuple[Rect, torch.dtype]


@dataclass(frozen=True)
class WeightLayout:
    """Where one kind of server serves the weights of an update.

    Attributes:
        layout_id: The server's handle for it.
        names: Checkpoint names, sorted; ``Rect.tensor`` indexes them.
        ranks: The pieces on each rank of an engine, in the order of the server's checksums.
        engines: Data-parallel engines.
    """

    layout_id: str
    names: tuple[str, ...]
    ranks: tuple[tuple[Piece, ...], ...]
    engines: int

    @classmethod
    def agree(cls, server: VLLMServer, tensors: Sequence[WireTensor]) -> WeightLayout:
        """Ask ``server``.

        Raises:
            HTTPFailure: It has no such places (409): repacked, quantised or stacked weights.
            CapabilityError: It serves a dtype that the trainer does not compute with.
            LoadError: It serves a weight in part only.
        """
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        answer = PluginClient(server.request).weights_layout(shapes, timeout=server.load_timeout)
        with understood("where it serves weights", server.url):
            made = cls(str(answer["layout_id"]), tuple(sorted(shapes)), _ranks(answer["ranks"]), int(answer["engines"]))
            area = dict.fromkeys(range(len(made.names)), 0)
            for rect in {rect for rank in made.ranks for rect, _ in rank}:
                area[rect.tensor] += rect.size
        missing = [name for index, name in enumerate(made.names) if area[index] < math.prod(shapes[name])]
        if missing:
            raise LoadError(f"weights that no rank serves whole, the first: {missing[0]}", server=server.url)
        return made


def _ranks(answer: Iterable[Mapping[str, Any]]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(
        tuple((Rect.from_list(item), dtype_of(name)) for item, name in zip(rank["rects"], rank["dtypes"], strict=True))
        for rank in answer
    )


class WeightDigest:
    """Checksums what travels in one update, for all servers at once; `restart` makes it ready for the next one.

    Args:
        layouts: Those of the servers that are updated.
        device: Where buckets lie.
    """

    def __init__(self, layouts: Iterable[WeightLayout], device: torch.device) -> None:
        self._pieces: dict[tuple[str, Piece], int] = {}
        self._of: dict[str, list[tuple[int, Piece]]] = {}
        sizes: list[int] = []
        for layout in layouts:
            for rect, dtype in (piece for rank in layout.ranks for piece in rank):
                key = (layout.names[rect.tensor], (rect, dtype))
                if key not in self._pieces:
                    self._of.setdefault(key[0], []).append((len(sizes), key[1]))
                    self._pieces[key] = len(sizes)
                    sizes.append(rect.size * dtype.itemsize)
        self._stream = StreamSums(sizes, device)
        self._sums: list[int] | None = None

    def restart(self) -> None:
        """Forget the last update."""
        self._stream.restart()
        self._sums = None

    def see(self, name: str, tensor: Tensor) -> None:
        """Take in a tensor as it travels; queued on a GPU."""
        self.see_all([(name, tensor)])

    def see_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take in several at once."""
        found: list[tuple[int, Tensor]] = []
        for name, tensor in tensors:
            matrix = tensor if tensor.dim() == 2 else tensor.view(-1, 1)
            for index, (rect, dtype) in self._of.get(name, ()):
                piece = rect.of(matrix)
                if piece.dtype != dtype:
                    self._stream.take(index, piece.to(dtype))  # one copy at a time
                else:
                    found.append((index, piece))
        self._stream.take_all([index for index, _ in found], [piece for _, piece in found])

    def settle(self) -> None:
        """Work out the checksums of what has travelled; waits for the device."""
        self._sums = self._stream.finish()

    def wrong(self, layout: WeightLayout, served: Sequence[Sequence[Sequence[int]]]) -> list[str]:
        """What of ``served`` (by engine, rank and piece) is not what travelled; empty where all is."""
        if self._sums is None:
            self.settle()
        assert self._sums is not None  # noqa: S101 - settled
        if len(served) != layout.engines:
            return [f"{len(served)} engines answered, {layout.engines} expected"]
        found = []
        for engine, ranks in enumerate(served):
            for rank, pieces in enumerate(layout.ranks):
                sums = ranks[rank] if rank < len(ranks) else ()
                wanted = [self._sums[self._pieces[layout.names[rect.tensor], (rect, dtype)]] for rect, dtype in pieces]
                where = f"engine {engine} rank {rank}"
                if len(sums) != len(wanted):
                    found.append(f"{len(sums)} checksums of {len(wanted)} ({where})")
                    continue
                names = [layout.names[rect.tensor] for rect, _ in pieces]
                pairs = zip(names, wanted, sums, strict=True)
                found += [f"{name} ({where})" for name, right, given in pairs if right != given]
        return found

    def require(self, server: VLLMServer, layout: WeightLayout, served: ServedSums | None = None) -> str | None:
        """Raise `LoadError` where ``server`` holds something else than what travelled.

        Args:
            server: The server.
            layout: Where it serves it.
            served: What it holds, where it has said so.

        Returns:
            The name that its weights have then; None where it does not say.
        """
        if served is None:
            client = PluginClient(partial(server.request, kept=True))
            served = client.weights_sums(layout.layout_id, timeout=server.load_timeout)
        wrong = self.wrong(layout, served.engines)
        if wrong:
            raise LoadError(
                f"{len(wrong)} weights are not those that were sent: {', '.join(wrong[:_SHOWN])}", server=server.url
            )
        return served.version

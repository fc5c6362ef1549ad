"""What the server plugin's routes answer, typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loraflow.layout import Rect, dtype_of

__all__ = ["FoldLayout", "Held", "LoadedAdapter", "ServedDigest", "ServedSums"]


@dataclass(frozen=True)
class LoadedAdapter:
    """What the server loaded.

    Attributes:
        name: The name that requests use.
        path: The folder as the server registered it: links resolved, or its cache's for a URL.
        lora_int_id: Its id in the server.
        phases_ms: Milliseconds by phase.
    """

    name: str
    path: str
    lora_int_id: int
    phases_ms: Mapping[str, float]


@dataclass(frozen=True)
class ServedDigest:
    """What a server answered about one loaded adapter.

    Attributes:
        name: The adapter's name.
        path: The folder it is registered with.
        lora_int_id: Its id in the server.
        sums: Checksums by engine, rank and piece; int64 to be read mod 2**64.
        dirty: By engine and rank: layers with something non-zero where the adapter has nothing.
        weights_touched: The base weights were updated since they were last proven pristine.
        worker_ms: Milliseconds that the slowest worker took.
        call_ms: Milliseconds of the API server's call to the engines, the worker's included; 0 where it does not say.
    """

    name: str
    path: str
    lora_int_id: int
    sums: tuple[tuple[tuple[int, ...], ...], ...]
    dirty: tuple[tuple[tuple[str, ...], ...], ...]
    weights_touched: bool
    worker_ms: float
    call_ms: float = 0.0

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> ServedDigest:
        """Read the plugin's answer."""
        return cls(
            name=str(answer["name"]),
            path=str(answer["path"]),
            lora_int_id=int(answer["lora_int_id"]),
            sums=tuple(tuple(tuple(map(int, rank["sums"])) for rank in ranks) for ranks in answer["engines"]),
            dirty=tuple(tuple(tuple(map(str, rank["dirty"])) for rank in ranks) for ranks in answer["engines"]),
            weights_touched=bool(answer["weights_touched"]),
            worker_ms=float(answer["phases_ms"]["worker"]),
            call_ms=float(answer["phases_ms"].get("call", 0.0)),
        )


@dataclass(frozen=True)
class ServedSums:
    """What a server holds of a layout's weights.

    Attributes:
        engines: Checksums by engine, rank and piece; mod 2**64.
        version: The name of the weights; None where the server does not say.
    """

    engines: Sequence[Sequence[Sequence[int]]]
    version: str | None

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> ServedSums:
        """Read the plugin's answer."""
        engines = [[[int(total) for total in rank] for rank in ranks] for ranks in answer["engines"]]
        return cls(engines, answer.get("weight_version"))


@dataclass(frozen=True)
class Held:
    """A server whose requests wait.

    Attributes:
        was: The name of its weights before.
        paused_here: False where somebody else had paused it.
        adapters: Names of adapters that requests may use.
    """

    was: str
    paused_here: bool
    adapters: tuple[str, ...]


@dataclass(frozen=True)
class FoldLayout:
    """Where the weights that an adapter targets are served.

    Attributes:
        layout_id: The server's handle for it.
        dtype: Their dtype, and that of payloads.
        ranks: For each rank of an engine its pieces, with the checksum of each piece of the pristine base.
        engines: Data-parallel engines.
        copy: Where the pristine copy is: ``device`` or ``host``.
        copy_bytes: Its size on all ranks of an engine.
    """

    layout_id: str
    dtype: torch.dtype
    ranks: tuple[tuple[tuple[Rect, int], ...], ...]
    engines: int
    copy: str
    copy_bytes: int

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> FoldLayout:
        """Read the plugin's answer."""
        ranks = tuple(
            tuple(
                (Rect.from_list(item), int(total)) for item, total in zip(rank["rects"], rank["base_sums"], strict=True)
            )
            for rank in answer["ranks"]
        )
        return cls(
            layout_id=str(answer["layout_id"]),
            dtype=dtype_of(answer["dtype"]),
            ranks=ranks,
            engines=int(answer["engines"]),
            copy=str(answer["copy"]),
            copy_bytes=int(answer["copy_bytes"]),
        )

"""The LoRA slots of one worker: where every tensor of an adapter lies in them, learnt from the layers themselves.

Nothing is assumed from names or classes beyond what vLLM's own manager says: each layer's `set_lora` is run once on
stand-in buffers with numbered elements, and what it wrote where is read back (`find_rects`). Tensor-parallel shards,
packed projections, transposed embeddings and fully sharded LoRA all come out of that as rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from loraflow_server.checksum import Checksummer
from loraflow_server.errors import PluginError
from loraflow_server.rects import Rect, find_rects

__all__ = ["Place", "SlotLayout", "SlotReading", "learn_layout"]

Side = Literal["a", "b"]

_MAX_RANKS = 64
"""Tensor-parallel ranks that the slots of one tensor may be shared out among."""


@dataclass(frozen=True)
class Place:
    """A rectangle of one slot buffer.

    Attributes:
        module: The layer's name in the served model.
        side: ``a`` (down projection) or ``b`` (up projection).
        index: Which of the layer's stacked buffers (q, k, v of a packed projection).
        row: First row in the buffer.
        col: First column in the buffer.
        rows: Rows.
        cols: Columns.
    """

    module: str
    side: Side
    index: int
    row: int
    col: int
    rows: int
    cols: int

    def view(self, modules: Mapping[str, Any], slot: int) -> torch.Tensor:
        """This rectangle in slot ``slot``; shape (rows, cols)."""
        buffer = _matrix(_buffers(modules[self.module], self.side)[self.index], slot)
        return buffer[self.row : self.row + self.rows, self.col : self.col + self.cols]


@dataclass(frozen=True)
class Whole:
    """All of one slot buffer of a layer that adapters of a layout leave alone, and whose layout is not known.

    Attributes:
        module: The layer's name in the served model.
        attribute: The layer's attribute that holds its stacked buffers.
        index: Which of them.
    """

    module: str
    attribute: str
    index: int

    def view(self, modules: Mapping[str, Any], slot: int) -> torch.Tensor:
        """The buffer in slot ``slot``."""
        return _parts(getattr(modules[self.module], self.attribute))[self.index][slot]


@dataclass(frozen=True, eq=False)
class SlotLayout:
    """Where the tensors of one kind of adapter lie on this rank.

    Attributes:
        names: The adapter's tensor names, sorted; ``rects[i].tensor`` indexes them.
        shapes: Their shapes.
        modules: vLLM's name of each adapted module to the indices of its A and B.
        rects: The pieces that this rank serves, in image order.
        places: The place of each piece.
        outside: Everything else in the slot's buffers; must be zero.
        dtype: dtype of the slots.
        checksummer: Checksums the pieces.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    modules: Mapping[str, tuple[int, int]]
    rects: tuple[Rect, ...]
    places: tuple[Place, ...]
    outside: tuple[Place | Whole, ...]
    dtype: torch.dtype
    checksummer: Checksummer
    _views: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(rows * cols for rows, cols in self.shapes)

    def views(self, modules: Mapping[str, Any], slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The memory of ``places`` and of ``outside`` in one slot. vLLM's buffers stay where they are: made once."""
        if slot not in self._views:
            self._views[slot] = (
                [place.view(modules, slot) for place in self.places],
                [place.view(modules, slot) for place in self.outside],
            )
        return self._views[slot]


def _buffers(layer: Any, side: Side) -> Sequence[torch.Tensor]:
    return _parts(layer.lora_a_stacked if side == "a" else layer.lora_b_stacked)


def _parts(stacked: Any) -> tuple[torch.Tensor, ...]:
    return (stacked,) if isinstance(stacked, torch.Tensor) else tuple(stacked)


def _matrix(stacked: torch.Tensor, slot: int) -> torch.Tensor:
    """One slot of a stacked buffer as a matrix; refuses what is not one (mixture-of-experts buffers)."""
    buffer = stacked[slot]
    if buffer.dim() == 3 and buffer.shape[0] == 1:
        buffer = buffer[0]
    if buffer.dim() != 2:
        raise PluginError(
            "unsupported_layout", f"a LoRA buffer of shape {tuple(stacked.shape)} is not one matrix per slot"
        )
    return buffer


@contextmanager
def _numbered_buffers(layer: Any) -> Iterator[dict[Side, list[torch.Tensor]]]:
    """Stand-ins for the layer's buffers, one slot, int64 on the host; the real ones are back afterwards."""
    kept = {name: layer.__dict__[name] for name in ("lora_a_stacked", "lora_b_stacked")}

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros((1, *value.shape[1:]), dtype=torch.int64)
        return tuple(stand_in(item) for item in value)

    try:
        for name, value in kept.items():
            setattr(layer, name, stand_in(value))
        sides: tuple[Side, Side] = ("a", "b")
        yield {side: [_matrix(buffer, 0) for buffer in _buffers(layer, side)] for side in sides}
    finally:
        for name, value in kept.items():
            setattr(layer, name, value)


@dataclass(frozen=True)
class _Source:
    """One tensor of the adapter, numbered."""

    tensor: int
    shape: tuple[int, int]

    def numbers(self, start: int) -> torch.Tensor:
        size = self.shape[0] * self.shape[1]
        return torch.arange(start, start + size, dtype=torch.int64).view(self.shape)


def _learn_layer(
    name: str, layer: Any, sources: Sequence[Mapping[Side, _Source]]
) -> tuple[list[tuple[Rect, Place]], list[Place]]:
    """Pieces and outside of one layer; ``sources`` has one entry per packed part (empty where not adapted)."""
    sides: tuple[Side, Side] = ("a", "b")
    pieces: list[tuple[Rect, Place]] = []
    outside: list[Place] = []
    with _numbered_buffers(layer) as buffers:
        inputs: dict[Side, list[torch.Tensor | None]] = {}
        starts: dict[Side, list[int]] = {"a": [], "b": []}
        order: dict[Side, list[_Source]] = {"a": [], "b": []}
        for side in sides:
            room = _MAX_RANKS * sum(buffer.numel() for buffer in buffers[side])
            if any(math.prod(part[side].shape) > room for part in sources if side in part):
                raise ValueError(f"a lora_{side.upper()} that no slot has room for")  # before memory is taken for it
            next_number = 1
            inputs[side] = []
            for part in sources:
                source = part.get(side)
                if source is None:
                    inputs[side].append(None)
                    continue
                inputs[side].append(source.numbers(next_number))
                starts[side].append(next_number)
                order[side].append(source)
                next_number += source.shape[0] * source.shape[1]
        if any(part for part in sources):
            packed = len(sources) > 1
            layer.set_lora(0, inputs["a"] if packed else inputs["a"][0], inputs["b"] if packed else inputs["b"][0])
        for side in sides:
            shapes = [source.shape for source in order[side]]
            for index, ids in enumerate(buffers[side]):
                found = find_rects(ids, starts[side], shapes)
                for rect, row, col in found:
                    place = Place(name, side, index, row, col, *rect.served_shape)
                    tensor = order[side][rect.tensor].tensor
                    numbered = Rect(tensor, rect.row, rect.col, rect.rows, rect.cols, rect.transposed)
                    pieces.append((numbered, place))
                outside += _around(name, side, index, ids)
    return pieces, outside


def _around(name: str, side: Side, index: int, ids: torch.Tensor) -> list[Place]:
    """The strips of a buffer around its written part (all of it where nothing was written)."""
    height, width = ids.shape
    written = ids != 0
    if not bool(written.any()):
        return [Place(name, side, index, 0, 0, height, width)]
    rows = written.any(dim=1).nonzero().flatten()
    cols = written.any(dim=0).nonzero().flatten()
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(cols[0]), int(cols[-1]) + 1
    strips = [
        (0, 0, top, width),
        (bottom, 0, height - bottom, width),
        (top, 0, bottom - top, left),
        (top, right, bottom - top, width - right),
    ]
    return [Place(name, side, index, *strip) for strip in strips if strip[2] > 0 and strip[3] > 0]


def _all_of(name: str, layer: Any) -> list[Whole]:
    """Everything that a layer keeps for its slots: an adapter that was in a slot before may have left something there.

    The lists of a mixture of experts are no buffers of their own, but views into these.
    """
    return [
        Whole(name, attribute, index)
        for attribute, value in vars(layer).items()
        if attribute.endswith("_stacked") and isinstance(value, torch.Tensor | tuple)
        for index in range(len(_parts(value)))
    ]


def _sources_by_module(manager: Any, tensors: Mapping[str, Sequence[int]]) -> dict[str, dict[Side, _Source]]:
    """The adapter's tensors by the module names that vLLM's own loader gives them."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    # The mapper also stacks and deletes, which must not happen to adapters: vLLM 0.29 has the first, 0.27 the second.
    for only_rename in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, only_rename):
            mapper = getattr(mapper, only_rename)()
            break
    by_module: dict[str, dict[Side, _Source]] = {}
    for index, (tensor, shape) in enumerate(tensors.items()):
        try:
            module, is_a = parse_fine_tuned_lora_name(tensor, mapper)
        except ValueError as error:
            raise PluginError("unknown_tensor", f"vLLM does not serve the tensor {tensor!r}: {error}") from error
        if len(shape) != 2:
            raise PluginError("unknown_tensor", f"{tensor!r} has shape {list(shape)}: a LoRA matrix has two dimensions")
        by_module.setdefault(module, {})["a" if is_a else "b"] = _Source(index, (int(shape[0]), int(shape[1])))
    return by_module


def learn_layout(manager: Any, tensors: Mapping[str, Sequence[int]], device: torch.device) -> SlotLayout:
    """Where the tensors of an adapter lie in the slots of ``manager`` (vLLM's `LoRAModelManager`).

    Args:
        manager: The worker's LoRA manager.
        tensors: Tensor name, as PEFT saves it, to shape. In sorted order of names.
        device: Where the slots are.

    Raises:
        PluginError: ``unsupported_layout``, ``unknown_tensor``, ``missing_pair``: nothing is guessed.
    """
    by_module = _sources_by_module(manager, tensors)
    for module, pair in by_module.items():
        if len(pair) != 2:
            raise PluginError("missing_pair", f"module {module!r} has only one of lora_A and lora_B")
    pieces: list[tuple[Rect, Place]] = []
    outside: list[Place | Whole] = []
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        sources = [by_module.get(part, {}) for part in parts]
        if not {"lora_a_stacked", "lora_b_stacked"} <= set(vars(layer)) or hasattr(layer, "w13_lora_a_stacked"):
            if any(sources):
                raise PluginError("unsupported_layout", f"{name}: {type(layer).__name__} has no proven slot layout")
            outside += _all_of(name, layer)
            continue
        try:
            found, around = _learn_layer(name, layer, sources)
        except (ValueError, RuntimeError, TypeError, IndexError, AssertionError) as error:
            raise PluginError("unsupported_layout", f"{name} ({type(layer).__name__}): {error}") from error
        pieces += found
        outside += around
    rects = tuple(rect for rect, _ in pieces)
    dtype = manager.lora_config.lora_dtype
    return SlotLayout(
        names=tuple(tensors),
        shapes=tuple((int(shape[0]), int(shape[1])) for shape in tensors.values()),
        modules={module: (pair["a"].tensor, pair["b"].tensor) for module, pair in by_module.items()},
        rects=rects,
        places=tuple(place for _, place in pieces),
        outside=tuple(outside),
        dtype=dtype,
        checksummer=Checksummer([rect.served_shape for rect in rects], dtype, device),
    )


class SlotReading:
    """Checksums of every piece of one slot, launched on its device behind whatever was launched there before.

    Args:
        manager: vLLM's `LoRAModelManager`.
        layout: Of what lies in the slot.
        slot: Which.
    """

    def __init__(self, manager: Any, layout: SlotLayout, slot: int) -> None:
        served, rest = layout.views(manager.modules, slot)
        found = layout.checksummer.launch(served)
        if rest:
            # The largest magnitude, not a sum: it is 0 only where every element is, and NaN counts as not zero.
            largest = torch.stack(torch._foreach_norm(rest, float("inf")))
            found = torch.cat([found, (largest != 0).to(found.dtype)])
        self._outside = layout.outside if rest else ()
        self._found = found
        self._done: torch.cuda.Event | None = None
        if found.is_cuda:
            self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._found.copy_(found, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    @property
    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def result(self) -> tuple[list[int], list[str]]:
        """Wait for it: each piece's checksum (int64), and the layers with something non-zero outside of the pieces."""
        if self._done is not None:
            self._done.synchronize()
        found = self._found.tolist()
        pieces = len(found) - len(self._outside)
        dirty = {place.module for place, wrong in zip(self._outside, found[pieces:], strict=True) if wrong}
        return found[:pieces], sorted(dirty)

"""`GroupedMerge`: all plain products of a bucket merged into it in one launch, by a Triton kernel over a table.

The stream of `MergeSource` takes half a dozen launches for each weight, which cost more than the memory traffic of all.
Here a table says where every weight of a bucket, its base and its two factors lie; each program of the kernel works on
one tile of one of them. What it computes is the stream's: float32 factors, float32 sums, one rounding.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.merge import MergeSource, PlainWeight
from loraflow.transports.wire import Bucket
from loraflow_server.precision import true_float32

__all__ = ["GroupedMerge"]

_log = logging.getLogger(__name__)

_TILE, _WARPS = (64, 64), 4
"""Rows and columns of a weight that one program merges, and how many warps do."""
_DEPTH = 16
"""Ranks that a product takes at once: more of them in float32 do not fit a thread's registers."""
_FIELDS = tl.constexpr(12)
_ALIGNED_BYTES = 16
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_FACTS = (type, Tensor.data_ptr, attrgetter("shape"), Tensor.stride, attrgetter("dtype"), attrgetter("device"))
"""What the tables say of a base weight, and the kernel is compiled for."""


@triton.jit
def _merge(
    buffer, flat, table, scalings, tiles, norms,
    base_dtype: tl.constexpr, unit: tl.constexpr, base_unit: tl.constexpr, flat_unit: tl.constexpr,
    aligned: tl.constexpr, measured: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """``W = round(W_base + s · L · R)`` for one tile, worked out in float32; and the squares of what rounding changed
    and of ``s · L · R``, summed over the tile, in its place of ``norms``."""
    tile = tiles + 3 * tl.program_id(0)
    index = tl.load(tile).to(tl.int64)
    entry = table + index * _FIELDS
    view, left, right = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
    base = tl.load(entry + 1).to(tl.pointer_type(base_dtype))
    rows, cols, rank = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    base_row, left_row, right_row = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 10)
    left_col = 1 if aligned else tl.load(entry + 9)
    right_col = 1 if aligned else tl.load(entry + 11)
    if aligned:  # what is a multiple of 16 bytes decides how many bytes are read and written at once
        view, base = tl.multiple_of(view, unit), tl.multiple_of(base, 16)
        left, right = tl.multiple_of(left, flat_unit), tl.multiple_of(right, flat_unit)
        cols, rank = tl.multiple_of(cols, unit), tl.multiple_of(rank, flat_unit)
        base_row = tl.multiple_of(base_row, base_unit)
        left_row, right_row = tl.multiple_of(left_row, flat_unit), tl.multiple_of(right_row, flat_unit)
    row = tl.load(tile + 1).to(tl.int64) * height + tl.arange(0, height)
    col = tl.load(tile + 2).to(tl.int64) * width + tl.arange(0, width)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    weight = tl.load(base + row[:, None] * base_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    product = tl.zeros((height, width), dtype=tl.float32)
    for start in range(0, rank, depth):
        k = start + tl.arange(0, depth)
        a = tl.load(
            flat + left + row[:, None] * left_row + k[None, :] * left_col,
            mask=(row < rows)[:, None] & (k < rank)[None, :],
            other=0.0,
        )
        b = tl.load(
            flat + right + k[:, None] * right_row + col[None, :] * right_col,
            mask=(k < rank)[:, None] & (col < cols)[None, :],
            other=0.0,
        )
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), product, input_precision="ieee")
    product *= tl.load(scalings + index)
    weight += product
    rounded = weight.to(buffer.dtype.element_ty)
    tl.store(buffer + view + row[:, None] * cols + col[None, :], rounded, mask=inside)
    if measured:
        off = weight - rounded.to(tl.float32)
        place = norms + 2 * tl.program_id(0)
        tl.store(place, tl.sum(tl.sum(off * off, axis=1), axis=0))
        tl.store(place + 1, tl.sum(tl.sum(product * product, axis=1), axis=0))


@dataclass(frozen=True)
class _Place:
    """Where and how a base weight lies."""

    pointer: int
    shape: torch.Size
    row: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Table:
    """One bucket's launches.

    Attributes:
        cut: Shape of each weight, and whether every row of it starts on a boundary: what ``tiles`` are made from.
        entries: `_FIELDS` numbers for each weight; int64.
        scalings: float32, shape (weights,).
        tiles: By the boundary: index, row and column of each tile; int32, shape (tiles, 3).
        norms: Squared norms of each tile of ``tiles``, in their order; float32, shape (tiles, 2).
        owners: Weight of each tile; int64.
    """

    cut: list[tuple[int, int, bool]]
    entries: Tensor
    scalings: Tensor
    tiles: Mapping[bool, Tensor]
    norms: Tensor
    owners: Tensor

    @property
    def kinds(self) -> list[bool]:
        """The kinds that there are."""
        return [kind for kind, tiles in self.tiles.items() if len(tiles)]


class GroupedMerge:
    """Merges the plain weights (`MergeSource.plain`) of an update; the others are for the stream.

    Args:
        source: The trainer's weights.
        buckets: The buckets of the update.
        device: Where buckets lie; weights whose base is elsewhere are the stream's.

    Attributes:
        names: The weights that `write` merges, after `prepare`.
    """

    def __init__(self, source: MergeSource, buckets: Sequence[Bucket], device: torch.device) -> None:
        self.names: frozenset[str] = frozenset()
        self._source, self._buckets, self._device = source, tuple(buckets), device
        self._weights = {
            slot.tensor.name: source.plain[slot.tensor.name]
            for bucket in buckets
            for slot in bucket.slots
            if slot.tensor.name in source.plain and slot.start % slot.tensor.dtype.itemsize == 0
        }
        self._owners = [weight.source.owner for weight in self._weights.values()]
        self._attributes = [weight.source.attribute for weight in self._weights.values()]
        self._facts: list[list[object]] = []
        self._spec: AdapterSpec | None = None
        self._flat = torch.empty(0)
        self._places: dict[str, _Place | None] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        self._ranks: dict[str, int] = {}
        self._base_dtype = self._dtype = torch.float32
        self._tables: dict[Bucket, _Table] = {}
        self._tried: set[tuple[object, ...]] = set()
        self._broken = False

    # ---------------------------------------------------------------- before an update

    def prepare(self, snapshot: AdapterSnapshot) -> frozenset[str]:
        """Make ready for ``snapshot``: new tables where anything lies or looks otherwise than for the last one, and a
        try-out where the kernel has to be compiled anew.

        Returns:
            `names`; empty where the launches do not work here.
        """
        if self._broken:
            return self.names
        bases = list(map(getattr, self._owners, self._attributes))
        facts = [list(map(fact, bases)) for fact in _FACTS]
        flat, last = snapshot.flat, self._flat
        alike = all(getattr(flat, fact) == getattr(last, fact) for fact in ("dtype", "device", "shape"))
        same = self._spec is snapshot.spec and alike and facts == self._facts
        self._flat, self._spec, self._facts = flat, snapshot.spec, facts
        if same:
            return self.names
        self._places = dict(zip(self._weights, map(self._place, bases), strict=True))
        self._offsets = {}
        for name, weight in self._weights.items():
            self._find_factors(name, weight, snapshot)
        kinds = [self._kind_of(name) for name in self._offsets]
        kind = self._base_dtype, self._dtype = max(set(kinds), key=kinds.count, default=(torch.float32,) * 2)
        self.names = frozenset(name for name in self._offsets if self._kind_of(name) == kind)
        self._tables = {bucket: table for bucket in self._buckets if (table := self._table(bucket)) is not None}
        compiled = (*kind, flat.dtype, *sorted({on for table in self._tables.values() for on in table.kinds}))
        if compiled not in self._tried and not self._tried_out():
            self._broken, self.names, self._tables = True, frozenset(), {}
        self._tried.add(compiled)
        return self.names

    def _kind_of(self, name: str) -> tuple[torch.dtype, torch.dtype]:
        place = self._places[name]
        assert place is not None  # noqa: S101 - those without one have no offsets
        return place.dtype, self._source.weights[name].dtype

    def _place(self, base: Tensor) -> _Place | None:
        """Where a base weight is; None where the kernel does not read it."""
        plain = type(base.detach()) is Tensor and base.layout is torch.strided and base.dim() == 2
        if not plain or base.dtype not in _DTYPES or base.device != self._device or base.stride(1) != 1:
            return None
        return _Place(base.data_ptr(), base.shape, base.stride(0), base.dtype)

    def _find_factors(self, name: str, weight: PlainWeight, snapshot: AdapterSnapshot) -> None:
        """Note where A and B lie in the snapshot's memory; weights whose factors do not are left to the stream."""
        place, wire, flat = self._places[name], self._source.weights[name], snapshot.flat
        a, b = (snapshot.tensors.get(weight.keys[role]) for role in "AB")
        if a is None or b is None:
            return  # the stream says so
        rows, cols = (a.shape[1], b.shape[0]) if weight.rule.fan_in_fan_out else (b.shape[0], a.shape[1])
        fits = place is not None and tuple(place.shape) == wire.shape == (rows, cols) and a.shape[0] == b.shape[1]
        if not fits or wire.dtype not in _DTYPES or flat.device != self._device or flat.dtype not in _DTYPES:
            return
        found = []
        for factor in (a, b):
            offset, rest = divmod(factor.data_ptr() - flat.data_ptr(), flat.element_size())
            inside = rest == 0 and 0 <= offset <= flat.numel() - factor.numel()
            if not inside or factor.dtype != flat.dtype or not factor.is_contiguous():
                return
            found.append(offset)
        self._offsets[name], self._ranks[name] = (found[0], found[1]), a.shape[0]

    # ---------------------------------------------------------------- an update

    def write(self, bucket: Bucket, buffer: Tensor, *, sampled: bool = True) -> None:
        """Launch the merge of a bucket's `names` into their places in ``buffer`` (uint8, 1-D).

        Args:
            bucket: One of the buckets given.
            buffer: Where it is packed.
            sampled: Count its rounding in `MergeSource.rounding_error`.
        """
        table = self._tables.get(bucket)
        if table is None:
            return
        flat, item = self._flat, self._dtype.itemsize
        view = buffer[: bucket.nbytes // item * item].view(self._dtype)
        measured = self._dtype != torch.float32
        on_boundary = (buffer.data_ptr() | flat.data_ptr()) % _ALIGNED_BYTES == 0
        done = 0
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for aligned, tiles in table.tiles.items():
                if len(tiles):
                    _merge[(len(tiles),)](
                        view, flat, table.entries, table.scalings, tiles, table.norms[done:],
                        _DTYPES[self._base_dtype], _unit(self._dtype), _unit(self._base_dtype), _unit(flat.dtype),
                        aligned and on_boundary, measured, *_TILE, _DEPTH, num_warps=_WARPS,
                    )  # fmt: skip
                done += len(tiles)
            if measured and sampled:
                self._measure(table)

    def _measure(self, table: _Table) -> None:
        """Hand the source the norms of each weight."""
        norms = torch.zeros(len(table.entries), 2, device=self._device).index_add_(0, table.owners, table.norms)
        self._source.measured(norms[:, 0], norms[:, 1])

    # ---------------------------------------------------------------- inside

    def _table(self, bucket: Bucket) -> _Table | None:
        slots = [slot for slot in bucket.slots if slot.tensor.name in self.names]
        if not slots:
            return None
        entries = [self._entry(slot.tensor.name, slot.start // self._dtype.itemsize) for slot in slots]
        made = torch.tensor(entries, dtype=torch.int64).to(self._device)
        cut = [(entry[4], entry[5], self._is_aligned(entry)) for entry in entries]
        scalings = torch.tensor([self._weights[slot.tensor.name].rule.scaling for slot in slots], dtype=torch.float32)
        known = self._tables.get(bucket)
        if known is not None and known.cut == cut:
            return replace(known, entries=made, scalings=scalings.to(self._device))
        tiles = {kind: _cut([shape[:2] if shape[2] is kind else None for shape in cut]) for kind in (True, False)}
        owners = torch.cat(list(tiles.values()))[:, 0].long()
        return _Table(
            cut,
            made,
            scalings.to(self._device),
            {kind: found.to(self._device) for kind, found in tiles.items()},
            torch.zeros(len(owners), 2, device=self._device),
            owners.to(self._device),
        )

    def _entry(self, name: str, view: int) -> list[int]:
        """A weight's row of the table; ``view``: its first element in the bucket."""
        place, rank = self._places[name], self._ranks[name]
        assert place is not None  # noqa: S101 - one of `names`
        (rows, cols), (a, b) = place.shape, self._offsets[name]
        if self._weights[name].rule.fan_in_fan_out:  # W is (in, out): L is Aᵀ, R is Bᵀ
            factors = (a, b), (1, rows, 1, rank)
        else:
            factors = (b, a), (rank, 1, cols, 1)
        return [view, place.pointer, *factors[0], rows, cols, rank, place.row, *factors[1]]

    def _is_aligned(self, entry: Sequence[int]) -> bool:
        view, base, left, right, _, cols, rank, base_row, left_row, left_col, right_row, right_col = entry
        unit, base_unit, flat_unit = _unit(self._dtype), _unit(self._base_dtype), _unit(self._flat.dtype)
        own = view % unit == cols % unit == 0 and base % _ALIGNED_BYTES == base_row % base_unit == 0
        factors = not any(number % flat_unit for number in (left, right, rank, left_row, right_row))
        return own and factors and left_col == right_col == 1

    def _tried_out(self) -> bool:
        """Compile the kernel, and compare every weight with the stream's way for random factors."""
        kept, wrong = self._flat, torch.zeros((), dtype=torch.bool, device=self._device)
        generator = torch.Generator(self._device).manual_seed(0)
        self._flat = torch.randn(kept.numel(), generator=generator, device=self._device).mul_(0.1).to(kept.dtype)
        try:
            for bucket in self._tables:
                buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
                self.write(bucket, buffer, sampled=False)
                for slot in bucket.slots:
                    if slot.tensor.name in self.names:
                        place = buffer[slot.start : slot.start + slot.tensor.nbytes].view(self._dtype)
                        wrong |= self._differs(slot.tensor.name, place.view(slot.tensor.shape))
            if not bool(wrong):
                return True
            reason = "another result than torch's"
        except Exception as error:  # noqa: BLE001 - a compiler that is not there, a GPU that it does not know
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._flat = kept
        _log.warning("each merged weight takes its own launches, since grouped ones failed here: %s", reason)
        return False

    def _differs(self, name: str, merged: Tensor) -> Tensor:
        """Whether a merged weight is further from float32's than rounding to nearest takes it, or NaN; a scalar on the
        device."""
        weight, rank, (rows, cols) = self._weights[name], self._ranks[name], merged.shape
        if weight.rule.fan_in_fan_out:
            rows, cols = cols, rows
        a, b = (
            self._flat[start : start + size * rank].view(shape)
            for start, size, shape in zip(self._offsets[name], (cols, rows), ((rank, cols), (rows, rank)), strict=True)
        )
        wanted = weight.source.read().to(torch.float32, copy=True)
        with true_float32(), torch.no_grad():
            weight.rule.apply(wanted, {"A": a, "B": b})
        order = 64 * torch.finfo(torch.float32).eps * wanted.abs().max()  # float32 sums in another order
        room = wanted.abs().mul_(torch.finfo(self._dtype).eps / 2).add_(order)
        return ~((merged.float() - wanted).abs_() <= room).all()


def _unit(dtype: torch.dtype) -> int:
    """Elements in 16 bytes."""
    return _ALIGNED_BYTES // dtype.itemsize


def _cut(shapes: Sequence[Sequence[int] | None]) -> Tensor:
    """The tiles of all that are given: index, row and column of the tile; int32, shape (tiles, 3)."""
    parts = [torch.empty(0, 3, dtype=torch.int32)]
    for index, shape in enumerate(shapes):
        if shape is not None:
            down, across = (-(-size // side) for size, side in zip(shape, _TILE, strict=True))
            tiles = torch.cartesian_prod(torch.arange(down), torch.arange(across)).view(-1, 2)
            parts.append(torch.cat([torch.full((len(tiles), 1), index), tiles], dim=1).int())
    return torch.cat(parts)

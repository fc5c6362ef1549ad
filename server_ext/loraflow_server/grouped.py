"""All products of a fold in one launch, and their proof in two: Triton kernels over a table of pointers.

A model has hundreds of weights, and a launch for each costs more than the memory traffic of all. Here a table says
where every weight, its pristine copy and its two factors lie; each program of a kernel works on one tile of one of
them. Compiled and tried out when a fold is laid out; where that fails `torch` does the same in more launches.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from loraflow_server.fold_rules import Recipe, tolerance_of

__all__ = ["Grouped"]

_TILE, _WARPS = (64, 64), 4
"""Rows and columns of a weight that one program folds, and how many warps do."""
_ROWS = 16
"""Rows of a weight that one program proves."""
_WIDE = 512
"""Columns that a proof takes at once."""
_DEPTH = 32
"""Ranks that a product takes at once."""

_FIELDS = tl.constexpr(15)
_ALIGNED_BYTES = 16
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _pointer(entry, field: tl.constexpr, dtype: tl.constexpr, aligned: tl.constexpr):
    pointer = tl.load(entry + field).to(tl.pointer_type(dtype))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _stride(entry, field: tl.constexpr, unit: tl.constexpr, aligned: tl.constexpr):
    """A row stride: a multiple of 16 bytes in the aligned group."""
    stride = tl.load(entry + field)
    if aligned:
        stride = tl.multiple_of(stride, unit)
    return stride


@triton.jit
def _fold(
    table, scalings, tiles,
    dtype: tl.constexpr, unit: tl.constexpr, aligned: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """``W = round(W_base + s · L · R)`` for one tile, accumulated in float32."""
    tile = tiles + 3 * tl.program_id(0)
    index = tl.load(tile).to(tl.int64)
    entry = table + index * _FIELDS
    view = _pointer(entry, 0, dtype, aligned)
    base = _pointer(entry, 1, dtype, aligned)
    left = _pointer(entry, 2, dtype, aligned)
    right = _pointer(entry, 3, dtype, aligned)
    rows, cols, rank = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    view_row, base_row = _stride(entry, 7, unit, aligned), _stride(entry, 9, unit, aligned)
    left_row, right_row = _stride(entry, 10, unit, aligned), _stride(entry, 12, unit, aligned)
    view_col = 1 if aligned else tl.load(entry + 8)
    left_col = 1 if aligned else tl.load(entry + 11)
    right_col = 1 if aligned else tl.load(entry + 13)
    if aligned:  # what a mask is compared with decides how many bytes are read at once
        cols, rank = tl.multiple_of(cols, unit), tl.multiple_of(rank, unit)
    row = tl.load(tile + 1).to(tl.int64) * height + tl.arange(0, height)
    col = tl.load(tile + 2).to(tl.int64) * width + tl.arange(0, width)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    weight = tl.load(base + row[:, None] * base_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    product = tl.zeros((height, width), dtype=tl.float32)
    for start in range(0, rank, depth):
        k = start + tl.arange(0, depth)
        a = tl.load(
            left + row[:, None] * left_row + k[None, :] * left_col,
            mask=(row < rows)[:, None] & (k < rank)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + k[:, None] * right_row + col[None, :] * right_col,
            mask=(k < rank)[:, None] & (col < cols)[None, :],
            other=0.0,
        )
        product = tl.dot(a, b, product, input_precision="ieee")
    weight += tl.load(scalings + index).to(tl.float32) * product
    tl.store(view + row[:, None] * view_row + col[None, :] * view_col, weight.to(dtype), mask=inside)


@triton.jit
def _right_times(
    table, pairs, signs, out, first,
    dtype: tl.constexpr, exact: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """``(R x)[k]`` for one k of one weight; in its place of ``out``."""
    pair = pairs + 2 * (first + tl.program_id(0))
    index, k = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    entry = table + index * _FIELDS
    right = _pointer(entry, 3, dtype, False)
    cols, right_row, right_col = tl.load(entry + 5), tl.load(entry + 12), tl.load(entry + 13)
    total = tl.zeros((width,), dtype=exact)
    for start in range(0, cols, width):
        col = start + tl.arange(0, width)
        value = tl.load(right + k * right_row + col * right_col, mask=col < cols, other=0.0).to(exact)
        total += value * tl.load(signs + col, mask=col < cols, other=0.0).to(exact)
    tl.store(out + tl.load(entry + 14) + k, tl.sum(total, axis=0))


@triton.jit
def _error(
    table, scalings, blocks, signs, inner, out, tolerance, tiny, first,
    dtype: tl.constexpr, exact: tl.constexpr, unit: tl.constexpr, aligned: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """`Recipe.error` of some rows of one weight, for ``inner = R x``."""
    program = tl.program_id(0)
    block = blocks + 2 * (first + program)
    index = tl.load(block).to(tl.int64)
    entry = table + index * _FIELDS
    view = _pointer(entry, 0, dtype, aligned)
    base = _pointer(entry, 1, dtype, aligned)
    left = _pointer(entry, 2, dtype, False)
    rows, cols, rank = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    view_row, base_row = _stride(entry, 7, unit, aligned), _stride(entry, 9, unit, aligned)
    left_row, left_col = tl.load(entry + 10), tl.load(entry + 11)
    view_col = 1 if aligned else tl.load(entry + 8)
    if aligned:
        cols = tl.multiple_of(cols, unit)
    row = tl.load(block + 1).to(tl.int64) * height + tl.arange(0, height)
    served = tl.zeros((height, width), dtype=exact)
    wanted = tl.zeros((height, width), dtype=exact)
    squares = tl.zeros((height, width), dtype=exact)
    for start in range(0, cols, width):
        col = start + tl.arange(0, width)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        sign = tl.load(signs + col, mask=col < cols, other=0.0).to(exact)[None, :]
        weight = tl.load(view + row[:, None] * view_row + col[None, :] * view_col, mask=inside, other=0.0).to(exact)
        served += weight * sign
        squares += weight * weight
        wanted += tl.load(base + row[:, None] * base_row + col[None, :], mask=inside, other=0.0).to(exact) * sign
    product = tl.zeros((height, depth), dtype=exact)
    for start in range(0, rank, depth):
        k = start + tl.arange(0, depth)
        there = (row < rows)[:, None] & (k < rank)[None, :]
        factor = tl.load(left + row[:, None] * left_row + k[None, :] * left_col, mask=there, other=0.0).to(exact)
        product += factor * tl.load(inner + tl.load(entry + 14) + k, mask=k < rank, other=0.0).to(exact)[None, :]
    right = tl.sum(wanted, axis=1) + tl.load(scalings + index).to(exact) * tl.sum(product, axis=1)
    scale = tolerance * tl.sqrt(tl.sum(squares, axis=1)) + tiny
    off = tl.abs(tl.sum(served, axis=1) - right) / scale
    tl.store(out + program * height + tl.arange(0, height), tl.where(row < rows, off, 0.0))


class Grouped:
    """Recipes that are ``W_base + s · L · R``, all of one dtype on one device.

    Args:
        recipes: They. Their memory stays where it is.
        shares: How many shares of them are proven one at a time: number i is ``recipes[i::shares]``.
    """

    def __init__(self, recipes: Sequence[Recipe], shares: int) -> None:
        first = recipes[0].view
        self._dtype, self._device, self._shares = first.dtype, first.device, shares
        self._exact = torch.float64 if first.dtype == torch.float32 else torch.float32
        ranks = [_right(recipe).shape[0] for recipe in recipes]
        offsets = [0, *accumulate(ranks)][:-1]
        entries = [_entry(recipe, offset) for recipe, offset in zip(recipes, offsets, strict=True)]
        self._table = torch.tensor(entries, dtype=torch.int64).to(self._device)
        self._scalings = torch.tensor([recipe.scaling for recipe in recipes], dtype=torch.float64).to(self._device)
        self._inner = torch.zeros(sum(ranks), dtype=self._exact, device=self._device)
        # Tiles whose every row starts on a boundary are read and written 16 bytes at once; others, one by one.
        aligned = [_is_aligned(recipe) for recipe in recipes]
        self._tiles = {
            kind: _cut([r if a is kind else None for r, a in zip(recipes, aligned, strict=True)]).to(self._device)
            for kind in (True, False)
        }
        self._blocks, self._block_starts = self._rows_by_share(recipes, aligned)
        self._pairs, self._pair_starts = self._ranks_by_share(ranks)
        widest = max(end - start for start, end in self._block_starts.values())
        self._errors = torch.zeros(widest * _ROWS, dtype=self._exact, device=self._device)

    def write(self) -> None:
        """Launch the fold of what the payload holds."""
        for aligned, tiles in self._tiles.items():
            if len(tiles):
                _fold[(len(tiles),)](
                    self._table, self._scalings, tiles,
                    _DTYPES[self._dtype], self._unit, aligned, *_TILE, _DEPTH, num_warps=_WARPS,
                )  # fmt: skip

    def error(self, share: int, signs: torch.Tensor) -> torch.Tensor:
        """`Recipe.error` of the worst of a share, a scalar on the device; ``signs`` as there."""
        start, end = self._pair_starts[share]
        found = torch.zeros((), dtype=torch.float64, device=self._device)
        if start == end:
            return found
        exact = tl.float64 if self._exact == torch.float64 else tl.float32
        _right_times[(end - start,)](
            self._table, self._pairs, signs, self._inner, start, _DTYPES[self._dtype], exact, 1024, num_warps=4
        )
        tolerance, tiny = tolerance_of(self._dtype), torch.finfo(torch.float32).tiny
        for aligned in (True, False):
            start, end = self._block_starts[share, aligned]
            if start == end:
                continue
            _error[(end - start,)](
                self._table, self._scalings, self._blocks, signs, self._inner, self._errors, tolerance, tiny, start,
                _DTYPES[self._dtype], exact, self._unit, aligned, _ROWS, _WIDE, _DEPTH, num_warps=8,
            )  # fmt: skip
            found = torch.maximum(found, self._errors[: (end - start) * _ROWS].max().double())  # NaN stays NaN
        return found

    # ---------------------------------------------------------------- tables

    @property
    def _unit(self) -> int:
        """Elements in 16 bytes."""
        return _ALIGNED_BYTES // self._dtype.itemsize

    def _rows_by_share(
        self, recipes: Sequence[Recipe], aligned: Sequence[bool]
    ) -> tuple[torch.Tensor, dict[tuple[int, bool], tuple[int, int]]]:
        """Pairs of a recipe's index and a block of its rows, and where those of each share and kind are."""
        rows: list[tuple[int, int]] = []
        starts: dict[tuple[int, bool], tuple[int, int]] = {}
        for share in range(self._shares):
            for kind in (True, False):
                start = len(rows)
                for index in range(share, len(recipes), self._shares):
                    if aligned[index] is kind:
                        rows += [(index, block) for block in range(-(-recipes[index].view.shape[0] // _ROWS))]
                starts[share, kind] = start, len(rows)
        return torch.tensor(rows, dtype=torch.int32).to(self._device), starts

    def _ranks_by_share(self, ranks: Sequence[int]) -> tuple[torch.Tensor, dict[int, tuple[int, int]]]:
        """Pairs of a recipe's index and a row of its R, and where those of each share are."""
        pairs: list[tuple[int, int]] = []
        starts: dict[int, tuple[int, int]] = {}
        for share in range(self._shares):
            start = len(pairs)
            for index in range(share, len(ranks), self._shares):
                pairs += [(index, k) for k in range(ranks[index])]
            starts[share] = start, len(pairs)
        return torch.tensor(pairs, dtype=torch.int32).to(self._device), starts


def _left(recipe: Recipe) -> torch.Tensor:
    assert recipe.left is not None  # noqa: S101 - a sum has both
    return recipe.left


def _right(recipe: Recipe) -> torch.Tensor:
    assert recipe.right is not None  # noqa: S101 - as above
    return recipe.right


def _entry(recipe: Recipe, offset: int) -> list[int]:
    """A recipe's row of the table, `_FIELDS` numbers; ``offset``: of its part of ``inner``."""
    view, base, left, right = recipe.view, recipe.base, _left(recipe), _right(recipe)
    if base.stride(1) != 1 and base.shape[1] != 1:
        raise ValueError("a pristine copy is kept row by row")
    pointers = [tensor.data_ptr() for tensor in (view, base, left, right)]
    strides = [*view.stride(), base.stride(0), *left.stride(), *right.stride()]
    return [*pointers, *view.shape, right.shape[0], *strides, offset]


def _is_aligned(recipe: Recipe) -> bool:
    unit = _ALIGNED_BYTES // recipe.view.element_size()
    return not any(side % unit for side in (recipe.view.shape[1], _right(recipe).shape[0])) and all(
        tensor.data_ptr() % _ALIGNED_BYTES == 0
        and tensor.stride(1) == 1
        and tensor.stride(0) * tensor.element_size() % _ALIGNED_BYTES == 0
        for tensor in (recipe.view, recipe.base, _left(recipe), _right(recipe))
    )


def _cut(recipes: Sequence[Recipe | None]) -> torch.Tensor:
    """The tiles of all that are given: index, row and column of the tile; int32, shape (tiles, 3)."""
    parts = [torch.empty(0, 3, dtype=torch.int32)]
    for index, recipe in enumerate(recipes):
        if recipe is not None:
            down, across = (-(-size // side) for size, side in zip(recipe.view.shape, _TILE, strict=True))
            tiles = torch.cartesian_prod(torch.arange(down), torch.arange(across)).view(-1, 2)
            parts.append(torch.cat([torch.full((len(tiles), 1), index), tiles], dim=1).int())
    return torch.cat(parts)

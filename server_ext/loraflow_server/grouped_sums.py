"""The row sums of `loraflow_server.checksum` for many tensors in one launch: a Triton kernel over a table of pointers.

In torch each tensor takes two launches and more, and an image of products in 64 bits; here it is read once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["RowSums", "RowTable"]

_HEIGHT, _WARPS = 8, 8
"""Rows that one program sums, and how many warps do."""
_WORD_BYTES, _ALIGNED_BYTES = 4, 16
_FIELDS = tl.constexpr(3)


@triton.jit
def _sum_rows(table, blocks, columns, out, aligned: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
    """``sum over j of w[i, j] · column[j]`` for some rows i of one tensor; words past its end count as 0."""
    block = blocks + 2 * tl.program_id(0)
    entry = table + tl.load(block).to(tl.int64) * _FIELDS
    words = tl.load(entry).to(tl.pointer_type(tl.int32))
    count, first = tl.load(entry + 1), tl.load(entry + 2)
    if aligned:  # read 16 bytes at once
        words, count = tl.multiple_of(words, 16), tl.multiple_of(count, 4)
    row = tl.load(block + 1).to(tl.int64) * height + tl.arange(0, height)
    col = tl.arange(0, width)
    place = row[:, None] * width + col[None, :]
    value = tl.load(words + place, mask=place < count, other=0).to(tl.int64)
    total = tl.sum(value * tl.load(columns + col)[None, :], axis=1)
    tl.store(out + first + row, total, mask=row * width < count)


@dataclass(frozen=True, eq=False)
class RowTable:
    """Where tensors are, and which rows are summed by which program.

    Attributes:
        entries: Pointer, words, and first row in the result of each tensor; int64.
        blocks: Index of the tensor and number of the block of rows; int32, shape (programs, 2).
        aligned: Every pointer and size is a multiple of 16 bytes.
    """

    entries: torch.Tensor
    blocks: torch.Tensor
    aligned: bool


class RowSums:
    """Sums rows on one device.

    Args:
        columns: Weight of each word of a row; int64, shape (a power of two,).
    """

    def __init__(self, columns: torch.Tensor) -> None:
        self._columns = columns
        self._device = columns.device

    def table(self, pointers: Sequence[int], sizes: Sequence[int], firsts: Sequence[int]) -> RowTable:
        """Lay out a launch.

        Args:
            pointers: Of each tensor, a multiple of 4; its memory has no gaps.
            sizes: Bytes of each, a multiple of 4.
            firsts: Its first row in the result.
        """
        words = [size // _WORD_BYTES for size in sizes]
        step = _HEIGHT * len(self._columns)
        counts = torch.tensor([-(-count // step) for count in words], dtype=torch.int64)
        owners = torch.repeat_interleave(torch.arange(len(words)), counts)
        numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        entries = torch.tensor(list(zip(pointers, words, firsts, strict=True)), dtype=torch.int64)
        blocks = torch.stack([owners, numbers], dim=1).int()
        aligned = not any(number % _ALIGNED_BYTES for number in (*pointers, *sizes))
        placed = [made.to(self._device, non_blocking=True) for made in (entries, blocks)]
        return RowTable(placed[0], placed[1], aligned)

    def launch(self, table: RowTable, out: torch.Tensor) -> None:
        """Write the sums of all rows into ``out`` (int64, 1-D); other places of it stay as they are."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            _sum_rows[(len(table.blocks),)](
                table.entries, table.blocks, self._columns, out,
                table.aligned, _HEIGHT, len(self._columns), num_warps=_WARPS,
            )  # fmt: skip

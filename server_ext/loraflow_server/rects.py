"""`Rect`: a rectangle of a source tensor, as the trainer has it, that lies on one rank of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

__all__ = ["Rect", "find_rects"]


@dataclass(frozen=True, order=True)
class Rect:
    """``tensors[tensor][row : row + rows, col : col + cols]``, transposed where the server keeps it so.

    Attributes:
        tensor: Index into the list of tensor names that the layout was agreed for.
        row: First row in the source tensor.
        col: First column in the source tensor.
        rows: Rows taken.
        cols: Columns taken.
        transposed: The server's place has shape (cols, rows).
    """

    tensor: int
    row: int
    col: int
    rows: int
    cols: int
    transposed: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.cols

    @property
    def served_shape(self) -> tuple[int, int]:
        """Shape of the server's place."""
        return (self.cols, self.rows) if self.transposed else (self.rows, self.cols)

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """View of this rectangle of ``source`` (2-D), in the server's orientation."""
        if (self.rows, self.cols) == source.shape:
            return source.T if self.transposed else source
        view = source[self.row : self.row + self.rows, self.col : self.col + self.cols]
        return view.T if self.transposed else view

    def to_list(self) -> list[int]:
        """JSON form."""
        return [self.tensor, self.row, self.col, self.rows, self.cols, int(self.transposed)]

    @classmethod
    def from_list(cls, items: Sequence[Any]) -> Rect:
        """The inverse of `to_list`."""
        tensor, row, col, rows, cols, transposed = (int(item) for item in items)
        return cls(tensor, row, col, rows, cols, bool(transposed))


def find_rects(
    ids: torch.Tensor, starts: Sequence[int], shapes: Sequence[Sequence[int]]
) -> list[tuple[Rect, int, int]]:
    """Read where source elements landed, from a place that was filled with their numbers.

    Args:
        ids: What the place holds, int64, 2-D: 0 where nothing was written, else ``starts[t] + row * cols + col`` for
            element (row, col) of source tensor ``t``.
        starts: First number of each source tensor, ascending, at least 1.
        shapes: Shape (rows, cols) of each source tensor.

    Returns:
        ``(rect, row, col)`` for each piece, with its first row and column in the place. ``rect.tensor`` indexes
        ``starts``. Together they cover exactly the non-zero part.

    Raises:
        ValueError: The numbers are not made of such rectangles: a layout that nobody should guess at.
    """
    written = ids != 0
    rows = written.any(dim=1).nonzero().flatten()
    if rows.numel() == 0:
        return []
    cols = written.any(dim=0).nonzero().flatten()
    top, left = int(rows[0]), int(cols[0])
    inner = ids[top : int(rows[-1]) + 1, left : int(cols[-1]) + 1]
    if not bool((inner != 0).all()):
        raise ValueError("the place is filled with holes")
    for transposed in (False, True):
        pieces = _pieces(inner, starts, shapes, transposed=transposed)
        if pieces is not None:
            return [(rect, top + row, left) for rect, row in pieces]
    raise ValueError("the place is not made of rectangles of its sources")


def _pieces(
    inner: torch.Tensor, starts: Sequence[int], shapes: Sequence[Sequence[int]], *, transposed: bool
) -> list[tuple[Rect, int]] | None:
    """Cut ``inner`` into runs of rows that continue one rectangle, each with its first row; None where some do not."""
    height, width = inner.shape
    first_column = inner[:, 0].contiguous()
    owner = torch.searchsorted(torch.tensor(list(starts)), first_column, right=True) - 1
    columns = torch.tensor([shape[1] for shape in shapes])[owner]
    # Down one row of the place is down one row of the source (a step of its width), or, transposed, along it.
    wanted = torch.ones_like(columns) if transposed else columns
    breaks = ((first_column.diff() != wanted[:-1]) | (owner.diff() != 0)).nonzero().flatten() + 1
    pieces = []
    for first, last in pairwise([0, *breaks.tolist(), height]):
        tensor, cols = int(owner[first]), int(columns[first])
        at = int(first_column[first]) - int(starts[tensor])
        size = (width, last - first) if transposed else (last - first, width)
        rect = Rect(tensor, at // cols, at % cols, size[0], size[1], transposed)
        source = torch.arange(shapes[tensor][0] * cols).view(-1, cols) + int(starts[tensor])
        if not torch.equal(rect.of(source), inner[first:last]):
            return None
        pieces.append((rect, first))
    return pieces

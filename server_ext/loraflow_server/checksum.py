"""A 64-bit checksum of tensors that both sides of the wire compute on their own device, in a handful of launches.

Tensors are laid one after another into a flat *image*, each padded with zeros to whole rows of `BLOCK` 32-bit words.
With ``w[i, j]`` word ``j`` of row ``i`` as a signed integer, the checksum of the tensor that owns rows ``R`` is

    sum over i in R, j of  w[i, j] * column[j] * row[i]    (mod 2**64)

where ``column`` and ``row`` are odd pseudo-random 64-bit numbers (splitmix64 of the position). The sum may be taken in
any order. Odd weights are invertible mod 2**64, so a change inside a single word (one flipped bit, one other value) can
never cancel; exchanged, shifted or several changed words go unseen with a probability of about 2**-32 or less. It
proves delivery, not authenticity: an attacker who chooses the weights can forge it (content digests are blake3).

This module is plain torch, but for what `loraflow_server.grouped_sums` does of it on a GPU; the trainer imports it too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from loraflow_server.grouped_sums import RowSums, RowTable

__all__ = ["BLOCK", "Checksummer", "ImagePlan", "StreamSums", "byte_checksum", "checksums", "plan_image"]

BLOCK = 1024
"""32-bit words in one row of an image (4 KiB)."""

_WORD_BYTES = 4

logger = logging.getLogger("vllm.loraflow")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _odd_weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random int64, shape (count,): splitmix64 of start, start + 1, … (Steele, Lea, Flood, OOPSLA 2014)."""

    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift: int64's own keeps the sign

    z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * _GOLDEN
    z = (z ^ shifted(z, 30)) * _MIX_1
    z = (z ^ shifted(z, 27)) * _MIX_2
    return (z ^ shifted(z, 31)) | 1


@lru_cache(maxsize=16)
def _column_weights(device: torch.device) -> torch.Tensor:
    return _odd_weights(0, BLOCK, device)


@lru_cache(maxsize=16)
def _row_sums(device: torch.device) -> RowSums | None:
    """What sums the rows of many tensors at once on ``device``; None where torch does it one by one."""
    if device.type != "cuda":
        return None
    try:
        from loraflow_server.grouped_sums import RowSums

        made = RowSums(_column_weights(device))
        if _tried_out(made, device):
            return made
        reason = "other sums than torch's"
    except Exception as error:  # noqa: BLE001 - no Triton, no compiler for it, a GPU that it does not know
        reason = f"{type(error).__name__}: {error}"
    logger.warning("loraflow: checksums take launches for each weight, since grouped ones failed here: %s", reason)
    return None


def _tried_out(made: RowSums, device: torch.device) -> bool:
    """Whether rows of random words, the last ones in part, have the sums that torch gives them; on and off a
    boundary of 16 bytes."""
    return all(_agrees(made, device, shift) for shift in (0, 1))


def _agrees(made: RowSums, device: torch.device, shift: int) -> bool:
    words = torch.randint(-(1 << 31), 1 << 31, (40 * BLOCK,), dtype=torch.int32, device=device)
    starts = (0, 9 * BLOCK, 20 * BLOCK + 4 + shift)
    counts = (9 * BLOCK, 11 * BLOCK - 8, 17 * BLOCK + 4 + shift)
    found, wanted = (torch.zeros(9 + 11 + 18, dtype=torch.int64, device=device) for _ in range(2))
    pointers = [words.data_ptr() + start * _WORD_BYTES for start in starts]
    made.launch(made.table(pointers, [count * _WORD_BYTES for count in counts], (0, 9, 20)), found)
    for start, count, row in zip(starts, counts, (0, 9, 20), strict=True):
        rows = torch.zeros(-(-count // BLOCK) * BLOCK, dtype=torch.int32, device=device)
        rows[:count] = words[start : start + count]
        wanted[row : row + len(rows) // BLOCK] = (rows.view(-1, BLOCK) * _column_weights(device)).sum(dim=1)
    return torch.equal(found, wanted)


@dataclass(frozen=True, eq=False)
class ImagePlan:
    """Where each tensor lies in an image.

    Attributes:
        offsets: First element of each tensor, in elements of the image's dtype.
        sizes: Elements of each tensor.
        numel: Elements of the whole image, padding included.
        owner: Tensor that each row belongs to; int64, shape (rows,).
        weights: Weight of each row; int64, shape (rows,).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int
    owner: torch.Tensor
    weights: torch.Tensor

    def empty_image(self, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed image (the padding stays zero for ever); 1-D, on the plan's device."""
        return torch.zeros(self.numel, dtype=dtype, device=self.owner.device)

    def views(self, image: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Each tensor's place in ``image``, in the given shape."""
        places = zip(self.offsets, self.sizes, shapes, strict=True)
        return [image[start : start + size].view(*shape) for start, size, shape in places]


def plan_image(sizes: Sequence[int], itemsize: int, device: torch.device | str = "cpu") -> ImagePlan:
    """Lay tensors of ``sizes`` elements of ``itemsize`` bytes (1, 2 or 4) one after another."""
    per_row = BLOCK * _WORD_BYTES // itemsize
    rows = [-(-size // per_row) for size in sizes]
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    where = torch.device(device)
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows, dtype=torch.int64)).to(where)
    return ImagePlan(
        offsets=tuple(start * per_row for start in starts[:-1]),
        sizes=tuple(sizes),
        numel=starts[-1] * per_row,
        owner=owner,
        weights=_odd_weights(BLOCK, starts[-1], where),
    )


def checksums(image: torch.Tensor, plan: ImagePlan) -> torch.Tensor:
    """Checksum of every tensor of ``image``; int64 (to be read mod 2**64), shape (tensors,), on the image's device."""
    words = image.view(torch.int32).view(-1, BLOCK)
    sums = (words * _column_weights(image.device)).sum(dim=1) * plan.weights
    return torch.zeros(len(plan.sizes), dtype=torch.int64, device=image.device).index_add_(0, plan.owner, sums)


class Checksummer:
    """Checksums of lists of tensors of always the same shapes; its memory and views are made once.

    Args:
        shapes: The shapes, in order.
        dtype: The dtype of all.
        device: Where they are.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._plan = plan_image([math.prod(shape) for shape in shapes], dtype.itemsize, device)
        self._image = self._plan.empty_image(dtype)
        self._views = self._plan.views(self._image, shapes)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The checksum of each tensor; a copy, three launches, and one wait."""
        sums: list[int] = self.launch(tensors).tolist()
        return sums

    def launch(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same without the wait; int64 (to be read mod 2**64), shape (tensors,), on the device."""
        if self._views:
            torch._foreach_copy_(self._views, list(tensors))
        return checksums(self._image, self._plan)


class StreamSums:
    """The `byte_checksum` of each of many tensors that come one by one, in any order, with one wait for all.

    Serves again after `restart`, for tensors of the same sizes.

    Args:
        sizes: Bytes of each tensor.
        device: Where they are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | str = "cpu") -> None:
        where = torch.device(device)
        rows = [-(-size // (BLOCK * _WORD_BYTES)) for size in sizes]
        self._sizes = tuple(sizes)
        self._starts = [0, *accumulate(rows)]
        self._columns = _column_weights(where)
        weights = _odd_weights(BLOCK, max(rows, default=0), where)
        self._weights = torch.cat([weights[:count] for count in rows]) if rows else weights
        self._owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows, dtype=torch.int64)).to(where)
        self._sums = torch.zeros(sum(rows), dtype=torch.int64, device=where)
        self._rest = torch.zeros(BLOCK * _WORD_BYTES, dtype=torch.uint8, device=where)
        self._grouped = _row_sums(where)
        self._tables: dict[tuple[int, ...], tuple[list[int], RowTable]] = {}

    def restart(self) -> None:
        """Forget what was taken in."""
        self._sums.zero_()

    def take(self, index: int, tensor: torch.Tensor, rows_at_once: int = 1 << 12) -> None:
        """Take in the tensor of number ``index``, in bounded scratch memory; two launches for every 16 MB."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.numel() != self._sizes[index]:
            raise ValueError(f"tensor {index} has {flat.numel()} bytes, not {self._sizes[index]}")
        if flat.storage_offset() % _WORD_BYTES:
            flat = flat.clone()
        row = self._starts[index]
        whole = flat.numel() - flat.numel() % (BLOCK * _WORD_BYTES)
        for chunk in torch.split(flat[:whole], rows_at_once * BLOCK * _WORD_BYTES) if whole else ():
            words = chunk.view(torch.int32).view(-1, BLOCK)
            torch.sum(words * self._columns, dim=1, out=self._sums[row : row + words.shape[0]])
            row += words.shape[0]
        if whole < flat.numel():
            self._rest.zero_()[: flat.numel() - whole] = flat[whole:]
            self._sums[row] = (self._rest.view(torch.int32) * self._columns).sum()

    def take_all(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Take in the tensors of these numbers: on a GPU all that have no gaps in one launch, the others one by one."""
        whole: list[tuple[int, int]] = []
        for index, tensor in zip(indices, tensors, strict=True):
            pointer = tensor.data_ptr()
            fits = tensor.numel() * tensor.element_size() == self._sizes[index] and tensor.device == self._sums.device
            if fits and self._grouped and tensor.is_contiguous() and not (pointer | self._sizes[index]) % _WORD_BYTES:
                whole.append((index, pointer))
            else:
                self.take(index, tensor)
        if whole and self._grouped is not None:
            key, pointers = tuple(index for index, _ in whole), [pointer for _, pointer in whole]
            known = self._tables.get(key)
            if known is None or known[0] != pointers:
                sizes, firsts = [self._sizes[index] for index in key], [self._starts[index] for index in key]
                known = self._tables[key] = pointers, self._grouped.table(pointers, sizes, firsts)
            self._grouped.launch(known[1], self._sums)

    def finish(self) -> list[int]:
        """The checksums, in order."""
        total = torch.zeros(len(self._sizes), dtype=torch.int64, device=self._sums.device)
        sums: list[int] = total.index_add_(0, self._owner, self._sums * self._weights).tolist()
        return sums


def byte_checksum(tensor: torch.Tensor, rows_at_once: int = 1 << 14) -> int:
    """Checksum of one tensor of any dtype, in bounded scratch memory; the same number as an image of it alone has."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % (BLOCK * _WORD_BYTES)
    columns = _column_weights(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    row = 0
    for chunk in torch.split(flat[:whole], rows_at_once * BLOCK * _WORD_BYTES):
        words = chunk.view(torch.int32).view(-1, BLOCK)
        total += ((words * columns).sum(dim=1) * _odd_weights(BLOCK + row, words.shape[0], flat.device)).sum()
        row += words.shape[0]
    if whole < flat.numel():
        last = torch.zeros(BLOCK * _WORD_BYTES, dtype=torch.uint8, device=flat.device)
        last[: flat.numel() - whole] = flat[whole:]
        weight = _odd_weights(BLOCK + row, 1, flat.device)
        total += (last.view(torch.int32) * columns).sum() * weight[0]
    return int(total.item())

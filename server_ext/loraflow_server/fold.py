"""Fold: an adapter merged into the served weights, from a pristine copy, on every worker.

    W = round(W_base + s · L · R)        L · R is B · A, or its transpose for embeddings

computed with float32 accumulation and rounded once, straight into the memory that the served model reads, captured CUDA
graphs included. Every fold starts from the copy, so nothing accumulates, and restoring it is bit-identical.

A fold has two halves: `Fold.begin` launches it, `Fold.finish` waits, proves it, and keeps it or takes it back. Between
the two the host is free; the engine runs no step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from loraflow_server.checksum import Checksummer, byte_checksum
from loraflow_server.direct import split_flat
from loraflow_server.errors import PluginError
from loraflow_server.fold_rules import FoldModule, Recipe, make_recipe
from loraflow_server.placement import Served, find_served, require_live
from loraflow_server.precision import true_float32
from loraflow_server.rects import Rect

if TYPE_CHECKING:
    from loraflow_server.grouped import Grouped

__all__ = ["Fold", "FoldModule", "Folded"]

logger = logging.getLogger("vllm.loraflow.worker")

_RESERVE = 512 << 20
"""Bytes of GPU memory that the copy leaves free."""

_SHARES = 8
"""Each fold proves one of so many shares of its products, the next fold the next one."""


class _Payload:
    """Memory for one adapter, and what every served weight is made of from it.

    Attributes:
        flat: The adapter's tensors, one after another; 1-D.
        tensors: Views of ``flat``, in payload order.
        sums: The rectangles that are ``W_base + s · L · R``.
        others: The others.
        grouped: Folds and proves all ``sums`` in a few launches; None where each takes its own.
    """

    def __init__(self, fold: Fold) -> None:
        numel = sum(math.prod(shape) for shape in fold.shapes)
        self.flat = torch.empty(numel, dtype=fold.dtype, device=fold.device)
        self.tensors = split_flat(self.flat, fold.shapes)
        recipes = [
            make_recipe(fold.modules[piece.rect.tensor], piece.rect, piece.view, base, self.tensors)
            for piece, base in zip(fold.served, fold.copy, strict=True)
        ]
        in_place = fold.adds_in_float32
        self.sums = [recipe for recipe in recipes if in_place and recipe.is_sum]
        self.others = [recipe for recipe in recipes if not (in_place and recipe.is_sum)]
        self.grouped = _grouped(self.sums) if fold.grouped else None
        self._views = [recipe.view for recipe in self.sums]
        self._bases = [recipe.base for recipe in self.sums]

    @property
    def recipes(self) -> list[Recipe]:
        """All of them."""
        return self.sums + self.others

    def write(self) -> None:
        """Launch the fold of what ``flat`` holds."""
        if self.grouped is not None:
            self.grouped.write()
        elif self._views:
            torch._foreach_copy_(self._views, self._bases, non_blocking=True)
            for recipe in self.sums:
                recipe.add_product()
        for recipe in self.others:
            recipe.write()

    def error(self, share: int, signs: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Launch the proof of a share: `Recipe.error` of its worst, a scalar, and how many those are."""
        sums, others = self.sums[share::_SHARES], self.others[share::_SHARES]
        found = [recipe.error(signs) for recipe in others]
        if self.grouped is not None:
            found.append(self.grouped.error(share, signs))
        else:
            found += [recipe.error(signs) for recipe in sums]
        nothing = torch.zeros((), dtype=torch.float64, device=signs.device)
        return torch.stack([nothing, *found]).max(), len(sums) + len(others)


@dataclass(frozen=True, eq=False)
class Folded:
    """An adapter that the weights hold, or held; ``payload`` None for the pristine base."""

    policy: str | None = None
    payload: _Payload | None = None


@dataclass(frozen=True, eq=False)
class _UnderWay:
    policy: str
    payload: _Payload
    sums: torch.Tensor
    expected: list[int] | None
    error: torch.Tensor | None = None
    checked: int = 0


class Fold:
    """The pristine copy, and what is folded over it.

    Args:
        model: The served model.
        modules: What the adapter changes.
        tensors: Shapes of the adapter's tensors, in payload order.

    Attributes:
        current: What the weights hold.
        previous: What they held before.
        grouped: Whether products are folded in one launch (`loraflow_server.grouped`).

    Raises:
        PluginError: ``unsupported_layout``, ``not_live``, ``too_little_memory`` (409): the plan takes another way.
    """

    def __init__(self, model: Any, modules: Sequence[FoldModule], tensors: Sequence[tuple[int, int]]) -> None:
        self.modules = tuple(modules)
        self.shapes = tuple(tensors)
        self.served = find_served(model, {module.weight: module.shape for module in modules})
        self.dtype = _one_dtype(self.served)
        self.device = self.served[0].view.device
        require_live(model, self.served)
        self._pointers = [piece.view.data_ptr() for piece in self.served]
        self.copy, self.copy_place = _pristine_copy(self.served)
        self.adds_in_float32 = self.device.type == "cuda" or self.dtype == torch.float32  # and rounds once, in place
        self._payload_sums = Checksummer(self.shapes, self.dtype, self.device)
        self._columns = max(piece.rect.cols for piece in self.served)
        self._folds = 0
        self._under_way: _UnderWay | None = None
        self.current = self.previous = Folded()
        self.grouped = self.device.type == "cuda" and self.copy_place == "device"
        first = _Payload(self)
        if first.grouped is not None and not self._tried_out(first):
            self.grouped = False
            first = _Payload(self)
        # What is served, what was before, and what comes; all of them now, not in the middle of the first syncs.
        self._payloads = [first, _Payload(self), _Payload(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of the pristine copy."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.copy)

    @property
    def rects(self) -> list[Rect]:
        """The pieces of the weights that this rank serves; ``Rect.tensor`` indexes ``modules``."""
        return [piece.rect for piece in self.served]

    def base_sums(self) -> list[int]:
        """Checksum of each piece of the pristine copy."""
        return [byte_checksum(tensor) for tensor in self.copy]

    def served_sums(self) -> list[int]:
        """Checksum of each piece as served now."""
        return [byte_checksum(piece.view) for piece in self.served]

    # ---------------------------------------------------------------- one fold

    def begin(self, policy: str, payload: torch.Tensor, expected: list[int] | None = None) -> None:
        """Take an adapter in and launch its fold; a failure puts back what was there.

        Args:
            policy: Name of the version.
            payload: Its tensors in payload order, in the weights' dtype, as bytes (uint8, 1-D) on the host or on the
                device; read until `finish`.
            expected: Checksum of each tensor.

        Raises:
            PluginError: ``bad_source``: of another size; ``moved``: the weights are not where they were.
        """
        self._require_place()
        room = self._spare()
        if payload.numel() != room.flat.numel() * room.flat.element_size():
            raise PluginError("bad_source", f"the payload has {payload.numel()} bytes, not those of the layout")
        room.flat.view(torch.uint8).copy_(payload, non_blocking=True)
        self._folds += 1
        begun = _UnderWay(policy, room, self._payload_sums.launch(room.tensors), expected)
        self._under_way = begun
        try:
            self._write(room)
            with _exact_products(), torch.no_grad():
                error, checked = room.error(self._folds % _SHARES, self._signs())
            self._under_way = replace(begun, error=error, checked=checked)
        except BaseException:
            self._take_back()
            raise

    def finish(self, *, whole: bool = False) -> dict[str, Any]:
        """Wait for the fold under way and prove it; what does not hold is taken back.

        Args:
            whole: Prove every product, not this fold's share of them.

        Returns:
            ``sums`` (of the payload's tensors), ``error`` (see `Recipe.error`), ``checked`` (products proven).

        Raises:
            PluginError: ``payload_differs`` (409), ``fold_wrong`` (500), ``nothing_begun`` (409).
        """
        begun = self._under_way
        if begun is None:
            raise PluginError("nothing_begun", "no fold is under way", status=409)
        recipes = begun.payload.recipes
        try:
            error = self._largest_error(recipes) if whole else begun.error
            sums = begun.sums.tolist()
            found = 0.0 if error is None else float(error)
            _require_proof(sums, begun.expected, found)
        except BaseException:
            self._take_back()
            raise
        self._under_way = None
        self.previous, self.current = self.current, Folded(begun.policy, begun.payload)
        return {"sums": sums, "error": found, "checked": len(recipes) if whole else begun.checked}

    def largest_error(self) -> float:
        """`Recipe.error` of the worst weight, of all; for the pristine base, whether it is the copy."""
        if self.current.payload is None:
            return 0.0 if self.served_sums() == self.base_sums() else math.inf
        error = self._largest_error(self.current.payload.recipes)
        return 0.0 if error is None else float(error)

    def undo(self, policy: str) -> bool:
        """Put back what was served before ``policy``; False where it is neither folded nor under way."""
        if self._under_way is not None and self._under_way.policy == policy:
            self._take_back()
            return True
        if self.current.policy != policy:
            return False
        self._require_place()
        self._write(self.previous.payload)
        self.current, self.previous = self.previous, Folded()
        return True

    def restore(self) -> None:
        """Put the pristine copy back."""
        self._require_place()
        self._write(None)
        self._under_way = None
        self.current = self.previous = Folded()

    # ---------------------------------------------------------------- inside

    def _spare(self) -> _Payload:
        """Memory that neither what is served nor what was before needs."""
        held = {id(self.current.payload), id(self.previous.payload)}
        return next(payload for payload in self._payloads if id(payload) not in held)

    def _take_back(self) -> None:
        self._write(self.current.payload)
        self._under_way = None  # where that failed, `undo` tries again, and says so

    def _largest_error(self, recipes: Sequence[Recipe]) -> torch.Tensor | None:
        if not recipes:
            return None
        signs = self._signs()
        with torch.no_grad(), _exact_products():
            return torch.stack([recipe.error(signs) for recipe in recipes]).max()

    def _signs(self) -> torch.Tensor:
        """Others each time: what one draw could miss, the next one sees. See `Recipe.error`.

        Drawn on the device: a copy from the host would wait for the fold that was launched before it.
        """
        generator = torch.Generator(self.device).manual_seed(self._folds)
        bits = torch.randint(0, 2, (self._columns,), generator=generator, device=self.device)
        return bits.mul_(2).sub_(1).double()

    def _tried_out(self, payload: _Payload) -> bool:
        """Compile the grouped launches, and see that an adapter of zeros leaves every product as it is; the weights
        are pristine afterwards, to the sign of their zeros."""
        payload.flat.zero_()
        try:
            self._write(payload)
            found = [float(payload.error(share, self._signs())[0]) for share in range(_SHARES)]
            if all(error <= 1 for error in found):  # nor NaN, which no maximum shows
                return True
            reason = f"off by {found} tolerances"
        except Exception as error:  # noqa: BLE001 - a compiler that is not there, a GPU that it does not know
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._write(None)
        logger.warning("loraflow: folds take a launch for each weight, since grouped ones failed here: %s", reason)
        return False

    def _require_place(self) -> None:
        if [piece.view.data_ptr() for piece in self.served] != self._pointers:
            raise PluginError("moved", "the served weights were moved since the layout was agreed", status=409)

    def _write(self, payload: _Payload | None) -> None:
        with torch.no_grad(), _exact_products():
            if payload is None:
                torch._foreach_copy_([piece.view for piece in self.served], self.copy)
            else:
                payload.write()


def _grouped(sums: Sequence[Recipe]) -> Grouped | None:
    """All of ``sums`` in a few launches; None where Triton is not installed."""
    if not sums:
        return None
    try:
        from loraflow_server.grouped import Grouped
    except ImportError as error:
        logger.info("loraflow: folds take a launch for each weight: %s", error)
        return None
    return Grouped(sums, _SHARES)


def _require_proof(sums: list[int], expected: list[int] | None, error: float) -> None:
    if expected is not None and sums != expected:
        raise PluginError("payload_differs", "the payload that arrived is not the one that was sent", status=409)
    if not error <= 1:
        raise PluginError("fold_wrong", f"the folded weights are off by {error:.1f} tolerances", status=500)


@contextmanager
def _exact_products() -> Iterator[None]:
    """No TF32 and no reductions in bfloat16 inside."""
    matmul = torch.backends.cuda.matmul
    kept = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        with true_float32():
            yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = kept


def _one_dtype(served: Sequence[Served]) -> torch.dtype:
    dtypes = {piece.view.dtype for piece in served}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16} or len(dtypes) != 1:
        raise PluginError(
            "unsupported_layout",
            f"the targeted weights are {sorted(map(str, dtypes))}, not one plain dtype",
            status=409,
        )
    return dtypes.pop()


def _pristine_copy(served: Sequence[Served]) -> tuple[list[torch.Tensor], str]:
    """A copy of every piece: on the device where there is room, else in pinned host memory; and where it is."""
    first = served[0].view
    sizes = [piece.view.numel() for piece in served]
    nbytes = sum(sizes) * first.element_size()
    place = "device"
    if first.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(first.device)
        place = "device" if nbytes + _RESERVE <= free else "host"
    try:
        if place == "device":
            flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        else:
            flat = torch.empty(sum(sizes), dtype=first.dtype, pin_memory=True)
    except RuntimeError as error:
        raise PluginError(
            "too_little_memory", f"no {nbytes} bytes for a pristine copy of the weights: {error}", status=409
        ) from error
    copies = [part.view(piece.view.shape) for part, piece in zip(flat.split_with_sizes(sizes), served, strict=True)]
    torch._foreach_copy_(copies, [piece.view for piece in served])
    logger.info("loraflow: pristine copy of %d weights, %d bytes, in %s memory", len(copies), nbytes, place)
    return copies, place

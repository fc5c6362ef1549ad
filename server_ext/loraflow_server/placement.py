"""Where checkpoint weights lie in the served model, learnt from the model's own loaders.

A weight without memory (a ``meta`` tensor) is loaded through ``model.load_weights``, and every copy that the loaders
would make into a parameter is noted instead of made: which part of the source goes to which part of which storage.
Sharding, packing and renaming come out of that as strided views; a loader that does anything but slice is refused, not
guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraflow_server.errors import PluginError
from loraflow_server.rects import Rect

__all__ = ["Served", "find_served", "require_live"]


@dataclass(frozen=True, eq=False)
class Served:
    """A rectangle of a checkpoint weight, and the memory that serves it.

    Attributes:
        rect: The rectangle; ``rect.tensor`` indexes the weights that were asked for. Never transposed.
        view: The served memory, shape (rect.rows, rect.cols), whatever its strides.
        parameter: Name of the served parameter.
    """

    rect: Rect
    view: torch.Tensor
    parameter: str


@dataclass(frozen=True, eq=False)
class _Copy:
    weight: int
    target: torch.Tensor
    source: torch.Tensor


class _NoteCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies out of ``sources`` and makes none; in-place changes of anything else are refused."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {source.untyped_storage()._cdata: index for index, source in enumerate(sources)}
        self.copies: list[_Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            weight = self._weights.get(source.untyped_storage()._cdata)
            if weight is None:
                raise ValueError("a loader computes with a weight before it copies it")
            self.copies.append(_Copy(weight, target, source))
            return target
        if func._schema.is_mutable and not args[0].is_meta:
            if func in {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}:
                return args[0]  # padding behind the last row of a vocabulary: stays what it is
            raise ValueError(f"a loader changes a parameter by {func}")
        return func(*args, **(kwargs or {}))


def _rect_of(source: torch.Tensor, index: int, shape: Sequence[int]) -> tuple[Rect, bool]:
    """The rectangle that a view of a contiguous (rows, cols) weight is, and whether the view is its transpose.

    A weight of shape (n,) counts as (n, 1).
    """
    if len(shape) == 1 and source.dim() == 1 and (source.stride(0) == 1 or source.numel() == 1):
        return Rect(index, int(source.storage_offset()), 0, source.numel(), 1), False
    cols = shape[-1]
    if source.dim() != 2:
        raise ValueError(f"a loader reshapes the weight to {tuple(source.shape)}")
    height, width = source.shape
    row, col = divmod(int(source.storage_offset()), cols)
    if source.stride() == (cols, 1) or (height == 1 and source.stride(1) == 1):
        return Rect(index, row, col, height, width), False
    if source.stride() == (1, cols):
        return Rect(index, row, col, width, height), True
    raise ValueError(f"a loader takes every n-th element of the weight (strides {source.stride()})")


def find_served(model: Any, weights: Mapping[str, Sequence[int]], *, shared: bool = False) -> list[Served]:
    """Where each of ``weights`` (checkpoint name to shape) is served on this rank; no parameter is read or written.

    Args:
        model: The served model.
        weights: What to look for.
        shared: Take memory that serves something else too (tied weights).

    Raises:
        PluginError: ``unsupported_layout``: a weight is not loaded by slicing, or its memory serves something else too.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        owners.setdefault(parameter.untyped_storage()._cdata, []).append(name)
    dtype = next(iter(parameters.values())).dtype
    try:
        copies = _copies(model, weights, dtype)
    except _REFUSALS:
        copies = _copies_one_by_one(model, weights, dtype)
    names, shapes = list(weights), list(weights.values())
    found = []
    for copy in copies:
        try:
            found.append(_served(copy, copy.weight, shapes[copy.weight], owners, shared=shared))
        except ValueError as error:
            raise PluginError("unsupported_layout", f"{names[copy.weight]}: {error}", status=409) from error
    return sorted(found, key=lambda piece: piece.rect)


_REFUSALS = (ValueError, AssertionError, RuntimeError, KeyError, AttributeError, TypeError)
"""What loaders raise for weights that are not theirs."""


def _copies(model: Any, weights: Mapping[str, Sequence[int]], dtype: torch.dtype) -> list[_Copy]:
    sources = [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in weights.values()]
    with torch.no_grad(), _own_loaders(model), _NoteCopies(sources) as notes:
        model.load_weights(list(zip(weights, sources, strict=True)))
    copies: list[_Copy] = notes.copies
    return copies


@contextmanager
def _own_loaders(model: Any) -> Iterator[None]:
    """Each parameter with its own loader inside: an update leaves vLLM's wrapper, which ignores what comes between
    updates, on the parameters of layers that it did not touch."""
    wrapped = {}
    for parameter in model.parameters():
        loader: Any = getattr(parameter, "weight_loader", None)
        own = loader
        while getattr(own, "__name__", "") == "online_process_loader" and hasattr(own, "__wrapped__"):
            own = own.__wrapped__
        if own is not loader:
            wrapped[parameter] = loader
            parameter.weight_loader = own
    try:
        yield
    finally:
        for parameter, loader in wrapped.items():
            parameter.weight_loader = loader


def _copies_one_by_one(model: Any, weights: Mapping[str, Sequence[int]], dtype: torch.dtype) -> list[_Copy]:
    """The same, to find out which weight is refused; raises ``unsupported_layout`` naming it."""
    found = []
    for index, (name, shape) in enumerate(weights.items()):
        try:
            copies = _copies(model, {name: shape}, dtype)
        except _REFUSALS as error:
            reason = str(error) or "a loader refuses its shape"
            raise PluginError("unsupported_layout", f"{name} {list(shape)}: {reason}", status=409) from error
        found += [_Copy(index, copy.target, copy.source) for copy in copies]
    return found


def _served(copy: _Copy, index: int, shape: Sequence[int], owners: Mapping[int, list[str]], *, shared: bool) -> Served:
    names = owners.get(copy.target.untyped_storage()._cdata, [])
    if not names or (len(names) > 1 and not shared):
        raise ValueError(f"its memory serves {names or 'no parameter'}: tied weights cannot be changed apart")
    if copy.target.shape != copy.source.shape:
        raise ValueError(f"a loader broadcasts the weight to {tuple(copy.target.shape)}")
    rect, transposed = _rect_of(copy.source, index, shape)
    target = copy.target.detach()
    target = target.unsqueeze(1) if target.dim() == 1 else target
    return Served(rect, target.T if transposed else target, names[0])


def require_live(model: Any, served: Sequence[Served]) -> None:
    """See that each layer computes with the very memory that was found, not with a repacked copy of it.

    Rows are written for a moment and put back: no step may run meanwhile.

    Raises:
        PluginError: ``not_live``.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "quant_method")}
    for parameter in sorted({piece.parameter for piece in served}):
        layer = layers.get(parameter.rpartition(".")[0])
        weight = None if layer is None else getattr(layer, "weight", None)
        apply: Callable[..., torch.Tensor] | None = getattr(getattr(layer, "quant_method", None), "apply", None)
        if weight is None or apply is None or weight.dim() != 2 or hasattr(layer, "org_vocab_size"):
            continue  # no plain linear layer: the canary of the first version shows whether it is live
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            before = apply(layer, probe, None)[0, 0].clone()
            kept = weight.data[0].clone()
            try:
                weight.data[0] += 1
                after = apply(layer, probe, None)[0, 0].clone()
            finally:
                weight.data[0].copy_(kept)
        if not abs(float(after - before) - weight.shape[1]) < 0.1 * weight.shape[1]:
            raise PluginError("not_live", f"{parameter}: the layer computes with a repacked copy of it", status=409)

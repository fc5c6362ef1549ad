"""Copying many parameters into one flat buffer with the fewest steps: what a sync of an unsharded adapter costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

__all__ = ["FlatViews", "Gatherer", "split_views"]

_SHAPE = attrgetter("shape")
_DEVICE = attrgetter("device")


def split_views(flat: torch.Tensor, templates: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of ``flat``, shape (n,), one after another in the shapes of ``templates``; one call for all of them."""
    views: Sequence[torch.Tensor] = torch._C._nn.unflatten_dense_tensors(flat, list(templates))
    return views


class FlatViews(Mapping[str, torch.Tensor]):
    """Tensors by name as views of a flat buffer, made when the first one is asked for: most snapshots never are.

    Args:
        flat: The values, shape (n,).
        names: Tensor names, in the buffer's order.
        templates: A tensor of each one's shape; never read.
    """

    def __init__(self, flat: torch.Tensor, names: Sequence[str], templates: Sequence[torch.Tensor]) -> None:
        self._flat = flat
        self._names = names
        self._templates = templates

    @cached_property
    def _views(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._names, split_views(self._flat, self._templates), strict=True))

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


class Gatherer:
    """Copies always the same parameters of a model, by one concatenation and, where the dtype differs, one cast.

    The parameters are looked up anew each time. Their flattened views are kept as long as nothing was replaced: same
    objects, same memory (which the views keep alive, so that no other tensor can lie there), same shapes.

    Args:
        owners: The module of each parameter.
        attributes: Its attribute there.
        shapes: Its whole shape.
    """

    def __init__(
        self, owners: Sequence[nn.Module], attributes: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self._homes: list[dict[str, Any]] = [owner._parameters for owner in owners]
        self._attributes = list(attributes)
        self._shapes = [torch.Size(shape) for shape in shapes]
        self._known: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._flattened: list[torch.Tensor] = []
        self._dtypes: set[torch.dtype] = set()

    @torch.no_grad()
    def into(self, flat: torch.Tensor) -> bool:
        """Copy every parameter into ``flat``, one after another; False, and nothing done, where that is not all there
        is to it: shards, strides, several devices, parameters that are not there."""
        try:
            parameters: list[Any] = list(map(getitem, self._homes, self._attributes))
        except KeyError:
            return False
        if not self._unchanged(parameters) and not self._learn(parameters):
            return False
        if self._flattened[0].device != flat.device:
            return False
        if self._dtypes == {flat.dtype}:
            torch.cat(self._flattened, out=flat)
        else:
            flat.copy_(torch.cat(self._flattened))
        return True

    def _unchanged(self, parameters: Sequence[torch.Tensor]) -> bool:
        return (
            len(parameters) == len(self._known)
            and all(map(is_, parameters, self._known))
            and list(map(torch.Tensor.data_ptr, parameters)) == self._addresses
            and list(map(_SHAPE, parameters)) == self._shapes
            and all(map(torch.Tensor.is_contiguous, parameters))
        )

    def _learn(self, parameters: Sequence[Any]) -> bool:
        self._known, self._addresses, self._flattened = [], [], []
        plain = all(
            isinstance(parameter, torch.Tensor)
            and not isinstance(parameter, DTensor)
            and not hasattr(parameter, "ds_id")
            and parameter.shape == shape
            and parameter.is_contiguous()
            and not parameter.is_meta
            for parameter, shape in zip(parameters, self._shapes, strict=True)
        )
        if not plain or len(set(map(_DEVICE, parameters))) != 1:
            return False
        self._known = list(parameters)
        self._addresses = list(map(torch.Tensor.data_ptr, parameters))
        self._flattened = [parameter.detach().view(-1) for parameter in parameters]
        self._dtypes = {part.dtype for part in self._flattened}
        return True

"""How one weight of the base becomes the weight that is served: one small rule per kind of update.

Each rule works in place on a float32 scratch copy of the base tensor and reads the update's tensors in float32, so a
merged weight is rounded once, when the caller casts the result. The formulas are PEFT's (`tuners/lora/layer.py`,
`dora.py`, 0.21): ``W + s·B·A`` and, for DoRA, ``m · (W + s·B·A) / ‖W + s·B·A‖``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "AddBias",
    "ConvDelta",
    "EmbeddingDelta",
    "ExpertsDelta",
    "LinearDelta",
    "Replace",
    "ReplaceRows",
    "Rule",
    "same_update",
]

Parts = Mapping[str, Tensor]
"""Tensors of one update by role: ``A``, ``B``, ``magnitude`` (DoRA), ``value`` (a replacement or an added bias)."""


class Rule(Protocol):
    """Turns a scratch copy of a base tensor into the merged one."""

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """Merge in place.

        Args:
            weight: float32 copy of the base tensor; overwritten.
            parts: Tensors of the update, any float dtype, on any device.
        """
        ...


def _float(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(device=like.device, dtype=torch.float32)


def _normalise(weight: Tensor, magnitude: Tensor) -> None:
    """DoRA: rows of ``weight`` (out, …) get the norms ``magnitude`` (out,)."""
    rows = weight.flatten(1)
    norm = torch.linalg.vector_norm(rows, dim=1)
    weight.mul_((_float(magnitude, weight).flatten() / norm).view(-1, *[1] * (weight.dim() - 1)))


@dataclass(frozen=True)
class LinearDelta:
    """``W + s·B·A``; A is (r, in), B is (out, r), W is (out, in), or (in, out) where ``fan_in_fan_out``."""

    scaling: float
    fan_in_fan_out: bool = False

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """See `Rule`."""
        rows = weight.t() if self.fan_in_fan_out else weight
        rows.addmm_(_float(parts["B"], weight), _float(parts["A"], weight), alpha=self.scaling)
        if "magnitude" in parts:
            _normalise(rows, parts["magnitude"])


@dataclass(frozen=True)
class EmbeddingDelta:
    """``W + s·(B·A)ᵀ``; A is (r, vocabulary), B is (hidden, r), W is (vocabulary, hidden)."""

    scaling: float

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """See `Rule`."""
        weight.addmm_(_float(parts["A"], weight).t(), _float(parts["B"], weight).t(), alpha=self.scaling)
        if "magnitude" in parts:
            _normalise(weight.t(), parts["magnitude"])


@dataclass(frozen=True)
class ConvDelta:
    """A convolution: A is (r, in, *kernel), B is (out, r, 1, …), W is (out, in, *kernel)."""

    scaling: float

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """See `Rule`."""
        a, b = _float(parts["A"], weight).flatten(1), _float(parts["B"], weight).flatten(1)
        weight.view(weight.shape[0], -1).addmm_(b, a, alpha=self.scaling)
        if "magnitude" in parts:
            _normalise(weight, parts["magnitude"])


@dataclass(frozen=True)
class ExpertsDelta:
    """PEFT's ``target_parameters``: one low-rank update per expert of a stacked parameter.

    A is (experts·r, in) with the expert outermost, B is (out, r·experts) with the expert innermost; W is
    (experts, out, in), or (experts, in, out) where ``transposed``, or (out, in) for a single one.
    """

    scaling: float
    experts: int
    transposed: bool

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """See `Rule`."""
        a = _float(parts["A"], weight)
        b = _float(parts["B"], weight)
        a = a.reshape(self.experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)
        stacked = weight if weight.dim() == 3 else weight.unsqueeze(0)
        rows = stacked.transpose(1, 2) if self.transposed else stacked
        rows.baddbmm_(b, a, alpha=self.scaling)


@dataclass(frozen=True)
class AddBias:
    """``lora_bias=True``: the base's bias plus the scaled bias of B."""

    scaling: float

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """See `Rule`."""
        weight.add_(_float(parts["value"], weight), alpha=self.scaling)


@dataclass(frozen=True)
class Replace:
    """The tensor itself is trained: ``modules_to_save``, or a bias."""

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """See `Rule`."""
        weight.copy_(parts["value"])


@dataclass(frozen=True)
class ReplaceRows:
    """``trainable_token_indices``: some rows of an embedding are trained."""

    rows: tuple[int, ...]

    def apply(self, weight: Tensor, parts: Parts) -> None:
        """See `Rule`."""
        index = torch.tensor(self.rows, device=weight.device)
        weight.index_copy_(0, index, _float(parts["value"], weight))


def same_update(first: Rule, second: Rule, one: Parts, other: Parts) -> bool:
    """Whether two updates of tied tensors are one and the same (an embedding's, and an output layer's over it)."""
    if isinstance(first, Replace) and isinstance(second, Replace):
        return torch.equal(one["value"], other["value"])
    if isinstance(second, EmbeddingDelta) and isinstance(first, LinearDelta):
        first, second, one, other = second, first, other, one
    if isinstance(first, EmbeddingDelta) and isinstance(second, LinearDelta):
        same_factors = torch.equal(one["A"].t(), other["B"]) and torch.equal(one["B"].t(), other["A"])
        return first.scaling == second.scaling and same_factors and one.keys() == other.keys() == {"A", "B"}
    return False

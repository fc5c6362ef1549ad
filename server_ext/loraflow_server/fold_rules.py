"""How one served weight is made of its pristine copy and an adapter; prepared once, so that a fold is launches only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loraflow_server.errors import PluginError
from loraflow_server.rects import Rect

__all__ = ["FoldModule", "Recipe", "make_recipe", "tolerance_of"]

_DEVIATIONS = 8.0


def tolerance_of(dtype: torch.dtype) -> float:
    """Rounding errors that a row may add up to, relative to its norm; see `Recipe.error`."""
    return torch.finfo(dtype).eps * _DEVIATIONS


@dataclass(frozen=True)
class FoldModule:
    """One weight that an adapter changes. Either ``a`` and ``b`` are given, or ``value`` is.

        W = W_base + s · B · A,  with ``magnitude`` (DoRA): each row of it scaled to that norm
        W = value,               with ``adds``: W_base + s · value

    Attributes:
        weight: The checkpoint's name of the weight.
        shape: Its shape: (rows, columns), or (n,) for a bias.
        a: Index of A among the adapter's tensors.
        b: Index of B.
        scaling: Factor s.
        transposed: The weight takes (B · A)ᵀ (embeddings), and its columns have the norms of ``magnitude``.
        magnitude: Index of DoRA's magnitudes.
        value: Index of a whole value (modules_to_save, biases).
        adds: ``value`` is added (``lora_bias``).
    """

    weight: str
    shape: tuple[int, ...]
    a: int | None = None
    b: int | None = None
    scaling: float = 1.0
    transposed: bool = False
    magnitude: int | None = None
    value: int | None = None
    adds: bool = False

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> FoldModule:
        """Read what `loraflow_server.fold_desk` checked."""
        return cls(**{**item, "shape": tuple(item["shape"])})


@dataclass(frozen=True, eq=False)
class Recipe:
    """One rectangle of a served weight, and the views of one payload that it is made of.

    Attributes:
        view: The served memory, shape (rows, cols).
        base: Its pristine copy, on the device or on the host.
        scaling: Factor s.
        left: (rows, r): B, or Aᵀ.
        right: (r, cols): A, or Bᵀ.
        magnitude: Norms that rows (rows, 1), or columns (1, cols), get.
        value: (rows, cols), the value itself.
        adds: ``value`` is added.
    """

    view: torch.Tensor
    base: torch.Tensor
    scaling: float
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    value: torch.Tensor | None = None
    adds: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether it is ``W_base + s · L · R`` and nothing else."""
        return self.left is not None and self.magnitude is None

    def add_product(self) -> None:
        """``W += s · L · R`` in place: one launch, accumulated in float32, rounded once."""
        assert self.left is not None  # noqa: S101 - only asked where `is_sum`
        assert self.right is not None  # noqa: S101
        self.view.addmm_(self.left, self.right, alpha=self.scaling)

    def write(self) -> None:
        """Work it out in float32 in scratch memory, and store it, rounded once."""
        self.view.copy_(self.exact())

    def exact(self) -> torch.Tensor:
        """The weight in float32, on the view's device."""
        if self.value is not None and not self.adds:
            return self.value.float()
        weight = self.base.to(self.view.device, torch.float32, non_blocking=True, copy=True)
        if self.value is not None:
            return weight.add_(self.value.float(), alpha=self.scaling)
        left, right = self._factors(torch.float32)
        weight.addmm_(left, right, alpha=self.scaling)
        if self.magnitude is not None:
            norm = torch.linalg.vector_norm(weight, dim=0 if self.magnitude.shape[0] == 1 else 1, keepdim=True)
            weight.mul_(self.magnitude.float() / norm)
        return weight

    def error(self, signs: torch.Tensor) -> torch.Tensor:
        """How far the served memory is off, relative to the largest rounding that storing it can have made; a scalar.

        ``|W x - W_base x - s L (R x)|`` for random signs x, in the worst row (Freivalds, 1977): at most about 1 for
        a right fold, and far above for a wrong one. It shares no product with `write`. Whole values are compared.

        Args:
            signs: ±1, float64, as many as the widest weight has columns.
        """
        if self.value is not None:
            wrong = (self.view != self.exact().to(self.view.dtype)).any()
            return torch.where(wrong, torch.inf, 0.0)
        wide = torch.float64 if self.view.dtype == torch.float32 else torch.float32
        weight = self.view.to(wide)
        base = self.base.to(self.view.device, wide)
        left, right = self._factors(wide)
        x = signs[: weight.shape[1]].to(wide)
        gain = self._gain(base, left, right)
        if gain is not None and gain.shape[0] == 1:
            wanted = base @ (gain[0] * x) + self.scaling * (left @ (right @ (gain[0] * x)))
        else:
            wanted = base @ x + self.scaling * (left @ (right @ x))
            wanted = wanted if gain is None else gain[:, 0] * wanted
        # Rounding errors of a row add up like a random walk; so many standard deviations of it.
        scale = tolerance_of(self.view.dtype) * weight.square().sum(dim=1).sqrt() + torch.finfo(torch.float32).tiny
        return ((weight @ x - wanted).abs() / scale).max().double()

    def _factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.left is not None  # noqa: S101 - a recipe without a value has both
        assert self.right is not None  # noqa: S101
        return self.left.to(dtype), self.right.to(dtype)

    def _gain(self, base: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
        """DoRA's factor per row or column, from ``‖W + s L R‖² = ‖W‖² + 2 s ⟨W, L R⟩ + s² ‖L R‖²``."""
        if self.magnitude is None:
            return None
        if self.magnitude.shape[0] == 1:
            base, left, right = base.T, right.T, left.T
        cross = (left * (base @ right.T)).sum(dim=1)
        product = (left * (left @ (right @ right.T))).sum(dim=1)
        norm = (base.square().sum(dim=1) + 2 * self.scaling * cross + self.scaling**2 * product).sqrt()
        return (self.magnitude.to(base.dtype).flatten() / norm).view(self.magnitude.shape)


def make_recipe(
    module: FoldModule, rect: Rect, view: torch.Tensor, base: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Recipe:
    """The recipe of one rectangle of ``module``'s weight, from the payload ``tensors``.

    Raises:
        PluginError: ``unsupported_layout``: DoRA's norms need whole rows, and this rank has parts of them.
    """
    rows, cols = slice(rect.row, rect.row + rect.rows), slice(rect.col, rect.col + rect.cols)
    if module.value is not None:
        shape = module.shape if len(module.shape) == 2 else (module.shape[0], 1)
        return Recipe(view, base, module.scaling, value=tensors[module.value].view(shape)[rows, cols], adds=module.adds)
    assert module.a is not None  # noqa: S101 - checked with the request
    assert module.b is not None  # noqa: S101
    a, b = tensors[module.a], tensors[module.b]
    left, right = (a.T, b.T) if module.transposed else (b, a)
    magnitude = None
    if module.magnitude is not None:
        given = tensors[module.magnitude].flatten()
        whole = (rect.rows, module.shape[0]) if module.transposed else (rect.cols, module.shape[1])
        if whole[0] != whole[1]:
            raise PluginError(
                "unsupported_layout",
                f"{module.weight}: DoRA rescales whole rows, and this server has split them over its ranks",
                status=409,
            )
        magnitude = given[cols][None, :] if module.transposed else given[rows][:, None]
    return Recipe(view, base, module.scaling, left[rows], right[:, cols], magnitude)

"""What a batch looked like under correction: statistics that stay on the device until they are asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["STALENESS_BINS", "Age", "Diagnostics", "diagnose"]

STALENESS_BINS = 9
"""Bins of the staleness histogram: 0, 1, …, 7 versions behind, and 8 or more."""

_K3_MAX_LOG_RATIO = 20.0
"""The log-ratio is cut here in the k3 estimate alone, so that one absurd token cannot make the batch's KL infinite."""


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """What a batch looked like: 0-d tensors on the device of the inputs.

    A token is *real* where the mask is set, and *scored* where both log-probs are finite as well; d is its trainer
    log-prob minus its rollout log-prob. Fractions are of the real tokens, and 0 in a batch without any.

    Attributes:
        logp_difference_mean: Mean of abs(d) over scored tokens, nats.
        logp_difference_max: Largest abs(d) of a scored token, nats.
        kl: k3 estimate of KL(rollout policy ‖ trainer policy), nats per scored token: mean of exp(d) - 1 - d
            (Schulman, "Approximating KL divergence", 2020).
        ess: Effective sample size of the final weights, as a fraction of the tokens or sequences weighed, masked ones
            included: (Σw)² / (n·Σw²) (Kong 1992). 1 on-policy, 0 where everything is masked.
        weight_min: Smallest final weight of a real token or of a sequence with any.
        weight_mean: Their mean.
        weight_max: Their largest.
        clipped_fraction: Tokens whose ratio was clamped to a bound (mode ``truncate``).
        masked_fraction: Tokens of weight 0, for whatever reason; the next four are its parts and may overlap.
        bounds_masked_fraction: Ratio outside the bounds (mode ``mask``), or too large for float32.
        nonfinite_fraction: A NaN or infinite log-prob in the token or, where sequences are weighed, its sequence.
        off_policy_masked_fraction: Off-policy sequence masking.
        stale_fraction: Older than ``max_staleness``, or from no known version; None without versions.
        scored_tokens: Number of scored tokens.
        staleness_mean: Versions behind the current one, mean over real tokens of known version; None without versions.
        staleness_max: The largest.
        staleness_histogram: (9,) int64, real tokens by staleness: 0, 1, …, 7, and 8 or more.
    """

    logp_difference_mean: Tensor
    logp_difference_max: Tensor
    kl: Tensor
    ess: Tensor
    weight_min: Tensor
    weight_mean: Tensor
    weight_max: Tensor
    clipped_fraction: Tensor
    masked_fraction: Tensor
    bounds_masked_fraction: Tensor
    nonfinite_fraction: Tensor
    off_policy_masked_fraction: Tensor
    scored_tokens: Tensor
    stale_fraction: Tensor | None = None
    staleness_mean: Tensor | None = None
    staleness_max: Tensor | None = None
    staleness_histogram: Tensor | None = None

    def to_dict(self) -> dict[str, float]:
        """All values by name, in one transfer to the host; ``staleness_histogram/0`` … ``/8+`` for the bins."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        histogram = given.pop("staleness_histogram", None)
        names = list(given)
        values = [torch.stack([value.float() for value in given.values()])]
        if histogram is not None:
            last = STALENESS_BINS - 1
            names += [f"staleness_histogram/{i}" for i in range(last)] + [f"staleness_histogram/{last}+"]
            values.append(histogram.float())
        return dict(zip(names, torch.cat(values).tolist(), strict=True))


class Age(NamedTuple):
    """How old a batch's samples or tokens are.

    Attributes:
        versions: (B, T) or (B, 1) int64, how many versions behind the newest.
        known: The same shape, bool.
        counted: (B, T) bool: real tokens of known version.
    """

    versions: Tensor
    known: Tensor
    counted: Tensor


def diagnose(
    difference: Tensor,
    real: Tensor,
    scored: Tensor,
    weights: Tensor,
    clipped: Tensor,
    dropped: Tensor,
    reasons: Mapping[str, Tensor],
    age: Age | None,
) -> Diagnostics:
    """The statistics of one batch.

    Args:
        difference: (B, T) trainer minus rollout log-prob, 0 where not scored.
        real: (B, T) bool.
        scored: (B, T) bool.
        weights: The final ones, (B, T) or (B, 1).
        clipped: bool, of the ratio's shape.
        dropped: bool, what has weight 0; broadcasts to (B, T), as the next does.
        reasons: Why, by the name of the fraction it goes into.
        age: None without versions.
    """
    tokens = real.sum().clamp(min=1)
    scored_tokens = scored.sum()
    units = real if weights.shape == real.shape else real.any(dim=-1, keepdim=True)
    counted = torch.where(units, weights, 0.0)
    magnitude = difference.abs()

    def share(flags: Tensor) -> Tensor:
        return (flags & real).sum() / tokens

    return Diagnostics(
        logp_difference_mean=magnitude.sum() / scored_tokens.clamp(min=1),
        logp_difference_max=_largest(magnitude),
        kl=_k3(difference).sum() / scored_tokens.clamp(min=1),
        ess=_effective_fraction(counted, units),
        weight_min=torch.where(units.any(), -_largest(torch.where(units, -weights, -math.inf)), 0.0),
        weight_mean=counted.sum() / units.sum().clamp(min=1),
        weight_max=_largest(counted),
        clipped_fraction=share(clipped),
        masked_fraction=share(dropped),
        scored_tokens=scored_tokens,
        **{f"{reason}_fraction": share(flags) for reason, flags in reasons.items()},
        **({} if age is None else _staleness(age)),
    )


def _k3(difference: Tensor) -> Tensor:
    difference = difference.clamp(max=_K3_MAX_LOG_RATIO)
    return (torch.expm1(difference) - difference).clamp(min=0.0)


def _effective_fraction(weights: Tensor, units: Tensor) -> Tensor:
    """(Σw)² / (n·Σw²), of weights scaled to at most 1 so that no square overflows. 0 where all are 0."""
    tiny = torch.finfo(weights.dtype).tiny
    scaled = weights / _largest(weights).clamp(min=tiny)
    total, squares = scaled.sum(), scaled.square().sum()
    return (total.square() / (squares * units.sum()).clamp(min=tiny)).clamp(max=1.0)


def _staleness(age: Age) -> dict[str, Tensor]:
    counts = age.counted.long()
    behind = age.versions * counts
    bins = age.versions.clamp(0, STALENESS_BINS - 1).expand_as(counts)
    histogram = counts.new_zeros(counts.shape[0], STALENESS_BINS).scatter_add(1, bins, counts).sum(dim=0)
    return {
        "staleness_mean": behind.sum() / counts.sum().clamp(min=1),
        "staleness_max": _largest(behind),
        "staleness_histogram": histogram,
    }


def _largest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_zeros(())

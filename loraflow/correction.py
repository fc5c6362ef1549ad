"""Off-policy correction: importance weights, masks and diagnostics, in plain torch.

Rollouts come from another policy than the one being trained: an older version, and another implementation of it.
`correct` compares the log-probs that the two give to the sampled tokens, and says how much each may still count.

Everything runs on the device of the inputs: no value is copied to the host and no shape depends on data, until
`Correction.metrics` or `drift` brings the diagnostics over in one transfer.

Where TRL has a formula (``GRPOTrainer``, TRL 1.16), the result is TRL's, with one exception: a log-prob that is NaN or
infinite is no evidence of being on-policy. TRL turns NaN into a difference of 0, which is weight 1; here the token, or
the sequence where sequences are weighed, is masked and counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import torch

from loraflow.diagnostics import Age, Diagnostics, diagnose
from loraflow.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from loraflow.config import SyncConfig

__all__ = ["Correction", "CorrectionOptions", "Diagnostics", "Drift", "correct", "drift", "off_policy_mask"]

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]


@dataclass(frozen=True)
class CorrectionOptions:
    """How `correct` weighs and masks; `from_config` reads it from `SyncConfig`.

    Attributes:
        level: What has one ratio: a ``token``, a ``sequence`` (the product over its tokens), or a sequence by the
            ``geometric`` mean over its tokens.
        mode: ``truncate`` clamps a ratio to the bounds, ``mask`` gives weight 0 outside of them.
        clip_min: Lower bound of the ratio; None for none.
        clip_max: Upper bound of the ratio; None for none.
        off_policy_mask_threshold: Off-policy sequence masking: drop sequences of negative advantage whose mean log-prob
            gap (nats per token) is larger; None for none.
        max_staleness: Versions that a sample may be behind the current one; used where versions are given.
        enabled: False weighs everything that is not masked by exactly 1 and ignores the bounds.

    Raises:
        ConfigError: A word or bound that is impossible.
    """

    level: Level = "sequence"
    mode: Mode = "mask"
    clip_min: float | None = None
    clip_max: float | None = 3.0
    off_policy_mask_threshold: float | None = None
    max_staleness: int = 1
    enabled: bool = True

    def __post_init__(self) -> None:
        if self.level not in get_args(Level) or self.mode not in get_args(Mode):
            raise ConfigError(
                f"no correction {self.level!r} with {self.mode!r}",
                expected=f"level in {get_args(Level)} and mode in {get_args(Mode)}",
            )
        low, high = self.bounds
        if not (0 <= low < high):
            raise ConfigError("impossible clip bounds", expected="0 <= clip_min < clip_max", found=f"{low} and {high}")
        if self.enabled and self.mode == "truncate" and self.clip_min is None and self.clip_max is None:
            raise ConfigError("truncate needs clip_min, clip_max or both", hint="set clip_max, or mode='mask'")
        threshold = self.off_policy_mask_threshold
        if threshold is not None and not threshold >= 0:  # nor NaN, which no sequence would pass
            raise ConfigError("impossible off_policy_mask_threshold", expected="0 or more", found=threshold)
        if self.max_staleness < 0:
            raise ConfigError("impossible max_staleness", expected="0 or more", found=self.max_staleness)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio, 0 and infinity where there is none."""
        low = 0.0 if self.clip_min is None else self.clip_min
        return low, math.inf if self.clip_max is None else self.clip_max

    @classmethod
    def from_config(cls, config: SyncConfig) -> CorrectionOptions:
        """The correction that ``config`` asks for, e.g. ``vllm_importance_sampling_mode="sequence_mask"``."""
        level, mode = config.vllm_importance_sampling_mode.split("_")
        return cls(
            level=cast("Level", level),
            mode=cast("Mode", mode),
            clip_min=config.vllm_importance_sampling_clip_min,
            clip_max=config.vllm_importance_sampling_clip_max,
            off_policy_mask_threshold=config.off_policy_mask_threshold,
            max_staleness=config.max_staleness,
            enabled=config.vllm_importance_sampling_correction,
        )


@dataclass(frozen=True, eq=False)
class Correction:
    """What `correct` found. Multiply the per-token loss by ``weights``; masked tokens already have weight 0 there.

    Attributes:
        weights: float32, no gradient. (B, T) at token level; (B, 1) at sequence and geometric level, or (B, T) there
            too where off-policy sequence masking was given an advantage per token. Padding has the weight of ratio 1,
            as in TRL: the loss masks it.
        keep: (B, T) bool: real tokens that were not masked.
        diagnostics: Statistics, still on the device.
    """

    weights: Tensor
    keep: Tensor
    diagnostics: Diagnostics

    def metrics(self, prefix: str = "loraflow/correction/") -> dict[str, float]:
        """The diagnostics as floats under ``prefix``, in one transfer to the host."""
        return {prefix + name: value for name, value in self.diagnostics.to_dict().items()}


class Drift(NamedTuple):
    """How far the trainer's policy is from the one that made the rollouts.

    Attributes:
        kl: k3 KL, nats per token; infinite where no token could be scored, since nothing is known then.
        ess: Effective sample size as a fraction, 0 to 1.
    """

    kl: float
    ess: float


def drift(correction: Correction) -> Drift:
    """The drift that an adaptive sync interval compares with its budget, in one transfer to the host."""
    found = correction.diagnostics
    kl, ess, scored = torch.stack([found.kl, found.ess, found.scored_tokens.float()]).tolist()
    return Drift(kl=kl if scored else math.inf, ess=ess)


@torch.no_grad()
def correct(
    trainer_logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    *,
    options: CorrectionOptions,
    advantages: Tensor | None = None,
    versions: Tensor | None = None,
    current_version: int | Tensor | None = None,
) -> Correction:
    """Weigh a batch of rollouts by the ratio of trainer to rollout probability.

    With d = trainer - rollout log-prob of a token, the ratio is exp(d) at token level, exp(Σd) at sequence level (both
    as in TRL 1.16's ``GRPOTrainer``), and exp(Σd / number of tokens) at geometric level (the length-normalised ratio
    of GSPO, Zheng et al. 2025). A token that cannot be used (a log-prob is not finite, its version is too old) is
    masked at token level; at the others its whole sequence is, since the ratio would lack it.

    Args:
        trainer_logps: (B, T) log-probs of the sampled tokens under the trainer's policy, natural log. float32, or
            bfloat16 / float16 (computed in float32).
        rollout_logps: (B, T) log-probs that the server returned when it sampled them.
        mask: (B, T), bool or number: non-zero for the tokens that the loss counts; padding is never looked at.
        options: What to compute.
        advantages: (B,), (B, 1) or (B, T), for off-policy sequence masking.
        versions: (B,), (B, 1) or (B, T) integers: the policy version that produced each sample or token; negative where
            it is not known, which masks.
        current_version: The trainer's newest version. A sample from a later one is as good as unknown.

    Raises:
        ConfigError: Shapes that do not fit, or an input that ``options`` needs is missing.
    """
    _check(trainer_logps, rollout_logps, mask, options, advantages, versions, current_version)
    real = mask != 0
    difference = trainer_logps.float() - rollout_logps.float()
    scored = real & torch.isfinite(difference)
    difference = torch.where(scored, difference, 0.0)

    weights, clipped, out_of_bounds = _weigh(torch.exp(_log_ratio(difference, real, options.level)), options)
    reasons = {
        "bounds_masked": out_of_bounds,
        "nonfinite": _per_unit(real & ~scored, options.level),
        "off_policy_masked": torch.zeros_like(out_of_bounds),
    }
    if options.off_policy_mask_threshold is not None and advantages is not None:
        reasons["off_policy_masked"] = ~_low_divergence(difference, real, advantages, options.off_policy_mask_threshold)
    age: Age | None = None
    if versions is not None and current_version is not None:
        age = _age(versions, current_version, real)
        too_old = real & (~age.known | (age.versions > options.max_staleness))
        reasons["stale"] = _per_unit(too_old, options.level)

    dropped = reduce(torch.logical_or, reasons.values())
    weights = torch.where(dropped, 0.0, weights)
    diagnostics = diagnose(difference, real, scored, weights, clipped & ~dropped, dropped, reasons, age)
    return Correction(weights=weights, keep=real & ~dropped, diagnostics=diagnostics)


@torch.no_grad()
def off_policy_mask(
    trainer_logps: Tensor, rollout_logps: Tensor, mask: Tensor, advantages: Tensor, threshold: float
) -> Tensor:
    """Off-policy sequence masking alone: True for what to keep (DeepSeek-V3.2 2025; TRL's ``get_off_policy_mask``).

    A sequence stays where its advantage is not negative, or where the mean of (rollout - trainer log-prob) over its
    tokens is at most ``threshold``. A token that is not scored adds nothing to that mean, as in TRL.

    Args:
        trainer_logps: (B, T) log-probs under the trainer's policy as it is now.
        rollout_logps: (B, T) log-probs from the server.
        mask: (B, T), non-zero for the tokens that the loss counts.
        advantages: (B,), (B, 1) or (B, T).
        threshold: Nats per token.

    Returns:
        Bool, (B, 1), or (B, T) with an advantage per token.
    """
    real = mask != 0
    difference = trainer_logps.float() - rollout_logps.float()
    difference = torch.where(real & torch.isfinite(difference), difference, 0.0)
    return _low_divergence(difference, real, advantages, threshold)


def _log_ratio(difference: Tensor, real: Tensor, level: Level) -> Tensor:
    """(B, T) or (B, 1); ``difference`` is 0 wherever it does not count."""
    if level == "token":
        return difference
    total = difference.sum(dim=-1, keepdim=True)
    return total if level == "sequence" else total / real.sum(dim=-1, keepdim=True).clamp(min=1)


def _per_unit(flags: Tensor, level: Level) -> Tensor:
    """Flags of tokens as flags of what is weighed: a sequence has one where any of its tokens has."""
    return flags if level == "token" else flags.any(dim=-1, keepdim=True)


def _weigh(ratio: Tensor, options: CorrectionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, what was clamped to a bound, and what is to be masked for its ratio. All of the ratio's shape."""
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    if not options.enabled:
        return torch.ones_like(ratio), nothing, nothing
    low, high = options.bounds
    outside = (ratio < low) | (ratio > high)
    if options.mode == "mask":
        return ratio, nothing, outside | ~torch.isfinite(ratio)
    weights = ratio.clamp(low, high)
    return weights, outside, ~torch.isfinite(weights)


def _low_divergence(difference: Tensor, real: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
    divergence = -difference.sum(dim=-1, keepdim=True) / real.sum(dim=-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (divergence <= threshold)


def _age(versions: Tensor, current_version: int | Tensor, real: Tensor) -> Age:
    versions = (versions.unsqueeze(-1) if versions.dim() == 1 else versions).long()
    behind = current_version - versions
    known = (versions >= 0) & (behind >= 0)
    return Age(versions=behind, known=known, counted=known & real)


def _check(
    trainer_logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    options: CorrectionOptions,
    advantages: Tensor | None,
    versions: Tensor | None,
    current_version: int | Tensor | None,
) -> None:
    shape = trainer_logps.shape
    if len(shape) != 2 or rollout_logps.shape != shape or mask.shape != shape:
        raise ConfigError(
            "log-probs and mask must have one shape (B, T)",
            found=f"trainer {tuple(shape)}, rollout {tuple(rollout_logps.shape)}, mask {tuple(mask.shape)}",
            expected="three equal shapes of two dimensions",
        )
    for name, value in (("advantages", advantages), ("versions", versions)):
        if value is not None and tuple(value.shape) not in {shape[:1], (shape[0], 1), tuple(shape)}:
            raise ConfigError(
                f"{name} must be per sample or per token",
                expected=f"shape ({shape[0]},), ({shape[0]}, 1) or {tuple(shape)}",
                found=tuple(value.shape),
            )
    if options.off_policy_mask_threshold is not None and advantages is None:
        raise ConfigError("off_policy_mask_threshold is set, and it looks at advantages: pass advantages=")
    if (versions is None) != (current_version is None):
        raise ConfigError("staleness needs both versions= and current_version=")
    if isinstance(current_version, torch.Tensor) and current_version.numel() != 1:
        raise ConfigError("there is one newest version", expected="a number", found=tuple(current_version.shape))

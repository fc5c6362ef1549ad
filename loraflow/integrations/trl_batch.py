"""The correction of a scored batch: each sample carries its policy version, and weighs what it may still weigh.

TRL scores a whole generation before it shuffles and splits it; `correct_batches` wraps that one method of one trainer
object. No class and no loss is touched: weights act through ``importance_sampling_ratio`` where the loss multiplies
it, and through the advantages where a sequence has one ratio (w·min(c₁A, c₂A) = min(c₁wA, c₂wA) for w ≥ 0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from loraflow.correction import Correction
from loraflow.errors import LoraflowError
from loraflow.integrations.trl_backend import LoraVLLMGeneration
from loraflow.integrations.trl_support import Support
from loraflow.manager import SyncManager
from loraflow.ranks import Ranks
from loraflow.records import Rollouts

__all__ = ["VERSIONS", "correct_batches"]

VERSIONS = "loraflow_versions"
"""Key of the batch: the policy version of each sample, (B,) int64, shuffled and split with everything else."""

Batch = dict[str, Any]


def correct_batches(trainer: Trainer, generation: LoraVLLMGeneration, support: Support) -> None:
    """Let every batch that ``trainer`` scores pass through loraflow's correction."""
    inner: Callable[[Any], Batch] = trainer._generate_and_score_completions

    @functools.wraps(inner)
    def scored(inputs: Any) -> Batch:
        with generation.batch() as rollouts, _first_logps(trainer) as forwards:
            batch = inner(inputs)
        manager = generation.manager
        if manager is None:
            raise LoraflowError("the servers were freed while a batch was scored")
        return _corrected(batch, rollouts, forwards, trainer=trainer, generation=generation, support=support)

    trainer._generate_and_score_completions = scored


def _corrected(
    batch: Batch,
    rollouts: Sequence[Rollouts],
    forwards: Sequence[Tensor],
    *,
    trainer: Trainer,
    generation: LoraVLLMGeneration,
    support: Support,
) -> Batch:
    manager = generation.manager
    assert manager is not None  # noqa: S101 - the caller looked
    ids = batch["completion_ids"]
    versions = batch_versions(len(ids), rollouts, manager).to(ids.device)
    batch = {**batch, VERSIONS: versions}
    trainer_logps = batch.get("old_per_token_logps") if support.old_logps else (forwards[0] if forwards else None)
    rollout_logps = batch.get("sampling_per_token_logps") if support.old_logps else _padded(rollouts, ids)
    if getattr(trainer, "vllm_importance_sampling_correction", True) is False:  # TRL computes no log-probs then
        return {**batch, "advantages": _times(batch["advantages"], fresh(versions, manager))}
    if trainer_logps is None or rollout_logps is None:
        raise LoraflowError(
            "a batch came without the log-probs that its correction needs",
            hint="return logprobs from rollout_func, or set vllm_importance_sampling_correction=False",
        )
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    found = manager.correction(trainer_logps, rollout_logps, mask, advantages=batch["advantages"], versions=versions)
    _tell(found, generation, manager)
    if support.corrected == "ratio":
        return {**batch, "importance_sampling_ratio": found.weights}
    return {**batch, "advantages": _times(batch["advantages"], found.weights)}


def batch_versions(size: int, rollouts: Sequence[Rollouts], manager: SyncManager) -> Tensor:
    """The policy version of each of ``size`` samples, (B,) int64: of several turns, the oldest.

    A ``rollout_func`` that reaches the server on its own is taken to have asked for the policy of that moment.
    """
    used = {version for turn in rollouts for version in turn.versions}
    served = manager.policy.version if manager.policy is not None else -1
    return torch.full((size,), min(used, default=served), dtype=torch.int64)


def fresh(versions: Tensor, manager: SyncManager) -> Tensor:
    """1 for samples that are at most ``max_staleness`` versions behind, 0 for older ones; (B, 1) float32."""
    recent = manager.behind(versions) <= manager.config.max_staleness
    return ((versions >= 0) & recent).float().unsqueeze(-1)


def pooled(values: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """Numbers of every rank as one: the largest maximum, the smallest minimum, the mean of the rest. Collective."""
    every = ranks.gather(values)

    def pool(name: str) -> float:
        found = [numbers[name] for numbers in every if name in numbers]
        if name.endswith("_max"):
            return max(found)
        return min(found) if name.endswith("_min") else sum(found) / len(found)

    return {name: pool(name) for name in every[0]}


def _tell(found: Correction, generation: LoraVLLMGeneration, manager: SyncManager) -> None:
    numbers = {name: value for name, value in found.metrics().items() if "histogram" not in name}
    generation.sync.log(pooled(numbers, manager.ranks))
    if generation.sync.trainer.model.training:
        manager.observe(found)


def _padded(rollouts: Sequence[Rollouts], ids: Tensor) -> Tensor | None:
    """Log-probs of one turn as (B, T), 0 where padded; None where the servers gave none."""
    if len(rollouts) != 1 or rollouts[0].logprobs is None:
        return None
    out = torch.zeros(ids.shape, dtype=torch.float32)
    for row, values in zip(out, rollouts[0].logprobs, strict=True):
        row[: len(values)] = torch.tensor(values)
    return out.to(ids.device)


def _times(advantages: Tensor, weights: Tensor) -> Tensor:
    """Advantages (B,) or (B, T) times weights (B, 1)."""
    return advantages * (weights.squeeze(-1) if advantages.dim() == 1 else weights)


@contextmanager
def _first_logps(trainer: Trainer) -> Iterator[list[Tensor]]:
    """Inside, the log-probs (B, T) of the trainer's forwards are kept; the first is of the policy itself."""
    kept: list[Tensor] = []
    method = getattr(trainer, "_get_per_token_logps_and_entropies", None)
    if method is None:
        yield kept
        return

    @functools.wraps(method)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not kept:
            kept.append(result[0].detach())
        return result

    own = trainer.__dict__.get("_get_per_token_logps_and_entropies")
    trainer._get_per_token_logps_and_entropies = keeping
    try:
        yield kept
    finally:
        if own is None:
            del trainer._get_per_token_logps_and_entropies
        else:
            trainer._get_per_token_logps_and_entropies = own

"""loraflow in one of Axolotl's GRPO trainers, once it is built: generation, sync points and correction.

Only the one trainer object is changed; no class of Axolotl or TRL is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from loraflow.config import SyncConfig
from loraflow.correction import CorrectionOptions, correct
from loraflow.integrations.axolotl_bridge import bridge
from loraflow.integrations.axolotl_config import sync_config
from loraflow.integrations.axolotl_generation import AxolotlGeneration, require_manager
from loraflow.integrations.trl_sync import TrainerSync

__all__ = ["VERSIONS", "attach"]

VERSIONS = "loraflow_versions"
"""Key of a batch: the policy version of each sample, (B,) int64. It is taken out again when the batch was scored."""

_WEIGHED = (
    VERSIONS,
    "importance_sampling_ratio",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "sampling_per_token_logps",
)
"""What the correction of a batch needs of it, by sample."""

Batch = dict[str, Any]


def attach(
    trainer: Trainer, resolved: Mapping[str, Any], generation_kwargs: Mapping[str, Any] | None = None
) -> AxolotlGeneration:
    """Let ``trainer``, built with ``use_vllm=False``, generate on vLLM servers that loraflow keeps on its policy.

    Args:
        trainer: Axolotl's GRPO trainer, plain or async.
        resolved: The config's ``loraflow:`` section, see `axolotl_config.resolve`.
        generation_kwargs: More sampling parameters of vLLM.
    """
    config = sync_config(resolved)
    sync = TrainerSync(trainer, config, resolved["servers"])
    generation = AxolotlGeneration(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        structured_outputs_regex=trainer.args.vllm_structured_outputs_regex,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        logprobs=0,
        generation_kwargs=dict(generation_kwargs or {}),
        loraflow=sync,
    )
    trainer.use_vllm = True
    trainer.vllm_mode = "server"
    trainer.vllm_generation = generation
    trainer._last_loaded_step = -1
    if hasattr(trainer, "_maybe_sync_vllm_weights"):
        bridge(trainer)
        _take_over_async(trainer, generation, config)
    _wrap(trainer, "_generate_and_score_completions", _scoring(generation, config))
    sync.take_hold()
    return generation


# ---------------------------------------------------------------- Axolotl's async trainer


def _take_over_async(trainer: Trainer, generation: AxolotlGeneration, config: SyncConfig) -> None:
    """One sync point, in the training thread, before a rollout is taken; no other one is left."""
    trainer._patched_sync_weights = True  # Axolotl replaces the backend's sync_weights where this is not set

    def sync_point() -> None:
        with _no_generation(trainer, generation):
            generation.sync_weights()

    trainer._maybe_sync_vllm_weights = sync_point
    _wrap(trainer, "_generate_only", _marking(generation))
    _wrap(trainer, "_compute_deferred_scores", _scoring(generation, config))
    _wrap(trainer, "_score_streaming", _scoring_parts(generation, config))
    trainer.add_callback(_StopProducing(trainer))


def _no_generation(trainer: Trainer, generation: AxolotlGeneration) -> AbstractContextManager[Any]:
    """Wait for the background thread where an update changes the weights that it generates with."""
    manager = generation.sync.manager
    lock = getattr(trainer.data_producer, "_generate_lock", None)
    merged = manager is not None and manager.plan.transport == "merged"
    return lock if lock is not None and merged else nullcontext()


class _StopProducing(TrainerCallback):  # type: ignore[misc]
    """At the end of training, before the servers are freed: let the background thread finish, and start no more."""

    def __init__(self, trainer: Trainer) -> None:
        self._producer = trainer.data_producer

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Called by the trainer before the callback that frees the servers."""
        executor = getattr(self._producer, "_executor", None)
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------- scored batches


def _wrap(trainer: Trainer, name: str, after: Callable[[Any], Any]) -> None:
    inner = getattr(trainer, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return after(inner(*args, **kwargs))

    setattr(trainer, name, wrapped)


def _marking(generation: AxolotlGeneration) -> Callable[[Batch], Batch]:
    """Rollouts made ahead of training carry their version until they are scored."""

    def mark(batch: Batch) -> Batch:
        ids = batch["completion_ids"]
        batch[VERSIONS] = torch.full((len(ids),), generation.last_version, dtype=torch.int64, device=ids.device)
        return batch

    return mark


def _scoring(generation: AxolotlGeneration, config: SyncConfig) -> Callable[[Batch], Batch]:
    """Weigh a scored batch by loraflow's correction; the trainer's loss multiplies ``importance_sampling_ratio``.

    Axolotl's own ratio has a lower bound of 1 / cap that no option sets, and gives masked samples that weight instead
    of 0; TRL's takes a log-prob that is NaN for one of ratio 1.
    """
    # Off-policy sequence masking is left to the trainer: its loss has the current log-probs.
    options = replace(CorrectionOptions.from_config(config), off_policy_mask_threshold=None)

    def weigh(batch: Batch) -> Batch:
        versions = batch.pop(VERSIONS, None)
        if "importance_sampling_ratio" not in batch:  # no correction in force
            return batch
        manager, ids = require_manager(generation.sync), batch["completion_ids"]
        if versions is None:
            last = generation.last_version
            if last < 0 and manager.policy is not None:  # a rollout_func asked in other threads, or on rank 0
                last = manager.policy.version
            versions = torch.full((len(ids),), last, dtype=torch.int64, device=ids.device)
        found = correct(
            batch["old_per_token_logps"],
            batch["sampling_per_token_logps"],
            batch["completion_mask"] * batch.get("tool_mask", 1),
            options=options,
            versions=manager.newest_version - manager.behind(versions),
            current_version=manager.newest_version,
        )
        batch["importance_sampling_ratio"] = found.weights
        generation.sync.log(found.metrics())
        if generation.sync.trainer.model.training:
            manager.observe(found)
        return batch

    return weigh


def _scoring_parts(generation: AxolotlGeneration, config: SyncConfig) -> Callable[[list[Batch]], list[Batch]]:
    weigh = _scoring(generation, config)

    def weigh_each(parts: list[Batch]) -> list[Batch]:
        unique = list({id(part): part for part in parts}.values())  # one part may stand there several times
        whole: Batch = {name: torch.cat([part[name] for part in unique]) for name in _WEIGHED if name in unique[0]}
        weigh(whole)
        for part in unique:
            part.pop(VERSIONS, None)
        if "importance_sampling_ratio" in whole:
            ratios = whole["importance_sampling_ratio"].split([len(part["completion_ids"]) for part in unique])
            for part, ratio in zip(unique, ratios, strict=True):
                part["importance_sampling_ratio"] = ratio
        return parts

    return weigh_each

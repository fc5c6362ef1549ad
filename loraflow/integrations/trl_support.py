"""What loraflow does for each of TRL's trainers, what it refuses, and its options from TRL's own arguments."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from transformers import Trainer, TrainingArguments

from loraflow.config import SyncConfig
from loraflow.correction import CorrectionOptions
from loraflow.errors import CapabilityError, ConfigError
from loraflow.urls import url_of

__all__ = [
    "Support",
    "check_combination",
    "config_from_args",
    "listed",
    "same_server",
    "servers_from_args",
    "support_of",
]

Applied = Literal["ratio", "advantages"]

_log = logging.getLogger(__name__)

_CORRECTION = "vllm_importance_sampling_correction"
_HOW_TO_CORRECT = frozenset(
    {
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "off_policy_mask_threshold",
    }
)
_SHARED_OPTIONS = (_CORRECTION, "vllm_server_timeout", *sorted(_HOW_TO_CORRECT - {"off_policy_mask_threshold"}))
_ON_POLICY = "vllm_sync_interval=1, overlap=False and on_failure='raise'"
_THIS_HOST = frozenset({"127.0.0.1", "::1", "localhost", "0.0.0.0", "::"})  # noqa: S104 - compared
_ASYNC = {"AsyncGRPOTrainer": "GRPOTrainer", "AsyncDistillationTrainer": "DistillationTrainer"}


@dataclass(frozen=True)
class Support:
    """What can be done for one trainer.

    Attributes:
        generates: Through TRL's ``VLLMGeneration`` (``backend``), or with a client of its own (``client``).
        corrected: Where the importance weights of a batch act: on the per-token loss (``ratio``), on the advantages
            (``advantages``; the same thing where a sequence has one ratio), or nowhere (None).
        old_logps: The trainer's log-probs at scoring time are in its batch; else they are taken from its forward.
        live_teacher: A teacher on the generation server is the policy itself, and must be asked for by its name.
    """

    generates: Literal["backend", "client"] = "backend"
    corrected: Applied | None = None
    old_logps: bool = False
    live_teacher: bool = False


# By class name, so that TRL's experimental modules need not be imported. A subclass is served as its nearest parent
# here is: GMPOTrainer is a GRPOTrainer whose loss does not read the ratio.
_SUPPORT = {
    "GMPOTrainer": Support(corrected="advantages", old_logps=True),
    "GRPOTrainer": Support(corrected="ratio", old_logps=True),
    "RLOOTrainer": Support(corrected="advantages"),
    "DistillationTrainer": Support(),
    "SDFTTrainer": Support(live_teacher=True),
    "SDPOTrainer": Support(live_teacher=True),
    "GOLDTrainer": Support(),
    "IWOPDTrainer": Support(),
    "OnlineDPOTrainer": Support(generates="client"),
}


def support_of(trainer: Trainer) -> Support:
    """What can be done for ``trainer``.

    Raises:
        CapabilityError: It syncs weights itself, or does not generate on a server; says what to do instead.
    """
    for cls in type(trainer).__mro__:
        if cls.__name__ in _ASYNC:
            raise CapabilityError(
                f"{type(trainer).__name__} generates in the background and syncs adapters itself",
                hint=f"train with {_ASYNC[cls.__name__]} and overlap=True to let deliveries run behind, "
                "or drive its own loop with loraflow.SyncManager",
            )
        if cls.__name__ in _SUPPORT:
            return _SUPPORT[cls.__name__]
    modules = [sys.modules.get(cls.__module__) for cls in type(trainer).__mro__]
    if any(hasattr(module, "VLLMGeneration") for module in modules):
        return Support()
    raise CapabilityError(
        f"{type(trainer).__name__} does not generate through TRL's VLLMGeneration",
        hint="use loraflow.SyncManager in its loop: start, due, sync, policy_name, close",
    )


def config_from_args(args: TrainingArguments, config: SyncConfig | None, options: dict[str, Any]) -> SyncConfig:
    """Options of loraflow, with TRL's own ones filled in where TRL has them and the user set none here.

    ``off_policy_mask_threshold`` stays with TRL where TRL has it: its loss masks with the log-probs of that moment.
    """
    if config is not None and options:
        raise ConfigError("give either a SyncConfig or its options, not both")
    given = options if config is None else config.model_dump(include=config.model_fields_set)
    taken = {name: getattr(args, name) for name in _SHARED_OPTIONS if hasattr(args, name)}
    return SyncConfig(**{**taken, **given})


def servers_from_args(args: TrainingArguments) -> list[str]:
    """Base URLs from TRL's ``vllm_server_base_url``, or its host and port (0.0.0.0 means this host)."""
    url = getattr(args, "vllm_server_base_url", None)
    if url:
        return [str(url)]
    host, port = getattr(args, "vllm_server_host", "127.0.0.1"), getattr(args, "vllm_server_port", 8000)
    return [url_of(str(host), port)]


def check_combination(trainer: Trainer, config: SyncConfig, support: Support) -> None:
    """Refuse what would train on off-policy data as if it were on-policy, and corrections that the loss cannot take.

    Raises:
        ConfigError: What is impossible, with the option to set.
    """
    name, args = type(trainer).__name__, trainer.args
    stock = getattr(args, "vllm_importance_sampling_correction", None)  # None: this trainer has no correction in TRL
    level = config.vllm_importance_sampling_mode.split("_")[0]
    CorrectionOptions.from_config(config)  # impossible bounds are refused here, before anything is started
    if stock is False and config.vllm_importance_sampling_correction and _CORRECTION in config.model_fields_set:
        raise ConfigError(
            "vllm_importance_sampling_correction is True in loraflow's options and False in the training arguments, "
            "where TRL then computes no log-probs to correct by",
            hint="set it in the training arguments",
        )
    if stock is False and config.off_policy_mask_threshold is not None:
        raise ConfigError(
            "off_policy_mask_threshold compares log-probs, and vllm_importance_sampling_correction is False in the "
            "training arguments, where TRL then computes none",
            hint="set vllm_importance_sampling_correction=True in the training arguments",
        )
    corrected = config.vllm_importance_sampling_correction and support.corrected is not None and stock is not False
    unused = _HOW_TO_CORRECT & config.model_fields_set if support.corrected is None else ()
    if unused:
        _log.warning("%s has no importance weights: %s change nothing", name, ", ".join(sorted(unused)))
    if corrected and support.corrected == "advantages" and level == "token":
        raise ConfigError(
            f"{name} has one ratio per sequence, which a correction per token does not fit",
            hint='set vllm_importance_sampling_mode="sequence_mask", "sequence_truncate", or a geometric one',
        )
    if corrected and getattr(args, "loss_type", None) == "vespo" and level != "token":
        raise ConfigError(
            "the VESPO loss takes one correction per token",
            hint='set vllm_importance_sampling_mode="token_truncate" or "token_mask"',
        )
    if config.overlap and config.max_staleness == 0:
        raise ConfigError(
            "overlap=True lets every rollout be one version behind, and max_staleness=0 would mask them all",
            hint="set max_staleness=1 or more, or overlap=False",
        )
    off_policy = _what_makes_it_off_policy(config)
    if not off_policy or corrected:
        return
    if support.corrected is None:
        raise ConfigError(
            f"{off_policy} makes rollouts off-policy, and {name} has no correction for that",
            hint=f"use {_ON_POLICY} with this trainer",
        )
    where = "the training arguments" if stock is False else "loraflow's options"
    raise ConfigError(
        f"{off_policy} makes rollouts off-policy, and no correction is in force",
        hint=f"set vllm_importance_sampling_correction=True in {where}, or {_ON_POLICY}",
    )


def _what_makes_it_off_policy(config: SyncConfig) -> str:
    if config.vllm_sync_interval != 1:
        return f"vllm_sync_interval={config.vllm_sync_interval!r}"
    if config.overlap:
        return "overlap=True"
    return "on_failure='keep_last'" if config.on_failure == "keep_last" and config.max_staleness > 0 else ""


def same_server(one: str, other: str) -> bool:
    """Whether two base URLs name one server; all names of this host are one."""
    first, second = urlsplit(one), urlsplit(other)
    names = {first.hostname or "", second.hostname or ""}
    return first.port == second.port and (len(names) == 1 or names <= _THIS_HOST)


def listed(servers: str | Sequence[str] | None) -> list[str]:
    """One URL or several as a list; empty for None."""
    if servers is None:
        return []
    return [servers] if isinstance(servers, str) else list(servers)

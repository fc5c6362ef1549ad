"""What loraflow refuses in an Axolotl config, before anything is loaded, and why.

A key that Axolotl would take and then not act on is honoured or refused here: none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from loraflow.errors import ConfigError
from loraflow.integrations.axolotl_config import is_async, is_set, prefetch_depth, resolve, section_of, unknown_keys
from loraflow.peft_config import config_features
from loraflow.plan_features import FOLD_REFUSES, MERGE_REFUSES, SLOT_REFUSES

__all__ = ["TRL_EXTRA_KEYS", "refusals"]

TRL_EXTRA_KEYS = frozenset({"vllm_server_base_url"})
"""Keys under ``trl:`` that loraflow reads and Axolotl's own schema does not have (it drops them)."""

_ASYNC_ONLY: Mapping[str, Any] = {
    "prefetch_depth": None,
    "streaming_partial_batch": None,
    "streaming_min_groups": None,
    "reward_num_workers": 1,
    "replay_buffer_size": 0,
    "replay_recompute_logps": True,
    "reroll_start_fraction": 1.0,
    "reroll_max_groups": 1,
    "skip_zero_advantage_batches": True,
}
"""Keys under ``trl:`` that only the async trainer reads, with Axolotl's defaults."""

Rule = Callable[[Mapping[str, Any]], Iterator[str]]


def refusals(cfg: Mapping[str, Any], known_trl_keys: Collection[str]) -> list[str]:
    """Everything in ``cfg`` (parsed YAML) that would train wrongly, hang, or be ignored; empty where all is well.

    Args:
        cfg: The whole config.
        known_trl_keys: The keys that Axolotl's schema of the ``trl:`` section has.
    """
    found: list[str] = []
    try:
        found += unknown_keys(section_of(cfg, "trl"), {*known_trl_keys, *TRL_EXTRA_KEYS}, "trl")
        for rule in _RULES:
            found += rule(cfg)
        resolve(cfg)
    except ConfigError as error:
        found.append(str(error))
    return found


def _trainer(cfg: Mapping[str, Any]) -> Iterator[str]:
    rl = getattr(cfg.get("rl"), "value", cfg.get("rl"))
    if rl not in ("grpo", "gdpo"):
        yield f"rl: {rl} does not generate through a trainer that loraflow can serve: set rl: grpo or gdpo"
    if _number(cfg.get("context_parallel_size"), "context_parallel_size", 1) > 1:
        yield (
            "context_parallel_size above 1: Axolotl's sequence-parallel GRPO trainer generates through a code path of "
            "its own (TRL's old client): set context_parallel_size: 1"
        )


def _generation(cfg: Mapping[str, Any]) -> Iterator[str]:
    if not is_set(cfg, "trl", "use_vllm"):
        yield "the plugin has nothing to do: set trl.use_vllm: true, or remove it from plugins"
    if section_of(cfg, "trl").get("vllm_mode") == "colocate":
        yield (
            "trl.vllm_mode: colocate runs vLLM inside of the trainer, where there is nothing to sync: set "
            "trl.vllm_mode: server and start one with `loraflow serve --axolotl CONFIG`"
        )
    for key in ("vllm_server_host", "vllm_server_port"):
        if key in section_of(cfg, "trl") and not section_of(cfg, "trl")[key]:
            yield f"trl.{key}: Axolotl fails on an empty one: leave the key out"
    if is_set(cfg, "trl", "vllm_enable_sleep_mode"):
        yield "trl.vllm_enable_sleep_mode is for colocate mode, and a server never sleeps: remove it"


def _adapter(cfg: Mapping[str, Any]) -> Iterator[str]:
    adapter = cfg.get("adapter")
    if adapter not in ("lora", "qlora"):
        yield (
            f"adapter: {adapter or 'not set'}: loraflow syncs LoRA adapters; set adapter: lora or adapter: qlora "
            "(for full fine-tuning use Axolotl without the plugin)"
        )
    own = resolve(cfg)
    merged = own.get("vllm_lora_sync") is False or own.get("transport") == "merged"
    quantised = adapter == "qlora" or bool(cfg.get("load_in_4bit")) or bool(cfg.get("load_in_8bit"))
    if quantised and merged and not own.get("dequantize_base"):
        yield (
            "merging into a quantised base is lossy: set trl.vllm_lora_sync: true (the adapter is served, on the "
            "server's own base), or allow it with loraflow.dequantize_base: true"
        )


def _features(cfg: Mapping[str, Any]) -> Iterator[str]:
    """What no server can serve, or no slot where only slots may: said before a model is loaded."""
    quantised_start = section_of(section_of(cfg, "peft"), "loftq_config").get("loftq_bits")
    init = "loftq" if quantised_start else cfg.get("peft_init_lora_weights")
    asked = {
        "peft_use_dora": (cfg.get("peft_use_dora"), "dora"),
        "lora_modules_to_save": (cfg.get("lora_modules_to_save"), "modules_to_save"),
        "lora_target_parameters": (cfg.get("lora_target_parameters"), "target_parameters"),
        "peft_trainable_token_indices": (cfg.get("peft_trainable_token_indices"), "trainable_tokens"),
        "peft_layer_replication": (cfg.get("peft_layer_replication"), "layer_replication"),
        "peft.loftq_config" if quantised_start else "peft_init_lora_weights": (
            config_features({"init_lora_weights": init}, live=True),
            "init_changes_base",
        ),
    }
    own = resolve(cfg)
    for key, (given, feature) in asked.items():
        if not given:
            continue
        if feature in MERGE_REFUSES:
            yield f"{key}: {MERGE_REFUSES[feature]}; remove it"
        elif own.get("transport") == "adapter":
            yield f"{key}: {SLOT_REFUSES[feature]}; remove it, or loraflow.transport: adapter"
        elif own.get("vllm_lora_sync") and feature in FOLD_REFUSES:
            yield f"{key}: {SLOT_REFUSES[feature]}, and {FOLD_REFUSES[feature]}; leave trl.vllm_lora_sync out"


def _asynchronous(cfg: Mapping[str, Any]) -> Iterator[str]:
    trl = section_of(cfg, "trl")
    prefetch = is_set(cfg, "trl", "async_prefetch")
    if prefetch and not is_set(cfg, "trl", "use_data_producer"):
        yield (
            "trl.async_prefetch without trl.use_data_producer generates while the trainer is being built, when no "
            "server is known to be ready: set trl.use_data_producer: true as well"
        )
    if prefetch and (cfg.get("fsdp") or cfg.get("fsdp_config") or cfg.get("deepspeed")):
        how = "deepspeed" if cfg.get("deepspeed") else "fsdp"
        yield (
            f"trl.async_prefetch with {how} deadlocks: the background thread generates while the training thread is in "
            "the collectives of the sharded model: set trl.async_prefetch: false"
        )
    if _number(trl.get("replay_buffer_size"), "trl.replay_buffer_size", 0) > 0:
        yield (
            "trl.replay_buffer_size: replayed groups are older than loraflow.max_staleness versions and would be "
            "masked: set it to 0"
        )
    if not is_async(cfg):
        for key, default in _ASYNC_ONLY.items():
            if trl.get(key) is not None and trl[key] != default:
                yield f"trl.{key} is read by the async trainer alone: set trl.use_data_producer: true, or remove it"


def _own_values(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Values that Axolotl's schema of ``trl:`` has not, and ``loraflow:`` has."""
    trl = section_of(cfg, "trl")
    for key, own in (("vllm_sync_interval", "adaptive"), ("vllm_importance_sampling_mode", "geometric_")):
        if str(trl.get(key)).startswith(own):
            yield f"trl.{key}: Axolotl does not take {trl[key]!r} there: write it as loraflow.{key}"


def _correction(cfg: Mapping[str, Any]) -> Iterator[str]:
    asked = resolve(cfg)
    interval, overlap = asked.get("vllm_sync_interval", 1), bool(asked.get("overlap"))
    depth, held = prefetch_depth(cfg), asked.get("max_staleness", 1)
    reasons = {
        f"vllm_sync_interval: {interval}": interval != 1,
        "loraflow.overlap": overlap,
        "loraflow.on_failure: keep_last": asked.get("on_failure") == "keep_last" and held != 0,
        "trl.async_prefetch": depth > 0,
    }
    corrected = asked.get("vllm_importance_sampling_correction", True)
    for what, off_policy in reasons.items():
        if off_policy and not corrected:
            yield (
                f"{what} makes rollouts off-policy, and no correction is in force: set "
                "trl.vllm_importance_sampling_correction: true"
            )
    if overlap and depth + 1 > held:
        both = f"trl.prefetch_depth: {depth} with loraflow.overlap" if depth else "loraflow.overlap"
        yield (
            f"{both} lets rollouts be {depth + 1} version{'s' if depth else ''} behind, and loraflow.max_staleness: "
            f"{held} masks them: raise max_staleness, or set overlap: false"
        )
    elif depth > held:
        yield (
            f"trl.prefetch_depth: {depth} trains on rollouts {depth} versions old, and loraflow.max_staleness: {held} "
            "masks them: raise max_staleness, or lower prefetch_depth"
        )


def _loss(cfg: Mapping[str, Any]) -> Iterator[str]:
    trl, asked = section_of(cfg, "trl"), resolve(cfg)
    mode = asked.get("vllm_importance_sampling_mode", "sequence_mask")
    if trl.get("loss_type") == "vespo" and not mode.startswith("token_"):
        yield (
            f"trl.loss_type: vespo needs one ratio per token, and vllm_importance_sampling_mode is {mode}: set it to "
            "token_truncate or token_mask"
        )
    if is_set(cfg, "trl", "use_liger_loss") and asked.get("off_policy_mask_threshold") is not None:
        yield (
            "trl.off_policy_mask_threshold with trl.use_liger_loss: TRL's Liger loss does not mask sequences; remove "
            "one of the two"
        )


def _number(value: Any, key: str, default: int) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: must be a number, not {value!r}")
    return value


_RULES: tuple[Rule, ...] = (
    _trainer,
    _generation,
    _adapter,
    _features,
    _asynchronous,
    _own_values,
    _correction,
    _loss,
)

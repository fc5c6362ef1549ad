"""Axolotl configs for the tests: the guide's LoRA-sync example, and every combination that loraflow refuses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from loraflow.integrations.axolotl_config import PLUGIN

KNOWN_TRL_KEYS = frozenset(
    [
        "beta",
        "max_completion_length",
        "use_vllm",
        "vllm_mode",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_guided_decoding_regex",
        "reward_funcs",
        "num_generations",
        "generation_batch_size",
        "importance_sampling_level",
        "temperature",
        "top_p",
        "loss_type",
        "use_liger_loss",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_clip_max",
        "vllm_enable_sleep_mode",
        "use_data_producer",
        "async_prefetch",
        "prefetch_depth",
        "vllm_sync_interval",
        "streaming_partial_batch",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_cap",
        "off_policy_mask_threshold",
        "reward_num_workers",
        "replay_buffer_size",
        "vllm_lora_sync",
        "generation_kwargs",
    ]
)
"""Some of the keys of Axolotl's own schema of the ``trl:`` section."""

GUIDE_TRL = {
    "use_vllm": True,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 300,
    "vllm_lora_sync": True,
    "vllm_sync_interval": 5,
    "vllm_importance_sampling_correction": True,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": 0.5,
}
"""What the guide's sections 2.2, 4.3 and 5.3 write under ``trl:``."""

GUIDE_VLLM = {"host": "0.0.0.0", "port": 8000, "gpu_memory_utilization": 0.85, "dtype": "auto", "max_model_len": 4096}
"""What the guide's section 2.2 writes under ``vllm:``."""

GUIDE: dict[str, Any] = {
    "base_model": "Qwen/Qwen2.5-1.5B-Instruct",
    "plugins": [PLUGIN],
    "vllm": GUIDE_VLLM,
    "rl": "grpo",
    "adapter": "lora",
    "lora_r": 32,
    "lora_alpha": 64,
    "lora_target_linear": True,
    "trl": GUIDE_TRL,
}

SMALL: dict[str, Any] = {
    "chat_template": "tokenizer_default",
    "sequence_len": 128,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "optimizer": "adamw_torch",
    "lr_scheduler": "constant",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "sdp_attention": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "trl": {"max_completion_length": 12, "num_generations": 4, "reward_funcs": ["axolotl_rewards.long"]},
}
"""Sizes for a tiny model on a CPU."""

Patch = Mapping[str, Any]


def merged(*parts: Patch) -> dict[str, Any]:
    """The parts on top of each other, section by section; a key whose value is ``...`` is removed."""
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in copy.deepcopy(dict(part)).items():
            if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
                out[key] = merged(out[key], value)
            else:
                out[key] = value
    return {key: value for key, value in out.items() if value is not ...}


def trl(**keys: Any) -> dict[str, Any]:
    return {"trl": keys}


def own(**keys: Any) -> dict[str, Any]:
    return {"loraflow": keys}


REFUSED: dict[str, tuple[Patch, str]] = {
    # not a trainer that can be served
    "other-rl": ({"rl": "ebft"}, "set rl: grpo or gdpo"),
    "sequence-parallel": ({"context_parallel_size": 2}, "context_parallel_size above 1"),
    "no-vllm": (trl(use_vllm=False), "the plugin has nothing to do"),
    "colocate": (trl(vllm_mode="colocate"), "trl.vllm_mode: colocate runs vLLM inside of the trainer"),
    "sleep-mode": (trl(vllm_enable_sleep_mode=True), "trl.vllm_enable_sleep_mode is for colocate mode"),
    "full-finetuning": ({"adapter": ...}, "adapter: not set: loraflow syncs LoRA adapters"),
    "qlora-merged": (
        {"adapter": "qlora", "load_in_4bit": True, **trl(vllm_lora_sync=False)},
        "merging into a quantised base is lossy",
    ),
    # would hang, or generate too early
    "prefetch-alone": (trl(async_prefetch=True), "trl.async_prefetch without trl.use_data_producer generates while"),
    "prefetch-fsdp": (
        {**trl(async_prefetch=True, use_data_producer=True), "fsdp_config": {"fsdp_version": 2}},
        "trl.async_prefetch with fsdp deadlocks",
    ),
    "prefetch-deepspeed": (
        {**trl(async_prefetch=True, use_data_producer=True), "deepspeed": "zero2.json"},
        "trl.async_prefetch with deepspeed deadlocks",
    ),
    # off-policy data without a correction
    "interval-uncorrected": (
        trl(vllm_importance_sampling_correction=False),
        "vllm_sync_interval: 5 makes rollouts off-policy, and no correction is in force",
    ),
    "overlap-uncorrected": (
        {**trl(vllm_importance_sampling_correction=False, vllm_sync_interval=1), **own(overlap=True)},
        "loraflow.overlap makes rollouts off-policy",
    ),
    "keep-last-uncorrected": (
        {
            **trl(vllm_importance_sampling_correction=False, vllm_sync_interval=1),
            **own(on_failure="keep_last", max_staleness=2),
        },
        "loraflow.on_failure: keep_last makes rollouts off-policy",
    ),
    "prefetch-uncorrected": (
        trl(
            vllm_importance_sampling_correction=False,
            vllm_sync_interval=1,
            async_prefetch=True,
            use_data_producer=True,
        ),
        "trl.async_prefetch makes rollouts off-policy",
    ),
    "overlap-masks-all": (
        own(overlap=True, max_staleness=0),
        "loraflow.overlap lets rollouts be 1 version behind, and loraflow.max_staleness: 0 masks them",
    ),
    "prefetch-and-overlap": (
        {**trl(async_prefetch=True, use_data_producer=True), **own(overlap=True, max_staleness=1)},
        "trl.prefetch_depth: 1 with loraflow.overlap lets rollouts be 2 versions behind, and loraflow.max_staleness: 1",
    ),
    "prefetch-too-deep": (
        {**trl(async_prefetch=True, use_data_producer=True, prefetch_depth=4), **own(max_staleness=2)},
        "trl.prefetch_depth: 4 trains on rollouts 4 versions old, and loraflow.max_staleness: 2 masks them",
    ),
    "replay": (trl(use_data_producer=True, replay_buffer_size=8), "trl.replay_buffer_size: replayed groups are older"),
    # would be ignored
    "async-only": (trl(streaming_partial_batch=True), "trl.streaming_partial_batch is read by the async trainer alone"),
    "unknown-trl-key": (
        trl(vllm_sync_intervall=5),
        "unknown key trl.vllm_sync_intervall; did you mean vllm_sync_interval?",
    ),
    "unknown-own-key": (own(verify_token=16), "unknown option 'verify_token'; did you mean 'verify_tokens'?"),
    "two-intervals": (own(vllm_sync_interval=2), "trl.vllm_sync_interval is 5, but loraflow.vllm_sync_interval is 2"),
    "two-bounds": (
        trl(vllm_importance_sampling_cap=2.0, vllm_importance_sampling_clip_max=4.0),
        "trl.vllm_importance_sampling_cap (2.0) is the old name of",
    ),
    "two-addresses": (
        {**trl(vllm_server_port=9000), **own(servers=["http://10.0.0.7:8000"])},
        "say http://127.0.0.1:9000, but the servers are http://10.0.0.7:8000",
    ),
    # wrong types and bounds
    "interval-zero": (trl(vllm_sync_interval=0), "vllm_sync_interval: must be at least 1"),
    "interval-bool": (trl(vllm_sync_interval=True), "vllm_sync_interval: must be a number of optimizer steps"),
    "interval-word": (trl(vllm_sync_interval="often"), "vllm_sync_interval: "),
    "timeout-negative": (trl(vllm_server_timeout=-1), "vllm_server_timeout: Input should be greater than 0"),
    "threshold-negative": (trl(off_policy_mask_threshold=-0.5), "off_policy_mask_threshold: Input should be greater"),
    "lora-sync-word": (trl(vllm_lora_sync="sometimes"), "vllm_lora_sync: Input should be a valid boolean"),
    "use-vllm-word": (trl(use_vllm="perhaps"), "trl.use_vllm: must be true or false, not 'perhaps'"),
    "depth-zero": (
        trl(async_prefetch=True, use_data_producer=True, prefetch_depth=0),
        "trl.prefetch_depth: must be at least 1, not 0",
    ),
    "bounds-crossed": (
        trl(vllm_importance_sampling_clip_min=4.0),
        "vllm_importance_sampling_clip_min must be below vllm_importance_sampling_clip_max",
    ),
    "server-no-url": (own(servers=["gpu-box:8000"]), "'gpu-box:8000' is not a URL"),
    "server-no-port": (own(servers=["http://gpu-box:99999"]), "'http://gpu-box:99999' is not a URL"),
    "servers-number": (own(servers=8000), "loraflow.servers: must be a list of URLs, not 8000"),
    "host-url": (trl(vllm_server_host="http://gpu-box"), "trl.vllm_server_host: must be a host name or an address"),
    "host-port": (trl(vllm_server_host="gpu-box:8000"), "trl.vllm_server_host: must be a host name or an address"),
    "host-empty": (trl(vllm_server_host=None), "trl.vllm_server_host: Axolotl fails on an empty one"),
    "replay-word": (trl(replay_buffer_size="some"), "trl.replay_buffer_size: must be a number, not 'some'"),
    "parallel-word": ({"context_parallel_size": "two"}, "context_parallel_size: must be a number, not 'two'"),
    "interval-adaptive": (
        trl(vllm_sync_interval="adaptive"),
        "trl.vllm_sync_interval: Axolotl does not take 'adaptive' there: write it as loraflow.vllm_sync_interval",
    ),
    "mode-geometric": (
        trl(vllm_importance_sampling_mode="geometric_mask"),
        "trl.vllm_importance_sampling_mode: Axolotl does not take 'geometric_mask' there",
    ),
    # a flag in quotes is the same flag
    "uncorrected-quoted": (
        trl(vllm_importance_sampling_correction="false"),
        "vllm_sync_interval: 5 makes rollouts off-policy, and no correction is in force",
    ),
    "qlora-merged-quoted": (
        {"adapter": "qlora", "load_in_4bit": True, **trl(vllm_lora_sync="false")},
        "merging into a quantised base is lossy",
    ),
    "staleness-quoted": (
        {**trl(async_prefetch=True, use_data_producer=True, prefetch_depth=4), **own(max_staleness="2")},
        "trl.prefetch_depth: 4 trains on rollouts 4 versions old, and loraflow.max_staleness: 2 masks them",
    ),
    # adapters that nothing serves, or not in the way that was asked for
    "pissa": ({"peft_init_lora_weights": "pissa"}, "peft_init_lora_weights: the adapter's initialisation changed the"),
    "loftq": ({"peft": {"loftq_config": {"loftq_bits": 4}}}, "peft.loftq_config: the adapter's initialisation changed"),
    "replicated-layers": ({"peft_layer_replication": [[0, 2], [1, 2]]}, "peft_layer_replication: replicated layers"),
    "dora-in-slots": ({"peft_use_dora": True, **own(transport="adapter")}, "peft_use_dora: vLLM serves no DoRA"),
    "tokens-and-lora-sync": (
        {"peft_trainable_token_indices": [1, 2]},
        "peft_trainable_token_indices: vLLM's LoRA slots hold no trainable tokens, and trained tokens are not folded",
    ),
    # impossible together
    "lora-sync-and-merged": (own(transport="merged"), "vllm_lora_sync=true asks for the adapter, but a merged"),
    "merged-and-direct": (
        {**trl(vllm_lora_sync=False), **own(carrier="direct")},
        "vllm_lora_sync=false asks for merged weights",
    ),
    "vespo-sequence": (trl(loss_type="vespo"), "trl.loss_type: vespo needs one ratio per token"),
    "liger-masking": (trl(use_liger_loss=True), "trl.off_policy_mask_threshold with trl.use_liger_loss"),
}
"""What is refused: a change of `GUIDE`, and a part of the message."""

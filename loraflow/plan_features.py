"""Which features of an adapter each way of serving refuses, and why."""

from __future__ import annotations

from loraflow.adapter import AdapterSpec

__all__ = ["FOLD_REFUSES", "MERGE_REFUSES", "SLOT_REFUSES", "fold_objection"]

SLOT_REFUSES = {
    "dora": "vLLM serves no DoRA",
    "modules_to_save": "vLLM's LoRA slots hold no full modules (modules_to_save)",
    "bias": "vLLM's LoRA slots hold no biases",
    "lora_bias": "vLLM's LoRA slots hold no biases",
    "alora": "vLLM serves no activated LoRA",
    "layer_replication": "vLLM serves no replicated layers",
    "init_changes_base": "the adapter's initialisation changed the base weights, and the server has the plain ones",
    "trainable_tokens": "vLLM's LoRA slots hold no trainable tokens",
    "target_parameters": "vLLM reads no adapters on bare parameters (target_parameters)",
    "variant": "the adapter's forward is not LoRA's",
    "conv": "vLLM's LoRA slots hold no convolutions",
}
MERGE_REFUSES = {
    "alora": "activated LoRA depends on the input and cannot be merged",
    "layer_replication": "replicated layers have no counterpart in the server's model",
    "variant": "the adapter's forward is not a weight update",
    "init_changes_base": "the adapter's initialisation changed the base weights: the server's could not be restored",
}
FOLD_REFUSES = {
    "trainable_tokens": "trained tokens are not folded",
    "target_parameters": "adapters on bare parameters are not folded",
    "tied_target": "one weight serves as embedding and head",
    "alora": "activated LoRA depends on the prompt",
    "layer_replication": "replicated layers share one weight",
    "init_changes_base": "its initialisation changes the trainer's base",
    "variant": "its forward is not plain LoRA's",
}


def fold_objection(spec: AdapterSpec) -> str | None:
    """Why an adapter cannot be folded; None where it can."""
    found = sorted(spec.features & FOLD_REFUSES.keys())
    if found:
        return f"{FOLD_REFUSES[found[0]]} ({found[0]})"
    deep = next((name for name, shape in spec.shapes.items() if len(shape) > 2 and "magnitude" not in name), None)
    return f"{deep} is no matrix" if deep else None

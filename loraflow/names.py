"""Names of adapter tensors: what wrappers put into them, and what the parts mean.

PEFT writes ``base_model.model.<module>.lora_A.weight`` and its kin, with ``<module>`` the name that the module has in
the plain base model. Whatever wraps the trainer's model adds segments of its own; servers match names, so a segment
left in one is an adapter that loads and does nothing (vllm#34186, vllm#39278).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PEFT_PREFIX", "WRAPPER_SEGMENTS", "TensorName", "is_wrapper_segment", "parse", "strip_wrappers"]

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the base model's own module names."""

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"})
"""Attribute names that only wrappers use: torch.compile, FSDP1, activation checkpointing, fairscale."""

_MODULE_WRAPPERS = frozenset(
    {
        "DataParallel",
        "DeepSpeedEngine",
        "DistributedDataParallel",
        "DistributedDataParallelCPU",
        "FullyShardedDataParallel",
        "PipelineEngine",
    }
)
"""Classes whose only own attribute is ``module``, a name that a base model may use too."""

_TENSOR = re.compile(
    r"(?P<module>.+?)\.(?:(?P<pair>lora_[AB])\.weight"
    r"|(?P<bias>lora_B\.bias)"
    r"|(?P<bare>lora_embedding_[AB]|lora_magnitude_vector)"
    r"|base_layer\.(?P<base>weight|bias)"
    r"|(?P<tokens>token_adapter\.trainable_tokens_delta)"
    r"|(?P<full>[^.]+))\Z"
)


@dataclass(frozen=True)
class TensorName:
    """The parts of one tensor's name.

    Attributes:
        module: Module of the base model, e.g. ``model.layers.0.self_attn.q_proj``.
        kind: ``lora_A``, ``lora_B``, ``lora_embedding_A``, ``lora_embedding_B``, ``lora_magnitude_vector``,
            ``lora_bias`` (bias of B), ``base_weight`` or ``base_bias`` (of a targeted module), ``trainable_tokens``, or
            ``full`` (a parameter of a module of ``modules_to_save``, or a bias of a module without an adapter).
        leaf: Last part of the name: ``weight``, ``bias``, or the kind itself.
    """

    module: str
    kind: str
    leaf: str

    @property
    def is_lora(self) -> bool:
        """True for the matrices of the low-rank product."""
        return self.kind in {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}


def parse(name: str) -> TensorName | None:
    """The parts of ``name``, a tensor name as PEFT writes it; None where it is not under ``base_model.model.``."""
    match = _TENSOR.match(name.removeprefix(PEFT_PREFIX)) if name.startswith(PEFT_PREFIX) else None
    if match is None:
        return None
    module, leaf = match["module"], name.rpartition(".")[2]
    if match["pair"]:
        kind = match["pair"]
    elif match["bias"]:
        kind = "lora_bias"
    elif match["bare"]:
        kind = match["bare"]
    elif match["base"]:
        kind = f"base_{leaf}"
    else:
        kind = "trainable_tokens" if match["tokens"] else "full"
    return TensorName(module, kind, leaf)


def strip_wrappers(name: str) -> str:
    """``name`` without the segments of wrappers, wherever they stand.

    A leading ``module.`` (DDP, DeepSpeed) goes too; elsewhere ``module`` may be the base model's own name, and stays.
    """
    kept = [part for part in name.split(".") if part not in WRAPPER_SEGMENTS]
    while len(kept) > 1 and kept[0] == "module":
        kept.pop(0)
    return ".".join(kept)


def is_wrapper_segment(owner: nn.Module, segment: str) -> bool:
    """Whether child ``segment`` of ``owner`` is what ``owner`` wraps, so that the plain model's names lack it."""
    if segment in WRAPPER_SEGMENTS:
        return True
    return segment == "module" and any(cls.__name__ in _MODULE_WRAPPERS for cls in type(owner).__mro__)

"""Preflight: whether an adapter fits a base model, and what can serve it. Nothing is loaded that was not checked.

Servers match tensors by the end of their names and take what they find (rule 3): an adapter with a wrong prefix, of a
smaller model, or of another rank loads with HTTP 200 and serves something else. Here full names and shapes are compared
with the base model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from loraflow.adapter import AdapterSpec
from loraflow.adapter_files import read_base_config, read_config, read_folder, require_tensor_file
from loraflow.errors import AdapterError
from loraflow.launch import VLLM_LORA_RANKS, round_up_rank
from loraflow.peft_config import beside_language_model, check_config
from loraflow.preflight_shapes import check_shapes
from loraflow.problems import Problem
from loraflow.safetensors_io import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loraflow.adapter import AdapterSnapshot
    from loraflow.basemodel import BaseShapes

__all__ = ["Preflight", "check_folder", "check_snapshot", "check_spec", "require_finite", "transport_for"]

_SLOT_REFUSES = {
    "dora": "DoRA's magnitudes",
    "modules_to_save": "whole modules (modules_to_save)",
    "bias": "trained biases (bias)",
    "lora_bias": "a bias on B (lora_bias)",
    "trainable_tokens": "trained token rows (trainable_token_indices)",
    "target_parameters": "low-rank updates of stacked parameters (target_parameters)",
    "conv": "updates of convolutions",
}
"""What a LoRA slot cannot hold, but merged weights can."""

_NOTHING_SERVES = {
    "alora": "activated LoRA (alora_invocation_tokens): its weights depend on the prompt",
    "init_changes_base": "an init_lora_weights that changes the base (PiSSA, OLoRA, CorDA, LoftQ): the server has the "
    "plain one (save_pretrained(…, path_initial_model_for_weight_conversion=…) makes a plain adapter of it)",
    "layer_replication": "layer_replication: the served model has other layers",
    "variant": "a LoRA variant with a forward of its own (QALoRA, BD-LoRA, VeLoRA, MonteCLoRA, Arrow, KaSA, "
    "or one that is not known here)",
}
"""What neither can."""

_MERGED_SERVES = frozenset({"rank_too_large", "unsupported_feature"})
"""Codes of problems that merged weights may do away with."""

_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

_BASE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class Preflight:
    """The outcome for one folder.

    Attributes:
        problems: What was found; empty for an adapter that a LoRA slot serves.
        transport: What can serve it; None where nothing can.
    """

    problems: tuple[Problem, ...]
    transport: Literal["adapter", "merged"] | None

    @property
    def servable(self) -> bool:
        """Whether anything can serve it."""
        return self.transport is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON form: ``{"servable", "transport", "problems"}``."""
        problems = [problem.to_dict() for problem in self.problems]
        return {"servable": self.servable, "transport": self.transport, "problems": problems}


def check_folder(
    folder: str | Path, base: BaseShapes, *, max_lora_rank: int | None = None, tower: bool = False
) -> Preflight:
    """Check a saved adapter against ``base``. Only safetensors are read; nothing is unpickled.

    Args:
        folder: Folder of the adapter.
        base: The base model that is served.
        max_lora_rank: Largest rank that the server takes, where one is known.
        tower: The server's slots reach a multimodal model's towers (``--enable-tower-connector-lora``).
    """
    folder = Path(folder)
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    if not folder.is_dir():
        return Preflight((Problem("missing_file", f"{folder} is not a folder"),), None)
    try:
        config = read_config(folder)
        problems += check_config(config)
    except AdapterError as error:
        problems += error.problems
    try:
        header = read_header(require_tensor_file(folder))
        shapes = {name: header.tensors[name].shape for name in sorted(header.tensors)}
    except AdapterError as error:
        problems += error.problems
    if problems:
        return Preflight(tuple(problems), None)

    spec = AdapterSpec.build(config, shapes, base.config)
    problems += _other_base(config, base)
    problems += check_spec(spec, base, max_lora_rank=max_lora_rank, tower=tower)
    problems += _check_dtypes({name: info.dtype for name, info in header.tensors.items()})
    if transport_for(spec, problems) is not None:  # the sizes are the base's: a file that claims others is not read
        problems += _check_values(read_folder(folder)[1])
    return Preflight(tuple(problems), transport_for(spec, problems))


def check_snapshot(
    snapshot: AdapterSnapshot, base: BaseShapes, *, max_lora_rank: int | None = None, tower: bool = False
) -> list[Problem]:
    """Check a snapshot against ``base``, values included (one reduction on the snapshot's device)."""
    problems = check_config(snapshot.spec.config)
    if not problems:
        problems += check_spec(snapshot.spec, base, max_lora_rank=max_lora_rank, tower=tower)
    return problems + _not_finite(snapshot)


def require_finite(snapshot: AdapterSnapshot) -> None:
    """Refuse a snapshot with values that are NaN or infinite: a digest would prove that they arrived.

    Raises:
        AdapterError: ``not_finite``, for each tensor that holds some.
    """
    problems = _not_finite(snapshot)
    if problems:
        raise AdapterError(
            f"the adapter at step {snapshot.step} has values that are not finite",
            problems,
            hint="the policy has diverged, or its values are too large for the dtype that is served: "
            "resume from an earlier checkpoint",
        )


def check_spec(
    spec: AdapterSpec, base: BaseShapes, *, max_lora_rank: int | None = None, tower: bool = False
) -> list[Problem]:
    """Check names, shapes, ranks and features against ``base``; values are not looked at."""
    problems = check_shapes(spec.config, spec.shapes, base) + _check_rank(spec.max_rank, max_lora_rank)
    if "tower" in spec.features and not tower:
        problems.append(Problem("unsupported_feature", _explain_tower(spec)))
    for feature in sorted(spec.features & _SLOT_REFUSES.keys()):
        if feature == "modules_to_save" and set(spec.config["modules_to_save"]) <= {"score", "classifier"}:
            continue
        if feature == "conv" and "conv" not in base.kinds.values():
            continue  # damage, and told as such
        problems.append(Problem("unsupported_feature", f"a LoRA slot cannot hold {_SLOT_REFUSES[feature]}: merge it"))
    problems += [
        Problem("unsupported_feature", f"nothing can serve {_NOTHING_SERVES[feature]}")
        for feature in sorted(spec.features & _NOTHING_SERVES.keys())
    ]
    return problems


def _check_rank(rank: int, limit: int | None) -> list[Problem]:
    """Against the server's limit, where one is known, and against the largest that any server can be given."""
    if rank > VLLM_LORA_RANKS[-1]:
        message = f"rank {rank}, but vLLM's LoRA slots take {VLLM_LORA_RANKS[-1]} at most: merge it"
    elif limit is not None and rank > limit:
        message = f"rank {rank}, but the server takes {limit}: start it with --max-lora-rank {round_up_rank(rank)}"
    else:
        return []
    return [Problem("rank_too_large", message)]


def transport_for(spec: AdapterSpec, problems: list[Problem]) -> Literal["adapter", "merged"] | None:
    """What can serve an adapter with these problems."""
    if not problems:
        return "adapter"
    tied_apart = "tied_target" in spec.features and not spec.config.get("ensure_weight_tying")
    # A problem of one tensor is damage; one of the whole adapter is a limit of slots.
    damaged = any(problem.code not in _MERGED_SERVES or problem.tensor is not None for problem in problems)
    return None if damaged or tied_apart or spec.features & _NOTHING_SERVES.keys() else "merged"


def _explain_tower(spec: AdapterSpec) -> str:
    outside = beside_language_model(spec.shapes)
    return (
        f"{len(outside)} modules lie outside of the language model ({outside[0]}, …): LoRA slots reach them only with "
        "vLLM's --enable-tower-connector-lora, and ignore them otherwise; leave them out (exclude_modules), or merge"
    )


def _other_base(config: Mapping[str, Any], base: BaseShapes) -> list[Problem]:
    """`base_mismatch` where the adapter names a base that is at hand and of another shape."""
    name = config.get("base_model_name_or_path")
    trained, served = _text_config(read_base_config(name)), _text_config(base.config)
    differ = [
        f"{key} {trained[key]} there, {served[key]} here"
        for key in _BASE_KEYS
        if key in trained and key in served and trained[key] != served[key]
    ]
    return [Problem("base_mismatch", f"trained on {name}: {', '.join(differ)}")] if differ else []


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _check_dtypes(dtypes: Mapping[str, torch.dtype]) -> list[Problem]:
    return [
        Problem("unsupported_feature", f"values of {dtype}; an adapter is float32, bfloat16 or float16", name)
        for name, dtype in dtypes.items()
        if dtype not in _DTYPES
    ]


def _not_finite(snapshot: AdapterSnapshot) -> list[Problem]:
    return [] if snapshot.finite else _check_values(snapshot.tensors)


def _check_values(tensors: Mapping[str, torch.Tensor]) -> list[Problem]:
    problems = []
    for name, tensor in tensors.items():
        finite = torch.isfinite(tensor.float())  # no server computes with more than float32 holds
        if not bool(finite.all()):
            bad = tensor.numel() - int(finite.sum())
            problems.append(Problem("not_finite", f"{bad} of {tensor.numel()} values are NaN or infinite", name))
    return problems

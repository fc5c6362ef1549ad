"""What a live model must be before its adapter is copied: each check raises `AdapterError` and says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from peft import PeftModel

from loraflow.errors import AdapterError
from loraflow.problems import Problem

if TYPE_CHECKING:
    import torch
    from peft.tuners.lora import LoraLayer
    from torch import nn

__all__ = [
    "refuse_buffers",
    "refuse_inactive",
    "refuse_lost",
    "refuse_partial",
    "refuse_several",
    "refuse_shapes",
]

_SHOWN = 3


def refuse_several(model: nn.Module) -> None:
    """Refuse a model that holds several PEFT models, beside each other or one in the other: which is the policy?"""
    found = [name or "the model itself" for name, module in model.named_modules() if isinstance(module, PeftModel)]
    if len(found) > 1:
        raise AdapterError(
            f"{type(model).__name__} holds {len(found)} PEFT models ({', '.join(found[:_SHOWN])}), and a policy is one",
            hint="pass the policy's own model; wrap a base once, and give it further adapters with add_adapter",
        )


def refuse_inactive(layers: Mapping[str, LoraLayer], adapter: str) -> None:
    """Refuse layers whose forward is not the base's weight beside ``adapter``: merged, switched off, or of another one.

    A server would be given the adapter all the same, and serve another policy than the trainer's forward.
    """
    merged = [name for name, layer in layers.items() if layer.merged]
    if merged:
        raise AdapterError(
            f"an adapter is merged into the trainer's weights ({_some(merged)}): the base is not the servers' any more",
            hint="call model.unmerge_adapter() first",
        )
    disabled = [name for name, layer in layers.items() if layer.disable_adapters]
    if disabled:
        raise AdapterError(
            f"the adapter is switched off ({_some(disabled)}): the trainer's forward is the base's",
            hint="sync outside of disable_adapter(), or call model.enable_adapter_layers() first",
        )
    others = {name: active for name, layer in layers.items() if (active := list(layer.active_adapters)) != [adapter]}
    if others:
        name, active = next(iter(others.items()))
        raise AdapterError(
            f"{len(others)} layers use other adapters than {adapter!r}, the model's active one: {name} has {active}",
            hint="choose the adapter for the whole model, with model.set_adapter(name)",
        )


def refuse_lost(trainable: Sequence[str]) -> None:
    """Refuse trainable parameters that are not part of the adapter."""
    if trainable:
        raise AdapterError(
            f"{len(trainable)} trainable parameters are not part of the adapter and would never reach a server: "
            + _some(sorted(trainable)),
            hint="name their modules in LoraConfig(modules_to_save=[…]), or freeze them",
        )


def refuse_buffers(peft_model: PeftModel, adapter: str) -> None:
    """Refuse modules of ``modules_to_save`` with buffers that are saved: only parameters are carried."""
    marker = f".modules_to_save.{adapter}."
    names = [name for name, _ in peft_model.named_buffers() if marker in f".{name}"]
    persistent = set(peft_model.state_dict().keys()).intersection(names) if names else set()
    if persistent:
        raise AdapterError(
            f"modules_to_save holds buffers that training changes ({', '.join(sorted(persistent)[:3])}); "
            "only parameters can be carried"
        )


def refuse_shapes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are shards: empty, or flat."""
    problems = []
    for name, shape in shapes.items():
        if 0 in shape or not shape:
            problems.append(Problem("empty_tensor", f"shape {shape}: a shard, not the whole tensor", name))
        elif (".lora_A." in name or ".lora_B.weight" in name or ".lora_embedding_" in name) and len(shape) < 2:
            problems.append(Problem("bad_shape", f"shape {shape}, expected two dimensions: a flattened shard", name))
    if problems:
        raise AdapterError(
            "the adapter's tensors are not whole",
            problems,
            hint="pass the wrapped model (FSDP, DeepSpeed engine), and call on every rank",
        )


def refuse_partial(shapes: Mapping[str, tuple[int, ...]], sources: Sequence[torch.Tensor]) -> None:
    """Refuse gathered tensors (``sources``, in the order of ``shapes``) of other shapes, or without data."""
    pairs = list(zip(shapes.items(), sources, strict=True))
    problems = [
        Problem("bad_shape", f"gathered as {tuple(source.shape)}, expected {shape}", name)
        for (name, shape), source in pairs
        if tuple(source.shape) != shape
    ]
    problems += [
        Problem("empty_tensor", "offloaded: the parameter has no data (meta device)", name)
        for (name, _), source in pairs
        if source.is_meta
    ]
    if problems:
        raise AdapterError("the adapter's tensors could not be gathered", problems, hint="keep the adapter on a device")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")

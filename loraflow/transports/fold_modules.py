"""What a fold says of an adapter: the tensors of the payload, and for each changed weight what it is made of.

The names are PEFT's: ``X.lora_A.weight`` and its partners change ``X.weight``, ``X.lora_B.bias`` is added to
``X.bias``, and a tensor without ``lora_`` in its name (``modules_to_save``, trained biases) takes the place of the
base's own. Whether the server has such weights, and where, it finds out itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from loraflow.adapter import AdapterSpec
from loraflow.capture import find_peft_model
from loraflow.errors import AdapterError
from loraflow.layout import module_of
from loraflow.merge_model import named_modules
from loraflow.names import PEFT_PREFIX

__all__ = ["BaseWeight", "base_weight_of", "conv1d_modules", "fold_modules", "payload_shapes"]

_SIDES = {".lora_A.weight": "a", ".lora_embedding_A": "a", ".lora_B.weight": "b", ".lora_embedding_B": "b"}
_MAGNITUDE = ".lora_magnitude_vector"
_LORA_BIAS = ".lora_B.bias"

BaseWeight = Callable[[str], "torch.Tensor | None"]
"""A weight's name in the base model to its frozen value, or None where it cannot be had (sharded, trained in place)."""


def payload_shapes(spec: AdapterSpec) -> dict[str, tuple[int, int]]:
    """The adapter's tensors, sorted by name, as matrices: vectors of n are (n, 1).

    Raises:
        AdapterError: One has more than two dimensions.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, shape in sorted(spec.shapes.items()):
        if len(shape) > 2 and not name.endswith(_MAGNITUDE):
            raise AdapterError(f"{name} has {len(shape)} dimensions: only matrices and vectors are folded")
        shapes[name] = (shape[0], shape[1]) if len(shape) == 2 else (math.prod(shape), 1)
    return shapes


def fold_modules(spec: AdapterSpec, conv1d: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """For each changed weight, by its name in the base model, what it is made of, as the server takes it.

    Args:
        spec: The adapter.
        conv1d: Modules whose weight is (in, out) in the checkpoint, see `conv1d_modules`.

    Raises:
        AdapterError: A tensor whose meaning is not known.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, shape in sorted(spec.shapes.items()):
        side = next((side for suffix, side in _SIDES.items() if name.endswith(suffix)), None)
        if side is not None or name.endswith(_MAGNITUDE):
            module = module_of(name.removesuffix(_MAGNITUDE))
            entry = _entry(found, f"{module}.weight") | {"scaling": float(spec.scaling(module))}
            entry[side or "magnitude"] = name
            if name.endswith(".lora_embedding_A") or module in conv1d:
                entry["transposed"] = True
        elif name.endswith(_LORA_BIAS):
            module = name.removeprefix(PEFT_PREFIX).removesuffix(_LORA_BIAS)
            entry = _entry(found, f"{module}.bias") | {"scaling": float(spec.scaling(module))}
            entry |= {"value": name, "adds": True, "flat": True}
        elif ".lora_" not in name and "token_adapter" not in name:
            weight = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
            entry = _entry(found, weight) | {"value": name, "flat": len(shape) == 1}
        else:
            raise AdapterError(f"no fold is known for {name}")
        found[entry["weight"]] = entry
    return found


def _entry(found: Mapping[str, dict[str, Any]], weight: str) -> dict[str, Any]:
    return dict(found.get(weight, {"weight": weight}))


def conv1d_modules(model: nn.Module) -> frozenset[str]:
    """Adapted modules of a live PEFT model that keep their weight transposed, as GPT-2's ``Conv1D`` does.

    The layers are asked: one flag in the configuration stands for all of them, and the last layer made decides it.
    """
    layers = named_modules(find_peft_model(model).get_base_model())
    return frozenset(name for name, layer in layers if isinstance(layer, Linear) and layer.fan_in_fan_out)


def base_weight_of(model: nn.Module) -> BaseWeight:
    """The frozen base weights of a live PEFT model, by name, whatever wraps its layers."""
    layers = dict(named_modules(find_peft_model(model).get_base_model()))

    def weight(name: str) -> torch.Tensor | None:
        module, _, attribute = name.rpartition(".")
        layer: Any = layers.get(module)
        if isinstance(layer, ModulesToSaveWrapper):
            layer = layer.original_module
        found = getattr(layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer, attribute, None)
        if not isinstance(found, nn.Parameter) or type(found.data) is not torch.Tensor or found.requires_grad:
            return None
        return found.detach() if found.dim() <= 2 and found.is_floating_point() and not found.is_meta else None

    return weight

"""What a live PEFT model is made of, for merging: its base tensors, the update of each, and its checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear, ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from loraflow.errors import AdapterError, CapabilityError
from loraflow.merge_rules import (
    AddBias,
    ConvDelta,
    EmbeddingDelta,
    ExpertsDelta,
    LinearDelta,
    Parts,
    Replace,
    ReplaceRows,
    Rule,
)
from loraflow.names import PEFT_PREFIX, is_wrapper_segment, strip_wrappers
from loraflow.peft_config import config_features
from loraflow.problems import Problem

__all__ = ["BaseTensor", "Layout", "Unit", "Update", "named_modules", "read_model"]

_PLACEHOLDERS = frozenset({"base_layer", "original_module", "token_adapter"})
_ADAPTER_PARTS = frozenset({"modules_to_save", "trainable_tokens_delta", "trainable_tokens_original"})
_OTHER_BASE = (
    "its init_lora_weights has changed the trainer's base: the servers' own base could not be restored from it. "
    "Convert it first (save_pretrained(…, path_initial_model_for_weight_conversion=…))"
)
_MERGED_VARIANTS = ("Dora", "MiCA")  # MiCA trains A alone; its forward is plain LoRA's
_QUANTISED = "the base weight is quantised: merging would round the policy to the base's grid"


@dataclass(frozen=True)
class Update:
    """One rule and the snapshot tensors that it reads: role (``A``, ``B``, …) -> name in the snapshot."""

    rule: Rule
    keys: Mapping[str, str]

    def parts(self, tensors: Mapping[str, Tensor]) -> Parts:
        """The tensors by role."""
        return {role: tensors[key] for role, key in self.keys.items()}


@dataclass(frozen=True)
class BaseTensor:
    """One parameter of the base model, and how an adapter changes it.

    Attributes:
        name: In the plain base model's state dict.
        owner: Module that holds it.
        attribute: Its name there.
        updates: Applied in order; none for a frozen tensor.
        initial: Copy of the value at the start, where training writes to the parameter itself (biases).
        quantised: Dequantise on reading.
    """

    name: str
    owner: nn.Module
    attribute: str
    updates: tuple[Update, ...] = ()
    initial: Tensor | None = None
    quantised: bool = False

    def read(self) -> Tensor:
        """The base tensor, float, not to be written to."""
        if self.initial is not None:
            return self.initial
        if self.quantised:
            weight: Tensor = dequantize_module_weight(self.owner)
            return weight.detach()
        value: Tensor = getattr(self.owner, self.attribute)
        return value.detach()


@dataclass(frozen=True)
class Unit:
    """Tensors that become checkpoint tensors together; nearly always one that becomes one.

    Attributes:
        sources: Base tensors.
        outputs: Checkpoint name -> shape.
        dtype: dtype on the wire.
        convert: Base tensors by their name -> checkpoint tensors by theirs.
    """

    sources: tuple[BaseTensor, ...]
    outputs: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """The whole model; ``tied_updates`` holds (name, its update, its partner's) for tied weights with two updates."""

    units: tuple[Unit, ...]
    tied_updates: tuple[tuple[str, Update, Update], ...]


def read_model(model: PeftModel, adapter: str, *, dtype: torch.dtype, dequantize: bool) -> Layout:
    """Take the model apart.

    Args:
        model: The PEFT model.
        adapter: Name of its active adapter.
        dtype: dtype that the server serves.
        dequantize: Allow quantised base weights.

    Raises:
        AdapterError: Something cannot be merged; every such tensor is listed.
        CapabilityError: The base weights are sharded or not in memory.
    """
    problems: list[Problem] = []
    if "init_changes_base" in config_features(model.peft_config[adapter].to_dict(), live=True):
        problems.append(Problem("unsupported_feature", _OTHER_BASE))
    updates = _collect_updates(model, adapter, problems)
    tensors, tied = _base_tensors(model, updates, problems, dequantize=dequantize)
    unknown = sorted(updates.keys() - tensors.keys() - tied.keys())
    problems += [Problem("unknown_module", "the base model has no such tensor", name) for name in unknown]
    tied_updates = _check_tied(tensors, tied, updates, problems)
    if problems:
        hint = (
            "set dequantize_base=True to merge all the same" if any(p.message == _QUANTISED for p in problems) else None
        )
        raise AdapterError("the adapter cannot be merged", problems, hint=hint)
    return Layout(tuple(_units(model.get_base_model(), tensors, dtype)), tuple(tied_updates))


# ---------------------------------------------------------------- updates


def _collect_updates(model: PeftModel, adapter: str, problems: list[Problem]) -> dict[str, list[Update]]:
    """Base tensor name -> its updates."""
    config = model.peft_config[adapter]
    found: dict[str, list[Update]] = {}
    for name, module in named_modules(model):
        if isinstance(module, LoraLayer):
            for target, update in _layer_updates(name, module, adapter, problems):
                found.setdefault(target, []).append(update)
        elif isinstance(module, TrainableTokensWrapper):
            if module.token_adapter.tied_adapter is None and adapter in module.token_adapter.token_indices:
                rows = tuple(module.token_adapter.token_indices[adapter])
                update = Update(ReplaceRows(rows), {"value": f"{name}.token_adapter.trainable_tokens_delta"})
                found.setdefault(_base_name(f"{name}.weight"), []).append(update)
        elif isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
            for parameter, _ in module.modules_to_save[adapter].named_parameters():
                key = f"{name}.{parameter}"
                found.setdefault(_base_name(key), []).append(Update(Replace(), {"value": key}))
        elif isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            problems.append(Problem("unsupported_feature", f"{type(module).__name__} has no merge", name))
    if config.bias != "none":
        for key in _trained_biases(model, config.bias):
            found.setdefault(_base_name(key), []).insert(0, Update(Replace(), {"value": key}))
    return found


def _layer_updates(name: str, layer: LoraLayer, adapter: str, problems: list[Problem]) -> Iterator[tuple[str, Update]]:
    reason = _why_not(layer, adapter)
    if reason is not None:
        problems.append(Problem("unsupported_feature", reason, name))
        return
    embedding = isinstance(layer, Embedding)
    if adapter not in (layer.lora_embedding_A if embedding else layer.lora_A):
        return
    keys = {"A": f"{name}.lora_embedding_A", "B": f"{name}.lora_embedding_B"}
    if not embedding:
        keys = {"A": f"{name}.lora_A.weight", "B": f"{name}.lora_B.weight"}
    if adapter in layer.lora_magnitude_vector:
        keys["magnitude"] = f"{name}.lora_magnitude_vector"
    attribute = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    yield _base_name(f"{name}.{attribute}"), Update(_rule(layer, adapter), keys)
    if layer.lora_bias.get(adapter):
        bias = Update(AddBias(layer.scaling[adapter]), {"value": f"{name}.lora_B.bias"})
        yield _base_name(f"{name}.bias"), bias


def _why_not(layer: LoraLayer, adapter: str) -> str | None:
    """Why PEFT, and so this module, cannot merge a layer; None where it can."""
    if layer.merged:
        return "the adapter is merged into the trainer's weights already: call model.unmerge_adapter()"
    variant = layer.lora_variant.get(adapter)
    if variant is not None and not type(variant).__name__.startswith(_MERGED_VARIANTS):
        return f"the variant {type(variant).__name__.removesuffix('Variant')} is no fixed change of the weight"
    base = layer.get_base_layer()
    if isinstance(layer, Conv1d | Conv2d | Conv3d) and base.groups > 1:
        return "a convolution with groups has no merge"
    if layer.lora_bias.get(adapter) and getattr(base, "bias", None) is None:
        return "lora_bias=True on a layer without a bias"
    if isinstance(layer, Linear | Embedding | Conv1d | Conv2d | Conv3d | ParamWrapper) or _is_quantised(base):
        return None
    return f"a layer of type {type(layer).__name__} has no merge here"


def _rule(layer: LoraLayer, adapter: str) -> Rule:
    scaling = float(layer.scaling[adapter])
    if isinstance(layer, Embedding):
        return EmbeddingDelta(scaling)
    if isinstance(layer, Conv1d | Conv2d | Conv3d):
        return ConvDelta(scaling)
    if isinstance(layer, ParamWrapper):
        three = layer.get_param().dim() == 3
        return ExpertsDelta(scaling, layer.num_experts, transposed=three and not layer._did_swap_in_out_features)
    return LinearDelta(scaling, bool(getattr(layer, "fan_in_fan_out", False)))


def _trained_biases(model: PeftModel, mode: str) -> Iterator[str]:
    """Snapshot names of the base's biases that are trained (``bias="all"`` or ``"lora_only"``)."""
    tuned = {id(m.get_base_layer()) for m in model.modules() if isinstance(m, LoraLayer)}
    for name, module in named_modules(model):
        parts = name.split(".")
        if any(part.startswith("lora_") or part in _ADAPTER_PARTS for part in parts):
            continue
        if module._parameters.get("bias") is not None and (mode == "all" or id(module) in tuned):
            yield f"{name}.bias"


# ---------------------------------------------------------------- base tensors


def named_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name in PEFT's files: wrappers' segments left out, shared modules under each name."""
    yield prefix.removesuffix("."), module
    for segment, child in module._modules.items():
        if child is not None:
            below = prefix if is_wrapper_segment(module, segment) else f"{prefix}{segment}."
            yield from named_modules(child, below)


def _base_name(peft_name: str) -> str:
    parts = strip_wrappers(peft_name.removeprefix(PEFT_PREFIX)).split(".")
    return ".".join(part for part in parts if part not in _PLACEHOLDERS)


def _base_tensors(
    model: PeftModel, updates: Mapping[str, Sequence[Update]], problems: list[Problem], *, dequantize: bool
) -> tuple[dict[str, BaseTensor], dict[str, str]]:
    """Base tensors by name, in the model's order, and tied names: name -> the one that holds the tensor."""
    tensors: dict[str, BaseTensor] = {}
    tied: dict[str, str] = {}
    seen: dict[int, str] = {}
    for path, module in named_modules(model):
        parts = path.split(".")
        if any(part.startswith("lora_") or part in _ADAPTER_PARTS for part in parts):
            continue
        for attribute, value in module._parameters.items():
            if value is None:
                continue
            name = _base_name(f"{path}.{attribute}" if path else attribute)
            first = seen.setdefault(id(value), name)
            if first != name:
                tied[name] = first
                continue
            _refuse_absent(value, name)
            quantised = _is_quantised(module) and attribute == "weight"
            if quantised and not dequantize and name in updates:
                problems.append(Problem("unsupported_feature", _QUANTISED, name))
            elif quantised and not _can_dequantise(module):
                problems.append(Problem("unsupported_feature", f"no way is known to dequantise {value.dtype}", name))
            own = tuple(updates.get(name, ()))
            trained = value.requires_grad and any(isinstance(u.rule, Replace) for u in own)
            initial = value.detach().clone() if trained else None
            tensors[name] = BaseTensor(name, module, attribute, own, initial, quantised)
    return tensors, tied


def _refuse_absent(value: Tensor, name: str) -> None:
    sharded = hasattr(value, "full_tensor") or hasattr(value, "ds_id") or "_flat_param" in name
    if sharded or value.is_meta:
        what = "is sharded over the trainer's ranks" if sharded else "is offloaded (on the meta device)"
        raise CapabilityError(
            f"base weight {name} {what}; a merged broadcast needs it whole",
            hint="use transport='adapter', which gathers the adapter only, or train without sharding the base",
        )


def _is_quantised(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if weight is None:
        return hasattr(module, "W_q") or hasattr(module, "qweight")
    plain = weight.is_floating_point() and weight.dtype.itemsize > 1  # float8 needs its scales
    return not plain or type(weight).__module__.startswith("torchao.")


def _can_dequantise(module: nn.Module) -> bool:
    """Whether PEFT knows the format; it returns the raw numbers of any other."""
    weight = module._parameters.get("weight")
    known = type(weight).__module__.startswith("torchao.") or type(weight).__name__ in {"Params4bit", "Int8Params"}
    return hasattr(module, "W_q") or known


def _check_tied(
    tensors: Mapping[str, BaseTensor],
    tied: Mapping[str, str],
    updates: Mapping[str, Sequence[Update]],
    problems: list[Problem],
) -> list[tuple[str, Update, Update]]:
    """Tied weights are one tensor on the server: both names must get the same update, or only a shared one.

    An embedding with ``trainable_token_indices`` is shared by PEFT itself; for any other update PEFT's forward applies
    it to the targeted name alone, unless ``ensure_weight_tying`` makes two of it.
    """
    pairs: list[tuple[str, Update, Update]] = []
    for name, holder in tied.items():
        mine, partner = updates.get(name, ()), tensors[holder].updates
        if len(mine) == len(partner) == 1:
            pairs.append((name, mine[0], partner[0]))
        elif mine or any(not isinstance(update.rule, ReplaceRows) for update in partner):
            message = (
                f"tied to {holder}, but only one of the two is trained; the server has one tensor for both. "
                "Set ensure_weight_tying=True in LoraConfig, untie the base, or leave the layer out"
            )
            problems.append(Problem("unsupported_feature", message, name))
    return pairs


# ---------------------------------------------------------------- checkpoint names


def _units(base: nn.Module, tensors: Mapping[str, BaseTensor], dtype: torch.dtype) -> Iterator[Unit]:
    """Group base tensors by the checkpoint tensors that they become."""
    shapes = {name: tensor.read().to("meta") for name, tensor in tensors.items()}
    revert = _reverter(base)
    if _same(shapes, revert(dict(shapes))):
        for name, tensor in tensors.items():
            yield Unit((tensor,), {name: tuple(shapes[name].shape)}, _wire_dtype((tensor,), shapes, dtype), dict)
        return
    single = {name: revert({name: shape}) for name, shape in shapes.items()}
    groups: dict[frozenset[str], list[str]] = {}
    for name, outputs in single.items():
        joined = frozenset(outputs)
        for other in [key for key in groups if not joined.isdisjoint(key)]:
            joined |= other
            groups[joined] = groups.pop(other)
        groups.setdefault(joined, []).append(name)
    for names in groups.values():
        outputs = single[names[0]] if len(names) == 1 else revert({name: shapes[name] for name in names})
        sources = tuple(tensors[name] for name in names)
        made = {name: tuple(shape.shape) for name, shape in outputs.items()}
        yield Unit(sources, made, _wire_dtype(sources, shapes, dtype), revert)


def _same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(first[name].shape == second[name].shape for name in first)


def _wire_dtype(sources: Sequence[BaseTensor], shapes: Mapping[str, Tensor], dtype: torch.dtype) -> torch.dtype:
    """Low-rank updates travel in the served dtype, whole replacements in the wider of the two, the rest as it is.

    The server casts what it loads to what it holds: so a tensor that it keeps wider than its dtype stays whole.
    """
    own = shapes[sources[0].name].dtype
    updates = [update for source in sources for update in source.updates]
    if not updates:
        return own
    if all(isinstance(update.rule, Replace | ReplaceRows) for update in updates):
        return torch.promote_types(own, dtype)
    return dtype


def _reverter(base: nn.Module) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """State-dict tensors -> checkpoint tensors, as transformers' `save_pretrained` turns them; else the identity."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # no transformers, or one that keeps checkpoint names in memory
        return dict
    if not isinstance(base, PreTrainedModel):
        return dict

    def revert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        turned: dict[str, Any] = revert_weight_conversion(base, tensors)
        return turned

    return revert

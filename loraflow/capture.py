"""`SnapshotPlan`: which parameters of a live PEFT model make up its adapter, and how to copy them in one launch.

The walk over the modules happens once per model; a sync then costs a check that the plan still holds, the gathers that
sharding asks for, and one copy of all tensors (`loraflow.gather`). Nothing here writes to the trainer's weights, its
RNG or its mode.
"""

from __future__ import annotations

import math
import weakref
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from loraflow.capture_checks import (
    refuse_buffers,
    refuse_inactive,
    refuse_lost,
    refuse_partial,
    refuse_several,
    refuse_shapes,
)
from loraflow.errors import AdapterError, ModelChangedError
from loraflow.gather import FlatViews, Gatherer, split_views
from loraflow.names import is_wrapper_segment, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Entry", "SnapshotPlan", "active_adapter", "find_peft_model"]


@dataclass(frozen=True)
class Entry:
    """One tensor of the adapter: its PEFT file name, where it lives in the model, and its full (gathered) shape."""

    name: str
    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]

    def parameter(self) -> torch.Tensor:
        """The live parameter; sharded where the model is."""
        value: torch.Tensor = getattr(self.owner, self.attribute)
        return value


@dataclass(frozen=True)
class _Found:
    """One parameter met on the walk; ``unit`` is the FSDP1 module that holds its storage."""

    name: str
    owner: nn.Module
    attribute: str
    value: torch.Tensor
    unit: FullyShardedDataParallel | None


def find_peft_model(model: nn.Module) -> PeftModel:
    """The `PeftModel` inside of whatever wraps it; `AdapterError` where there is none."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            return module
    raise AdapterError(
        f"{type(model).__name__} holds no PEFT model",
        hint="wrap the base with peft.get_peft_model(base, LoraConfig(…))",
    )


def active_adapter(model: PeftModel) -> str:
    """The name of the one active adapter; `AdapterError` where it is not one LoRA adapter."""
    active = list(model.active_adapters)
    if len(active) != 1:
        raise AdapterError(
            f"{len(active)} adapters are active ({', '.join(active) or 'none'}), but a policy is one adapter",
            hint="activate one with model.set_adapter(name), or join them first with model.add_weighted_adapter(…)",
        )
    kind = model.peft_config[active[0]].peft_type
    if kind != "LORA":
        raise AdapterError(
            f"adapter {active[0]!r} is of type {getattr(kind, 'value', kind)}; only LoRA can be carried",
            hint="train with peft.LoraConfig",
        )
    return str(active[0])


class SnapshotPlan:
    """The adapter tensors of one live model, sorted by name.

    Attributes:
        adapter: Name of the active adapter.
        entries: One per tensor, sorted by file name; identical on every rank.
        shapes: File name -> full shape.
        numel: Elements of all tensors together.
        scalings: Module of the base -> the factor on B·A that its layer uses now.
        given_scalings: The same as its layer was made with.
    """

    def __init__(self, model: nn.Module) -> None:
        peft_model = find_peft_model(model)
        refuse_several(model)
        self.adapter = active_adapter(peft_model)
        everywhere = {n: m for n, m in peft_model.named_modules() if isinstance(m, LoraLayer)}
        refuse_inactive(everywhere, self.adapter)
        bias = peft_model.peft_config[self.adapter].bias
        tuned = {id(layer.get_base_layer()) for layer in everywhere.values()}

        entries: dict[str, Entry] = {}
        units: dict[str, FullyShardedDataParallel | None] = {}
        captured: dict[int, torch.Tensor] = {}  # alive, so that no other parameter gets its id
        others: list[_Found] = []
        for found in _walk_units(model, peft_model):
            name = _file_name(found, self.adapter, bias, tuned)
            if name is None or (name.endswith(".trainable_tokens_delta") and id(found.value) in captured):
                others.append(found)  # the rows of a tied head are the embedding's own: PEFT saves them once
                continue
            entries[name] = Entry(name, found.owner, found.attribute, _full_shape(found.value))
            units[name] = found.unit
            captured[id(found.value)] = found.value
        others = [found for found in others if id(found.value) not in captured]
        refuse_lost([found.name for found in others if found.value.requires_grad])
        refuse_buffers(peft_model, self.adapter)

        self.entries = tuple(entries[name] for name in sorted(entries))
        if not self.entries:
            raise AdapterError(f"adapter {self.adapter!r} has no tensors on this model")
        self.shapes = {entry.name: entry.shape for entry in self.entries}
        self.numel = sum(math.prod(shape) for shape in self.shapes.values())
        self._templates = [torch.empty(shape, device="meta") for shape in self.shapes.values()]
        refuse_shapes(self.shapes)
        self._peft_model = weakref.ref(peft_model)
        # Weak at the root alone: the model must be able to die while its plan is cached; the others die with it.
        self._root = weakref.ref(model)
        self._inner = [module for module in model.modules() if module._modules and module is not model]
        self._children, self._counts = _children_of([model, *self._inner])
        self._frozen = [found.value for found in others]
        self._units = _by_unit(self.entries, units)
        self._gatherer: Gatherer | None = None
        if set(self._units) == {None}:
            self._gatherer = Gatherer(
                [entry.owner for entry in self.entries],
                [entry.attribute for entry in self.entries],
                list(self.shapes.values()),
            )
        layers = [layer for layer in everywhere.values() if self.adapter in layer.scaling]
        self.scalings = _by_module(self.entries, layers, self.adapter, lambda layer: layer.scaling[self.adapter])
        self.given_scalings = _by_module(self.entries, layers, self.adapter, self._given_scaling)
        self._layers, self._layer_scalings = layers, [layer.scaling[self.adapter] for layer in layers]
        self._everywhere = list(everywhere.values())
        self._states = [
            (_copied(active), off, _copied(merged)) for active, off, merged in map(_STATE, self._everywhere)
        ]

    @classmethod
    def of(cls, model: nn.Module) -> SnapshotPlan:
        """The plan of ``model``: the one made before where it still holds, so that a sync walks nothing."""
        plan = _plans.get(model)
        if plan is None or not plan.holds():
            plan = _plans[model] = cls(model)
        return plan

    @classmethod
    def known(cls, model: nn.Module) -> SnapshotPlan:
        """The plan made before, whether it still holds or not (`require_holds`); a new one where there is none."""
        plan = _plans.get(model)
        return cls.of(model) if plan is None else plan

    def require_holds(self) -> None:
        """Raise `ModelChangedError` where `holds` does not."""
        if not self.holds():
            raise ModelChangedError("the model or its adapter was changed since the last sync")

    def holds(self) -> bool:
        """Whether modules, adapter and scaling are the same, and nothing else has become trainable or active.

        Some thousand identity checks, a fraction of a millisecond.
        """
        root, peft_model = self._root(), self._peft_model()
        return (
            root is not None
            and peft_model is not None
            and list(peft_model.active_adapters) == [self.adapter]
            and _children_of([root, *self._inner]) == (self._children, self._counts)
            and not any(map(_TRAINED, self._frozen))
            and [table.get(self.adapter) for table in map(_SCALING, self._layers)] == self._layer_scalings
            and list(map(_STATE, self._everywhere)) == self._states
        )

    def _given_scaling(self, layer: LoraLayer) -> float:
        rank = layer.r[self.adapter]
        return float(layer.lora_alpha[self.adapter] / (math.sqrt(rank) if layer.use_rslora[self.adapter] else rank))

    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, or float32 where they differ."""
        dtypes = {entry.parameter().dtype for entries in self._units.values() for entry in entries}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def buffer(self, dtype: torch.dtype | None) -> torch.Tensor:
        """A new flat buffer for all tensors, shape (n,), on the device of the parameters."""
        device = self.entries[0].parameter().device
        return torch.empty(self.numel, dtype=dtype or self.dtype(), device=device)

    def checked(self, out: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """``out``, if it can hold all tensors in ``dtype``; `AdapterError` otherwise."""
        wanted = dtype or out.dtype
        if out.dim() != 1 or out.numel() != self.numel or out.dtype != wanted or not out.is_contiguous():
            raise AdapterError(
                f"the buffer given is {tuple(out.shape)} of {out.dtype}; expected ({self.numel},) of {wanted}"
            )
        return out

    def views(self, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Tensor name -> view of ``flat``, shape (n,), in the order of ``entries``."""
        return FlatViews(flat, tuple(self.shapes), self._templates)

    @torch.no_grad()
    def copy_into(self, flat: torch.Tensor) -> None:
        """Copy every tensor into ``flat`` (shape (n,), any dtype), in the order of ``entries``.

        Collective on a sharded model: every rank calls it, and every rank gets the whole tensors.
        """
        if self._gatherer is not None and self._gatherer.into(flat):
            return
        views = dict(zip(self.shapes, split_views(flat, self._templates), strict=True))
        for unit, entries in self._units.items():
            with _summoned(unit), ExitStack() as stack:
                parameters = [entry.parameter() for entry in entries]
                stack.enter_context(_zero3_gathered(parameters))
                sources = [_whole(parameter) for parameter in parameters]
                refuse_partial({entry.name: entry.shape for entry in entries}, sources)
                torch._foreach_copy_([views[entry.name] for entry in entries], sources)


def _children_of(modules: Sequence[nn.Module]) -> tuple[list[nn.Module | None], list[int]]:
    """The children of all ``modules``, and how many each has."""
    tables = list(map(_MODULES, modules))
    return list(chain.from_iterable(map(_VALUES, tables))), list(map(len, tables))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


_MODULES, _VALUES = attrgetter("_modules"), methodcaller("values")
_TRAINED, _SCALING = attrgetter("requires_grad"), attrgetter("scaling")
_STATE = attrgetter(
    "_active_adapter", "_disable_adapters", "merged_adapters"
)  # their properties take five times as long
_plans: weakref.WeakKeyDictionary[nn.Module, SnapshotPlan] = weakref.WeakKeyDictionary()


def _walk_units(model: nn.Module, peft_model: PeftModel) -> Iterator[_Found]:
    """Every parameter under ``peft_model``, named from there without wrapper segments.

    FSDP1 units are gathered one by one while theirs are listed: outside of that they may not exist as parameters.
    """
    inside = {id(module) for module in peft_model.modules()}
    pending: list[tuple[nn.Module, str]] = [(model, "")]
    while pending:
        root, prefix = pending.pop(0)
        unit = root if isinstance(root, FullyShardedDataParallel) else None
        with _summoned(unit):
            yield from _walk(root, prefix, peft_model, inside, unit, pending)


def _walk(
    module: nn.Module,
    prefix: str,
    peft_model: PeftModel,
    inside: set[int],
    unit: FullyShardedDataParallel | None,
    pending: list[tuple[nn.Module, str]],
) -> Iterator[_Found]:
    if module is peft_model:
        prefix = ""
    if id(module) in inside:
        for attribute, value in module._parameters.items():
            if value is not None:
                yield _Found(prefix + attribute, module, attribute, value, unit)
    for segment, child in module._modules.items():
        if child is None:
            continue
        below = prefix if is_wrapper_segment(module, segment) else f"{prefix}{segment}."
        if isinstance(child, FullyShardedDataParallel):
            pending.append((child, below))
        else:
            yield from _walk(child, below, peft_model, inside, unit, pending)


def _file_name(found: _Found, adapter: str, bias: str, tuned: set[int]) -> str | None:
    """The name under which PEFT's ``save_pretrained`` writes a parameter; None where it does not belong to ``adapter``.

    ``….lora_A.<adapter>.weight`` -> ``….lora_A.weight``; ``X.modules_to_save.<adapter>.P`` -> ``X.P``; biases of the
    base keep their name.
    """
    parts = found.name.split(".")
    for i, part in enumerate(parts[:-1]):
        if parts[i + 1] != adapter:
            continue
        if part.startswith("lora_"):
            rest = parts[i + 2 :]
            if part == "lora_magnitude_vector" and rest == ["weight"]:
                rest = []
            return ".".join([*parts[: i + 1], *rest])
        if part == "modules_to_save":
            return ".".join([*parts[:i], *parts[i + 2 :]])
        if part == "trainable_tokens_delta":
            return ".".join(parts[: i + 1])
    is_bias = parts[-1] == "bias" and not any(p.startswith("lora_") or p == "modules_to_save" for p in parts)
    if is_bias and (bias == "all" or (bias == "lora_only" and id(found.owner) in tuned)):
        return found.name
    return None


def _full_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter: ZeRO-3 keeps it aside, a DTensor reports it."""
    return tuple(getattr(value, "ds_shape", value.shape))


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _summoned(unit: FullyShardedDataParallel | None) -> AbstractContextManager[Any]:
    if unit is None:
        return nullcontext()
    context: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(
        unit, recurse=False, writeback=False
    )
    return context


def _zero3_gathered(parameters: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not partitioned:
        return nullcontext()
    import deepspeed  # deepspeed.zero is an attribute of it, no module

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=None)
    return context


def _by_unit(
    entries: Sequence[Entry], units: dict[str, FullyShardedDataParallel | None]
) -> dict[FullyShardedDataParallel | None, list[Entry]]:
    grouped: dict[FullyShardedDataParallel | None, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(units[entry.name], []).append(entry)
    return grouped


def _by_module(
    entries: Sequence[Entry], layers: Sequence[LoraLayer], adapter: str, number: Callable[[LoraLayer], float]
) -> dict[str, float]:
    """``number`` of each module's layer, by the name that its tensors have in the file."""
    owners: dict[int, LoraLayer] = {}
    for layer in layers:
        owners[id(layer.lora_embedding_A)] = layer
        if adapter in layer.lora_A:
            owners[id(layer.lora_A[adapter])] = layer
    return {
        parts.module: float(number(owners[id(entry.owner)]))
        for entry in entries
        if id(entry.owner) in owners and (parts := parse(entry.name)) is not None
    }

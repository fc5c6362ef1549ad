"""`AdapterSpec` and `AdapterSnapshot`: what an adapter is, and what it holds at one step of training.

A spec is static for a run; plans are made from it. A snapshot is an immutable copy of everything that an optimizer step
can have changed, in one flat buffer, under the names that PEFT's own ``save_pretrained`` writes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3

from loraflow.adapter_files import read_base_config, read_config, read_folder, require_tensor_file, write_adapter
from loraflow.capture import SnapshotPlan, find_peft_model
from loraflow.errors import AdapterError
from loraflow.peft_config import config_features, largest_rank, live_config, scaling_of, shape_features
from loraflow.problems import Problem
from loraflow.safetensors_io import build_header, read_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["AdapterSnapshot", "AdapterSpec", "read_adapter", "take_snapshot", "write_adapter"]


@dataclass(frozen=True)
class AdapterSpec:
    """What is constant about an adapter in a run; what `plan` and `preflight` look at.

    Attributes:
        config: Content of ``adapter_config.json`` as PEFT writes it (JSON types), free of wrapper segments.
        shapes: Tensor name (as in PEFT's file) -> shape, sorted by name.
        features: What a server must be able to do beyond plain LoRA: a subset of ``dora``, ``bias``,
            ``modules_to_save``, ``rslora``, ``rank_pattern``, ``alpha_pattern``, ``lora_embedding``, ``lm_head``,
            ``tied_target``, ``target_parameters``, ``lora_bias``, ``alora``, ``layer_replication``,
            ``init_changes_base``, ``trainable_tokens``, ``conv1d``, ``variant`` (a forward that is not LoRA's),
            ``tower`` (modules of a multimodal model outside of its language model), ``conv`` (convolutions).
        max_rank: Largest rank of any module, or that the configuration names: vLLM compares both with its limit.
        base_config: Content of the base model's ``config.json``; empty where it is not known.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    features: frozenset[str]
    max_rank: int
    base_config: Mapping[str, Any]

    @classmethod
    def from_model(cls, model: nn.Module) -> AdapterSpec:
        """The spec of the active adapter of a live PEFT model, whatever wraps it.

        Raises:
            AdapterError: No PEFT model, not exactly one active LoRA adapter, or trainable parameters outside of it.
        """
        return _spec_of(model, SnapshotPlan.of(model))

    @classmethod
    def from_folder(cls, path: str | Path, base: str | Path | None = None) -> AdapterSpec:
        """The spec of a saved adapter; only the file's header is read.

        Args:
            path: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
            base: Folder of the base model; ``base_model_name_or_path`` of the config where not given.

        Raises:
            AdapterError: A file is missing or damaged.
        """
        config = read_config(path)
        header = read_header(require_tensor_file(path))
        shapes = {name: header.tensors[name].shape for name in sorted(header.tensors)}
        return cls.build(config, shapes, read_base_config(base or config.get("base_model_name_or_path")))

    @classmethod
    def build(
        cls,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        base_config: Mapping[str, Any],
        *,
        live: bool = False,
    ) -> AdapterSpec:
        """The spec with its features and largest rank worked out; ``live``: of a model, not of files."""
        features = config_features(config, live=live) | shape_features(shapes, base_config)
        return cls(config, shapes, frozenset(features), largest_rank(config, shapes), base_config)

    def scaling(self, module: str) -> float:
        """Factor on ``B·A`` of ``module`` (its name in the base model), with the patterns resolved as PEFT does."""
        return scaling_of(self.config, module)

    def file_heads(self, dtype: torch.dtype) -> tuple[bytes, bytes]:
        """What every version's files have in common, made once: the tensor file's header, and the configuration's text.

        Args:
            dtype: Of the tensors.
        """
        if dtype not in self._heads:
            shapes = dict(sorted(self.shapes.items()))  # as `AdapterSnapshot.flat` has them
            self._heads[dtype] = build_header(shapes, dtype), json.dumps(self.config, indent=2).encode()
        return self._heads[dtype]

    @cached_property
    def _heads(self) -> dict[torch.dtype, tuple[bytes, bytes]]:
        return {}


@dataclass(frozen=True, eq=False)
class AdapterSnapshot:
    """A copy of the adapter at one step.

    Attributes:
        spec: What is constant about it.
        flat: All values, shape (n,), one dtype, contiguous, on the trainer's device; sorted by tensor name, no gaps.
        tensors: Tensor name -> view of ``flat``; 2-D for LoRA matrices.
        step: Optimizer step it was taken at.
    """

    spec: AdapterSpec
    flat: torch.Tensor
    tensors: Mapping[str, torch.Tensor]
    step: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every tensor."""
        return self.flat.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.flat.numel() * self.flat.element_size()

    def host(self) -> torch.Tensor:
        """``flat`` on the CPU: one transfer into pinned memory, made once; ``flat`` itself where it is there."""
        return self._host

    @property
    def digest(self) -> str:
        """blake3 (hex) over dtype, names, shapes and bytes: equal content, equal digest. Worked out once."""
        return self._digest

    @cached_property
    def finite(self) -> bool:
        """Whether no value is NaN or infinite: one reduction on its device, made once."""
        if not self.flat.numel():
            return True
        ends = torch.stack(torch.aminmax(self.flat)).float()  # both are NaN where any value is
        return bool(torch.isfinite(ends).all())

    @cached_property
    def _host(self) -> torch.Tensor:
        if self.flat.device.type == "cpu":
            return self.flat
        host = torch.empty(self.flat.shape, dtype=self.flat.dtype, pin_memory=self.flat.device.type == "cuda")
        return host.copy_(self.flat)

    @cached_property
    def _digest(self) -> str:
        layout = {"dtype": str(self.dtype), "tensors": [[name, list(t.shape)] for name, t in self.tensors.items()]}
        hasher = blake3(json.dumps(layout, separators=(",", ":")).encode() + b"\n", max_threads=blake3.AUTO)
        hasher.update(self.host().view(torch.uint8).numpy().data)
        return hasher.hexdigest()


def take_snapshot(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    step: int = 0,
    spec: AdapterSpec | None = None,
    out: torch.Tensor | None = None,
    plan: SnapshotPlan | None = None,
) -> AdapterSnapshot:
    """Copy the active adapter off a live model: one copy, no transfer, nothing of the trainer changed.

    Collective on a sharded model (FSDP, ZeRO-3): every rank calls it in the same order and gets the whole adapter.

    Args:
        model: The trainer's model, whatever wraps it or its layers.
        dtype: dtype of the copy; that of the parameters where not given (float32 where they differ).
        step: Optimizer step, for the record.
        spec: The spec that the caller's plan was made from: another adapter is then refused.
        out: Flat buffer to fill, shape (n,), of the copy's dtype. An earlier snapshot in it is overwritten.
        plan: The model's plan where the caller has just asked for it, which is not done again then.

    Raises:
        AdapterError: Not exactly one active LoRA adapter; trainable parameters outside of it; tensors that are shards;
            an ``out`` or ``spec`` that does not fit.
    """
    plan = SnapshotPlan.of(model) if plan is None else plan
    live = _spec_of(model, plan)
    if spec is not None and spec is not live and _constant(spec) != _constant(live):
        raise AdapterError(
            "the adapter is not of the shape and scaling that the run started with",
            hint="start a new run after adding, removing, resizing or rescaling adapters",
        )
    flat = plan.buffer(dtype) if out is None else plan.checked(out, dtype)
    plan.copy_into(flat)
    return AdapterSnapshot(live, flat, plan.views(flat), step)


def read_adapter(folder: str | Path, base: str | Path | None = None) -> AdapterSnapshot:
    """A saved adapter as a snapshot on the CPU. Only safetensors are read; nothing is unpickled.

    Args:
        folder: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``, of any writer.
        base: Folder of the base model; ``base_model_name_or_path`` of the config where not given.

    Raises:
        AdapterError: A file is missing or damaged.
    """
    spec = AdapterSpec.from_folder(folder, base)
    flat, tensors = read_folder(folder)
    return AdapterSnapshot(spec, flat, tensors)


_SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


def _constant(spec: AdapterSpec) -> tuple[Any, ...]:
    """What may not change in a run: carriers agree on it with the servers once."""
    return spec.shapes, spec.features, *(spec.config.get(option) for option in _SCALING)


_specs: WeakKeyDictionary[SnapshotPlan, AdapterSpec] = WeakKeyDictionary()


def _spec_of(model: nn.Module, plan: SnapshotPlan) -> AdapterSpec:
    """The spec that belongs to ``plan``, made once."""
    if plan not in _specs:
        peft_model = find_peft_model(model)
        config = live_config(peft_model, plan.adapter, plan.shapes, plan.scalings)
        _refuse_other_scaling(config, plan)
        base_config = peft_model.get_base_model().config.to_dict()
        _specs[plan] = AdapterSpec.build(config, plan.shapes, base_config, live=True)
    return _specs[plan]


def _refuse_other_scaling(config: Mapping[str, Any], plan: SnapshotPlan) -> None:
    """A scaling set on the layers at run time is in no file: a server would use the configuration's."""
    meant = {module: scaling_of(config, module) for module in plan.scalings}
    if config.get("target_parameters"):  # the patterns match other names than those of the tensors
        meant = plan.given_scalings
    problems = [
        Problem("bad_config", f"{module} is scaled by {scaling:g}, its configuration means {meant[module]:g}")
        for module, scaling in plan.scalings.items()
        if not math.isclose(scaling, meant[module], rel_tol=1e-6)
    ]
    if problems:
        raise AdapterError(
            "the live adapter is scaled otherwise than its configuration says",
            problems,
            hint="set lora_alpha or alpha_pattern in LoraConfig instead of changing layers (set_scale, scale_layer)",
        )

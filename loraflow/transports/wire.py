"""What travels in a merged broadcast, and in what order: pure functions, no network.

- `reload_groups`: which weights must travel together, because the server loads them as one layer;
- `plan_buckets`: how tensors are cut into packed buffers, exactly as vLLM's receivers cut them;
- `init_info`, `update_info`: the bodies of the HTTP calls in the dialect of the server's version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loraflow.merge import WireTensor

__all__ = [
    "Bucket",
    "Slot",
    "fill",
    "init_info",
    "place_of",
    "plan_buckets",
    "reload_groups",
    "start_body",
    "update_info",
    "with_siblings",
]

_BUFFERS = 2
_PACKED_AT_INIT = (0, 28)  # from here on `packed` is agreed at the handshake, before it went with every update
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


# ---------------------------------------------------------------- which weights travel together


def reload_groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Each weight's group: the weights that the server may hold in one layer with it.

    vLLM's reload rebuilds a layer from empty memory once any of its weights arrives: of ``qkv_proj``, with only
    ``q_proj`` sent, the rest is left as it was allocated. So what is fused there must be sent whole. Attention and
    MLP blocks of the common form are split as vLLM fuses them (q, k, v; gate, up); in any other block of a layer
    everything travels together.

    Args:
        names: All weights of the model, by checkpoint name.

    Returns:
        Name -> names of its group, in the order given.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(_block(name), []).append(name)
    groups: dict[str, tuple[str, ...]] = {}
    for block, members in blocks.items():
        children = {_child(name, block) for name in members}
        standard = children <= _ATTENTION or children <= _MLP
        for name in members:
            child = _child(name, block)
            alike = next((fused for fused in _FUSED if child in fused), {child}) if standard else children
            groups[name] = tuple(other for other in members if _child(other, block) in alike)
    return groups


def with_siblings(changed: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """``changed`` and all that must travel with it, in the order of ``names`` (all weights of the model)."""
    order = list(names)
    groups = reload_groups(order)
    needed = {member for name in changed for member in groups[name]}
    return tuple(name for name in order if name in needed)


def touched_tensors(served: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """Which of the server's tensors may hold some of ``names``: those in the same block of the model.

    Args:
        served: The server's own names, e.g. ``dp0:pp0:pcp0:tp0:model.layers.0.self_attn.qkv_proj.weight``; fused
            projections and LoRA's ``base_layer`` have no checkpoint name.
        names: Checkpoint names.
    """
    blocks = tuple(f".{_block(name)}." for name in names)
    return frozenset(key for key in served if any(block in f".{key.rpartition(':')[2]}" for block in blocks))


def _block(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` -> ``model.layers.3.self_attn``; outside of the layers, the module."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if index is None or len(parts) < index + 3:
        return name.rpartition(".")[0]
    return ".".join(parts[: index + 2])


def _child(name: str, block: str) -> str:
    return name[len(block) + 1 :].partition(".")[0]


# ---------------------------------------------------------------- packing


@dataclass(frozen=True)
class Slot:
    """One tensor and its place in a bucket, in bytes."""

    tensor: WireTensor
    start: int


@dataclass(frozen=True)
class Bucket:
    """Tensors packed into one buffer, without gaps."""

    slots: tuple[Slot, ...]
    nbytes: int


def plan_buckets(tensors: Sequence[WireTensor], bucket_bytes: int, *, capped: bool = False) -> list[Bucket]:
    """Cut ``tensors`` into buckets.

    Args:
        tensors: In the order of travel.
        bucket_bytes: A bucket is closed by the tensor that takes it past this size (vLLM's ``packed_tensor.py``).
        capped: No bucket is larger (CUDA IPC, whose buffer has a fixed size), unless a single tensor is.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    for tensor in tensors:
        if capped and slots and filled + tensor.nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), filled))
            slots, filled = [], 0
        slots.append(Slot(tensor, filled))
        filled += tensor.nbytes
        if not capped and filled > bucket_bytes:
            buckets.append(Bucket(tuple(slots), filled))
            slots, filled = [], 0
    if slots:
        buckets.append(Bucket(tuple(slots), filled))
    return buckets


def fill(buffer: Tensor, slot: Slot, tensor: Tensor) -> Tensor:
    """Copy ``tensor`` into its place in ``buffer`` (uint8, 1-D), rounded to the dtype announced; queued on a GPU.

    Returns:
        What travels, of the announced dtype and shape.
    """
    if slot.start % slot.tensor.dtype.itemsize == 0:
        return place_of(buffer, slot).copy_(tensor, non_blocking=buffer.is_cuda)
    made = tensor.to(slot.tensor.dtype)  # an unaligned place cannot be seen in another dtype than bytes
    buffer[slot.start : slot.start + slot.tensor.nbytes].copy_(made.reshape(-1).view(torch.uint8))
    return made


def place_of(buffer: Tensor, slot: Slot) -> Tensor:
    """An aligned tensor's place in ``buffer`` (uint8, 1-D), in the dtype and shape announced."""
    part = buffer[slot.start : slot.start + slot.tensor.nbytes]
    return part.view(slot.tensor.dtype).view(slot.tensor.shape)


# ---------------------------------------------------------------- bodies


def init_info(
    carrier: str,
    version: tuple[int, ...],
    *,
    address: str,
    port: int,
    world_size: int,
    bucket_bytes: int,
    timeout: float,
) -> dict[str, Any]:
    """Body of ``/init_weight_transfer_engine``.

    Args:
        carrier: ``nccl``, ``ipc`` or ``gloo``.
        version: The server's vLLM.
        address: Host of the trainer's store.
        port: Its port.
        world_size: Trainer and workers.
        bucket_bytes: See `plan_buckets`.
        timeout: Seconds; gloo only, NCCL has none.
    """
    packing = {"packed": True, "packed_buffer_size_bytes": bucket_bytes, "packed_num_buffers": _BUFFERS}
    if carrier == "ipc":
        return {"packed": True} if version >= _PACKED_AT_INIT else {}
    group = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
    if carrier == "gloo":
        return {**group, "packed_buffer_size_bytes": bucket_bytes, "timeout": timeout}
    return {**group, **packing} if version >= _PACKED_AT_INIT else group


def update_info(
    carrier: str, version: tuple[int, ...], tensors: Sequence[WireTensor], *, bucket_bytes: int
) -> dict[str, Any]:
    """Body of ``/update_weights``: the announcement of ``tensors``, in the order of travel."""
    info: dict[str, Any] = {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [tensor.dtype_name for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }
    if carrier == "ipc":
        info["tensor_sizes"] = [tensor.nbytes for tensor in tensors]
    if carrier != "gloo" and version < _PACKED_AT_INIT:
        info["packed"] = True
        if carrier == "nccl":
            info |= {"packed_buffer_size_bytes": bucket_bytes, "packed_num_buffers": _BUFFERS}
    return info


def start_body(version: tuple[int, ...]) -> Mapping[str, Any]:
    """Body of ``/start_weight_update``: before 0.27 the format of the weights is said there."""
    return {"is_checkpoint_format": True} if version < (0, 27) else {}

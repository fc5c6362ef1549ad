"""The direct carrier in a worker: a payload straight into a LoRA slot, and into the host of versions behind it.

The payload holds the adapter's tensors in sorted order of names, without gaps, in the slots' dtype, B already scaled.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraflow_server.errors import PluginError
from loraflow_server.slots import SlotLayout

__all__ = ["PUBLISHED_SECONDS", "Installer", "own_tensors", "split_flat", "wait_for_folders"]

PUBLISHED_SECONDS = 10.0
"""How long an engine waits for the folder of a version that is published behind its delivery."""
_LOOK = 2e-3
_NEWEST = 64
"""Versions whose folder may still be missing: a trainer sends none before the one before it is published."""


def split_flat(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Tensors of ``shapes`` as views of ``flat`` (1-D), one after another without gaps.

    Raises:
        PluginError: ``bad_source``: its size is not theirs.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if flat.numel() != sum(sizes):
        raise PluginError("bad_source", f"the payload has {flat.numel()} elements, not {sum(sizes)}")
    return [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]


@dataclass(eq=False)
class Kept:
    """One version's tensors on the device, and everything that is made from them.

    vLLM's manager fills a slot from them again that was taken away. Once it has let go of the version, the memory
    serves a later one: what was made of its views is right for any content.

    Attributes:
        layout: What they are.
        payload: Their bytes; uint8, shape (nbytes,).
        ups: The B of each of the layout's modules.
        sources: The piece for each of the layout's places, as views.
        model: vLLM's `LoRAModel` over them; its ``id`` is the version's.
    """

    layout: SlotLayout
    payload: torch.Tensor
    ups: list[torch.Tensor]
    sources: list[torch.Tensor]
    model: Any


class Installer:
    """Puts payloads into the slots of one worker, and keeps their memory as long as vLLM may ask for it.

    Args:
        manager: vLLM's `LRUCacheLoRAModelManager`.
        device: Where the slots are.

    Attributes:
        newest: Ids of the newest versions.
    """

    def __init__(self, manager: Any, device: torch.device) -> None:
        self.newest: deque[int] = deque(maxlen=_NEWEST)
        self._manager = manager
        self._device = device
        self._kept: list[Kept] = []

    def install(
        self, layout: SlotLayout, payload: torch.Tensor, int_id: int, scalings: Sequence[float] | None = None
    ) -> int:
        """Register an adapter under a new id and fill a slot with it; the slot.

        Args:
            layout: Agreed for this kind of adapter.
            payload: Its tensors; uint8, 1-D, on any device. They are copied: the block is filled again for the next.
            int_id: A new adapter id.
            scalings: Factor on the B of each of the layout's modules; none where they are scaled already.

        Raises:
            PluginError: ``id_taken``, or ``bad_source``: the payload's size is not that of the layout's tensors.
        """
        manager = self._manager
        if int_id in manager.list_adapters():
            raise PluginError("id_taken", f"adapter id {int_id} is in use", status=409)
        elements, odd = divmod(payload.numel(), layout.dtype.itemsize)
        if odd or elements != layout.numel:
            found = f"{payload.numel()} bytes" if odd else f"{elements} elements"
            raise PluginError("bad_source", f"the payload has {found}, not {layout.numel} elements of {layout.dtype}")
        # The order of vLLM's own loader: make room among the registered ones, register, then take a slot.
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        kept = self._room(layout)
        kept.payload.copy_(payload, non_blocking=True)
        if scalings is not None:
            torch._foreach_mul_(kept.ups, list(scalings))
        kept.model.id = int_id
        manager._registered_adapters[int_id] = kept.model
        try:
            if len(manager._active_adapters) >= manager.lora_slots:
                manager._active_adapters.remove_oldest()
            slot = int(manager.lora_index_to_id.index(None))
            manager._active_adapters[int_id] = None
            manager.lora_index_to_id[slot] = int_id
            places, outside = layout.views(manager.modules, slot)
            if places:
                torch._foreach_copy_(places, kept.sources)
            if outside:
                torch._foreach_zero_(outside)
        except BaseException:
            self.drop(int_id)
            raise
        manager._last_mapping = None  # the slots were reassigned outside of a step
        self.newest.append(int_id)
        return slot

    def drop(self, int_id: int) -> bool:
        """Free an adapter's slot and memory, one version's memory excepted; False where it was not there."""
        found = bool(self._manager.remove_adapter(int_id))
        held = self._manager.list_adapters()
        for kept in [kept for kept in self._kept if kept.model.id not in held][1:]:
            self._kept.remove(kept)
        return found

    def _room(self, layout: SlotLayout) -> Kept:
        """Memory for one more version: that of one which the manager has let go of, or new. No other is held back."""
        held = self._manager.list_adapters()
        free = [kept for kept in self._kept if kept.model.id not in held]
        again = next((kept for kept in free if kept.layout is layout), None)
        self._kept = [kept for kept in self._kept if kept is again or kept not in free]
        if again is not None:
            return again
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=self._device)
        tensors = split_flat(flat, layout.shapes)
        sources = [rect.of(tensors[rect.tensor]) for rect in layout.rects]
        ups = [tensors[b] for _, b in layout.modules.values()]
        made = Kept(layout, flat.view(torch.uint8), ups, sources, _lora_model(self._manager, layout, tensors))
        self._kept.append(made)
        return made


def wait_for_folders(loras: Any, installer: Installer) -> None:
    """Have vLLM's loader wait for the folder of a version that others have pushed out before it was published.

    A load that fails in a step is the end of the engine.

    Args:
        loras: vLLM's `WorkerLoRAManager`.
        installer: Knows the newest versions.
    """
    load = loras._load_adapter

    def patient(request: Any) -> Any:
        deadline = time.monotonic() + (PUBLISHED_SECONDS if request.lora_int_id in installer.newest else 0.0)
        while not Path(request.lora_path).is_dir() and time.monotonic() < deadline:
            time.sleep(_LOOK)
        return load(request)

    loras._load_adapter = patient


def own_tensors(manager: Any, int_id: int) -> None:
    """Give an adapter memory of its own where its tensors are pages of the file that they were read from.

    On a CPU vLLM keeps them mapped: whatever becomes of the file afterwards would be served with the next activation,
    and a file cut short would kill the engine.
    """
    if manager.device.type != "cpu":
        return
    adapter = manager.list_adapters()[int_id]
    if getattr(adapter, "_loraflow_owned", False):
        return
    for layer in adapter.loras.values():
        for side in ("lora_a", "lora_b"):
            value = getattr(layer, side)
            owned = (
                [None if part is None else part.clone() for part in value] if isinstance(value, list) else value.clone()
            )
            setattr(layer, side, owned)
    adapter._loraflow_owned = True


def _lora_model(manager: Any, layout: SlotLayout, tensors: list[torch.Tensor]) -> Any:
    """The adapter in the form that vLLM registers: packed as its layers are, scaling 1, since B is scaled already."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    single: dict[str, Any] = {}
    for module, (a, b) in layout.modules.items():
        rank = layout.shapes[a][0]
        single[module] = LoRALayerWeights(module, rank, rank, tensors[a], tensors[b], scaling=1.0)
    layers: dict[str, Any] = {}
    for name in manager.modules:
        parts = [single.get(part) for part in manager.packed_modules.get(name, [name])]
        if any(part is not None for part in parts):
            layers[name] = PackedLoRALayerWeights.pack(parts) if len(parts) > 1 else parts[0]
    model = LoRAModel(1, max(layout.shapes[a][0] for a, _ in layout.modules.values()), layers)
    model._loraflow_owned = True  # no pages of a file, see `own_tensors`
    return model

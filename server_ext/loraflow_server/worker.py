"""`LoraflowWorker`: what the plugin's routes can ask of a worker (``--worker-extension-cls``).

vLLM mixes this class into its own worker. Every method is named ``loraflow_…``, takes and gives JSON types, and
answers ``{"ok": …}`` or ``{"error": {"code", "message", "status"}}``, so that a reason survives the way back.
Calls run in the engine's loop, between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loraflow_server.answers import answers
from loraflow_server.base import base_checksums
from loraflow_server.direct import Installer, own_tensors, wait_for_folders
from loraflow_server.errors import PluginError
from loraflow_server.folder import FolderReader
from loraflow_server.slots import SlotLayout, SlotReading, learn_layout
from loraflow_server.weights_worker import WeightsWorker

__all__ = ["LoraflowWorker"]


class LoraflowWorker(WeightsWorker):
    """Mixed into vLLM's worker: ``self.model_runner`` and ``self.device`` are the worker's."""

    def loraflow_manager(self) -> Any:
        """The LoRA manager of vLLM; refused where the server was started without ``--enable-lora``."""
        manager = getattr(getattr(self.model_runner, "lora_manager", None), "_adapter_manager", None)
        if manager is None:
            raise PluginError("no_lora", "the server was started without --enable-lora", status=409)
        return manager

    def loraflow_installer(self) -> Installer:
        """Puts payloads into slots."""
        installer: Installer | None = self.__dict__.get("_loraflow_installer")
        if installer is None:
            installer = Installer(self.loraflow_manager(), torch.device(self.device))
            wait_for_folders(self.model_runner.lora_manager, installer)
            self.__dict__["_loraflow_installer"] = installer
        return installer

    def loraflow_reader(self) -> FolderReader:
        """Reads published folders."""
        reader: FolderReader | None = self.__dict__.get("_loraflow_reader")
        if reader is None:
            self.loraflow_manager()
            reader = FolderReader(self.model_runner.lora_manager, torch.device(self.device))
            self.__dict__["_loraflow_reader"] = reader
        return reader

    def loraflow_layouts(self) -> dict[str, SlotLayout]:
        """Layouts agreed so far, by id; the newest few."""
        layouts: dict[str, SlotLayout] = self.__dict__.setdefault("_loraflow_layouts", {})
        return layouts

    def loraflow_known_layout(self, layout_id: str) -> SlotLayout:
        """The layout agreed under ``layout_id``; refused where this worker does not know it (it was restarted)."""
        layout = self.loraflow_layouts().get(layout_id)
        if layout is None:
            raise PluginError("unknown_layout", f"layout {layout_id!r} was not agreed with this server", status=409)
        return layout

    @answers
    def loraflow_layout(self, layout_id: str, tensors: Mapping[str, Sequence[int]]) -> Mapping[str, Any]:
        """Learn where an adapter with these tensors (name to shape, sorted) lies in this worker's slots."""
        layouts = self.loraflow_layouts()
        if layout_id not in layouts:
            while len(layouts) >= 4:
                del layouts[next(iter(layouts))]
            layouts[layout_id] = learn_layout(self.loraflow_manager(), tensors, torch.device(self.device))
        layout = layouts[layout_id]
        return {"dtype": str(layout.dtype).removeprefix("torch."), "rects": [rect.to_list() for rect in layout.rects]}

    @answers
    def loraflow_checksum(self, lora_int_id: int, name: str, path: str, layout_id: str) -> Mapping[str, Any]:
        """Checksum what is served for one adapter.

        It is activated first where it has no slot now, and read back from its folder where the caches let go of it: as
        the next request for it would do. What is checksummed does not depend on its files any more.
        """
        layout = self.loraflow_known_layout(layout_id)
        manager = self.loraflow_manager()
        if lora_int_id in manager.list_adapters():
            manager.activate_adapter(lora_int_id)
        else:
            from vllm.lora.request import LoRARequest

            self.model_runner.lora_manager.add_adapter(LoRARequest(name, lora_int_id, path))
        own_tensors(manager, lora_int_id)
        sums, dirty = SlotReading(manager, layout, manager.lora_index_to_id.index(lora_int_id)).result()
        return {"sums": sums, "dirty": dirty}

    @answers
    def loraflow_probe(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """Whether this worker reaches a payload: its first 16 bytes, in hex."""
        head = self.loraflow_payloads().bytes_of(source)[:16]
        return {"head": bytes(head.cpu().tolist()).hex()}

    @answers
    def loraflow_direct(
        self, lora_int_id: int, layout_id: str, wait: bool, source: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Fill a slot from a payload or a published folder under a new id, and checksum what lies there then.

        Without ``wait`` both are only launched, and steps can follow: `loraflow_direct_sums` gives what was found.
        """
        layout, manager = self.loraflow_known_layout(layout_id), self.loraflow_manager()
        scalings = None
        if source["kind"] == "folder":
            reader, path = self.loraflow_reader(), str(source["path"])
            scalings, payload = reader.scalings(path, layout), reader.payload(path, layout)
        else:
            payload = self.loraflow_payloads().bytes_of(source)
        slot = self.loraflow_installer().install(layout, payload, lora_int_id, scalings)
        reading = SlotReading(manager, layout, slot)
        self.__dict__["_loraflow_reading"] = (lora_int_id, reading)
        return _found(reading, wait)

    @answers
    def loraflow_direct_sums(self, lora_int_id: int, wait: bool) -> Mapping[str, Any]:
        """What `loraflow_direct` found, the last one; ``sums`` None where it is still at it, and nobody is to wait."""
        known: tuple[int, SlotReading] | None = self.__dict__.get("_loraflow_reading")
        if known is None or known[0] != lora_int_id:
            raise PluginError("nothing_begun", f"adapter id {lora_int_id} is not being installed", status=409)
        return _found(known[1], wait)

    @answers
    def loraflow_drop(self, lora_int_id: int) -> Mapping[str, Any]:
        """Free the memory of an adapter that no request can ask for."""
        return {"dropped": self.loraflow_installer().drop(lora_int_id)}

    @answers
    def loraflow_state(self) -> Mapping[str, Any]:
        """What this worker holds."""
        lora = getattr(self.model_runner, "lora_manager", None)
        manager = getattr(lora, "_adapter_manager", None)
        return {
            "lora_enabled": manager is not None,
            "registered": sorted(manager.list_adapters()) if manager is not None else [],
            "slots": list(manager.lora_index_to_id) if manager is not None else [],
            "device": str(self.device),
            "gpu": str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else None,
            "updating": bool(getattr(self, "_weight_update_active", False)),
        }

    @answers
    def loraflow_base(self) -> Mapping[str, Any]:
        """Checksums of the served base weights, LoRA slots left out."""
        return {"tensors": base_checksums(self.model_runner.get_model())}


def _found(reading: SlotReading, wait: bool) -> Mapping[str, Any]:
    if not wait and not reading.ready:
        return {"sums": None, "dirty": None}
    sums, dirty = reading.result()
    return {"sums": sums, "dirty": dirty}

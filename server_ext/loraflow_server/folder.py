"""A published adapter as a payload: straight from its file to the device, where vLLM's own loader takes each tensor in
hand several times.

The numbers are those of vLLM's loader: its own reading of the configuration gives each module's scaling, and rounds
twice in the same order (cast to the slots' dtype, then B times its scaling).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraflow_server.errors import PluginError
from loraflow_server.payload import read_folder
from loraflow_server.slots import SlotLayout

__all__ = ["FolderReader"]

_CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(eq=False)
class _Scalings:
    """What a configuration says; versions of a run share it."""

    config: bytes
    layout: SlotLayout
    factors: list[float]


class FolderReader:
    """Reads folders that were checked (`loraflow_server.checks.check_folder`).

    Args:
        loras: vLLM's `WorkerLoRAManager`.
        device: Where payloads go.
    """

    def __init__(self, loras: Any, device: torch.device) -> None:
        self._loras = loras
        self._device = device
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._known: _Scalings | None = None

    def payload(self, path: str, layout: SlotLayout) -> torch.Tensor:
        """The adapter's tensors in the slots' dtype, as they lie in the file; uint8, on the host. Valid until the next.

        Raises:
            PluginError: ``bad_file``: its tensors are not those of the layout.
        """
        file = Path(path) / "adapter_model.safetensors"
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header = json.loads(os.pread(descriptor, start - 8, 8))
            if not _lies_as_served(header, layout):  # another writer's: brought into order
                return read_folder(path, layout.shapes, layout.dtype).view(torch.uint8)
            wanted = layout.numel * layout.dtype.itemsize
            if self._staging.numel() != wanted:
                pinned = self._device.type == "cuda"
                self._staging = torch.empty(wanted, dtype=torch.uint8, pin_memory=pinned)
            view, at = self._staging.numpy().data, 0
            while at < wanted:
                got = os.preadv(descriptor, [view[at:]], start + at)
                if got == 0:
                    raise PluginError("bad_file", f"{file} ends after {at} of {wanted} bytes")
                at += got
            return self._staging
        finally:
            os.close(descriptor)

    def scalings(self, path: str, layout: SlotLayout) -> list[float]:
        """Factor of each of the layout's modules, as vLLM reads it from the folder's configuration.

        Raises:
            PluginError: ``load_failed``: vLLM does not serve such an adapter; with its reason.
        """
        config = (Path(path) / "adapter_config.json").read_bytes()
        known = self._known
        if known is None or known.config != config or known.layout is not layout:
            known = self._known = _Scalings(config, layout, self._read_scalings(path, layout))
        return known.factors

    def _read_scalings(self, path: str, layout: SlotLayout) -> list[float]:
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            helper = PEFTHelper.from_local_dir(path, self._loras.max_position_embeddings)
            helper.validate_legal(self._loras.lora_config)
        except (ValueError, TypeError, KeyError) as error:
            raise PluginError("load_failed", f"vLLM refused the adapter: {error}") from error
        if not hasattr(helper, "get_rank_and_scaling"):  # before 0.32 vLLM has one factor for all
            return [float(helper.vllm_lora_scaling_factor)] * len(layout.modules)
        names = [parse_fine_tuned_lora_name(layout.names[b])[0] for _, b in layout.modules.values()]
        return [float(helper.get_rank_and_scaling(name)[1]) for name in names]


def _lies_as_served(header: dict[str, Any], layout: SlotLayout) -> bool:
    """Whether the data of a file is the payload as it stands: the layout's tensors, in its order and dtype."""
    header.pop("__metadata__", None)
    code, at = _CODES[layout.dtype], 0
    if sorted(header) != list(layout.names):
        raise PluginError("bad_file", "the adapter has other tensors than were agreed on")
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        entry = header[name]
        if tuple(entry["shape"]) != tuple(shape):
            raise PluginError("bad_file", f"{name} has shape {entry['shape']}, not {list(shape)} as agreed")
        size = shape[0] * shape[1] * layout.dtype.itemsize
        if entry["dtype"] != code or entry["data_offsets"] != [at, at + size]:
            return False
        at += size
    return True

"""A worker that a test can damage: what a wrong kernel, a bad link or a bug would do to a loaded adapter."""

from __future__ import annotations

from typing import Any

import torch

from loraflow_server.worker import LoraflowWorker

__all__ = ["CorruptingWorker"]


class CorruptingWorker(LoraflowWorker):
    """`LoraflowWorker` with one more method, for ``/collective_rpc``."""

    def loraflow_flip(self, int_id: int, module: str, side: str, index: int, row: int, col: int, bit: int) -> Any:
        """Flip one bit of one element in the slot of an adapter; False where it has no slot."""
        manager = self.loraflow_manager()
        if int_id not in manager.lora_index_to_id:
            return False
        layer = manager.modules[module]
        stacked = (layer.lora_a_stacked if side == "a" else layer.lora_b_stacked)[index]
        slot = manager.lora_index_to_id.index(int_id)
        words = stacked[slot, 0].view(torch.int32)
        words[row, col] ^= 1 << bit
        return True

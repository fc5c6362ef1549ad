"""vLLM's own LoRA manager over a tiny model, in this process and without an engine: slots to look into."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["LoraHost", "lora_host"]


class LoraHost:
    """A worker as far as adapters go: loraflow's extension, and vLLM's manager under it."""

    def __init__(self, loras: Any, config: Any) -> None:
        from loraflow_server.worker import LoraflowWorker

        self.loras = loras
        self.config = config
        self.manager = loras._adapter_manager
        self.worker: Any = LoraflowWorker()
        self.worker.model_runner = SimpleNamespace(lora_manager=loras)
        self.worker.device = torch.device("cpu")
        self.worker.parallel_config = config.parallel_config
        self.in_step = threading.Lock()  # a worker does one thing at a time
        self.asleep = False

    def slots_of(self, int_id: int) -> list[torch.Tensor]:
        """Copies of everything that is served for an adapter, which is activated for it."""
        self.manager.activate_adapter(int_id)
        slot = self.manager.lora_index_to_id.index(int_id)
        found = []
        for layer in self.manager.modules.values():
            for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
                parts = (stacked,) if isinstance(stacked, torch.Tensor) else stacked
                found += [part[slot].clone() for part in parts]
        return found

    def load(self, folder: Path, int_id: int) -> list[torch.Tensor]:
        """What vLLM's own loader puts into a slot."""
        from vllm.lora.request import LoRARequest

        self.loras.add_adapter(LoRARequest(f"stock-{int_id}", int_id, str(folder)))
        return self.slots_of(int_id)


@contextmanager
def lora_host(
    model: Path, *, dtype: str = "float32", rank: int = 16, slots: int = 2, kept: int = 3
) -> Iterator[LoraHost]:
    """Load ``model`` with room for ``slots`` active and ``kept`` registered adapters."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader import get_model
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port

    arguments = EngineArgs(
        model=str(model), dtype=dtype, enforce_eager=True, max_model_len=128, enable_lora=True, max_lora_rank=rank,
        max_loras=slots, max_cpu_loras=kept, max_num_seqs=4,
    )  # fmt: skip
    config = arguments.create_engine_config()
    before = torch.get_default_dtype()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, get_distributed_init_method("127.0.0.1", get_open_port()), 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            with patch("torch.accelerator.empty_cache", lambda: None):  # as vLLM's CPU worker does
                served = get_model(vllm_config=config)
            loras = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), served.embedding_modules)
            loras.create_lora_manager(served, config)
            yield LoraHost(loras, config)
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
            torch.set_default_dtype(before)

"""The stock ways, as TRL and Axolotl do them: what loraflow is measured against.

- ``stock-adapter``: ``save_pretrained`` into a new folder, ``/v1/load_lora_adapter`` under a fresh name (TRL's async
  trainers).
- ``stock-inplace``: the same with one name and ``load_inplace`` (Axolotl).
- ``stock-merged``: ``merge_adapter``, vLLM's own packed transfer of every parameter, ``unmerge_adapter``, and a reset
  of the prefix cache (TRL's GRPO).

No proof of delivery is in their times: they have none.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from loraflow.bench.scenarios import Timed
from loraflow.server import VLLMServer

__all__ = ["StockAdapter", "StockMerged", "stock_weights"]

_VLLM_BUFFER = 1 << 30  # DEFAULT_PACKED_BUFFER_SIZE_BYTES of vLLM 0.32


class StockAdapter:
    """Save, and load over HTTP.

    Args:
        model: The trainer's PEFT model.
        url: The server.
        root: Folder that the server may load from.
        inplace: One name, loaded over itself.
    """

    def __init__(self, model: Any, url: str, root: Path, *, inplace: bool) -> None:
        self.name = "stock-inplace" if inplace else "stock-adapter"
        self._model = model
        self._server = VLLMServer(url)
        self._root = root / f"stock-{secrets.token_hex(4)}"
        self._inplace = inplace
        self._run = secrets.token_hex(4)
        self._count = 0
        self._held: tuple[str, Path] | None = None

    def open(self) -> None:
        """Make the folder."""
        self._root.mkdir(parents=True)

    @property
    def served(self) -> str:
        """The name that requests use now."""
        assert self._held is not None  # noqa: S101 - after a sync
        return self._held[0]

    def sync(self, step: int) -> Timed:  # noqa: ARG002 - the protocol's
        """One sync; freeing what came before is not in the time."""
        self._count += 1
        folder = self._root / f"{self._count}"
        name = f"stock-{self._run}" if self._inplace else f"stock-{self._run}-{self._count}"
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(folder)}
        if self._inplace:
            body["load_inplace"] = True
        began = time.perf_counter()
        self._model.save_pretrained(folder)
        saved = time.perf_counter()
        self._server.request("POST", "/v1/load_lora_adapter", json=body, timeout=120)
        ended = time.perf_counter()
        size = (folder / "adapter_model.safetensors").stat().st_size
        previous, self._held = self._held, (name, folder)
        if previous is not None:
            if not self._inplace:
                self._server.request("POST", "/v1/unload_lora_adapter", json={"lora_name": previous[0]})
            shutil.rmtree(previous[1])
        phases = {"save": (saved - began) * 1e3, "load": (ended - saved) * 1e3}
        return Timed((ended - began) * 1e3, (ended - began) * 1e3, size, phases, proven=False)

    def close(self) -> None:
        """Unload, and remove the folder."""
        held, self._held = self._held, None
        if held is not None:
            self._server.request("POST", "/v1/unload_lora_adapter", json={"lora_name": held[0]})
        shutil.rmtree(self._root, ignore_errors=True)
        self._server.close()


class StockMerged:
    """Merge, send everything with vLLM's own engine, unmerge.

    Both sides are put right outside of the time: the trainer's base, which bf16 does not give back after a merge, and
    at the end the server's.

    Args:
        model: The trainer's PEFT model.
        url: A server without adapters, started with the backend.
        backend: ``ipc`` (one GPU) or ``nccl`` (two).
    """

    def __init__(self, model: Any, url: str, backend: Literal["ipc", "nccl"]) -> None:
        self.name = f"stock-merged-{backend}"
        self._model = model
        self._server = VLLMServer(url)
        self._backend = backend
        self._engine: Any = None
        self._pristine: dict[str, torch.Tensor] = {}

    def open(self) -> None:
        """Join the server's weight-transfer engine."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        self._pristine = {name: weight.detach().clone() for name, weight in self._adapted()}
        self._server.request("POST", "/shutdown_weight_transfer_engine", timeout=60)
        client = HTTPVLLMWeightSyncClient(self._server.url)
        source = _source(self._model)
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import (
                IPCTrainerInitInfo,
                IPCTrainerWeightTransferEngine,
            )

            largest = max(weight.nbytes for _, weight in stock_weights(self._model))
            buffer = max(_VLLM_BUFFER, largest)  # vLLM refuses a tensor that is larger than its buffer
            self._engine = IPCTrainerWeightTransferEngine.trainer_init(
                IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer), client=client, source=source
            )
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        from loraflow.launch import free_port

        world = int(self._server.request("GET", "/get_world_size")["world_size"])
        torch.cuda.set_device(next(self._model.parameters()).device)
        info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=free_port(), world_size=world + 1)
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)

    def sync(self, step: int) -> Timed:  # noqa: ARG002 - the protocol's
        """One sync."""
        began = time.perf_counter()
        self._model.merge_adapter()
        torch.cuda.synchronize()
        merged = time.perf_counter()
        self._engine.send_weights()
        torch.cuda.synchronize()
        sent = time.perf_counter()
        self._model.unmerge_adapter()
        torch.cuda.synchronize()
        unmerged = time.perf_counter()
        self._server.request("POST", "/reset_prefix_cache")
        ended = time.perf_counter()
        self._restore()
        phases = {
            "merge": (merged - began) * 1e3,
            "send": (sent - merged) * 1e3,
            "unmerge": (unmerged - sent) * 1e3,
            "cache": (ended - unmerged) * 1e3,
        }
        size = sum(weight.nbytes for _, weight in stock_weights(self._model))
        return Timed((ended - began) * 1e3, (ended - began) * 1e3, size, phases, proven=False)

    def close(self) -> None:
        """Send the pristine base, and leave the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.send_weights()
            self._server.request("POST", "/reset_prefix_cache")
            self._server.request("POST", "/shutdown_weight_transfer_engine", timeout=60)
            engine.shutdown()
        self._pristine = {}
        self._server.close()

    def _adapted(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self._model.named_parameters() if n.endswith(".base_layer.weight"))

    @torch.no_grad()
    def _restore(self) -> None:
        for name, weight in self._adapted():
            weight.copy_(self._pristine[name])
        torch.cuda.synchronize()


def stock_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter under its checkpoint's name, as TRL's ``VLLMGeneration`` walks a PEFT model."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.data


def _source(model: nn.Module) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc, unused-ignore]
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in stock_weights(model)]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return stock_weights(model)

    return Source()

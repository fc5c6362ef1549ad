"""The servers that the benchmark starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loraflow.bench.presets import Preset
from loraflow.launch import ServeCommand, ServeOptions, ServerProcess, free_port, serve_command

__all__ = ["ServerSpec", "make_server"]

# One thread serves a tiny model best, and threads that spin while they wait starve the trainer on two cores.
_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


@dataclass(frozen=True)
class ServerSpec:
    """One server to start.

    Attributes:
        folder: Model folder.
        preset: Its shape.
        rank: Largest LoRA rank; None starts it without LoRA slots, for fold and broadcasts.
        device: ``cpu`` or ``cuda``.
        work: Folder for logs.
        root: Store that adapters may be loaded from.
        backend: Of weight transfer: ``gloo``, ``ipc`` or ``nccl``.
        utilization: Share of the GPU's memory that vLLM may take.
        kv_cache_bytes: Size of its KV cache, so that it does not measure what is free: others may start at the time.
        visible: ``CUDA_VISIBLE_DEVICES`` of the server; the caller's where None.
        tensor_parallel: GPUs.
        eager: No CUDA graphs.
        max_staleness: See `ServeOptions`.
        port: A free one where None.
        stock: As TRL's guide starts it: nothing of loraflow's beside it.
    """

    folder: Path
    preset: Preset
    rank: int | None
    device: str
    work: Path
    root: Path
    backend: str
    utilization: float = 0.3
    kv_cache_bytes: int | None = None
    visible: str | None = None
    tensor_parallel: int = 1
    eager: bool = False
    max_staleness: int = 1
    port: int | None = None
    stock: bool = False


def make_server(spec: ServerSpec) -> ServerProcess:
    """The server, not yet started; its log lies in ``work``."""
    cpu = spec.device == "cpu"
    extra = ["--dtype", spec.preset.dtype, "--max-model-len", "512" if cpu else "1024"]
    extra += ["--max-num-seqs", "16" if cpu else "256"]
    if cpu or spec.eager:
        extra += ["--enforce-eager"]
    if not cpu:
        extra += ["--gpu-memory-utilization", str(spec.utilization)]
        extra += [] if spec.kv_cache_bytes is None else ["--kv-cache-memory-bytes", str(spec.kv_cache_bytes)]
    if not spec.stock:
        extra += ["--enable-scale-out"]  # requests of token ids: see `loraflow.bench.streams`
    if spec.tensor_parallel > 1:
        extra += ["--tensor-parallel-size", str(spec.tensor_parallel)]
    port = spec.port or free_port()
    command = serve_command(
        ServeOptions(
            model=str(spec.folder),
            max_lora_rank=spec.rank,
            max_staleness=spec.max_staleness,
            adapter_root=str(spec.root),
            port=port,
            device=spec.device,
            weight_transfer=spec.backend,
            extra=extra,
        )
    )
    if spec.stock:
        command = _as_stock(command)
    env: dict[str, str] = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if cpu:
        env |= _unset(_CPU_ENV)
    if spec.backend == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # stock handles travel pickled
    if spec.visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = spec.visible
    kind = "stock" if spec.stock else "plain" if spec.rank is None else f"lora{spec.rank}"
    log = spec.work / f"vllm-{spec.preset.name}-{kind}-tp{spec.tensor_parallel}-{port}.log"
    return ServerProcess(command, log=log, env=env)


def _as_stock(command: ServeCommand) -> ServeCommand:
    argv = list(command.argv)
    for flag in ("--worker-extension-cls", "--weight-transfer-config"):
        at = argv.index(flag)
        del argv[at : at + 2]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_PLUGINS": ""}
    return replace(command, argv=tuple(argv), env=env)


def _unset(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}

"""One real vLLM per configuration, shared by all tests of a session that want it, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loraflow.launch import ServeCommand, ServeOptions, ServerProcess, free_port, serve_command

# What every CPU server of the tests needs: small caches, no core pinning, no compilation.
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # a tiny model gains nothing from more,
    "OMP_WAIT_POLICY": "PASSIVE",  # and threads that spin starve the trainer on two cores
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_ARGS = ("--enforce-eager", "--max-model-len", "256", "--dtype", "float32", "--max-num-seqs", "16")


@dataclass(frozen=True)
class RunningServer:
    url: str
    model: Path
    adapter_root: Path
    process: ServerProcess


def as_stock(command: ServeCommand) -> ServeCommand:
    """`command` without anything of loraflow's: what TRL's guide tells people to start."""
    argv = list(command.argv)
    for flag in ("--worker-extension-cls", "--weight-transfer-config"):
        if flag in argv:
            at = argv.index(flag)
            del argv[at : at + 2]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_PLUGINS": ""}
    return replace(command, argv=tuple(argv), env=env)


@contextmanager
def vllm_server(
    model: Path,
    work: Path,
    *,
    max_lora_rank: int | None = 16,
    extra: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    max_staleness: int = 1,
    args: tuple[str, ...] = CPU_ARGS,
    port: int | None = None,
    weight_transfer: str | None = None,
    stock: bool = False,
    dev_mode: bool = True,
) -> Iterator[RunningServer]:
    """Start vLLM on `model`; `stock` as a user would without loraflow beside it (no plugin, no worker extension)."""
    root = work / "adapters"
    root.mkdir(parents=True, exist_ok=True)
    options = ServeOptions(
        model=str(model),
        max_lora_rank=max_lora_rank,
        max_staleness=max_staleness,
        adapter_root=str(root),
        port=port or free_port(),
        weight_transfer=weight_transfer,
        extra=(*args, *extra),
    )
    command = serve_command(options)
    if stock:
        command = as_stock(command)
    if not dev_mode:
        command = replace(command, env={k: v for k, v in command.env.items() if k != "VLLM_SERVER_DEV_MODE"})
    process = ServerProcess(command, log=work / "vllm.log", env={**CPU_ENV, **(env or {})})
    with process:
        process.wait_ready(420)
        yield RunningServer(command.url, Path(model), root, process)

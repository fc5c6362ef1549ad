"""`loraflow demo`: a real vLLM, real TRL GRPO, syncs proven on screen, and a second run on the same server."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loraflow.commands.output import Output, make_folder
from loraflow.demo.checks import run_checks
from loraflow.demo.report import plot_run, show_run
from loraflow.demo.tiny import make_tiny_model
from loraflow.demo.train import TrainedRun, train
from loraflow.errors import LoraflowError
from loraflow.launch import ServeOptions, ServerProcess, free_port, serve_command

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["run_demo"]

_RANK = 16
# One thread serves a tiny model best, and threads that spin while they wait starve the trainer on two cores.
_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def run_demo(output: Output, out: Path, *, steps: int = 30) -> dict[str, Any]:
    """Run it all; leaves the model, the server's log, the records and a plot in ``out``.

    Returns:
        ``{"passed", "checks", "runs": [{"transport", "reward_before", "reward_after", "syncs": […]}, …], "plot",
        "seconds"}``.

    Raises:
        LoraflowError: Something is missing, or a sync failed.
    """
    _require_trl()
    began = time.monotonic()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make_folder(out)
    model = make_tiny_model(out / "model")
    output.say(f"made a random Qwen2 of 4 layers and its tokenizer in {model}")
    with _server(model, out) as server:
        output.say(f"starting vLLM: {server.command}", style="dim")
        with output.console.status("vLLM is starting (a minute on two cores)"):
            server.wait_ready()
        output.say(f"vLLM is up at {server.url} after {time.monotonic() - began:.0f} s", style="green")

        first = _run(
            output, "run 1: GRPO, the adapter every 2 steps", model, server.url, out, steps, transport="adapter"
        )
        checks = run_checks(model, server.url, out)
        output.table("checks", ("", "check", "seen"), [("✓" if c.passed else "✗", c.name, c.seen) for c in checks])
        second = _run(
            output,
            "run 2: the same server, not restarted; merged weights every 2 steps",
            model,
            server.url,
            out,
            max(2, steps // 5),
            transport="merged",
        )
    plot = plot_run(first, second, out / "demo.png")
    runs = (first, second)
    risen = first.reward_after > first.reward_before
    passed = risen and all(c.passed for c in checks) and all(record.proven for run in runs for record in run.records)
    output.say(
        f"reward of run 1: {first.reward_before:.2f} before, {first.reward_after:.2f} after; plot: {plot}",
        style="green" if risen else "red",
    )
    seconds = time.monotonic() - began
    output.say(
        f"{'all passed' if passed else 'FAILED'} in {seconds:.0f} s", style="bold green" if passed else "bold red"
    )
    return {
        "passed": passed,
        "checks": [vars(check) for check in checks],
        "runs": [run.to_dict() for run in runs],
        "plot": str(plot),
        "seconds": round(seconds, 1),
    }


def _server(model: Path, out: Path) -> ServerProcess:
    cuda = torch.cuda.is_available()
    extra = ["--enforce-eager", "--max-model-len", "256"]
    # In float32 "bit-identical" and "equals the trainer's forward" leave no room for noise.
    extra += ["--dtype", "float32", "--gpu-memory-utilization", "0.3"] if cuda else ["--dtype", "float32"]
    options = ServeOptions(
        model=str(model),
        max_lora_rank=_RANK,
        adapter_root=str((out / "adapters").resolve()),
        port=free_port(),
        weight_transfer="gloo",
        extra=extra,
    )
    env: Mapping[str, str] = {} if cuda else {k: v for k, v in _CPU_ENV.items() if k not in os.environ}
    log = out / "vllm.log"
    log.unlink(missing_ok=True)
    return ServerProcess(serve_command(options), log=log, env=env)


def _run(output: Output, title: str, model: Path, url: str, out: Path, steps: int, *, transport: str) -> TrainedRun:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=output.console) as progress:
        task = progress.add_task(title, total=steps, note="")

        def tell(step: int, note: str) -> None:
            progress.update(task, completed=step, note=note)

        report: Callable[[int, str], None] = tell
        run = train(model, url, out, steps, transport=transport, rank=8, report=report)
    show_run(output, title, run)
    return run


def _require_trl() -> None:
    try:
        for name in ("datasets", "matplotlib", "trl"):
            importlib.import_module(name)
    except ImportError as error:
        raise LoraflowError(f"the demo needs {error.name}", hint='pip install "loraflow[demo]"') from error

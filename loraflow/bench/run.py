"""``loraflow bench``: the standalone sync throughput test."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loraflow.bench.compare import break_evens, comparisons, pauses
from loraflow.bench.presets import PRESETS, Preset, preset_of, preset_of_folders
from loraflow.bench.report import Report, show
from loraflow.bench.scale import parse_scale, run_scale
from loraflow.bench.scale_report import Axis
from loraflow.bench.serving import Serving
from loraflow.bench.session import Session, Settings
from loraflow.commands.output import make_folder
from loraflow.errors import ConfigError, LoraflowError
from loraflow.launch import require_vllm
from loraflow.server import VLLMServer

if TYPE_CHECKING:
    from loraflow.commands.output import Output

__all__ = ["plan_ways", "run_bench"]

_SLOT_WAYS = ("direct", "direct-overlap", "filesystem", "filesystem-stock", "stock-adapter")
_ASKED_SLOT_WAYS = ("upload", "direct-group")
_STOCK_SERVER_WAYS = ("stock-inplace",)
_MERGED_WAYS = ("fold", "gloo", "ipc", "nccl", "stock-merged-ipc", "stock-merged-nccl")
_ROUNDS = 2
_CPU_STREAMS, _GPU_STREAMS = (8,), (64, 256)


def plan_ways(
    asked: Sequence[str] | None, *, backend: str, given_server: bool
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Which ways to measure.

    Args:
        asked: Names; None takes all that fit. ``stock-merged`` is the one of the backend.
        backend: Weight transfer of this machine: ``gloo``, ``ipc`` or ``nccl``.
        given_server: The user's server is used, so none of another kind is started.

    Returns:
        Ways by the kind of server that they need (``lora``, ``stock``, ``plain``), and why others are skipped.

    Raises:
        ConfigError: A name is none of a way.
    """
    stock_merged = f"stock-merged-{backend}"
    named = None if asked is None else [stock_merged if name == "stock-merged" else name for name in asked]
    unknown = sorted(
        set(named or ()) - {*_SLOT_WAYS, *_ASKED_SLOT_WAYS, *_STOCK_SERVER_WAYS, *_MERGED_WAYS, "stock-merged-gloo"}
    )
    if unknown:
        raise ConfigError(
            f"no way of syncing is called {unknown[0]!r}",
            hint=f"one of {', '.join((*_SLOT_WAYS, *_ASKED_SLOT_WAYS, *_STOCK_SERVER_WAYS, *_MERGED_WAYS))}",
        )
    slots = [way for way in _SLOT_WAYS if named is None or way in named]
    slots += [way for way in _ASKED_SLOT_WAYS if named is not None and way in named]
    merged: list[str] = []
    skipped: dict[str, str] = {}
    stock = [way for way in _STOCK_SERVER_WAYS if named is not None and way in named]
    if not stock and named is None:
        skipped["stock-inplace"] = (
            "loraflow's plugin refuses it, and a server without takes minutes: ask for it with --transports"
        )
    for way in ("fold", backend, stock_merged):
        if named is not None and way not in named:
            continue
        if way == "stock-merged-gloo":
            skipped["stock-merged"] = "vLLM has no weight transfer of its own on a CPU"
        elif given_server and named is None:
            skipped[way] = "it writes to the base weights of the given server: ask for it with --transports"
        elif named is None and backend == "gloo":
            skipped[way] = "a second server takes minutes on a CPU: ask for it with --transports"
        else:
            merged.append(way)
    for way in named or ():
        if way in {"gloo", "ipc", "nccl", "stock-merged-ipc", "stock-merged-nccl"} and way not in merged:
            skipped[way] = f"this machine broadcasts over {backend}"
    return {"lora": slots, "stock": stock, "plain": merged}, skipped


def run_bench(
    output: Output,
    *,
    transports: Sequence[str] | None = None,
    preset: str = "tiny",
    model: Path | None = None,
    adapter: Path | None = None,
    server: str | None = None,
    rank: int | None = None,
    repeats: int = 20,
    scale: str | None = None,
    out: Path = Path("outputs/bench"),
) -> dict[str, Any]:
    """Measure, show the tables, and write ``report.json`` and plots to ``out``.

    Args:
        output: Where tables and progress go.
        transports: Ways to measure; all that fit where not given.
        preset: Shape, with random weights.
        model: Measure with this model folder instead.
        adapter: Measure with an adapter of this one's shape, on ``model`` or on its own base.
        server: Use this one; it must serve the same model (a preset's lies in ``out`` after a first run).
        rank: LoRA rank; the preset's where not given.
        repeats: Syncs per way, beside the warm-ups.
        scale: Scaling curves instead: ``rank=1,16,64``, ``layers=4,28`` or ``preset=0.5b,1.5b``.
        out: Folder.

    Returns:
        The report (see `loraflow.bench.report.Report`), with the paths of what was written under ``files``.

    Raises:
        LoraflowError: vLLM is missing, the server does not answer, nothing could be measured, or an option is wrong.
    """
    device = _device()
    shape, rank = _shape(preset, model, adapter, rank, device)
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}")
    scaling = None if scale is None else _scaling(scale, shape, server, device)
    if server is None:
        require_vllm()
    else:
        with VLLMServer(server) as given:
            given.refresh()
            server = given.url
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    make_folder(out)
    rounds = min(_ROUNDS, repeats)
    settings = Settings(
        preset=shape,
        rank=rank or shape.rank,
        device=device,
        work=out.resolve(),
        rounds=rounds,
        block=-(-repeats // rounds),
        pause=0.05 if device.type == "cpu" else 0.4,
    )
    planned, skipped = plan_ways(transports, backend=settings.backend, given_server=server is not None)
    if scaling is not None:
        others = sorted(set(transports or ()) - set(planned["lora"]))
        if others:
            raise ConfigError(f"scaling curves are of ways into LoRA slots, and {others[0]} is none")
        return run_scale(output, settings, *scaling, ways=transports, out=out)
    with Session(settings, lambda line: output.say(line, style="dim")) as session, _progress(output) as bar:
        session.given = server
        task = bar.add_task("", total=sum(map(bool, planned.values())) + 1)
        report = session.report("bench", server, [])
        for kind, ways in planned.items():
            if not ways:
                continue
            bar.update(task, description=f"{kind} server: {', '.join(ways)}")
            url = session.server(kind)
            samples, failures = session.measure(ways, url)
            report = replace(
                session.report("bench", url, [*report.samples, *samples]), failures=(*report.failures, *failures)
            )
            if server is None:
                bar.update(task, description=f"{kind} server: generation")
                report = _with_generation(session, report, kind, ways)
            bar.advance(task)
        report = replace(report, break_even=break_evens(report.summary, report.generation), skipped=skipped)
        if not report.break_even:
            report = replace(
                report, skipped={**skipped, "break-even": "it needs direct and fold, each with its generation"}
            )
        bar.advance(task)
    if not report.samples:
        raise LoraflowError(
            "nothing was measured", hint="; ".join(failure.error for failure in report.failures) or None
        )
    show(output, report)
    return _written(report, out, output)


def _shape(
    preset: str, model: Path | None, adapter: Path | None, rank: int | None, device: torch.device
) -> tuple[Preset, int | None]:
    """What is measured, and the rank that was asked for."""
    cpu = device.type == "cpu"
    if model is not None or adapter is not None:
        return preset_of_folders(model, adapter, rank=rank, dtype="float32" if cpu else "bfloat16"), None
    shape = preset_of(preset)
    if cpu and shape.name != "tiny":
        hint = f"without one: --preset tiny (there are {', '.join(PRESETS)}), or --model"
        raise ConfigError(f"preset {shape.name} needs a GPU", hint=hint)
    return shape, rank


def _scaling(scale: str, shape: Preset, server: str | None, device: torch.device) -> tuple[Axis, list[int | str]]:
    axis, values = parse_scale(scale)
    if server is not None or shape.folder is not None:
        raise ConfigError(
            "scaling curves start their own servers, on random weights",
            hint="leave out --server, --model and --adapter",
        )
    if device.type == "cpu" and axis == "preset":
        raise ConfigError("the larger presets need a GPU", hint="without one: rank=… or layers=…")
    return axis, values


def _with_generation(session: Session, report: Report, kind: str, ways: Sequence[str]) -> Report:
    cpu = session.settings.device.type == "cpu"
    serving = Serving(
        session,
        window=2.5 if cpu else 6.0,
        settle=1.0 if cpu else 2.0,
        streams=_CPU_STREAMS if cpu else _GPU_STREAMS,
        sync_streams=(_CPU_STREAMS if cpu else _GPU_STREAMS)[0],
        tokens=(16, 32) if cpu else (128, 256),
        rates=list(report.generation),
    )
    if kind == "lora" and "direct" in ways:
        serving.slots()
        serving.slots_syncing()
    elif kind == "plain" and "fold" in ways:
        serving.folded()
        serving.folded_syncing()
    return replace(
        report,
        generation=tuple(serving.rates),
        failures=(*report.failures, *serving.failures),
        comparisons=comparisons(serving.rates),
        pauses=pauses(serving.rates),
    )


def _written(report: Report, out: Path, output: Output) -> dict[str, Any]:
    content = report.to_dict()
    path = out / "report.json"
    files = [str(path)]
    try:
        from loraflow.bench.plot import plot_report

        files += [str(plot) for plot in plot_report(report, out / "report")]
    except ImportError as error:
        content["skipped"]["plots"] = f"{error.name} is not installed"
    content["files"] = files
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    output.say(f"written: {', '.join(files)}")
    return content


def _progress(output: Output) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=output.console, transient=True)


def _device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

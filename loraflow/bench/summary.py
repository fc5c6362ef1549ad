"""What a run's syncs come to: sizes, and quantiles by way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peft.tuners.lora import LoraLayer
from torch import nn

from loraflow.adapter import AdapterSpec
from loraflow.bench.links import Floor, Links, floor_of
from loraflow.bench.presets import Preset
from loraflow.bench.scenarios import Sample

__all__ = ["Payload", "Summary", "quantile", "summarise"]

_BASELINE = "stock-adapter"


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
    baseline = by_way.get(_BASELINE)
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

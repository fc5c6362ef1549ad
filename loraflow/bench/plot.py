"""PNG and SVG of a report; matplotlib is imported only here, and only when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loraflow.bench.report import Report
from loraflow.bench.scale_report import ScaleReport

__all__ = ["plot_report", "plot_scale"]

_NOT_A_PART = {"worker", "call", "forward"}  # measured inside another phase, or beside others
_FORMATS = ("png", "svg")


def plot_report(report: Report, stem: Path) -> list[Path]:
    """Every sample of every way, the phases of the medians, and tokens per second; ``stem`` gets the endings."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    wide = 3 if report.generation else 2
    figure, axes = plt.subplots(1, wide, figsize=(5.2 * wide, 4.2), constrained_layout=True)
    ways = [item.way for item in report.summary]
    for place, way in enumerate(ways):
        times = [s.timed.total_ms for s in report.samples if s.way == way and not s.warmup]
        axes[0].plot(times, [place] * len(times), "o", alpha=0.5, markersize=4)
        axes[0].plot(report.summary[place].p50_ms, place, "k|", markersize=16)
    axes[0].set(xscale="log", xlabel="ms per sync (bar: median)", title=f"{report.payload.preset}, every sync")
    bottoms = [0.0] * len(ways)
    for phase in sorted({p for item in report.summary for p in item.phases_p50_ms} - _NOT_A_PART):
        parts = [item.phases_p50_ms.get(phase, 0.0) for item in report.summary]
        axes[1].barh(range(len(ways)), parts, left=bottoms, label=phase)
        bottoms = [bottom + part for bottom, part in zip(bottoms, parts, strict=True)]
    axes[1].set(xlabel="ms", title="phases (medians)")
    axes[1].legend(fontsize=7)
    for ax in axes[:2]:
        ax.set_yticks(range(len(ways)), ways, fontsize=8)
        ax.invert_yaxis()
        ax.grid(alpha=0.3, axis="x")
    if report.generation:
        labels = [f"{rate.arm}, {rate.streams}" for rate in report.generation]
        axes[2].barh(range(len(labels)), [rate.tokens_per_second for rate in report.generation])
        axes[2].set_yticks(range(len(labels)), labels, fontsize=8)
        axes[2].invert_yaxis()
        axes[2].set(xlabel="tokens/s", title="generation (served, streams)")
    return _saved(figure, stem)


def plot_scale(report: ScaleReport, stem: Path) -> list[Path]:
    """Milliseconds per sync of each way over the axis, and over the payload."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.2), constrained_layout=True)
    labels = [str(point.value) for point in report.points]
    ways = list(dict.fromkeys(item.way for point in report.points for item in point.summary))
    for number, way in enumerate(ways):
        found = [
            (place, point.payload.adapter_bytes / 1e6, item)
            for place, point in enumerate(report.points)
            for item in point.summary
            if item.way == way
        ]
        middle = [item.p50_ms for _, _, item in found]
        spread = [[item.p50_ms - item.min_ms for *_, item in found], [item.p90_ms - item.p50_ms for *_, item in found]]
        for ax, at in ((axes[0], [place for place, _, _ in found]), (axes[1], [size for _, size, _ in found])):
            ax.errorbar(at, middle, spread, marker="o", markersize=4, capsize=3, label=way, color=f"C{number}")
    axes[0].set_xticks(range(len(labels)), labels)
    axes[0].set(yscale="log", xlabel=report.axis, ylabel="ms per sync (median; fastest to 90th percentile)")
    axes[1].set(xscale="log", yscale="log", xlabel="MB of adapter as served")
    where = report.environment.gpus[0] if report.environment.gpus else f"CPU, {report.environment.cpus} cores"
    figure.suptitle(f"scaling by {report.axis}: {where}", fontsize=10)
    for ax in axes:
        ax.grid(alpha=0.3, which="both")
        ax.legend(fontsize=8)
    return _saved(figure, stem)


def _saved(figure: Any, stem: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    paths = []
    for ending in _FORMATS:
        path = stem.with_suffix(f".{ending}")
        figure.savefig(path, dpi=130)
        paths.append(path)
    plt.close(figure)
    return paths

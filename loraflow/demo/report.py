"""What the demo shows: a table of syncs, and a plot."""

from __future__ import annotations

from pathlib import Path

from loraflow.commands.output import Output
from loraflow.demo.train import TrainedRun
from loraflow.records import SyncRecord

__all__ = ["plot_run", "show_run"]

_PHASES = ("forward", "snapshot", "publish", "load", "merge", "send", "verify")


def show_run(output: Output, title: str, run: TrainedRun) -> None:
    """The table of a run's syncs."""
    phases = [name for name in _PHASES if any(name in record.phases_ms for record in run.records)]
    columns = ("step", "version", "bytes", *(f"{name} ms" for name in phases), "total ms", "proof")
    output.table(f"{title}: {run.transport} over {run.carrier}", columns, [_row(r, phases) for r in run.records])


def _row(record: SyncRecord, phases: list[str]) -> tuple[object, ...]:
    proof = "; ".join(str(proof) for proof in record.proofs.values())
    spent = (f"{record.phases_ms.get(name, 0.0):.1f}" for name in phases)
    return (record.step, f"v{record.version}", f"{record.bytes:,}", *spent, f"{record.total_ms:.1f}", proof)


def plot_run(first: TrainedRun, second: TrainedRun, path: Path) -> Path:
    """Rewards of both runs with their syncs, and milliseconds of each sync; a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rewards, syncs) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for run, color in ((first, "tab:blue"), (second, "tab:orange")):
        label = f"{run.transport} over {run.carrier}"
        rewards.plot(range(1, len(run.rewards) + 1), run.rewards, color=color, label=label)
        steps = [record.step for record in run.records if record.step < len(run.rewards)]
        rewards.plot([s + 1 for s in steps], [run.rewards[s] for s in steps], "o", color=color, markersize=4)
        syncs.plot(
            [record.step for record in run.records], [r.total_ms for r in run.records], "o-", color=color, label=label
        )
    rewards.set(xlabel="GRPO step", ylabel="mean reward", title="reward (dots: first step on a new version)")
    syncs.set(xlabel="GRPO step", ylabel="ms", title="each sync, proof included", yscale="log")
    for axes in (rewards, syncs):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path

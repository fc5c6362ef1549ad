"""A soak: thousands of syncs against one real server, and what trainer and server hold in the meantime.

    python benchmarks/soak.py --syncs 2000 --carrier filesystem direct --out benchmarks/results/soak-cpu.json

Each carrier gets a server of its own, on the tiny model. Between two syncs the adapter is drawn anew, and a few
completions are asked for, so that slots are used, evicted and filled again. Every process of the server and the trainer
itself are sampled from /proc; the slope of each curve is fitted over the second half, where everything is warm.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loraflow import SyncManager
from loraflow.bench.presets import PRESETS
from loraflow.bench.report import environment
from loraflow.bench.servers import ServerSpec, make_server
from loraflow.demo.tiny import make_tiny_model

PROMPTS = [[5, 70, 33, 120, 64, 9, 201, 18], [77, 250, 99, 41]]


def processes(group: int) -> list[int]:
    """Every process of process group ``group``: the API server, its engine, its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(entry.name))
    return sorted(found)


def held_by(pid: int) -> dict[str, int]:
    """What one process holds: resident and private memory (bytes), descriptors, threads."""
    proc = Path(f"/proc/{pid}")
    memory = dict.fromkeys(("Rss", "Private_Clean", "Private_Dirty"), 0)
    for line in (proc / "smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in memory:
            memory[name] = int(value.split()[0]) * 1024
    return {
        "rss": memory["Rss"],
        "uss": memory["Private_Clean"] + memory["Private_Dirty"],
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": len(list((proc / "task").iterdir())),
    }


def role_of(pid: int, leader: int) -> str:
    if pid == leader:
        return "api"
    name = Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("VLLM::").lower()  # 15 characters of it
    return "engine" if name.startswith("engine") else name


def tree_bytes(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files below ``folder``."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files), len(files)


def shared_memory(pids: Sequence[int]) -> tuple[int, int]:
    """Bytes and number of the blocks in /dev/shm that ``pids`` have mapped, those without a name any more included."""
    blocks: dict[str, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line:
                begin, _, end = line.split()[0].partition("-")
                blocks.setdefault(line.split(maxsplit=5)[5], int(end, 16) - int(begin, 16))
    return sum(blocks.values()), len(blocks)


def sample(sync: int, leader: int, store: Path) -> dict[str, int]:
    """One row: a flat object of numbers."""
    row = {"sync": sync}
    owners = [("trainer", os.getpid()), *((role_of(pid, leader), pid) for pid in processes(leader))]
    for owner, pid in owners:
        for name, value in held_by(pid).items():
            row[f"{owner}_{name}"] = row.get(f"{owner}_{name}", 0) + value
    row["shm_bytes"], row["shm_files"] = shared_memory([pid for _, pid in owners])
    row["store_bytes"], row["store_files"] = tree_bytes(store)
    return row


def slopes(rows: Sequence[dict[str, int]]) -> dict[str, float]:
    """Growth per sync of every column, fitted over the second half of the run."""
    half = rows[len(rows) // 2 :]
    at = [row["sync"] for row in half]
    return {
        name: round(float(np.polyfit(at, [row.get(name, 0) for row in half], 1)[0]), 3)
        for name in rows[-1]
        if name != "sync"
    }


@contextmanager
def serving(model: Path, work: Path) -> Iterator[Any]:
    """A server on ``model``, up; its store is ``work/store``."""
    (work / "store").mkdir()
    preset = PRESETS["tiny"]
    spec = ServerSpec(model, preset, 16, "cpu", work, work / "store", "gloo")
    with make_server(spec) as process:
        process.wait_ready(420)
        yield process


def soak(
    model: Path,
    url: str,
    leader: int,
    store: Path,
    carrier: str,
    syncs: int,
    every: int,
    take: Callable[[dict[str, Any]], None],
) -> None:
    """``syncs`` syncs against a running server; ``take`` is given rows and slopes after every sample."""
    policy = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"),
    )
    adapter = [parameter for name, parameter in policy.named_parameters() if "lora_" in name]
    generator = torch.Generator().manual_seed(0)

    def draw() -> None:
        with torch.no_grad():
            for parameter in adapter:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    rows: list[dict[str, int]] = []
    milliseconds: list[float] = []
    started = time.perf_counter()
    with SyncManager(
        policy, url, adapter_root=str(store), carrier=carrier, grace_period=0.0, logprob_atol=0.01
    ) as manager:
        draw()
        manager.start()
        for step in range(1, syncs + 1):
            draw()
            record = manager.sync(step)
            assert record is not None
            assert record.proven
            milliseconds.append(record.total_ms)
            answers = manager.generate(PROMPTS, max_tokens=4)
            assert {answer.model for answer in answers} == {record.policy}
            if step % every == 0 or step == syncs:
                gc.collect()
                rows.append(sample(step, leader, store))
                take(summary(carrier, started, milliseconds, rows))
    take({**summary(carrier, started, milliseconds, rows), "after_close": sample(syncs, leader, store)})


def summary(carrier: str, started: float, milliseconds: list[float], rows: list[dict[str, int]]) -> dict[str, Any]:
    return {
        "carrier": carrier,
        "syncs": len(milliseconds),
        "seconds": round(time.perf_counter() - started, 1),
        "sync_ms_median": round(float(np.median(milliseconds)), 2),
        "sync_ms_last_tenth": round(float(np.median(milliseconds[-max(1, len(milliseconds) // 10) :])), 2),
        "growth_per_sync": slopes(rows) if len(rows) > 3 else {},
        "samples": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="syncs between two samples")
    parser.add_argument("--carrier", nargs="+", default=["filesystem", "direct"])
    parser.add_argument("--server", help="URL of a running server, with --leader, --model and --store")
    parser.add_argument("--leader", type=int, help="its process group")
    parser.add_argument("--model", type=Path, help="the model folder that it serves")
    parser.add_argument("--store", type=Path, help="a folder that it may load from")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended as well
    runs: list[dict[str, Any]] = []

    def take(run: dict[str, Any]) -> None:
        """Add a run, or what there is of it up to now, to the report."""
        if runs and runs[-1]["carrier"] == run["carrier"]:
            runs.pop()
        runs.append(run)
        args.out.write_text(json.dumps({"environment": environment().__dict__, "runs": runs}, indent=1) + "\n")

    if args.server:
        store = args.store / "soak"
        store.mkdir(exist_ok=True)
        for carrier in args.carrier:
            soak(args.model, args.server, args.leader, store, carrier, args.syncs, args.every, take)
    else:
        with tempfile.TemporaryDirectory(prefix="loraflow-soak-") as folder:
            model = make_tiny_model(Path(folder) / "model")
            for carrier in args.carrier:
                work = Path(folder) / carrier
                work.mkdir()
                with serving(model, work) as server:
                    soak(model, server.url, server.pid, work / "store", carrier, args.syncs, args.every, take)
    for run in runs:
        growth = {name: value for name, value in run["growth_per_sync"].items() if value}
        print(f"{run['carrier']}: {run['syncs']} syncs, {run['sync_ms_median']} ms; growth per sync: {growth}")


if __name__ == "__main__":
    main()

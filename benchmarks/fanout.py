"""What more servers cost: the wall time of one sync on 1, 2, 4 and 8 of them.

    python benchmarks/fanout.py --out benchmarks/results/fanout.json
    python benchmarks/fanout.py --real --counts 1 2 --out benchmarks/results/fanout-real.json

Eight real servers do not fit on a small machine, and would share its cores: so by default the servers are simulated.
Each is an HTTP server in a process of its own (fanout_endpoint.py) that speaks vLLM's routes and waits `--load-ms` for
a load and `--verify-ms` for a proof, in the place of vLLM's work. All else is real: the manager's fleet, the store and
its files, the HTTP calls, the commit. With ``--real`` they are vLLM servers on the tiny model, which compete for the
cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loraflow import SyncManager
from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.bench.presets import PRESETS
from loraflow.bench.report import environment
from loraflow.bench.servers import ServerSpec, make_server
from loraflow.config import SyncConfig
from loraflow.demo.tiny import make_tiny_model
from loraflow.fleet import Fleet
from loraflow.launch import free_port
from loraflow.plan import Plan
from loraflow.policy import Policy, new_run_id
from loraflow.ranks import Ranks
from loraflow.server import VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.filesystem import FilesystemTransport
from loraflow.verify import Expected, Prover

TOKENS = list(range(5, 53))
LOGPROB = -1.0  # what a simulated server answers for every token
ENDPOINT = Path(__file__).with_name("fanout_endpoint.py")
WARM_UP = 3


@contextmanager
def simulated(count: int, load_ms: float, verify_ms: float) -> Iterator[list[str]]:
    """URLs of ``count`` simulated servers, up."""
    with ExitStack() as stack:
        urls = []
        for _ in range(count):
            port = free_port()
            process = subprocess.Popen([sys.executable, str(ENDPOINT), str(port), str(load_ms), str(verify_ms)])
            stack.callback(process.wait)
            stack.callback(process.kill)
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            with VLLMServer(url) as server:
                deadline = time.monotonic() + 120
                while not server.health() and time.monotonic() < deadline:
                    time.sleep(0.1)
        yield urls


def trainer(model: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))


def draw(policy: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def time_simulated(policy: Any, urls: Sequence[str], root: Path, syncs: int) -> list[dict[str, Any]]:
    """Records of ``syncs`` syncs on the servers ``urls``; each proven by canary on each."""
    config = SyncConfig(adapter_root=str(root), grace_period=0.0, on_server_failure="quarantine")
    servers = [VLLMServer(url) for url in urls]
    for server in servers:
        server.refresh()
    store = AdapterStore(str(root), new_run_id(), retain=3, grace_period=0.0)
    fleet = Fleet(servers, Plan("adapter", "filesystem", ("measured",)), FilesystemTransport(store), store, config)
    prover = Prover(policy, config, Ranks(10, 10))
    prover.tokens = TOKENS
    expected = Expected(torch.full((len(TOKENS) - 1,), LOGPROB))
    spec = AdapterSpec.from_model(policy)
    rows = []
    for version in range(syncs + WARM_UP):
        draw(policy, version)
        snapshot = take_snapshot(policy, spec=spec)
        began = time.perf_counter()
        record, error = fleet.move(Policy(store.run_id, version), snapshot, expected, prover)
        total = (time.perf_counter() - began) * 1e3
        if error is not None or len(record.proofs) != len(urls) or not record.proven:
            raise RuntimeError(f"a sync on {len(urls)} servers was not proven on all: {error or record}")
        rows.append({"total_ms": round(total, 2), **{k: round(v, 2) for k, v in record.phases_ms.items()}})
        fleet.settle()
    fleet.close()
    return rows[WARM_UP:]


def time_real(policy: Any, urls: Sequence[str], root: Path, syncs: int) -> list[dict[str, Any]]:
    """Records of ``syncs`` syncs of a `SyncManager` on real servers; each proven by digest on each."""
    rows = []
    with SyncManager(policy, urls, adapter_root=str(root), carrier="filesystem", grace_period=0.0) as manager:
        draw(policy, 0)
        manager.start()
        for step in range(1, syncs + WARM_UP + 1):
            draw(policy, step)
            record = manager.sync(step)
            if record is None or not record.proven or len(record.proofs) != len(urls):
                raise RuntimeError(f"a sync on {len(urls)} servers was not proven on all: {record}")
            phases = {name: round(ms, 2) for name, ms in record.phases_ms.items()}
            rows.append({"total_ms": round(record.total_ms, 2), **phases})
            time.sleep(0.05)  # the old version is freed behind the sync
    return rows[WARM_UP:]


@contextmanager
def real(count: int, model: Path, work: Path) -> Iterator[list[str]]:
    """URLs of ``count`` vLLM servers on the tiny model, up."""
    (work / "store").mkdir()
    with ExitStack() as stack:
        made = [
            make_server(ServerSpec(model, PRESETS["tiny"], 16, "cpu", work, work / "store", "gloo"))
            for _ in range(count)
        ]
        for process in made:
            stack.enter_context(process)
        for process in made:
            process.wait_ready(600)
        yield [process.url for process in made]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    samples: dict[int, list[dict[str, Any]]] = {count: [] for count in args.counts}
    with tempfile.TemporaryDirectory(prefix="loraflow-fanout-") as folder, ExitStack() as stack:
        work = Path(folder)
        model = make_tiny_model(work / "model")
        policy = trainer(model)
        most = max(args.counts)
        if args.real:
            urls = stack.enter_context(real(most, model, work))
        else:
            urls = stack.enter_context(simulated(most, args.load_ms, args.verify_ms))
        time_all = time_real if args.real else time_simulated
        for _ in range(args.rounds):  # in turn: whatever else the machine does falls on all alike
            for count in args.counts:
                samples[count] += time_all(policy, urls[:count], work / "store", args.syncs)
    medians = {count: float(np.median([row["total_ms"] for row in rows])) for count, rows in samples.items()}
    return {
        "environment": environment().__dict__,
        "servers": "vLLM, tiny model, on the cores of this machine" if args.real else "simulated: an HTTP server each",
        "simulated_load_ms": None if args.real else args.load_ms,
        "simulated_verify_ms": None if args.real else args.verify_ms,
        "syncs_per_count": args.rounds * args.syncs,
        "median_ms": {count: round(ms, 2) for count, ms in medians.items()},
        "ratio_to_one": {count: round(ms / medians[args.counts[0]], 3) for count, ms in medians.items()},
        "samples": samples,
    }


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ratios = report["ratio_to_one"]
    figure, axes = plt.subplots(figsize=(5, 3.2))
    axes.plot(list(ratios), list(ratios.values()), "o-", label="measured")
    axes.plot(list(ratios), list(ratios), "--", color="grey", label="one after another")
    axes.axhline(1.3, color="tab:red", linewidth=0.8, label="limit 1.3")
    axes.set(xlabel="servers", ylabel="wall time / one server's", xscale="log", xticks=list(ratios), ylim=(0, 3))
    axes.set_xticks(list(ratios), [str(count) for count in ratios])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--syncs", type=int, default=10, help="per count and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-ms", type=float, default=100.0)
    parser.add_argument("--verify-ms", type=float, default=30.0)
    parser.add_argument("--real", action="store_true", help="real vLLM servers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = measure(args)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)
    print(json.dumps({name: report[name] for name in ("servers", "median_ms", "ratio_to_one")}))


if __name__ == "__main__":
    main()

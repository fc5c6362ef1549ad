"""Merged sync against the stock way, over the same gloo engine on the same CPU server, in turns, in one run.

- ``loraflow``: `BroadcastTransport.deliver`: merged in scratch, only what the adapter can change, proven by digest.
- ``stock-merged``: ``merge_adapter``, a packed broadcast of every parameter, ``unmerge_adapter``, cache reset, as TRL's
  GRPO does over NCCL. (vLLM has no engine of its own on a CPU, so loraflow's carries it.)

    python benchmarks/merged_vs_stock.py --out merged.json
    python benchmarks/merged_vs_stock.py --server http://127.0.0.1:8000 --model ./tiny --targets q_proj,v_proj

The server must have been started with ``--weight-transfer-config '{"backend": "gloo"}'``; without ``--server`` one is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraflow.adapter import take_snapshot
from loraflow.bench.report import environment
from loraflow.bench.summary import quantile
from loraflow.config import SyncConfig
from loraflow.demo.tiny import make_tiny_model
from loraflow.launch import ServeOptions, ServerProcess, free_port, serve_command
from loraflow.merge import WireTensor
from loraflow.policy import Policy, new_run_id
from loraflow.server import VLLMServer
from loraflow.transports.background import Task, wait_until
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.groups import GlooGroup, address_towards
from loraflow.transports.wire import fill, init_info, plan_buckets, update_info

TIMEOUT = 300.0
STOCK_BUCKET = 1 << 30  # vLLM's default


class Stock:
    """Merge in place, send everything, unmerge in place; the trainer's base is put right outside of the time."""

    def __init__(self, model: Any, server: VLLMServer) -> None:
        self._model, self._server = model, server
        self._pristine = {id(p): p.detach().clone() for p in self._base()}

    def open(self) -> None:
        world = 1 + int(self._server.request("GET", "/get_world_size")["world_size"])
        self._group = GlooGroup(address_towards(self._server.url), 0, world, TIMEOUT)
        body = init_info(
            "gloo", (0, 32), **self._group.handshake(), world_size=world, bucket_bytes=STOCK_BUCKET, timeout=TIMEOUT
        )
        join = Task(self._group.join, name="join")
        self._server.request("POST", "/init_weight_transfer_engine", json={"init_info": body}, timeout=TIMEOUT)
        join.result(TIMEOUT)

    def sync(self) -> tuple[int, dict[str, float]]:
        clock = Clock()
        self._model.merge_adapter()
        clock.lap("merge")
        self._server.request("POST", "/start_weight_update", json={}, timeout=TIMEOUT)
        clock.lap("start")
        weights = dict(self._parameters())
        tensors = [WireTensor(name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items()]
        body = update_info("gloo", (0, 32), tensors, bucket_bytes=STOCK_BUCKET) | self._group.stamp()
        call = Task(
            lambda: self._server.request("POST", "/update_weights", json={"update_info": body}, timeout=TIMEOUT),
            name="u",
        )
        for bucket in plan_buckets(tensors, STOCK_BUCKET):
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            for slot in bucket.slots:
                fill(buffer, slot, weights[slot.tensor.name])
            sent = self._group.send(buffer, bucket)
            if not wait_until(sent.done, time.monotonic() + TIMEOUT):
                raise TimeoutError("a bucket was not taken")
        call.result(TIMEOUT)
        self._group.confirm("received", TIMEOUT)
        clock.lap("update")
        self._server.request("POST", "/finish_weight_update", json={}, timeout=TIMEOUT)
        clock.lap("finish")
        self._model.unmerge_adapter()
        clock.lap("unmerge")
        self._server.reset_prefix_cache()
        clock.lap("cache")
        return sum(t.nbytes for t in tensors), clock.phases_ms

    def restore(self) -> float:
        """Put the trainer's base right; the largest drift that merge and unmerge have left."""
        drift = 0.0
        with torch.no_grad():
            for weight in self._base():
                drift = max(drift, float((weight - self._pristine[id(weight)]).abs().max()))
                weight.copy_(self._pristine[id(weight)])
        return drift

    def close(self) -> None:
        self._server.request("POST", "/shutdown_weight_transfer_engine", timeout=TIMEOUT)
        self._group.close()

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._model.get_base_model().named_parameters():
            if "lora_" not in name:
                yield name.replace(".base_layer", ""), weight.detach()

    def _base(self) -> list[Tensor]:
        return [p for name, p in self._model.get_base_model().named_parameters() if "lora_" not in name]


class Clock:
    def __init__(self) -> None:
        self.phases_ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases_ms[phase] = (now - self._last) * 1e3
        self._last = now


@contextmanager
def served(model: Path, url: str | None, dtype: str, log: Path) -> Iterator[str]:
    if url is not None:
        yield url
        return
    extra = ("--enforce-eager", "--max-model-len", "256", "--dtype", dtype, "--max-num-seqs", "16")
    command = serve_command(ServeOptions(str(model), max_lora_rank=None, port=free_port(), device="cpu", extra=extra))
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    with ServerProcess(command, log=log, env=env) as process:
        process.wait_ready(900)
        yield process.url


def step(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def measure(model: Any, server: VLLMServer, rounds: int, block: int) -> dict[str, list[dict[str, Any]]]:
    samples: dict[str, list[dict[str, Any]]] = {"loraflow": [], "stock-merged": []}
    run = new_run_id()
    config = SyncConfig(carrier="gloo", collective_timeout=TIMEOUT)
    version = 0
    for _ in range(rounds):
        transport = BroadcastTransport(model, config, "gloo")
        transport.open([server])
        for index in range(block + 1):
            step(model, version)
            begin = time.perf_counter()
            snapshot = take_snapshot(model, dtype=torch.float32)
            taken = time.perf_counter()
            delivery = transport.deliver(Policy(run, version), snapshot, [server])
            total = (time.perf_counter() - begin) * 1e3
            (outcome,) = delivery.servers.values()
            if outcome.error is not None:
                raise outcome.error
            phases = {"snapshot": (taken - begin) * 1e3, **delivery.phases_ms, **outcome.phases_ms}
            sample = {"total_ms": total, "bytes": delivery.bytes, "phases_ms": phases, "warm_up": index == 0}
            proof = "none" if outcome.proof is None else outcome.proof.kind
            samples["loraflow"].append(sample | {"proof": proof} | dict(delivery.extra))
            version += 1
        transport.close([server])

        stock = Stock(model, server)
        stock.open()
        for index in range(block + 1):
            step(model, version)
            begin = time.perf_counter()
            size, phases = stock.sync()
            total = (time.perf_counter() - begin) * 1e3
            sample = {"total_ms": total, "bytes": size, "phases_ms": phases, "warm_up": index == 0}
            samples["stock-merged"].append(sample | {"base_drift": stock.restore()})
            version += 1
        stock.close()
        restorer = BroadcastTransport(model, config, "gloo")
        restorer.open([server])
        restorer.restore([server], whole=True)
        restorer.close([server])
    return samples


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    counted = [s for s in samples if not s["warm_up"]]
    totals = sorted(s["total_ms"] for s in counted)
    names = counted[0]["phases_ms"]
    return {
        "syncs": len(counted),
        "bytes": counted[0]["bytes"],
        "p50_ms": quantile(totals, 0.5),
        "p90_ms": quantile(totals, 0.9),
        "phases_p50_ms": {name: quantile(sorted(s["phases_ms"][name] for s in counted), 0.5) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="URL of a running server; one is started where not given")
    parser.add_argument("--model", type=Path, help="model folder of that server; a random model where not given")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="all-linear", help="comma-separated modules, or all-linear")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block", type=int, default=8, help="syncs per round and way, after one warm-up")
    parser.add_argument("--out", type=Path, help="JSON report; stdout where not given")
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as work:
        folder = options.model or make_tiny_model(
            Path(work) / "model",
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            layers=options.layers,
            heads=8,
            kv_heads=4,
            dtype=dtype,
        )
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        targets = options.targets if options.targets == "all-linear" else options.targets.split(",")
        model = get_peft_model(base, LoraConfig(r=options.rank, target_modules=targets))
        with served(folder, options.server, options.dtype, Path(work) / "vllm.log") as url, VLLMServer(url) as server:
            samples = measure(model, server, options.rounds, options.block)
            info = server.info.to_dict()
    ways = {way: summary(found) for way, found in samples.items()}
    report = {
        "environment": asdict(environment()),
        "server": {"vllm": info["vllm"], "tensor_parallel": info["tensor_parallel"], "dtype": info["dtype"]},
        "model": {"parameters": sum(p.numel() for p in base.parameters()), "rank": options.rank, "targets": targets},
        "ways": ways,
        "ratio_p50": ways["stock-merged"]["p50_ms"] / ways["loraflow"]["p50_ms"],
        "ratio_bytes": ways["stock-merged"]["bytes"] / ways["loraflow"]["bytes"],
        "samples": samples,
    }
    text = json.dumps(report, indent=1)
    if options.out is not None:
        options.out.write_text(text)
        text = json.dumps({key: report[key] for key in ("ways", "ratio_p50", "ratio_bytes")}, indent=1)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()

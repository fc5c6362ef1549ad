"""The sections of ``h200.py``: each measures one thing on the servers of a session, and gives a report."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from loraflow.bench.compare import break_evens, comparisons, pauses
from loraflow.bench.links import ALL_WEIGHTS
from loraflow.bench.presets import draw_policy
from loraflow.bench.report import Report
from loraflow.bench.scenarios import Failure, LoraflowWay, Sample, Timed
from loraflow.bench.serving import Serving
from loraflow.bench.session import Session
from loraflow.bench.stock import StockAdapter
from loraflow.bench.summary import Payload
from loraflow.config import SyncConfig
from loraflow.errors import LoraflowError
from loraflow.server import VLLMServer
from loraflow.transports.broadcast import BroadcastTransport

__all__ = ["SECTIONS", "OutOfTime"]


class OutOfTime(BaseException):
    """Not an `Exception`: nothing on the way may take it for the failure of one sync."""


def direct(session: Session, options: argparse.Namespace) -> Report:
    """LoRA slots: direct and filesystem against the stock ways."""
    url = session.server("lora")
    # A broadcast where it can be NCCL's, which takes one rank per GPU.
    group = [] if session.settings.same_gpu else ["direct-group"]
    ways = ["direct", "direct-overlap", *group, "upload", "filesystem", "filesystem-stock", "stock-adapter"]
    ways = [way for way in ways if options.ways is None or way in options.ways]
    samples, failures = session.measure(ways, url)
    return session.report("direct", url, samples, failures=tuple(failures))


def stock(session: Session, _: argparse.Namespace) -> Report:
    """A server without anything of loraflow's: filesystem against the stock ways, the one in place among them."""
    url = session.server("stock")
    samples, failures = session.measure(["filesystem", "stock-adapter", "stock-inplace"], url)
    return session.report("stock", url, samples, failures=tuple(failures))


def fold(session: Session, options: argparse.Namespace) -> Report:
    """Base weights: fold and the merged broadcast against the stock broadcast, on a server without slots."""
    url, backend = session.server("plain"), session.settings.backend
    ways = ["fold", backend] + ([f"stock-merged-{backend}"] if backend != "gloo" else [])
    ways = [way for way in ways if options.ways is None or way in options.ways]
    skipped = {"stock-merged": "vLLM has no weight transfer of its own on a CPU"} if backend == "gloo" else {}
    server = VLLMServer(url)
    before = probe(server, server.info.model)
    samples, failures = session.measure(ways, url)
    after = probe(server, server.info.model)
    checks = {"base restored, log-probs bit-identical": before == after, "largest |Δlogp|": gap(before, after)}
    return session.report("fold", url, samples, failures=tuple(failures), skipped=skipped, checks=checks)


def probe(server: VLLMServer, model: str) -> list[float]:
    """Log-probs of a fixed sequence, never from the prefix cache."""
    tokens = [(7919 * i + 11) % 300 + 3 for i in range(64)]
    return server.prompt_logprobs(tokens, model=model, cache_salt=f"{time.time_ns()}")


def gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def greedy(server: VLLMServer, model: str) -> list[Any]:
    """Completions of fixed prompts, one at a time: how requests fall into batches moves bf16 log-probs."""
    prompts = [[(31 * i + 17 * k) % 300 + 3 for i in range(16)] for k in range(8)]
    fixed: dict[str, Any] = {"model": model, "max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    return [server.generate([prompt], cache_salt=f"{time.time_ns()}", **fixed)[0] for prompt in prompts]


def same(session: Session, _: argparse.Namespace, tensor_parallel: int = 1) -> Report:
    """Tokens and log-probs of each carrier against the stock load of the same weights."""
    url = session.server("lora", tensor_parallel=tensor_parallel)
    server = VLLMServer(url)
    found: dict[str, tuple[list[Any], list[float]]] = {}
    again = "stock-adapter, loaded again"  # what the same load differs from itself by
    for name in ("direct", "filesystem", "stock-adapter", again):
        way = session.way(name.partition(",")[0], url)
        way.open()
        try:
            draw_policy(session.model, 4711)
            way.sync(1)
            model = way.served if isinstance(way, StockAdapter) else way.started.policy_name  # type: ignore[attr-defined]
            found[name] = greedy(server, model), probe(server, model)
        finally:
            way.close()
    wanted, logprobs = found.pop("stock-adapter")
    checks: dict[str, Any] = {}
    for name, (answers, served) in found.items():
        checks[f"{name}: same greedy tokens"] = [a.token_ids for a in answers] == [a.token_ids for a in wanted]
        pairs = zip(answers, wanted, strict=True)
        checks[f"{name}: largest |Δlogp| of generated tokens"] = max(
            gap(list(a.logprobs), list(b.logprobs)) for a, b in pairs
        )
        checks[f"{name}: largest |Δlogp| of a prompt"] = gap(served, logprobs)
    checks["adapter against base, largest |Δlogp|"] = gap(logprobs, probe(server, server.info.model))
    return session.report("same", url, [], checks=checks)


def generation(session: Session, options: argparse.Namespace) -> Report:
    """Tokens per second of every way of serving, in turns; then with a sync each second and without, in turns."""
    serving = Serving(
        session,
        options.window,
        options.streams,
        options.sync_streams,
        options.tokens,
        turns=options.sync_turns,
        settle=options.settle,
    )
    cpu = session.settings.device.type == "cpu"  # one server at a time there
    try:
        for turn in range(1 if cpu else options.generation_rounds):
            for part in (serving.slots, serving.folded)[:: 1 if turn % 2 == 0 else -1]:
                part()
        if options.ways is None or "direct" in options.ways:
            serving.slots_syncing()
        if options.ways is None or "fold" in options.ways:
            serving.turns = options.folded_sync_turns
            serving.folded_syncing()
    except OutOfTime as error:  # what was measured counts
        serving.failures.append(Failure.of("generation", error))
    report = session.report(
        "generation",
        None,
        serving.samples,
        generation=tuple(serving.rates),
        comparisons=comparisons(serving.rates),
        pauses=pauses(serving.rates),
        failures=tuple(serving.failures),
    )
    return replace(report, break_even=break_evens(report.summary, report.generation))


def nccl(session: Session, options: argparse.Namespace) -> Report:
    """The merged broadcast: no-op, perturb, restore; the trainer's weights after many syncs; all weights at once."""
    url = session.server("plain")
    server = VLLMServer(url)
    way = session.way(session.settings.backend, url)
    assert isinstance(way, LoraflowWay)
    base_weights = [p for n, p in session.model.named_parameters() if ".lora_" not in n]
    marks = [checksum(p) for p in base_weights]
    before, tokens_before = probe(server, server.info.model), greedy(server, server.info.model)
    draw_policy(session.model, 1, std=0.0)
    samples: list[Sample] = []
    way.open()
    try:
        no_op = probe(server, server.info.model)
        for step in range(1, options.syncs + 1):
            draw_policy(session.model, step)
            samples.append(Sample(way.name, 0, step == 1, way.sync(step)))
        perturbed = probe(server, server.info.model)
    finally:
        way.close()
    after, tokens_after = probe(server, server.info.model), greedy(server, server.info.model)
    checks = {
        "no-op, largest |Δlogp|": gap(before, no_op),
        "perturbed, largest |Δlogp|": gap(before, perturbed),
        "restored, largest |Δlogp|": gap(before, after),
        "restored, same greedy tokens": [a.token_ids for a in tokens_before] == [a.token_ids for a in tokens_after],
        "syncs": len(samples),
        "trainer's base weights bit-identical": marks == [checksum(p) for p in base_weights],
    }
    draw_policy(session.model, 0)
    samples += whole(session, server, way.name)
    return session.report("nccl", url, samples, checks=checks)


def whole(session: Session, server: VLLMServer, carrier: Any, times: int = 10) -> list[Sample]:
    """All weights, as the stock way sends them, instead of those that the adapter changes."""
    transport = BroadcastTransport(session.model, SyncConfig(carrier=carrier), carrier)
    nbytes = Payload.of(session.settings.preset, session.settings.rank).model_bytes
    transport.open([server])
    found = []
    try:
        for number in range(1 + times):
            began = time.perf_counter()
            transport.restore([server], whole=True)
            ms = (time.perf_counter() - began) * 1e3
            timed = Timed(ms, ms, nbytes, {}, proven=transport.digests(server, whole=True), proof="digest")
            found.append(Sample(carrier + ALL_WEIGHTS, 0, number == 0, timed))
            time.sleep(session.settings.pause)
    finally:
        transport.close([server])
    return found


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Sum of the raw 16- or 32-bit words, weighted by their place."""
    words = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32).long()
    return int((words * (torch.arange(words.numel(), device=words.device) % 65_521 + 1)).sum())


def tp2(session: Session, options: argparse.Namespace) -> Report:
    """TP=2: direct and filesystem into slots, fold into a plain server; tokens against the stock load."""
    samples: list[Sample] = []
    failures: list[Failure] = []
    checks: dict[str, Any] = {}
    slots = [way for way in ("direct", "filesystem", "stock-adapter") if options.ways is None or way in options.ways]
    if slots:
        found, failed = session.measure(slots, session.server("lora", tensor_parallel=2))
        samples, failures = [*found], [*failed]
        checks = dict(same(session, options, 2).checks)
        session.stop_servers()
    url = None
    if options.ways is None or "fold" in options.ways:
        # No broadcast: NCCL takes one rank per GPU, and a trainer beside two workers would need a third.
        url = session.server("plain", tensor_parallel=2)
        found, failed = session.measure(["fold"], url)
        samples, failures = [*samples, *found], [*failures, *failed]
    return session.report("tp2", url, samples, failures=tuple(failures), checks=checks)


def faults(session: Session, _: argparse.Namespace) -> Report:
    """The trainer killed in a broadcast, then the server: how long until it is noticed, and whether it goes on."""
    url, settings = session.server("plain"), session.settings
    carrier = settings.backend
    checks: dict[str, Any] = {}
    script = str(Path(__file__).with_name("h200.py"))
    command = [
        sys.executable, script, "--child-trainer", url, "--device", str(settings.device), "--preset",
        settings.preset.name, "--work", str(settings.work), "--server-gpu", ",".join(map(str, settings.server_gpus)),
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert child.stdout is not None
    for line in child.stdout:
        session.tell(f"child: {line.rstrip()}")
        if line.startswith("syncing"):
            break
    time.sleep(1.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    session.tell("killed the trainer")
    began = time.perf_counter()
    way = LoraflowWay(
        carrier, session.model, url, carrier, session.root, options={"collective_timeout": 60.0, "base_atol": 0.2}
    )
    try:
        way.open()
        checks["trainer killed: a new run was proven after s"] = time.perf_counter() - began
        draw_policy(session.model, 5)
        checks["its next sync was proven"] = way.sync(5).proven
    except LoraflowError as error:
        checks["trainer killed: a new run failed after s"] = time.perf_counter() - began
        checks["trainer killed: error"] = str(error)[:1500]
        with suppress(LoraflowError):
            way.close()
        session.stop_servers()
        url = session.server("plain")
        way = replace(way, url=url, manager=None)
        way.open()
    process = session.process("plain")
    draw_policy(session.model, 6)
    half = way.sync(6).total_ms / 2e3  # in the middle of a sync the weights travel
    killer = threading.Timer(half, lambda: os.killpg(process.pid, signal.SIGKILL))
    began = time.perf_counter()
    killer.start()
    step = 7
    try:
        while time.perf_counter() - began < 120:
            way.sync(step)
            step += 1
        checks["server killed: error"] = "none within 120 s"
    except LoraflowError as error:
        checks["server killed: noticed after s"] = time.perf_counter() - began
        checks["server killed: error"] = str(error)[:1500]
    began = time.perf_counter()
    with suppress(LoraflowError):
        way.close()
    checks["server killed: closed after s"] = time.perf_counter() - began
    return session.report("faults", None, [], checks=checks)


def grpo_steps(session: Session, options: argparse.Namespace) -> Report:
    """A real GRPO run under TRL, its own merged sync beside loraflow's."""
    from grpo_steps import WAYS, grpo

    cpu = session.settings.device.type == "cpu"
    session.release_model()  # TRL loads its own
    checks: dict[str, Any] = {}
    failures = []
    for way, kind in WAYS.items():
        if (cpu and way == "stock-merged") or (options.ways is not None and way not in options.ways):
            continue  # stock goes over NCCL
        try:
            checks[way] = grpo(session, way, session.server(kind), options.grpo_steps, *options.grpo_batch)
            found = checks[way]
            session.tell(f"{way}: {found['s per step, p50']:.3f} s per step, {found['ms per sync, p50']:.1f} ms a sync")
        except (Exception, OutOfTime) as error:  # noqa: BLE001 - told in the report; the next way runs
            failures.append(Failure.of(f"grpo, {way}", error, session.log_tails()))
            session.tell(f"{way} FAILED: {failures[-1].traceback[-1500:]}")
            if isinstance(error, OutOfTime):
                break
    if not cpu and (options.ways is None or "stock-merged" in options.ways):
        session.stop_servers()  # its merge and unmerge have moved the base, which later sections would refuse
    return session.report("grpo", None, [], checks=checks, failures=tuple(failures))


SECTIONS: dict[str, tuple[Callable[[Session, argparse.Namespace], Report], int]] = {
    "direct": (direct, 300),
    "stock": (stock, 240),
    "same": (same, 240),
    "generation": (generation, 900),
    "fold": (fold, 300),
    "fold7b": (fold, 540),
    "nccl": (nccl, 300),
    "tp2": (tp2, 540),
    "faults": (faults, 400),
    "grpo": (grpo_steps, 400),
}
"""What each name runs, and how many seconds it may take on a GPU."""

"""The whole measurement on one GPU host, in sections; one JSON with every sample.

    python benchmarks/h200.py --out results --sections direct,same,fold
    python benchmarks/h200.py --out results --sections generation
    python benchmarks/h200.py --out results --sections fold7b
    python benchmarks/h200.py --out results --device cuda:0 --server-gpu 1 --sections direct,fold,nccl,grpo,tp2,faults
    python benchmarks/h200.py --out results --device cpu --preset tiny --sections direct,same,fold   (a dry run)

One GPU: trainer and servers share it. Two: the trainer is on ``--device``, the servers on ``--server-gpu``. A section
that fails or outruns its time is recorded with its traceback and the servers' logs, and the next one runs. The JSON is
written again after each section.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from loraflow.bench.presets import draw_policy, preset_of
from loraflow.bench.report import Report, environment, show
from loraflow.bench.scenarios import Failure, LoraflowWay, Sample
from loraflow.bench.serving import Serving, break_evens, ratios
from loraflow.bench.session import Session, Settings
from loraflow.bench.stock import StockAdapter
from loraflow.errors import LoraflowError
from loraflow.server import VLLMServer

BEGAN = time.perf_counter()
SECONDS = {
    "direct": 300,
    "stock": 240,
    "same": 240,
    "generation": 540,
    "fold": 300,
    "fold7b": 540,
    "nccl": 300,
    "tp2": 540,
    "faults": 400,
    "grpo": 400,
}


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


class OutOfTime(BaseException):
    """Not an `Exception`: nothing on the way may take it for the failure of one sync."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread after so many seconds."""

    def ring(*_: object) -> None:
        raise OutOfTime(f"not done within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- sections: each gives a report


def direct(session: Session) -> Report:
    """LoRA slots: direct and filesystem against the stock ways."""
    url = session.server("lora")
    ways = ["direct", "direct-overlap", "upload", "filesystem", "filesystem-stock", "stock-adapter"]
    samples, failures = session.measure(ways, url)
    return session.report("direct", url, samples, failures=tuple(failures))


def stock(session: Session) -> Report:
    """A server without anything of loraflow's: filesystem against the stock ways, the one in place among them."""
    url = session.server("stock")
    samples, failures = session.measure(["filesystem", "stock-adapter", "stock-inplace"], url)
    return session.report("stock", url, samples, failures=tuple(failures))


def fold(session: Session) -> Report:
    """Base weights: fold and the merged broadcast against the stock broadcast, on a server without slots."""
    url, backend = session.server("plain"), session.settings.backend
    ways = ["fold", backend] + ([f"stock-merged-{backend}"] if backend != "gloo" else [])
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


def same(session: Session, tensor_parallel: int = 1) -> Report:
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
    """Tokens per second of every way of serving, with a sync each second and without."""
    serving = Serving(session, options.window, options.streams, options.tokens)
    try:
        for _ in range(options.generation_rounds):
            serving.slots()
            serving.merged()
    except OutOfTime as error:  # what was measured counts
        serving.failures.append(Failure.of("generation", error))
    report = session.report(
        "generation",
        None,
        serving.samples,
        generation=tuple(serving.rates),
        failures=tuple(serving.failures),
        checks=ratios(serving.rates),
    )
    return replace(report, break_even=break_evens(report.summary, report.generation))


def nccl(session: Session, syncs: int) -> Report:
    """The merged broadcast: no-op, perturb, restore; the trainer's weights after many syncs."""
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
        for step in range(1, syncs + 1):
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
    return session.report("nccl", url, samples, checks=checks)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Sum of the raw 16- or 32-bit words, weighted by their place."""
    words = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32).long()
    return int((words * (torch.arange(words.numel(), device=words.device) % 65_521 + 1)).sum())


def tp2(session: Session) -> Report:
    """TP=2: direct and filesystem into slots, fold into a plain server; tokens against the stock load."""
    url = session.server("lora", tensor_parallel=2)
    samples, failures = session.measure(["direct", "filesystem", "stock-adapter"], url)
    checks = dict(same(session, 2).checks)
    session.stop_servers()
    plain = session.server("plain", tensor_parallel=2)
    # No broadcast: NCCL takes one rank per GPU, and a trainer beside two workers would need a third.
    more, more_failures = session.measure(["fold"], plain)
    return session.report("tp2", plain, [*samples, *more], failures=(*failures, *more_failures), checks=checks)


def faults(session: Session) -> Report:
    """The trainer killed in a broadcast, then the server: how long until it is noticed, and whether it goes on."""
    url, settings = session.server("plain"), session.settings
    carrier = settings.backend
    checks: dict[str, Any] = {}
    command = [
        sys.executable, __file__, "--child-trainer", url, "--device", str(settings.device), "--preset",
        settings.preset.name, "--work", str(settings.work), "--server-gpu", ",".join(map(str, settings.server_gpus)),
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert child.stdout is not None
    for line in child.stdout:
        say(f"child: {line.rstrip()}")
        if line.startswith("syncing"):
            break
    time.sleep(1.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    say("killed the trainer")
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
        if cpu and way == "stock-merged":
            continue  # over NCCL
        try:
            checks[way] = grpo(session, way, session.server(kind), options.grpo_steps, *options.grpo_batch)
            found = checks[way]
            say(f"{way}: {found['s per step, p50']:.3f} s per step, {found['ms per sync, p50']:.1f} ms a sync")
        except Exception as error:  # noqa: BLE001 - told in the report; the next way runs
            failures.append(Failure.of(f"grpo, {way}", error, session.log_tails()))
            say(f"{way} FAILED: {failures[-1].traceback[-1500:]}")
    return session.report("grpo", None, [], checks=checks, failures=tuple(failures))


def child_trainer(options: argparse.Namespace) -> None:
    """A trainer that syncs merged weights without a pause, until it is killed."""
    with Session(settings_of(options, options.preset), say) as session:
        carrier = session.settings.backend
        way = LoraflowWay(
            carrier, session.model, options.child_trainer, carrier, session.root, options={"base_atol": 0.2}
        )
        way.open()
        print("syncing", flush=True)
        step = 1
        while True:
            way.sync(step)
            step += 1


# ---------------------------------------------------------------- the run


def settings_of(options: argparse.Namespace, preset: str) -> Settings:
    shape = preset_of(preset)
    return Settings(
        preset=shape,
        rank=options.rank or shape.rank,
        device=torch.device(options.device),
        work=options.work,
        server_gpus=tuple(int(gpu) for gpu in options.server_gpu.split(",")),
        rounds=options.rounds,
        block=options.block,
        warmups=options.warmups,
        pause=options.pause,
        utilization=options.utilization,
        eager=options.eager,
        port=options.port,
    )


def run_section(name: str, session: Session, options: argparse.Namespace) -> Report:
    work: dict[str, Callable[[], Report]] = {
        "direct": lambda: direct(session),
        "stock": lambda: stock(session),
        "same": lambda: same(session),
        "generation": lambda: generation(session, options),
        "fold": lambda: fold(session),
        "fold7b": lambda: fold(session),
        "nccl": lambda: nccl(session, options.syncs),
        "tp2": lambda: tp2(session),
        "faults": lambda: faults(session),
        "grpo": lambda: grpo_steps(session, options),
    }
    return work[name]()


def tell(report: Report) -> None:
    try:
        from loraflow.commands.output import Output
    except ImportError as error:  # no typer on a bare host: the JSON has it all
        say(f"no tables: {error}")
        return
    output = Output(as_json=False)
    show(output, report)
    if report.checks:
        output.pairs(f"{report.name}: checks", report.checks)


def write(path: Path, reports: list[Report], failures: list[Failure], options: argparse.Namespace) -> None:
    from dataclasses import asdict

    content = {
        "benchmark": "h200",
        "environment": asdict(environment()),
        "sections": options.sections,
        "reports": [report.to_dict() for report in reports],
        "failures": [asdict(failure) for failure in failures],
        "seconds": time.perf_counter() - BEGAN,
    }
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/h200"))
    parser.add_argument("--sections", default="direct,same,fold", help=", ".join(SECONDS))
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu", help="the trainer's")
    parser.add_argument("--server-gpu", default="0", help="the servers' GPU")
    parser.add_argument("--preset", default="1.5b")
    parser.add_argument("--large", default="7b", help="preset of section fold7b")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=4, help="syncs before them: until memory is taken again")
    parser.add_argument("--syncs", type=int, default=100, help="of section nccl")
    parser.add_argument("--grpo-steps", type=int, default=20)
    parser.add_argument(
        "--grpo-batch",
        type=lambda s: tuple(map(int, s.split(","))),
        default=(32, 128),
        help="completions, tokens of each",
    )
    parser.add_argument("--pause", type=float, default=0.4)
    parser.add_argument("--window", type=float, default=6.0, help="seconds of a generation window")
    parser.add_argument("--streams", type=lambda s: tuple(map(int, s.split(","))), default=(64, 256))
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=(128, 256))
    parser.add_argument("--generation-rounds", type=int, default=2)
    parser.add_argument("--utilization", type=float, default=0.25)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--port", type=int, help="first of the servers' ports")
    parser.add_argument("--work", type=Path, default=Path("/tmp/loraflow-bench"))
    parser.add_argument("--limit", type=float, default=580, help="seconds after which everything ends")
    parser.add_argument("--child-trainer", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("COLUMNS", "150")
    if options.child_trainer:
        child_trainer(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in options.sections.split(",") if name]
    path = options.out / f"h200-{'-'.join(wanted)}.json"
    reports: list[Report] = []
    failures: list[Failure] = []
    ends = BEGAN + options.limit
    session: Session | None = None

    def give_up() -> None:
        say("out of time: everything ends")
        write(path, reports, [*failures, Failure("run", "out of time", "")], options)
        if session is not None:
            session.stop_servers()
        os._exit(124)

    backstop = threading.Timer(options.limit, give_up)
    backstop.daemon = True
    backstop.start()
    try:
        for name in wanted:
            say(f"section {name}")
            preset = options.large if name == "fold7b" else options.preset
            if session is not None and session.settings.preset.name != preset_of(preset).name:
                session.close()
                session = None
            if session is None:
                session = Session(settings_of(options, preset), say)
            if name in {"tp2", "faults"}:
                session.stop_servers()
            try:
                patience = SECONDS[name] * (1 if session.settings.device.type == "cuda" else 3)
                with limited(max(1.0, min(patience, ends - time.perf_counter() - 20))):
                    session.model  # noqa: B018 - made before anything is timed
                    reports.append(run_section(name, session, options))
                tell(reports[-1])
            except (Exception, OutOfTime) as error:  # noqa: BLE001 - told in the report; the next section runs
                if session.partial:
                    reports.append(session.report(f"{name}, unfinished", None, session.partial))
                failures.append(Failure.of(name, error, session.log_tails()))
                say(f"section {name} FAILED: {failures[-1].traceback[-1500:]}")
                session.stop_servers()
            if name == "tp2":
                session.stop_servers()
            write(path, reports, failures, options)
    finally:
        if session is not None:
            session.close()
        write(path, reports, failures, options)
    say(f"written to {path}")
    sys.stdout.flush()
    os._exit(1 if failures or any(report.failures for report in reports) else 0)  # NCCL's threads may not end


if __name__ == "__main__":
    main()

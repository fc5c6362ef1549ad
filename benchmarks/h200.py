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
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from h200_sections import SECTIONS, OutOfTime

from loraflow.bench.presets import preset_of
from loraflow.bench.report import Report, environment, show
from loraflow.bench.scenarios import Failure, LoraflowWay
from loraflow.bench.session import Session, Settings

BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


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
        kv_cache_bytes=int(options.kv_cache_gb * 1e9) or None,
        eager=options.eager,
        port=options.port,
    )


def open_session(options: argparse.Namespace, preset: str) -> Session:
    session = Session(settings_of(options, preset), say)
    if options.servers:
        session.start_servers(options.servers)
    return session


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
    parser.add_argument("--sections", default="direct,same,fold", help=", ".join(SECTIONS))
    parser.add_argument(
        "--ways",
        type=lambda s: s.split(","),
        help="of direct, fold, tp2 and grpo, and in generation with syncs; all where not given",
    )
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
    parser.add_argument("--window", type=float, default=4.0, help="seconds of a generation window")
    parser.add_argument("--settle", type=float, default=1.5, help="seconds before each, that count for nothing")
    parser.add_argument("--sync-turns", type=int, default=10, help="windows of a slot with syncs, and as many without")
    parser.add_argument("--folded-sync-turns", type=int, default=4, help="the same, of folded weights")
    parser.add_argument("--streams", type=lambda s: tuple(map(int, s.split(","))), default=(64, 256))
    parser.add_argument("--sync-streams", type=int, default=64, help="streams in windows with syncs")
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=(128, 256))
    parser.add_argument("--generation-rounds", type=int, default=4, help="turns of base, slot, untouched, folded")
    parser.add_argument("--utilization", type=float, default=0.25)
    parser.add_argument("--kv-cache-gb", type=float, default=0.0, help="of each server; for --servers")
    parser.add_argument(
        "--servers", type=lambda s: s.split(","), default=[], help="start these (lora, plain) at once, beforehand"
    )
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
                session = open_session(options, preset)
            if name in {"tp2", "faults"}:
                session.stop_servers()
            try:
                measured, seconds = SECTIONS[name]
                patience = seconds * (1 if session.settings.device.type == "cuda" else 3)
                with limited(max(1.0, min(patience, ends - time.perf_counter() - 20))):
                    session.model  # noqa: B018 - made before anything is timed
                    reports.append(measured(session, options))
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

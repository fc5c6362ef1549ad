"""The chaos test: random faults on a real run, and after each the question whether anything wrong is served.

    python -m tests.helpers.chaos --seconds 900 --servers 3 --seed 1 --out benchmarks/results/chaos-cpu.json

The truth is what the trainer's process wrote down before it delivered a version: its adapter's weights. Every answer
that the trainer got, and every name that a server lists, is compared with the forward of exactly those weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loraflow.errors import LoraflowError
from loraflow.policy import Policy
from loraflow.server import VLLMServer
from loraflow.store_ledger import Ledger
from tests.helpers.chaos_world import RUN_ID, Node, World, journal
from tests.helpers.fault_proxy import FAULTS
from tests.helpers.tiny import PROMPT, make_tiny_model, peft_logprobs, peft_model

ATOL = 1e-3  # nats, float32 on both sides; another version is off by 0.1 and more
RECOVERY_SECONDS = 400.0  # a machine that does much else starts a trainer in minutes


@dataclass
class Judge:
    """Compares what is served with what the trainer wrote down."""

    world: World
    policy: Any
    answers: int = 0
    names: int = 0
    unanswered: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unpublished: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    committed: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    _read: int = 0
    _loaded: tuple[str, int] = ("", 0)

    def expected(self, name: str, tokens: list[int]) -> torch.Tensor | None:
        """The trainer's forward of version ``name``; None where it never made one."""
        path = self.world.work / "truth" / f"{name}.pt"
        if not path.exists():
            return None
        stamp = (name, path.stat().st_mtime_ns)
        if stamp != self._loaded:
            values = torch.load(path)
            with torch.no_grad():
                for key, parameter in self.policy.named_parameters():
                    if key in values:
                        parameter.copy_(values[key])
            self._loaded = stamp
        return peft_logprobs(self.policy, tokens)

    def compare(self, name: str, tokens: list[int], logprobs: list[float], where: str) -> None:
        expected = self.expected(name, tokens)
        if expected is None:
            self.wrong.append(f"{where}: {name} was never made")
            return
        gap = float((torch.tensor(logprobs) - expected[-len(logprobs) :]).abs().max())
        if not gap <= ATOL:
            self.wrong.append(f"{where}: {name} is off by {gap:.3g}")

    def read_journal(self) -> None:
        """Take in what the trainer said since the last call."""
        lines, self._read = journal(self.world.work / "journal.jsonl", self._read)
        for line in lines:
            event = line["event"]
            self.events[event] += 1
            self.last[event] = line
            if event == "sync" and line["outcome"] == "committed":
                self.events["committed"] += 1
                self.last["committed"] = line
                if self.committed and Policy.parse(line["policy"]) <= Policy.parse(self.committed[-1]):
                    self.wrong.append(f"{line['policy']} was committed after {self.committed[-1]}")
                self.committed.append(line["policy"])
            if line.get("error"):
                self.errors[re.split(r"[(:]", line["error"])[0]] += 1
            if event == "recovered":
                self._recovered(line)
            for name, prompt, tokens, logprobs in line.get("answers", ()):
                self.answers += 1
                self.compare(name, prompt + tokens, logprobs, "an answer to the trainer")

    def _recovered(self, line: dict[str, Any]) -> None:
        self.lost += line["lost"]
        if not self.committed:
            return
        found, known = Policy.parse(line["committed"]), [Policy.parse(name) for name in self.committed[-2:]]
        if found is not None and found >= known[-1]:
            return
        what = f"{known[-1]} was committed, a new process found {found}"
        # The direct carrier publishes behind the delivery: a trainer killed in between has its checkpoint of the newest
        # version, and the store the one before.
        behind = line["before"] == "direct" and (len(known) < 2 or (found is not None and found >= known[0]))
        (self.unpublished if behind else self.lost).append(what)

    def ask(self, node: Node) -> None:
        """Ask a server itself for every version of the run that it lists."""
        with VLLMServer(node.process.url, request_timeout=30.0) as server:
            try:
                listed = [model for model in server.models() if model.parent and Policy.parse(model.id)]
            except LoraflowError:
                self.unanswered += 1
                return
            for model in listed:
                if not Path(model.root, "adapter_model.safetensors").exists():
                    continue  # being removed: a request for it would find nothing
                try:
                    logprobs = server.prompt_logprobs(PROMPT, model=model.id)
                except LoraflowError:
                    self.unanswered += 1  # retired meanwhile, or the server is busy: no answer is no wrong answer
                    continue
                self.names += 1
                self.compare(model.id, PROMPT, logprobs, node.process.url)

    def check_ledger(self) -> None:
        """What was committed must stay committed."""
        wanted, deadline = Policy.parse(self.committed[-1]), time.monotonic() + 10.0
        while True:  # the direct carrier's files follow its delivery
            ledger = Ledger.parse((self.world.run_folder / "ledger.json").read_bytes())
            newest = Policy(RUN_ID, ledger.committed_versions[-1])
            if newest >= wanted:
                return
            if time.monotonic() > deadline:
                self.lost.append(f"{wanted} was committed, the ledger ends with {newest}")
                return
            time.sleep(0.1)


@dataclass
class Chaos:
    """Injects faults, one at a time, and waits after each until the run is whole again."""

    world: World
    judge: Judge
    chance: random.Random
    faults: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self, seconds: float, at_least: int) -> None:
        """Every kind of fault in a random order, again and again until the time is over."""
        self.world.start_trainer()
        self._recover("start", time.monotonic())
        end = time.monotonic() + seconds
        kinds: list[Callable[[], str]] = []
        for_ever = self.kinds()
        # A server takes a minute to start: the first to fall comes back beside the other faults.
        self._inject(self.server_killed)
        while time.monotonic() < end or len(self.faults) <= at_least:  # the start is one of them
            if not kinds:
                kinds = self.chance.sample(for_ever, len(for_ever))
            kind = kinds.pop()
            if kind != self.server_killed or (self._all_up() and end - time.monotonic() > 90):
                self._inject(kind)
        self._recover("end", time.monotonic(), all_up=True)

    def kinds(self) -> list[Callable[[], str]]:
        found = [
            self.server_killed,
            self.server_stopped,
            self.trainer_killed,
            self.trainer_killed,
            self.trainer_stopped,
            self.link_spoiled,
            self.link_spoiled,
            self.link_spoiled,
            self.store_hidden,
            self.files_damaged,
            self.clock_jumped,
            self.policy_unloaded,
        ]
        return [*found, self.disk_filled] if self.world.small_disk else found

    # ---------------------------------------------------------------- the faults

    def server_killed(self) -> str:
        node = self._node()
        self.world.kill_server(node)
        return self._name(node)

    def server_stopped(self) -> str:
        node = self._node()
        self.world.signal_server(node, signal.SIGSTOP)
        time.sleep(self.chance.choice([self.chance.uniform(0.5, 3.0), self.chance.uniform(11.0, 13.0)]))
        self.world.signal_server(node, signal.SIGCONT)
        return self._name(node)

    def trainer_killed(self) -> str:
        time.sleep(self.chance.uniform(0.0, 0.5))
        self.world.kill_trainer()
        self.judge.read_journal()
        self.world.start_trainer()
        return f"life {self.world.lives}"

    def trainer_stopped(self) -> str:
        assert self.world.trainer is not None
        self.world.trainer.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.5, 3.0))
        self.world.trainer.send_signal(signal.SIGCONT)
        return ""

    def link_spoiled(self) -> str:
        node = self._node()
        node.proxy.fault = self.chance.choice(FAULTS)
        what = f"{self._name(node)} {node.proxy.fault}"
        time.sleep(self.chance.choice([self.chance.uniform(0.5, 3.0), self.chance.uniform(11.0, 13.0)]))
        node.proxy.fault = "none"
        return what

    def store_hidden(self) -> str:
        self.world.hide_store()
        time.sleep(self.chance.uniform(0.3, 2.0))
        self.world.show_store()
        return ""

    def disk_filled(self) -> str:
        filler = self.world.fill_disk()
        time.sleep(self.chance.uniform(1.0, 3.0))
        filler.unlink()
        return ""

    def files_damaged(self) -> str:
        """Damage the version in force, and leave what a writer killed half-way leaves."""
        half = self.world.run_folder / f".staging-{self.chance.randrange(1 << 32):08x}"
        half.mkdir()
        (half / "adapter_model.safetensors").write_bytes(os.urandom(1000))
        folder = self.world.committed_folder()
        if folder is None:
            return "leftovers"
        how = self.chance.choice(["flip", "cut", "replace", "remove", "manifest"])
        name = "manifest.json" if how == "manifest" else "adapter_model.safetensors"
        target = folder / name
        try:
            content = bytearray(target.read_bytes())
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            if how == "cut":
                os.truncate(target, len(content) // 2)
            elif how == "remove":
                target.unlink()
            elif how == "replace":
                (folder / "draft").write_bytes(content)
                (folder / "draft").rename(target)
            else:
                with target.open("r+b") as file:
                    file.write(content)
        except FileNotFoundError:
            return "leftovers"  # the version was collected meanwhile
        return how

    def clock_jumped(self) -> str:
        offset = self.chance.choice([-1, 1]) * self.chance.uniform(10, 1e6)
        (self.world.work / "clock").write_text(str(offset))
        time.sleep(1.0)
        return f"{offset:+.0f} s"

    def policy_unloaded(self) -> str:
        """Somebody takes the version in force from a server."""
        node = self._node()
        self.judge.read_journal()
        with VLLMServer(node.process.url, request_timeout=10.0) as server:
            try:
                server.unload_adapter(self.judge.committed[-1])
            except LoraflowError as error:
                return f"{self._name(node)} refused: {error.message}"
        return self._name(node)

    # ---------------------------------------------------------------- and after each

    def _inject(self, kind: Callable[[], str]) -> None:
        began = time.monotonic()
        what = kind()
        self._recover(kind.__name__, began, what)

    def _recover(self, kind: str, began: float, what: str = "", *, all_up: bool = False) -> None:
        """Wait until the trainer commits on every server that is up, then ask them all."""
        healed = time.monotonic()
        deadline = healed + RECOVERY_SECONDS + (300.0 if all_up else 0.0)
        while not (self._whole(healed) and (not all_up or self._all_up())):
            assert self.world.trainer is not None
            assert self.world.trainer.poll() is None, f"the trainer ended after {kind} {what}: see trainer.log"
            assert time.monotonic() < deadline, f"not whole again after {kind} {what}: {self.judge.last}"
            time.sleep(0.2)
            self.judge.read_journal()
        for node in self.world.nodes:
            if not node.down:
                self.judge.ask(node)
        self.judge.check_ledger()
        now = time.monotonic()
        entry = {
            "kind": kind,
            "what": what,
            "at_s": round(began - self.began, 1),
            "whole_again_s": round(now - healed, 1),
        }
        self.faults.append(entry)
        print(entry, f"answers {self.judge.answers}, wrong {len(self.judge.wrong)}", flush=True)

    def _whole(self, since: float) -> bool:
        line = self.judge.last.get("committed")
        down = {node.proxy.url for node in self.world.nodes if node.down}
        fresh = self.judge.last.get("answers", {"at": 0.0})["at"] > since
        return line is not None and line["at"] > since and fresh and set(line["aside"]) <= down

    def _all_up(self) -> bool:
        return not any(node.down for node in self.world.nodes)

    def _node(self) -> Node:
        return self.chance.choice([node for node in self.world.nodes if not node.down])

    def _name(self, node: Node) -> str:
        return f"server {self.world.nodes.index(node)}"


def run_chaos(
    model: Path, work: Path, *, seconds: float, servers: int, seed: int, carriers: tuple[str, ...], at_least: int = 0
) -> dict[str, Any]:
    """The whole test; its report. Raises `AssertionError` where the run does not become whole again."""
    torch.set_num_threads(1)
    with World(model, work, servers, carriers, seed) as world:
        judge = Judge(world, peft_model(model))
        chaos = Chaos(world, judge, random.Random(seed))
        chaos.run(seconds, at_least)
        code = world.end_trainer(60)
        judge.read_journal()
        injected = [fault for fault in chaos.faults if fault["kind"] not in {"start", "end"}]
        return {
            "seed": seed,
            "servers": servers,
            "carriers": list(carriers),
            "seconds": round(time.monotonic() - chaos.began, 1),
            "faults_injected": len(injected),
            "faults_survived": len(injected),  # each was recovered from, or `run` has raised
            "by_kind": dict(Counter(fault["kind"] for fault in injected)),
            "whole_again_s_max": max((fault["whole_again_s"] for fault in injected), default=0.0),
            "wrong_answers": len(judge.wrong),
            "versions_lost": len(judge.lost),
            "unpublished_when_killed": len(judge.unpublished),
            "answers_checked": judge.answers,
            "names_asked": judge.names,
            "names_unanswered": judge.unanswered,
            "syncs_committed": judge.events["committed"],
            "syncs_not_committed": judge.events["sync"] - judge.events["committed"] + judge.events["sync raised"],
            "rollouts_refused": judge.events["no rollout"],
            "trainer_lives": world.lives,
            "trainer_exit_code": code,
            "threads_left": judge.last["ended"]["threads"],
            "server_starts": sum(node.starts for node in world.nodes),
            "small_disk": world.small_disk,
            "details": {
                "wrong": judge.wrong[:20],
                "lost": judge.lost[:20],
                "errors": dict(judge.errors),
            },
            "faults": chaos.faults,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--carriers", nargs="+", default=["filesystem", "direct"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help="keep logs and journal there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loraflow-chaos-") as folder:
        work = args.work or Path(folder) / "work"
        work.mkdir(parents=True)
        model = make_tiny_model(Path(folder) / "model")
        report = run_chaos(
            model, work, seconds=args.seconds, servers=args.servers, seed=args.seed, carriers=tuple(args.carriers)
        )
    print(json.dumps({name: value for name, value in report.items() if name != "faults"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

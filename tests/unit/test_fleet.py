"""A fleet under every kind of failure, over servers of which only faults are played: what counts is who gets requests.

The servers are a few lines that remember what they were told; what a real vLLM does is tested in ``tests/server``.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow import connect as connect_module
from loraflow import fleet as fleet_module
from loraflow import fleet_proof as fleet_proof_module
from loraflow import roster as roster_module
from loraflow.config import SyncConfig
from loraflow.errors import (
    AdapterError,
    CapabilityError,
    CommitError,
    ConfigError,
    LoadError,
    LoraflowError,
    PublishError,
    SyncTimeout,
    VerifyError,
)
from loraflow.fleet import Fleet
from loraflow.manager import SyncManager
from loraflow.plan import Plan
from loraflow.policy import Policy
from loraflow.records import Proof, SyncRecord
from loraflow.server import Completion, Unreachable, VLLMServer
from loraflow.server_info import PluginInfo, ServedModel, ServerInfo, parse_version
from loraflow.store import AdapterStore, Recovered
from loraflow.transports.base import Delivered, Delivery
from loraflow.transports.filesystem import FilesystemTransport


@dataclass
class Server:
    """One server: what it holds by name, and which fault it shows."""

    url: str
    held: dict[str, object] = field(default_factory=dict)
    down: bool = False
    refuses: bool = False
    garbles: bool = False
    base: str = "base"
    asked: list[str] = field(default_factory=list)
    info: ServerInfo = field(init=False)

    def __post_init__(self) -> None:
        self.info = ServerInfo(self.url, "0.32.0", "base", "/m", dtype="float32")

    def health(self) -> bool:
        return not self.down

    def ailment(self) -> str | None:
        return None if self.health() else "connection refused"

    def refresh(self) -> ServerInfo:
        return self.info

    def models(self) -> list[ServedModel]:
        return [ServedModel("base", "/m", None), *(ServedModel(name, f"/{name}", "base") for name in self.held)]

    def unload_adapter(self, name: str) -> bool:
        return self.held.pop(name, None) is not None

    def restart(self) -> None:
        self.held.clear()
        self.down = self.refuses = self.garbles = False

    def load(self, name: str, content: object) -> None:
        if self.down:
            raise Unreachable("connection refused", server=self.url)
        if self.refuses:
            raise LoadError("no memory", server=self.url)
        assert name not in self.held, "a name means one content for ever"
        self.held[name] = "garbled" if self.garbles else content

    def generate(self, prompts: Sequence[Any], *, model: str, n: int, **sampling: Any) -> list[Completion]:
        if self.down:
            raise Unreachable("connection reset", server=self.url)
        self.asked.append(model)
        return [Completion(model, i, (p[0],), (0.0,), "stop") for i, p in enumerate(prompts) for _ in range(n)]

    def close(self) -> None:
        pass


class Carrier:
    kind = "adapter"
    name = "filesystem"

    def announce(self, policy: Policy, servers: Sequence[Server], check: Any) -> bool:
        return False

    def deliver(self, policy: Policy, snapshot: Any, servers: Sequence[Server]) -> Delivery:
        outcomes = {}
        for server in servers:
            try:
                server.load(policy.name, snapshot.content)
                outcomes[server.url] = Delivered(policy.name, {"load": 1.0})
            except LoraflowError as error:
                outcomes[server.url] = Delivered(policy.name, error=error)
        return Delivery(policy, 1, "d", {"publish": 1.0}, outcomes)

    def withdraw(self, policy: Policy, servers: Sequence[Server]) -> dict[str, Exception]:
        for server in servers:
            server.held.pop(policy.name, None)
        return {}

    retire = withdraw

    def holds(self, policy: Policy, server: Server) -> bool:
        if server.down:
            raise Unreachable("connection refused", server=server.url)
        return policy.name in server.held

    def digests(self, server: Server) -> bool:
        return False

    def attach(self, policy: Policy, snapshot: Any, server: Server) -> Delivered:
        for name in set(server.held) - {policy.name}:
            del server.held[name]
        if policy.name not in server.held:
            server.load(policy.name, snapshot.content)
        return Delivered(policy.name)

    def close(self, servers: Sequence[Server]) -> None:
        for server in servers:
            server.held.clear()


class Store:
    run_id = "run"
    committed: list[Policy]

    def __init__(self) -> None:
        self.committed = []

        self.reserved: list[Policy] = []

    def mark_committed(self, policy: Policy) -> None:
        self.committed.append(policy)

    def reserve(self, policy: Policy) -> None:
        assert policy not in self.reserved
        self.reserved.append(policy)

    def close(self) -> None:
        pass


class Prover:
    def check(self, server: Server, model: str, expected: object) -> Proof:
        if server.down:
            raise Unreachable("connection refused", server=server.url)
        found = server.base if model == "base" else server.held.get(model)
        expected = expected() if callable(expected) else expected  # waits, once the server has answered
        return Proof("canary", passed=found == expected, detail=f"{found} instead of {expected}")

    def moves(self, server: Server, model: str, base: object) -> Proof:
        return Proof("canary", passed=not self.check(server, model, base).passed)


@dataclass(frozen=True)
class Snapshot:
    content: str
    step: int = 0
    flat: torch.Tensor = field(default_factory=lambda: torch.ones(3))

    @property
    def finite(self) -> bool:
        return bool(self.flat.isfinite().all())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"B": self.flat}


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for action in self.later:
            action(self.now)

    def __init__(self) -> None:
        self.later: list[Any] = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(fleet_module, "time", made)
    monkeypatch.setattr(roster_module, "time", made)
    return made


PROVER: Any = Prover()


class Run:
    """A fleet, and the trainer's side of the truth: which content every version has."""

    def __init__(self, count: int, policy: str, **options: Any) -> None:
        self.servers = [Server(f"http://s{i}") for i in range(count)]
        config = SyncConfig(on_server_failure=policy, **options)
        given: Any = self.servers
        carrier: Any = Carrier()
        store: Any = Store()
        self.store = store
        self.fleet = Fleet(given, Plan("adapter", "filesystem", ("tested",)), carrier, store, config)
        base: Any = "base"
        self.fleet.know_base(base)
        self.truth: dict[str, str] = {}
        self.version = -1

    def move(self, *, values: float = 1.0, **options: Any) -> Exception | None:
        self.version += 1
        policy = Policy("run", self.version)
        self.truth[policy.name] = f"content-{self.version}"
        snapshot: Any = Snapshot(self.truth[policy.name], flat=torch.tensor([values, values]))
        expected: Any = snapshot.content
        _, error = self.fleet.move(policy, snapshot, expected, PROVER, **options)
        return error

    def record(self) -> SyncRecord:
        """Move, and what the record says."""
        self.version += 1
        policy = Policy("run", self.version)
        self.truth[policy.name] = f"content-{self.version}"
        snapshot: Any = Snapshot(self.truth[policy.name])
        expected: Any = snapshot.content
        record, _ = self.fleet.move(policy, snapshot, expected, PROVER)
        return record

    def check(self) -> None:
        """Whoever gets requests has the committed version, with the trainer's content."""
        assert self.fleet.policy is not None
        for server in self.fleet.servers:
            name = self.fleet.model_names[server.url]
            assert name == self.fleet.policy.name
            assert server.held[name] == self.truth[name]  # type: ignore[attr-defined]

    @property
    def active(self) -> list[int]:
        return [self.servers.index(server) for server in self.fleet.servers]  # type: ignore[arg-type]


@pytest.mark.parametrize("called", [True, False])
def test_what_was_announced_and_does_not_come_is_taken_back(called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot fails, say; where nobody was called, nobody is told either."""
    run = Run(2, "fail")
    withdrawn: list[Policy] = []
    carrier: Any = run.fleet.transport
    monkeypatch.setattr(carrier, "announce", lambda policy, servers, check: called)
    monkeypatch.setattr(carrier, "withdraw", lambda policy, servers: withdrawn.append(policy) or {})
    policy = Policy("run", 7)
    with pytest.raises(ZeroDivisionError), run.fleet.announced(policy, PROVER, lambda: None):
        _ = 1 / 0
    assert withdrawn == ([policy] if called else [])
    with run.fleet.announced(policy, PROVER, lambda: None):
        pass
    assert len(withdrawn) == called


def test_nobody_is_called_ahead_while_a_server_is_set_aside(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Those that come back in the same move would be called by nobody."""
    run = Run(2, "quarantine")
    carrier: Any = run.fleet.transport
    calls: list[Policy] = []
    monkeypatch.setattr(carrier, "announce", lambda policy, servers, check: calls.append(policy) or True)
    policy = Policy("run", 0)
    with run.fleet.announced(policy, PROVER, lambda: None):
        pass
    run.fleet._roster.set_aside("http://s1", "it failed")
    with run.fleet.announced(policy, PROVER, lambda: None):
        pass
    assert calls == [policy]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_policy_that_is_not_finite_reaches_no_server(value: float) -> None:
    """A digest proves that it arrived, not that it makes sense (rule 3)."""
    run = Run(2, "quarantine")
    assert run.move() is None
    error = run.move(values=value)
    assert isinstance(error, AdapterError)
    assert [(problem.code, problem.tensor) for problem in error.problems] == [("not_finite", "B")]
    assert run.active == [0, 1]
    run.check()
    assert all(list(server.held) == ["run-v0"] for server in run.servers)
    assert run.move(values=3e38) is None  # finite, though their sum is not
    run.check()


@pytest.mark.parametrize("fault", ["down", "refuses", "garbles"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fail_leaves_everybody_on_the_last_version(count: int, fault: str) -> None:
    run = Run(count, "fail")
    assert run.move() is None
    setattr(run.servers[-1], fault, True)
    assert isinstance(run.move(), LoraflowError)
    assert run.fleet.policy == Policy("run", 0)
    assert run.active == list(range(count))
    run.check()
    for server in run.servers:
        assert "run-v1" not in server.held
    assert run.store.committed == [Policy("run", 0)]
    setattr(run.servers[-1], fault, False)
    assert run.move() is None
    assert run.fleet.policy == Policy("run", 2)
    run.check()


@pytest.mark.parametrize("fault", ["down", "refuses", "garbles"])
def test_quarantine_moves_on_without_the_one_that_fails_and_takes_it_back(fault: str, clock: Clock) -> None:
    run = Run(3, "quarantine")
    run.move()
    setattr(run.servers[1], fault, True)
    assert run.move() is None
    assert run.active == [0, 2]
    assert "http://s1" in run.fleet.aside
    run.check()
    assert run.move() is None
    assert run.active == [0, 2]
    run.servers[1].restart()
    clock.now += 100
    run.fleet.ensure(PROVER)
    assert run.active == [0, 1, 2]
    run.check()
    assert set(run.servers[1].held) == {"run-v2"}


def test_a_garbled_version_is_not_trusted_after_its_server_returns(clock: Clock) -> None:
    run = Run(2, "quarantine")
    run.move()
    run.servers[1].garbles = True
    run.move()
    run.servers[1].garbles = False  # but what it holds under that name is still wrong
    clock.now += 100
    run.fleet.ensure(PROVER)
    assert run.active == [0]
    assert "garbled" in run.fleet.aside["http://s1"]
    run.move()  # a new name
    clock.now += 1000
    run.fleet.ensure(PROVER)
    assert run.active == [0, 1]
    run.check()


def test_when_all_fail_the_version_is_at_fault() -> None:
    run = Run(3, "quarantine")
    run.move()
    for server in run.servers:
        server.refuses = True
    assert isinstance(run.move(), CommitError)
    assert run.active == [0, 1, 2]
    assert run.fleet.policy == Policy("run", 0)
    run.check()


def test_a_set_aside_server_is_not_asked_all_the_time(clock: Clock) -> None:
    run = Run(2, "quarantine")
    run.move()
    run.servers[1].down = True
    run.move()
    tries = []
    run.servers[1].health = lambda: bool(tries.append(clock.now))  # type: ignore[method-assign]
    for _ in range(600):
        clock.now += 1.0
        run.fleet.ensure(PROVER)
    assert 10 <= len(tries) <= 20
    assert max(b - a for a, b in itertools.pairwise(tries)) <= 61


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_restarted_server_is_brought_back_before_the_next_request(count: int, policy: str, clock: Clock) -> None:
    run = Run(count, policy)
    run.move()
    run.move()
    run.servers[0].restart()
    run.fleet.ensure(PROVER)
    assert run.active == list(range(count))
    assert run.servers[0].held == {"run-v1": "content-1"}
    run.check()
    assert clock.now == 0.0  # without waiting


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_the_only_server_is_waited_for(policy: str, clock: Clock) -> None:
    run = Run(1, policy, start_timeout=60.0)
    run.move()
    run.servers[0].down = True
    clock.later.append(lambda now: run.servers[0].restart() if 30 <= now < 31 else None)
    run.fleet.ensure(PROVER)
    assert 30 <= clock.now < 32
    run.check()


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_waiting_ends(policy: str, clock: Clock) -> None:
    run = Run(1, policy, start_timeout=60.0)
    run.move()
    run.servers[0].down = True
    with pytest.raises(LoraflowError, match="does not answer"):
        run.fleet.ensure(PROVER)
    assert 60 <= clock.now < 62


def test_fail_waits_for_all_and_quarantine_for_one(clock: Clock) -> None:
    run = Run(2, "quarantine", start_timeout=60.0)
    run.move()
    run.servers[1].down = True
    run.fleet.ensure(PROVER)
    assert (run.active, clock.now) == ([0], 0.0)
    strict = Run(2, "fail", start_timeout=60.0)
    strict.move()
    strict.servers[1].down = True
    with pytest.raises(LoraflowError, match="does not answer"):
        strict.fleet.ensure(PROVER)


def test_another_model_on_the_same_port_is_not_taken_back(clock: Clock) -> None:
    run = Run(2, "quarantine")
    run.move()
    run.servers[1].restart()
    run.servers[1].info = ServerInfo("http://s1", "0.32.0", "base", "/m", dtype="bfloat16")
    run.fleet.ensure(PROVER)
    assert run.active == [0]
    assert "dtype" in run.fleet.aside["http://s1"]


def test_another_checkpoint_on_the_same_port_is_not_taken_back(clock: Clock) -> None:
    """It says the same of itself, and its base computes something else."""
    run = Run(2, "quarantine")
    run.move()
    run.servers[1].restart()
    run.servers[1].base = "another checkpoint"
    run.fleet.ensure(PROVER)
    assert run.active == [0]
    assert "its base" in run.fleet.aside["http://s1"]
    assert run.servers[1].held == {}


def test_a_server_joins_in_the_middle() -> None:
    run = Run(1, "fail")
    run.move()
    late: Any = Server("http://late", held={"other-run": "x"})
    run.servers.append(late)
    run.fleet.join(late, PROVER)
    assert run.active == [0, 1]
    run.check()
    with pytest.raises(CommitError, match="already"):
        run.fleet.join(late, PROVER)
    bad: Any = Server("http://bad", garbles=True)
    with pytest.raises(VerifyError):
        run.fleet.join(bad, PROVER)
    unfit: Any = Server("http://unfit")
    unfit.info = ServerInfo("http://unfit", "0.32.0", "base", "/m", dtype="float16")
    with pytest.raises(CapabilityError, match="dtype"):
        run.fleet.join(unfit, PROVER)
    assert run.active == [0, 1]
    assert run.move() is None
    run.check()


@pytest.mark.parametrize("down", [(), (0,), (2,), (0, 1)])
def test_requests_are_answered_by_proven_servers(down: tuple[int, ...]) -> None:
    run = Run(3, "quarantine")
    run.move()
    for index in down:
        run.servers[index].down = True
    answers = run.fleet.generate([[i] for i in range(10)], n=2)
    assert [(a.prompt, a.token_ids, a.model) for a in answers] == [
        (i, (i,), "run-v0") for i in range(10) for _ in range(2)
    ]
    assert run.active == [i for i in range(3) if i not in down]


def test_with_fail_a_request_that_fails_is_raised() -> None:
    run = Run(2, "fail")
    run.move()
    run.servers[1].down = True
    with pytest.raises(Unreachable):
        run.fleet.generate([[0], [1]])
    assert run.active == [0, 1]


def test_a_delivery_that_runs_behind_does_not_hold_up_requests() -> None:
    run = Run(1, "fail")
    run.move()
    inside, go_on = threading.Event(), threading.Event()
    deliver = Carrier.deliver

    class Slow(Carrier):
        def deliver(self, *args: Any) -> Delivery:
            inside.set()
            assert go_on.wait(10)
            return deliver(self, *args)

    slow: Any = Slow()
    run.fleet.transport = slow
    thread = threading.Thread(target=run.move)
    thread.start()
    assert inside.wait(10)
    run.fleet.ensure(PROVER)  # returns
    assert run.fleet.generate([[3]])[0].model == "run-v0"
    go_on.set()
    thread.join()
    assert run.fleet.generate([[3]])[0].model == "run-v1"


def test_random_faults_never_let_a_wrong_server_answer(clock: Clock) -> None:

    for seed in range(40):
        chance = random.Random(seed)
        run = Run(3, "quarantine", start_timeout=5.0)
        run.move()
        for _ in range(60):
            server = chance.choice(run.servers)
            fault = chance.choice(["down", "refuses", "garbles", "restart", "none", "none"])
            if fault == "restart":
                server.restart()
            elif fault != "none":
                setattr(server, fault, True)
            clock.now += chance.uniform(0, 20)
            if chance.random() < 0.5:
                run.move()
            try:
                run.fleet.ensure(PROVER)
            except LoraflowError:
                for each in run.servers:
                    each.restart()
                run.fleet.ensure(PROVER)
            run.check()
            assert run.active


def test_names_of_merged_versions_are_used_up_in_the_store() -> None:
    run = Run(1, "fail")
    run.fleet.plan = Plan("merged", "gloo", ("tested",))
    run.move()
    run.servers[0].refuses = True
    assert run.move() is not None
    assert run.store.reserved == [Policy("run", 0), Policy("run", 1)]
    assert run.store.committed == []


def test_versions_of_an_earlier_process_are_freed_in_their_turn() -> None:
    run = Run(1, "fail", max_staleness=0)  # two versions are kept
    old = [Policy("run", version) for version in range(4)]
    run.servers[0].held = {policy.name: "old" for policy in old}
    run.fleet.adopt(Recovered(committed=old[2], live=tuple(old), burnt=(old[1], old[3]), lost=(), removed=()))
    assert set(run.servers[0].held) == {"run-v0", "run-v2"}
    run.version = 3
    run.move()
    run.fleet.settle()
    assert set(run.servers[0].held) == {"run-v2", "run-v4"}
    run.move()
    run.fleet.settle()
    assert set(run.servers[0].held) == {"run-v4", "run-v5"}


@pytest.mark.parametrize("moved", [False, True])
def test_a_start_that_fails_leaves_what_an_earlier_process_left(moved: bool) -> None:
    """`loraflow push --run-id` that is refused: every server serves what it served before."""
    run = Run(2, "fail")
    old = Policy("run", 0)
    for server in run.servers:
        server.held = {old.name: "old"}
    run.fleet.adopt(Recovered(committed=old, live=(old,), burnt=(), lost=(), removed=()))
    manager: Any = SyncManager(torch.nn.Linear(1, 1), "http://s0", run_id="run")
    manager._fleet = run.fleet
    if moved:  # committed, and what followed in the start failed
        run.version = 0
        assert run.move() is None
    manager._close_after_error(started=False)
    assert [set(server.held) for server in run.servers] == [{old.name}] * 2


def test_a_start_that_fails_leaves_nothing_of_its_own() -> None:
    run = Run(1, "fail")
    run.fleet.adopt(Recovered(committed=None, live=(), burnt=(), lost=(), removed=()))
    manager: Any = SyncManager(torch.nn.Linear(1, 1), "http://s0")
    manager._fleet = run.fleet
    run.move()
    manager._close_after_error(started=False)
    assert run.servers[0].held == {}


def test_close_reaches_those_set_aside_that_answer() -> None:
    run = Run(3, "quarantine")
    run.move()
    run.servers[1].refuses = run.servers[2].refuses = True
    run.move()
    run.servers[2].down = True
    run.fleet.close()
    assert [bool(server.held) for server in run.servers] == [False, False, True]


@pytest.mark.parametrize(
    ("answer", "cleared"),
    [
        (None, True),
        (Unreachable("connection refused"), True),  # its process is gone
        (SyncTimeout("no answer in 30 s"), False),
        (LoadError("the engine is busy"), False),
    ],
)
def test_files_stay_where_a_server_may_still_read_them(
    answer: LoraflowError | None, cleared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rule 7, at the end of a run too: a server that does not say that it let a version go may still load it."""
    run = Run(2, "fail")
    files: Any = FilesystemTransport(AdapterStore(str(tmp_path), "run", retain=2, grace_period=0.0))
    store = run.fleet.store = files._store
    run.fleet.transport = files
    for server in run.servers:
        server.held = {"run-v0": "content"}
    store.publish(Policy("run", 0), {"file": [b"content"]}, digest="d")

    def failing(*args: object) -> Any:
        raise answer or AssertionError

    if answer is not None:
        monkeypatch.setattr(run.servers[1], "unload_adapter" if type(answer) is LoadError else "models", failing)
    with suppress(LoraflowError):
        run.fleet.close()
    assert Path(store.path(Policy("run", 0))).exists() is not cleared


def test_records_say_who_was_set_aside_and_who_came_back(clock: Clock) -> None:
    run = Run(3, "quarantine")
    assert run.record().to_dict()["aside"] == {}
    run.servers[1].down = True
    record = run.record()
    assert (list(record.aside), list(record.joined)) == (["http://s1"], [])
    assert "connection refused" in record.aside["http://s1"]
    assert record.metrics()["loraflow/servers_aside"] == 1.0
    run.servers[1].restart()
    clock.now += 100
    record = run.record()
    assert (list(record.aside), list(record.joined)) == ([], ["http://s1"])
    run.servers[0].restart()
    run.fleet.ensure(PROVER)
    late: Any = Server("http://late")
    run.fleet.join(late, PROVER)
    record = run.record()
    assert list(record.joined) == ["http://s0", "http://late"]
    assert run.record().to_dict()["joined"] == []


def test_a_failed_sync_says_it_too() -> None:
    run = Run(2, "quarantine")
    run.move()
    run.servers[1].down = True
    run.move()
    run.servers[0].refuses = True
    record = run.record()
    assert record.outcome == "failed"
    assert list(record.aside) == ["http://s1"]


def test_a_version_that_could_not_be_freed_is_freed_later() -> None:
    run = Run(1, "fail", max_staleness=0)  # two versions are kept
    run.move()
    run.move()
    real = run.fleet.transport.retire

    def failing(*args: Any) -> None:
        raise PublishError("the store is away")

    run.fleet.transport.retire = failing  # type: ignore[method-assign]
    run.move()
    run.fleet.settle()
    assert set(run.servers[0].held) == {"run-v0", "run-v1", "run-v2"}
    run.fleet.transport.retire = real  # type: ignore[method-assign]
    run.move()
    run.fleet.settle()
    assert set(run.servers[0].held) == {"run-v2", "run-v3"}


def test_names_that_a_killed_trainer_left_are_unloaded_and_those_of_other_runs_are_not() -> None:
    run = Run(2, "fail")
    for server in run.servers:
        server.held = {"run-v3": "committed", "run-v4": "loaded, and its trainer killed", "other-v9": "another run's"}
    run.fleet.adopt(Recovered(Policy("run", 3), (Policy("run", 3),), (), (), ()))
    assert [set(server.held) for server in run.servers] == [{"run-v3", "other-v9"}] * 2


def test_a_load_that_ends_after_it_was_given_up_is_unloaded_with_the_next_versions() -> None:
    run = Run(1, "fail")
    run.move()
    run.servers[0].refuses = True
    assert run.move() is not None
    run.servers[0].refuses = False
    run.servers[0].held["run-v1"] = "late"  # nobody waits for it any more
    assert run.move() is None
    run.fleet.settle()
    assert set(run.servers[0].held) == {"run-v0", "run-v2"}


def test_a_server_that_is_missing_at_the_start_is_taken_in_when_it_comes(clock: Clock) -> None:
    up: Any = Server("http://up")
    late: Any = Server("http://late", down=True)
    run = Run(1, "quarantine")
    run.servers = [up, late]
    fleet = Fleet([up], run.fleet.plan, run.fleet.transport, run.fleet.store, run.fleet.config, [late])
    base: Any = "base"
    fleet.know_base(base)
    run.fleet = fleet
    assert "at the start" in fleet.aside["http://late"]
    assert run.move() is None
    assert run.active == [0]
    late.restart()
    clock.now += 100
    record = run.record()
    assert list(record.joined) == ["http://late"]
    assert run.active == [0, 1]
    run.check()


def test_waiting_at_the_start_ends_with_one_where_one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_module.time, "sleep", lambda seconds: None)
    up: Any = Server("http://up")
    down: Any = Server("http://down", down=True)
    assert connect_module.wait_for([up, down], 0.01, all_of_them=False) == [down]
    assert connect_module.wait_for([up], 0.01, all_of_them=False) == []
    for servers, enough in [([up, down], True), ([down], False)]:
        with pytest.raises(SyncTimeout, match=r"http://down: no answer in .* \(connection refused\)"):
            connect_module.wait_for(servers, 0.01, all_of_them=enough)


def test_a_server_that_says_nothing_of_itself_is_left_for_later_where_one_is_enough() -> None:
    def silent(url: str) -> Any:
        server: Any = Server(url)

        def refresh() -> None:
            raise SyncTimeout("GET /version gave no answer", server=url)

        server.refresh = refresh
        return server

    up: Any = Server("http://up")
    slow = silent("http://slow")
    quarantine, fail = SyncConfig(on_server_failure="quarantine"), SyncConfig()
    assert connect_module._silent([up, slow], quarantine) == [slow]
    assert connect_module._silent([up], quarantine) == []
    for servers, config in [([up, slow], fail), ([slow, silent("http://slower")], quarantine)]:
        with pytest.raises(SyncTimeout):
            connect_module._silent(servers, config)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_server_that_cannot_be_proven_by_digest_any_more_gets_no_requests(
    restarted: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The run proves its versions by digest, so no forward is made: one without digests would be taken in unproven."""
    without: list[str] = []
    monkeypatch.setattr(Carrier, "digests", lambda _, server: server.url not in without)
    monkeypatch.setattr(fleet_proof_module, "prove_digest", lambda *_: Proof("digest", passed=True))
    run = Run(2, "quarantine")
    snapshot: Any = Snapshot("content")
    record, error = run.fleet.move(Policy("run", 0), snapshot, None, PROVER)
    assert (error, record.proven) == (None, True)
    late: Any = Server("http://late")
    server = run.servers[1] if restarted else late
    server.restart()
    server.garbles = True
    without.append(server.url)
    if restarted:
        run.fleet.ensure(PROVER)
        assert "digest" in run.fleet.aside[server.url]
    else:
        with pytest.raises(CapabilityError, match="digest"):
            run.fleet.join(late, PROVER)
    assert run.active == ([0] if restarted else [0, 1])


@pytest.mark.parametrize("carrier", ["auto", "gloo"])
def test_where_a_digest_is_asked_for_a_canary_does_not_take_its_place(
    carrier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose merged weights lie where no worker can tell: only the carrier finds out, when it is opened."""
    opened: list[Any] = []

    class Ways:
        """gloo, whose `open` cannot agree on places, before fold, which can."""

        def __init__(self, name: str) -> None:
            self.name, self.servers = name, []  # type: ignore[var-annotated]
            opened.append(self)

        def open(self, servers: Sequence[Any]) -> None:
            self.servers = list(servers)

        def close(self, servers: Sequence[Any]) -> None:
            self.servers = [server for server in self.servers if server not in servers]

        def digests(self, server: Any) -> bool:
            return self.name == "fold"

    def planned(*args: Any, refused: dict[str, str], **options: Any) -> Plan:
        return Plan("merged", "fold" if refused else "gloo", ("tested",))

    monkeypatch.setattr(connect_module, "make_plan", planned)
    monkeypatch.setattr(connect_module, "trainer_info", lambda *_: None)
    monkeypatch.setattr(connect_module, "restore_base", lambda *_: [])
    monkeypatch.setattr(connect_module, "open_transport", lambda plan, *_: Ways(plan.carrier))
    servers: Any = [Server("http://a")]
    nothing: Any = None

    def open_best(verify: Any) -> Any:
        config = SyncConfig(verify=verify, carrier=carrier)
        return connect_module._open_best(nothing, nothing, servers, nothing, config)[1]

    assert open_best("auto").name == "gloo"
    if carrier == "auto":
        assert open_best("digest").name == "fold"
    else:
        with pytest.raises(CapabilityError, match="verify='digest' is asked for"):
            open_best("digest")
    assert opened[1].servers == []  # the group is left


def test_one_server_by_two_names_is_refused() -> None:
    plugin = PluginInfo("0.1", True, frozenset(), (), {})
    servers: Any = [Server("http://localhost:8000"), Server("http://127.0.0.1:8000"), Server("http://other:8000")]
    for server, instance in zip(servers, ("a1", "a1", "b2"), strict=True):
        server.info = replace(server.info, plugin=plugin, instance=instance)
    connect_module._require_apart([servers[0], servers[2]])
    with pytest.raises(ConfigError, match=r"localhost:8000 and http://127.0.0.1:8000 are one server"):
        connect_module._require_apart(servers)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32.0+cpu", (0, 32, 0)), ("0.28rc1", (0, 28)), ("0.27.1.dev5", (0, 27, 1)), ("²", ()), ("", ()), ("x.1", ())],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(text) == numbers


def test_a_start_that_fails_leaves_no_thread_and_no_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = []

    class Client(VLLMServer):
        def health(self) -> bool:
            return True

        def refresh(self) -> ServerInfo:
            self._info = ServerInfo(self.url, "0.32.0", "base", "/m", dtype="float32")
            return self._info

        def close(self) -> None:
            closed.append(self.url)
            super().close()

    def failing(*args: Any) -> None:
        raise CapabilityError("no way")

    monkeypatch.setattr(connect_module, "_open_best", failing)
    config = SyncConfig(adapter_root=str(tmp_path), run_id="run")
    for _ in range(2):  # the second finds no lock
        with pytest.raises(CapabilityError, match="no way"):
            connect_module.connect(None, None, [Client("http://a"), Client("http://b")], config)  # type: ignore[arg-type]
    assert sorted(closed) == ["http://a", "http://a", "http://b", "http://b"]

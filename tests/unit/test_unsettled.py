"""A version that fails and cannot be taken back: a server of which it is not known what it serves answers nobody.

Merged weights have one name for every version, so that it is the weights of each server that count here. The servers
are those of `test_fleet`, with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.errors import CommitError, LoadError, LoraflowError, UnsettledError
from loraflow.manager import SyncManager
from loraflow.plan import Plan
from loraflow.policy import Policy
from loraflow.records import Proof, SyncRecord
from loraflow.server import Completion, Unreachable, VLLMServer
from loraflow.transports.base import Delivered, Delivery
from tests.unit.test_fleet import Clock, Run, Server, Snapshot, clock

__all__ = ["clock"]


@dataclass
class Merged(Server):
    """A server whose base weights are what is served.

    Attributes:
        weights: Their content.
        stuck: They stay as a failed version has left them, whatever is asked.
    """

    weights: str = "base"
    stuck: bool = False

    def restart(self) -> None:
        super().restart()
        self.weights, self.stuck = "base", False

    def write(self, content: str) -> None:
        if self.down:
            raise Unreachable("connection refused", server=self.url)
        if self.stuck:
            raise LoadError("undo_failed: restart the server", server=self.url)
        self.weights = content

    def generate(self, prompts: Sequence[Any], *, model: str, n: int, **sampling: Any) -> list[Completion]:
        if self.down:
            raise Unreachable("connection reset", server=self.url)
        self.asked.append(self.weights)
        return [Completion(model, i, (p[0],), (0.0,), "stop") for i, p in enumerate(prompts) for _ in range(n)]


class Carrier:
    """Weights by name of version; what it says of a server is what the server says of itself, which may be wrong."""

    kind = "merged"
    name = "fold"

    def __init__(self) -> None:
        self.before: dict[str, str] = {}
        self.says: dict[str, str] = {}
        self.broken: Exception | None = None

    def deliver(self, policy: Policy, snapshot: Any, servers: Sequence[Merged]) -> Delivery:
        outcomes = {}
        for server in servers:
            self.before[server.url] = server.weights
            try:
                server.write("half of it" if server.refuses else snapshot.content)
                if server.refuses:
                    raise LoadError("one rank of two failed", server=server.url)
                self.says[server.url] = policy.name
                outcomes[server.url] = Delivered("base", proof=Proof("digest", passed=True))
            except LoraflowError as error:
                outcomes[server.url] = Delivered("base", error=error)
            server.stuck = server.stuck or server.garbles
        return Delivery(policy, 1, "d", {}, outcomes)

    def withdraw(self, policy: Policy, servers: Sequence[Merged]) -> dict[str, Exception]:
        if self.broken is not None:
            raise self.broken
        left: dict[str, Exception] = {}
        for server in servers:
            try:
                server.write(self.before[server.url])
            except LoraflowError as error:
                left[server.url] = error
        return left

    def holds(self, policy: Policy, server: Merged) -> bool:
        if server.down:
            raise Unreachable("connection refused", server=server.url)
        return server.weights != "base"  # anything looks like a version

    def digests(self, server: Merged) -> bool:
        return True

    def attach(self, policy: Policy, snapshot: Any, server: Merged) -> Delivered:
        server.write(snapshot.content)
        return Delivered("base", proof=Proof("digest", passed=server.weights == snapshot.content))

    def close(self, servers: Sequence[Merged]) -> None:
        pass

    def retire(self, *args: Any) -> None:
        pass


class Prover:
    """Log-probs of a base name are those of the weights."""

    def check(self, server: Merged, model: str, expected: object) -> Proof:
        return Proof("canary", passed=server.weights == expected, detail=f"{server.weights} instead of {expected}")

    def moves(self, server: Merged, model: str, base: object) -> Proof:
        return Proof("canary", passed=server.weights != base)


class MergedRun(Run):
    def __init__(self, count: int, policy: str, **options: Any) -> None:
        super().__init__(count, policy, **options)
        given: Any = [Merged(f"http://s{i}") for i in range(count)]
        self.servers = given
        self.carrier: Any = Carrier()
        kind = type(self.fleet)
        plan, config = Plan("merged", "fold", ("tested",)), self.fleet.config
        self.fleet = kind(given, plan, self.carrier, self.fleet.store, config)
        self.prover: Any = Prover()

    def move(self, *, proven: bool = False) -> Exception | None:
        self.version += 1
        policy = Policy("run", self.version)
        self.truth[policy.name] = f"content-{self.version}"
        snapshot: Any = Snapshot(self.truth[policy.name])
        expected: Any = snapshot.content if proven else None
        record, error = self.fleet.move(policy, snapshot, expected, self.prover)
        assert (record.error is None) == (error is None)
        return error

    def check(self) -> None:
        """What answers is the committed version, wherever the answers come from."""
        for server in self.servers:
            server.asked.clear()
        self.fleet.generate([[i] for i in range(6)])
        assert self.fleet.policy is not None
        assert {w for server in self.servers for w in server.asked} == {self.truth[self.fleet.policy.name]}


@pytest.fixture(params=["refuses", "stuck"])
def how(request: pytest.FixtureRequest) -> str:
    """One rank of two fails; or all go well there, and the version is refused elsewhere."""
    return str(request.param)


def spoil(run: MergedRun, index: int, how: str) -> Any:
    server: Any = run.servers[index]
    server.garbles = True  # once a version has come, nothing changes its weights any more
    if how == "refuses":
        server.refuses = True
    else:
        other: Any = run.servers[1 - index]
        other.refuses = True
    return server


def test_others_answer_and_it_returns_once_it_is_proven(clock: Clock) -> None:
    run = MergedRun(3, "quarantine")
    assert run.move() is None
    server = spoil(run, 0, "refuses")
    run.servers[1].refuses = run.servers[2].refuses = True  # all fail: the version is at fault, and nobody is set aside
    error = run.move()
    assert isinstance(error, CommitError)
    assert not isinstance(error, UnsettledError)
    assert server.weights == "half of it"
    assert run.active == [1, 2]
    assert "not known what it serves" in run.fleet.aside["http://s0"]
    run.check()
    run.servers[1].refuses = run.servers[2].refuses = False
    for _ in range(3):
        clock.now += 100
        run.fleet.ensure(run.prover)
        assert run.active == [1, 2]  # it is tried, and cannot be brought there
        assert run.move() is None
        run.check()
    server.restart()
    clock.now += 100
    run.fleet.ensure(run.prover)
    assert run.active == [0, 1, 2]
    run.check()


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_the_only_server_stops_the_run(policy: str, clock: Clock) -> None:
    run = MergedRun(1, policy, start_timeout=30.0)
    assert run.move() is None
    server = spoil(run, 0, "refuses")
    error = run.move()
    assert isinstance(error, UnsettledError)
    assert "one rank of two failed" in str(error)
    assert "undo_failed" in str(error)
    with pytest.raises(UnsettledError, match="http://s0 is set aside"):
        run.fleet.generate([[1]])
    assert isinstance(run.move(), UnsettledError)
    with pytest.raises(LoraflowError, match="undo_failed"):
        run.fleet.ensure(run.prover)
    assert 30 <= clock.now < 32
    assert server.asked == []
    server.restart()
    run.fleet.ensure(run.prover)
    run.check()


def test_with_fail_one_of_several_stops_the_run(how: str, clock: Clock) -> None:
    run = MergedRun(2, "fail", start_timeout=30.0)
    assert run.move() is None
    spoil(run, 0, how)
    assert isinstance(run.move(), UnsettledError)
    assert run.active == [1]
    run.check()  # nobody is answered wrongly by who goes on
    for server in run.servers:
        server.refuses = False
    assert isinstance(run.move(), UnsettledError)  # all servers, or none
    assert run.fleet.policy == Policy("run", 0)
    with pytest.raises(LoraflowError, match="undo_failed"):
        run.fleet.ensure(run.prover)
    run.servers[0].restart()
    assert run.move() is None
    assert run.active == [0, 1]
    run.check()


def test_one_that_answers_nobody_is_waited_for_as_ever(clock: Clock) -> None:
    run = MergedRun(1, "fail", start_timeout=60.0)
    assert run.move() is None
    run.servers[0].down = True
    error = run.move()
    assert isinstance(error, Unreachable)  # `keep_last` counts it, and goes on
    clock.later.append(lambda now: run.servers[0].restart() if 30 <= now < 31 else None)
    run.fleet.ensure(run.prover)
    assert 30 <= clock.now < 32
    run.check()


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_a_failure_on_this_side_leaves_nobody_trusted(policy: str, clock: Clock) -> None:
    run = MergedRun(2, policy, start_timeout=5.0)
    assert run.move() is None
    run.servers[0].refuses = True
    if policy == "quarantine":
        run.servers[1].refuses = True
    run.carrier.broken = RuntimeError("CUDA out of memory")
    error = run.move()
    assert isinstance(error, UnsettledError)
    assert "CUDA out of memory" in str(error)
    assert run.active == []
    with pytest.raises(UnsettledError):
        run.fleet.generate([[1]])
    for server in run.servers:
        server.refuses = False
    run.fleet.ensure(run.prover)  # sent anew, and proven
    assert run.active == [0, 1]
    run.check()


def test_an_interrupt_on_the_way_back_leaves_nobody_trusted(clock: Clock) -> None:
    run = MergedRun(1, "fail")
    assert run.move() is None
    run.servers[0].refuses = True
    broken: Any = KeyboardInterrupt()
    run.carrier.broken = broken
    with pytest.raises(KeyboardInterrupt):
        run.move()
    with pytest.raises(LoraflowError, match="broken off"):
        run.fleet.generate([[1]])
    run.servers[0].refuses = False
    run.fleet.ensure(run.prover)
    run.check()


def test_who_says_that_it_went_back_is_asked_for_the_proof_there_is(clock: Clock) -> None:
    """Without a digest log-probs prove the version before, on each server, also on the way back."""
    run = MergedRun(2, "quarantine")
    assert run.move(proven=True) is None
    liar: Any = run.servers[0]
    run.servers[0].refuses = run.servers[1].refuses = True
    run.carrier.before = {}
    withdraw = run.carrier.withdraw
    run.carrier.withdraw = lambda policy, servers: withdraw(policy, servers[1:])
    assert isinstance(run.move(), CommitError)
    assert liar.weights == "half of it"
    assert run.active == [1]
    run.check()


def test_a_canary_that_stays_ends_the_start() -> None:
    run = MergedRun(1, "fail")
    assert run.move() is None
    server: Any = run.servers[0]
    server.garbles = True
    canary: Any = Snapshot("canary")
    base: Any = "base"
    with pytest.raises(UnsettledError, match="undo_failed"):
        run.fleet.try_out(Policy("run", 7), canary, base, None, run.prover)
    with pytest.raises(UnsettledError):
        run.fleet.generate([[1]])


def test_one_that_was_brought_half_way_gets_no_requests(clock: Clock) -> None:
    run = MergedRun(2, "fail", start_timeout=5.0)
    assert run.move() is None
    run.servers[0].restart()
    run.servers[0].stuck = True  # type: ignore[attr-defined]
    with pytest.raises(LoraflowError, match="undo_failed"):
        run.fleet.ensure(run.prover)
    assert run.active == [1]
    run.check()


def test_a_server_of_vllm_is_closed_with_the_others() -> None:
    """The client of a server that is set aside is closed as well."""
    closed = []

    class Client(VLLMServer):
        def close(self) -> None:
            closed.append(self.url)

        def health(self) -> bool:
            return False

    run = MergedRun(1, "quarantine")
    assert run.move() is None
    client = Client("http://client")
    run.fleet._roster.known[client.url] = client
    run.fleet._roster.set_aside(client.url, "gone")
    run.fleet.close()
    assert closed == ["http://client"]


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_a_server_that_shows_something_else_is_asked_for_the_version_in_force_too(policy: str, clock: Clock) -> None:
    """Not the new version is wrong there, but all of it: somebody merged into the base below it."""
    run = Run(2, policy)
    assert run.move() is None
    victim, load = run.servers[0], run.servers[0].load

    def spoilt(name: str, content: object) -> None:
        load(name, content)
        victim.held = dict.fromkeys(victim.held, "on another base")

    victim.load = spoilt  # type: ignore[method-assign]
    if policy == "quarantine":
        run.servers[1].refuses = True  # all fail: the version would be at fault
    error = run.move()
    assert isinstance(error, LoraflowError)
    assert isinstance(error, UnsettledError) == (policy == "fail")
    assert run.active == [1]
    assert "on another base" in run.fleet.aside["http://s0"]
    assert {answer.model for answer in run.fleet.generate([[1], [2]])} == {"run-v0"}
    assert victim.asked == []
    run.check()


def test_keep_last_keeps_nothing_that_is_in_doubt() -> None:
    manager = SyncManager(torch.nn.Linear(1, 1), "http://s0", on_failure="keep_last", max_staleness=5)
    manager.policy, manager._attempted = Policy("run", 0), 1
    manager._agreed = SimpleNamespace(run_id="run")  # type: ignore[assignment]
    record = SyncRecord(1, "run-v1", 1, "merged", "fold", "failed")
    assert manager._conclude(record, LoadError("refused")).staleness == 1
    with pytest.raises(UnsettledError, match="half of it"):
        manager._conclude(record, UnsettledError("half of it is served"))
    assert manager.counters["failures"] == 2


def test_an_error_is_not_hidden_by_what_closing_meets(caplog: pytest.LogCaptureFixture) -> None:
    manager = SyncManager(torch.nn.Linear(1, 1), "http://s0")

    class Gone:
        def close(self, *, keep_serving: bool) -> None:
            raise Unreachable("connection refused")

    manager._fleet = Gone()  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError), manager:
        raise ZeroDivisionError
    assert "connection refused" in caplog.text
    manager._fleet = Gone()  # type: ignore[assignment]
    with pytest.raises(Unreachable), manager:
        pass

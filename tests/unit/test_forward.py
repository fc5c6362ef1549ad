"""The trainer's forward beside a delivery: both at once, exact, and an end of either that ends both."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.config import SyncConfig
from loraflow.errors import CommitError, LoraflowError, VerifyError
from loraflow.forward import Forward, deliver_with, forward_for
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from loraflow.records import Proof, SyncRecord
from tests.helpers.tiny import peft_model
from tests.unit.test_fleet import PROVER, Prover, Run, Server, Snapshot

LIMIT = 20.0  # seconds; only a test that fails waits for so long


class Sync(Run):
    """A fleet of two, and syncs whose forward is made beside the delivery."""

    def __init__(self, policy: str = "fail", **options: Any) -> None:
        super().__init__(2, policy, **options)
        self.on_host: list[threading.Thread] = []

    def begin(self, work: Callable[[Snapshot], Any], prover: Any = PROVER) -> tuple[SyncRecord, Exception | None]:
        self.version += 1
        policy = Policy("run", self.version)
        snapshot: Any = Snapshot(f"content-{self.version}")
        object.__setattr__(snapshot, "host", lambda: self.on_host.append(threading.current_thread()))
        forward = Forward(lambda: work(snapshot))
        return deliver_with(forward, snapshot, lambda: self.fleet.move(policy, snapshot, forward, prover))

    def held(self) -> list[list[str]]:
        return [list(server.held) for server in self.servers]


def content(snapshot: Snapshot) -> str:
    return snapshot.content


def test_forward_and_load_run_at_the_same_time_the_forward_in_the_thread_that_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, loading, computing, asked = Sync(), threading.Event(), threading.Event(), threading.Event()
    where: list[threading.Thread] = []
    load, result = run.servers[0].load, Forward.result
    monkeypatch.setattr(Forward, "result", lambda forward: (asked.set(), result(forward))[1])

    def slow_load(name: str, what: object) -> None:
        where.append(threading.current_thread())
        loading.set()
        assert computing.wait(LIMIT), "the forward waits for the load"
        load(name, what)

    def work(snapshot: Snapshot) -> str:
        assert loading.wait(LIMIT), "the load waits for the forward"
        where.append(threading.current_thread())
        computing.set()
        assert asked.wait(LIMIT), "the forward is asked for before it is made"
        time.sleep(0.05)
        return snapshot.content

    run.servers[0].load = slow_load  # type: ignore[method-assign]
    record, error = run.begin(work)
    assert error is None
    assert record.outcome == "committed"
    assert record.proven
    assert where[1] is run.on_host[0] is threading.main_thread()
    assert where[0] is not threading.main_thread()
    assert record.phases_ms["forward"] >= 50
    assert record.phases_ms["forward_wait"] >= 50
    assert run.fleet._roster.held is not None
    assert run.fleet._roster.held.expected == "content-0"  # kept for servers that return
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loraflow-delivery")]


def test_the_servers_are_asked_before_the_forward_is_waited_for() -> None:
    run, asked = Sync(), threading.Barrier(3, timeout=LIMIT)

    class Asking(Prover):
        def check(self, server: Server, model: str, expected: object) -> Proof:
            asked.wait()  # every server answers first
            return super().check(server, model, expected)

    def work(snapshot: Snapshot) -> str:
        asked.wait()
        time.sleep(0.05)
        return snapshot.content

    record, error = run.begin(work, Asking())
    assert error is None
    assert record.proven
    assert record.phases_ms["forward_wait"] >= 50


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_a_forward_that_fails_sets_no_server_aside(policy: str) -> None:
    run = Sync(policy)
    run.begin(content)

    def diverged(_: Snapshot) -> str:
        raise VerifyError("log-probs that are not finite")

    assert isinstance(run.begin(diverged)[1], VerifyError)
    assert run.fleet.aside == {}
    assert run.held() == [["run-v0"], ["run-v0"]]


def test_a_version_that_is_not_the_forwards_is_withdrawn() -> None:
    run = Sync()
    assert run.begin(content)[1] is None
    record, error = run.begin(lambda _: "something else")
    assert isinstance(error, LoraflowError)
    assert "something else" in str(error)
    assert record.outcome == "failed"
    assert run.held() == [["run-v0"], ["run-v0"]]
    assert run.fleet.policy == Policy("run", 0)


def test_a_forward_that_fails_takes_the_loaded_version_back() -> None:
    run = Sync()
    run.begin(content)

    def diverged(_: Snapshot) -> str:
        deadline = time.monotonic() + LIMIT
        while not all("run-v1" in server.held for server in run.servers) and time.monotonic() < deadline:
            time.sleep(0.001)
        raise VerifyError("log-probs that are not finite")

    record, error = run.begin(diverged)
    assert isinstance(error, VerifyError)
    assert record.outcome == "failed"
    assert "not finite" in (record.error or "")
    assert run.held() == [["run-v0"], ["run-v0"]]
    assert run.store.committed == [Policy("run", 0)]
    assert run.begin(content)[1] is None  # and it goes on
    assert run.fleet.policy == Policy("run", 2)


def test_the_forwards_error_comes_before_the_deliverys() -> None:
    run = Sync()
    run.servers[1].refuses = True

    def out_of_memory(_: Snapshot) -> str:
        raise torch.OutOfMemoryError("2 GiB")

    assert isinstance(run.begin(content)[1], CommitError)
    record, error = run.begin(out_of_memory)
    assert isinstance(error, torch.OutOfMemoryError)
    assert record.outcome == "failed"
    assert run.held() == [[], []]


def test_an_interrupt_of_the_forward_takes_the_version_back_and_travels_on() -> None:
    run = Sync()

    def interrupted(_: Snapshot) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.begin(interrupted)
    assert run.held() == [[], []]
    assert run.store.committed == []


def test_an_interrupt_while_the_proof_is_waited_for_commits_nothing() -> None:
    run = Sync()
    run.begin(content)

    class Slow:
        def check(self, server: Any, *_: Any) -> Proof:
            main = threading.main_thread().ident
            assert main is not None
            if server is run.servers[0]:
                signal.pthread_kill(main, signal.SIGINT)
            time.sleep(1.0)  # long enough for the main thread to be interrupted
            return Proof("canary", passed=True)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run.begin(content, Slow())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert run.held() == [["run-v0"], ["run-v0"]]
    assert run.store.committed == [Policy("run", 0)]


def test_a_known_forward_or_none_delivers_in_the_same_thread() -> None:
    threads: list[threading.Thread] = []
    record = SyncRecord(0, "run-v0", 0, "adapter", "filesystem", "committed")

    def delivery() -> tuple[SyncRecord, None]:
        threads.append(threading.current_thread())
        return record, None

    known: Any = "expected"
    snapshot: Any = None  # not touched
    assert deliver_with(None, snapshot, delivery)[0] is deliver_with(known, snapshot, delivery)[0] is record
    assert threads == [threading.main_thread()] * 2


@pytest.mark.parametrize(
    ("world_size", "overlap", "carrier", "beside"),
    [
        (1, False, "filesystem", True),
        (2, False, "filesystem", False),
        (1, True, "filesystem", False),
        (1, False, "direct", False),
        (1, False, "nccl", False),
    ],
)
def test_beside_only_where_nothing_else_touches_the_model(
    world_size: int, overlap: bool, carrier: Any, beside: bool
) -> None:
    asked: list[str] = []
    ranks = SimpleNamespace(world_size=world_size, together=lambda work: asked.append("together") or work())
    prover: Any = SimpleNamespace(ranks=ranks, config=SyncConfig(overlap=overlap), expect=lambda: "made")
    found = forward_for(prover, SimpleNamespace(carrier=carrier))  # type: ignore[arg-type]
    assert isinstance(found, Forward) == beside
    assert asked == ([] if beside else ["together"])
    if not beside:
        assert found == "made"


class Fleet:
    """Delivers anything that the forward allows."""

    servers = ()
    model_names: dict[str, str] = {"http://a": "run"}  # noqa: RUF012 - never changed

    def announced(self, *_: Any) -> AbstractContextManager[bool]:
        return nullcontext(False)

    def move(self, policy: Policy, snapshot: Any, expected: Any, *_: Any, **__: Any) -> Any:
        record = SyncRecord(snapshot.step, policy.name, policy.version, "adapter", "filesystem", "committed")
        try:
            self.expected = expected.result() if isinstance(expected, Forward) else expected
        except Exception as error:
            return SyncRecord(**{**vars(record), "outcome": "failed", "error": str(error)}), error
        return record, None


@pytest.mark.parametrize("on_failure", ["raise", "keep_last"])
def test_sync_makes_the_forward_beside_and_raises_its_error_in_any_case(tiny_model: Path, on_failure: Any) -> None:
    manager: Any = SyncManager(peft_model(tiny_model), "http://127.0.0.1:9", on_failure=on_failure)
    fleet = manager._fleet = Fleet()
    made: list[Any] = [torch.tensor([1.0]), VerifyError("diverged"), torch.tensor([3.0])]

    def expect() -> Any:
        value = made.pop(0)
        if isinstance(value, Exception):
            raise value
        time.sleep(0.05)
        return value

    manager._prover = SimpleNamespace(expect=expect, ranks=manager.ranks, config=manager.config)
    plan = SimpleNamespace(transport="adapter", carrier="filesystem")
    manager._agreed = SimpleNamespace(plan=plan, run_id="run", dtype=torch.float32, by_digest=False)
    record = manager.sync(1)
    assert float(fleet.expected) == 1.0
    assert 50 <= record.phases_ms["forward"] <= record.total_ms
    with pytest.raises(VerifyError, match="diverged"):
        manager.sync(2)
    assert [r.outcome for r in manager.records] == ["committed", "failed"]
    assert manager.counters == {"syncs": 1, "failures": 1, "unproven": 1}
    assert manager.policy == Policy("run", 0)
    assert manager.sync(3).version == 2
    assert float(fleet.expected) == 3.0

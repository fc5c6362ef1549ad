"""Deliveries behind the training step: none is lost, and none is taken for served before it is taken in."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow import patience
from loraflow.behind import Behind
from loraflow.errors import LoadError, LoraflowError, SyncTimeout
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from loraflow.records import Proof, SyncRecord
from loraflow.verify import Prover
from tests.helpers.tiny import peft_model

Outcome = tuple[SyncRecord, Exception | None]


class Fleet:
    """One server that takes every version, once ``gate`` is open, but those in ``failing``."""

    servers = ()
    model_names: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failing: set[int] = set()
        self.closed = False

    def announced(self, *_: Any) -> AbstractContextManager[bool]:
        return nullcontext(False)

    def move(self, policy: Policy, snapshot: Any, *_: Any, **__: Any) -> Outcome:
        self.gate.wait(30)
        failed = policy.version in self.failing
        if not failed:
            self.model_names = {"http://a": policy.name}
        outcome: Any = "failed" if failed else "committed"
        error = LoadError("full") if failed else None
        words = str(error) if error else None
        record = SyncRecord(snapshot.step, policy.name, policy.version, "adapter", "filesystem", outcome, error=words)
        return record, error

    def ensure(self, _: Any) -> None:
        pass

    def close(self, *, keep_serving: bool) -> None:
        self.closed = True


Make = Callable[..., tuple[Any, Fleet]]


@pytest.fixture
def make(tiny_model: Path) -> Make:
    """A manager that has started, by everything but the servers."""

    def made(**options: Any) -> tuple[Any, Fleet]:
        manager: Any = SyncManager(peft_model(tiny_model), "http://127.0.0.1:9", **options)
        fleet = manager._fleet = Fleet()
        manager._prover = object.__new__(Prover)
        plan = SimpleNamespace(transport="adapter")
        manager._agreed = SimpleNamespace(plan=plan, run_id="run", dtype=torch.float32, by_digest=True)
        manager._sync(0, None, began=time.perf_counter())
        return manager, fleet

    return made


def test_a_delivery_that_nobody_took_in_is_recorded_at_the_end(make: Make, tmp_path: Path) -> None:
    manager, fleet = make(overlap=True, record_file=str(tmp_path / "syncs.jsonl"))
    heard: list[int] = []
    manager.on_sync(lambda record: heard.append(record.step))
    assert manager.sync(1) is None
    manager.close()
    assert fleet.closed
    assert heard == [1]
    lines = [json.loads(line)["step"] for line in (tmp_path / "syncs.jsonl").read_text().splitlines()]
    assert lines == [record.step for record in manager.records] == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loraflow-sync")]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_servers_are_freed_whatever_the_last_delivery_ends_with(
    make: Make, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, fleet = make(overlap=True)

    def move(*_: Any, **__: Any) -> Outcome:
        raise error

    monkeypatch.setattr(fleet, "move", move)
    manager.sync(1)
    with pytest.raises(type(error)):
        manager.close()
    assert fleet.closed


def test_a_start_that_failed_frees_the_servers_also_where_giving_way_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager, fleet = make()

    def give_way() -> bool:
        raise OSError("the store is gone")

    monkeypatch.setattr(fleet, "give_way", give_way, raising=False)
    manager._close_after_error(started=False)
    assert fleet.closed
    assert "the store is gone" in caplog.text


def test_a_delivery_that_takes_too_long_is_not_taken_for_served(make: Make) -> None:
    manager, fleet = make(overlap=True, load_timeout=0.1, collective_timeout=0.1, request_timeout=0.1)
    fleet.gate.clear()
    manager.sync(1)
    with pytest.raises(SyncTimeout, match="behind the training step"):
        manager.wait()
    fleet.gate.set()
    manager._behind._pending.result(30)  # it arrives after all
    manager.ready()
    assert (manager.policy.version, manager._names) == (0, {"http://a": "run-v0"})  # rollouts are labelled as asked
    record = manager.wait()
    assert (record.version, manager.policy.version, manager._names) == (1, 1, {"http://a": "run-v1"})
    manager.close()


def test_a_delivery_is_taken_in_without_a_wait_once_it_is_over(make: Make) -> None:
    manager, fleet = make(overlap=True)
    assert manager.catch_up() is None
    fleet.gate.clear()
    manager.sync(1)
    assert manager.catch_up() is None
    assert manager.policy.version == 0
    fleet.gate.set()
    manager._behind._pending.result(30)
    record = manager.catch_up()
    assert (record.version, manager.policy.version, manager._names) == (1, 1, {"http://a": "run-v1"})
    assert manager.catch_up() is None
    fleet.failing = {2}
    manager.sync(2)
    manager._behind._pending.result(30)
    with pytest.raises(LoadError, match="full"):
        manager.catch_up()
    assert manager.policy.version == 1
    manager.close()


def test_a_delivery_that_failed_behind_is_due_again_at_once(make: Make) -> None:
    manager, fleet = make(overlap=True, on_failure="keep_last", vllm_sync_interval=4)
    fleet.failing = {1}
    assert [manager.due(step) for step in (3, 4)] == [False, True]
    manager.sync(4)
    assert not manager.due(5)
    assert manager.wait().error == "full"
    assert manager.due(5), "counted from the last version that is served"
    manager.close()


def test_a_closed_manager_says_so(make: Make) -> None:
    manager, _ = make()
    manager.close()
    manager.close()
    for call in (lambda: manager.sync(1), manager.start):
        with pytest.raises(LoraflowError, match="the manager was closed"):
            call()


def test_a_hook_that_raises_does_not_hide_why_a_sync_failed(make: Make) -> None:
    manager, fleet = make()
    fleet.failing = {1}

    def hook(_: SyncRecord) -> None:
        raise RuntimeError("the hook's own")

    manager.on_sync(hook)
    with pytest.raises(LoadError, match="full") as caught:
        manager.sync(1)
    assert str(caught.value.__cause__) == "the hook's own"


def test_a_hook_that_raises_is_heard_after_the_version_is_served(make: Make) -> None:
    manager, _ = make()
    manager.on_sync(lambda _: (_ for _ in ()).throw(ValueError("a hook of the user's")))
    with pytest.raises(ValueError, match="hook of the user's"):
        manager.sync(1)
    assert (manager.policy.version, manager.counters["syncs"]) == (1, 2)


def test_a_delivery_that_takes_too_long_stays_to_be_taken() -> None:
    behind, over = Behind[int](0.05), threading.Event()
    behind.begin(lambda: over.wait(20) and 3)
    with pytest.raises(SyncTimeout, match="more than 0 s"):
        behind.take()
    assert behind.pending
    over.set()
    assert behind.close() == 3


@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("its own")])
def test_an_error_of_a_delivery_is_raised_once(error: Exception) -> None:
    def fails() -> int:
        raise error

    behind = Behind[int](5.0)
    behind.begin(fails)
    with pytest.raises(type(error), match="its own"):
        behind.take()
    assert not behind.pending
    assert behind.close() is None


def test_a_long_wait_is_made_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt that comes just before one of them is noticed after it."""
    waited: list[float] = []

    def wait(_: object, seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(patience, "wait", wait)
    for limit in (None, 600.0, 0.02):
        waited.clear()
        with pytest.raises(KeyboardInterrupt):
            patience.over_within(Future(), limit)
        assert all(0 < seconds <= min(0.1, limit or 1) for seconds in waited)


def test_one_thread_for_all_deliveries_and_none_afterwards() -> None:
    behind = Behind[int](5.0)
    assert (behind.take(), behind.close()) == (None, None)
    names = []
    for number in range(3):
        behind.begin(lambda number=number: names.append(threading.current_thread().name) or number)  # type: ignore[misc]
        assert behind.pending
        assert behind.take() == number
        assert not behind.pending
    assert len(set(names)) == 1
    behind.begin(lambda: 7)
    assert behind.close() == 7
    assert not [thread for thread in threading.enumerate() if thread.name in names]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_canary_is_due_every_so_many_syncs_whatever_numbers_were_spent(make: Make, overlap: bool) -> None:
    manager, fleet = make(overlap=overlap, verify_interval=2, on_failure="keep_last", max_staleness=9)
    inner, compared = fleet.move, dict[int, bool]()

    def move(policy: Policy, snapshot: Any, expected: Any, *_: Any, **__: Any) -> Outcome:
        compared[policy.version] = expected is not None
        record, error = inner(policy, snapshot)
        return replace(record, proofs={"http://a": Proof("digest", passed=True)}), error  # the carrier's own

    fleet.move = move  # type: ignore[assignment, method-assign]
    prover = manager._prover
    prover.ranks, prover.config, prover.expect = manager.ranks, manager.config, lambda: "the trainer's forward"
    manager._agreed.by_digest, manager._agreed.plan.carrier = False, "direct"
    manager._sync(0, prover.expect(), began=time.perf_counter())  # as `start` does
    manager._new_policy()  # and the number of a canary
    fleet.failing = {4}
    for step in range(1, 7):
        manager.sync(step)
    manager.wait()
    wanted = {1: True, 3: False, 4: True, 5: True, 6: False, 7: True, 8: False}
    assert compared == wanted, "one that failed proved nothing: the next is compared"
    manager.close()

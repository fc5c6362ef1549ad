"""Rollouts and deliveries in several threads of one trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.errors import LoraflowError, SyncTimeout
from loraflow.gate import Gate
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from tests.helpers.tiny import peft_model

FIRST, SECOND = Policy("run", 0), Policy("run", 1)


def test_versions_are_in_use_as_long_as_a_rollout_is_inside() -> None:
    gate = Gate(1.0)
    with gate.rollout(lambda: FIRST), gate.rollout(lambda: FIRST), gate.rollout(lambda: SECOND):
        assert gate.in_use() == {FIRST, SECOND}
    assert gate.in_use() == frozenset()
    with pytest.raises(KeyError), gate.rollout(lambda: FIRST):
        raise KeyError
    assert gate.in_use() == frozenset()


def test_it_is_not_closed_over_a_rollout() -> None:
    gate = Gate(1.0)
    with gate.rollout(lambda: FIRST):
        with pytest.raises(LoraflowError, match="a rollout is under way"):
            gate.close()
        with gate.rollout(lambda: FIRST):  # it stayed open
            pass
    gate.close()
    gate.open()


def test_a_rollout_waits_and_gets_what_is_served_then() -> None:
    gate, current, got = Gate(30.0), [FIRST], []

    def roll_out() -> None:
        with gate.rollout(lambda: current[0]) as policy:
            got.append(policy)

    gate.close()
    thread = threading.Thread(target=roll_out)
    thread.start()
    thread.join(0.1)
    assert not got
    with gate.lock:
        current[0] = SECOND
    gate.open()
    thread.join(30)
    assert got == [SECOND]


def test_waiting_ends() -> None:
    gate = Gate(0.05)
    gate.close()
    with pytest.raises(SyncTimeout, match="more than 0 s"), gate.rollout(lambda: FIRST):
        pass
    assert gate.in_use() == frozenset()


def test_a_sync_that_another_rank_refuses_leaves_this_ones_gate_open(tiny_model: Path) -> None:
    """Rank 0 has a rollout inside, this rank none: its gate was closed, and nothing is delivered."""
    manager: Any = SyncManager(peft_model(tiny_model), "http://127.0.0.1:9", load_timeout=0.1, collective_timeout=0.1)
    plan = SimpleNamespace(transport="merged")
    manager._agreed = SimpleNamespace(plan=plan, run_id="run", dtype=torch.float32, by_digest=True)
    manager.policy = FIRST

    def together(work: Callable[[], Any]) -> Any:
        result = work()
        if work == manager._gate.close:
            raise LoraflowError("rank 0: a rollout is under way")
        return result

    manager.ranks = SimpleNamespace(together=together, is_main=False)
    with pytest.raises(LoraflowError, match="rank 0"):
        manager.sync(1)
    with manager.rollout() as policy:
        assert policy == FIRST

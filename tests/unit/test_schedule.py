from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loraflow.config import SyncConfig
from loraflow.correction import CorrectionOptions, correct
from loraflow.manager import SyncManager
from loraflow.schedule import AdaptiveSchedule, make_schedule


def test_fixed_interval_counts_from_the_last_sync() -> None:
    schedule = make_schedule(SyncConfig(vllm_sync_interval=3))
    assert schedule.due(7, None)
    # A trainer that generates at steps 0, 4, 8, 12 syncs at each: a remainder (step % 3) would skip 4 and 8.
    assert [step for step in (4, 8, 12) if schedule.due(step, step - 4)] == [4, 8, 12]
    assert not schedule.due(2, 0)
    assert schedule.due(3, 0)


def test_adaptive_waits_for_drift_within_bounds() -> None:
    schedule = AdaptiveSchedule(budget=0.01, low=2, high=6)
    assert schedule.due(0, None)
    schedule.synced()
    assert not schedule.due(3, 0)
    schedule.observe(0.02)
    assert not schedule.due(1, 0)  # below the lower bound
    assert schedule.due(2, 0)
    schedule.synced()
    assert not schedule.due(5, 2)  # the drift was of the version before
    schedule.observe(0.005)
    assert not schedule.due(7, 2)
    assert schedule.due(8, 2)  # the upper bound


@pytest.mark.parametrize("options", [{"vllm_sync_interval": 3}, {"vllm_sync_interval": "adaptive"}])
def test_a_step_that_went_back_is_of_other_weights(options: dict[str, Any]) -> None:
    schedule = make_schedule(SyncConfig(**options))
    assert schedule.due(4, 100)  # a checkpoint was loaded; by the interval alone this would be due at step 103
    assert not schedule.due(5, 4)


def test_adaptive_syncs_when_drift_is_not_a_number() -> None:
    schedule = AdaptiveSchedule(budget=0.01, low=1, high=100)
    schedule.observe(math.nan)
    assert schedule.due(1, 0)


@pytest.mark.parametrize(
    ("tokens", "kl_elsewhere", "tokens_elsewhere", "expected"),
    [
        (8, 0.0, 8.0, 0.5),
        (8, 0.0, 24.0, 0.25),  # a rank weighs by its tokens
        (8, 0.0, 0.0, 1.0),  # and not at all where none could be scored, e.g. where all samples were truncated
        (0, 0.25, 8.0, 0.25),
        (0, 0.0, 0.0, math.inf),  # nothing is known
    ],
)
def test_drift_is_per_token_of_all_ranks(
    tokens: int, kl_elsewhere: float, tokens_elsewhere: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SyncManager(torch.nn.Linear(1, 1), "http://127.0.0.1:9", vllm_sync_interval="adaptive")
    elsewhere: Iterator[float] = iter([tokens_elsewhere, tokens_elsewhere * kl_elsewhere])
    monkeypatch.setattr(manager.ranks, "mean", lambda value: (value + next(elsewhere)) / 2)
    observed: list[float] = []
    monkeypatch.setattr(manager._schedule, "observe", observed.append)
    mask = torch.arange(8).expand(1, 8) < tokens
    rollout = torch.zeros(1, 8)
    found = correct(rollout + 1.1461932, rollout, mask, options=CorrectionOptions(clip_max=None))  # exp(d) - 1 - d = 1
    manager.observe(found)
    assert observed == [pytest.approx(expected, rel=1e-5)]

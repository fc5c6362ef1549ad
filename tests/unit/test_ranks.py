"""All ranks or none, on two real processes: each result and each failure reaches every rank, and every wait ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraflow.errors import LoadError, LoraflowError, SyncTimeout
from loraflow.ranks import Ranks
from tests.helpers.processes import Outcome, run_ranks


def _told(work: Callable[[], Any]) -> tuple[Any, str, str, float]:
    """The result, or the kind and words of the error, and the seconds it took."""
    began = time.monotonic()
    try:
        return work(), "", "", time.monotonic() - began
    except BaseException as error:
        return None, type(error).__name__, str(error), time.monotonic() - began


def _told_elsewhere(work: Callable[[], Any]) -> tuple[Any, str, str, float]:
    """As `_told`, of a background thread."""
    found: list[tuple[Any, str, str, float]] = []
    thread = threading.Thread(target=lambda: found.append(_told(work)), name="prefetch")
    thread.start()
    thread.join()
    return found[0]


def _raise(error: BaseException) -> Any:
    raise error


def _told_of_a_sync(rank: int, error: Exception | None) -> None:
    """A hook of the user's fails on rank 1 alone, after a sync that ended with ``error``."""
    from torch import nn

    from loraflow.manager import SyncManager
    from loraflow.policy import Policy
    from loraflow.records import SyncRecord

    manager: Any = SyncManager(nn.Linear(1, 1), "http://127.0.0.1:9", collective_timeout=20.0, on_failure="keep_last")
    manager.policy = Policy("run", 2)
    if rank == 1:
        manager.on_sync(lambda _: _raise(ValueError("a hook")))
    manager._known = lambda: SimpleNamespace(run_id="run")  # what a start would have set
    status: Any = "failed" if error else "committed"
    manager._conclude(SyncRecord(3, "run-v3", 3, "adapter", "filesystem", status), error)


def _made_without_a_place_for_records() -> None:
    """Rank 0 alone writes records, and finds a file where the folder for them should be."""
    from torch import nn

    from loraflow.manager import SyncManager

    SyncManager(nn.Linear(1, 1), "http://127.0.0.1:9", collective_timeout=20.0, record_file=f"{__file__}/syncs.jsonl")


def scenarios() -> dict[str, Any]:
    """Run on each of two ranks, in the same order."""
    rank = int(os.environ["RANK"])
    ranks = Ranks(timeout=3.0, patience=20.0)
    calls: list[int] = []

    def work() -> list[int]:
        calls.append(rank)
        return [1, 2]

    found: dict[str, Any] = {
        "is_main": ranks.is_main,
        "on_main": _told(lambda: ranks.on_main(work)),
        "on_main_error": _told(lambda: ranks.on_main(lambda: _raise(LoadError("no room", server="http://a")))),
        "on_main_foreign": _told(lambda: ranks.on_main(lambda: _raise(KeyError("x")))),
        "on_main_interrupt": _told(lambda: ranks.on_main(lambda: _raise(KeyboardInterrupt()))),
        "on_main_unpicklable": _told(lambda: ranks.on_main(lambda: lambda: None)),
        "on_main_slow": _told(lambda: ranks.on_main(lambda: time.sleep(4.5) or "late")),
        "together": _told(lambda: ranks.together(lambda: rank * 10)),
        "together_one_fails": _told(lambda: ranks.together(lambda: _raise(LoadError("disk")) if rank == 1 else "fine")),
        "together_foreign": _told(lambda: ranks.together(lambda: _raise(ValueError("odd")) if rank == 1 else "fine")),
        "gather": _told(lambda: ranks.gather((rank, "x" * rank))),
        "mean": _told(lambda: ranks.mean(float(rank))),
        "meet": _told(lambda: (time.sleep(4.5 * rank), ranks.meet())[1]),
        "elsewhere": _told_elsewhere(lambda: ranks.gather(rank)),
        "hook": _told(lambda: _told_of_a_sync(rank, None)),
        "hook_after_failure": _told(lambda: _told_of_a_sync(rank, LoadError("full"))),
        "no_place": _told(_made_without_a_place_for_records),
        "calls": calls,
        "after": _told(lambda: ranks.on_main(lambda: "still in step")),
    }
    if rank == 0:
        found["absent"] = _told(lambda: ranks.gather(1))  # rank 1 never comes
    else:
        time.sleep(7.0)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[Outcome] = run_ranks(scenarios, folder=tmp_path_factory.mktemp("ranks"))
    return [outcome.result for outcome in found]


def test_rank_0_alone_works_and_every_rank_learns_the_result(outcomes: list[dict[str, Any]]) -> None:
    assert [found["is_main"] for found in outcomes] == [True, False]
    assert [found["on_main"][0] for found in outcomes] == [[1, 2], [1, 2]]
    assert [found["calls"] for found in outcomes] == [[0], []]


def test_an_error_of_rank_0_is_raised_on_every_rank_with_all_its_fields(outcomes: list[dict[str, Any]]) -> None:
    assert [found["on_main_error"][1:3] for found in outcomes] == [("LoadError", "http://a: no room")] * 2


def test_a_foreign_error_keeps_its_kind_on_rank_0_and_its_words_elsewhere(outcomes: list[dict[str, Any]]) -> None:
    assert [found["on_main_foreign"][1:3] for found in outcomes] == [
        ("KeyError", "'x'"),
        ("LoraflowError", "rank 0 failed: KeyError: 'x'"),
    ]


def test_an_interrupt_of_rank_0_reaches_the_others(outcomes: list[dict[str, Any]]) -> None:
    assert [found["on_main_interrupt"][1] for found in outcomes] == ["KeyboardInterrupt", "LoraflowError"]


def test_a_result_that_cannot_travel_fails_everywhere(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert found["on_main_unpicklable"][1] == "LoraflowError"
        assert "cannot be sent" in found["on_main_unpicklable"][2]


def test_long_work_of_rank_0_outlives_the_timeout_of_a_collective(outcomes: list[dict[str, Any]]) -> None:
    assert [found["on_main_slow"][0] for found in outcomes] == ["late", "late"]


def test_together_runs_everywhere_and_one_failure_is_everyones(outcomes: list[dict[str, Any]]) -> None:
    assert [found["together"][0] for found in outcomes] == [0, 10]
    assert outcomes[0]["together_one_fails"][1:3] == ("LoraflowError", "rank 1 failed: disk")
    assert outcomes[1]["together_one_fails"][1:3] == ("LoadError", "disk")
    assert outcomes[0]["together_foreign"][1:3] == ("LoraflowError", "rank 1 failed: ValueError: odd")
    assert outcomes[1]["together_foreign"][1] == "ValueError"


def test_a_hook_that_fails_on_one_rank_fails_on_every_rank(outcomes: list[dict[str, Any]]) -> None:
    assert [found["hook"][1:3] for found in outcomes] == [
        ("LoraflowError", "rank 1 failed: ValueError: a hook"),
        ("ValueError", "a hook"),
    ]


def test_a_hook_that_fails_does_not_hide_why_the_sync_failed(outcomes: list[dict[str, Any]]) -> None:
    assert [found["hook_after_failure"][1:3] for found in outcomes] == [("LoadError", "full")] * 2


def test_a_manager_that_one_rank_cannot_make_is_made_on_none(outcomes: list[dict[str, Any]]) -> None:
    assert [found["no_place"][1] for found in outcomes] == ["FileExistsError", "LoraflowError"]
    assert "rank 0 failed: FileExistsError" in outcomes[1]["no_place"][2]


def test_values_of_all_ranks(outcomes: list[dict[str, Any]]) -> None:
    assert [found["gather"][0] for found in outcomes] == [[(0, ""), (1, "x")]] * 2
    assert [found["mean"][0] for found in outcomes] == [0.5, 0.5]


def test_ranks_meet_although_one_is_late(outcomes: list[dict[str, Any]]) -> None:
    assert [found["meet"][1] for found in outcomes] == ["", ""]


def test_a_background_thread_is_refused_with_the_reason(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        _, kind, words, seconds = found["elsewhere"]
        assert kind == "LoraflowError"
        assert "thread 'prefetch' wants all 2 ranks to meet" in words
        assert "overlap=True" in words
        assert seconds < 1.0, "nothing is waited for"


def test_after_every_failure_the_ranks_are_still_in_step(outcomes: list[dict[str, Any]]) -> None:
    assert [found["after"][0] for found in outcomes] == ["still in step"] * 2


def test_a_rank_that_never_comes_ends_the_wait(outcomes: list[dict[str, Any]]) -> None:
    _, kind, words, seconds = outcomes[0]["absent"]
    assert kind == SyncTimeout.__name__
    assert "collective_timeout" in words
    assert seconds < 10.0


def in_the_middle_of_a_gather(model: str) -> tuple[str, str, float]:
    """Rank 1 fails where the others are in the model's own collectives already, and ends."""
    from loraflow.adapter import take_snapshot
    from loraflow.capture import SnapshotPlan
    from tests.helpers.sharding import shard

    policy = shard("fsdp2", model)
    ranks = Ranks(timeout=5.0)
    if os.environ["RANK"] == "1":
        SnapshotPlan.copy_into = lambda *_: _raise(MemoryError("no room"))  # type: ignore[method-assign]
    return _told(lambda: ranks.together(lambda: take_snapshot(policy.model)))[1:]


def test_a_failure_between_gathers_ends_every_rank(tiny_model: Path, tmp_path: Path) -> None:
    told = [o.result for o in run_ranks(in_the_middle_of_a_gather, str(tiny_model), folder=tmp_path)]
    assert told[1][:2] == ("MemoryError", "no room"), "its own error, not that the others did not come"
    assert told[0][0], "it cannot know why, but it does not wait for the group's ten minutes"
    assert max(seconds for *_, seconds in told) < 30.0


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    ranks = Ranks()
    assert ranks.is_main
    assert ranks.world_size == 1
    assert ranks.on_main(lambda: 3) == 3
    assert ranks.together(lambda: 4) == 4
    assert ranks.gather("a") == ["a"]
    assert ranks.mean(2.0) == 2.0
    ranks.meet()
    with pytest.raises(LoraflowError, match="no"):
        ranks.on_main(lambda: _raise(LoraflowError("no")))

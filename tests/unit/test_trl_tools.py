"""Turns with tools on two real processes: loops of different lengths, and one that fails, end on both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.processes import run_ranks


def loops() -> dict[str, Any]:
    """Run on each of two ranks: a trainer whose loop takes as many turns as it is told, like TRL's."""
    from loraflow.errors import LoraflowError
    from loraflow.integrations.trl_tools import Turns, take_turns_together
    from loraflow.ranks import Ranks

    rank = int(os.environ["RANK"])
    ranks = Ranks(timeout=10.0, patience=20.0)
    asked: list[list[int]] = []

    class Generation:
        """As `LoraVLLMGeneration`: rank 0 asks for all, and every rank gets its share of the answer."""

        @contextmanager
        def turns(self) -> Iterator[Turns]:
            self._turns = Turns(ranks)
            yield self._turns

        def generate(self, prompts: list[int]) -> list[int]:
            with self._turns.turn():
                return self._generate(prompts)

        def answer_along(self) -> None:
            assert self._generate([]) == []

        def _generate(self, prompts: list[int]) -> list[int]:
            shares = ranks.gather(prompts)
            every = ranks.on_main(lambda: self._ask([prompt for share in shares for prompt in share]))
            before = sum(map(len, shares[:rank]))
            return every[before : before + len(prompts)]

        def _ask(self, prompts: list[int]) -> list[int]:
            asked.append(prompts)
            if 99 in prompts:
                raise KeyError("a server that is gone")
            return [-prompt for prompt in prompts]

    class Trainer:
        accelerator = SimpleNamespace(num_processes=2)

        def _tool_call_loop(self, turns: int, fail: str = "") -> list[Any]:
            found = []
            for turn in range(turns):
                time.sleep(0.05 * rank)
                if fail == "before" and turn == 1:
                    raise ValueError("no template")
                token = 99 if fail == "server" and turn == 1 else 10 * rank + turn
                found.append(generation.generate([token] * (rank + 1)))
            return found

    generation, trainer = Generation(), Trainer()
    take_turns_together(trainer, generation)  # type: ignore[arg-type]

    def told(*args: Any) -> Any:
        try:
            return trainer._tool_call_loop(*args)
        except (LoraflowError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    return {
        "rank 1 longer": told((1, 3)[rank]),
        "rank 0 alone": told((2, 0)[rank]),
        "nobody": told(0),
        "rank 1 fails": told(2, "before" if rank == 1 else ""),
        "server": told(2, "server" if rank == 1 else ""),
        "server while rank 1 answers along": told((2, 0)[rank], "server"),
        "after": told(1),
        "asked": asked,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return [outcome.result for outcome in run_ranks(loops, folder=tmp_path_factory.mktemp("tools"))]


def test_a_rank_that_is_done_answers_along(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert (first["rank 1 longer"], second["rank 1 longer"]) == ([[0]], [[-10, -10], [-11, -11], [-12, -12]])
    assert (first["rank 0 alone"], second["rank 0 alone"]) == ([[0], [-1]], [])
    assert first["nobody"] == second["nobody"] == []
    assert first["asked"][:5] == [[0, 10, 10], [11, 11], [12, 12], [0], [1]]
    assert second["asked"] == [], "rank 0 alone asks servers"


def test_what_fails_on_one_rank_fails_on_both(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["rank 1 fails"] == "LoraflowError: the tool calls of rank 1 failed: ValueError: no template"
    assert second["rank 1 fails"] == "ValueError: no template"
    for case in ("server", "server while rank 1 answers along"):
        assert first[case] == "KeyError: 'a server that is gone'"
        assert second[case] == "LoraflowError: rank 0 failed: KeyError: 'a server that is gone'"
    assert (first["after"], second["after"]) == ([[0]], [[-10, -10]]), "and both are still in step"


def test_trls_backend_says_each_turn_and_answers_along_without(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = pytest.importorskip("loraflow.integrations.trl_backend")
    said: list[str] = []

    class Turns:
        def __init__(self, ranks: str) -> None:
            said.append(f"of {ranks}")

        @contextmanager
        def turn(self) -> Iterator[None]:
            said.append("turn")
            yield

    monkeypatch.setattr(backend, "Turns", Turns)
    generation = object.__new__(backend.LoraVLLMGeneration)
    generation.sync, generation._turns = SimpleNamespace(manager=SimpleNamespace(ranks="the ranks")), None
    generation._generate = lambda prompts, *_: said.append(f"asks for {len(prompts)}")
    generation.generate([[1]], None, 1)
    with generation.turns():
        generation.generate([[1], [2]], None, 1)
        generation.answer_along()
    generation.generate([[1]], None, 1)
    assert said == ["asks for 1", "of the ranks", "turn", "asks for 2", "asks for 0", "asks for 1"]

"""Turns with tools on several processes.

TRL's loop of tool calls ends on each rank with the last tool call of its own samples, while the generation inside of it
needs every rank: stock TRL 1.16 then waits for ranks that have gone on. Here a rank that is done answers along, with no
prompts, until all are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loraflow.errors import LoraflowError
from loraflow.ranks import Ranks

if TYPE_CHECKING:
    from transformers import Trainer

    from loraflow.integrations.trl_backend import LoraVLLMGeneration

__all__ = ["Turns", "take_turns_together"]

_ANOTHER, _DONE = "another turn", "done"


class Turns:
    """One loop of tool calls on every rank, each of which says before a turn whether it takes one.

    Args:
        ranks: The run's.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_turn = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One generation of a rank whose loop goes on. Collective, and what fails in it fails on every rank."""
        self._in_turn = True
        self._say(_ANOTHER)
        yield
        self._in_turn = False

    def done(self) -> bool:
        """This rank's loop is done: whether those of all ranks are. Collective."""
        return _ANOTHER not in self._say(_DONE)

    def failed(self, error: Exception) -> None:
        """Let the others know that this rank's loop failed, where they do not."""
        if not self._in_turn:
            self._say(f"{type(error).__name__}: {error}")

    def _say(self, word: str) -> list[str]:
        self._ranks.meet()  # which has more patience than a gather: tools take their time
        said = self._ranks.gather(word)
        for rank, other in enumerate(said):
            if other not in {_ANOTHER, _DONE} and rank != self._ranks.rank:
                raise LoraflowError(f"the tool calls of rank {rank} failed: {other}")
        return said


def take_turns_together(trainer: Trainer, generation: LoraVLLMGeneration) -> None:
    """Let the loop of tool calls of ``trainer``, where it has one, end on all ranks at once."""
    if trainer.accelerator.num_processes == 1 or not hasattr(trainer, "_tool_call_loop"):
        return
    inner: Callable[..., Any] = trainer._tool_call_loop

    @functools.wraps(inner)
    def loop(*args: Any, **kwargs: Any) -> Any:
        with generation.turns() as turns:
            try:
                result = inner(*args, **kwargs)
            except Exception as error:
                turns.failed(error)
                raise
            while not turns.done():
                generation.answer_along()
        return result

    trainer._tool_call_loop = loop

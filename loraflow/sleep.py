"""`SleepingEngine`: an engine of this process that gives its GPU memory back between generations.

vLLM's sleep level 1 keeps the weights in host memory; level 2 drops them. Either way the engine that wakes up is taken
for one that was restarted: its base must be, byte for byte, what it was before the first sleep, and its adapters are
loaded and proven again before anything is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from loraflow.capture import find_peft_model
from loraflow.connect import is_sharded
from loraflow.errors import CapabilityError, ConfigError, VerifyError
from loraflow.names import strip_wrappers

__all__ = ["SleepingEngine", "Weights", "base_parameters"]

_TAGS = frozenset({"weights", "kv_cache"})

Weights = Iterator[tuple[str, torch.Tensor]]


class SleepingEngine:
    """vLLM's ``LLM``, awake whenever it is used; everything else of it is reached through this object.

    Args:
        llm: vLLM's ``LLM``, with loraflow's worker extension, and ``enable_sleep_mode`` where it is to sleep.
        level: 1 or 2.
        base: Gives the base weights by their names in the checkpoint; for level 2.
        woken: Called when the weights are back: whatever lay in LoRA slots is lost.

    Attributes:
        wakes: How often the base was restored and proven.
    """

    def __init__(
        self, llm: Any, level: Literal[1, 2], base: Callable[[], Weights] | None, woken: Callable[[], None]
    ) -> None:
        if level == 2 and base is None:
            raise ConfigError("sleep level 2 drops the base weights: say where they are taken from, or use level 1")
        self._llm = llm
        self._level = level
        self._base = base
        self._woken = woken
        self.wakes = 0
        self._asleep: frozenset[str] = frozenset()
        self._pristine: dict[str, int] | None = None  # taken before the first sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, awake."""
        self.wake_up()
        return self._llm.generate(*args, **kwargs)

    def sleep(self, level: int = 1) -> None:  # noqa: ARG002 - the caller's level is TRL's, which pushes all weights anew
        """Give the memory back, at the level of this object."""
        if not self._asleep:
            self._pristine = self._pristine or self._sums()
            self._llm.sleep(level=self._level)
            self._asleep = _TAGS

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of ``tags`` (all where not given) again, where it was given back.

        Raises:
            VerifyError: The base weights are not what they were.
        """
        wanted = self._asleep if tags is None else self._asleep.intersection(tags)
        if not wanted:
            return
        self._llm.wake_up(tags=sorted(wanted))
        if "weights" in wanted:
            self._restore()
        self._asleep -= wanted  # not before: an engine that could not be restored must not answer

    def _restore(self) -> None:
        if self._level == 2 and self._base is not None:
            self._llm.collective_rpc(_load, args=(self._base(),))
        found = self._sums()
        changed = [name for name, total in (self._pristine or {}).items() if found.get(name) != total]
        if changed:
            raise VerifyError(
                f"{len(changed)} base weights are not what they were before sleep level {self._level}, "
                f"the first: {', '.join(changed[:3])}",
                hint="sleep_level=1 keeps them in host memory",
            )
        self._woken()
        self.wakes += 1

    def _sums(self) -> dict[str, int]:
        [answer] = self._llm.collective_rpc("loraflow_base")
        if "error" in answer:
            raise VerifyError(f"the base weights could not be checksummed: {answer['error']['message']}")
        sums: dict[str, int] = answer["ok"]["tensors"]
        return sums


def _load(worker: Any, weights: Weights) -> None:
    worker.model_runner.reload_weights(weights_iterator=weights)


def base_parameters(model: nn.Module) -> Weights:
    """The frozen base weights of a PEFT model, by their names in the checkpoint.

    Raises:
        CapabilityError: They are not whole, or not plain, on this rank.
    """
    base = find_peft_model(model).get_base_model()
    if is_sharded(model) or getattr(base, "is_quantized", False):
        raise CapabilityError(
            "sleep level 2 drops the base weights, and this trainer's, sharded or quantised, cannot replace them",
            hint="sleep_level=1 keeps them in host memory",
        )
    for name, parameter in base.named_parameters():
        if "lora_" not in name:
            yield strip_wrappers(name).replace(".base_layer.", "."), parameter.detach()

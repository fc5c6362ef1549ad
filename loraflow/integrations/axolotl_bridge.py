"""Axolotl's async GRPO trainer on the TRL that Axolotl pins.

Axolotl 0.19 pins TRL 1.9, but its async trainer overrides, and calls, two methods of ``GRPOTrainer`` as they were
before: its first rollout ends in a TypeError (``num_tiles``), its first prefetched one in a ValueError (too many
values to unpack) and then an AttributeError (``pad_token_id``). `bridge` lets each side call the other as it
expects to.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

from transformers import Trainer

from loraflow.errors import CapabilityError

__all__ = ["bridge"]

_TRL_RESULTS = 8  # of TRL 1.9's _generate: the last two are images, and there is no number of tokens any more


def bridge(trainer: Trainer) -> None:
    """Adapt the methods of ``trainer`` to whoever calls them; nothing changes where both sides agree."""
    for name in ("pad_token_id", "eos_token_id"):
        if not hasattr(trainer, name):
            setattr(trainer, name, getattr(trainer._tokenizer, name))
    caller = threading.local()  # whose code runs in this thread: prefetching and scoring may happen at the same time
    inner_forward, inner_generate = trainer._get_per_token_logps_and_entropies, trainer._generate
    taken = inspect.signature(inner_forward).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())

    @functools.wraps(inner_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if getattr(caller, "is_", None) != "trl" or "num_tiles" in taken or any_name:
            return inner_forward(*args, **kwargs)
        lost = [name for name, value in kwargs.items() if name not in taken and value is not None]
        if lost:
            raise CapabilityError(f"Axolotl's {type(trainer).__name__} does not take {', '.join(lost)}")
        known = {name: value for name, value in kwargs.items() if name in taken}
        return (*inner_forward(*args, **known), None)  # no auxiliary loss

    @functools.wraps(inner_generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        result = inner_generate(*args, **kwargs)
        if getattr(caller, "is_", None) != "axolotl" or len(result) != _TRL_RESULTS:
            return result
        prompts, completion_ids, tool_mask, completions, logprobs, extra, *_ = result
        tokens = sum(map(sum, tool_mask)) if tool_mask is not None else sum(map(len, completion_ids))
        return prompts, completion_ids, tool_mask, completions, tokens, logprobs, extra

    trainer._get_per_token_logps_and_entropies = forward
    trainer._generate = generate
    trainer._generate_and_score_completions = _called_by("trl", trainer._generate_and_score_completions, caller)
    trainer._generate_only = _called_by("axolotl", trainer._generate_only, caller)


def _called_by(
    who: Literal["trl", "axolotl"], method: Callable[..., Any], caller: threading.local
) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, caller.is_ = getattr(caller, "is_", None), who
        try:
            return method(*args, **kwargs)
        finally:
            caller.is_ = before

    return run

"""`Completion`: what a server generated for one prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Completion", "logprob_of", "read_completion"]

_NO_LOGPROB = -9999.0  # what vLLM writes for -inf, and on some routes for NaN; no sampled token has it


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        model: Policy that the server says it used.
        prompt: Index of its prompt in the request.
        token_ids: Completion tokens.
        logprobs: Log-prob of each sampled token (natural log), as long as ``token_ids``; NaN where the server sent
            none for a token.
        finish_reason: ``stop``, ``length``, …
    """

    model: str
    prompt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


def logprob_of(value: Any) -> float:
    """A sampled token's log-prob as a server wrote it; NaN where it has none, so that a correction sees it."""
    found = math.nan if value is None else float(value)
    return math.nan if found <= _NO_LOGPROB else found


def read_completion(choice: Mapping[str, Any], model: str, prompt: int) -> Completion:
    """One of the ``choices`` of ``/v1/completions``; what it lacks is a `LookupError`, `TypeError` or `ValueError`."""
    tokens = tuple(choice["token_ids"])
    raw = (choice.get("logprobs") or {}).get("token_logprobs") or [None] * len(tokens)
    if len(raw) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, {len(raw)} log-probs")
    logprobs = tuple(map(logprob_of, raw))
    return Completion(model, prompt, tokens, logprobs, choice.get("finish_reason"))

"""Structured log lines: ``loraflow: adapter_loaded name=run-v3 id=7 ms=12.3``."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

__all__ = ["log_event"]

_PLAIN = re.compile(r"[\w./:@+-]+")


def log_event(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log one event: its name, and its fields in logfmt; a formatter finds them as ``record.loraflow`` too.

    Args:
        logger: Where.
        level: As in `logging`.
        event: A stable word.
        **fields: What a program may want to read; values that are not plain words are written as JSON strings, so
            that one event is one line whatever a caller sent.
    """
    shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    logger.log(level, "loraflow: %s %s", event, shown, extra={"loraflow": {"event": event, **fields}})


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)

"""`answers`: how a worker's method answers, so that a reason survives the way back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from loraflow_server.errors import PluginError

__all__ = ["Answer", "answers"]

logger = logging.getLogger("vllm.loraflow.worker")

Answer = dict[str, Any]


def answers(method: Callable[..., Mapping[str, Any]]) -> Callable[..., Answer]:
    """Make ``method`` answer ``{"ok": …}`` with its milliseconds, or ``{"error": …}`` with the reason."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Answer:
        started = time.perf_counter()
        try:
            result = dict(method(*args, **kwargs))
        except PluginError as error:
            return {"error": error.to_dict()}
        except Exception as error:  # the engine must go on, and the caller must read why it failed
            logger.exception("loraflow: %s failed", method.__name__)
            return {"error": PluginError("worker_failed", f"{type(error).__name__}: {error}", status=500).to_dict()}
        result["ms"] = round((time.perf_counter() - started) * 1e3, 3)
        return {"ok": result}

    return call

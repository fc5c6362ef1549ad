"""`beside`: work in a thread of its own, which can be given up on: calls of torch's that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["beside"]

T = TypeVar("T")


def beside(work: Callable[[], T], *, name: str, unwanted: Callable[[T], object] = lambda _: None) -> Future[T]:
    """What ``work`` will give. Where the future was cancelled by then, ``unwanted`` gets it.

    The thread is a daemon: one that never returns blocks neither the caller nor the interpreter's exit.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks the future
            if found.set_running_or_notify_cancel():
                found.set_exception(error)
            return
        if found.set_running_or_notify_cancel():
            found.set_result(result)
        else:
            unwanted(result)

    threading.Thread(target=run, name=f"loraflow-{name}", daemon=True).start()
    return found

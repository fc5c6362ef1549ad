"""`Task`: one blocking call beside the caller, which can be given up on; `at_once`, `each`: one for every server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from loraflow.errors import LoraflowError

if TYPE_CHECKING:
    from loraflow.transports.link import Link

T = TypeVar("T")
Item = TypeVar("Item")

__all__ = ["Awaited", "Task", "at_once", "each", "wait_until"]


class Task(Generic[T]):
    """Runs ``work`` in a daemon thread: one that never returns blocks neither the caller nor the interpreter's exit."""

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._finished = threading.Event()
        threading.Thread(target=self._run, name=f"loraflow-{name}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised by `result`, in the thread that asks
            self._error = error
        finally:
            self._finished.set()

    def done(self) -> bool:
        """Whether it has returned or raised."""
        return self._finished.is_set()

    def failed(self) -> bool:
        """Whether it has raised."""
        return self.done() and self._error is not None

    def wait(self, timeout: float) -> bool:
        """Wait until it has returned or raised, ``timeout`` seconds at most; whether it has."""
        return self._finished.wait(max(0.0, timeout))

    def result(self, timeout: float) -> T:
        """What it returned; raises what it raised, or `TimeoutError` after ``timeout`` seconds."""
        if not self.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result[0]


class Awaited:
    """A task as something to wait for (`loraflow.transports.groups.Pending`)."""

    def __init__(self, task: Task[object]) -> None:
        self._task = task

    def done(self) -> bool:
        """Whether it has returned; raises what it raised."""
        if not self._task.done():
            return False
        self._task.result(0)
        return True


def wait_until(ready: Callable[[], bool], deadline: float) -> bool:
    """Poll ``ready`` until it is true or the monotonic clock passes ``deadline``; whether it became true."""
    pause = 1e-4
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.001)
    return True


def at_once(work: Callable[[Item], T], items: Sequence[Item], limit: int) -> list[T]:
    """What ``work``, which never raises, gives for each of ``items``, in order; ``limit`` of them at the same time.

    Once the process ends, when no pool takes any work (a trainer that lived until then frees its servers), it is one
    after the other.
    """
    with ThreadPoolExecutor(max(1, min(limit, len(items)))) as pool:
        try:
            pool.submit(int)
        except RuntimeError:
            return [work(item) for item in items]
        return list(pool.map(work, items))


def each(links: Sequence[Link], work: Callable[[Link], object]) -> dict[str, Exception]:
    """Run ``work`` for all links at the same time; errors by URL."""
    if not links:
        return {}

    def guarded(link: Link) -> Exception | None:
        try:
            work(link)
        except LoraflowError as error:
            return error
        return None

    outcomes = at_once(guarded, links, len(links))
    return {link.server.url: error for link, error in zip(links, outcomes, strict=True) if error is not None}

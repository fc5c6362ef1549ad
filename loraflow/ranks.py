"""All ranks or none (rule 10): what rank 0 does alone, every rank learns of, its failure included."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from loraflow.errors import LoraflowError, SyncTimeout

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The trainer's processes. With one process (no process group) every method is a plain call.

    Objects travel over gloo groups of their own, made by every rank in the constructor, so that no CUDA device is
    needed and the trainer's own collectives stay in order. With several processes only the thread that made this object
    may use it: two threads would enter collectives in an order that each rank chooses for itself.

    Args:
        timeout: Seconds that one collective may take before it raises on every rank.
        patience: Seconds that the other ranks wait for work that rank 0 does alone (a server that comes up, a
            generation); ``timeout`` where not given. A rank 0 that dies ends the wait at once.
    """

    def __init__(self, timeout: float = 120.0, patience: float | None = None) -> None:
        self._group: dist.ProcessGroup | None = None
        self._main_group: dist.ProcessGroup | None = None
        self._thread = threading.get_ident()
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            longest = max(timeout, patience or timeout)
            self._main_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=longest))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that talks to servers and stores."""
        return self.rank == 0

    def on_main(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; every rank returns its result, or raises its error.

        The result must be picklable where there is more than one rank.

        Raises:
            SyncTimeout: Rank 0 is gone, or was not done within the patience of this object.
        """
        if self._main_group is None:
            return work()
        self._need_own_thread()
        if not self.is_main:
            box: list[Any] = [None]
            _collective("rank 0's outcome", lambda: dist.broadcast_object_list(box, src=0, group=self._main_group))
            result, problem = _unpacked(box[0])
            if problem is not None:
                raise problem
            return cast("T", result)
        result, error = _attempt(work)
        sent, unsendable = _packed(result, error, "rank 0 failed: ")
        with _own_error_first(error):
            _collective("the other ranks", lambda: dist.broadcast_object_list([sent], src=0, group=self._main_group))
        if unsendable is not None:
            raise unsendable
        return cast("T", result)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; an error on one is raised on all, so that none waits for it.

        ``work`` may hold collectives of its own. An error before one of them leaves the others there until that
        collective's own timeout, or until this rank has waited for them, raised, and ended.
        """
        if self._group is None:
            return work()
        self._need_own_thread()
        result, error = _attempt(work)
        sent, _ = _packed(None, error)
        with _own_error_first(error):
            problems = [_unpacked(outcome)[1] for outcome in self.gather(sent)]
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise LoraflowError(f"rank {rank} failed: {problem}") from problem
        return cast("T", result)

    def meet(self) -> None:
        """Wait for every rank, with the patience of this object: ranks come here after work of different lengths.

        Raises:
            SyncTimeout: A rank is gone, or did not come.
        """
        if self._main_group is not None:
            self._need_own_thread()
            _collective("the other ranks", lambda: dist.barrier(group=self._main_group))

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order, on all ranks; it must be picklable."""
        if self._group is None:
            return [value]
        self._need_own_thread()
        values: list[Any] = [None] * self.world_size
        _collective("the other ranks", lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def mean(self, value: float) -> float:
        """Mean of ``value`` over all ranks, on all ranks."""
        return sum(self.gather(value)) / self.world_size

    def _need_own_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise LoraflowError(
                f"thread {threading.current_thread().name!r} wants all {self.world_size} ranks to meet while the "
                "trainer's own may do the same: no order of the two would hold on every rank, and they would deadlock",
                hint="generate and sync in the thread that trains; overlap=True lets deliveries run behind a step",
            )


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001 - an interrupt as well: the others must learn of it before it is raised
        return None, error


@contextmanager
def _own_error_first(error: BaseException | None) -> Iterator[None]:
    """Raise ``error``, once the others know of it or could not be told: it is the cause, and their silence is not."""
    try:
        yield
    except SyncTimeout as untold:
        if error is not None:
            raise error from untold
        raise
    if error is not None:
        raise error


def _collective(waiting_for: str, enter: Callable[[], object]) -> None:
    try:
        enter()
    except RuntimeError as error:
        raise SyncTimeout(
            f"waiting for {waiting_for} failed: {error}",
            hint="a rank ended, or was not done in time (collective_timeout); look at the first error of each rank",
        ) from error


def _packed(result: object, error: BaseException | None, prefix: str = "") -> tuple[bytes, LoraflowError | None]:
    """The outcome as bytes that surely unpickle, and why it could not be sent as it is.

    An error of another kind than ours, whose class need not unpickle elsewhere, travels as its text.
    """
    if error is not None and not isinstance(error, LoraflowError):
        error = LoraflowError(f"{prefix}{type(error).__name__}: {error}")
    try:
        packed = pickle.dumps((result, error))
        _unpacked(packed)
    except Exception as reason:  # noqa: BLE001 - objects of the user's: anything may be raised
        what = f"the outcome cannot be sent to the other ranks: {reason}" if error is None else str(error)
        unsendable = LoraflowError(what)
        return pickle.dumps((None, unsendable)), unsendable
    return packed, None


def _unpacked(outcome: bytes) -> tuple[Any, LoraflowError | None]:
    return cast("tuple[Any, LoraflowError | None]", pickle.loads(outcome))  # noqa: S301 - from another rank of this job

"""What a trainer broadcasts, received by a worker with a deadline; over NCCL, or gloo where there is no GPU.

A trainer that dies in the middle leaves its peers in the collective for ever (NCCL knows no timeout). So a line looks
whether a piece has come, and where it has not in time it aborts its communicator: the worker, and the engine with it,
goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from loraflow_server.errors import PluginError

__all__ = ["Arrival", "GlooLine", "Line", "NcclLine"]

logger = logging.getLogger("vllm.loraflow.worker")

_POLL, _LOOK = 50e-6, 0.5


class Arrival(Protocol):
    """A piece on its way."""

    def settle(self) -> None:
        """Wait until it is there, so that what is launched now may read it.

        Raises:
            PluginError: ``broadcast_failed``, or ``broadcast_timeout`` (504); the line is of no use then.
        """
        ...


class Line(Protocol):
    """A worker's end of a broadcast group whose rank 0 is the trainer."""

    def receive(self, buffer: torch.Tensor) -> Arrival:
        """Begin to receive into ``buffer`` (uint8, 1-D, contiguous), once what was launched before is done with it."""
        ...

    def close(self) -> None:
        """Leave the group, whatever is under way."""
        ...


# ---------------------------------------------------------------- nccl


class NcclLine:
    """Over a communicator of vLLM's (``PyNcclCommunicator``).

    Args:
        communicator: It.
        device: The worker's GPU.
        timeout: Seconds for one piece.
        aborted: Called after the communicator was aborted.
        alive: Called each half second of a wait; raises where the trainer is gone, which NCCL need not notice.
    """

    def __init__(
        self,
        communicator: Any,
        device: torch.device,
        timeout: float,
        aborted: Callable[[], object] = lambda: None,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self._communicator, self._device, self._timeout, self._aborted = communicator, device, timeout, aborted
        self._alive = alive
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)

    def receive(self, buffer: torch.Tensor) -> Arrival:
        """On a stream of its own, behind what was launched on the current one. See `Line.receive`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self._communicator.broadcast(buffer, src=0, stream=self._stream)
        return _OnStream(self._stream.record_event(), current, self._timeout, self._abort, self._alive)

    def close(self) -> None:
        """Abort the communicator."""
        self._abort()

    def _abort(self) -> None:
        self._communicator.destroy()
        self._aborted()


class _OnStream:
    def __init__(
        self,
        event: Any,
        current: Any,
        timeout: float,
        abort: Callable[[], None],
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self._event, self._current, self._abort, self._alive = event, current, abort, alive
        self._timeout = timeout

    def settle(self) -> None:
        began = time.monotonic()
        look = began + _LOOK
        while not self._event.query():
            now = time.monotonic()
            if now > began + self._timeout:
                self._abort()
                raise _too_late(self._timeout)
            if now > look:
                self._look()
                look = time.monotonic() + _LOOK
            time.sleep(_POLL)
        self._current.wait_event(self._event)

    def _look(self) -> None:
        try:
            self._alive()
        except Exception as error:
            self._abort()
            raise PluginError("broadcast_failed", f"the trainer is gone: {error}", status=502) from error


# ---------------------------------------------------------------- gloo


class GlooLine:
    """Over a gloo process group of torch's, whose own timeout is ``timeout``.

    Args:
        group: It.
        timeout: Seconds for one piece.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self._group, self._timeout = group, timeout

    def receive(self, buffer: torch.Tensor) -> Arrival:
        """See `Line.receive`."""
        return _InGroup(self._group.broadcast(buffer, 0), self._timeout)

    def close(self) -> None:
        """Let go of the group; what is under way ends with its timeout."""
        self._group = None


class _InGroup:
    def __init__(self, work: Any, timeout: float) -> None:
        self._work, self._timeout = work, timeout

    def settle(self) -> None:
        try:
            self._work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise _too_late(self._timeout) from error
            raise PluginError("broadcast_failed", f"the broadcast broke off: {error}", status=502) from error


def _too_late(timeout: float) -> PluginError:
    return PluginError("broadcast_timeout", f"a piece of the broadcast did not come within {timeout:g} s", status=504)

"""What a trainer broadcasts, received by a worker with a deadline; over NCCL, or gloo where there is no GPU.

A trainer that dies in the middle leaves its peers in an NCCL collective for ever. So a line looks whether a piece has
come, and where it does not in time, or is wanted no more, it aborts its communicator: the worker, and the engine with
it, goes on. Under gloo the connection breaks, and there is a timeout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from loraflow_server.errors import PluginError

__all__ = ["Arrival", "GlooLine", "Line", "NcclLine", "Receiving"]

logger = logging.getLogger("vllm.loraflow.worker")

_POLL, _LOOK = 50e-6, 0.1
_BUFFERS = 2


class Arrival(Protocol):
    """A piece on its way."""

    def settle(self) -> None:
        """Wait until it is there, so that what is launched now may read it.

        Raises:
            PluginError: ``broadcast_failed``, ``broadcast_timeout``, ``called_off``; the line is of no use then.
        """
        ...


class Line(Protocol):
    """How the pieces of an update come to a worker."""

    def pieces(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Each of them in turn (uint8, shape (size,)); what is launched before the next one is asked for may read it.

        Args:
            sizes: In bytes.

        Raises:
            PluginError: ``broadcast_failed``, ``broadcast_timeout``, ``called_off``; the line is of no use then.
        """
        ...


class Receiving:
    """A worker's end of a broadcast group whose rank 0 is the trainer: a `Line` through two buffers.

    Attributes:
        device: Where pieces are received.
    """

    device: torch.device

    def receive(self, buffer: torch.Tensor) -> Arrival:
        """Begin to receive into ``buffer`` (uint8, 1-D, contiguous), once what was launched before is done with it."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group, whatever is under way."""
        raise NotImplementedError

    def pieces(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `Line.pieces`: while one is written the next arrives."""
        size = max(sizes)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in sizes[:_BUFFERS]]
        arrivals = [self.receive(buffer[:nbytes]) for buffer, nbytes in zip(buffers, sizes, strict=False)]
        for number, nbytes in enumerate(sizes):
            slot = number % len(buffers)
            arrivals[slot].settle()
            yield buffers[slot][:nbytes]
            following = number + len(buffers)
            if following < len(sizes):
                arrivals[slot] = self.receive(buffers[slot][: sizes[following]])


# ---------------------------------------------------------------- nccl


class NcclLine(Receiving):
    """Over a communicator of vLLM's (``PyNcclCommunicator``).

    Args:
        communicator: It.
        device: The worker's GPU.
        timeout: Seconds for one piece.
        aborted: Called after the communicator was aborted.
        alive: Called each tenth of a second of a wait; raises where the trainer has gone, which NCCL need not notice.
    """

    def __init__(
        self,
        communicator: Any,
        device: torch.device,
        timeout: float,
        *,
        aborted: Callable[[], object] = lambda: None,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self.device = device
        self._communicator, self._timeout = communicator, timeout
        self._aborted, self._alive = aborted, alive
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)

    def receive(self, buffer: torch.Tensor) -> Arrival:
        """On a stream of its own, behind what was launched on the current one. See `Receiving.receive`."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        self._communicator.broadcast(buffer, src=0, stream=self._stream)
        return _OnStream(self._stream.record_event(), current, self)

    def close(self) -> None:
        """Abort the communicator."""
        self._communicator.destroy()
        self._aborted()

    def await_event(self, event: Any) -> None:
        """Wait for what was launched; abort the communicator where it does not end."""
        began = time.monotonic()
        look = began + _LOOK
        while not event.query():
            now = time.monotonic()
            if now > began + self._timeout:
                self.close()
                raise _too_late(self._timeout)
            if now > look:
                self._look()
                look = time.monotonic() + _LOOK
            time.sleep(_POLL)

    def _look(self) -> None:
        try:
            self._alive()
        except Exception as error:
            self.close()
            if isinstance(error, PluginError):
                raise
            raise PluginError("broadcast_failed", f"the trainer has gone: {error}", status=502) from error


class _OnStream:
    def __init__(self, event: Any, current: Any, line: NcclLine) -> None:
        self._event, self._current, self._line = event, current, line

    def settle(self) -> None:
        self._line.await_event(self._event)
        self._current.wait_event(self._event)


# ---------------------------------------------------------------- gloo


class GlooLine(Receiving):
    """Over a gloo process group of torch's, whose own timeout is ``timeout``.

    Args:
        group: It.
        timeout: Seconds for one piece.
    """

    device = torch.device("cpu")

    def __init__(self, group: Any, timeout: float) -> None:
        self._group, self._timeout = group, timeout

    def receive(self, buffer: torch.Tensor) -> Arrival:
        """See `Receiving.receive`."""
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

"""Buckets that a trainer of this host merges into memory which the workers map: nothing travels.

The memory is a few buffers of ``stride`` bytes, one behind another, on the GPU that both use (CUDA IPC) or in shared
memory of the host; a token of 16 bytes follows them. Beside it lie flags in shared memory, int64 words: first the
number of the newest bucket that may be read (negative: none will come any more), then one for each worker, the newest
that it has copied (negative: it has given up). Buckets are numbered for as long as the flags live; those of an update
take the buffers in turn. The trainer fills a buffer again once every worker has copied what was in it, and tells of a
bucket once its GPU is done with it: so neither side's device ever waits for the other's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraflow_server.blocks import SHM_DIR, Block, map_gpu, map_shared
from loraflow_server.errors import PluginError
from loraflow_server.payload import check_block_name, check_source

__all__ = ["TOKEN_BYTES", "MappedBuffers", "MappedLine", "Where", "check_where"]

TOKEN_BYTES = 16
_WORD = 8
_POLL, _LOOK = 50e-6, 0.1
_MOST_BUFFERS, _MOST_WORKERS = 16, 1 << 16


@dataclass(frozen=True)
class Where:
    """Where a trainer's buffers are.

    Attributes:
        source: Their memory, see `loraflow_server.payload.check_source`.
        buffers: How many.
        stride: Bytes from one to the next.
        flags: Name of the block with the flags.
        workers: Of all engines.
    """

    source: Mapping[str, Any]
    buffers: int
    stride: int
    flags: str
    workers: int


def check_where(body: Mapping[str, Any], workers: int, limit: int) -> dict[str, Any]:
    """A `Where` as a trainer gives it, every field checked.

    Args:
        body: The request.
        workers: How many there are.
        limit: Bytes, see `check_source`.

    Raises:
        PluginError: ``bad_source``, ``bad_request``; ``too_large`` (413).
    """
    source = check_source(body.get("source"), limit)
    if source["kind"] == "broadcast" or "flag" in source:
        raise PluginError("bad_source", "what is mapped is shm or cuda_ipc, without a flag")
    buffers, stride = body.get("buffers"), body.get("stride")
    if type(buffers) is not int or not 0 < buffers <= _MOST_BUFFERS:
        raise PluginError("bad_request", f"buffers is a number from 1 to {_MOST_BUFFERS}")
    if type(stride) is not int or stride <= 0 or buffers * stride + TOKEN_BYTES != source["nbytes"]:
        raise PluginError("bad_request", f"source.nbytes is buffers × stride, and {TOKEN_BYTES} of the token")
    if type(body.get("workers")) is not int or body["workers"] != workers:
        raise PluginError("bad_request", f"workers is {workers}: all of this server")
    flags = check_block_name(body.get("flags"))
    return {"source": source, "buffers": buffers, "stride": stride, "flags": flags, "workers": workers}


class MappedBuffers:
    """A trainer's buffers, as one worker has them mapped.

    Args:
        where: They.
        worker: Place of this worker among all engines', from 0.
        device: Its device.
        shm_dir: Folder of shared memory.

    Raises:
        PluginError: ``no_block`` (409): this worker does not reach them.
    """

    def __init__(self, where: Where, worker: int, device: torch.device, shm_dir: Path = SHM_DIR) -> None:
        self.name = where.flags
        self.where = where
        self._flags = map_shared(shm_dir / where.flags, _WORD * (1 + where.workers))
        self._block: Block | None = None
        if where.source["kind"] == "shm":
            self._block = map_shared(shm_dir / where.source["name"], where.source["nbytes"])
            self._memory = self._block.view
        else:
            self._memory = map_gpu(where.source, device)
        self._worker = worker

    @property
    def token(self) -> str:
        """What follows the buffers, in hex: the trainer sees by it that this is its memory."""
        begin = self.where.buffers * self.where.stride
        return bytes(self._memory[begin : begin + TOKEN_BYTES].tolist()).hex()

    def line(self, first: int, timeout: float, alive: Callable[[], object] = lambda: None) -> MappedLine:
        """The buckets behind number ``first``."""
        words = self._flags.words
        return MappedLine(self, words, 1 + self._worker, first, timeout, alive)

    def buffer(self, number: int) -> torch.Tensor:
        """One of them; uint8, shape (stride,)."""
        return self._memory[number * self.where.stride : (number + 1) * self.where.stride]

    def give_up(self) -> None:
        """Tell the trainer that this worker copies no more, and unmap them."""
        self._flags.words[1 + self._worker] = -1
        self.close()

    def close(self) -> None:
        """Unmap them, once what was launched is done with them."""
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()
        self._memory = torch.empty(0, dtype=torch.uint8)
        for block in filter(None, (self._flags, self._block)):
            block.close()


class MappedLine:
    """The buckets of one update, as they are told to be there. See `loraflow_server.collective.Line`.

    Args:
        buffers: Where they lie.
        words: The flags.
        mine: Index of this worker's.
        first: Number of the last bucket before the update.
        timeout: Seconds for one bucket.
        alive: Called each tenth of a second of a wait; raises where the trainer has gone.
    """

    def __init__(
        self,
        buffers: MappedBuffers,
        words: memoryview,
        mine: int,
        first: int,
        timeout: float,
        alive: Callable[[], object],
    ) -> None:
        self._buffers, self._words, self._mine, self._first = buffers, words, mine, first
        self._timeout, self._alive = timeout, alive
        self._copying: deque[tuple[int, Any]] = deque()

    def pieces(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `Line.pieces`. No bucket is copied anywhere: what is given is the trainer's buffer."""
        for index, nbytes in enumerate(sizes):
            number = self._first + 1 + index
            self._wait(lambda number=number: self._told() >= number)  # type: ignore[misc]
            piece = self._buffers.buffer(index % self._buffers.where.buffers)[:nbytes]
            yield piece
            self._copying.append((number, _event_on(piece.device)))
        self._wait(lambda: not self._copying)

    def _told(self) -> int:
        newest = self._words[0]
        if newest < 0:
            raise PluginError("called_off", "the trainer has called the update off", status=409)
        return newest

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, and say meanwhile what has been copied."""
        began = time.monotonic()
        look = began + _LOOK
        while True:
            while self._copying and self._copying[0][1].query():
                self._words[self._mine] = self._copying.popleft()[0]
            if ready():
                return
            now = time.monotonic()
            if now > began + self._timeout:
                raise PluginError("broadcast_timeout", f"a bucket did not come within {self._timeout:g} s", status=504)
            if now > look:
                self._alive()
                look = now + _LOOK
            time.sleep(_POLL)


class _Done:
    """What the host has copied."""

    def query(self) -> bool:
        return True


def _event_on(device: torch.device) -> Any:
    """Something that says whether all that was launched on ``device`` until now is done."""
    if device.type != "cuda":
        return _Done()
    return torch.cuda.current_stream(device).record_event()

"""Merged buckets in memory that the workers of a server on this host have mapped: nothing travels.

On one GPU the buckets are merged in memory of it that the workers open once (CUDA IPC), without a GPU in shared memory
of the host. What both sides say to each other is in `loraflow_server.mapped`.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, Self

import requests
import torch
from torch import Tensor

from loraflow.errors import CapabilityError, LoadError, LoraflowError
from loraflow.plugin_client import PluginClient
from loraflow.server import VLLMServer
from loraflow.transports.blocks import Block, SharedBlock, gpu_block
from loraflow.transports.groups import Group, IpcGroup, Pending
from loraflow.transports.wire import Bucket
from loraflow_server.mapped import TOKEN_BYTES

__all__ = ["MappedGroup", "TrainerBuffers"]

_log = logging.getLogger(__name__)

_BUFFERS = 2
"""One is merged while the workers copy the other."""
_ALIGNED = 512
_WORD = 8


class TrainerBuffers:
    """The memory in which the buckets of all of a run's updates are merged.

    Args:
        nbytes: Size of the largest bucket.
        device: The trainer's; where it is no GPU they lie in shared memory.

    Attributes:
        views: The buffers; uint8, shape (nbytes,).
        token: What follows them, in hex.

    Raises:
        CapabilityError: There is no shared memory, or memory of this GPU cannot be shared.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._stride = -(-nbytes // _ALIGNED) * _ALIGNED
        size = _BUFFERS * self._stride + TOKEN_BYTES
        block: Block | None = gpu_block(size, device) if device.type == "cuda" else SharedBlock(size, device)
        if block is None:
            raise CapabilityError("no memory of this GPU can be shared (CUDA IPC)", found=str(device))
        self._block = block
        self.views = [block.view[i * self._stride :][:nbytes] for i in range(_BUFFERS)]
        head = secrets.token_bytes(TOKEN_BYTES)
        self.token = head.hex()
        block.view[-TOKEN_BYTES:].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def where(self, flags: str, workers: int) -> dict[str, Any]:
        """`loraflow_server.mapped.Where`, but for what each server has of its own."""
        return {
            "source": self._block.source(),
            "buffers": len(self.views),
            "stride": self._stride,
            "flags": flags,
            "workers": workers,
        }

    @classmethod
    def for_updates(cls, nbytes: int, device: torch.device) -> Self | None:
        """Buffers of ``nbytes``; None where memory of the GPU cannot be shared."""
        try:
            return cls(nbytes, device)
        except CapabilityError as error:
            if device.type != "cuda":
                raise
            _log.info("merged weights are loaded by vLLM itself: %s", error)
            return None

    def close(self) -> None:
        """Free them; servers have let go of them, or are gone."""
        self.views = []
        on_gpu = self._block.view.is_cuda
        self._block.close()
        if on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class _Copied:
    def __init__(self, words: Tensor, number: int) -> None:
        self._words, self._number = words, number

    def done(self) -> bool:
        slowest = int(self._words[1:].min())
        if slowest < 0:
            self._words[0] = -1  # the others wait for no more then
            raise RuntimeError("a worker has given up on the update")
        return slowest >= self._number


class MappedGroup(Group):
    """The workers of one server, which have mapped the trainer's buffers. See `loraflow.transports.groups.Group`.

    Args:
        server: The server.
        mapped: The buffers.
        world_size: Trainer and workers.
        timeout: Seconds for joining.
        loaded: How the server gets weights that it cannot write straight to their places; None where it has no way.

    Attributes:
        reached: Whether all workers have mapped them.

    Raises:
        CapabilityError: There is no shared memory.
    """

    buffers = 1  # of what is sent another way

    def __init__(
        self, server: VLLMServer, mapped: TrainerBuffers, world_size: int, timeout: float, loaded: IpcGroup | None
    ) -> None:
        self.device = mapped.views[0].device
        self.reached = False
        self._server, self._mapped, self._workers = server, mapped, world_size - 1
        self._timeout, self._loaded = timeout, loaded
        self._flags = SharedBlock(_WORD * world_size, torch.device("cpu"))
        self._words = self._flags.view.view(torch.int64)
        self._words.zero_()
        self._number = 0
        self._straight = False

    def join(self) -> None:
        """Have the workers map the buffers.

        Raises:
            CapabilityError: One does not reach them, and the server has no other way.
        """
        plugin = PluginClient(self._server.request)
        try:
            tokens = plugin.weights_map(self._mapped.where(self._flags.name, self._workers), timeout=self._timeout)
            seen = {token for ranks in tokens for token in ranks}
            reason = None if seen == {self._mapped.token} else "it reads other memory of that name (another host?)"
        except LoraflowError as error:
            if getattr(error, "status", None) != requests.codes.conflict:
                raise
            reason = str(getattr(error, "reason", error))
        self.reached = reason is None
        if reason is None:
            return
        self.leave()
        if self._loaded is None:
            raise CapabilityError(
                f"a worker does not reach the trainer's memory: {reason}",
                server=self._server.url,
                hint="trainer and server must share /dev/shm and the user; else start the server with the gloo backend",
            )
        _log.info("%s: merged weights are loaded by vLLM itself: %s", self._server.url, reason)

    def stamp(self) -> dict[str, Any]:
        """Nothing; buckets are handed to vLLM from now on."""
        self._straight = False
        return {}

    def stamp_straight(self) -> dict[str, Any]:
        """Where the update's buckets begin."""
        self._straight = True
        return {"mapped": {"name": self._flags.name, "first": self._number}}

    def send(self, buffer: Tensor, bucket: Bucket) -> Pending:
        """Tell the workers of a bucket, once this GPU is done with it."""
        if not self._straight:
            if self._loaded is None:
                raise LoadError("without a GPU nothing is sent that the server cannot write", server=self._server.url)
            return self._loaded.send(buffer, bucket)
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        self._number += 1
        self._words[0] = self._number
        return _Copied(self._words, self._number)

    def leave(self) -> None:
        """Have the workers let go of the buffers."""
        PluginClient(self._server.request).weights_unmap(self._flags.name, timeout=self._timeout)

    def close(self) -> None:
        """Call off what is under way; a worker that waits gives up."""
        self._words[0] = -1
        self._flags.close()
        if self._loaded is not None:
            self._loaded.close()

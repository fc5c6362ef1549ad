"""Memory that a server on this host reads a payload from: a block of shared memory, or the GPU's own memory."""

from __future__ import annotations

import base64
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import requests
import torch

from loraflow.errors import CapabilityError, LoraflowError
from loraflow.plugin_client import PluginClient
from loraflow.server import VLLMServer
from loraflow_server.locked_file import create_locked

__all__ = ["Block", "GpuBlock", "SharedBlock", "best_block", "gpu_block", "objection", "reachable_block"]

_SHM = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
_PREFIX = "loraflow-"
_log = logging.getLogger(__name__)
_HEAD = 16


class Block(Protocol):
    """Where a payload lies for the servers.

    Attributes:
        view: Its bytes; uint8, shape (nbytes,).
    """

    view: torch.Tensor

    def source(self) -> dict[str, Any]:
        """The JSON that tells a server where it is."""
        ...

    def put(self, payload: torch.Tensor) -> None:
        """Copy a payload in (uint8, same size); the servers may read it once this returns."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class SharedBlock:
    """A file in ``/dev/shm`` of this user alone, pinned where there is a GPU.

    It is locked as long as this process lives, so that the block of a killed process is recognised, and removed by the
    next one.

    Args:
        nbytes: Size.
        device: Where the payloads come from.

    Raises:
        CapabilityError: There is no shared memory, or not enough.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        _remove_orphans()
        self.name = _PREFIX + secrets.token_hex(8)
        self._path = _SHM / self.name
        self._descriptor = -1
        try:
            self._descriptor = create_locked(self._path)
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            if self._descriptor >= 0:
                os.close(self._descriptor)
            raise CapabilityError(
                f"no shared memory for a payload of {nbytes} bytes in {_SHM}: {error.strerror}",
                hint="give the container more of it (--shm-size), or use carrier='filesystem'",
            ) from error
        memory = mmap.mmap(self._descriptor, nbytes)
        self.view = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned = device.type == "cuda" and _host_register(self.view)

    def source(self) -> dict[str, Any]:
        """The JSON that tells a server where it is."""
        return {"kind": "shm", "name": self.name, "nbytes": self.view.numel()}

    def put(self, payload: torch.Tensor) -> None:
        """Copy a payload in: one copy, and a wait for it."""
        self.view.copy_(payload, non_blocking=self._pinned)
        if payload.device.type == "cuda":
            torch.cuda.current_stream(payload.device).synchronize()

    def close(self) -> None:
        """Remove it; servers that have it mapped keep their mapping."""
        if self._pinned:
            _cudart().cudaHostUnregister(self.view.data_ptr())
            self._pinned = False
        self._path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class GpuBlock:
    """Memory of the trainer's GPU that a server on the same GPU opens by CUDA IPC: the host is not involved.

    Args:
        nbytes: Size.
        device: The GPU.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self.view = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(self.view)  # type: ignore[no-untyped-call]
        handle, storage_bytes, storage_offset, _, ref_file, ref_offset, event, event_sync = arguments[7:15]
        self._source = {
            "kind": "cuda_ipc",
            "nbytes": nbytes,
            "uuid": str(torch.cuda.get_device_properties(device).uuid),
            "handle": base64.b64encode(handle).decode(),
            "storage_bytes": storage_bytes,
            "storage_offset": storage_offset,
            "ref_file": base64.b64encode(ref_file).decode(),
            "ref_offset": ref_offset,
            "event": base64.b64encode(event).decode(),
            "event_sync": bool(event_sync),
        }

    def source(self) -> dict[str, Any]:
        """The JSON that tells a server where it is."""
        return dict(self._source)

    def put(self, payload: torch.Tensor) -> None:
        """Copy a payload in, and wait for it: the server reads on a stream of its own."""
        self.view.copy_(payload)
        torch.cuda.current_stream(payload.device).synchronize()

    def close(self) -> None:
        """Let go of it; it is freed once the servers have let go too."""
        self.view = torch.empty(0, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _host_register(view: torch.Tensor) -> bool:
    return int(_cudart().cudaHostRegister(view.data_ptr(), view.numel(), 0)) == 0


def _remove_orphans() -> None:
    """Remove blocks of this user whose process is gone: nobody holds their lock."""
    for path in _SHM.glob(_PREFIX + "*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone already
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def best_block(servers: Sequence[VLLMServer], nbytes: int, device: torch.device) -> Block:
    """The fastest block for ``servers``: the GPU's memory where every worker of them reaches it, else the host's.

    Whether they reach the host's is for `objection` to tell.

    Raises:
        CapabilityError: There is no shared memory, or not enough of it.
    """
    if device.type == "cuda":
        gpu = gpu_block(nbytes, device)
        if gpu is not None and all(objection(server, gpu) is None for server in servers):
            return gpu
        if gpu is not None:
            gpu.close()
    return SharedBlock(nbytes, device)


def reachable_block(servers: Sequence[VLLMServer], nbytes: int, device: torch.device) -> Block:
    """`best_block`, for servers that must all reach it.

    Raises:
        CapabilityError: A worker does not reach this host's memory, or there is not enough of it.
    """
    block = best_block(servers, nbytes, device)
    for server in servers:
        reason = objection(server, block)
        if reason is not None:
            block.close()
            raise CapabilityError(
                f"a worker does not reach the trainer's shared memory: {reason}",
                server=server.url,
                hint="trainer and server must share /dev/shm and the user; else use carrier='filesystem'",
            )
    return block


def gpu_block(nbytes: int, device: torch.device) -> GpuBlock | None:
    """A `GpuBlock`; None where memory of this GPU cannot be shared."""
    try:
        return GpuBlock(nbytes, device)
    except RuntimeError as error:  # containers may forbid CUDA IPC
        _log.info("no memory of this GPU can be shared (%s): payloads go through shared memory", error)
        return None


def objection(server: VLLMServer, block: Block) -> str | None:
    """Why a worker of ``server`` does not read what is in ``block``; None where all do."""
    token = secrets.token_bytes(_HEAD)
    head = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    block.view[:_HEAD].copy_(head)
    if block.view.device.type == "cuda":
        torch.cuda.synchronize(block.view.device)
    try:
        heads = PluginClient(server.request).probe(block.source(), timeout=server.load_timeout)
    except LoraflowError as error:
        if getattr(error, "status", None) != requests.codes.conflict:
            raise
        return str(getattr(error, "reason", error))
    seen = {head for ranks in heads for head in ranks}
    return None if seen == {token.hex()} else "it reads another block of that name (another host?)"

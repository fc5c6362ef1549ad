"""Memory that a trainer of this host has made, mapped into a worker: a block of shared memory, or of the GPU."""

from __future__ import annotations

import base64
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from loraflow_server.errors import PluginError

__all__ = ["SHM_DIR", "Block", "map_gpu", "map_shared"]

SHM_DIR = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory


@dataclass(eq=False)
class Block:
    """A mapped block; ``view`` is its bytes, ``memory`` the mapping where it is in shared memory."""

    identity: tuple[Any, ...]
    view: torch.Tensor
    memory: mmap.mmap | None = None
    pinned: bool = False

    @cached_property
    def words(self) -> memoryview:
        """Its bytes as int64."""
        assert self.memory is not None  # noqa: S101 - flags are in shared memory
        whole = memoryview(self.memory)
        return whole[: len(whole) // 8 * 8].cast("q")

    def close(self) -> None:
        """Let go of it; the mapping itself ends with the last tensor that looks into it."""
        if self.pinned:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.view.data_ptr())
        self.memory = None


def map_shared(path: Path, nbytes: int, known: Block | None = None) -> Block:
    """The block of shared memory ``path``, at least ``nbytes`` large; ``known`` where it is that very one.

    Raises:
        PluginError: ``no_block`` (409): it is not on this host, or not this user's, or too small.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PluginError("no_block", f"{path}: {error.strerror}", status=409) from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise PluginError("no_block", f"{path} is not a block of this user", status=409)
        if info.st_size < nbytes:
            raise PluginError("no_block", f"{path} has {info.st_size} bytes, not {nbytes}", status=409)
        identity = (info.st_dev, info.st_ino, info.st_size)
        if known is not None and known.identity == identity:
            return known
        memory = mmap.mmap(descriptor, info.st_size)
    finally:
        os.close(descriptor)
    return Block(identity, torch.frombuffer(memory, dtype=torch.uint8), memory)


def map_gpu(source: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """The memory of a ``cuda_ipc`` source (`loraflow_server.payload.check_source`); uint8, shape (nbytes,).

    It is unmapped with the last tensor that looks into it.

    Raises:
        PluginError: ``no_block`` (409): it is not on this worker's GPU, or cannot be opened.
    """
    if device.type != "cuda":
        raise PluginError("no_block", "this worker has no GPU", status=409)
    mine = str(torch.cuda.get_device_properties(device).uuid)
    if mine != source["uuid"]:
        raise PluginError("no_block", f"the payload is on GPU {source['uuid']}, this worker on {mine}", status=409)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    try:
        view: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            torch.Tensor,
            (source["nbytes"],),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            device.index or 0,
            base64.b64decode(source["handle"]),
            source["storage_bytes"],
            source["storage_offset"],
            False,  # requires_grad
            base64.b64decode(source["ref_file"]),
            source["ref_offset"],
            base64.b64decode(source["event"]),
            source["event_sync"],
        )
    except (RuntimeError, ValueError) as error:
        raise PluginError("no_block", f"the GPU memory could not be opened: {error}", status=409) from error
    return view

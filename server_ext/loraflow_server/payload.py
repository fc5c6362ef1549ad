"""Payloads that reach a worker without HTTP: a block of shared memory, memory of a GPU that both use, or a broadcast.

Nothing is unpickled: a source is a small JSON object, every field of which is checked. Blocks are mapped once and kept,
since a trainer uses the same one for every version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from loraflow_server.blocks import SHM_DIR, Block, map_gpu, map_shared
from loraflow_server.errors import PluginError
from loraflow_server.group_flag import PATIENCE
from loraflow_server.lines import Lines

__all__ = ["Payloads", "check_block_name", "check_source", "read_folder"]

logger = logging.getLogger("vllm.loraflow.worker")

_BLOCK_NAME = re.compile(r"loraflow-[A-Za-z0-9_.-]{1,100}")
_KEPT, _FLAGS = 2, 8
"""Payload blocks and flags that stay mapped: the memory of a trainer that is gone is freed once others follow."""
_POLL, _SERVER_POLL = 20e-6, 300e-6


def check_source(source: object, limit: int) -> dict[str, Any]:
    """A source as the worker takes it, every field checked.

    ``{"kind": "shm", "name", "nbytes"}`` or ``{"kind": "cuda_ipc", "nbytes", "uuid", "handle", "storage_bytes",
    "storage_offset", "ref_file", "ref_offset", "event", "event_sync"}`` (bytes in base64). Either may have a ``"flag":
    {"name", "serial", "numbers"}``: the payload is not there yet, see `Payloads.bytes_of`. Or ``{"kind": "broadcast",
    "group", "nbytes"}``, over a group that was joined; with a ``"serial"`` where it is not there yet, see
    `loraflow_server.group_flag.GroupFlag`.

    Raises:
        PluginError: ``bad_source``, or ``too_large`` (413).
    """
    if not isinstance(source, dict) or source.get("kind") not in {"shm", "cuda_ipc", "broadcast"}:
        raise PluginError("bad_source", "source.kind is shm, cuda_ipc or broadcast")
    nbytes = source.get("nbytes")
    if type(nbytes) is not int or nbytes <= 0:
        raise PluginError("bad_source", "source.nbytes is a positive number")
    if nbytes > limit:
        raise PluginError("too_large", f"a payload has at most {limit} bytes", status=413)
    if source["kind"] == "broadcast":
        if not isinstance(source.get("group"), str) or not 0 < len(source["group"]) <= 64:
            raise PluginError("bad_source", "source.group is the name of a group, as joining it gave it")
        serial = {"serial": _serial(source, "source")} if "serial" in source else {}
        return {"kind": "broadcast", "group": source["group"], "nbytes": nbytes} | serial
    flag = {"flag": _checked_flag(source["flag"], limit)} if "flag" in source else {}
    if source["kind"] == "shm":
        return {"kind": "shm", "name": check_block_name(source.get("name")), "nbytes": nbytes} | flag
    texts, counts = ("uuid", "handle", "ref_file", "event"), ("storage_bytes", "storage_offset", "ref_offset")
    for key in texts:
        if not isinstance(source.get(key), str) or len(source[key]) > 4096:
            raise PluginError("bad_source", f"source.{key} is a short string")
    for key in counts:
        if type(source.get(key)) is not int or not 0 <= source[key] < 1 << 62:
            raise PluginError("bad_source", f"source.{key} is a count")
    if source["storage_bytes"] < nbytes:
        raise PluginError("bad_source", "source.storage_bytes is less than source.nbytes")
    return (
        {key: source[key] for key in ("kind", "nbytes", *texts, *counts)}
        | flag
        | {"event_sync": bool(source.get("event_sync"))}
    )


def check_block_name(name: object) -> str:
    """A block's name; raises ``bad_source`` for any that trainers do not give."""
    if not isinstance(name, str) or _BLOCK_NAME.fullmatch(name) is None:
        raise PluginError("bad_source", "a block's name is loraflow-… of A-Z a-z 0-9 _ . -")
    return name


def _serial(where: Mapping[str, Any], named: str) -> int:
    serial = where.get("serial")
    if type(serial) is not int or not 0 < serial < 1 << 62:
        raise PluginError("bad_source", f"{named}.serial is a positive number")
    return serial


def _checked_flag(flag: object, limit: int) -> dict[str, Any]:
    if not isinstance(flag, dict):
        raise PluginError("bad_source", "source.flag is an object")
    serial, numbers = _serial(flag, "source.flag"), flag.get("numbers")
    if type(numbers) is not int or not 0 <= numbers <= limit // 8:
        raise PluginError("bad_source", "source.flag.numbers is a count")
    return {"name": check_block_name(flag.get("name")), "serial": serial, "numbers": numbers}


class Payloads:
    """The blocks that a worker has open; the newest few.

    Args:
        device: The worker's device.
        shm_dir: Folder of shared memory.

    Attributes:
        lines: The broadcast groups that it is in.
    """

    def __init__(self, device: torch.device, shm_dir: Path = SHM_DIR) -> None:
        self._device = device
        self._dir = shm_dir
        self._blocks: dict[str, Block] = {}
        self._flags: dict[str, Block] = {}
        self.lines = Lines(device)

    def bytes_of(self, source: Mapping[str, Any]) -> torch.Tensor:
        """The payload's bytes; uint8, shape (nbytes,): on the host for ``shm``, on the device for ``cuda_ipc``.

        A broadcast is received now, for as long as its group's timeout has it (see `Lines.receive`).

        A source with a flag was announced before its payload is there. The flag is a block of shared memory of int64:
        first the serial of the version whose payload is there (negative: that will not come), then ``numbers`` more
        (`numbers_of`). It is waited for, a quarter of a second at most: the engine waits with the worker.

        Raises:
            PluginError: ``no_block`` (409): it is not on this host, or not this user's. ``late`` (409): the payload did
                not come in time. ``called_off``: it will not come.
        """
        if source["kind"] == "broadcast":
            return self.lines.receive(str(source["group"]), int(source["nbytes"]), source.get("serial"))
        if source["kind"] == "shm":
            found = self._shared(self._blocks, str(source["name"]), int(source["nbytes"])).view[: int(source["nbytes"])]
        else:
            found = self._same_gpu(source)
        if "flag" in source:
            self._wait(source["flag"])
        return found

    def numbers_of(self, source: Mapping[str, Any]) -> list[int]:
        """The numbers that came with a payload that was announced, once `bytes_of` has it; int64."""
        flag = source["flag"]
        return self._flag(flag)[1 : 1 + int(flag["numbers"])].tolist()

    def _flag(self, flag: Mapping[str, Any]) -> memoryview:
        return self._shared(self._flags, str(flag["name"]), 8 * (1 + int(flag["numbers"]))).words

    async def arrival(self, source: Mapping[str, Any]) -> None:
        """Wait for a payload that was announced, without an engine that waits with us. Raises as `bytes_of`."""
        if "flag" in source:
            for _ in self._until_there(source["flag"]):
                await asyncio.sleep(_SERVER_POLL)

    def _wait(self, flag: Mapping[str, Any]) -> None:
        for _ in self._until_there(flag):
            time.sleep(_POLL)

    def _until_there(self, flag: Mapping[str, Any]) -> Iterator[None]:
        """Something for each look at a payload that is not there yet."""
        words, serial, deadline = self._flag(flag), int(flag["serial"]), time.monotonic() + PATIENCE
        while (found := words[0]) != serial:
            if found == -serial:
                raise PluginError("called_off", "the version was called off before its payload came")
            if abs(found) > serial or time.monotonic() > deadline:
                raise PluginError("late", f"the payload did not come within {PATIENCE:g} s", status=409)
            yield

    def close(self) -> None:
        """Unmap everything, and leave every group."""
        self.lines.close()
        for block in (*self._blocks.values(), *self._flags.values()):
            block.close()
        self._blocks.clear()
        self._flags.clear()

    def _keep(self, kept: dict[str, Block], key: str, block: Block) -> Block:
        while len(kept) >= (_FLAGS if kept is self._flags else _KEPT):
            kept.pop(next(iter(kept))).close()
        kept[key] = block
        return block

    def _shared(self, kept: dict[str, Block], name: str, nbytes: int) -> Block:
        known = kept.get(name)
        block = map_shared(self._dir / name, nbytes, known)
        if block is known:
            return block
        if known is not None:
            kept.pop(name).close()
        block.pinned = kept is self._blocks and self._pin(block.view)
        return self._keep(kept, name, block)

    def _pin(self, view: torch.Tensor) -> bool:
        if self._device.type != "cuda":
            return False
        failed = int(_cudart().cudaHostRegister(view.data_ptr(), view.numel(), 0))
        if failed:
            logger.warning("loraflow: shared memory could not be pinned (CUDA error %d): copies are slower", failed)
        return not failed

    def _same_gpu(self, source: Mapping[str, Any]) -> torch.Tensor:
        key = f"ipc:{source['handle']}:{source['storage_offset']}"
        known = self._blocks.get(key)
        if known is not None and known.view.numel() == source["nbytes"]:
            return known.view
        if known is not None:
            self._blocks.pop(key).close()
        return self._keep(self._blocks, key, Block((key,), map_gpu(source, self._device))).view


def read_folder(path: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
    """A published adapter as a payload: its tensors in sorted order of names, one after another; 1-D, on the host.

    Raises:
        PluginError: ``bad_file``: its tensors are not those of the layout.
    """
    from safetensors import safe_open

    with safe_open(Path(path) / "adapter_model.safetensors", framework="pt") as file:
        names = sorted(file.keys())
        found = [file.get_slice(name).get_shape() for name in names]
        if [_matrix(shape) for shape in found] != [tuple(shape) for shape in shapes]:
            raise PluginError("bad_file", f"the adapter in {path} has other tensors than were agreed on")
        return torch.cat([file.get_tensor(name).to(dtype).view(-1) for name in names])


def _matrix(shape: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape as a fold counts it: vectors of n are (n, 1)."""
    return tuple(shape) if len(shape) == 2 else (math.prod(shape), 1)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

"""`GroupDesk`: the API server's part of trainers' broadcast groups: who joins what, and for how long it may take."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from loraflow_server import checks
from loraflow_server.beside import beside
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.group_flag import SPARED, GroupFlag

__all__ = ["GroupDesk"]

_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
_LAST_PORT = 65535
_MOST_SECONDS = 240.0
"""The engine waits with its workers, and `loraflow_server.engine.CALL_TIMEOUT` for them."""
_JOIN_SECONDS, _KNOCK_SECONDS, _KNOCK_PAUSE = 30.0, 5.0, 0.02
_KEPT = 2  # groups, as in a worker


class GroupDesk:
    """Lets every worker of a server join the group of one trainer.

    Args:
        engine: The engines.
        lock: Held while anything changes, so that all engines get calls that wait for each other in one order.
    """

    def __init__(self, engine: Engine, lock: asyncio.Lock) -> None:
        self._engine = engine
        self._lock = lock
        self._flags: dict[str, GroupFlag] = {}

    async def join(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have all workers join: ``{"backend", "address", "port", "world_size", "timeout"}`` gives ``{"group"}``.

        ``group`` names it in sources. Before the engine waits for it, the trainer's address is tried from here.

        Raises:
            PluginError: ``bad_request``; ``unreachable`` (409); a worker's, see `loraflow_server.lines.Lines.join`.
        """
        self._need()
        meeting = self._meeting(body)
        await _knock(meeting["address"], meeting["port"])
        listening = beside(
            lambda: GroupFlag.connected(meeting["address"], meeting["port"], _JOIN_SECONDS), name="group"
        )
        group = secrets.token_hex(8)
        async with self._lock:
            try:
                await self._engine.workers("loraflow_group_join", group, meeting)
                flag = await _connected(listening)
            except PluginError:
                await self.end(group)
                raise
        while len(self._flags) >= _KEPT:
            del self._flags[next(iter(self._flags))]
        self._flags[group] = flag
        return {"group": group}

    async def leave(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have all workers leave ``{"group"}``; whether any was in it."""
        self._need()
        group = checks.check_text(body, "group", 64)
        async with self._lock:
            engines = await self.end(group)
        return {"left": any(rank["left"] for ranks in engines for rank in ranks)}

    async def end(self, group: str) -> list[list[dict[str, Any]]]:
        """Have all workers leave; their answers. The lock is held, or nobody waits for the group any more."""
        self._flags.pop(group, None)
        return await self._engine.workers("loraflow_group_leave", group)

    async def arrival(self, group: str, serial: int) -> None:
        """Wait until a payload that was announced is there, while the engine goes on.

        Raises:
            PluginError: ``no_group`` (409), and as `GroupFlag.wait`.
        """
        flag = self._flags.get(group)
        if flag is None:
            raise PluginError("no_group", f"this server is not in the group {group!r}: join again", status=409)
        try:
            await flag.arrival(serial)
        except PluginError as error:
            if error.code not in SPARED:
                await self.end(group)
            raise

    def _need(self) -> None:
        if not self._engine.has_extension or self._engine.api_servers > 1:
            why = "it takes loraflow's worker extension, and one API server"
            raise PluginError("not_capable", f"this server joins no groups: {why}", status=409)

    def _meeting(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the workers need to know, every field checked."""
        backend, address = body.get("backend"), body.get("address")
        if backend not in {"gloo", "nccl"}:
            raise PluginError("bad_request", "backend is gloo or nccl")
        if not isinstance(address, str) or _HOST.fullmatch(address) is None:
            raise PluginError("bad_request", "address is a host name or an address")
        port, world_size, timeout = body.get("port"), body.get("world_size"), body.get("timeout")
        if type(port) is not int or not 0 < port <= _LAST_PORT:
            raise PluginError("bad_request", f"port is a number from 1 to {_LAST_PORT}")
        if type(timeout) not in {int, float} or not 0 < timeout <= _MOST_SECONDS:  # type: ignore[operator]
            raise PluginError("bad_request", f"timeout is a number of seconds, at most {_MOST_SECONDS:g}")
        if type(world_size) is not int or world_size != 1 + self._engine.worker_count:
            raise PluginError(
                "bad_request", f"world_size is {1 + self._engine.worker_count}: the trainer and all workers"
            )
        return {
            "backend": backend,
            "address": address,
            "port": port,
            "world_size": world_size,
            "timeout": timeout,
            "join_timeout": min(_JOIN_SECONDS, float(timeout)),  # type: ignore[arg-type]
        }


async def _knock(address: str, port: int) -> None:
    """Wait until something listens there; a moment at most."""
    deadline = time.monotonic() + _KNOCK_SECONDS
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                _, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError, ValueError) as error:
            if time.monotonic() < deadline:
                await asyncio.sleep(_KNOCK_PAUSE)
                continue
            reason = str(error) or "no answer"
            raise PluginError(
                "unreachable", f"{address}:{port} cannot be reached from here: {reason}", status=409
            ) from (error)
        writer.close()
        return


async def _connected(listening: Future[GroupFlag]) -> GroupFlag:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(listening), _JOIN_SECONDS)
    except TimeoutError as error:
        raise PluginError("join_timeout", "the trainer's store does not answer", status=504) from error
    except RuntimeError as error:  # torch's
        raise PluginError("join_failed", f"{type(error).__name__}: {error}", status=502) from error

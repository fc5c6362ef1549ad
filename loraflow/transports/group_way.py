"""`GroupWay`: payloads to one server over a broadcast group of loraflow's own, the trainer as rank 0.

The worker, and the engine with it, waits in its receive: so the payload is there before the server is called. Then the
call leaves, the broadcast begins beside it, and the answer ends both. Whatever fails ends the group on both sides,
since what is left of an abandoned broadcast must not be taken for the next one; the next payload joins anew.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from loraflow.errors import ConfigError, LoadError, LoraflowError, SyncTimeout
from loraflow.launch import free_port
from loraflow.plugin_client import PluginClient
from loraflow.server import VLLMServer
from loraflow.transports.background import Task, wait_until
from loraflow.transports.groups import GlooGroup, Group, NcclGroup, Pending, address_towards, require_own
from loraflow.transports.wire import Bucket

__all__ = ["Call", "GroupOptions", "GroupWay", "backend_for"]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_log = logging.getLogger(__name__)
_JOIN_SECONDS, _GRACE, _GOODBYE = 30.0, 5.0, 5.0
_LONGEST = 240.0  # that a server lets its engine wait
_LAST_PORT = 65535


@dataclass(frozen=True)
class GroupOptions:
    """Where and how groups are made.

    Attributes:
        host: Address of this host that workers reach; found where None.
        port: Port of the first server's group, of the second's the next one; free ones where None.
        timeout: Seconds for one broadcast.
    """

    host: str | None = None
    port: int | None = None
    timeout: float = 120.0


class Call(Protocol[T_co]):
    """Calls a server for a payload at ``source``, within ``timeout`` seconds; what is returned waits for the answer."""

    def __call__(self, source: Mapping[str, Any], timeout: float) -> Callable[[], T_co]: ...  # noqa: D102 - as above


def backend_for(server: VLLMServer, device: torch.device) -> str:
    """``nccl`` from a GPU to others; ``gloo`` where either side has none, both share one, or vLLM is missing here."""
    gpus = server.info.plugin.status.get("gpus") if server.info.plugin else None
    if device.type != "cuda" or not gpus or importlib.util.find_spec("vllm") is None:
        return "gloo"
    mine = str(torch.cuda.get_device_properties(device).uuid)
    return "gloo" if mine in gpus else "nccl"  # NCCL refuses two ranks on one GPU


class GroupWay:
    """The group of one server.

    Args:
        server: The server.
        workers: How many it has, of all its engines.
        device: Where the trainer's payloads are made, with its index.
        options: Where and how.
        place: The server's number, from which its port follows.

    Attributes:
        backend: ``nccl``, which sends from the trainer's GPU, or ``gloo``, which sends from host memory.
        joined: Whether the next payload finds the group complete, as far as is known here.
    """

    def __init__(
        self, server: VLLMServer, workers: int, device: torch.device, options: GroupOptions, place: int
    ) -> None:
        self.server = server
        self.backend = backend_for(server, device)
        self._world = 1 + workers
        self._device = device
        self._options = options
        self._timeout = min(options.timeout, _LONGEST)
        self._place = place
        self._group: Group | None = None
        self._name = ""  # the server's, of the group
        self._under_way = False  # a payload whose answer was not taken: an interrupt came in between

    @property
    def joined(self) -> bool:
        """See the class."""
        return self._group is not None and not self._under_way

    def join(self) -> None:
        """Make a fresh group, whatever became of an earlier one.

        Raises:
            LoadError: It cannot be made.
            SyncTimeout: It was not complete in time.
        """
        self.close()
        limit = min(_JOIN_SECONDS, self._timeout)
        try:
            group = self._make(limit)
        except RuntimeError as error:  # the port is in use
            raise self._failed(str(error)) from error
        how = {"backend": self.backend, **group.handshake(), "world_size": self._world, "timeout": self._timeout}
        client, patience = PluginClient(self.server.request), limit + _GRACE
        call = Task(lambda: client.join_group(how, timeout=patience), name="group")
        join = Task(group.join, name="join")
        try:
            deadline = time.monotonic() + patience
            wait_until(lambda: call.failed() or join.failed() or (call.done() and join.done()), deadline)
            (join if join.failed() and not call.failed() else call).result(0)
            join.result(0)
            self._name = call.result(0)
        except TimeoutError as error:
            group.close()
            raise SyncTimeout(f"its group was not complete within {patience:g} s", server=self.server.url) from error
        except RuntimeError as error:  # what torch raises for gloo and NCCL
            group.close()
            raise self._failed(str(error)) from error
        except BaseException:
            group.close()
            raise
        self._group = group

    def begin(self, payload: Tensor, call: Call[T]) -> Callable[[], T]:
        """Call the server for ``payload``, and broadcast it; what is returned waits for the answer.

        Args:
            payload: uint8, 1-D, where `backend` sends from, and complete. It is read until the answer is there.
            call: Makes the call.

        Raises:
            LoraflowError: Of the call, of the broadcast, or of joining where the group was left; here, or when the
                answer is taken. The group is left then.
        """
        if not self.joined:
            self.join()
        group = self._group
        assert group is not None  # noqa: S101 - joined
        nbytes, self._under_way = payload.numel(), True
        try:
            # The worker's limit is the shorter one, so that it is its answer that tells.
            limit = self._timeout + self.server.load_timeout
            take = call({"kind": "broadcast", "group": self._name, "nbytes": nbytes}, limit)
        except BaseException:
            self._drop()
            raise

        def send() -> Pending:
            try:
                return group.send(payload, Bucket((), nbytes))
            except BaseException:
                group.close()  # which the workers may notice before their time is up
                raise

        sending = Task(send, name="send")  # in a thread: NCCL may wait for its peers before it returns

        def answer() -> T:
            try:
                found = take()
                self._settle(sending)
            except BaseException:
                self._drop()
                raise
            self._under_way = False
            return found

        return answer

    def close(self) -> None:
        """Leave on both sides; a server that does not answer is left to itself."""
        self._drop()
        name, self._name = self._name, ""
        if name:
            with suppress(LoraflowError):
                PluginClient(self.server.request).leave_group(name, timeout=_GOODBYE)

    # ---------------------------------------------------------------- inside

    def _make(self, limit: float) -> Group:
        options = self._options
        address = require_own(options.host) if options.host else address_towards(self.server.url)
        port = options.port + self._place if options.port else 0
        if port > _LAST_PORT:
            raise ConfigError(f"group_port={options.port} leaves no port for {self.server.url}: each server needs one")
        if self.backend == "gloo":
            return GlooGroup(address, port, self._world, self._timeout)
        return NcclGroup(address, port or free_port(""), self._world, limit, self._device)

    def _settle(self, sending: Task[Pending]) -> None:
        """Wait until the payload may be written again: the workers have it, so that this is but a moment."""
        try:
            pending = sending.result(_GRACE)
            ended = wait_until(pending.done, time.monotonic() + _GRACE)
        except TimeoutError:
            ended = False
        except RuntimeError as error:
            raise self._failed(str(error)) from error
        if not ended:
            raise SyncTimeout("the broadcast did not end with the server's answer", server=self.server.url)

    def _drop(self) -> None:
        group, self._group, self._under_way = self._group, None, False
        if group is not None:
            group.close()

    def _failed(self, reason: str) -> LoadError:
        return LoadError(
            f"its {self.backend} group failed: {reason}",
            server=self.server.url,
            hint="can the server reach this host? group_host and group_port set the address",
        )

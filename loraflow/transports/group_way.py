"""`GroupWay`: payloads to one server over a broadcast group of loraflow's own, the trainer as rank 0.

The worker, and the engine with it, waits in its receive: nobody enters that before the payload is there. Either the
server is called then, and the broadcast begins beside the call; or it was called before (`GroupWay.announce`), and its
workers, which wait for a word in the group's store (`loraflow_server.group_flag`), are told. The answer ends both.
Whatever fails ends the group on both sides, since what is left of an abandoned broadcast must not be taken for the
next one; the next payload joins anew. Only what was announced and never sent leaves the group as it was.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import requests
import torch
from torch import Tensor

from loraflow.errors import ConfigError, LoadError, LoraflowError, SyncTimeout
from loraflow.http_errors import HTTPFailure
from loraflow.launch import free_port
from loraflow.plugin_client import PluginClient
from loraflow.server import VLLMServer
from loraflow.transports.background import Task, wait_until
from loraflow.transports.groups import GlooGroup, NcclGroup, Pending, address_towards, require_own
from loraflow.transports.wire import Bucket
from loraflow_server import group_flag

__all__ = ["Call", "GroupOptions", "GroupWay", "backend_for"]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_log = logging.getLogger(__name__)
_JOIN_SECONDS, _GRACE, _GOODBYE = 30.0, 5.0, 5.0
_LONGEST = 240.0  # that a server lets its engine wait
_LAST_PORT = 65535
_LAUNCH = 0.01
"""Seconds that a broadcast has to get going before this thread goes on: the two share the interpreter."""


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
        awaited: Whether the server was called for a payload that is still to come (`announce`).
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
        self._group: GlooGroup | NcclGroup | None = None
        self._name = ""  # the server's, of the group
        self._under_way = False  # a payload whose answer was not taken: an interrupt came in between
        self._sending: Task[Pending] | None = None  # that payload
        self._serial = 0  # of what was announced last in this group
        self.awaited = False

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
        self._group, self._serial = group, 0

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
        answer = self._called(call, {"nbytes": payload.numel()})
        self._launch(payload)
        return answer

    def announce(self, nbytes: int, call: Call[T]) -> Callable[[], T]:
        """`begin` for a payload of ``nbytes`` that is still to come, over a group that is joined.

        `send` or `call_off` follows, then the answer is taken. The server's workers wait for either, a quarter of a
        second at most; their answer is ``late`` then, and what is sent goes nowhere.
        """
        group = self._group
        assert group is not None  # noqa: S101 - joined
        if self._serial:
            group_flag.forget(group.store, self._serial)
        self._serial += 1
        self.awaited = True
        return self._called(call, {"nbytes": nbytes, "serial": self._serial})

    def send(self, payload: Tensor) -> None:
        """What was announced is there: tell the workers, and broadcast it, unless they have given up on it.

        Args:
            payload: As for `begin`.
        """
        if self._said(group_flag.THERE) == group_flag.THERE:
            self._launch(payload)

    def call_off(self) -> None:
        """What was announced will not come: release the workers."""
        self._said(group_flag.OFF)

    def close(self) -> None:
        """Leave on both sides; a server that does not answer is left to itself."""
        self._drop()
        name, self._name = self._name, ""
        if name:
            with suppress(LoraflowError):
                PluginClient(self.server.request).leave_group(name, timeout=_GOODBYE)

    # ---------------------------------------------------------------- inside

    def _called(self, call: Call[T], what: Mapping[str, Any]) -> Callable[[], T]:
        self._under_way, self._sending = True, None
        try:
            # The worker's limit is the shorter one, so that it is its answer that tells.
            limit = self._timeout + self.server.load_timeout
            take = call({"kind": "broadcast", "group": self._name, **what}, limit)
        except BaseException:
            self._drop()
            raise

        def answer() -> T:
            try:
                found = take()
                self._settle()
            except BaseException as error:
                refused = isinstance(error, HTTPFailure) and error.status < requests.codes.server_error
                if self._sending is not None or self.awaited or not refused:
                    self._drop()
                self._under_way = False
                raise
            self._under_way = False
            return found

        return answer

    def _launch(self, payload: Tensor) -> None:
        """Begin to broadcast; in a thread, since NCCL may wait for its peers before it returns."""
        group = self._group
        assert group is not None  # noqa: S101 - joined

        def send() -> Pending:
            try:
                return group.send(payload, Bucket((), payload.numel()))
            except BaseException:
                group.close()  # which the workers may notice before their time is up
                raise

        self._sending = Task(send, name="send")
        self._sending.wait(_LAUNCH)

    def _said(self, word: str) -> str:
        self.awaited = False
        group = self._group
        assert group is not None  # noqa: S101 - nothing is announced otherwise
        return group_flag.say(group.store, self._serial, word)

    def _make(self, limit: float) -> GlooGroup | NcclGroup:
        options = self._options
        address = require_own(options.host) if options.host else address_towards(self.server.url)
        port = options.port + self._place if options.port else 0
        if port > _LAST_PORT:
            raise ConfigError(f"group_port={options.port} leaves no port for {self.server.url}: each server needs one")
        if self.backend == "gloo":
            return GlooGroup(address, port, self._world, self._timeout)
        return NcclGroup(address, port or free_port(""), self._world, limit, self._device)

    def _settle(self) -> None:
        """Wait until the payload may be written again: the workers have it, so that this is but a moment."""
        if self._sending is None:
            raise LoadError("it answered before anything was sent", server=self.server.url)
        try:
            pending = self._sending.result(_GRACE)
            ended = wait_until(pending.done, time.monotonic() + _GRACE)
        except TimeoutError:
            ended = False
        except RuntimeError as error:
            raise self._failed(str(error)) from error
        if not ended:
            raise SyncTimeout("the broadcast did not end with the server's answer", server=self.server.url)

    def _drop(self) -> None:
        group, self._group, self._under_way, self.awaited = self._group, None, False, False
        if group is not None:
            group.close()

    def _failed(self, reason: str) -> LoadError:
        return LoadError(
            f"its {self.backend} group failed: {reason}",
            server=self.server.url,
            hint="can the server reach this host? group_host and group_port set the address",
        )

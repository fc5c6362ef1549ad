"""`Lines`: the broadcast groups that a worker is in, rank 0 of each a trainer; and the payload that came last.

They are loraflow's own, apart from vLLM's ``--weight-transfer-config``. Whatever fails on a line ends it: bytes of an
abandoned broadcast must not be taken for those of the next one. The trainer joins anew then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from loraflow_server.addresses import address_towards
from loraflow_server.beside import beside
from loraflow_server.collective import GlooLine, NcclLine
from loraflow_server.errors import PluginError
from loraflow_server.group_flag import SPARED, GroupFlag, Pulse
from loraflow_server.unique_id import CheckedStore

__all__ = ["Lines", "Meeting"]

logger = logging.getLogger("vllm.loraflow.worker")

_c10d: Any = torch.distributed  # bindings that its stubs leave out
_KEPT = 2
"""Groups that stay joined: that of a trainer that is gone is left once others follow."""


@dataclass(frozen=True)
class Meeting:
    """How to join a trainer's group.

    Attributes:
        backend: ``nccl`` or ``gloo``.
        address: Host of the trainer's store, as this worker reaches it.
        port: Its port.
        rank: This worker's; the trainer is 0.
        world_size: Trainer and workers of all engines.
        join_timeout: Seconds for joining.
        timeout: Seconds for one broadcast.
    """

    backend: str
    address: str
    port: int
    rank: int
    world_size: int
    join_timeout: float
    timeout: float


@dataclass(frozen=True)
class _Joined:
    """A group that this worker is in, and what its trainer says there of payloads that are still to come."""

    line: NcclLine | GlooLine
    flag: GroupFlag


class Lines:
    """The groups of one worker; the newest few.

    Args:
        device: The worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lines: dict[str, _Joined] = {}
        self._buffer: torch.Tensor | None = None

    def join(self, group: str, meeting: Meeting) -> None:
        """Join a trainer's group, which is called ``group`` from then on.

        Raises:
            PluginError: ``no_gpu``, ``no_nccl`` (409); ``join_failed`` (502); ``join_timeout`` (504).
        """
        while len(self._lines) >= _KEPT:
            self.leave(next(iter(self._lines)))
        make = self._nccl if meeting.backend == "nccl" else self._gloo
        self._lines[group] = _within(meeting.join_timeout, lambda: make(meeting))

    def receive(self, group: str, nbytes: int, serial: int | None = None) -> torch.Tensor:
        """The next payload of a group; uint8, shape (nbytes,), on the device over NCCL, on the host over gloo.

        In memory that is kept, and filled again by the next one.

        Args:
            group: As it was joined.
            nbytes: The payload's size.
            serial: That of a payload which was announced: its trainer's word on it is waited for, then the payload.

        Raises:
            PluginError: ``no_group`` (409): it is not joined, or was left after a failure. ``broadcast_failed`` (502),
                ``broadcast_timeout`` (504): it is left. ``late`` (409), ``called_off``: it is not, see `GroupFlag`.
        """
        joined = self._lines.get(group)
        if joined is None:
            raise PluginError("no_group", f"this worker is not in the group {group!r}: join again", status=409)
        line = joined.line
        try:
            buffer = self._room(nbytes, on_device=isinstance(line, NcclLine))
            if serial is not None:
                joined.flag.wait(serial)
            line.receive(buffer).settle()
        except PluginError as error:
            if error.code not in SPARED:
                self.leave(group)
            raise
        except Exception as error:
            self.leave(group)
            raise PluginError("broadcast_failed", f"the broadcast broke off: {error}", status=502) from error
        return buffer

    def leave(self, group: str) -> bool:
        """Leave a group, whatever is under way there; False where this worker was not in it."""
        joined = self._lines.pop(group, None)
        if joined is not None:
            joined.line.close()
        if not self._lines:
            self._buffer = None
        return joined is not None

    def close(self) -> None:
        """Leave all."""
        for group in list(self._lines):
            self.leave(group)

    def _room(self, nbytes: int, *, on_device: bool) -> torch.Tensor:
        kind = self._device.type if on_device else "cpu"
        if self._buffer is None or self._buffer.numel() != nbytes or self._buffer.device.type != kind:
            self._buffer = None  # before its successor is taken
            pinned = not on_device and self._device.type == "cuda"
            place = self._device if on_device else torch.device("cpu")
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=place, pin_memory=pinned)
        return self._buffer

    def _nccl(self, meeting: Meeting) -> _Joined:
        if self._device.type != "cuda":
            raise PluginError("no_gpu", "NCCL needs GPUs, and this worker has none", status=409)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        with torch.cuda.device(self._device):
            peers = StatelessProcessGroup.create(
                meeting.address,
                meeting.port,
                meeting.rank,
                meeting.world_size,
                store_timeout=max(1, int(meeting.join_timeout)),
            )
            store = peers.store
            peers.store = CheckedStore(store)
            communicator = PyNcclCommunicator(peers, device=self._device)
        if communicator.disabled:
            raise PluginError("no_nccl", "this worker cannot load NCCL", status=409)
        line = NcclLine(communicator, self._device, meeting.timeout, alive=Pulse(store))
        return _Joined(line, GroupFlag(store))

    def _gloo(self, meeting: Meeting) -> _Joined:
        host, port, joining = meeting.address, meeting.port, timedelta(seconds=meeting.join_timeout)
        store = _c10d.TCPStore(host, port, None, is_master=False, timeout=joining, wait_for_workers=False)
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=meeting.timeout)
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
        group = _c10d.ProcessGroupGloo(_c10d.PrefixStore("loraflow", store), meeting.rank, meeting.world_size, options)
        return _Joined(GlooLine(group, meeting.timeout), GroupFlag(store))


def _within(seconds: float, make: Callable[[], _Joined]) -> _Joined:
    """What ``make`` gives, if it does so in time: NCCL waits for a trainer that died for ever.

    It is left to itself otherwise, in its thread; what it gives then is closed.
    """
    found = beside(make, name="join", unwanted=lambda joined: joined.line.close())
    try:
        return found.result(seconds)
    except PluginError:
        raise
    except Exception as error:
        if found.cancel():
            raise PluginError("join_timeout", f"the group was not complete within {seconds:g} s", status=504) from error
        failure = found.exception()
        if failure is None:  # at the last moment
            return found.result()
        raise PluginError("join_failed", f"{type(failure).__name__}: {failure}", status=502) from error

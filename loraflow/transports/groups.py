"""The trainer's end of a broadcast: one group per server and carrier, the trainer as rank 0.

One group per server, not one for all: a server that hangs or dies takes down its own group only, so the others get the
version (and can be withdrawn from) while it is set aside. The price is that bytes leave the trainer once per server.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

from loraflow.errors import CapabilityError, ConfigError
from loraflow.transports.wire import Bucket

_c10d: Any = torch.distributed  # bindings that its stubs leave out
_cuda: Any = torch.cuda

__all__ = ["GlooGroup", "Group", "IpcGroup", "NcclGroup", "Pending", "address_towards", "require_own"]

_leaving: dict[int, threading.Thread] = {}
"""Groups of this process that are being left, by the port that they still hold."""


class Pending(Protocol):
    """A broadcast under way."""

    def done(self) -> bool:
        """Whether it has ended; raises where it failed."""
        ...


class Group(Protocol):
    """One carrier to one server. What it does not say otherwise, a carrier has no need of.

    Attributes:
        device: Where buckets must lie.
        buffers: Buckets that may be under way at once.
    """

    device: torch.device
    buffers: int

    def handshake(self) -> dict[str, Any]:
        """What the server's workers need to join, beyond the packing."""
        return {}

    def join(self) -> None:
        """Wait for the workers; blocks, at most for the group's timeout where the carrier has one."""
        return

    def send(self, buffer: Tensor, bucket: Bucket) -> Pending:
        """Start to send ``buffer`` (uint8), which holds ``bucket``."""
        ...

    def stamp(self) -> dict[str, Any]:
        """What the announcement of an update that vLLM loads carries for this carrier beyond the tensors."""
        return {}

    def stamp_straight(self) -> dict[str, Any]:
        """The same of an update that the workers write to where it is served (`PluginClient.weights_receive`)."""
        return {}

    def confirm(self, phase: str, timeout: float) -> None:  # noqa: ARG002 - for those who can ask
        """Have every worker say that ``received`` or ``finished`` went well, where the carrier has a way to ask.

        Raises:
            RuntimeError: A worker gave another reason, or none in time.
        """
        return

    def leave(self) -> None:
        """Have the workers leave, where vLLM's own way to does not do it."""
        return

    def close(self) -> None:
        """Leave; never blocks."""
        ...


def address_towards(url: str) -> str:
    """This machine's address on the route to the server at ``url``: never a wildcard, loopback only for loopback."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # datagrams: nothing is sent
        return str(probe.getsockname()[0])


def require_own(address: str) -> str:
    """``address``, where this machine can listen on it; `ConfigError` otherwise, instead of a wait for nobody."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        raise ConfigError(
            f"group_host={address!r} is not an address of this host ({error})",
            hint="leave it out, or name the address of an interface that the servers reach",
        ) from error
    return address


def _leave(port: int, work: Callable[[], object], name: str, *, daemon: bool) -> None:
    """Run ``work``, which frees ``port`` and can block while a peer hangs, in a thread of its own."""
    thread = _leaving[port] = threading.Thread(target=work, name=f"loraflow-{name}-close", daemon=daemon)
    thread.start()


def _await_port(port: int, timeout: float) -> None:
    """Wait until an earlier group of this process has let go of ``port``."""
    thread = _leaving.pop(port, None)
    if thread is not None:
        thread.join(timeout)


# ---------------------------------------------------------------- gloo


class _GlooPending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises where it failed
        return True


class GlooGroup(Group):
    """A gloo process group over a TCP store of the trainer; needs no vLLM here, and loraflow's plugin there.

    Args:
        address: This host, as the workers reach it.
        port: Port of the store; 0 takes a free one.
        world_size: Trainer and workers.
        timeout: Seconds for joining, and for one collective.
    """

    buffers = 2
    device = torch.device("cpu")

    def __init__(self, address: str, port: int, world_size: int, timeout: float) -> None:
        self._address, self._world = address, world_size
        self._limit = timedelta(seconds=timeout)
        _await_port(port, timeout)
        self._store: Any = _c10d.TCPStore(
            address, port, None, is_master=True, timeout=self._limit, wait_for_workers=False
        )
        self._group: Any = None
        self._update = 0

    @property
    def store(self) -> Any:
        """The store that the workers are connected to."""
        return self._store

    def handshake(self) -> dict[str, Any]:
        """Where the store is."""
        return {"address": self._address, "port": self._store.port}

    def stamp(self) -> dict[str, Any]:
        """The number under which the workers answer."""
        self._update += 1
        return {"update": self._update}

    def confirm(self, phase: str, timeout: float) -> None:
        """Read every worker's word from the store: vLLM's answer is that of one engine, and its errors are lost."""
        keys = [f"{phase}/{self._update}/{rank}" for rank in range(1, self._world)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            silent = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
            raise RuntimeError(f"timed out: no word from worker rank {', '.join(silent)} on {phase!r}") from error
        said = {key.rpartition("/")[2]: self._store.get(key).decode() for key in keys}
        failed = [f"worker rank {rank}: {word}" for rank, word in said.items() if word != "ok"]
        if failed:
            raise RuntimeError("; ".join(failed))

    def join(self) -> None:
        """Connect to every worker."""
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = self._limit
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._address)]
        self._group = _c10d.ProcessGroupGloo(_c10d.PrefixStore("loraflow", self._store), 0, self._world, options)

    def send(self, buffer: Tensor, bucket: Bucket) -> Pending:
        """Broadcast from rank 0."""
        return _GlooPending(self._group.broadcast(buffer[: bucket.nbytes], 0))

    def close(self) -> None:
        """Drop the group; a collective still under way is left to its timeout, in a thread of its own.

        Not a daemon: an interpreter that exits in the middle of gloo's destructor aborts.
        """
        if self._store is not None:
            held, port = [self._group, self._store], self._store.port
            self._group = self._store = None
            _leave(port, held.clear, "gloo", daemon=False)


# ---------------------------------------------------------------- nccl


class _StreamPending:
    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


class NcclGroup(Group):
    """vLLM's own NCCL communicator; needs vLLM beside the trainer, as TRL does.

    Args:
        address: This host, as the workers reach it.
        port: Port of the store.
        world_size: Trainer and workers.
        timeout: Seconds for the store; NCCL itself has no timeout, the caller watches.
        device: The trainer's GPU, with its index.

    Raises:
        CapabilityError: vLLM or a GPU is missing here.
    """

    buffers = 2

    def __init__(self, address: str, port: int, world_size: int, timeout: float, device: torch.device) -> None:
        if device.type != "cuda" or device.index is None:
            raise CapabilityError(
                "nccl sends from GPU memory",
                expected="a base model on cuda:N",
                found=str(device),
                hint="move the model to a GPU, or use carrier='gloo' with a server of that backend",
            )
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            raise CapabilityError(
                f"the nccl carrier uses vLLM's communicator, and vLLM cannot be imported here ({error})",
                hint="pip install \"loraflow[vllm]\" in the trainer's environment, or use transport='adapter'",
            ) from error
        self.device = device
        self._address, self._port, self._world, self._timeout = address, port, world_size, timeout
        self._meet: Callable[[], Any] = lambda: StatelessProcessGroup.create(
            address, port, 0, world_size, store_timeout=max(1, int(timeout))
        )
        self._connect: Callable[[Any], Any] = lambda peers: PyNcclCommunicator(peers, device=device)
        self._peers: Any = None
        self._communicator: Any = None
        self._stream = _cuda.Stream(device)

    @property
    def store(self) -> Any:
        """The store that the workers are connected to, once joined."""
        return self._peers.store

    def handshake(self) -> dict[str, Any]:
        """Where the store is."""
        return {"address": self._address, "port": self._port}

    def join(self) -> None:
        """Open the store, and the communicator once every worker is there."""
        _await_port(self._port, self._timeout)
        with torch.cuda.device(self.device):
            peers = self._meet()
            self._communicator = self._connect(peers)
        self._peers = peers

    def send(self, buffer: Tensor, bucket: Bucket) -> Pending:
        """Broadcast on a stream of its own, behind what was queued on the current one."""
        event = _cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._communicator.broadcast(buffer[: bucket.nbytes], src=0, stream=self._stream)
            event.record(self._stream)
        return _StreamPending(event)

    def close(self) -> None:
        """Abort the communicator, in a thread of its own: that can block while a peer hangs."""
        communicator, self._communicator, self._peers = self._communicator, None, None
        if communicator is not None:
            _leave(self._port, communicator.destroy, "nccl", daemon=True)


# ---------------------------------------------------------------- ipc


class IpcGroup(Group):
    """CUDA IPC to a server on the trainer's own GPU: the call that carries a bucket's handle is the transfer.

    Args:
        post: Sends one body of ``/update_weights`` and waits for the answer.
        announce: The body for one bucket, without the handle.
        device: The trainer's GPU, with its index.
    """

    buffers = 1  # the server maps one exported buffer per update, and reads it before it answers

    def __init__(
        self,
        post: Callable[[dict[str, Any]], Pending],
        announce: Callable[[Bucket], dict[str, Any]],
        device: torch.device,
    ) -> None:
        if device.type != "cuda" or device.index is None:
            raise CapabilityError(
                "ipc shares GPU memory", expected="a base model on cuda:N", found=str(device), hint="use carrier='gloo'"
            )
        self.device = device
        self._post, self._announce = post, announce
        self._exported: tuple[int, Any] | None = None

    def send(self, buffer: Tensor, bucket: Bucket) -> Pending:
        """Hand the buffer over; exported once, whatever the number of buckets."""
        from torch.multiprocessing import reductions

        share: Any = reductions.reduce_tensor
        if self._exported is None or self._exported[0] != buffer.data_ptr():
            self._exported = (buffer.data_ptr(), share(buffer)[1])
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        handle = base64.b64encode(pickle.dumps({uuid: self._exported[1]})).decode()
        torch.cuda.current_stream(self.device).synchronize()
        return self._post({**self._announce(bucket), "ipc_handles_pickled": handle})

    def close(self) -> None:
        """Forget the exported buffer."""
        self._exported = None

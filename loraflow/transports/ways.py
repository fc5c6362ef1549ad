"""`Ways`: how payloads get to each server, settled when it is reached: memory of this host, a broadcast, or HTTP.

Where memory does not reach, what is faster is measured, not guessed: the payload's bytes once through each.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import requests
import torch
from blake3 import blake3

from loraflow.digest import SlotDigest
from loraflow.errors import CapabilityError, LoraflowError
from loraflow.plugin_client import PluginClient, begin_probe, begin_upload_probe
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.blocks import Block, best_block, objection
from loraflow.transports.filesystem import FilesystemTransport
from loraflow.transports.group_way import Call, GroupOptions, GroupWay
from loraflow.transports.install import Payload
from loraflow.transports.ready_flag import ReadyFlag, settle_device, waits_for_payloads

__all__ = ["DirectWay", "Ways"]

T = TypeVar("T")
DirectWay = Literal["auto", "shared", "upload", "broadcast"]

_log = logging.getLogger(__name__)
_LOOKS, _LOOK_SECONDS = 5, 0.2
_RUNS = 3  # of each way; the first ones connect, and take memory
_HEAD = 16


class Ways:
    """The ways to all servers, and the memory that payloads travel from.

    Args:
        store: Where versions are published; servers must see it.
        files: Knows where they see it.
        device: Where payloads are made.
        far: URLs of servers on other hosts.
        way: See `SyncConfig.direct_way`.
        groups: How broadcast groups are made.

    Attributes:
        block: Memory for the servers on this host; None where there are none.
    """

    def __init__(
        self,
        store: AdapterStore,
        files: FilesystemTransport,
        device: torch.device,
        *,
        far: Collection[str] = (),
        way: DirectWay = "auto",
        groups: GroupOptions | None = None,
    ) -> None:
        self.block: Block | None = None
        self._store = store
        self._files = files
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
        self._far = frozenset(far)
        self._way = way
        self._options = groups or GroupOptions()
        self._uploads: set[str] = set()
        self._groups: dict[str, GroupWay] = {}
        self._places: dict[str, int] = {}  # each server's, from the first port on; kept when it is joined anew
        self._host: torch.Tensor | None = None
        self._nbytes = 0
        self._flag: ReadyFlag | None = None
        self._announced: dict[str, object] | None = None  # the block as the place of what is still to come

    def open(self, servers: Sequence[VLLMServer], nbytes: int) -> None:
        """Take memory for payloads of ``nbytes`` for the servers that read them from here."""
        near = [server for server in servers if self._why_not_shared(server) is None]
        self._nbytes = nbytes
        if near:
            self.block = best_block(near, nbytes, self._device)
            self._flag = ReadyFlag()

    def reach(self, server: VLLMServer, digest: SlotDigest) -> None:
        """Settle how payloads get to ``server``, anew where it was settled before.

        Raises:
            CapabilityError: In no way that is allowed; or it does not see the folder that versions are published in.
        """
        self._forget(server)
        why = self._why_not_shared(server)
        if why is None and self.block is not None:
            found = objection(server, self.block)
            if found is None:
                return
            why = found
        why = why or "there is no memory for it here"
        if self._way == "shared" or (self._way != "broadcast" and not self._can(server, "upload")):
            raise CapabilityError(
                f"a worker does not reach the trainer's shared memory: {why}",
                server=server.url,
                hint="trainer and server must share /dev/shm and the user; else use direct_way='auto', or "
                "carrier='filesystem'",
            )
        self._require_folder(server)
        if self._way == "upload":
            self._upload(server, why)
        else:
            self._choose(server, digest, why)

    def may_announce(self, servers: Sequence[VLLMServer]) -> bool:
        """Whether all ``servers`` can be called before their payload is there: by memory, or over a group that stands.

        Not where the payload travels in the call, nor where a server is one of before such calls.
        """
        return all(map(self._may_announce, servers))

    def announce(self) -> None:
        """The next payload is still to come: `begin` calls servers for it, `put` or `call_off` follows."""
        settle_device(self._device)
        block, flag = self.block, self._flag
        self._announced = {} if block is None or flag is None else flag.announced(block.source())

    def begin(self, server: VLLMServer, call: Call[T]) -> Callable[[], T]:
        """Call ``server`` for what was announced; what is returned waits for the answer."""
        way = self._groups.get(server.url)
        if way is not None:
            return way.announce(self._nbytes, call)
        assert self._announced  # noqa: S101 - by memory, else
        return call(self._announced, server.load_timeout)

    def call_off(self) -> None:
        """What was announced will not come: release the workers."""
        self._announced = None
        if self._flag is not None:
            self._flag.call_off()
        for way in self._groups.values():
            if way.awaited:
                way.call_off()

    def put(self, flat: torch.Tensor, servers: Sequence[VLLMServer]) -> Payload:
        """Bring a payload to where ``servers`` get it from; those that were called for it already are told.

        Args:
            flat: Its bytes; uint8, 1-D, on the device. Servers may read it until they have answered.
            servers: Which.
        """
        for server in servers:
            self._join_again(server)
        uploads = frozenset(server.url for server in servers if server.url in self._uploads)
        groups = {server.url: self._groups[server.url] for server in servers if server.url in self._groups}
        block = self.block
        if block is not None:
            block.put(flat)
        source = None if block is None else block.source()
        host = None
        if uploads or any(way.backend == "gloo" for way in groups.values()):
            host = block.view if block is not None and block.view.device.type == "cpu" else self._on_host(flat)
        if groups:
            settle_device(self._device)
        if self._announced is not None:
            self._announced = None
            if self._flag is not None:
                self._flag.payload_is_there()
            for way in groups.values():
                if way.awaited:
                    way.send(self._sent_by(way, flat, host))
        sends = {url: partial(way.begin, self._sent_by(way, flat, host)) for url, way in groups.items()}
        data = None if host is None or not uploads else host.numpy().data
        hashed = "" if data is None else blake3(data, max_threads=blake3.AUTO).hexdigest()
        return Payload(source, data, hashed, uploads, sends)

    def close(self) -> None:
        """Leave every group, and free the block; workers that wait give up."""
        for way in self._groups.values():
            way.close()
        self._groups.clear()
        self._uploads.clear()
        if self._flag is not None:
            self._flag.close()
            self._flag = None
        if self.block is not None:
            self.block.close()
            self.block = None

    # ---------------------------------------------------------------- which way

    def _may_announce(self, server: VLLMServer) -> bool:
        way = self._groups.get(server.url)
        if way is not None:
            return way.joined and self._can(server, "group_announced")
        return self.block is not None and server.url not in self._uploads and waits_for_payloads(server)

    def _why_not_shared(self, server: VLLMServer) -> str | None:
        if self._way in {"upload", "broadcast"}:
            return f"direct_way={self._way!r} was asked for"
        return "it is on another host" if server.url in self._far else None

    def _choose(self, server: VLLMServer, digest: SlotDigest, why: str) -> None:
        """A broadcast or HTTP, whichever takes less time now; why is told in one line."""
        try:
            way = self._joined(server, digest)
            broadcast = self._time_broadcast(way, digest.copy.nbytes)
        except LoraflowError as error:
            self._forget(server)
            if self._way == "broadcast":
                raise CapabilityError(
                    f"payloads cannot be broadcast to it: {error.message}",
                    server=server.url,
                    hint=error.hint or "direct_way='auto' takes HTTP then",
                ) from error
            self._upload(server, f"{why}, and a broadcast cannot be used: {error.message}")
            return
        size = f"{digest.copy.nbytes / 1e6:.1f} MB"
        said = f"{size} took {broadcast * 1e3:.1f} ms over {way.backend}"
        if self._way == "auto":
            try:
                upload = self._time_upload(server, digest)
            except LoraflowError as error:  # a proxy that takes no large bodies, say
                upload = float("inf")
                said += f", and HTTP cannot be used: {error.message}"
            else:
                said += f", {upload * 1e3:.1f} ms over HTTP"
            if upload < broadcast:
                self._forget(server)
                self._upload(server, f"{why}, and {said}")
                return
        _log.info("%s gets payloads by broadcast, not through shared memory: %s, and %s", server.url, why, said)

    def _joined(self, server: VLLMServer, digest: SlotDigest) -> GroupWay:
        if not self._can(server, "group"):
            raise CapabilityError(
                "its plugin knows no broadcast groups", server=server.url, hint="update loraflow there"
            )
        workers = digest.layout.engines * len(digest.layout.ranks)
        place = self._places.setdefault(server.url, len(self._places))
        way = self._groups[server.url] = GroupWay(server, workers, self._device, self._options, place)
        way.join()
        return way

    def _join_again(self, server: VLLMServer) -> None:
        """A group that a failure has ended is joined anew; where that fails, HTTP is taken if it may be."""
        way = self._groups.get(server.url)
        if way is None or way.joined or way.awaited or self._way == "broadcast":  # that joins, or fails, by itself
            return
        try:
            way.join()
        except LoraflowError as error:
            self._forget(server)
            self._upload(server, f"its group cannot be joined anew: {error.message}")

    def _upload(self, server: VLLMServer, why: str) -> None:
        level = logging.INFO if self._way == "upload" else logging.WARNING
        _log.log(level, "%s gets payloads over HTTP, not through shared memory: %s", server.url, why)
        self._uploads.add(server.url)

    def _forget(self, server: VLLMServer) -> None:
        self._uploads.discard(server.url)
        way = self._groups.pop(server.url, None)
        if way is not None:
            way.close()

    @staticmethod
    def _can(server: VLLMServer, capability: str) -> bool:
        return server.info.plugin is not None and capability in server.info.plugin.capabilities

    def _require_folder(self, server: VLLMServer) -> None:
        if not self._folder_seen_by(server):
            raise CapabilityError(
                f"the server does not see the folder {self._store.path()}, from which it reads evicted adapters",
                server=server.url,
                hint="set adapter_root to a folder that both mount (server_adapter_root where the server mounts it "
                "elsewhere), or carrier='filesystem' with a URL",
            )

    def _folder_seen_by(self, server: VLLMServer) -> bool:
        mark = Path(self._store.path()) / f".draft-{secrets.token_hex(8)}"  # swept like any draft, if it stays
        mark.touch()
        try:
            client, path = PluginClient(server.request), self._files.seen_by_server(str(mark))
            for _ in range(_LOOKS):
                if client.sees(path):
                    return True
                time.sleep(_LOOK_SECONDS)  # a network file system shows new files late
        except HTTPFailure as error:
            if error.status != requests.codes.forbidden:
                raise
        finally:
            mark.unlink()
        return False

    # ---------------------------------------------------------------- what they cost

    def _time_broadcast(self, way: GroupWay, nbytes: int) -> float:
        """Seconds of a broadcast of ``nbytes`` that the workers drop; whether it arrives is looked at, too."""
        flat = self._probe(nbytes)

        def send() -> None:
            payload = self._sent_by(way, flat, self._on_host(flat) if way.backend == "gloo" else None)
            settle_device(self._device)
            heads = way.begin(payload, partial(begin_probe, way.server))()
            wanted = bytes(flat[:_HEAD].tolist()).hex()
            if {head for ranks in heads for head in ranks} != {wanted}:
                raise LoraflowError("a worker received something else than was sent", server=way.server.url)

        return _least(send)

    def _time_upload(self, server: VLLMServer, digest: SlotDigest) -> float:
        """Seconds of the same payload in the body of a call."""
        flat = self._probe(digest.copy.nbytes)

        def send() -> None:
            host = self._on_host(flat).numpy().data
            hashed = blake3(host, max_threads=blake3.AUTO).hexdigest()
            begin_upload_probe(server, layout_id=digest.layout.layout_id, payload=host, blake3=hashed)()

        return _least(send)

    def _probe(self, nbytes: int) -> torch.Tensor:
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        flat[:_HEAD] = torch.tensor(list(secrets.token_bytes(_HEAD)), dtype=torch.uint8)
        return flat

    @staticmethod
    def _sent_by(way: GroupWay, flat: torch.Tensor, host: torch.Tensor | None) -> torch.Tensor:
        return flat if way.backend == "nccl" or host is None else host

    def _on_host(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy in memory that is kept, and pinned where it comes from a GPU; ``flat`` itself where it is there."""
        if flat.device.type == "cpu":
            return flat
        if self._host is None:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        return self._host.copy_(flat)


def _least(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)

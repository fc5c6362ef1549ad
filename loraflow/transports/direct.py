"""The direct carrier: from the trainer's GPU through shared memory (or CUDA IPC) straight into LoRA slots.

One copy gathers the adapter, one casts and scales it as served, one brings it to a block that the servers on this host
have mapped, and one call has every worker fill a slot of a new name and checksum what lies there. The call leaves
before the payload is gathered: the workers see in shared memory when it is there. To a server on another host the same
bytes travel in the call. The published file follows behind it, for eviction and restarts; the next version waits until
it is there.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import requests
import torch
from blake3 import blake3

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.adapter_files import adapter_files
from loraflow.digest import Agreements, SlotDigest
from loraflow.errors import CapabilityError, LoraflowError, PublishError
from loraflow.layout import ServingCopy
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore, Published
from loraflow.transports.base import Delivered, Delivery
from loraflow.transports.blocks import Block, best_block, objection
from loraflow.transports.filesystem import FilesystemTransport
from loraflow.transports.install import Installation, Payload
from loraflow.transports.ready_flag import ReadyFlag, settle_device, waits_for_payloads

__all__ = ["DirectTransport"]

_log = logging.getLogger(__name__)

_LOOKS, _LOOK_SECONDS = 5, 0.2
_HEAD_START = 0.02
"""Seconds that publishing waits before it begins: two threads share the interpreter, and the delivery that it follows
is proven and committed first."""


class DirectTransport:
    """The ``direct`` carrier.

    Args:
        store: Where versions are published, behind the delivery. A folder, not a URL: vLLM reads evicted adapters
            from it by itself.
        spec: The adapter.
        server_root: The store's root as the servers see it, where that differs.
        device: Where the snapshots are.
        far: URLs of servers on other hosts, which shared memory does not reach.
        publish_timeout: Seconds that a version's publishing may hold up the next one.
    """

    kind: Literal["adapter"] = "adapter"
    name = "direct"

    def __init__(
        self,
        store: AdapterStore,
        spec: AdapterSpec,
        *,
        server_root: str | None = None,
        device: torch.device | str = "cpu",
        far: Collection[str] = (),
        publish_timeout: float = 120.0,
    ) -> None:
        self._store = store
        self._files = FilesystemTransport(store, server_root=server_root)
        self._agreements = Agreements(spec, device)
        self._device = torch.device(device)
        self._timeout = publish_timeout
        self._far = frozenset(far)
        self._uploads: set[str] = set()
        self._block: Block | None = None
        self._flag: ReadyFlag | None = None
        self._called: Installation | None = None  # whose payload is still to come
        self._check: Callable[[AdapterSnapshot], None] = lambda _: None  # of that
        self._copy: ServingCopy | None = None
        self._host: torch.Tensor | None = None
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="loraflow-publish")
        self._publishing: tuple[Future[Published], Policy, AdapterSnapshot] | None = None

    def open(self, servers: Sequence[VLLMServer]) -> None:
        """Agree on the layout with every server, and settle how payloads get there."""
        if "://" in self._store.path():
            raise CapabilityError(
                "the direct carrier publishes to a folder that the servers read evicted adapters from",
                found=self._store.path(),
                hint="set adapter_root to a folder, or carrier='filesystem' for a URL",
            )
        digests = [self._agree(server) for server in servers]
        copy = self._copy = self._agreements.copy_for(digests)
        if copy is None:
            raise CapabilityError(
                "the servers' LoRA slots differ in dtype, and one payload serves all",
                found=sorted({str(digest.layout.dtype) for digest in digests}),
                hint="start them with one dtype, or use carrier='filesystem'",
            )
        near = [server for server in servers if server.url not in self._far]
        if near:
            self._block = best_block(near, copy.nbytes, self._device)
            self._flag = ReadyFlag()
        for server in servers:
            self._reach(server)

    def announce(self, policy: Policy, servers: Sequence[VLLMServer], check: Callable[[AdapterSnapshot], None]) -> bool:
        """Call the servers, whose workers wait for the payload. See `Transport.announce`.

        Nothing is done where the payload travels in the call, where a server is one of before these calls, or where the
        last version is not in the store yet.
        """
        self._called_for(None)
        flag, block = self._flag, self._block
        waits = flag is not None and not self._uploads and all(map(waits_for_payloads, servers))
        published = self._publishing is None or self._publishing[0].done()
        if flag is None or block is None or not waits or not published:
            return False
        self.wait_published()
        self._store.announce(policy)
        settle_device(self._device)
        called, self._check = self._installation(policy), check
        self._called = called
        called.send(servers, flag.announced(block.source()))
        return True

    def deliver(self, policy: Policy, snapshot: AdapterSnapshot, servers: Sequence[VLLMServer]) -> Delivery:
        """Install on all servers at the same time, each with its proof; publish behind it."""
        if self._copy is None:
            raise LoraflowError("the direct carrier was not opened")
        copy = self._copy
        started = waited = announced = time.perf_counter()
        installation = self._called_for(policy)
        if installation is None:
            self.wait_published()
            waited = time.perf_counter()
            self._store.announce(policy)
            announced = time.perf_counter()
        copy.fill(snapshot)
        payload = self._put(servers)
        copied = time.perf_counter()
        if installation is not None and self._flag is not None:
            self._flag.payload_is_there()
            self._check(snapshot)  # while the servers work
        installation, self._called = installation or self._installation(policy), None
        outcomes = installation.on(servers, snapshot, payload, began=copied)
        self._publishing = self._publisher.submit(self._publish, policy, snapshot), policy, snapshot
        phases = {
            "publish_wait": (waited - started) * 1e3,
            "announce": (announced - waited) * 1e3,
            "copy": (copied - announced) * 1e3,
        }
        digest = hashlib.blake2b(repr(self._sums(servers, snapshot)).encode(), digest_size=32).hexdigest()
        return Delivery(policy, copy.nbytes, digest, phases, outcomes)

    def wait_published(self) -> None:
        """Wait until the version delivered last lies in the store; where that failed, write it now.

        Raises:
            PublishError: It could not be written, or not in time; the next call tries again.
        """
        if self._publishing is None:
            return
        pending, policy, snapshot = self._publishing
        try:
            pending.result(self._timeout)
        except TimeoutError as error:
            raise PublishError(f"{policy} was not published within {self._timeout:.0f} s") from error
        except PublishError as error:
            _log.warning("%s could not be published behind its delivery, trying again: %s", policy, error)
            self._store.publish(policy, adapter_files(snapshot), digest=snapshot.digest)
        self._publishing = None

    def withdraw(self, policy: Policy, servers: Sequence[VLLMServer]) -> Mapping[str, Exception]:
        """Unload the name where it was installed; it is burnt. See `FilesystemTransport.withdraw`."""
        self._called_for(None)
        self._settle(policy)
        return self._files.withdraw(policy, servers)

    def retire(self, policy: Policy, servers: Sequence[VLLMServer]) -> None:
        """Unload everywhere; the store deletes the files once the grace period has passed."""
        self._files.retire(policy, servers)

    def holds(self, policy: Policy, server: VLLMServer) -> bool:
        """Whether the name is listed with the version's own path."""
        return self._files.holds(policy, server)

    def digests(self, server: VLLMServer) -> bool:
        """Where loraflow's plugin can checksum LoRA slots. See `Transport.digests`."""
        return server.info.plugin is not None and "digest" in server.info.plugin.capabilities

    def attach(self, policy: Policy, snapshot: AdapterSnapshot, server: VLLMServer) -> Delivered:
        """Load the version from its published file, and agree on the layout again. See `Transport.attach`."""
        self.wait_published()
        self._agreements.agree(server, again=True)
        self._reach(server)
        return self._files.attach(policy, snapshot, server)

    def close(self, servers: Sequence[VLLMServer]) -> None:
        """Unload every adapter of this run, finish publishing, and free the block."""
        try:
            self.wait_published()
        finally:
            self._publisher.shutdown(wait=False)
            if self._block is not None:
                self._block.close()
                self._block = None
            if self._flag is not None:
                self._flag.close()
                self._flag = None
            self._files.close(servers)

    # ---------------------------------------------------------------- inside

    def _installation(self, policy: Policy) -> Installation:
        path = self._files.seen_by_server(self._store.path(policy))
        return Installation(self._agreements, self._files, policy, path)

    def _called_for(self, policy: Policy | None) -> Installation | None:
        """What was announced, where it is ``policy``; another version, whose payload will not come, is called off."""
        called = self._called
        if called is not None and called.policy != policy and self._flag is not None:
            self._flag.call_off()
            self._called = None
            called.call_off()
        return self._called

    def _agree(self, server: VLLMServer) -> SlotDigest:
        plugin = server.info.plugin
        if plugin is None or "direct" not in plugin.capabilities:
            raise CapabilityError(
                "the server has no direct carrier",
                server=server.url,
                hint="it needs loraflow's plugin and worker extension: start it with `loraflow serve MODEL`",
            )
        return self._agreements.agree(server)

    def _reach(self, server: VLLMServer) -> None:
        """Settle how payloads get to ``server``: through the block, or in the call.

        Raises:
            CapabilityError: Neither; or it does not see the folder that versions are published in.
        """
        self._uploads.discard(server.url)
        why = "it is on another host"
        if server.url not in self._far and self._block is not None:
            found = objection(server, self._block)
            if found is None:
                return
            why = found
        plugin = server.info.plugin
        if plugin is None or "upload" not in plugin.capabilities:
            raise CapabilityError(
                f"a worker does not reach the trainer's shared memory: {why}",
                server=server.url,
                hint="trainer and server must share /dev/shm and the user; else use carrier='filesystem'",
            )
        if not self._folder_seen_by(server):
            raise CapabilityError(
                f"the server does not see the folder {self._store.path()}, from which it reads evicted adapters",
                server=server.url,
                hint="set adapter_root to a folder that both mount (server_adapter_root where the server mounts it "
                "elsewhere), or carrier='filesystem' with a URL",
            )
        _log.warning("%s gets payloads over HTTP, not through shared memory: %s", server.url, why)
        self._uploads.add(server.url)

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

    def _put(self, servers: Sequence[VLLMServer]) -> Payload:
        """Bring what the copy holds to where ``servers`` get it from."""
        assert self._copy is not None  # noqa: S101 - opened
        block, flat = self._block, self._copy.flat.view(torch.uint8)
        uploads = frozenset(server.url for server in servers if server.url in self._uploads)
        if block is not None:
            block.put(flat)
        source = None if block is None else block.source()
        if not uploads:
            return Payload(source, None, "", uploads)
        on_host = block is not None and block.view.device.type == "cpu"
        host = (block.view if on_host and block is not None else self._on_host(flat)).numpy().data
        return Payload(source, host, blake3(host, max_threads=blake3.AUTO).hexdigest(), uploads)

    def _on_host(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy in memory that is kept, and pinned where it comes from a GPU; ``flat`` itself where it is there."""
        if flat.device.type == "cpu":
            return flat
        if self._host is None:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        return self._host.copy_(flat)

    def _sums(self, servers: Sequence[VLLMServer], snapshot: AdapterSnapshot) -> tuple[tuple[int, ...], ...]:
        return self._agreements.expected(self._agreements.agree(servers[0]), snapshot)

    def _publish(self, policy: Policy, snapshot: AdapterSnapshot) -> Published:
        time.sleep(_HEAD_START)
        return self._store.publish(policy, adapter_files(snapshot), digest=snapshot.digest)

    def _settle(self, policy: Policy) -> None:
        """Nothing of ``policy`` is written any more; the version before it still is, where that had failed."""
        try:
            self.wait_published()
        except LoraflowError as error:
            _log.warning("the last delivery is not in the store yet: %s", error)
            if self._publishing is not None and self._publishing[1] == policy:
                self._publishing = None

"""The direct carrier: from the trainer's GPU through shared memory (or CUDA IPC) straight into LoRA slots.

One copy gathers the adapter, one casts and scales it as served, one brings it to a block that the servers on this host
have mapped, and one call has every worker fill a slot of a new name and checksum what lies there. To a server on
another host the same bytes travel in the call, or in a broadcast beside it (`loraflow.transports.ways`). But for the
former, the call leaves before the payload is gathered, and the workers are told when it is there. The published file
follows behind it, for eviction and restarts; the next version waits until it is there.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.adapter_files import adapter_files
from loraflow.digest import Agreements, SlotDigest
from loraflow.errors import CapabilityError, LoraflowError, PublishError
from loraflow.layout import ServingCopy
from loraflow.policy import Policy
from loraflow.server import VLLMServer
from loraflow.store import AdapterStore, Published
from loraflow.transports.base import Delivered, Delivery
from loraflow.transports.filesystem import FilesystemTransport
from loraflow.transports.group_way import GroupOptions
from loraflow.transports.install import Installation
from loraflow.transports.ways import DirectWay, Ways

__all__ = ["DirectTransport"]

_log = logging.getLogger(__name__)

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
        way: How payloads get to servers, see `SyncConfig.direct_way`.
        groups: How broadcast groups are made.
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
        way: DirectWay = "auto",
        groups: GroupOptions | None = None,
        publish_timeout: float = 120.0,
    ) -> None:
        self._store = store
        self._files = FilesystemTransport(store, server_root=server_root)
        self._agreements = Agreements(spec, device)
        self._device = torch.device(device)
        self._timeout = publish_timeout
        self._ways = Ways(store, self._files, self._device, far=far, way=way, groups=groups)
        self._called: Installation | None = None  # whose payload is still to come
        self._check: Callable[[AdapterSnapshot], None] = lambda _: None  # of that
        self._copy: ServingCopy | None = None
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
        try:
            self._ways.open(servers, copy.nbytes)
            for server, digest in zip(servers, digests, strict=True):
                self._ways.reach(server, digest)
        except BaseException:
            self._ways.close()  # the payload's memory, and the groups of those that were reached
            raise

    def announce(self, policy: Policy, servers: Sequence[VLLMServer], check: Callable[[AdapterSnapshot], None]) -> bool:
        """Call the servers, whose workers wait for the payload. See `Transport.announce`.

        Nothing is done where the payload travels in a call, where a server is one of before these calls, or where the
        last version is not in the store yet.
        """
        self._called_for(None)
        published = self._publishing is None or self._publishing[0].done()
        if not published or not self._ways.may_announce(servers):
            return False
        self.wait_published()
        self._store.announce(policy)
        self._ways.announce()
        called, self._check = self._installation(policy), check
        self._called = called
        called.send(servers, self._ways.begin)
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
        payload = self._ways.put(copy.flat.view(torch.uint8), servers)
        copied = time.perf_counter()
        if installation is not None:
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
        self._ways.reach(server, self._agreements.agree(server, again=True))
        return self._files.attach(policy, snapshot, server)

    def close(self, servers: Sequence[VLLMServer]) -> None:
        """Unload every adapter of this run, finish publishing, leave every group, and free the block."""
        try:
            self.wait_published()
        finally:
            self._publisher.shutdown(wait=False)
            self._ways.close()
            self._files.close(servers)

    # ---------------------------------------------------------------- inside

    def _installation(self, policy: Policy) -> Installation:
        path = self._files.seen_by_server(self._store.path(policy))
        return Installation(self._agreements, self._files, policy, path)

    def _called_for(self, policy: Policy | None) -> Installation | None:
        """What was announced, where it is ``policy``; another version, whose payload will not come, is called off."""
        called = self._called
        if called is not None and called.policy != policy:
            self._ways.call_off()
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

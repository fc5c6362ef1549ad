"""Adapter reload: publish an immutable version in the store, and every server loads it under its own name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.adapter_files import adapter_files
from loraflow.digest import Agreements
from loraflow.errors import CapabilityError, LoadError, LoraflowError
from loraflow.policy import Policy
from loraflow.server import Unreachable, VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.background import at_once
from loraflow.transports.base import Delivered, Delivery, NotAnnounced
from loraflow.transports.install import Installation, Payload

__all__ = ["FilesystemTransport", "on_every_server"]

_WORKERS = 32


class FilesystemTransport(NotAnnounced):
    """The ``filesystem`` carrier: any folder or fsspec URL that trainer and servers reach.

    Args:
        store: Where versions are published.
        server_root: The store's root as the servers see it, where that differs.
        spec: The adapter. With it, workers with loraflow's extension read the file straight into their slots, and prove
            it in the same call.
        device: Where the snapshots are.
    """

    kind: Literal["adapter"] = "adapter"
    name = "filesystem"

    def __init__(
        self,
        store: AdapterStore,
        *,
        server_root: str | None = None,
        spec: AdapterSpec | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._store = store
        self._agreements = None if spec is None else Agreements(spec, device)
        self._server_root = server_root
        self._listed: dict[tuple[str, str], str] = {}  # path that a server lists a version with, by (URL, name)

    def open(self, servers: Sequence[VLLMServer]) -> None:
        """Check that every server takes adapters at run time."""
        for server in servers:
            info = server.info
            by_plugin = info.plugin is not None and "adapters" in info.plugin.capabilities
            if info.lora is None and info.lora_known:
                raise CapabilityError(
                    "the server was started without LoRA",
                    server=server.url,
                    hint="start it with `loraflow serve MODEL`",
                )
            if info.lora is not None and not info.lora.runtime_loading and not by_plugin:
                raise CapabilityError(
                    "the server loads no adapters at run time",
                    server=server.url,
                    hint="set VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for it, or start it with `loraflow serve MODEL`",
                )
            if "://" in self._store.path() and not by_plugin:
                raise CapabilityError(
                    f"the server cannot read {self._store.path()} without loraflow's plugin",
                    server=server.url,
                    hint='install "loraflow[server]" beside vLLM, or set adapter_root to a folder that both mount',
                )

    def deliver(self, policy: Policy, snapshot: AdapterSnapshot, servers: Sequence[VLLMServer]) -> Delivery:
        """Publish once, then load on all servers at the same time."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(1, "loraflow-digest") as hashing:  # beside the writing
            digest = hashing.submit(lambda: snapshot.digest)
            files = adapter_files(snapshot)
            published = self._store.publish(policy, files, digest=digest.result)
        phases = {"publish": (time.perf_counter() - begin) * 1e3}
        path = self.seen_by_server(published.path)
        quick = [server for server in servers if self._reads_straight(server)]

        def load(server: VLLMServer) -> Delivered:
            started = time.perf_counter()
            self.note(policy, server, server.load_adapter(policy.name, path))
            return Delivered(policy.name, {"load": (time.perf_counter() - started) * 1e3})

        with ThreadPoolExecutor(1, "loraflow-load") as others:
            slower = [server for server in servers if server not in quick]
            loaded = others.submit(on_every_server, slower, load, policy.name) if slower else None
            outcomes = self._straight(policy, snapshot, path, quick) if quick else {}
            outcomes |= loaded.result() if loaded is not None else {}
        ordered = {server.url: outcomes[server.url] for server in servers}
        self._store.prepare(max(sum(memoryview(part).nbytes for part in parts) for parts in files.values()))
        return Delivery(policy, published.bytes, digest.result(), phases, ordered)

    def _reads_straight(self, server: VLLMServer) -> bool:
        """Whether the server's workers read the file themselves, into slots whose layout is agreed on."""
        plugin = server.info.plugin
        if self._agreements is None or plugin is None or "folder" not in plugin.capabilities:
            return False
        if "://" in self._store.path():
            return False  # its plugin fetches from there
        try:
            self._agreements.agree(server)
        except LoraflowError:
            return False  # some tensor has no slot that could be checked: vLLM's own loader decides
        return True

    def _straight(
        self, policy: Policy, snapshot: AdapterSnapshot, path: str, servers: Sequence[VLLMServer]
    ) -> dict[str, Delivered]:
        assert self._agreements is not None  # noqa: S101 - see `_reads_straight`
        for copy in {id(c): c for c in (self._agreements.agree(server).copy for server in servers)}.values():
            copy.fill(snapshot)
        payload = Payload({"kind": "folder"}, None, "", frozenset())
        return Installation(self._agreements, self, policy, path).on(servers, snapshot, payload)

    def withdraw(self, policy: Policy, servers: Sequence[VLLMServer]) -> Mapping[str, Exception]:
        """Unload the name where it was loaded; it is burnt.

        Where that fails the name means nothing to anybody, and those before it what they meant.
        """
        try:
            self._store.mark_burnt(policy)
        finally:  # a store that fails must not leave the name on the servers
            self._unload(policy, servers)
        self._store.retire(policy)
        return {}

    def retire(self, policy: Policy, servers: Sequence[VLLMServer]) -> None:
        """Unload everywhere, then let the store delete the files once the grace period has passed.

        Raises:
            LoraflowError: A server that is there keeps it, or did not say: its files stay (rule 7).
        """
        kept = [error for error in self._unload(policy, servers) if not isinstance(error, Unreachable)]
        if kept:
            raise kept[0]
        self._store.retire(policy)
        self._store.collect()

    def holds(self, policy: Policy, server: VLLMServer) -> bool:
        """Whether the name is listed with the version's own path."""
        path = self._listed.get((server.url, policy.name), self.seen_by_server(self._store.path(policy)))
        return any(m.id == policy.name and m.root.rstrip("/") == path.rstrip("/") for m in server.models())

    def note(self, policy: Policy, server: VLLMServer, path: str) -> None:
        """Remember the path that ``server`` lists a version with: links resolved, or its cache's folder for a URL."""
        self._listed[server.url, policy.name] = path

    def digests(self, server: VLLMServer) -> bool:
        """Where loraflow's plugin can checksum LoRA slots. See `Transport.digests`."""
        return server.info.plugin is not None and "digest" in server.info.plugin.capabilities

    def attach(self, policy: Policy, snapshot: AdapterSnapshot, server: VLLMServer) -> Delivered:
        """Load the published version, mended where it was damaged since, and unload every other one of this run.

        See `Transport.attach`.
        """
        for model in server.models():
            if model.parent is not None and self._is_mine(model.id) and model.id != policy.name:
                server.unload_adapter(model.id)
        started = time.perf_counter()
        if not self.holds(policy, server):
            self._store.mend(policy, adapter_files(snapshot), digest=snapshot.digest)
            path = self.seen_by_server(self._store.path(policy))
            self.note(policy, server, server.load_adapter(policy.name, path))
        return Delivered(policy.name, {"load": (time.perf_counter() - started) * 1e3})

    def close(self, servers: Sequence[VLLMServer]) -> None:
        """Unload every adapter of this run."""

        def free(server: VLLMServer) -> Delivered:
            try:
                mine = [m.id for m in server.models() if m.parent is not None and self._is_mine(m.id)]
            except LoraflowError:
                return Delivered("")  # gone: it holds nothing any more
            for name in mine:
                server.unload_adapter(name)
            return Delivered("")

        for outcome in on_every_server(servers, free, "").values():
            if outcome.error is not None:
                raise outcome.error

    def _is_mine(self, name: str) -> bool:
        policy = Policy.parse(name)
        return policy is not None and policy.run_id == self._store.run_id

    def _unload(self, policy: Policy, servers: Sequence[VLLMServer]) -> list[LoraflowError]:
        """Unload it on every server; what failed."""

        def unload(server: VLLMServer) -> Delivered:
            server.unload_adapter(policy.name)
            return Delivered(policy.name)

        outcomes = on_every_server(servers, unload, policy.name)
        for key in [key for key in list(self._listed) if key[1] == policy.name]:  # those set aside as well
            self._listed.pop(key, None)
        for url, outcome in outcomes.items():
            if outcome.error is not None and not isinstance(outcome.error, LoraflowError):
                raise LoadError(f"unloading {policy.name} failed: {outcome.error}", server=url) from outcome.error
        return [outcome.error for outcome in outcomes.values() if isinstance(outcome.error, LoraflowError)]

    def seen_by_server(self, path: str) -> str:
        """``path`` of the store as the servers see it."""
        if self._server_root is None:
            return path
        root = self._store.path().rsplit("/", 1)[0]  # without the run's folder
        return self._server_root.rstrip("/") + path.removeprefix(root)


def on_every_server(
    servers: Sequence[VLLMServer], work: Callable[[VLLMServer], Delivered], model: str
) -> dict[str, Delivered]:
    """Run ``work`` for all servers at the same time; a failure becomes that server's outcome."""

    def guarded(server: VLLMServer) -> Delivered:
        try:
            return work(server)
        except Exception as error:  # noqa: BLE001 - told in the outcome; the manager decides for all servers
            return Delivered(model, error=error)

    if len(servers) == 1:
        return {servers[0].url: guarded(servers[0])}
    return dict(zip((s.url for s in servers), at_once(guarded, servers, _WORKERS), strict=True))

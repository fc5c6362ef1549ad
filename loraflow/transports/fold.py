"""The fold carrier: the adapter travels, and the servers merge it into their own base weights.

An adapter's bytes, a merged model's speed. The payload goes through shared memory or CUDA IPC where every server is on
this host (the call leaves before it is there, as with the direct carrier), and through the store where one is not. What
is proven: at `open`, the pristine base against the trainer's own (checksums); for every version, every tensor of the
payload on every worker (checksums) and an eighth of the products (random projections), another eighth each time; and
for a run's first version all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import requests
import torch

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.adapter_files import adapter_files
from loraflow.errors import AdapterError, CapabilityError, LoraflowError, PublishError, VerifyError
from loraflow.plan_features import fold_objection
from loraflow.plugin_answers import FoldLayout
from loraflow.plugin_client import PluginClient, begin_fold
from loraflow.policy import Policy
from loraflow.records import Proof
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.base import Delivered, Delivery
from loraflow.transports.blocks import Block, reachable_block
from loraflow.transports.filesystem import FilesystemTransport, on_every_server
from loraflow.transports.fold_modules import BaseWeight, fold_modules, payload_shapes
from loraflow.transports.ready_flag import ReadyFlag, settle_device, waits_for_payloads
from loraflow_server.checksum import Checksummer, byte_checksum
from loraflow_server.ids import content_id

__all__ = ["FoldTransport"]

_log = logging.getLogger(__name__)


class FoldTransport:
    """The ``fold`` carrier.

    Args:
        store: Where versions are published if they must travel through files; it also keeps the names.
        spec: The adapter.
        base_weight: The trainer's base weights, for the proof of the servers' base.
        conv1d: Modules whose weight is transposed in the checkpoint (`fold_modules.conv1d_modules`).
        server_root: The store's root as the servers see it, where that differs.
        device: Where the snapshots are.

    Raises:
        AdapterError: The adapter cannot be folded.
    """

    kind: Literal["merged"] = "merged"
    name = "fold"

    def __init__(
        self,
        store: AdapterStore,
        spec: AdapterSpec,
        base_weight: BaseWeight,
        *,
        conv1d: Collection[str] = (),
        server_root: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        objection = fold_objection(spec)
        if objection is not None:
            raise AdapterError(f"this adapter cannot be folded: {objection}", hint="use another carrier")
        self._store = store
        self._spec = spec
        self._base_weight = base_weight
        self._files = FilesystemTransport(store, server_root=server_root)
        self._device = torch.device(device)
        self._shapes = payload_shapes(spec)
        self._modules = fold_modules(spec, conv1d)
        self._layouts: dict[str, FoldLayout] = {}
        self._copy: _Payload | None = None
        self._block: Block | None = None
        self._flag: ReadyFlag | None = None
        self._called: dict[str, Callable[[], dict[str, Any]]] = {}  # answers of servers that wait for a payload
        self._called_for: Policy | None = None  # that of this version
        self._checked: set[str] = set()
        self._served: dict[str, _Served] = {}

    def open(self, servers: Sequence[VLLMServer]) -> None:
        """Take the lease on every server, and prove its base weights equal to the trainer's; all of it, or nothing."""
        try:
            self._open(servers)
        except Exception:
            with suppress(LoraflowError):  # the reason is the first one
                self.close(servers)
            raise

    def _open(self, servers: Sequence[VLLMServer]) -> None:
        for server in servers:
            self._agree(server)
            self._served[server.url] = _Served()
        dtypes = {layout.dtype for layout in self._layouts.values()}
        if len(dtypes) != 1:
            raise CapabilityError(
                "the servers' weights differ in dtype, and one payload serves all", found=sorted(map(str, dtypes))
            )
        self._copy = _Payload(list(self._shapes.values()), dtypes.pop(), self._device)
        nbytes = self._copy.flat.numel() * self._copy.flat.element_size()
        try:
            self._block = reachable_block(servers, nbytes, self._device)
            self._flag = ReadyFlag(len(self._shapes))
        except CapabilityError as error:
            _log.info("fold travels through %s: %s", self._store.path(), error)

    def announce(
        self,
        policy: Policy,
        servers: Sequence[VLLMServer],
        check: Callable[[AdapterSnapshot], None],  # noqa: ARG002 - what is folded is served: the caller checks before
    ) -> bool:
        """Call the servers, whose workers wait for the payload. See `Transport.announce`.

        Nothing is done where the payload travels through files, or where a server is one of before these calls.
        """
        self._call_off()
        block, flag = self._block, self._flag
        if block is None or flag is None or not all(map(waits_for_payloads, servers)):
            return False
        self._store.reserve(policy)
        settle_device(self._device)
        self._called_for = policy
        source = {"source": flag.announced(block.source())}
        for server in servers:
            try:
                self._called[server.url] = begin_fold(server, self._body(server, policy, source))
            except LoraflowError as error:
                self._called[server.url] = partial(_raised, error)
        return True

    def deliver(self, policy: Policy, snapshot: AdapterSnapshot, servers: Sequence[VLLMServer]) -> Delivery:
        """Fold on all servers at the same time."""
        if self._copy is None:
            raise LoraflowError("the fold carrier was not opened")
        copy = self._copy
        if self._called_for != policy:
            self._call_off()
        started = time.perf_counter()
        sums = copy.fill(snapshot)
        phases: dict[str, float] = {}
        source = self._source(policy, snapshot, copy, phases)
        expected: list[int] = sums.tolist()
        if self._called and self._flag is not None:
            self._flag.payload_is_there(expected)
        called, self._called, self._called_for = self._called, {}, None
        phases["copy"] = (time.perf_counter() - started) * 1e3 - sum(phases.values())

        def fold(server: VLLMServer) -> Delivered:
            return self._folded(server, policy, source, expected, called.get(server.url))

        outcomes = on_every_server(servers, fold, policy.name)
        digest = content_id(expected)
        return Delivery(policy, copy.flat.numel() * copy.flat.element_size(), digest, phases, outcomes)

    def withdraw(self, policy: Policy, servers: Sequence[VLLMServer]) -> Mapping[str, Exception]:
        """Every server serves what it served before, and says so. See `Transport.withdraw`."""
        self._call_off()

        def undo(server: VLLMServer) -> Delivered:
            layout, served = self._layouts[server.url], self._served[server.url]
            before = served.before if served.now == policy.name else served.now
            found = PluginClient(server.request).fold_undo(
                self._store.run_id, policy.name, layout.layout_id, timeout=server.load_timeout
            )
            if found != before:  # it was restarted, or another run has taken it over
                raise VerifyError(f"{found or 'the base'} is served, not {before or 'the base'}", server=server.url)
            self._served[server.url] = _Served(before)
            return Delivered(server.info.model)

        outcomes = on_every_server([s for s in servers if s.url in self._layouts], undo, policy.name)
        try:
            self._store.mark_burnt(policy)
        except PublishError as error:  # its name was used up before it travelled
            _log.warning("%s could not be marked as burnt: %s", policy, error)
        return {url: outcome.error for url, outcome in outcomes.items() if outcome.error is not None}

    def retire(self, policy: Policy, servers: Sequence[VLLMServer]) -> None:  # noqa: ARG002 - the protocol's
        """Let the store delete the version's files, if it has any; the servers hold nothing of it."""
        self._store.retire(policy)
        self._store.collect()

    def holds(self, policy: Policy, server: VLLMServer) -> bool:
        """Whether the version is what the server's status says is folded."""
        folded = PluginClient(server.request).status().get("fold") or {}
        return bool(folded.get("policy") == policy.name)

    def digests(self, server: VLLMServer) -> bool:  # noqa: ARG002 - the protocol's
        """Always: a fold proves its payload and its products."""
        return True

    def attach(self, policy: Policy, snapshot: AdapterSnapshot, server: VLLMServer) -> Delivered:
        """Start from the pristine base there, proven anew, and fold the version. See `Transport.attach`."""
        if self._copy is None:
            raise LoraflowError("the fold carrier was not opened")
        PluginClient(server.request).reset(self._store.run_id, timeout=server.load_timeout)
        self._agree(server)
        self._served[server.url] = _Served()
        sums = self._copy.fill(snapshot)
        if self._block is None:
            source = self._published(self._store.path(policy))
        else:
            source = self._in_block(self._block, self._copy)
        return self._folded(server, policy, source, sums.tolist())

    def close(self, servers: Sequence[VLLMServer]) -> None:
        """Return every server to its pristine base, proven, and free the block."""
        if self._block is not None:
            self._block.close()
            self._block = None
        if self._flag is not None:
            self._flag.close()
            self._flag = None

        def reset(server: VLLMServer) -> Delivered:
            try:
                PluginClient(server.request).reset(self._store.run_id, timeout=server.load_timeout)
            except LoraflowError as error:
                if getattr(error, "status", None) != requests.codes.locked:
                    raise
                _log.info("another run has taken %s over: nothing of this one is left there", server.url)
            return Delivered(server.info.model)

        outcomes = on_every_server([s for s in servers if s.url in self._layouts], reset, "")
        self._layouts.clear()
        for outcome in outcomes.values():
            if outcome.error is not None:
                raise outcome.error

    # ---------------------------------------------------------------- inside

    def _call_off(self) -> None:
        """The payload of what was announced will not come: wait until nobody waits for it."""
        if self._called and self._flag is not None:
            self._flag.call_off()
        called, self._called, self._called_for = self._called, {}, None
        for answer in called.values():
            with suppress(LoraflowError):  # which says so
                answer()

    def _agree(self, server: VLLMServer) -> FoldLayout:
        plugin = server.info.plugin
        if plugin is None or "fold" not in plugin.capabilities:
            raise CapabilityError(
                "the server cannot fold",
                server=server.url,
                hint="it needs loraflow's plugin and worker extension, and plain float weights: `loraflow serve MODEL`",
            )
        try:
            layout = PluginClient(server.request).fold_layout(
                self._store.run_id, self._shapes, list(self._modules.values()), timeout=server.load_timeout
            )
        except HTTPFailure as error:
            if error.status != requests.codes.conflict:
                raise
            raise CapabilityError(f"it cannot fold this adapter: {error.reason}", server=server.url) from error
        self._layouts[server.url] = layout  # before the proof: `close` gives the lease back
        self._prove_base(server, layout)
        self._checked.discard(server.url)
        return layout

    def _prove_base(self, server: VLLMServer, layout: FoldLayout) -> None:
        """Compare the checksum of every targeted weight, piece by piece, with the trainer's."""
        names = list(self._modules)
        unknown: set[str] = set()
        served: dict[str, torch.Tensor] = {}
        for pieces in layout.ranks:
            for rect, found in pieces:
                module = names[rect.tensor]
                if module not in served:
                    weight = self._base_weight(module)
                    if weight is None:
                        unknown.add(module)
                        continue
                    served = {module: weight.to(layout.dtype).view(weight.shape[0], -1)}
                if byte_checksum(rect.of(served[module])) != found:
                    raise VerifyError(
                        f"the server's base weight of {module} is not the trainer's, or lies there in another layout",
                        server=server.url,
                        hint="serve the same checkpoint in the trainer's dtype (--dtype), or use another carrier",
                    )
        if unknown:
            _log.warning(
                "%d base weights are sharded or trained in place here: on the servers log-probs alone prove them",
                len(unknown),
            )

    def _source(
        self, policy: Policy, snapshot: AdapterSnapshot, copy: _Payload, phases: dict[str, float]
    ) -> dict[str, Any]:
        if self._block is not None:
            if not self._called:
                self._store.reserve(policy)
            return self._in_block(self._block, copy)
        began = time.perf_counter()
        published = self._store.publish(policy, adapter_files(snapshot), digest=snapshot.digest)
        phases["publish"] = (time.perf_counter() - began) * 1e3
        return self._published(published.path)

    def _in_block(self, block: Block, copy: _Payload) -> dict[str, Any]:
        block.put(copy.flat.view(torch.uint8))
        return {"source": block.source()}

    def _published(self, path: str) -> dict[str, Any]:
        seen = self._files.seen_by_server(path)
        return {"url" if "://" in seen else "path": seen}

    def _folded(
        self,
        server: VLLMServer,
        policy: Policy,
        source: Mapping[str, Any],
        expected: Sequence[int],
        called: Callable[[], dict[str, Any]] | None = None,
    ) -> Delivered:
        began = time.perf_counter()
        answer = self._fold(server, policy, {"expected": list(expected), **source}, called)
        spent = {"load": (time.perf_counter() - began) * 1e3, **_floats(answer["phases_ms"])}
        self._checked.add(server.url)
        self._served[server.url] = _Served(policy.name, self._served[server.url].now)
        return Delivered(server.info.model, spent, proof=Proof("digest", passed=answer["sums"] == list(expected)))

    def _fold(
        self,
        server: VLLMServer,
        policy: Policy,
        payload: Mapping[str, Any],
        called: Callable[[], dict[str, Any]] | None,
    ) -> dict[str, Any]:
        try:
            return (called or begin_fold(server, self._body(server, policy, payload)))()
        except LoraflowError as error:
            if getattr(error, "status", None) != requests.codes.conflict:
                raise
        self._agree(server)  # it was restarted and knows no layout; or what was announced came late
        return begin_fold(server, self._body(server, policy, payload))()

    def _body(self, server: VLLMServer, policy: Policy, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "run_id": self._store.run_id,
            "policy": policy.name,
            "layout_id": self._layouts[server.url].layout_id,
            "check": server.url not in self._checked,
            **payload,
        }


def _raised(error: LoraflowError) -> dict[str, Any]:
    raise error


@dataclass(frozen=True)
class _Served:
    """What a server has folded, and what it had before that (None: the pristine base)."""

    now: str | None = None
    before: str | None = None


class _Payload:
    """An adapter in the servers' dtype; one buffer, filled again for each version. B is not scaled."""

    def __init__(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [rows * cols for rows, cols in shapes]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        self._tensors = [part.view(s) for part, s in zip(self.flat.split_with_sizes(sizes), shapes, strict=True)]
        self._checksummer = Checksummer(shapes, dtype, device)

    def fill(self, snapshot: AdapterSnapshot) -> torch.Tensor:
        """Take a snapshot's values; the checksum of each tensor, on the device, which is still computing them."""
        self.flat.copy_(snapshot.flat)
        return self._checksummer.launch(self._tensors)


def _floats(phases: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(ms) for name, ms in phases.items()}

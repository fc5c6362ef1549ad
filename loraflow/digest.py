"""Proof by digest: every tensor of a load, as it lies in the server's LoRA slots, against the trainer's snapshot.

The workers checksum their slots on their own device (`loraflow_server.checksum`); the trainer computes the same
numbers from the snapshot. Packed, sharded and scaled as served, in the dtype served: equal bits or no proof. It costs
one call, and no forward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import requests
import torch

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.errors import LoraflowError
from loraflow.layout import ServingCopy, SlotLayout, lora_shapes
from loraflow.plugin_answers import ServedDigest
from loraflow.plugin_client import PluginClient
from loraflow.records import Proof
from loraflow_server.checksum import Checksummer

if TYPE_CHECKING:
    from loraflow.policy import Policy
    from loraflow.server import VLLMServer

__all__ = ["Agreements", "SlotDigest", "prove_digest"]

_SHOWN = 3


class SlotDigest:
    """Computes what the ranks of one kind of server must hold.

    Args:
        layout: Agreed with the server.
        copy: The adapter as served, in the layout's dtype; on the device of the snapshots.
    """

    def __init__(self, layout: SlotLayout, copy: ServingCopy) -> None:
        self.layout = layout
        self.copy = copy
        sources, device = list(copy.tensors.values()), copy.flat.device
        self._checksummers = [
            Checksummer([rect.served_shape for rect in rank], layout.dtype, device) for rank in layout.ranks
        ]
        self._sources = [[rect.of(sources[rect.tensor]) for rect in rank] for rank in layout.ranks]

    def expected(self, snapshot: AdapterSnapshot) -> tuple[tuple[int, ...], ...]:
        """Checksum of every piece on every rank of an engine, for ``snapshot`` loaded there."""
        self.copy.fill(snapshot)
        return self.expected_of_copy()

    def expected_of_copy(self) -> tuple[tuple[int, ...], ...]:
        """The same for what ``copy`` holds already."""
        return tuple(tuple(sums.tolist()) for sums in self.launch())

    def launch(self) -> list[torch.Tensor]:
        """`expected_of_copy` without the wait: one int64 tensor per rank, on the device."""
        pairs = zip(self._checksummers, self._sources, strict=True)
        return [checksummer.launch(sources) for checksummer, sources in pairs]

    def compare(self, expected: Sequence[Sequence[int]], served: ServedDigest) -> Proof:
        """The proof, or what differs and where; never raises for a mismatch."""
        wrong: list[str] = []
        if len(served.sums) != self.layout.engines:
            wrong.append(f"{len(served.sums)} engines answered, {self.layout.engines} expected")
        for engine, (ranks, dirty) in enumerate(zip(served.sums, served.dirty, strict=True)):
            if len(ranks) != len(expected):
                wrong.append(f"engine {engine} answered for {len(ranks)} ranks, {len(expected)} expected")
                continue
            for rank, (sums, wanted) in enumerate(zip(ranks, expected, strict=True)):
                where = f"engine {engine} rank {rank}"
                wrong += [f"{name} ({where})" for name in self._differing(rank, wanted, sums)]
                wrong += [f"{module}: not zero outside of the adapter ({where})" for module in dirty[rank]]
        if served.weights_touched:
            wrong.append("the base weights were updated and are not proven pristine")
        shown = "; ".join(wrong[:_SHOWN]) + (f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        return Proof("digest", passed=not wrong, detail=f"served differently: {shown}" if wrong else "")

    def _differing(self, rank: int, wanted: Sequence[int], sums: Sequence[int]) -> list[str]:
        if len(sums) != len(wanted):
            return [f"{len(sums)} checksums, {len(wanted)} expected"]
        names = list(self.layout.tensors)
        pieces = zip(self.layout.ranks[rank], wanted, sums, strict=True)
        return sorted({names[rect.tensor] for rect, right, found in pieces if right != found})


class Agreements:
    """The layouts agreed with each server for one adapter, and the numbers that must be served.

    Servers with equal layouts share one `SlotDigest`; the numbers for a snapshot are computed once. Thread-safe.

    Args:
        spec: The adapter.
        device: Where the snapshots are.
    """

    def __init__(self, spec: AdapterSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self._device = torch.device(device)
        self._by_server: dict[str, SlotDigest] = {}
        self._copies: dict[torch.dtype, ServingCopy] = {}
        self._known: dict[int, tuple[weakref.ref[AdapterSnapshot], tuple[tuple[int, ...], ...]]] = {}
        self._lock = threading.Lock()
        self._begun: dict[int, tuple[weakref.ref[AdapterSnapshot], list[torch.Tensor]]] = {}

    def agree(self, server: VLLMServer, *, again: bool = False) -> SlotDigest:
        """The digest for ``server``; asks it for its layout the first time, or ``again`` after its restart."""
        with self._lock:
            known = self._by_server.get(server.url)
        if known is not None and not again:
            return known
        layout = PluginClient(server.request).layout(lora_shapes(self.spec), timeout=server.load_timeout)
        with self._lock:
            same = next((digest for digest in self._by_server.values() if digest.layout == layout), None)
            if same is None:
                copy = self._copies.get(layout.dtype)
                if copy is None:
                    copy = self._copies[layout.dtype] = ServingCopy(self.spec, layout.dtype, self._device)
                same = SlotDigest(layout, copy)
            self._by_server[server.url] = same
            return same

    def copy_for(self, digests: Sequence[SlotDigest]) -> ServingCopy | None:
        """The serving copy that all ``digests`` share; None where their slots differ in dtype."""
        copies = {id(digest.copy): digest.copy for digest in digests}
        return next(iter(copies.values())) if len(copies) == 1 else None

    def begin(self, digests: Sequence[SlotDigest], snapshot: AdapterSnapshot) -> None:
        """Start working out what must be served for ``snapshot``, which the digests' copy holds already.

        The device computes while the servers install; `expected` takes the numbers up.
        """
        with self._lock:
            for digest in {id(digest): digest for digest in digests}.values():
                self._begun[id(digest)] = (weakref.ref(snapshot), digest.launch())

    def expected(self, digest: SlotDigest, snapshot: AdapterSnapshot) -> tuple[tuple[int, ...], ...]:
        """What must be served for ``snapshot``."""
        with self._lock:
            known = self._known.get(id(digest))
            if known is not None and known[0]() is snapshot:
                return known[1]
            begun = self._begun.pop(id(digest), None)
            if begun is not None and begun[0]() is snapshot:
                sums = tuple(tuple(rank.tolist()) for rank in begun[1])
            else:
                sums = digest.expected(snapshot)
            self._known[id(digest)] = (weakref.ref(snapshot), sums)
            return sums

    def prove(self, server: VLLMServer, name: str, snapshot: AdapterSnapshot) -> Proof:
        """Whether ``server`` serves ``snapshot`` under ``name``; never raises for a mismatch."""
        digest = self.agree(server)
        client = PluginClient(server.request)
        try:
            served = client.verify(name, digest.layout.layout_id, timeout=server.load_timeout)
        except LoraflowError as error:
            if getattr(error, "status", None) != requests.codes.conflict:
                raise
            digest = self.agree(server, again=True)  # restarted since, or it let go of the layout
            served = client.verify(name, digest.layout.layout_id, timeout=server.load_timeout)
        return digest.compare(self.expected(digest, snapshot), served)


_agreements: weakref.WeakKeyDictionary[VLLMServer, Agreements] = weakref.WeakKeyDictionary()
_agreements_lock = threading.Lock()


def prove_digest(server: VLLMServer, policy: Policy, snapshot: AdapterSnapshot) -> Proof:
    """Prove one version on one server with loraflow's plugin: every tensor, on every rank of every engine.

    The layout is agreed once per server and adapter. Never raises for a mismatch.

    Raises:
        CapabilityError: The adapter has tensors that no slot holds.
        LoraflowError: The server refused or failed.
    """
    with _agreements_lock:
        known = _agreements.get(server)
        if known is None or known.spec is not snapshot.spec:
            known = _agreements[server] = Agreements(snapshot.spec, snapshot.flat.device)
    return known.prove(server, policy.name, snapshot)

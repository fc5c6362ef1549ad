"""`SlotDesk`: LoRA slots as the API server sees them: where adapters lie in them, payloads into them, and the proof."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from loraflow_server import checks
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.events import log_event
from loraflow_server.group_desk import GroupDesk
from loraflow_server.group_flag import SPARED
from loraflow_server.ids import content_id
from loraflow_server.inbox import Inbox
from loraflow_server.metrics import Metrics, elapsed_ms
from loraflow_server.names import Names
from loraflow_server.payload import Payloads, check_source
from loraflow_server.settings import Settings
from loraflow_server.weights import BaseWeights

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["SlotDesk"]

logger = logging.getLogger("vllm.loraflow")

_LOOKS, _LOOK_SECONDS = 25, 0.004
"""How often the checksums of a slot are asked for while requests run; the last time, the workers wait for them."""

_LAYOUTS = 4
"""Layouts whose payloads may be uploaded; as many as a worker keeps."""


class SlotDesk:
    """Proofs, and payloads that come without files.

    Args:
        engine: The engines.
        weights: Watches over the base weights.
        settings: What the operator decided.
        names: The adapter names of this server.
        metrics: Its counters.
        lock: Held while anything changes.
        groups: The broadcast groups that payloads may come over.

    Attributes:
        inbox: Payloads that are being uploaded.
    """

    def __init__(
        self,
        engine: Engine,
        weights: BaseWeights,
        settings: Settings,
        names: Names,
        metrics: Metrics,
        lock: asyncio.Lock,
        groups: GroupDesk,
    ) -> None:
        self.inbox = Inbox()
        self._engine = engine
        self._weights = weights
        self._settings = settings
        self._names = names
        self._metrics = metrics
        self._lock = lock
        self._groups = groups
        self._announced = Payloads(torch.device("cpu"))
        self._payload_bytes: dict[str, int] = {}  # by layout agreed on: what an upload must have

    async def layout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Agree on where an adapter's tensors lie in the slots: ``{"tensors": {name: [rows, cols]}}``."""
        tensors = checks.check_adapter(body.get("tensors"), self._settings.limits)
        layout_id = content_id(tensors)
        engines = await self._engine.workers("loraflow_layout", layout_id, tensors)
        ranks = [{"dtype": rank["dtype"], "rects": rank["rects"]} for rank in engines[0]]
        if any([{"dtype": r["dtype"], "rects": r["rects"]} for r in other] != ranks for other in engines[1:]):
            raise PluginError("engines_differ", "the data-parallel engines have different layouts", status=500)
        missing = _not_covered(tensors, [rank["rects"] for rank in ranks])
        if missing:
            raise PluginError(
                "not_served",
                f"{len(missing)} tensors would lie in no LoRA slot, the first: {', '.join(missing[:3])}",
                details={"tensors": missing[:100]},
            )
        while layout_id not in self._payload_bytes and len(self._payload_bytes) >= _LAYOUTS:
            del self._payload_bytes[next(iter(self._payload_bytes))]
        elements = sum(rows * cols for rows, cols in tensors.values())
        self._payload_bytes[layout_id] = elements * (4 if ranks[0]["dtype"] == "float32" else 2)
        return {
            "layout_id": layout_id,
            "dtype": ranks[0]["dtype"],
            "tensors": tensors,
            "ranks": [rank["rects"] for rank in ranks],
            "engines": len(engines),
        }

    async def verify(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Checksum what is served under a name: ``{"name", "layout_id"}``."""
        name, layout_id = checks.check_name(body.get("name")), checks.check_text(body, "layout_id")
        item = self._engine.loaded().get(name)
        if item is None:
            raise PluginError("not_found", f"no adapter {name!r} is loaded", status=404)
        await self._engine.need_awake()
        if self._weights.touched:
            await self._weights.compare()  # what may have changed them may have left them alone
        engines = await self._engine.workers("loraflow_checksum", item.int_id, name, item.path, layout_id)
        if self._engine.loaded().get(name) != item:
            raise PluginError("not_found", f"the adapter {name!r} was unloaded meanwhile", status=404)
        self._metrics.add("loraflow_verifies_total")
        return self._digest_answer(name, engines)

    async def probe(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Whether every worker reaches a payload: ``{"source"}`` gives its first 16 bytes as each sees them."""
        source = check_source(body.get("source"), self._settings.limits.payload)
        async with self._lock:
            engines = await self._received("loraflow_probe", source)
        return {"heads": [[rank["head"] for rank in ranks] for ranks in engines]}

    async def sees(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Whether a file under the roots is on this host as well: ``{"path"}``."""
        path = await asyncio.to_thread(checks.resolve_inside, body.get("path"), self._settings.roots, must_exist=False)
        return {"sees": await asyncio.to_thread(path.is_file)}

    async def upload(self, request: Request) -> dict[str, Any]:
        """Like `direct`, for a trainer on another host: the payload is the request's body.

        The rest is in the query: ``name``, ``path``, ``layout_id`` and the payload's ``blake3``.
        """
        query = dict(request.query_params)
        nbytes = self._bytes_of(checks.check_text(query, "layout_id"))
        self._names.check_free(checks.check_name(query.get("name")))
        async with self.inbox.received(request, nbytes, checks.check_text(query, "blake3")) as source:
            return await self.direct({**query, "source": source})

    async def upload_probe(self, request: Request) -> dict[str, Any]:
        """What `upload` costs, without installing anything: as `probe`. ``layout_id`` and ``blake3`` in the query."""
        query = dict(request.query_params)
        nbytes = self._bytes_of(checks.check_text(query, "layout_id"))
        async with self.inbox.received(request, nbytes, checks.check_text(query, "blake3")) as source:
            return await self.probe({"source": source})

    async def direct(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Install a payload as an adapter and checksum it: ``{"name", "path", "layout_id", "source"}``.

        ``path`` is the folder that the version is published in: vLLM reads it where the adapter is asked for after its
        caches let go of it. It may be written behind this call, or be the source itself (``{"kind": "folder"}``).
        """
        name, layout_id = checks.check_name(body.get("name")), checks.check_text(body, "layout_id")
        if body.get("source") == {"kind": "folder"}:
            folder = await asyncio.to_thread(checks.resolve_inside, body.get("path"), self._settings.roots)
            file = await asyncio.to_thread(checks.check_folder, folder, self._settings.limits)
            source: dict[str, Any] = {"kind": "folder", "path": str(folder), "nbytes": file.nbytes}
        else:
            source = check_source(body.get("source"), self._settings.limits.payload)
            folder = checks.resolve_inside(body.get("path"), self._settings.roots, must_exist=False)
        if source["kind"] == "broadcast" and source["nbytes"] != (nbytes := self._bytes_of(layout_id)):
            raise PluginError("bad_source", f"the payload has {source['nbytes']} bytes, not {nbytes}")
        wait = not await self.arrival(source)
        async with self._lock, self._engine.name_lock(name):
            self._names.check_free(name)
            await self._engine.need_awake()
            await self._weights.need_pristine()
            int_id = self._engine.next_id()
            start = time.perf_counter()
            try:
                engines = await self._received("loraflow_direct", source, int_id, layout_id, wait)
                launched, engines = _worker_ms(engines), await self._proven(int_id, engines)
            except PluginError:
                # The engine knows ids only, and this one is used for nothing else: no trace of the name is left.
                await self._engine.workers("loraflow_drop", int_id)
                raise
            self._engine.register(name, int_id, str(folder))
            self._names.used[name] = "loaded"
            elapsed = elapsed_ms(start)
        carrier = "filesystem" if source["kind"] == "folder" else "direct"
        self._metrics.add("loraflow_loads_total", carrier=carrier)
        self._metrics.add("loraflow_payload_bytes_total", source["nbytes"], carrier=carrier)
        log_event(logger, logging.INFO, "adapter_installed", name=name, id=int_id, ms=elapsed, bytes=source["nbytes"])
        return self._digest_answer(name, engines) | {"phases_ms": {"worker": launched, "call": elapsed}}

    async def arrival(self, source: Mapping[str, Any]) -> bool:
        """A payload that was announced is waited for here while requests run, and by the workers of an idle engine.

        Returns:
            Whether requests run, which nothing should hold up.
        """
        if not self._engine.in_flight():
            return False
        if "serial" in source:
            await self._groups.arrival(source["group"], source["serial"])
        else:
            await self._announced.arrival(source)
        return True

    async def _proven(self, int_id: int, engines: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """What the workers found in the slots that they were told to fill: looked for between steps, until it is there.

        Args:
            int_id: The adapter's id.
            engines: What they found so far.
        """
        for look in range(_LOOKS):
            if all(rank["sums"] is not None for ranks in engines for rank in ranks):
                break
            await asyncio.sleep(_LOOK_SECONDS)
            engines = await self._engine.workers("loraflow_direct_sums", int_id, look == _LOOKS - 1)
        return engines

    def _bytes_of(self, layout_id: str) -> int:
        """Bytes of a payload of a layout that was agreed on here, known before any of them comes."""
        nbytes = self._payload_bytes.get(layout_id)
        if nbytes is None:
            raise PluginError("unknown_layout", "this layout was not agreed with this server", status=409)
        return nbytes

    async def _received(self, method: str, source: Mapping[str, Any], *args: Any) -> list[list[dict[str, Any]]]:
        """Call workers with a source, the last argument. A broadcast that fails anywhere ends its group everywhere; one
        that never began does not."""
        try:
            return await self._engine.workers(method, *args, source)
        except PluginError as error:
            if source["kind"] == "broadcast" and error.code not in SPARED:
                await self._groups.end(source["group"])
            raise

    def _digest_answer(self, name: str, engines: list[list[dict[str, Any]]]) -> dict[str, Any]:
        item = self._engine.loaded()[name]
        return {
            "name": name,
            "path": item.path,
            "lora_int_id": item.int_id,
            "engines": [[{"sums": rank["sums"], "dirty": rank["dirty"]} for rank in ranks] for ranks in engines],
            "weights_touched": self._weights.touched,
            "phases_ms": {"worker": _worker_ms(engines)},
        }


def _worker_ms(engines: list[list[dict[str, Any]]]) -> float:
    """Milliseconds of the slowest worker."""
    return float(max(rank["ms"] for ranks in engines for rank in ranks))


def _not_covered(tensors: Mapping[str, list[int]], ranks: list[list[list[int]]]) -> list[str]:
    """Names of tensors that no rank serves, or serves in part only. Pieces of one tensor are equal or disjoint."""
    area = dict.fromkeys(range(len(tensors)), 0)
    for tensor, _, _, rows, cols, _ in {tuple(rect) for rects in ranks for rect in rects}:
        area[tensor] += rows * cols
    return [name for i, (name, shape) in enumerate(tensors.items()) if area[i] < shape[0] * shape[1]]

"""`Service`: what the routes do. One per API server; its state lives as long as the process.

A name means one content for ever (rule 1): a name that was handed to the engine is never taken again, whatever became
of it, and nothing is ever loaded in place.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loraflow_server import checks
from loraflow_server.cache import StoreCache, allowed_url
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.events import log_event
from loraflow_server.fold_desk import FoldDesk
from loraflow_server.ids import content_id
from loraflow_server.inbox import Inbox
from loraflow_server.metrics import Metrics
from loraflow_server.payload import Payloads, check_source
from loraflow_server.settings import Settings
from loraflow_server.weights import BaseWeights

__all__ = ["Service"]

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger("vllm.loraflow")

_LAYOUTS = 4
"""Layouts whose payloads may be uploaded; as many as a worker keeps."""


class Service:
    """The plugin's state and actions.

    Args:
        engine: The engines behind this API server.
        settings: What the operator decided.
        version: Version of loraflow.
    """

    def __init__(self, engine: Engine, settings: Settings, version: str) -> None:
        self.engine = engine
        self.settings = settings
        self.version = version
        self.instance = uuid.uuid4().hex
        self.started = time.time()
        self.metrics = Metrics()
        self.used_names: dict[str, str] = {}
        self.weights = BaseWeights(engine)
        self.folds = FoldDesk(engine, self.weights, settings)
        self.cache: StoreCache | None = None
        if settings.stores and settings.cache_dir is not None:
            self.cache = StoreCache(settings.cache_dir, settings.cache_bytes)
        self._leaving: dict[str, Path] = {}  # unloaded names that requests may still use, and their folders
        self.inbox = Inbox()
        self._announced = Payloads(torch.device("cpu"))
        self._payload_bytes: dict[str, int] = {}  # by layout agreed on: what an upload must have
        self.lock = asyncio.Lock()  # one change at a time: loads, folds and resets exclude each other

    @property
    def worker_extension(self) -> bool:
        """Whether the workers have `LoraflowWorker`."""
        return self.engine.has_extension

    def capabilities(self) -> list[str]:
        """What this server can do, as stable words."""
        found = ["status", "metrics", "pause", *(["hold"] if self.engine.has_version else [])]
        lora = self.engine.config.lora_config is not None
        if lora and self.engine.api_servers == 1:
            found.append("adapters")
            if self.cache is not None:
                found.append("stores")
        if self.worker_extension:
            found += ["base", "announced"]
            if self.engine.plain_weights:
                found += ["weights", "fold"] if self.engine.api_servers == 1 else ["weights"]
            if lora:
                found += ["layout", "verify", "digest"]
                found += ["direct", "upload", "folder"] if self.engine.api_servers == 1 else []
        return found

    def need(self, capability: str, why: str) -> None:
        """Refuse with ``not_capable`` where the server lacks ``capability``."""
        if capability not in self.capabilities():
            raise PluginError("not_capable", why, status=409)

    # ---------------------------------------------------------------- description

    async def status(self) -> dict[str, Any]:
        """What the server is and what it serves."""
        workers = await self.engine.workers("loraflow_state") if self.worker_extension else []
        slots = [set(rank["slots"]) for ranks in workers for rank in ranks]
        adapters = [
            {
                "name": item.name,
                "path": item.path,
                "lora_int_id": item.int_id,
                "resident": None if not slots else all(item.int_id in held for held in slots),
                "in_flight": self.engine.in_flight(item.name),
            }
            for item in self.engine.loaded().values()
        ]
        return {
            "version": self.version,
            "vllm_version": _vllm_version(),
            "instance": self.instance,
            "uptime_s": round(time.time() - self.started, 3),
            "worker_extension": self.worker_extension,
            "capabilities": self.capabilities(),
            "roots": [str(root) for root in self.settings.roots],
            "stores": list(self.settings.stores),
            "token": self.settings.token is not None,
            "api_servers": self.engine.api_servers,
            "engines": len(workers) or None,
            "gpus": sorted({rank["gpu"] for ranks in workers for rank in ranks if rank["gpu"]}),
            "in_flight": self.engine.in_flight(),
            "adapters": adapters,
            "fold": self.folds.describe(),
            **self.weights.describe(),
            "vllm_config": self.engine.describe(),
        }

    # ---------------------------------------------------------------- adapters

    async def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Load a folder of this host, or a version of a store: ``{"name", "path"}`` or ``{"name", "url"}``."""
        if self.engine.api_servers > 1:
            raise PluginError(
                "several_api_servers",
                "adapter names live in one API server: start with --api-server-count 1",
                status=409,
            )
        self.need("adapters", "the server was started without --enable-lora")
        name = checks.check_name(body.get("name"))
        if body.get("load_inplace"):
            raise PluginError("load_inplace", "a name means one content for ever: load under a new name")
        if ("path" in body) == ("url" in body):
            raise PluginError("bad_request", "give either a path of this server or the URL of a store")
        phases: dict[str, float] = {}
        async with self.lock, self.engine.name_lock(name):
            self._release_cache()
            folder = await self._folder(body, name, phases)
            if self._already(name, folder):
                return self._loaded(name, phases, already=True)
            self.check_free(name)
            start = time.perf_counter()
            file = await asyncio.to_thread(checks.check_folder, folder, self.settings.limits)
            phases["check"] = _ms(start)
            await self.weights.need_pristine()
            start = time.perf_counter()
            self.used_names[name] = "burnt"
            int_id = self.engine.next_id()
            await self.engine.add_adapter(name, int_id, str(folder))
            self.engine.register(name, int_id, str(folder))
            self.used_names[name] = "loaded"
            phases["load"] = _ms(start)
        self.metrics.add("loraflow_loads_total", carrier="filesystem")
        self.metrics.add("loraflow_payload_bytes_total", file.nbytes, carrier="filesystem")
        log_event(
            logger,
            logging.INFO,
            "adapter_loaded",
            name=name,
            id=int_id,
            path=folder,
            ms=phases["load"],
            bytes=file.nbytes,
        )
        return self._loaded(name, phases, already=False)

    async def _folder(self, body: Mapping[str, Any], name: str, phases: dict[str, float]) -> Path:
        """The folder that a request means: one of this host, or the cache's for a version in a store."""
        given = body.get("url", body.get("path"))
        if isinstance(given, str) and "://" in given:
            if self.cache is None:
                raise PluginError("outside_stores", "no store is configured (LORAFLOW_STORE_ROOTS)", status=403)
            url = allowed_url(given, self.settings.stores)
            folder, spent = await asyncio.to_thread(self.cache.fetch, url, name)
            phases |= {phase: round(ms, 3) for phase, ms in spent.items()}
            return folder
        start = time.perf_counter()
        folder = await asyncio.to_thread(checks.resolve_inside, given, self.settings.roots)
        phases["resolve"] = _ms(start)
        return folder

    def _release_cache(self) -> None:
        """Let the cache evict what nothing here uses any more."""
        if self.cache is None:
            return
        self._leaving = {name: path for name, path in self._leaving.items() if self.engine.in_flight(name)}
        used = {Path(item.path) for item in self.engine.loaded().values()} | set(self._leaving.values())
        self.cache.release(self.cache.held() - used)

    def _already(self, name: str, folder: Path) -> bool:
        loaded = self.engine.loaded().get(name)
        return loaded is not None and Path(loaded.path) == folder

    def _loaded(self, name: str, phases: Mapping[str, float], *, already: bool) -> dict[str, Any]:
        item = self.engine.loaded()[name]
        return {
            "name": name,
            "path": item.path,
            "lora_int_id": item.int_id,
            "already_loaded": already,
            "phases_ms": dict(phases),
        }

    def check_free(self, name: str) -> None:
        """Refuse a name that means, or meant, something else."""
        if self.engine.is_base(name) or name in self.engine.loaded():
            raise PluginError("name_taken", f"the name {name!r} is in use for something else", status=409)
        if name in self.used_names:
            raise PluginError(
                "name_used",
                f"the name {name!r} was used before ({self.used_names[name]}): a name is used once",
                status=409,
            )

    async def unload(self, name: str) -> dict[str, Any]:
        """Refuse new requests for ``name``, for ever."""
        checks.check_name(name)
        async with self.engine.name_lock(name):
            if name not in self.engine.loaded():
                raise PluginError("not_found", f"no adapter {name!r} is loaded", status=404)
            self._leaving[name] = Path(self.engine.loaded()[name].path)
            self.engine.forget(name)
            self._release_cache()
            self.used_names[name] = "unloaded"
        self.metrics.add("loraflow_unloads_total")
        log_event(logger, logging.INFO, "adapter_unloaded", name=name, in_flight=self.engine.in_flight(name))
        return {"name": name, "in_flight": self.engine.in_flight(name)}

    # ---------------------------------------------------------------- proof

    async def layout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Agree on where an adapter's tensors lie in the slots: ``{"tensors": {name: [rows, cols]}}``."""
        self.need("layout", "the workers lack loraflow's extension, or LoRA is off")
        tensors = checks.check_adapter(body.get("tensors"), self.settings.limits)
        layout_id = content_id(tensors)
        engines = await self.engine.workers("loraflow_layout", layout_id, tensors)
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
        while len(self._payload_bytes) >= _LAYOUTS:
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
        self.need("verify", "the workers lack loraflow's extension, or LoRA is off")
        name, layout_id = checks.check_name(body.get("name")), _text(body, "layout_id")
        item = self.engine.loaded().get(name)
        if item is None:
            raise PluginError("not_found", f"no adapter {name!r} is loaded", status=404)
        if self.weights.touched:
            await self.weights.compare()  # what may have changed them may have left them alone
        engines = await self.engine.workers("loraflow_checksum", item.int_id, name, item.path, layout_id)
        self.metrics.add("loraflow_verifies_total")
        return self._digest_answer(name, engines)

    # ---------------------------------------------------------------- direct

    async def probe(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Whether every worker reaches a payload: ``{"source"}`` gives its first 16 bytes as each sees them."""
        self.need("base", "the workers lack loraflow's extension (--worker-extension-cls)")
        source = check_source(body.get("source"), self.settings.limits.payload)
        engines = await self.engine.workers("loraflow_probe", source)
        return {"heads": [[rank["head"] for rank in ranks] for ranks in engines]}

    async def sees(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Whether a file under the roots is on this host as well: ``{"path"}``."""
        path = await asyncio.to_thread(checks.resolve_inside, body.get("path"), self.settings.roots, must_exist=False)
        return {"sees": await asyncio.to_thread(path.is_file)}

    async def upload(self, request: Request) -> dict[str, Any]:
        """Like `direct`, for a trainer on another host: the payload is the request's body.

        The rest is in the query: ``name``, ``path``, ``layout_id`` and the payload's ``blake3``.
        """
        query = dict(request.query_params)
        nbytes = self._payload_bytes.get(_text(query, "layout_id"))
        if nbytes is None:  # of a layout that was agreed on here, so that its size is known beforehand
            raise PluginError("unknown_layout", "this layout was not agreed with this server", status=409)
        self.check_free(checks.check_name(query.get("name")))
        async with self.inbox.received(request, nbytes, _text(query, "blake3")) as source:
            return await self.direct({**query, "source": source})

    async def direct(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Install a payload as an adapter and checksum it: ``{"name", "path", "layout_id", "source"}``.

        ``path`` is the folder that the version is published in: vLLM reads it where the adapter is asked for after its
        caches let go of it. It may be written behind this call, or be the source itself (``{"kind": "folder"}``).
        """
        self.need("direct", "the workers lack loraflow's extension, or LoRA is off")
        name, layout_id = checks.check_name(body.get("name")), _text(body, "layout_id")
        if body.get("source") == {"kind": "folder"}:
            folder = await asyncio.to_thread(checks.resolve_inside, body.get("path"), self.settings.roots)
            file = await asyncio.to_thread(checks.check_folder, folder, self.settings.limits)
            source: dict[str, Any] = {"kind": "folder", "path": str(folder), "nbytes": file.nbytes}
        else:
            source = check_source(body.get("source"), self.settings.limits.payload)
            folder = checks.resolve_inside(body.get("path"), self.settings.roots, must_exist=False)
        await self._settled(source)
        async with self.lock, self.engine.name_lock(name):
            self.check_free(name)
            await self.weights.need_pristine()
            int_id = self.engine.next_id()
            start = time.perf_counter()
            try:
                engines = await self.engine.workers("loraflow_direct", int_id, layout_id, source)
            except PluginError:
                # The engine knows ids only, and this one is used for nothing else: no trace of the name is left.
                await self.engine.workers("loraflow_drop", int_id)
                raise
            self.engine.register(name, int_id, str(folder))
            self.used_names[name] = "loaded"
            elapsed = _ms(start)
        self.metrics.add("loraflow_loads_total", carrier="direct")
        self.metrics.add("loraflow_payload_bytes_total", source["nbytes"], carrier="direct")
        log_event(logger, logging.INFO, "adapter_installed", name=name, id=int_id, ms=elapsed, bytes=source["nbytes"])
        return self._digest_answer(name, engines) | {
            "phases_ms": {"worker": max(rank["ms"] for ranks in engines for rank in ranks), "call": elapsed}
        }

    async def _settled(self, source: Mapping[str, Any]) -> None:
        """A payload that was announced is waited for here while requests run, and by the workers of an idle engine."""
        if self.engine.in_flight():
            await self._announced.arrival(source)

    def _digest_answer(self, name: str, engines: list[list[dict[str, Any]]]) -> dict[str, Any]:
        item = self.engine.loaded()[name]
        return {
            "name": name,
            "path": item.path,
            "lora_int_id": item.int_id,
            "engines": [[{"sums": rank["sums"], "dirty": rank["dirty"]} for rank in ranks] for ranks in engines],
            "weights_touched": self.weights.touched,
            "phases_ms": {"worker": max(rank["ms"] for ranks in engines for rank in ranks)},
        }

    # ---------------------------------------------------------------- base weights

    async def base(self) -> dict[str, Any]:
        """Fingerprint of the base weights as served now, and as they were before the first update."""
        self.need("base", "the workers lack loraflow's extension (--worker-extension-cls)")
        return await self.weights.compare()

    async def weights_layout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `BaseWeights.layout`: ``{"tensors": {name: shape}}`` of checkpoint weights."""
        self.need("weights", "the workers lack loraflow's extension, or the base weights are not plain")
        tensors = checks.check_shapes(body.get("tensors"), self.settings.limits.tensors, dims=(1, 2))
        async with self.lock:
            return await self.weights.layout(tensors)

    async def weights_sums(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `BaseWeights.sums`: ``{"layout_id"}``."""
        self.need("weights", "the workers lack loraflow's extension, or the base weights are not plain")
        return await self.weights.sums(_text(body, "layout_id"))

    async def pause(self) -> dict[str, Any]:
        """Let no step run until `resume`; requests keep their place."""
        return {"paused_here": await self.engine.pause()}

    async def resume(self) -> dict[str, Any]:
        """Forget what was computed with the old weights, and let steps run again."""
        await self.engine.release()
        return {}

    async def hold(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Before an update: ``{"label"}`` becomes the weights' name, and no step runs until `resume`.

        Returns:
            ``was``: their name before; ``paused_here``, as of `pause`; ``adapters``: names that requests may use then.
        """
        self.need("hold", "this vLLM keeps no name of its weights")
        held = await self.engine.hold(_text(body, "label", 256))
        return {**held, "adapters": sorted(self.engine.loaded())}

    # ---------------------------------------------------------------- fold

    async def fold_layout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `FoldDesk.layout`."""
        self.need("fold", "the workers lack loraflow's extension, or the base weights are not plain")
        async with self.lock:
            return await self.folds.layout(body)

    async def fold(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `FoldDesk.fold`; the source is a payload, or a published version (``path`` or ``url``)."""
        self.need("fold", "the workers lack loraflow's extension, or the base weights are not plain")
        async with self.lock:
            answer = await self.folds.fold(body, self._fold_source)
        self.metrics.add("loraflow_folds_total")
        return answer

    async def fold_undo(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `FoldDesk.undo`."""
        async with self.lock:
            return await self.folds.undo(body)

    async def reset(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `FoldDesk.reset`."""
        self.need("base", "the workers lack loraflow's extension (--worker-extension-cls)")
        async with self.lock:
            answer = await self.folds.reset(body)
        self.metrics.add("loraflow_resets_total")
        return answer

    async def _fold_source(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "source" in body:
            source = check_source(body["source"], self.settings.limits.payload)
            await self._settled(source)
            return source
        self._release_cache()
        folder = await self._folder(body, checks.check_name(body.get("policy")), {})
        await asyncio.to_thread(checks.check_folder, folder, self.settings.limits)
        return {"kind": "folder", "path": str(folder)}

    def metrics_text(self) -> str:
        """Counters in Prometheus' text form."""
        gauges = {
            "loraflow_adapters_loaded": len(self.engine.loaded()),
            "loraflow_names_used": len(self.used_names),
            "loraflow_weights_touched": float(self.weights.touched),
        }
        if self.cache is not None:
            gauges["loraflow_cache_bytes"] = self.cache.nbytes()
        return self.metrics.text(gauges)


def _not_covered(tensors: Mapping[str, list[int]], ranks: list[list[list[int]]]) -> list[str]:
    """Names of tensors that no rank serves, or serves in part only. Pieces of one tensor are equal or disjoint."""
    area = dict.fromkeys(range(len(tensors)), 0)
    for tensor, _, _, rows, cols, _ in {tuple(rect) for rects in ranks for rect in rects}:
        area[tensor] += rows * cols
    return [name for i, (name, shape) in enumerate(tensors.items()) if area[i] < shape[0] * shape[1]]


def _text(body: Mapping[str, Any], key: str, limit: int = 128) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        raise PluginError("bad_request", f"{key} is a string of 1 to {limit} characters")
    return value


def _ms(start: float) -> float:
    return round((time.perf_counter() - start) * 1e3, 3)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)

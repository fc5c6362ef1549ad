"""`Service`: what the routes do. One per API server; its state lives as long as the process.

A name means one content for ever (rule 1): a name that was handed to the engine is never taken again, whatever became
of it, and nothing is ever loaded in place.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraflow_server import checks
from loraflow_server.cache import StoreCache, allowed_url
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.events import log_event
from loraflow_server.fold_desk import FoldDesk
from loraflow_server.group_desk import GroupDesk
from loraflow_server.lifeline import Lifeline
from loraflow_server.mapped import check_where
from loraflow_server.metrics import Metrics, elapsed_ms
from loraflow_server.names import Names
from loraflow_server.payload import check_source
from loraflow_server.settings import Settings
from loraflow_server.slot_desk import SlotDesk
from loraflow_server.weights import BaseWeights

__all__ = ["Service"]

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger("vllm.loraflow")


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
        self.started = time.monotonic()
        self.metrics = Metrics()
        self.names = Names(engine)
        self.weights = BaseWeights(engine)
        self.folds = FoldDesk(engine, self.weights, settings)
        self.cache: StoreCache | None = None
        if settings.stores and settings.cache_dir is not None:
            self.cache = StoreCache(settings.cache_dir, settings.cache_bytes)
        self._leaving: dict[str, Path] = {}  # unloaded names that requests may still use, and their folders
        self._lifeline = Lifeline()
        self.lock = asyncio.Lock()  # one change at a time: loads, folds and resets exclude each other
        self.groups = GroupDesk(engine, self.lock)
        self.slots = SlotDesk(engine, self.weights, settings, self.names, self.metrics, self.lock, self.groups)

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
            found += ["base", "announced", *(["group", "group_announced"] if self.engine.api_servers == 1 else [])]
            if self.engine.plain_weights:
                found += ["weights", "fold"] if self.engine.api_servers == 1 else ["weights"]
                if self.engine.has_version:
                    found += ["mapped", *(["receive"] if self.engine.has_group else [])]
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
            "uptime_s": round(time.monotonic() - self.started, 3),
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
            self.names.check_free(name)
            start = time.perf_counter()
            file = await asyncio.to_thread(checks.check_folder, folder, self.settings.limits)
            phases["check"] = elapsed_ms(start)
            await self.engine.need_awake()
            await self.weights.need_pristine()
            start = time.perf_counter()
            self.names.used[name] = "burnt"
            int_id = self.engine.next_id()
            await self.engine.add_adapter(name, int_id, str(folder))
            self.engine.register(name, int_id, str(folder))
            self.names.used[name] = "loaded"
            phases["load"] = elapsed_ms(start)
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
        phases["resolve"] = elapsed_ms(start)
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

    async def unload(self, name: str) -> dict[str, Any]:
        """Refuse new requests for ``name``, for ever."""
        checks.check_name(name)
        async with self.engine.name_lock(name):
            if name not in self.engine.loaded():
                raise PluginError("not_found", f"no adapter {name!r} is loaded", status=404)
            self._leaving[name] = Path(self.engine.loaded()[name].path)
            self.engine.forget(name)
            if not self.lock.locked():  # a version that is being loaded has no name yet; the next load lets go
                self._release_cache()
            self.names.used[name] = "unloaded"
        self.metrics.add("loraflow_unloads_total")
        log_event(logger, logging.INFO, "adapter_unloaded", name=name, in_flight=self.engine.in_flight(name))
        return {"name": name, "in_flight": self.engine.in_flight(name)}

    # ---------------------------------------------------------------- LoRA slots

    async def layout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `SlotDesk.layout`."""
        self.need("layout", "the workers lack loraflow's extension, or LoRA is off")
        return await self.slots.layout(body)

    async def verify(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `SlotDesk.verify`."""
        self.need("verify", "the workers lack loraflow's extension, or LoRA is off")
        return await self.slots.verify(body)

    async def probe(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `SlotDesk.probe`."""
        self.need("base", "the workers lack loraflow's extension (--worker-extension-cls)")
        return await self.slots.probe(body)

    async def direct(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `SlotDesk.direct`."""
        self.need("direct", "the workers lack loraflow's extension, or LoRA is off")
        return await self.slots.direct(body)

    async def upload(self, request: Request) -> dict[str, Any]:
        """See `SlotDesk.upload`."""
        self.need("direct", "the workers lack loraflow's extension, or LoRA is off")
        return await self.slots.upload(request)

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
        return await self.weights.sums(checks.check_text(body, "layout_id"))

    async def weights_receive(self, body: Mapping[str, Any], gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """See `BaseWeights.receive`: ``{"layout_id", "names", "dtypes", "buckets", "label", "timeout"}``.

        With ``"mapped": {"name", "first"}`` the buckets lie in memory that the workers have mapped (`weights_map`). It
        is called off where the caller has ``gone``, or by `weights_call_off`.
        """
        mapped = body.get("mapped") is not None
        self.need(
            "mapped" if mapped else "receive",
            "the base weights are not plain" + ("" if mapped else ", or the workers are in no broadcast group"),
        )
        incoming, label, timeout = checks.check_incoming(body, self.settings.limits)
        async with self.lock, self._lifeline.held(gone) as path:
            self.folds.need_idle()
            self.engine.need_no_adapters()
            answer = await self.weights.receive({**incoming, "lifeline": path}, label, timeout)
        self.metrics.add("loraflow_receives_total")
        return answer

    async def weights_call_off(self) -> dict[str, Any]:
        """Have the workers give up on the broadcast that they wait for, and on its group."""
        return {"called_off": self._lifeline.cut()}

    async def weights_map(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `BaseWeights.map`: ``{"source", "buffers", "stride", "flags", "workers"}``."""
        self.need("mapped", "the workers lack loraflow's extension, or the base weights are not plain")
        where = check_where(body, self.engine.worker_count, self.settings.limits.payload)
        async with self.lock:
            return await self.weights.map(where)

    async def weights_unmap(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `BaseWeights.unmap`: ``{"name"}``, the name of the flags; without it, whatever is mapped."""
        self.need("mapped", "the workers lack loraflow's extension, or the base weights are not plain")
        name = None if body.get("name") is None else checks.check_text(body, "name")
        async with self.lock:
            return await self.weights.unmap(name)

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
        held = await self.engine.hold(checks.check_text(body, "label", 256))
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
            if source["kind"] == "broadcast":
                raise PluginError("bad_source", "payloads to fold are not broadcast")
            await self.slots.arrival(source)
            return source
        self._release_cache()
        folder = await self._folder(body, checks.check_name(body.get("policy")), {})
        await asyncio.to_thread(checks.check_folder, folder, self.settings.limits)
        return {"kind": "folder", "path": str(folder)}

    def metrics_text(self) -> str:
        """Counters in Prometheus' text form."""
        gauges = {
            "loraflow_adapters_loaded": len(self.engine.loaded()),
            "loraflow_names_used": len(self.names.used),
            "loraflow_weights_touched": float(self.weights.touched),
        }
        if self.cache is not None:
            gauges["loraflow_cache_bytes"] = self.cache.nbytes()
        return self.metrics.text(gauges)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)

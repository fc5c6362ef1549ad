"""The plugin behind real HTTP over vLLM's LoRA manager in this process: all of a delivery but the engine's loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI

from loraflow_server.routes import LoraflowEndpoints
from loraflow_server.settings import Settings
from tests.helpers.lora_worker import LoraHost

__all__ = ["plugin_server"]

_ids = itertools.count(100_001)  # two servers may have one worker


class _Models:
    """vLLM's registry of names."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.lora_resolver_lock: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.lora_id_counter = SimpleNamespace(inc=lambda _: next(_ids))

    def is_base_model(self, name: str) -> bool:
        return name == "base"


class _Client:
    """vLLM's engine client: one engine of one worker, asked directly."""

    def __init__(self, host: LoraHost) -> None:
        self._host = host
        self.vllm_config = host.config
        host.config.parallel_config.worker_extension_cls = "loraflow_server.worker.LoraflowWorker"
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(core_engines=[None], _call_utility_async=self._utility)

    async def _utility(self, method: str, *args: Any, engine: Any) -> Any:
        if method == "loraflow_asleep":
            return self._host.asleep
        assert method == "collective_rpc"
        name, _, arguments, _ = args
        with self._host.in_step:
            return [getattr(self._host.worker, name)(*arguments)]

    async def add_lora(self, request: Any) -> bool:
        return bool(self._host.loras.add_adapter(request))


@contextmanager
def plugin_server(host: LoraHost, root: Path, *, token: str | None = None) -> Iterator[str]:
    """URL of a server whose adapters may lie under ``root``."""
    app, models = FastAPI(), _Models()
    plugin = LoraflowEndpoints()
    plugin.settings = Settings(roots=(root.resolve(),), token=token)
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(_Client(host), SimpleNamespace(openai_serving_models=models), Namespace()))
    host.worker._weight_update_active = False
    app.add_api_route("/version", lambda: {"version": "0.32.0"})
    app.add_api_route("/health", lambda: {"status": "up"})

    def listed() -> dict[str, Any]:
        adapters = [
            {"id": name, "root": item.lora_path, "parent": "base"} for name, item in models.lora_requests.items()
        ]
        return {"data": [{"id": "base", "root": "base", "parent": None, "max_model_len": 128}, *adapters]}

    app.add_api_route("/v1/models", listed)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        if plugin.service is not None:
            plugin.service.slots.inbox.close()

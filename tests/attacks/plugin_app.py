"""The plugin's routes on an app of their own, over an engine that must never be reached by what is refused."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from loraflow_server.routes import LoraflowEndpoints
from loraflow_server.settings import Settings

__all__ = ["Models", "attackable"]


class Models:
    """vLLM's registry of names, as far as the plugin uses it."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.lora_id_counter = SimpleNamespace(inc=lambda step: step)
        self.lora_resolver_lock: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def is_base_model(self, name: str) -> bool:
        return name == "base"


class Client:
    """vLLM's engine client; counts the adapters that reach it."""

    def __init__(self) -> None:
        self.added: list[str] = []
        parallel = SimpleNamespace(worker_extension_cls="", tensor_parallel_size=1)
        model = SimpleNamespace(quantization=None)
        device = SimpleNamespace(device_type="cpu")
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, model_config=model, device_config=device, lora_config=object()
        )
        self.output_processor = SimpleNamespace(request_states={})

    async def add_lora(self, request: Any) -> bool:
        self.added.append(request.lora_path)
        return True


def attackable(settings: Settings, host: str = "127.0.0.1") -> tuple[TestClient, Client]:
    """A test client of the plugin under ``settings``, seen as coming from ``host``; and the engine behind it."""
    plugin = LoraflowEndpoints()
    plugin.settings = settings
    app, client = FastAPI(), Client()
    plugin.attach_router(app)
    state = SimpleNamespace(openai_serving_models=Models())
    asyncio.run(plugin.init_state(client, state, Namespace(api_server_count=1)))
    return TestClient(app, client=(host, 4242)), client


def folder_of(root: Path, name: str = "good") -> Path:
    """An empty adapter folder with a config."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}')
    return folder

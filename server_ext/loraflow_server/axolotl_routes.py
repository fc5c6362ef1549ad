"""The routes of Axolotl's own LoRA server, for people who stay on Axolotl's own trainer code.

``POST /set_lora_adapter/``, ``POST /clear_lora_adapter/`` and ``GET /health/`` take the bodies that Axolotl's
``vllm_serve_lora`` takes, under this plugin's rules: the caller is checked, the folder lies under the allowed roots and
is checked, and a name means one content for ever. So an adapter is served under a name of its own, which the answer
tells (``model``); Axolotl's server applies the last one to every request instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraflow_server.errors import PluginError
from loraflow_server.guard import peeked, route_of

if TYPE_CHECKING:
    from loraflow_server.service import Service

__all__ = ["attach"]

LOAD_ROUTE = "/v1/load_lora_adapter"
"""The route that Axolotl's trainer tries first, with ``load_inplace``."""

_MAX_BODY = 1 << 20

Handler = Callable[["Service", Mapping[str, Any]], Awaitable[Any]]
Answer = Callable[..., Awaitable[Response]]


def attach(app: FastAPI, answer: Answer, ready: Callable[[], Service]) -> None:
    """Add the routes to vLLM's app.

    Args:
        app: vLLM's.
        answer: ``answer(request, route, handler, body=…)``: checks the caller, parses the body, reports errors.
        ready: The service; raises `PluginError` before the engine is up.
    """
    active = _Active()

    def add(method: str, path: str, handler: Handler, *, body: bool) -> None:
        async def endpoint(request: Request) -> Response:
            return await answer(request, f"{method} {path}", handler, body=body)

        app.add_api_route(path, endpoint, methods=[method], name=f"loraflow axolotl {method} {path}")

    add("POST", "/set_lora_adapter/", active.set, body=True)
    add("POST", "/clear_lora_adapter/", active.clear, body=False)

    async def health() -> Response:
        try:
            await ready().engine.client.check_health()
        except Exception as error:  # noqa: BLE001 - vLLM's protocol names no type; whatever it is, it is not healthy
            return JSONResponse({"status": "error", "message": str(error) or type(error).__name__}, status_code=503)
        return JSONResponse({"status": "ok"})

    app.add_api_route("/health/", health, methods=["GET"], name="loraflow axolotl GET /health/")
    app.add_middleware(_NeverInPlace)


class _Active:
    """The adapter that was set last; the one before it is unloaded, since Axolotl deletes its folder."""

    def __init__(self) -> None:
        self._name: str | None = None

    async def set(self, service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
        """Load ``lora_path`` as version ``lora_int_id`` of ``lora_name``."""
        given, number, path = body.get("lora_name"), body.get("lora_int_id"), body.get("lora_path")
        if not isinstance(given, str) or not isinstance(path, str) or isinstance(number, bool):
            raise PluginError("bad_request", "lora_name and lora_path are texts, lora_int_id is a number")
        if not isinstance(number, int):
            raise PluginError("bad_request", "lora_int_id is a whole number")
        if body.get("load_inplace"):
            raise PluginError("load_inplace", "a name means one content for ever: leave load_inplace out")
        # Axolotl counts from 1 in every run; its folders are new ones, and tell the runs apart.
        name = f"{given.rpartition('/')[2]}-v{number}-{hashlib.blake2s(path.encode(), digest_size=4).hexdigest()}"
        loaded = await service.load({"name": name, "path": path})
        previous, self._name = self._name, name
        if previous not in {None, name} and previous in service.engine.loaded():
            await service.unload(str(previous))
        return {"status": "ok", "model": name, "lora_int_id": loaded["lora_int_id"]}

    async def clear(self, service: Service, _: Mapping[str, Any]) -> dict[str, Any]:
        """Unload the adapter that was set last; requests name the base model again."""
        previous, self._name = self._name, None
        if previous is not None and previous in service.engine.loaded():
            await service.unload(previous)
        return {"status": "ok"}


class _NeverInPlace:
    """Refuses ``load_inplace`` on vLLM's own route, so that Axolotl's trainer falls back to ``/set_lora_adapter/``.

    In place, vLLM reads the folder again at every engine step, and Axolotl's trainer deletes it: the engine dies.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_of(scope) != LOAD_ROUTE:
            await self._app(scope, receive, send)
            return
        body, replay = await peeked(receive, _MAX_BODY)
        if len(body) > _MAX_BODY or _asks_in_place(body):
            text = "load_inplace: a name means one content for ever; load under a new name"
            if len(body) > _MAX_BODY:  # too long to be looked through
                text = f"the body has more than {_MAX_BODY} bytes"
            refusal = {"error": {"message": text, "type": "BadRequestError", "code": 400}}
            await JSONResponse(refusal, status_code=400)(scope, receive, send)
            return

        await self._app(scope, replay, send)


def _asks_in_place(body: bytes) -> bool:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM answers what is no JSON
    return isinstance(parsed, dict) and bool(parsed.get("load_inplace"))

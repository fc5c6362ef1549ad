"""`LoraflowEndpoints`: the plugin's HTTP routes (entry point ``vllm.endpoint_plugins``)."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraflow_server import axolotl_routes
from loraflow_server.checks import no_key_twice
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.events import log_event
from loraflow_server.guard import check_caller, peeked, read_body, route_of
from loraflow_server.service import Service
from loraflow_server.settings import Settings

__all__ = ["LoraflowEndpoints"]

logger = logging.getLogger("vllm.loraflow")

PREFIX = "/loraflow/v1"
METRICS_TYPE = "text/plain; version=0.0.4"
UPDATE_ROUTES = frozenset({"/start_weight_update", "/update_weights"})
"""vLLM's own routes that change the base weights."""
CALL_ROUTE = "/collective_rpc"
"""vLLM's route for any method of a worker, which may change them too."""
CHECK_ROUTE, CHECK_BYTES = "/weight_checker", 16 << 20
"""vLLM's route that checksums the weights, or zeroes them, and the bytes of its body that are looked through."""
SLEEP_ROUTE, KEPT = "/sleep", frozenset({"0", "1"})
"""vLLM's route that frees memory, and the levels at which the weights come back as they were."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""Escapes of characters that mean something in pairs only."""

Handler = Callable[[Service, Mapping[str, Any]], Awaitable[Any]]


class LoraflowEndpoints:
    """vLLM's `EndpointPlugin`: attaches the routes, then gets the engine."""

    name = "loraflow"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.settings = Settings.from_env()
        self.service: Service | None = None

    # ---------------------------------------------------------------- vLLM's protocol

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the watch over vLLM's own update routes."""

        def add(method: str, path: str, handler: Handler, *, body: bool = False) -> None:
            async def endpoint(request: Request) -> Response:
                return await self._answer(request, f"{method} {path}", handler, body=body)

            app.add_api_route(PREFIX + path, endpoint, methods=[method], name=f"loraflow {method} {path}")

        add("GET", "/status", lambda service, _: service.status())
        add("GET", "/adapters", _list_adapters)
        add("POST", "/adapters", lambda service, body: service.load(body), body=True)
        add("DELETE", "/adapters/{name}", lambda service, body: service.unload(body["name"]))
        add("POST", "/layout", lambda service, body: service.layout(body), body=True)
        add("POST", "/verify", lambda service, body: service.verify(body), body=True)
        add("POST", "/direct", lambda service, body: service.direct(body), body=True)
        add("POST", "/direct/probe", lambda service, body: service.probe(body), body=True)
        add("POST", "/direct/sees", lambda service, body: service.slots.sees(body), body=True)
        add("POST", "/group/join", lambda service, body: service.groups.join(body), body=True)
        add("POST", "/group/leave", lambda service, body: service.groups.leave(body), body=True)
        add("POST", "/fold/layout", lambda service, body: service.fold_layout(body), body=True)
        add("POST", "/fold", lambda service, body: service.fold(body), body=True)
        add("POST", "/fold/undo", lambda service, body: service.fold_undo(body), body=True)
        add("POST", "/reset", lambda service, body: service.reset(body), body=True)
        add("GET", "/base", lambda service, _: service.base())
        add("POST", "/weights/layout", lambda service, body: service.weights_layout(body), body=True)
        add("POST", "/weights/sums", lambda service, body: service.weights_sums(body), body=True)
        add("POST", "/weights/map", lambda service, body: service.weights_map(body), body=True)
        add("POST", "/weights/unmap", lambda service, body: service.weights_unmap(body), body=True)
        add("POST", "/weights/call_off", lambda service, _: service.weights_call_off())
        add("POST", "/pause", lambda service, _: service.pause())
        add("POST", "/hold", lambda service, body: service.hold(body), body=True)
        add("POST", "/resume", lambda service, _: service.resume())
        add("GET", "/metrics", _metrics)

        def add_whole(path: str, handler: Callable[[Request], Handler], *, body: bool) -> None:
            async def endpoint(request: Request) -> Response:
                return await self._answer(request, f"POST {path}", handler(request), body=body)

            app.add_api_route(PREFIX + path, endpoint, methods=["POST"], name=f"loraflow POST {path}")

        add_whole("/direct/upload", _upload, body=False)  # its body is no JSON
        add_whole("/direct/upload/probe", _upload_probe, body=False)
        add_whole("/weights/receive", _receive, body=True)
        app.add_middleware(_WatchUpdates, plugin=self)
        axolotl_routes.attach(app, self._answer, self._ready)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Called once the engine is up."""
        if engine_client is None:
            return
        count = getattr(args, "api_server_count", None) or 1
        engine = Engine(engine_client, state.openai_serving_models, count)
        self.service = Service(engine, self.settings, importlib.metadata.version("loraflow"))
        logger.info(
            "loraflow %s: routes under %s, roots %s, %s",
            self.service.version,
            PREFIX,
            [str(root) for root in self.settings.roots],
            "bearer token required" if self.settings.token else "callers on this host only",
        )

    # ---------------------------------------------------------------- one request

    async def _answer(self, request: Request, route: str, handler: Handler, *, body: bool) -> Response:
        started = time.perf_counter()
        service = self.service
        try:
            check_caller(request, self.settings)
            arguments = await self._arguments(request, body=body)
            result = await handler(self._ready(), arguments)
            text = isinstance(result, str)
            answer: Response = PlainTextResponse(result, media_type=METRICS_TYPE) if text else JSONResponse(result)
        except PluginError as error:
            if service is not None:
                service.metrics.add("loraflow_refusals_total", code=error.code)
            log_event(
                logger,
                logging.WARNING,
                "refused",
                route=route,
                status=error.status,
                code=error.code,
                reason=error.message[:500],
            )
            answer = _error(error)
        except Exception as error:
            logger.exception("loraflow: %s failed", route)
            if service is not None:
                service.metrics.add("loraflow_refusals_total", code="internal")
            answer = _error(PluginError("internal", f"{type(error).__name__}: {_plain(error)}", status=500))
        if service is not None:
            service.metrics.add("loraflow_requests_total", route=route)
            service.metrics.add("loraflow_request_seconds_total", time.perf_counter() - started, route=route)
        return answer

    def _ready(self) -> Service:
        if self.service is None:
            raise PluginError("not_ready", "the engine is not up yet", status=503)
        return self.service

    async def _arguments(self, request: Request, *, body: bool) -> Mapping[str, Any]:
        if not body:
            return dict(request.path_params)
        return _parsed(await read_body(request, self.settings.limits.body))


def _parsed(raw: bytes) -> Mapping[str, Any]:
    try:
        text = raw.decode()
        parsed = json.loads(text, parse_constant=_no_number, object_pairs_hook=no_key_twice)
        if _HALF_PAIR.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()  # an error, where a character is only half there
    except (ValueError, RecursionError) as error:
        raise PluginError("bad_request", f"the body is not valid JSON: {_plain(error)}") from error
    if not isinstance(parsed, dict):
        raise PluginError("bad_request", "the body is not a JSON object")
    return parsed


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _plain(error: Exception) -> str:
    return str(error).encode("ascii", "backslashreplace").decode()[:500]


def _error(error: PluginError) -> Response:
    body = {key: value for key, value in error.to_dict().items() if key != "status"}
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse({"error": body}, status_code=error.status, headers=headers)


def _upload(request: Request) -> Handler:
    return lambda service, _: service.upload(request)


def _upload_probe(request: Request) -> Handler:
    return lambda service, _: service.slots.upload_probe(request)


def _receive(request: Request) -> Handler:
    return lambda service, body: service.weights_receive(body, request.is_disconnected)


async def _list_adapters(service: Service, _: Mapping[str, Any]) -> Any:
    return {"adapters": (await service.status())["adapters"], "used_names": service.names.used}


async def _metrics(service: Service, _: Mapping[str, Any]) -> str:
    return service.metrics_text()


def _zeroes_weights(body: bytes) -> bool:
    """Whether a call of `CHECK_ROUTE` asks for that, or is too long to be looked through."""
    if len(body) > CHECK_BYTES:
        return True
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM answers what is no JSON
    return isinstance(parsed, dict) and parsed.get("action") == "reset"


def _updates_weights(scope: Scope) -> bool:
    route = route_of(scope)
    dropped = route == SLEEP_ROUTE and not KEPT.issuperset(Request(scope).query_params.getlist("level"))
    return dropped or route in UPDATE_ROUTES


class _WatchUpdates:
    """Notes every call that changes the base weights, and their checksums before the first one (rule 8)."""

    def __init__(self, app: ASGIApp, plugin: LoraflowEndpoints) -> None:
        self._app = app
        self._plugin = plugin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._plugin.service
        if service is not None and scope["type"] == "http" and scope["method"] == "POST":
            updates = _updates_weights(scope)
            if route_of(scope) == CHECK_ROUTE:
                body, receive = await peeked(receive, CHECK_BYTES)
                updates = _zeroes_weights(body)
            async with AsyncExitStack() as update:
                try:
                    if updates:
                        service.folds.need_idle()
                    if updates or route_of(scope) == CALL_ROUTE:
                        await update.enter_async_context(service.weights.updating())
                except PluginError as error:
                    await _error(error)(scope, receive, send)
                    return
                await self._app(scope, receive, send)
            return
        await self._app(scope, receive, send)

"""Who may call: a bearer token where one is set, this host alone where none is."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from loraflow_server.errors import PluginError
from loraflow_server.settings import Settings

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope

__all__ = ["check_caller", "peeked", "read_body", "route_of"]

_BODY_SECONDS = 60.0


def check_caller(request: Request, settings: Settings) -> None:
    """Refuse a caller that may not.

    Raises:
        PluginError: ``unauthorized`` (401): a token is set, and the call does not carry it. ``forbidden`` (403): none
            is set, and the call comes from another host or from a web page.
    """
    if settings.token is not None:
        given = request.headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        right = hmac.compare_digest(token.strip().encode(), settings.token.encode())
        if scheme.lower() != "bearer" or not right:
            raise PluginError("unauthorized", "send the server's LORAFLOW_TOKEN as a bearer token", status=401)
        return
    if request.client is not None and not _is_loopback(request.client.host):
        raise PluginError(
            "forbidden", "only this host may call: set LORAFLOW_TOKEN on the server to allow others", status=403
        )
    if "origin" in request.headers:  # a browser on this host, run by a page from elsewhere
        raise PluginError("forbidden", "calls from web pages need LORAFLOW_TOKEN", status=403)


def _is_loopback(host: str) -> bool:
    if not host:  # a UNIX socket: its file permissions decide
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body; refused as soon as it passes ``limit`` bytes.

    Raises:
        PluginError: ``too_large`` (413), ``bad_request`` for a body that is not declared as JSON, ``truncated`` for one
            that ended before its end, ``body_timeout`` (408).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise PluginError("bad_request", "send a JSON object as application/json", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise PluginError("too_large", f"a request body has at most {limit} bytes", status=413)
    except TimeoutError as error:
        raise PluginError("body_timeout", f"not there after {_BODY_SECONDS:.0f} s", status=408) from error
    except ClientDisconnect as error:
        raise PluginError("truncated", f"the body ended after {len(body)} bytes") from error
    return bytes(body)


async def peeked(receive: Receive, limit: int) -> tuple[bytes, Receive]:
    """The body of a request that goes on to somebody else, read until it passes ``limit`` bytes, and what gives all of
    it again."""
    messages: list[Message] = []
    body, more = bytearray(), True
    while more and len(body) <= limit:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)

    async def replay() -> Message:
        return messages.pop(0) if messages else await receive()

    return bytes(body), replay


def route_of(scope: Scope) -> str:
    """The path that a request is routed by: without the prefix of ``--root-path``, and without a slash at its end."""
    path: str = scope["path"]
    root = str(scope.get("root_path", "")).rstrip("/")
    if root and path.startswith(root + "/"):
        path = path.removeprefix(root)
    return path.rstrip("/")

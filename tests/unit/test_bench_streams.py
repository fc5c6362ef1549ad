"""The process that keeps requests under way, against a server that answers at once."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

from loraflow.bench.streams import Streams

TOKENS = 5
LIMIT = 20.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    token_route = True
    asked: ClassVar[Counter[tuple[str, str, bool]]]
    bodies: ClassVar[list[dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked[self.path, body["model"], bool(body.get("stream"))] += 1
        self.bodies.append(body)
        if body["model"] == "gone":
            self._answer(400, b'{"error": {"message": "gone", "code": 400}}')
        elif self.path == "/inference/v1/generate" and not self.token_route:
            self._answer(403, b'{"error": {"message": "disabled", "code": 403}}')
        elif body.get("stream"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for _ in range(TOKENS):
                self._chunk(b'data: {"choices": [{"token_ids": [7]}]}\n\n')
                time.sleep(0.01)
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        else:
            time.sleep(0.02)
            self._answer(200, b"{}")

    def handle(self) -> None:
        with suppress(ConnectionError):  # at the end requests are broken off
            super().handle()

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(*, token_route: bool = True) -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Asked", (Handler,), {"token_route": token_route, "asked": Counter(), "bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not found():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def test_token_ids_go_in_and_out_and_it_is_seen_when_they_come() -> None:
    with served() as (url, handler), Streams.to(url, streams=6, vocabulary=50, tokens=(3, 9)) as streams:
        began = time.perf_counter()
        assert streams.ask([("a", {"cache_salt": "x"}), ("b", {})]) == 0
        route = "/inference/v1/generate"
        until(lambda: all(handler.asked[route, model, watched] > 3 for model in "ab" for watched in (True, False)))
        seen = [times for times in streams.seen() if len(times) == TOKENS]
        assert seen
        for times in seen:
            assert began < times[0]
            assert times[-1] < time.perf_counter()
            assert times == sorted(times)
        assert max(times[-1] - times[0] for times in seen) >= 0.01 * (TOKENS - 1) * 0.9  # not all at the end
        assert {path for path, _, _ in handler.asked} == {route}
        body = handler.bodies[-1]
        assert len(body["token_ids"]) == 16
        assert all(3 <= token < 50 for token in body["token_ids"])
        assert 3 <= body["sampling_params"]["max_tokens"] <= 9
        assert body["sampling_params"]["detokenize"] is False
        assert {body.get("cache_salt") for body in handler.bodies if body["model"] == "a"} == {"x"}
        streams.ask([("b", {})])
        handler.asked.clear()
        until(lambda: handler.asked[route, "b", False] > 20)
        assert handler.asked[route, "a", False] <= 6  # those that were under way


def test_a_server_without_that_route_is_asked_for_completions() -> None:
    with (
        served(token_route=False) as (url, handler),
        Streams.to(url, streams=2, vocabulary=9, tokens=(1, 1)) as streams,
    ):
        streams.ask([("a", {})])
        until(lambda: handler.asked["/v1/completions", "a", False] > 3)
        assert handler.asked["/inference/v1/generate", "a", False] == 1
        assert streams.seen() == []
        assert streams.ask([("a", {})]) == 0


@pytest.mark.parametrize("token_route", [True, False])
def test_requests_that_fail_are_counted(token_route: bool) -> None:
    with (
        served(token_route=token_route) as (url, _),
        Streams.to(url, streams=5, vocabulary=9, tokens=(1, 1)) as streams,
    ):
        streams.ask([("gone", {})])
        failed = 0

        def some() -> bool:
            nonlocal failed
            failed += streams.ask([("gone", {})])
            return failed > 10

        until(some)

"""Calls in two halves: what is sent, what every kind of answer becomes, and that each ends in its time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from loraflow.errors import SyncTimeout
from loraflow.hotline import Hotline
from loraflow.server import HTTPFailure, Unreachable, VLLMServer

Script = Callable[[socket.socket, bytes], None]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n"
OK = HEAD + b'{"fine":true}'


def request_of(connection: socket.socket) -> bytes:
    """One whole request, body included."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = connection.recv(65536)
        if not part:
            return got
        got += part
    head, _, body = got.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(1 << 20)
    return head + b"\r\n\r\n" + body


class Scripted:
    """A server that answers as it is told, and counts its connections."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.script: Script = lambda connection, _: connection.sendall(OK)
        self.connections = 0
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while request := request_of(connection):
                self.requests.append(request)
                try:
                    self.script(connection, request)
                except OSError:
                    return


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    with closing(server.listener):
        yield server


def test_one_connection_for_calls_that_follow_each_other(scripted: Scripted) -> None:
    with VLLMServer(scripted.url, token="secret", api_key="other") as server:
        for number in range(3):
            finish = server.begin("/loraflow/v1/direct", json={"number": number})
            assert finish() == {"fine": True}
    assert scripted.connections == 1
    head, _, body = scripted.requests[2].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /loraflow/v1/direct HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert b"Content-Type: application/json" in head
    assert json.loads(body) == {"number": 2}


def test_calls_under_way_at_once_have_connections_of_their_own(scripted: Scripted) -> None:
    with VLLMServer(scripted.url) as server:
        finishes = [server.begin("/a", json={}) for _ in range(3)]
        assert [finish() for finish in reversed(finishes)] == [{"fine": True}] * 3
        assert scripted.connections == 3
        server.begin("/a", json={})()
    assert scripted.connections == 3


def test_a_body_in_parts(scripted: Scripted) -> None:
    parts = [b"head", memoryview(bytearray(1 << 20)), b"tail"]
    with VLLMServer(scripted.url) as server:
        assert server.begin("/a?name=x", body=parts)() == {"fine": True}
    head, _, body = scripted.requests[0].partition(b"\r\n\r\n")
    assert b"Content-Type: application/octet-stream" in head
    assert body == b"head" + bytes(1 << 20) + b"tail"


def test_a_connection_that_the_server_closed_is_not_used_again(scripted: Scripted) -> None:
    def answer_and_close(connection: socket.socket, _: bytes) -> None:
        connection.sendall(OK)
        connection.shutdown(socket.SHUT_RDWR)

    scripted.script = answer_and_close
    with VLLMServer(scripted.url) as server:
        for _ in range(3):
            assert server.begin("/a", json={})() == {"fine": True}
            time.sleep(0.05)
    assert scripted.connections == 3


def test_a_connection_is_not_used_again_after_an_error(scripted: Scripted) -> None:
    """uvicorn closes it without a word, sooner or later."""
    scripted.script = lambda connection, _: connection.sendall(b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\nno")
    with VLLMServer(scripted.url) as server:
        with pytest.raises(HTTPFailure, match="no"):
            server.request("POST", "/a", json={}, kept=True)
        scripted.script = lambda connection, _: connection.sendall(OK)
        assert server.request("POST", "/a", kept=True, retry=True) == {"fine": True}
    assert scripted.connections == 2
    head, _, body = scripted.requests[1].partition(b"\r\n\r\n")
    assert b"Content-Length: 0" in head
    assert body == b""


def test_an_old_connection_is_not_trusted(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    with VLLMServer(scripted.url) as server:
        server.begin("/a", json={})()
        monkeypatch.setattr("loraflow.hotline._FRESH_SECONDS", 0.0)
        server.begin("/a", json={})()
    assert scripted.connections == 2


@pytest.mark.parametrize(
    ("line", "body", "status", "reason"),
    [
        (b"409 X", b'{"error": {"message": "not known"}}', 409, "not known"),
        (b"500 X", b"wrong", 500, "wrong"),
        (b"200 OK", b'{"error": "half"}', 500, "half"),
    ],
)
def test_errors(scripted: Scripted, line: bytes, body: bytes, status: int, reason: str) -> None:
    answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (line, len(body), body)
    scripted.script = lambda connection, _: connection.sendall(answer)
    with VLLMServer(scripted.url) as server:
        finish = server.begin("/a", json={})
        with pytest.raises(HTTPFailure) as caught:
            finish()
    assert (caught.value.status, caught.value.reason) == (status, reason)


def test_an_answer_that_is_cut_is_no_answer(scripted: Scripted) -> None:
    def cut(connection: socket.socket, _: bytes) -> None:
        connection.sendall(OK[:-1])
        connection.shutdown(socket.SHUT_RDWR)

    scripted.script = cut
    with VLLMServer(scripted.url) as server, pytest.raises(Unreachable):
        server.begin("/a", json={})()


def test_a_server_that_hangs_up_or_is_not_there(scripted: Scripted) -> None:
    scripted.script = lambda connection, _: connection.shutdown(socket.SHUT_RDWR)
    with VLLMServer(scripted.url) as server, pytest.raises(Unreachable):
        server.begin("/a", json={})()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with VLLMServer(f"http://127.0.0.1:{port}") as server, pytest.raises(Unreachable):
        server.begin("/a", json={})


def test_a_server_that_dribbles_is_given_up_in_time(scripted: Scripted) -> None:
    def dribble(connection: socket.socket, _: bytes) -> None:
        for byte in OK * 10:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    scripted.script = dribble
    began = time.monotonic()
    with VLLMServer(scripted.url) as server, pytest.raises(SyncTimeout, match=r"0\.4 s"):
        server.begin("/a", json={}, timeout=0.4)()
    assert time.monotonic() - began < 2


def test_a_server_that_does_not_read_is_given_up_in_time(scripted: Scripted) -> None:
    scripted.listener.close()  # a listener of our own, that accepts and never reads
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with VLLMServer(url) as server, pytest.raises(SyncTimeout):
            server.begin("/a", body=[memoryview(bytearray(64 << 20))], timeout=0.4)()
        assert time.monotonic() - began < 2


def test_a_refusal_before_the_body_was_read_is_heard(scripted: Scripted) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 413 X\r\nContent-Length: 9\r\nConnection: close\r\n\r\ntoo large")
        time.sleep(0.3)
        connection.close()

    threading.Thread(target=refuse, daemon=True).start()
    with listener, VLLMServer(f"http://127.0.0.1:{listener.getsockname()[1]}") as server:
        with pytest.raises((HTTPFailure, Unreachable)) as caught:  # the reset may overtake the answer
            server.begin("/a", body=[memoryview(bytearray(64 << 20))], timeout=5)()
        if isinstance(caught.value, HTTPFailure):
            assert caught.value.status == 413


def test_only_plain_http_is_served() -> None:
    assert Hotline.serves("http://x:8000")
    assert not Hotline.serves("https://x:8000")

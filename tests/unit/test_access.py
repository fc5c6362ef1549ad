"""Where calls go and what they carry: to the URL that was given and nowhere else, and tokens are never shown."""

from __future__ import annotations

import logging
import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loraflow.access import secret
from loraflow.errors import ConfigError, LoraflowError
from loraflow.server import HTTPFailure, VLLMServer

TOKEN, KEY = "tok-5up3r-s3cret", "key-0th3r-s3cret"


class Listener(ThreadingHTTPServer):
    """Answers everything with ``{}``, or with a redirection; and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.asked: list[tuple[str, str, str | None]] = []
        self.redirect: tuple[int, str] | None = None

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        status, location = self.server.redirect or (200, None)
        self.send_response(status)
        if location is not None:
            self.send_header("Location", location)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[Listener]:
    with Listener((host, 0)) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def test_tokens_are_taken_without_blanks_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", f" {TOKEN}\n")
    assert secret(None, "SOME_TOKEN") == TOKEN
    assert secret("", "SOME_TOKEN") is None
    assert secret(None, "NO_SUCH_VARIABLE") is None
    for bad in (f"{TOKEN}\nX-Evil: 1", f"{TOKEN}é", f"{TOKEN}\x7f", f"{TOKEN}\ud800"):
        with pytest.raises(ConfigError) as caught:
            VLLMServer("http://host", token=bad)
        assert TOKEN not in f"{caught.value}{caught.value!r}"


def test_each_route_gets_its_own_token_also_behind_a_prefix() -> None:
    with listening() as there, VLLMServer(f"http://127.0.0.1:{there.port}/a/b", token=TOKEN, api_key=KEY) as server:
        server.request("GET", "/health")
        server.request("GET", "/loraflow/v1/status")
        server.begin("/loraflow/v1/direct", json={})()
        server.begin("/v1/loraflow/v1", json={})()
        assert there.asked == [
            ("GET", "/a/b/health", f"Bearer {KEY}"),
            ("GET", "/a/b/loraflow/v1/status", f"Bearer {TOKEN}"),
            ("POST", "/a/b/loraflow/v1/direct", f"Bearer {TOKEN}"),
            ("POST", "/a/b/v1/loraflow/v1", f"Bearer {KEY}"),
        ]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirections_are_not_followed(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with listening() as there, listening() as elsewhere:
        with VLLMServer(f"http://127.0.0.1:{there.port}", token=TOKEN, api_key=KEY) as server:
            there.redirect = status, f"http://127.0.0.1:{elsewhere.port}/v1/models"
            calls = [
                lambda: server.request("GET", "/v1/models", retry=True),
                lambda: server.request("POST", "/v1/completions", json={}),
                lambda: server.request("DELETE", "/loraflow/v1/adapters/x"),
                server.begin("/loraflow/v1/direct", json={}),
            ]
            for call in calls:
                with pytest.raises(HTTPFailure, match=r"redirects to .*: give the URL of the server itself") as caught:
                    call()
                error = pickle.loads(pickle.dumps(caught.value))
                assert not {TOKEN, KEY} & set(f"{error} {error!r} {error.__dict__}".split())
            assert not server.health()
        assert elsewhere.asked == []
        assert repr(server) == f"VLLMServer('{server.url}')"
    assert TOKEN not in caplog.text
    assert KEY not in caplog.text


def test_proxies_and_netrc_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hidden\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody
    with listening() as there, VLLMServer(f"http://127.0.0.1:{there.port}", api_key="") as server:
        assert server.request("GET", "/health") == {}
        assert server.begin("/x", json={})() == {}
        assert [authorization for _, _, authorization in there.asked] == [None, None]


def test_certificates_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rest of it: a server's certificate is often a company's own."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/bundle.pem")
    with listening() as there, VLLMServer(f"https://127.0.0.1:{there.port}") as server:
        assert "invalid path: /no/such/bundle.pem" in str(server.ailment())


def test_ipv6() -> None:
    try:
        with listening("::1") as there, VLLMServer(f"http://[::1]:{there.port}") as server:
            assert server.request("GET", "/health") == {}
            assert server.begin("/x", json={})() == {}
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_a_request_that_is_no_json_is_not_the_servers_fault() -> None:
    with listening() as there, VLLMServer(f"http://127.0.0.1:{there.port}") as server:
        with pytest.raises(LoraflowError, match="no JSON") as caught:
            server.generate([[1]], model="base", temperature=float("nan"))
        assert type(caught.value) is LoraflowError
        assert there.asked == []

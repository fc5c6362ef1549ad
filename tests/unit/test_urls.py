"""URLs of servers, as users write them."""

from __future__ import annotations

import pytest

from loraflow.config import SyncConfig
from loraflow.connect import clients
from loraflow.errors import ConfigError
from loraflow.server import VLLMServer
from loraflow.urls import server_url, url_of


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" http://host:8000/ ", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/vllm/v1", "https://host/vllm"),
        ("https://host/vllm/", "https://host/vllm"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("HTTP://host:8000", "http://host:8000"),
        ("https://host/modèle/v1", "https://host/mod%C3%A8le"),
        ("https://host/mod%C3%A8le", "https://host/mod%C3%A8le"),
        ("http://bücher.example:80", "http://bücher.example:80"),
    ],
)
def test_one_form(given: str, meant: str) -> None:
    assert server_url(given) == meant
    assert VLLMServer(given).url == meant


@pytest.mark.parametrize(
    "given",
    [
        "",
        "http://",
        "ftp://host",
        "htp://host:8000",
        "http://host:0",
        "http://host\n:8000",
        "http://[::1",
        "::1:8000",
        "http://host:99999",
        "http://host:port",
        "http://a b:1",
        "http://host:1?x=1",
        "http://host:1#x",
        "http:///path",
        "/just/a/path",
    ],
)
def test_no_url_of_a_server(given: str) -> None:
    with pytest.raises(ConfigError):
        VLLMServer(given)


@pytest.mark.parametrize("given", ["https://me:secret@host:8000", "http://secret@host:8000"])
def test_a_password_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as caught:
        VLLMServer(given)
    assert "secret" not in str(caught.value)


def test_one_server_under_two_names() -> None:
    for pair in (
        ("http://127.0.0.1:8000", "localhost:8000/"),
        ("http://a:1/v1", "http://A:1"),
    ):
        with pytest.raises(ConfigError, match="given twice"):
            clients(pair, SyncConfig())


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("fe80::2", "http://[fe80::2]:1"),
        ("a", "http://a:1"),
    ],
)
def test_where_a_server_is_reached(host: str, url: str) -> None:
    assert url_of(host, 1) == url

"""Requests made to hurt: wrong callers, wrong paths, wrong names, wrong bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loraflow_server.settings import Settings
from tests.attacks.plugin_app import attackable, folder_of

ROUTES = [
    ("GET", "/status"),
    ("GET", "/adapters"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/x"),
    ("POST", "/layout"),
    ("POST", "/verify"),
    ("POST", "/direct"),
    ("POST", "/direct/probe"),
    ("POST", "/direct/sees"),
    ("POST", "/direct/upload"),
    ("POST", "/direct/upload/probe"),
    ("POST", "/group/join"),
    ("POST", "/group/leave"),
    ("POST", "/fold/layout"),
    ("POST", "/fold"),
    ("POST", "/fold/undo"),
    ("POST", "/reset"),
    ("POST", "/weights/layout"),
    ("POST", "/weights/sums"),
    ("POST", "/weights/receive"),
    ("POST", "/weights/map"),
    ("POST", "/weights/unmap"),
    ("POST", "/weights/call_off"),
    ("POST", "/pause"),
    ("POST", "/hold"),
    ("POST", "/resume"),
    ("GET", "/base"),
    ("GET", "/metrics"),
]
TOKEN = "a-long-random-token"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder = folder_of(tmp_path / "root")
    save_file({"a.lora_A.weight": torch.ones(2, 8)}, folder / "adapter_model.safetensors")
    return folder


def load(root: Path, path: object, name: object = "run-v1", **more: Any) -> tuple[int, dict[str, Any], list[str]]:
    client, engine = attackable(Settings(roots=(root.resolve(),), **more))
    answer = client.post("/loraflow/v1/adapters", json={"name": name, "path": path})
    return answer.status_code, answer.json(), engine.added


# ---------------------------------------------------------------- who calls


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
    ],
)
def test_without_the_token_nothing_answers(method: str, path: str, header: str | None) -> None:
    client, engine = attackable(Settings(token=TOKEN))
    headers = {} if header is None else {"Authorization": header}
    answer = client.request(method, "/loraflow/v1" + path, headers=headers, json={} if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert TOKEN not in answer.text
    assert engine.added == []


def test_a_token_of_other_characters_is_no_error() -> None:
    client, _ = attackable(Settings(token="schlüssel"))
    assert client.get("/loraflow/v1/metrics", headers={"Authorization": b"Bearer schl\xc3\xbcssel"}).status_code in {
        200,
        401,
    }
    assert client.get("/loraflow/v1/metrics", headers={"Authorization": b"Bearer \xff\xfe"}).status_code == 401


def test_with_the_token_it_answers_from_anywhere() -> None:
    client, _ = attackable(Settings(token=TOKEN), host="203.0.113.9")
    assert client.get("/loraflow/v1/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("host", ["203.0.113.9", "10.0.0.1", "fe80::1", "::ffff:10.0.0.1", "example.org"])
def test_without_a_token_other_hosts_are_refused(method: str, path: str, host: str) -> None:
    client, _ = attackable(Settings(), host=host)
    answer = client.request(method, "/loraflow/v1" + path, json={} if method == "POST" else None)
    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_without_a_token_this_host_may_call(host: str) -> None:
    client, _ = attackable(Settings(), host=host)
    assert client.get("/loraflow/v1/metrics").status_code == 200


def test_forwarded_headers_are_not_believed() -> None:
    client, _ = attackable(Settings(), host="203.0.113.9")
    headers = {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1", "Forwarded": "for=127.0.0.1"}
    assert client.get("/loraflow/v1/metrics", headers=headers).status_code == 403


def test_web_pages_are_refused(good: Path) -> None:
    client, engine = attackable(Settings(roots=(good.parent.resolve(),)))
    for origin in ("http://evil.example", "null", "http://localhost:8000"):
        body = {"name": "run-v1", "path": str(good)}
        assert client.post("/loraflow/v1/adapters", json=body, headers={"Origin": origin}).status_code == 403
    text = json.dumps({"name": "run-v1", "path": str(good)})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):  # what a page may send without asking
        answer = client.post("/loraflow/v1/adapters", content=text, headers={"Content-Type": kind})
        assert answer.status_code == 415
    assert engine.added == []


# ---------------------------------------------------------------- paths


def test_paths_outside_of_the_roots_look_all_the_same(tmp_path: Path, good: Path) -> None:
    root = good.parent
    outside = folder_of(tmp_path / "outside")
    sibling = folder_of(tmp_path / "root-but-longer")
    (root / "link").symlink_to(outside)
    (root / "chain").symlink_to(root / "link")
    paths = [
        "/etc",
        "/does/not/exist",
        "/",
        str(root),
        str(root) + "/",
        str(outside),
        str(sibling),
        f"{root}/../outside/good",
        f"{root}/good/../../outside/good",
        f"{root}/link",
        f"{root}/chain",
        f"{root}/./link",
        "/proc/self/root" + str(outside),
        "/proc/self/cwd",
    ]
    answers = [load(root, path) for path in paths]
    assert {status for status, _, _ in answers} == {403}
    assert len({json.dumps(body) for _, body, _ in answers}) == 1  # no word on what exists
    assert not any(added for _, _, added in answers)


@pytest.mark.parametrize(
    "path", [None, 1, [], {}, "", "relative", "./good", "~/x", "a\0b", "/x\0", "x" * 5000, "/" + "x" * 5000, True]
)
def test_what_is_no_path(good: Path, path: object) -> None:
    status, body, added = load(good.parent, path)
    assert (status, added) == (400, [])
    assert body["error"]["code"] in {"bad_path", "bad_request"}


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/x",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc",
        "memory://x",
        "github://a:b@/",
        "::file://",
    ],
)
def test_urls_are_refused_where_no_store_is_configured(good: Path, url: str) -> None:
    assert load(good.parent, url)[0] in {400, 403}


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/runs-of-another/x",
        "s3://bucket/runs",
        "s3://bucket/runs/",
        "s3://bucket/runs/../secret",
        "s3://bucket/runs/./x",
        "s3://other/runs/x",
        "s3://bucket@evil/runs/x",
        "s3://bucket/runs/x?versionId=1",
        "s3://bucket/runs/x#y",
        "simplecache::s3://bucket/runs/x",
        "s3://bucket/runs/x::file:///etc",
        "http://bucket/runs/x",
        "S3://bucket/runs/x",
        "s3://bucket/runs/x\r\nHost: evil",
    ],
)
def test_urls_outside_of_the_stores(good: Path, url: str) -> None:
    more = {"stores": ("s3://bucket/runs",), "cache_dir": good.parent / "cache"}
    status, body, added = load(good.parent, url, **more)
    assert status in {400, 403}
    assert body["error"]["code"] in {"bad_url", "outside_stores"}
    assert added == []
    assert not (good.parent / "cache").exists()


# ---------------------------------------------------------------- names and bodies

NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "../a",
    "a b",
    "a\nb",
    "a\r\nX: y",
    "a\0",
    "-a",
    "_a",
    "é",
    "a" * 129,
    "a\u202eb",
    "a%2fb",
]


@pytest.mark.parametrize("name", [*NAMES, None, 5, ["a"], {"a": 1}, True])
def test_names_are_refused(good: Path, name: object) -> None:
    status, body, added = load(good.parent, str(good), name)
    assert (status, added) == (400, [])
    assert body["error"]["code"] == "bad_name"


@pytest.mark.parametrize("name", NAMES[3:])
def test_names_in_urls_are_refused(name: str) -> None:
    from urllib.parse import quote

    client, _ = attackable(Settings())
    assert client.delete("/loraflow/v1/adapters/" + quote(name, safe="")).status_code in {400, 404}


def test_the_base_models_name_cannot_be_taken(good: Path) -> None:
    assert load(good.parent, str(good), "base")[0] == 409


def test_load_inplace_is_refused(good: Path) -> None:
    client, engine = attackable(Settings(roots=(good.parent.resolve(),)))
    body = {"name": "run-v1", "path": str(good), "load_inplace": True}
    assert client.post("/loraflow/v1/adapters", json=body).status_code == 400
    assert engine.added == []


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'"x"', b"{", b"[" * 200_000, b'{"name": "run-v1"}', b"\xff\xff", b"{}"]
)
def test_bodies_are_refused(good: Path, body: bytes) -> None:
    client, engine = attackable(Settings(roots=(good.parent.resolve(),)))
    for path in ("/adapters",):
        answer = client.post("/loraflow/v1" + path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
    assert engine.added == []


def test_an_endless_body_is_cut_off() -> None:
    client, _ = attackable(Settings())
    sent = 0

    def endless() -> Any:
        nonlocal sent
        for _ in range(1024):
            sent += 1 << 20
            yield b" " * (1 << 20)

    answer = client.post("/loraflow/v1/adapters", content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_errors_do_not_repeat_what_was_sent(good: Path) -> None:
    poison = "<script>\r\nSet-Cookie: x" + "y" * 100_000
    for body in ({"name": poison, "path": str(good)}, {"name": "run-v1", "path": "/" + poison}):
        client, _ = attackable(Settings(roots=(good.parent.resolve(),)))
        answer = client.post("/loraflow/v1/adapters", json=body)
        assert answer.status_code in {400, 403}
        assert "script" not in answer.text
        assert len(answer.content) < 2000


def test_a_name_is_used_once(good: Path) -> None:
    client, engine = attackable(Settings(roots=(good.parent.resolve(),)))
    body = {"name": "run-v1", "path": str(good)}
    assert client.post("/loraflow/v1/adapters", json=body).status_code == 200
    assert client.post("/loraflow/v1/adapters", json=body).json()["already_loaded"]
    assert client.delete("/loraflow/v1/adapters/run-v1").status_code == 200
    assert client.post("/loraflow/v1/adapters", json=body).json()["error"]["code"] == "name_used"
    assert len(engine.added) == 1

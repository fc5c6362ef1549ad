"""What comes through the plugin's doors: bodies of every wrong form, paths with tricks, tokens; over real HTTP.

Whatever a caller sends is answered with a 4xx and a code, and takes neither memory nor a name.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from loraflow.server import HTTPFailure, VLLMServer
from loraflow_server import axolotl_routes, guard
from loraflow_server.cache import allowed_url
from loraflow_server.engine import Engine, Loaded
from loraflow_server.errors import PluginError
from loraflow_server.lifeline import still_wanted
from loraflow_server.routes import LoraflowEndpoints
from loraflow_server.service import Service
from loraflow_server.settings import Settings
from loraflow_server.weights import BaseWeights
from tests.helpers.lora_worker import LoraHost, lora_host
from tests.helpers.plugin_server import plugin_server

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKEN = "right-token"
PREFIX = "/loraflow/v1"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def host(tiny_model: Path) -> Iterator[LoraHost]:
    with lora_host(tiny_model, dtype="bfloat16") as made:
        yield made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("adapters")
    (found / "v0").mkdir()
    return found


@pytest.fixture(scope="module")
def url(host: LoraHost, root: Path) -> Iterator[str]:
    with plugin_server(host, root) as found:
        yield found


def send(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """One request as it is given, whatever a client library thinks of it."""
    parts = urlsplit(url)
    line = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        line.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = line.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else text
    finally:
        line.close()


def post(url: str, path: str, body: bytes | str) -> tuple[int, Any]:
    return send(url, "POST", PREFIX + path, body, Content_Type="application/json")


WEIRD: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 10**400, -(10**30), "", " ", "x" * 5000, "\0", "ü", "../..", "/", "//", [], [[]],
    [None], {}, {"": 1}, {"a": {"b": []}}, ["a", 1, None], "%2e%2e", "\n",
]  # fmt: skip

BODIES: dict[str, dict[str, Any]] = {
    "/adapters": {"name": "n", "path": "/p"},
    "/layout": {"tensors": {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": [4, 64]}},
    "/verify": {"name": "n", "layout_id": "l"},
    "/direct": {
        "name": "n",
        "path": "/p",
        "layout_id": "l",
        "source": {"kind": "shm", "name": "loraflow-x", "nbytes": 8},
    },
    "/direct/probe": {"source": {"kind": "shm", "name": "loraflow-x", "nbytes": 8}},
    "/direct/sees": {"path": "/p"},
}


def test_every_field_of_every_wrong_type_is_a_refusal(url: str, root: Path) -> None:
    before = send(url, "GET", PREFIX + "/adapters")
    for route, template in BODIES.items():
        body = {key: str(root / "v0") if key == "path" else value for key, value in template.items()}
        for key in body:
            for weird in WEIRD:
                sent = {**body, key: weird}
                if route == "/direct" and key != "source":
                    sent["source"] = {"kind": "folder"}
                status, answer = post(url, route, json.dumps(sent))
                assert 400 <= status < 500, (route, key, weird, status, answer)
                assert answer["error"]["code"] != "internal"
            status, _ = post(url, route, json.dumps({k: v for k, v in body.items() if k != key}))
            assert 400 <= status < 500, (route, key)
    for weird in WEIRD:
        for key in ("dtype", "shape"):
            tensors = {"a.lora_A.weight": weird if key == "shape" else [4, weird]}
            assert 400 <= post(url, "/layout", json.dumps({"tensors": tensors}))[0] < 500
        source = {"kind": "cuda_ipc", "nbytes": 8, "uuid": "u", "handle": "", "ref_file": "", "event": ""}
        source |= {"storage_bytes": 8, "storage_offset": weird, "ref_offset": 0}
        assert 400 <= post(url, "/direct/probe", json.dumps({"source": source}))[0] < 500
    assert send(url, "GET", PREFIX + "/adapters") == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"1" * 5000,
        b"{",
        b"\xff\xfe{}",
        b"\xff",
        '{"path": "\ud800"}'.encode("utf-8", "surrogatepass"),
        b'{"path": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"path": NaN}',
        b'{"path": [-Infinity]}',
        b'{"path": "/a", "path": "/b"}',
        b'{"path": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"path": ' + b"1" * 5000 + b"}",
    ],
)
def test_what_is_no_object_of_json_is_refused(url: str, body: bytes) -> None:
    for route in ("/direct/sees", "/adapters", "/layout"):
        status, answer = post(url, route, body)
        assert (status, answer["error"]["code"]) == (400, "bad_request"), answer


def test_pairs_that_make_one_character_are_text(url: str, root: Path) -> None:
    (root / "😀").touch()
    sent = json.dumps({"path": str(root / "😀")})
    assert "\\ud83d" in sent
    assert post(url, "/direct/sees", sent) == (200, {"sees": True})


def test_bodies_that_are_too_long_are_refused_with_and_without_their_length(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = guard.read_body
    monkeypatch.setattr("loraflow_server.routes.read_body", lambda request, limit: read(request, limit >> 14))
    long = json.dumps({"path": "x" * 1100}).encode()
    in_chunks = (long[start : start + 100] for start in range(0, len(long), 100))
    for body in (long, in_chunks):
        status, answer = send(url, "POST", PREFIX + "/direct/sees", body, Content_Type="application/json")
        assert (status, answer["error"]["code"]) == (413, "too_large")


def test_a_body_with_two_lengths_is_refused(url: str) -> None:
    parts = urlsplit(url)
    head = f"POST {PREFIX}/direct/sees HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as line:
        line.sendall(f"{head}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        assert b" 400 " in line.recv(4096).split(b"\r\n")[0]


def test_a_body_that_dribbles_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.2)
    parts = urlsplit(url)
    head = f"POST {PREFIX}/direct/sees HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as line:
        line.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        assert b" 408 " in line.recv(4096).split(b"\r\n")[0]


def test_shapes_that_would_take_the_workers_memory_are_refused(url: str) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    big = {f"{name}.lora_A.weight": [1 << 30, 1 << 30], f"{name}.lora_B.weight": [64, 4]}
    status, answer = post(url, "/layout", json.dumps({"tensors": big}))
    assert (status, answer["error"]["code"]) == (413, "too_large")
    large = {f"{name}.lora_A.weight": [1 << 16, 1 << 16], f"{name}.lora_B.weight": [64, 1 << 16]}
    status, answer = post(url, "/layout", json.dumps({"tensors": large}))
    assert (status, answer["error"]["code"]) == (400, "unsupported_layout")
    assert "no slot has room for" in answer["error"]["message"]


def test_paths(url: str, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    cases = {
        f"{root}/../{outside.name}": 403,
        f"{root}/link": 403,
        f"{root}/link/../v0": 403,  # what the link's parent has, not this root's
        f"{root}": 403,
        f"{root}x/v0": 403,
        "/proc/self/root/etc": 403,
        f"{root}/%2e%2e/x": 404,
        f"{root}/loop": 404,
        f"{root}/v0/{'x' * 300}": 400,
        f"{root}/ü": 404,
        "relative": 400,
        f"file://{root}/v0": 403,
        f"{root}/v0\n": 404,
    }
    for path, expected in cases.items():
        status, answer = post(url, "/adapters", json.dumps({"name": "n", "path": path}))
        assert status == expected, (path, answer)
    locked = root / "locked"
    locked.mkdir(mode=0o000)
    (root / "fifo-folder").mkdir()
    os.mkfifo(root / "fifo-folder" / "adapter_config.json")
    for folder in ("locked", "fifo-folder"):
        assert 400 <= post(url, "/adapters", json.dumps({"name": "n", "path": f"{root}/{folder}"}))[0] < 500
    locked.rmdir()
    for name in ("..%2f..%2fetc", "%00", "a%0ab", "%c3%bc", "x" * 200):
        status, _ = send(url, "DELETE", f"{PREFIX}/adapters/{name}")
        assert status in {400, 404}, name


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     "Bearer \xfc", f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN.upper()}"],
)  # fmt: skip
def test_only_the_token_opens(host: LoraHost, root: Path, given: str | None) -> None:
    with plugin_server(host, root, token=TOKEN) as guarded:
        headers = {} if given is None else {"Authorization": given}
        for method, path in (("GET", "/status"), ("GET", "/metrics"), ("POST", "/adapters"), ("DELETE", "/adapters/x")):
            status, answer = send(guarded, method, PREFIX + path, "{}" if method == "POST" else None, **headers)
            assert (status, answer["error"]["code"]) == (401, "unauthorized")
            assert TOKEN not in json.dumps(answer)
        for right in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
            assert send(guarded, "GET", PREFIX + "/metrics", Authorization=right)[0] == 200


@pytest.mark.parametrize("text", [" ", "\t\n", "töken", "a\nb", "a\x00b"])
def test_a_token_that_cannot_be_sent_does_not_open_the_server(text: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Settings.from_env({"LORAFLOW_TOKEN": text})


def test_settings_as_people_write_them() -> None:
    assert Settings.from_env({"LORAFLOW_TOKEN": f" {TOKEN}\n"}).token == TOKEN
    assert Settings.from_env({"LORAFLOW_TOKEN": ""}).token is None
    assert Settings.from_env({"LORAFLOW_CACHE_BYTES": " 1024 "}).cache_bytes == 1024
    for env in (
        {"LORAFLOW_CACHE_BYTES": "16GB"},
        {"LORAFLOW_CACHE_BYTES": "١٦"},
        {"LORAFLOW_STORE_ROOTS": "bucket/runs"},
        {"LORAFLOW_STORE_ROOTS": "s3://"},
    ):
        with pytest.raises(ValueError, match=next(iter(env))):
            Settings.from_env(env)


@pytest.mark.parametrize(
    "path", ["%2e%2e/other/v1", "a/%2E%2E/%2e%2e/v1", "..%2fother", "a\\..\\v1", "./v1", "a%5c..%5cb"]
)
def test_steps_that_are_written_otherwise_lead_nowhere(path: str) -> None:
    with pytest.raises(PluginError) as caught:
        allowed_url(f"https://host/runs/{path}", ["https://host/runs"])
    assert caught.value.code == "outside_stores"


def test_an_error_of_ours_is_an_answer_with_a_code(host: LoraHost, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plugin_server(host, root) as there, VLLMServer(there) as server:

        def breaks(*args: Any) -> Any:
            raise RuntimeError("a bug \ud800")

        monkeypatch.setattr("loraflow_server.slot_desk.SlotDesk.sees", breaks)
        monkeypatch.setattr(logging.getLogger("vllm.loraflow"), "disabled", True)  # pytest's report is strict UTF-8
        with pytest.raises(HTTPFailure, match="RuntimeError: a bug") as caught:
            server.request("POST", PREFIX + "/direct/sees", json={"path": "/x"})
        assert caught.value.status == 500
        metrics = str(server.request("GET", PREFIX + "/metrics"))
        assert 'loraflow_refusals_total{code="internal"} 1' in metrics
        assert 'loraflow_requests_total{route="POST /direct/sees"} 1' in metrics


def test_a_clock_that_is_set_back_makes_no_server_younger(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = send(url, "GET", PREFIX + "/status")[1]["uptime_s"]
    clock = SimpleNamespace(**vars(time) | {"time": lambda: 0.0})
    monkeypatch.setattr("loraflow_server.service.time", clock)
    assert send(url, "GET", PREFIX + "/status")[1]["uptime_s"] >= first >= 0


def test_loads_of_one_name_at_the_same_time_are_one(url: str, root: Path) -> None:
    """Each is refused here, since the folder is empty, and none of them uses the name up or blocks another."""
    found: list[int] = []
    body = json.dumps({"name": "same", "path": f"{root}/v0"})
    threads = [threading.Thread(target=lambda: found.append(post(url, "/adapters", body)[0])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [404] * 16
    assert "same" not in send(url, "GET", PREFIX + "/adapters")[1]["used_names"]


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_a_root_path_is_no_way_around_the_watch(prefix: str) -> None:
    """vLLM's ``--root-path``: the same routes, under another path."""
    app = FastAPI(root_path="/api")
    seen: list[str] = []
    plugin = LoraflowEndpoints()
    plugin.settings = Settings()

    class Noting:
        class folds:
            @staticmethod
            def need_idle() -> None:
                raise PluginError("leased", "a run folds into these weights", status=423)

    @app.post("/update_weights")
    @app.post(axolotl_routes.LOAD_ROUTE)
    async def reached(request: Request) -> dict[str, str]:
        seen.append(request.url.path)
        return {}

    plugin.attach_router(app)
    plugin.service = Noting()  # type: ignore[assignment]
    client = TestClient(app, base_url="http://127.0.0.1")
    assert client.post(f"{prefix}/update_weights").status_code == 423
    assert client.post(prefix + axolotl_routes.LOAD_ROUTE, json={"load_inplace": True}).status_code == 400
    padded = b" " * (1 << 20) + b'{"load_inplace": true}'
    assert client.post(prefix + axolotl_routes.LOAD_ROUTE, content=padded, headers=JSON).status_code == 400
    assert seen == []
    assert client.post(prefix + axolotl_routes.LOAD_ROUTE, json={"lora_name": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("call", "watched"),
    [
        ('/weight_checker {"action": "reset"}', True),
        ('/weight_checker {"action": "checksum"}', False),
        pytest.param("/weight_checker " + " " * (16 << 20) + '{"action": "reset"}', True, id="padded"),
        ("/weight_checker [", False),
        ("/sleep?level=2", True),
        ("/sleep?level=1&level=2", True),
        ("/sleep?level=1", False),
        ("/sleep", False),
        ("/collective_rpc", True),
        ("/update_weights", True),
        ("/wake_up", False),
    ],
)
def test_whatever_may_change_the_base_is_noted_before_it_does(call: str, *, watched: bool) -> None:
    app, seen = FastAPI(), list[str]()
    plugin = LoraflowEndpoints()
    plugin.settings = Settings()

    @asynccontextmanager
    async def updating() -> AsyncIterator[None]:
        seen.append("noted")
        yield
        seen.append("over")

    plugin.attach_router(app)
    service = SimpleNamespace(folds=SimpleNamespace(need_idle=lambda: None), weights=SimpleNamespace(updating=updating))
    plugin.service = service  # type: ignore[assignment]

    async def reached(request: Request) -> dict[str, str]:
        assert (await request.body()).decode() == body
        seen.append("reached")
        return {}

    for path in ("/sleep", "/collective_rpc", "/update_weights", "/wake_up", "/weight_checker"):
        app.add_api_route(path, reached, methods=["POST"])
    path, _, body = call.partition(" ")
    assert TestClient(app, base_url="http://127.0.0.1").post(path, content=body).status_code == 200
    assert seen == (["noted", "reached", "over"] if watched else ["reached"])


def test_a_caller_that_leaves_calls_its_broadcast_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's wait is played: it looks at its lifeline, as it does under NCCL."""
    seen: list[str] = []

    async def wait(self: BaseWeights, incoming: dict[str, Any], label: str, timeout: float) -> Any:
        look, deadline = still_wanted(incoming["lifeline"]), time.monotonic() + 10
        seen.append("waits")
        try:
            while time.monotonic() < deadline:
                look()
                await asyncio.sleep(0.01)
        except PluginError as error:
            seen.append(error.code)
            raise
        raise AssertionError("waited in vain")

    monkeypatch.setattr(Service, "capabilities", lambda self: ["receive"])
    monkeypatch.setattr(BaseWeights, "receive", wait)
    body = {"layout_id": "l", "names": ["a"], "dtypes": ["float32"], "buckets": [1], "label": "v1", "timeout": 60}
    parts = urlsplit(url)
    line = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    line.request("POST", f"{PREFIX}/weights/receive", json.dumps(body), JSON)
    until(lambda: seen == ["waits"])
    line.close()  # killed
    until(lambda: seen == ["waits", "called_off"])

    answers: list[tuple[int, Any]] = []
    call = threading.Thread(target=lambda: answers.append(post(url, "/weights/receive", json.dumps(body))))
    call.start()
    until(lambda: len(seen) == 3)
    assert post(url, "/weights/call_off", "") == (200, {"called_off": True})
    call.join(10)
    ((status, answer),) = answers
    assert (status, answer["error"]["code"], seen[-1]) == (409, "called_off", "called_off")
    assert post(url, "/weights/call_off", "") == (200, {"called_off": False})


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_weights_are_received_under_an_adapter_that_came_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the trainer's look at the names and its broadcast."""
    monkeypatch.setattr(Service, "capabilities", lambda self: ["receive"])
    monkeypatch.setattr(Engine, "loaded", lambda self: {"other-v1": Loaded("other-v1", 1, "/adapters/other")})
    body = {"layout_id": "l", "names": ["a"], "dtypes": ["float32"], "buckets": [1], "label": "v1", "timeout": 60}
    status, answer = post(url, "/weights/receive", json.dumps(body))
    assert (status, answer["error"]["code"]) == (409, "adapters_loaded")
    monkeypatch.undo()
    assert not send(url, "GET", PREFIX + "/status")[1]["weights_touched"]

"""What a client makes of answers that are late, endless, cut, or of something else: an error in time, never a guess."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow import http_errors, http_session
from loraflow.errors import CapabilityError, LoadError, LoraflowError, SyncTimeout, VerifyError
from loraflow.merge import WireTensor
from loraflow.plugin_client import PluginClient
from loraflow.server import BadAnswer, HTTPFailure, Unreachable, VLLMServer
from loraflow.server_info import ServerInfo, info_from_config
from loraflow.spread import is_servers_fault
from loraflow.takeover import _weight_version
from loraflow.transports.link import Link
from loraflow.transports.weight_digest import WeightLayout
from tests.helpers.fault_proxy import FaultProxy

MODELS = {"data": [{"id": "base", "root": "/m", "parent": None}]}


class Answering(ThreadingHTTPServer):
    """Gives every request the same answer: `body` as JSON (or as it is, where it is bytes) with `status`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body: Any = MODELS
        self.status = 200
        self.asked: list[str] = []
        self.given: list[bytes] = []
        self.meanwhile: Callable[[], None] = lambda: None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Answering)
        server.given.append(self.rfile.read(int(self.headers.get("content-length", 0))))
        server.asked.append(f"{self.command} {self.path}")
        server.meanwhile()
        body = server.body if isinstance(server.body, bytes) else json.dumps(server.body).encode()
        self.send_response(server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def there() -> Iterator[Answering]:
    server = Answering()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(there: Answering) -> Iterator[FaultProxy]:
    with FaultProxy(there.server_address[1]) as made:
        yield made


def test_a_dribbling_answer_ends_with_its_timeout(there: Answering, proxy: FaultProxy) -> None:
    there.body = {"data": ["x" * 4000]}  # 30 s at the proxy's pace, and a byte every tenth of a second
    proxy.fault = "dribble"
    with VLLMServer(proxy.url, request_timeout=0.6) as server:
        began = time.monotonic()
        with pytest.raises(SyncTimeout, match=r"in 0\.6 s"):
            server.request("GET", "/v1/models", retry=True)
        assert 0.5 < time.monotonic() - began < 2.0
        proxy.fault = "none"
        assert server.request("GET", "/v1/models") == there.body


def test_calls_with_other_limits_at_the_same_time_end_each_in_its_own(proxy: FaultProxy) -> None:
    proxy.fault = "hole"
    took: dict[float, float] = {}

    def ask(server: VLLMServer, limit: float) -> None:
        began = time.monotonic()
        with pytest.raises(SyncTimeout):
            server.request("GET", "/health", timeout=limit)
        took[limit] = time.monotonic() - began

    with VLLMServer(proxy.url) as server:
        threads = [threading.Thread(target=ask, args=(server, limit)) for limit in (1.2, 0.3, 0.8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert sorted(took) == [0.3, 0.8, 1.2]
    assert all(limit <= seconds < limit + 5 for limit, seconds in took.items())  # the hole itself never ends


def test_a_client_that_is_idle_has_no_thread(there: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_session, "_IDLE", 0.05)
    before = set(threading.enumerate())
    server = VLLMServer(f"http://127.0.0.1:{there.server_address[1]}")  # nobody closes it
    for _ in range(2):
        server.models()
        watchers = [t for t in threading.enumerate() if t not in before and t.name == "loraflow-deadlines"]
        for thread in watchers:
            thread.join(10)
        assert not any(thread.is_alive() for thread in watchers)
    server.close()


def test_close_leaves_no_thread(there: Answering) -> None:
    before = set(threading.enumerate())
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        for _ in range(20):
            server.models()
        assert [t.name for t in set(threading.enumerate()) - before if "loraflow" in t.name] == ["loraflow-deadlines"]
    assert not [thread for thread in set(threading.enumerate()) - before if "loraflow" in thread.name]


@pytest.mark.parametrize("fault", ["reset", "cut"])
def test_a_broken_connection_is_no_answer(proxy: FaultProxy, there: Answering, fault: Any) -> None:
    there.body = {"data": ["x" * 8000]}
    proxy.fault = fault
    with VLLMServer(proxy.url) as server, pytest.raises(Unreachable) as caught:
        server.request("GET", "/v1/models")
    assert is_servers_fault(caught.value)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"error": {"message": "the engine is dead", "code": 500}}, 500),
        ({"error": {"message": "no such model", "code": 404}}, 404),
        ({"object": "error", "error": "overloaded"}, 500),
        ({"error": {"message": "odd", "code": "odd"}}, 500),
    ],
)
def test_an_error_that_comes_with_a_success_is_an_error(there: Answering, body: Any, status: int) -> None:
    there.body = body
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        for call in (
            server.models,
            lambda: server.generate([[1]], model="m"),
            lambda: server.prompt_logprobs([1, 2], model="m"),
            PluginClient(server.request).status,
        ):
            with pytest.raises(HTTPFailure) as caught:
                call()
            assert caught.value.status == status
            assert is_servers_fault(caught.value)


def completion(**choice: Any) -> dict[str, Any]:
    return {"model": "m", "choices": [{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, **choice}]}


@pytest.mark.parametrize(
    "body",
    [
        b"<html>sign in to the network</html>",
        b"",
        b"null",
        b'{"model": "m", "choi',
        [],
        {},
        {"model": "m"},
        {"model": "m", "choices": None},
        {"model": "m", "choices": [{}]},
        completion(token_ids=None),
        completion(token_ids=[5, 6, 7]),
        completion(logprobs={"token_logprobs": ["a", "b"]}),
    ],
    ids=lambda body: repr(body)[:40],
)
def test_an_answer_of_another_form_is_an_error_of_that_server(there: Answering, body: Any) -> None:
    there.body = body
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        for call in (
            server.models,
            server.refresh,
            lambda: server.generate([[1]], model="m"),
            lambda: server.prompt_logprobs([1, 2], model="m"),
            PluginClient(server.request).verify,
        ):
            arguments = ("name", "layout") if "verify" in repr(call) else ()
            with pytest.raises(LoraflowError) as caught:
                call(*arguments)
            lacking = isinstance(caught.value, CapabilityError)  # a completion without the log-probs asked for
            assert lacking or isinstance(caught.value, (BadAnswer, VerifyError))
            assert lacking or is_servers_fault(caught.value)


ODD_ANSWERS = [
    "<html>sign in to the network</html>", "", None, [], {}, 5,
    {"weight_version": "v", "is_paused": False, "checksums": 5, "results": [5], "world_size": "two", "engines": 5},
    {"layout_id": "l", "engines": 1, "ranks": [{"rects": [[9, 0, 0, 1, 1, 0]], "dtypes": ["float32"]}], "results": 5},
]  # fmt: skip


@pytest.mark.parametrize("answer", ODD_ANSWERS, ids=lambda answer: repr(answer)[:40])
def test_what_a_broadcast_asks_is_answered_in_another_form(answer: Any) -> None:
    """Each is an error of that server that says what was read, or is an answer after all."""
    plugin = SimpleNamespace(worker_extension=True, capabilities=("weights",))
    info = SimpleNamespace(weight_routes={"weight_info", "weight_checker"}, plugin=plugin, version="0.32.0")
    server: Any = SimpleNamespace(url="http://there", info=info, request=lambda *_, **__: answer, load_timeout=1.0)
    link = Link(server, "gloo", lambda *_: None, bucket_bytes=1, timeout=1.0)  # type: ignore[arg-type,return-value]
    client = PluginClient(server.request)
    calls: list[Callable[[], object]] = [
        link.version, link.checksums, link._is_paused, link._update_is_open, link.connect, client.pause,
        lambda: client.weights_sums("l"), lambda: WeightLayout.agree(server, [WireTensor("w", torch.float32, (2, 2))]),
        lambda: _weight_version(server),
    ]  # fmt: skip
    told: list[str] = []
    for call in calls:
        try:
            call()
        except LoraflowError as error:
            told.append(str(error))
    assert all("another form" in text for text in told), told
    assert len(told) >= (5 if isinstance(answer, dict) and answer else 8)


@pytest.mark.parametrize("rows", [5, [None], [None, 5], {"a": 1, "b": 2}, "ab"], ids=repr)
def test_prompt_log_probs_of_another_form_are_an_error_of_that_server(there: Answering, rows: Any) -> None:
    there.body = completion(prompt_logprobs=rows)
    url = f"http://127.0.0.1:{there.server_address[1]}"
    with VLLMServer(url) as server, pytest.raises((BadAnswer, CapabilityError)):
        server.prompt_logprobs([1, 2], model="m")


def test_a_limit_that_is_no_number_is_an_error_of_that_server() -> None:
    lora = {"max_lora_rank": math.inf, "max_loras": 1}
    with pytest.raises(BadAnswer), http_errors.understood("what the server says of itself"):
        info_from_config(ServerInfo("http://s", "0.32.0", "m", "/m"), {"lora_config": lora}, {}, frozenset())


@pytest.mark.parametrize("entry", [{"id": 5}, {"id": "m", "root": 5}, {"id": "m", "parent": ["m"]}, {"id": None}])
def test_a_model_whose_names_are_no_text_is_refused(there: Answering, entry: dict[str, Any]) -> None:
    there.body = {"data": [entry]}
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        for call in (server.models, server.refresh):
            with pytest.raises(BadAnswer):
                call()


@pytest.mark.parametrize("route", ["/v1/models", "/v1/completions"])
def test_a_proxys_page_is_told_by_its_title(there: Answering, route: str) -> None:
    there.status, there.body = 502, b"<html>\n<head><title>502 Bad\nGateway</title></head>\n<body>nginx</body></html>"
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        with pytest.raises(HTTPFailure) as caught:
            server.models() if route == "/v1/models" else server.prompt_logprobs([1, 2], model="m")
        assert caught.value.reason == "a web page, 502 Bad Gateway"


def test_the_right_form_is_read(there: Answering) -> None:
    there.body = completion()
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        [answer] = server.generate([[1]], model="m")
        assert (answer.token_ids, answer.logprobs) == ((5, 6), (-1.0, -2.0))


@pytest.mark.parametrize("lacking", [None, -9999.0])
def test_a_log_prob_that_the_server_lacks_is_nan(there: Answering, lacking: float | None) -> None:
    """vLLM writes -9999 for -inf."""
    there.body = completion(logprobs={"token_logprobs": [-1.0, lacking]})
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        [answer] = server.generate([[1]], model="m")
    assert answer.logprobs[0] == -1.0
    assert math.isnan(answer.logprobs[1])


def test_samples_are_the_policy_s_own_whatever_the_server_s_defaults_are(there: Answering) -> None:
    """vLLM fills in what a request leaves out from generation_config.json: top_k=20 and more, with Qwen2.5-Instruct."""
    there.body = completion()
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        server.generate([[1]], model="m", top_p=0.9)
    sent = json.loads(there.given[-1])
    plain = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    plain |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: sent.get(name) for name in plain} == plain
    assert sent["top_p"] == 0.9, "what is asked for is not overridden"


@pytest.mark.parametrize(
    ("reason", "repeated"),
    [
        ("Loading lora run-v1 failed: No adapter found for /adapters/run/v1", True),
        ("there is no folder '/adapters/run/v1' on this server (yet)", True),
        ("adapter_model.safetensors is missing from the adapter's folder", True),
        ("Not Found", False),
    ],
)
def test_a_folder_that_a_server_does_not_see_yet_is_asked_for_again(
    there: Answering, monkeypatch: pytest.MonkeyPatch, reason: str, repeated: bool
) -> None:
    """A network file system shows new folders late; a route that is missing is not waited for."""
    monkeypatch.setattr(http_errors, "VISIBLE_SECONDS", 0.5)
    with VLLMServer(f"http://127.0.0.1:{there.server_address[1]}") as server:
        there.body = {"version": "0.32.0", "paths": [], **MODELS}
        assert server.info.plugin is None
        there.body, there.status = {"error": {"message": reason, "code": 404}}, 404
        began = time.monotonic()
        with pytest.raises(LoadError, match=reason[:12]):
            server.load_adapter("run-v1", "/adapters/run/v1")
        assert (time.monotonic() - began >= 0.5) is repeated
        assert (there.asked.count("POST /v1/load_lora_adapter") > 1) is repeated

        def appear() -> None:
            if there.asked.count("POST /v1/load_lora_adapter") == 3:
                there.status = 200
                there.body = {"data": [{"id": "run-v1", "root": "/adapters/run/v1", "parent": "base"}]}

        there.asked.clear()
        there.meanwhile = appear
        if repeated:
            assert server.load_adapter("run-v1", "/adapters/run/v1") == "/adapters/run/v1"


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("LoRA rank 64 is greater than max_lora_rank 16.", "--max-lora-rank"),
        ("Loading lora lora-rank8-v0 failed: out of memory", "traceback"),
    ],
)
def test_what_to_do_is_told_from_the_reason_and_not_from_a_runs_name(reason: str, hint: str) -> None:
    error = HTTPFailure("refused", status=400, reason=reason, server="http://s")
    assert hint in http_errors.load_hint(error, "/store/lora-rank8/v0")


def test_a_load_whose_answer_was_lost_is_found_in_the_list(there: Answering, proxy: FaultProxy) -> None:
    """A stock server: the load is not repeated, a name is loaded once."""
    loaded = {"data": [*MODELS["data"], {"id": "run-v1", "root": "/adapters/run/v1", "parent": "base"}]}
    with VLLMServer(proxy.url) as server:
        there.body = {"version": "0.32.0", "paths": [], **MODELS}
        assert server.info.plugin is None
        there.asked.clear()

        def lose() -> None:
            if there.asked[-1].startswith("POST"):
                proxy.fault = "reset"
                there.body = loaded
                time.sleep(0.3)
                proxy.fault = "none"

        there.meanwhile = lose
        assert server.load_adapter("run-v1", "/adapters/run/v1") == "/adapters/run/v1"
        assert there.asked == ["POST /v1/load_lora_adapter", "GET /v1/models", "GET /v1/models"]


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"kv_transfer_config": None}, "reset_running_requests=true"),
        ({}, "reset_running_requests=true"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
            "reset_running_requests=true&reset_external=true",
        ),
    ],
)
def test_what_a_kv_connector_keeps_is_forgotten_with_the_prefix_cache(
    there: Answering, config: dict[str, Any], asked: str
) -> None:
    with VLLMServer(f"http://127.0.0.1:{there.server_port}") as server:
        server._info = info_from_config(ServerInfo(server.url, "0.32.0", "base", "/m"), config, {}, frozenset())
        there.body = {"success": True}
        server.reset_prefix_cache()
        assert there.asked == [f"POST /reset_prefix_cache?{asked}"]

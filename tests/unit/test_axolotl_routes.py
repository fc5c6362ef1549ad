"""The routes of Axolotl's own server: names, order of loads, and what is refused; without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.responses import JSONResponse, Response

from loraflow_server.axolotl_routes import attach
from loraflow_server.errors import PluginError


class Service:
    """What the routes ask of the plugin's service."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.healthy = True
        self.engine = SimpleNamespace(loaded=lambda: self.names, client=SimpleNamespace(check_health=self._check))

    async def _check(self) -> None:
        if not self.healthy:
            raise RuntimeError("the engine died")

    async def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not body["path"].startswith("/adapters/"):
            raise PluginError("outside_roots", "not under the allowed roots", status=403)
        self.names[body["name"]] = body["path"]
        self.calls.append(("load", body["path"]))
        return {"lora_int_id": len(self.calls)}

    async def unload(self, name: str) -> None:
        self.calls.append(("unload", self.names.pop(name)))


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def client(service: Service) -> TestClient:
    app = FastAPI()

    async def answer(request: Request, route: str, handler: Any, *, body: bool) -> Response:
        try:
            return JSONResponse(await handler(service, await request.json() if body else {}))
        except PluginError as error:
            return JSONResponse({"error": {"code": error.code, "message": error.message}}, status_code=error.status)

    attach(app, answer, lambda: service)  # type: ignore[arg-type, return-value]

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Any:
        return await request.json()

    return TestClient(app)


def set_adapter(client: TestClient, number: int, path: str, **more: Any) -> Any:
    body = {"lora_name": "active_lora", "lora_int_id": number, "lora_path": path, **more}
    return client.post("/set_lora_adapter/", json=body)


def test_each_version_has_a_name_of_its_own_and_the_one_before_is_unloaded(
    client: TestClient, service: Service
) -> None:
    first, second = set_adapter(client, 1, "/adapters/a/v1").json(), set_adapter(client, 2, "/adapters/a/v2").json()
    assert first["status"] == second["status"] == "ok"
    assert first["model"] != second["model"]
    assert service.names == {second["model"]: "/adapters/a/v2"}
    assert service.calls == [("load", "/adapters/a/v1"), ("load", "/adapters/a/v2"), ("unload", "/adapters/a/v1")]


def test_a_second_run_counts_from_one_again_under_other_names(client: TestClient) -> None:
    first, second = set_adapter(client, 1, "/adapters/a/v1").json(), set_adapter(client, 1, "/adapters/b/v1").json()
    assert first["model"].startswith("active_lora-v1-")
    assert second["model"].startswith("active_lora-v1-")
    assert first["model"] != second["model"]


def test_clear_unloads_and_may_be_called_again(client: TestClient, service: Service) -> None:
    set_adapter(client, 1, "/adapters/a/v1")
    for _ in range(2):
        assert client.post("/clear_lora_adapter/").json() == {"status": "ok"}
    assert service.names == {}
    assert service.calls.count(("unload", "/adapters/a/v1")) == 1


def test_a_refused_adapter_leaves_the_one_before(client: TestClient, service: Service) -> None:
    kept = set_adapter(client, 1, "/adapters/a/v1").json()["model"]
    refused = set_adapter(client, 2, "/etc")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "outside_roots")
    assert list(service.names) == [kept]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"load_inplace": True}, "load_inplace"),
        ({"lora_int_id": "1"}, "bad_request"),
        ({"lora_int_id": True}, "bad_request"),
        ({"lora_name": None}, "bad_request"),
        ({"lora_path": 5}, "bad_request"),
    ],
)
def test_bad_bodies(client: TestClient, service: Service, body: dict[str, Any], code: str) -> None:
    right = {"lora_name": "active_lora", "lora_int_id": 1, "lora_path": "/adapters/a/v1"}
    answer = client.post("/set_lora_adapter/", json=right | body)
    assert answer.json()["error"]["code"] == code
    assert service.calls == []


def test_health(client: TestClient, service: Service) -> None:
    assert client.get("/health/").json() == {"status": "ok"}
    service.healthy = False
    answer = client.get("/health/")
    assert (answer.status_code, answer.json()) == (503, {"status": "error", "message": "the engine died"})


def test_vllms_own_route_never_loads_in_place(client: TestClient) -> None:
    body = {"lora_name": "x", "lora_path": "/adapters/a/v1"}
    assert client.post("/v1/load_lora_adapter", json=body).json() == body  # passed on as it came
    refused = client.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
    assert refused.status_code == 400
    assert "load_inplace" in refused.json()["error"]["message"]

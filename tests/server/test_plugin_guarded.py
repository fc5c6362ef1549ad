"""A server as an operator would open it to others: a token, a store, and none of vLLM's development switches."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from moto.server import ThreadedMotoServer

from loraflow.adapter import take_snapshot
from loraflow.adapter_files import adapter_files
from loraflow.digest import prove_digest
from loraflow.policy import Policy, new_run_id
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore
from tests.conftest import ServerPark
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer, vllm_server

pytestmark = pytest.mark.server

TOKEN = secrets.token_urlsafe(32)
BUCKET = "loraflow-guarded"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of an S3 server of its own process, with a bucket."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    requests.put(f"{url}/{BUCKET}", timeout=10)
    yield url
    server.stop()


@pytest.fixture(scope="module")
def aws(s3: str) -> Iterator[dict[str, str]]:
    env = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield env


@pytest.fixture
def guarded(
    server_park: ServerPark, tiny_model: Path, aws: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    env = {
        **aws,
        "LORAFLOW_TOKEN": TOKEN,
        "LORAFLOW_STORE_ROOTS": f"s3://{BUCKET}/runs",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    }
    work = tmp_path_factory.mktemp("guarded")
    return server_park.get("guarded", lambda: vllm_server(tiny_model, work, env=env, dev_mode=False))


def test_only_the_token_opens_the_routes(guarded: RunningServer) -> None:
    path = f"{guarded.url}/loraflow/v1/status"
    assert requests.get(path, timeout=30).status_code == 401
    assert requests.get(path, headers={"Authorization": "Bearer no"}, timeout=30).status_code == 401
    assert requests.get(path, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30).json()["token"] is True
    assert requests.post(f"{guarded.url}/v1/load_lora_adapter", json={}, timeout=30).status_code == 404
    assert requests.get(f"{guarded.url}/server_info", timeout=30).status_code == 404


def test_adapters_come_from_the_object_store(guarded: RunningServer, tiny_model: Path) -> None:
    server = VLLMServer(guarded.url, token=TOKEN)
    assert "stores" in server.info.plugin.capabilities  # type: ignore[union-attr]
    assert server.info.lora is not None
    assert server.info.lora.max_rank == 16
    model = peft_model(tiny_model, std=0.2)
    with AdapterStore(f"s3://{BUCKET}/runs", new_run_id(), retain=1, grace_period=0.0) as store:
        for version in range(3):
            randomize(model, seed=version, std=0.2)
            snapshot, policy = take_snapshot(model), Policy(store.run_id, version)
            published = store.publish(policy, adapter_files(snapshot), digest=snapshot.digest)
            assert published.path.startswith("s3://")
            server.load_adapter(policy.name, published.path)
            proof = prove_digest(server, policy, snapshot)
            assert proof.passed, proof.detail
            served = torch.tensor(server.prompt_logprobs(PROMPT, model=policy.name, cache_salt=str(version)))
            assert (served - peft_logprobs(model, PROMPT)).abs().max() < 1e-4

        policy = Policy(store.run_id, 3)
        snapshot = take_snapshot(model)
        published = store.publish(policy, adapter_files(snapshot), digest=snapshot.digest)
        store._backend.fs.pipe_file(f"{published.path}/adapter_model.safetensors", b"\0" * 100)
        with pytest.raises(Exception, match=r"ends at|is not what its manifest says"):
            server.load_adapter(policy.name, published.path)
        with pytest.raises(HTTPFailure, match="under none of"):
            body = {"name": "x-v0", "path": f"s3://{BUCKET}/elsewhere/v0"}
            server.request("POST", "/loraflow/v1/adapters", json=body)

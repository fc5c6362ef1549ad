"""The store on S3: a real server process (moto), the real client (s3fs), credentials from the environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import boto3
import pytest
import requests

from loraflow.errors import PublishError
from loraflow.policy import Policy
from loraflow.store import AdapterStore

pytest.importorskip("s3fs")
pytestmark = pytest.mark.integration

FILES = {"adapter_model.safetensors": [b"header", os.urandom(3 << 20)], "adapter_config.json": [b'{"r": 8}']}
DIGEST = "cd" * 32


def policy(version: int) -> Policy:
    return Policy("run", version)


def free_port() -> int:
    for port in range(18150, 18200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("no free port")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                requests.get(url, timeout=1)
                break
            except requests.ConnectionError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    requests.post(f"{endpoint}/moto-api/reset", timeout=10)
    client.create_bucket(Bucket="adapters")
    return client


def open_store(**options) -> AdapterStore:
    return AdapterStore("s3://adapters/some/where", "run", **{"retain": 2, "grace_period": 0.0, **options})


def keys(client) -> set[str]:
    found = client.list_objects_v2(Bucket="adapters").get("Contents", [])
    return {item["Key"].removeprefix("some/where/run/") for item in found}


def test_a_run_on_s3(s3) -> None:
    with open_store() as store:
        for version in range(4):
            published = store.publish(policy(version), FILES, digest=DIGEST)
            assert published.path == f"s3://adapters/some/where/run/v{version}"
            store.verify(policy(version))
            store.mark_committed(policy(version))
            if version:
                store.retire(policy(version - 1))
            store.collect()
        for name, parts in FILES.items():
            stored = s3.get_object(Bucket="adapters", Key=f"some/where/run/v3/{name}")["Body"].read()
            assert stored == b"".join(parts) == store.read(policy(3))[name]
        assert {key.split("/")[0] for key in keys(s3)} == {"v2", "v3", "ledger.json", "lease.json"}
        assert store.committed() == policy(3)
    assert "lease.json" not in keys(s3)


def test_a_new_process_goes_on_where_the_old_one_died(s3) -> None:
    code = """
import os
from loraflow.policy import Policy
from loraflow.store import AdapterStore
store = AdapterStore("s3://adapters/some/where", "run", retain=2, grace_period=0)
for version in range(3):
    store.publish(Policy("run", version), {"adapter_config.json": [b"{}"]}, digest="")
    if version < 2:
        store.mark_committed(Policy("run", version))
store._update(lambda ledger: ledger.enter(3))
store._backend.fs.pipe_file("adapters/some/where/run/v3/adapter_model.safetensors", b"half")
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 9
    assert {"lease.json", "v3/adapter_model.safetensors"} <= keys(s3)
    with open_store() as store:
        found = store.recover()
        assert (found.committed, found.burnt, found.removed) == (policy(1), (policy(2),), ("v3",))
        assert store.next_version() == 4
        assert not [key for key in keys(s3) if key.startswith("v3")]
        store.publish(policy(4), FILES, digest=DIGEST)


def test_two_writers_of_one_run(s3) -> None:
    with open_store(), pytest.raises(PublishError, match=f"process {os.getpid()}"):
        open_store()


def test_objects_without_a_manifest_are_no_version(s3) -> None:
    with open_store() as store:
        store.publish(policy(0), {**FILES, "empty": []}, digest=DIGEST)
        assert store.read(policy(0))["empty"] == b""
        s3.delete_object(Bucket="adapters", Key="some/where/run/v0/manifest.json")
        with pytest.raises(PublishError, match="manifest"):
            store.read(policy(0))
        assert store.recover().removed == ("v0",)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "manifest.json"])
def test_damage_is_noticed(s3, name: str, damage: str) -> None:
    with open_store() as store:
        store.publish(policy(0), FILES, digest=DIGEST)
        key = {"Bucket": "adapters", "Key": f"some/where/run/v0/{name}"}
        content = s3.get_object(**key)["Body"].read()
        changed = {"flip": bytes([content[0] ^ 1]) + content[1:], "truncate": content[:-1], "empty": b""}
        if damage == "delete":
            s3.delete_object(**key)
        else:
            s3.put_object(**key, Body=changed[damage])
        with pytest.raises(PublishError, match=rf"{name}|manifest of run-v0" if damage == "delete" else name):
            store.verify(policy(0))


def test_a_bucket_that_is_not_there_is_a_clear_error(s3) -> None:
    with pytest.raises(PublishError, match="cannot open the store s3://nowhere"):
        AdapterStore("s3://nowhere/x", "run", retain=1, grace_period=0)

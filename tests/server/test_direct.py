"""The direct carrier on a real vLLM: what it installs is what the trainer has, on one rank, two, and two engines."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.errors import CapabilityError, PublishError
from loraflow.layout import lora_shapes
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy, new_run_id
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.blocks import SharedBlock
from loraflow.transports.direct import DirectTransport
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.server
SHM = Path("/dev/shm")


def blocks() -> set[str]:
    """Payload blocks of this process."""
    found = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    return {path for path in found if path.startswith("/dev/shm/loraflow-")}


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    opened: list[AdapterStore] = []

    def make(server: RunningServer) -> AdapterStore:
        opened.append(AdapterStore(str(server.adapter_root), new_run_id(), retain=2, grace_period=0.0))
        return opened[-1]

    yield make
    for item in opened:
        item.close()


def served(server: VLLMServer, name: str) -> torch.Tensor:
    return torch.tensor(server.prompt_logprobs(PROMPT, model=name, cache_salt=secrets.token_hex(4)))


def check_versions(running: RunningServer, store: AdapterStore, model_folder: Path, engines: int, ranks: int) -> None:
    server = VLLMServer(running.url)
    model = peft_model(model_folder, r=8, lora_alpha=24, std=0.2)
    transport = DirectTransport(store, AdapterSpec.from_model(model))
    transport.open([server])
    try:
        for version in range(6):  # more than there are slots, and than host copies
            randomize(model, seed=version, std=0.2)
            policy = Policy(store.run_id, version)
            if version % 2:  # the call leaves before the payload is there
                transport.wait_published()
                assert transport.announce(policy, [server], lambda _: None)
            snapshot = take_snapshot(model)
            delivery = transport.deliver(policy, snapshot, [server])
            outcome = delivery.servers[server.url]
            assert outcome.error is None
            assert outcome.model == policy.name
            assert outcome.proof is not None
            assert outcome.proof.passed, outcome.proof.detail
            assert delivery.bytes == snapshot.nbytes
            store.mark_committed(policy)  # before its file is there
            for _ in range(2 * engines):  # requests go round the engines
                assert (served(server, policy.name) - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
        client = PluginClient(server.request)
        layout = client.layout(lora_shapes(snapshot.spec))
        assert (layout.engines, len(layout.ranks)) == (engines, ranks)
        answer = client.verify(policy.name, layout.layout_id)
        assert [len(part) for part in answer.sums] == [ranks] * engines
        transport.wait_published()
        for version in (0, 3, 5, 1):  # evicted from slots, and from the host: read back from memory or from the file
            randomize(model, seed=version, std=0.2)
            assert (served(server, f"{store.run_id}-v{version}") - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
        for version in range(6):
            assert store.read(Policy(store.run_id, version))
    finally:
        transport.close([server])
    assert not [m for m in server.models() if m.id.startswith(store.run_id)]
    assert blocks() == set()


def test_one_rank(lora_server: RunningServer, store: Any, tiny_model: Path) -> None:
    check_versions(lora_server, store(lora_server), tiny_model, engines=1, ranks=1)


def test_two_ranks(tp2_server: RunningServer, store: Any, tiny_model: Path) -> None:
    check_versions(tp2_server, store(tp2_server), tiny_model, engines=1, ranks=2)


def test_two_engines(dp2_server: RunningServer, store: Any, tiny_model: Path) -> None:
    check_versions(dp2_server, store(dp2_server), tiny_model, engines=2, ranks=1)


@pytest.mark.parametrize(
    "lora",
    [{"r": 16, "target_modules": ["v_proj", "gate_proj"]}, {"r": 3, "use_rslora": True}],
    ids=["some", "odd_rank"],
)
def test_other_adapters(lora_server: RunningServer, store: Any, tiny_model: Path, lora: dict[str, Any]) -> None:
    server, kept = VLLMServer(lora_server.url), store(lora_server)
    model = peft_model(tiny_model, std=0.2, **lora)
    snapshot, policy = take_snapshot(model), Policy(kept.run_id, 0)
    transport = DirectTransport(kept, snapshot.spec)
    transport.open([server])
    outcome = transport.deliver(policy, snapshot, [server]).servers[server.url]
    assert outcome.proof is not None
    assert outcome.proof.passed, outcome.proof.detail
    assert (served(server, policy.name) - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
    transport.close([server])


def test_withdrawn_names_are_gone_and_burnt(lora_server: RunningServer, store: Any, tiny_model: Path) -> None:
    server, kept = VLLMServer(lora_server.url), store(lora_server)
    snapshot = take_snapshot(peft_model(tiny_model))
    transport = DirectTransport(kept, snapshot.spec)
    transport.open([server])
    policy = Policy(kept.run_id, 0)
    transport.deliver(policy, snapshot, [server])
    transport.withdraw(policy, [server])
    assert policy.name not in {m.id for m in server.models()}
    with pytest.raises(PublishError):  # the store's name is used up
        transport.deliver(policy, snapshot, [server])
    assert transport.deliver(Policy(kept.run_id, 1), snapshot, [server]).servers[server.url].error is None
    transport.close([server])


def test_a_version_that_cannot_be_published_stops_the_next(
    lora_server: RunningServer, store: Any, tiny_model: Path
) -> None:
    server, kept = VLLMServer(lora_server.url), store(lora_server)
    snapshot = take_snapshot(peft_model(tiny_model))
    transport = DirectTransport(kept, snapshot.spec)
    transport.open([server])
    folder = Path(kept.path())
    folder.chmod(0o500)
    kept._min_free = 1 << 60
    assert transport.deliver(Policy(kept.run_id, 0), snapshot, [server]).servers[server.url].error is None
    with pytest.raises(PublishError):
        transport.deliver(Policy(kept.run_id, 1), snapshot, [server])
    kept._min_free = 0
    folder.chmod(0o700)
    transport.close([server])


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ({"kind": "shm", "name": "../../etc/passwd", "nbytes": 8}, 400),
        ({"kind": "shm", "name": "loraflow-nobody", "nbytes": 8}, 409),
        ({"kind": "shm", "name": "loraflow-x", "nbytes": 1 << 50}, 413),
        ({"kind": "shm", "name": "loraflow-x", "nbytes": True}, 400),
        ({"kind": "shm", "name": "loraflow-x", "nbytes": -1}, 400),
        ({"kind": "pickle", "nbytes": 8}, 400),
        ({"kind": "cuda_ipc", "nbytes": 8}, 400),
    ],
)
def test_bad_sources_are_refused(lora_server: RunningServer, source: dict[str, Any], status: int) -> None:
    server = VLLMServer(lora_server.url)
    body = {"name": "bad-v0", "path": str(lora_server.adapter_root / "bad"), "layout_id": "x", "source": source}
    for path in ("/loraflow/v1/direct", "/loraflow/v1/direct/probe"):
        with pytest.raises(HTTPFailure) as caught:
            server.request("POST", path, json=body)
        assert caught.value.status == status


def test_a_payload_of_the_wrong_size_leaves_nothing(lora_server: RunningServer, store: Any, tiny_model: Path) -> None:
    server, kept = VLLMServer(lora_server.url), store(lora_server)
    client = PluginClient(server.request)
    snapshot = take_snapshot(peft_model(tiny_model, r=2))
    layout = client.layout(lora_shapes(snapshot.spec))
    block = SharedBlock(snapshot.nbytes - 4, torch.device("cpu"))
    name, path = f"{kept.run_id}-v0", kept.path(Policy(kept.run_id, 0))
    try:
        with pytest.raises(HTTPFailure, match="elements"):
            client.direct(name, path=path, layout_id=layout.layout_id, source=block.source())
    finally:
        block.close()
    assert name not in {m.id for m in server.models()}
    with pytest.raises(HTTPFailure, match="none of the folders"):
        client.direct(name, path="/etc/x", layout_id=layout.layout_id, source=block.source())


def test_a_store_behind_a_url_is_refused(lora_server: RunningServer, tiny_model: Path) -> None:
    spec = AdapterSpec.from_model(peft_model(tiny_model))
    kept = AdapterStore("memory://direct", new_run_id(), retain=2, grace_period=0.0)
    with pytest.raises(CapabilityError, match="folder"):
        DirectTransport(kept, spec).open([VLLMServer(lora_server.url)])
    kept.close()


def test_orphaned_blocks_are_removed_and_live_ones_kept() -> None:
    orphan = SHM / ("loraflow-" + secrets.token_hex(8))
    orphan.write_bytes(b"left by a killed process")
    live = SharedBlock(4096, torch.device("cpu"))
    other = SharedBlock(4096, torch.device("cpu"))
    try:
        assert not orphan.exists()
        assert (SHM / live.name).stat().st_mode & 0o777 == 0o600
        assert (SHM / live.name).exists()
    finally:
        live.close()
        other.close()
    assert not (SHM / live.name).exists()


def test_too_large_a_block_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)  # other processes make blocks meanwhile
    monkeypatch.setattr("loraflow.transports.blocks.secrets", SimpleNamespace(token_hex=lambda _: mark))
    with pytest.raises(CapabilityError, match="no shared memory"):
        SharedBlock(1 << 50, torch.device("cpu"))
    assert not list(SHM.glob(f"*{mark}*"))


# ---------------------------------------------------------------- a server on another host


def uploads(running: RunningServer, store: AdapterStore, spec: AdapterSpec, **options: Any) -> DirectTransport:
    """A transport to which ``running`` is on another host."""
    transport = DirectTransport(store, spec, far=[running.url], **{"way": "upload", **options})
    transport.open([VLLMServer(running.url)])
    return transport


@pytest.mark.parametrize("fixture", ["lora_server", "tp2_server", "dp2_server"])
def test_uploads_are_served_as_they_were_sent(
    fixture: str, request: pytest.FixtureRequest, store: Any, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = request.getfixturevalue(fixture)
    server, kept = VLLMServer(running.url), store(running)
    model = peft_model(tiny_model, r=8, lora_alpha=24, std=0.2)
    with caplog.at_level("INFO", logger="loraflow"):
        transport = uploads(running, kept, AdapterSpec.from_model(model))
    assert any("over HTTP" in record.message for record in caplog.records)
    assert blocks() == set()
    try:
        for version in range(6):  # more than there are slots, and than host copies
            randomize(model, seed=version, std=0.2)
            snapshot, policy = take_snapshot(model), Policy(kept.run_id, version)
            delivery = transport.deliver(policy, snapshot, [server])
            outcome = delivery.servers[server.url]
            assert outcome.error is None, outcome.error
            assert outcome.proof is not None
            assert outcome.proof.passed, outcome.proof.detail
            assert delivery.bytes == snapshot.nbytes
            assert (served(server, policy.name) - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
        transport.wait_published()
        for version in (0, 3, 5):  # evicted, and read back from the folder that both see
            randomize(model, seed=version, std=0.2)
            assert (served(server, f"{kept.run_id}-v{version}") - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
    finally:
        transport.close([server])

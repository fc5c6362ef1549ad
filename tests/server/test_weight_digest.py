"""Merged broadcasts proven by digest, on servers whose weights are plain: one rank, two, and two engines."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import take_snapshot
from loraflow.config import SyncConfig
from loraflow.errors import LoadError
from loraflow.manager import SyncManager
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy, new_run_id
from loraflow.server import VLLMServer
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.groups import GlooGroup
from loraflow.transports.link import PRISTINE
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.server


def left_merged(server: VLLMServer, folder: Path) -> None:
    """Serve another adapter's weights, as a trainer leaves them that dies."""
    model = peft_model(folder, std=0.1, target_modules=["o_proj", "down_proj"])
    transport = BroadcastTransport(model, SyncConfig(carrier="gloo", bucket_bytes=1 << 18), "gloo")
    transport.open([server])
    (outcome,) = transport.deliver(Policy("dead", 0), take_snapshot(model), [server]).servers.values()
    assert outcome.error is None
    transport._free()


def check_life(running: RunningServer, folder: Path) -> None:
    server = VLLMServer(running.url)
    client = PluginClient(server.request)
    start = client.base()["fingerprint"]
    left_merged(server, folder)
    assert client.base()["fingerprint"] != start
    model = peft_model(folder, std=0.1, modules_to_save=["norm"], target_modules=["q_proj", "down_proj"])
    transport = BroadcastTransport(model, SyncConfig(carrier="gloo", bucket_bytes=1 << 18), "gloo")
    transport.open([server])
    assert transport._states[server.url].link._straight  # all weights travelled, and vLLM rebuilt no layer
    assert client.base()["fingerprint"] == start
    assert transport.digests(server)
    for version in range(2):
        randomize(model, seed=version, std=0.1)
        (outcome,) = transport.deliver(Policy("run", version), take_snapshot(model), [server]).servers.values()
        assert outcome.error is None, outcome.error
        assert outcome.proof is not None
        assert (outcome.proof.kind, outcome.proof.passed) == ("digest", True)
        assert "start" not in outcome.phases_ms  # vLLM rebuilt no layer
        served = torch.tensor(server.prompt_logprobs(PROMPT, model=server.info.model, cache_salt=None))
        torch.testing.assert_close(served, peft_logprobs(model, PROMPT), rtol=0, atol=1e-4)
    assert client.base()["fingerprint"] != start
    transport.close([server])
    assert client.base()["fingerprint"] == start


def test_one_rank(fold_server: RunningServer, tiny_model: Path) -> None:
    check_life(fold_server, tiny_model)


def test_two_ranks(fold_tp2_server: RunningServer, tiny_model: Path) -> None:
    check_life(fold_tp2_server, tiny_model)


def test_two_engines(fold_dp2_server: RunningServer, tiny_model: Path) -> None:
    check_life(fold_dp2_server, tiny_model)


def test_a_weight_that_arrives_otherwise_is_never_served(
    fold_server: RunningServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value changed behind the checksum: named, the server brought back before requests are let in."""
    import loraflow.transports.pipeline as pipeline

    server = VLLMServer(fold_server.url)
    start = PluginClient(server.request).base()["fingerprint"]
    model = peft_model(tiny_model, std=0.1, target_modules=["o_proj", "up_proj"])
    transport = BroadcastTransport(model, SyncConfig(carrier="gloo"), "gloo")
    transport.open([server])
    honest, lies = pipeline._pack, iter([True])

    def pack(buffer: torch.Tensor, *rest: Any) -> None:
        honest(buffer, *rest)
        if next(lies, False):
            buffer.view(torch.int32)[4097] ^= 1

    monkeypatch.setattr(pipeline, "_pack", pack)
    (outcome,) = transport.deliver(Policy("run", 0), take_snapshot(model), [server]).servers.values()
    assert isinstance(outcome.error, LoadError)
    assert "are not those that were sent" in str(outcome.error)
    assert "layers.0" in str(outcome.error)
    assert server.request("GET", "/weight_info")["weight_version"] == PRISTINE
    assert PluginClient(server.request).base()["fingerprint"] == start
    assert not server.request("GET", "/is_paused")["is_paused"]
    (outcome,) = transport.deliver(Policy("run", 1), take_snapshot(model), [server]).servers.values()
    assert outcome.error is None
    transport.close([server])


def test_a_run_needs_no_forward_for_each_sync(fold_server: RunningServer, tiny_model: Path, tmp_path: Path) -> None:
    model = peft_model(tiny_model, std=0.1)
    options = {"carrier": "gloo", "adapter_root": str(tmp_path), "run_id": new_run_id()}
    with SyncManager(model, fold_server.url, **options) as manager:
        manager.start()
        randomize(model, seed=5, std=0.1)
        record = manager.sync(1)
        assert record is not None
        (proof,) = record.proofs.values()
        assert (proof.kind, proof.passed, proof.mean_abs_dlogp) == ("digest", True, None)
        assert record.phases_ms["forward"] < 5
        found = torch.tensor(manager.servers[0].prompt_logprobs(PROMPT, model=manager.policy_name))
        torch.testing.assert_close(found, peft_logprobs(model, PROMPT), rtol=0, atol=1e-4)


def test_a_canary_is_made_where_it_is_asked_for(fold_server: RunningServer, tiny_model: Path) -> None:
    server = VLLMServer(fold_server.url)
    model = peft_model(tiny_model, target_modules=["v_proj"])
    transport = BroadcastTransport(model, SyncConfig(carrier="gloo", verify="canary"), "gloo")
    transport.open([server])
    assert not transport.digests(server)
    (outcome,) = transport.deliver(Policy("run", 0), take_snapshot(model), [server]).servers.values()
    assert outcome.proof is None
    transport.close([server])


def test_a_restore_that_broke_off_inside_vllms_own_loading_is_mended_by_the_next_version(
    fold_server: RunningServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights travel, and some have no place of their own: vLLM has taken its layers apart when it fails."""
    server = VLLMServer(fold_server.url)
    client = PluginClient(server.request)
    start = client.base()["fingerprint"]
    model = peft_model(tiny_model, std=0.1, target_modules=["q_proj", "o_proj"])
    transport = BroadcastTransport(model, SyncConfig(carrier="gloo", bucket_bytes=1 << 17), "gloo")
    transport.open([server])
    monkeypatch.setattr(transport._layouts, "_ask", lambda *_: None)
    honest, sent = GlooGroup.send, count()

    def send(self: GlooGroup, *args: Any) -> Any:
        if next(sent) == 2:
            raise RuntimeError("connection reset")
        return honest(self, *args)

    monkeypatch.setattr(GlooGroup, "send", send)
    with pytest.raises(LoadError, match="'broadcast'"):
        transport.restore([server], whole=True)
    monkeypatch.undo()
    assert transport.digests(server)
    assert not transport.digests(server, whole=True)  # what has no place is proven by nothing
    randomize(model, seed=7, std=0.1)
    (outcome,) = transport.deliver(Policy("run", 0), take_snapshot(model), [server]).servers.values()
    assert outcome.error is None
    assert outcome.proof is not None
    served = torch.tensor(server.prompt_logprobs(PROMPT, model=server.info.model, cache_salt=None))
    torch.testing.assert_close(served, peft_logprobs(model, PROMPT), rtol=0, atol=1e-4)
    transport.close([server])
    assert client.base()["fingerprint"] == start


def test_a_base_that_was_left_merged_is_proven_weight_by_weight(
    fold_server: RunningServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that this run never changes are brought back too: one that arrives with a flipped bit is named."""
    server = VLLMServer(fold_server.url)
    client = PluginClient(server.request)
    start = client.base()["fingerprint"]
    left_merged(server, tiny_model)
    model = peft_model(tiny_model, target_modules=["q_proj"])
    transport = BroadcastTransport(model, SyncConfig(carrier="gloo", bucket_bytes=1 << 18), "gloo")
    honest = GlooGroup.send

    def send(self: GlooGroup, buffer: torch.Tensor, bucket: Any) -> Any:
        for slot in bucket.slots:
            if slot.tensor.name.endswith("layers.1.mlp.down_proj.weight"):
                buffer[slot.start] ^= 1
        return honest(self, buffer, bucket)

    with monkeypatch.context() as patched:
        patched.setattr(GlooGroup, "send", send)
        with pytest.raises(LoadError, match=r"1 weights are not those that were sent: .*layers\.1\.mlp\.down_proj"):
            transport.open([server])
    transport.open([server])
    assert transport._states[server.url].link._straight  # vLLM rebuilt no layer
    assert client.base()["fingerprint"] == start
    transport.close([server])


def test_all_weights_again_and_again_use_the_places_that_were_agreed_on_once(
    fold_server: RunningServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = VLLMServer(fold_server.url)
    model = peft_model(tiny_model, std=0.1, target_modules=["q_proj"])
    transport = BroadcastTransport(model, SyncConfig(carrier="gloo", bucket_bytes=1 << 18), "gloo")
    transport.open([server])
    asked: list[int] = []
    honest = PluginClient.weights_layout

    def layout(self: PluginClient, shapes: Any, **more: Any) -> Any:
        asked.append(len(shapes))
        return honest(self, shapes, **more)

    monkeypatch.setattr(PluginClient, "weights_layout", layout)
    for version in range(2):
        (outcome,) = transport.deliver(Policy("run", version), take_snapshot(model), [server]).servers.values()
        assert outcome.proof is not None
        assert transport.digests(server, whole=True) is bool(version)  # nobody was asked of all of them yet
        transport.restore([server], whole=True)
        assert transport._states[server.url].link._straight
        assert transport.digests(server, whole=True)
    assert asked == [len(transport._opened().weights)]
    transport.close([server])

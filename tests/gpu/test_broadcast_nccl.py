"""Merged weights over NCCL, straight into a server on another GPU; and what stalls or is given up on there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import take_snapshot
from loraflow.config import SyncConfig
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy
from loraflow.server import VLLMServer
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.groups import NcclGroup
from loraflow.transports.link import PRISTINE
from tests.conftest import ServerPark
from tests.gpu.test_direct_fold import ARGS, NOISE, base, off, redraw
from tests.helpers.tiny import peft_model
from tests.helpers.vllm_process import RunningServer, vllm_server

__all__ = ["base"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture
def plain(server_park: ServerPark, base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    work = tmp_path_factory.mktemp("nccl")
    return server_park.get(
        "gpu_nccl",
        lambda: vllm_server(
            base,
            work,
            args=ARGS,
            env={"CUDA_VISIBLE_DEVICES": "1"},
            max_lora_rank=None,
        ),
    )


def opened(server: VLLMServer, model: Any, **options: Any) -> BroadcastTransport:
    transport = BroadcastTransport(model, SyncConfig(carrier="nccl", bucket_bytes=1 << 19, **options), "nccl")
    transport.open([server])
    return transport


def version(server: VLLMServer) -> str:
    return str(server.request("GET", "/weight_info")["weight_version"])


def test_each_version_is_written_proven_and_taken_back(plain: RunningServer, base: Path) -> None:
    server, model = VLLMServer(plain.url), peft_model(base, r=16, dtype=torch.bfloat16).to("cuda:0")
    start = PluginClient(server.request).base()["fingerprint"]
    transport = opened(server, model)
    for number in range(4):
        redraw(model, number)
        (outcome,) = transport.deliver(Policy("run", number), take_snapshot(model), [server]).servers.values()
        assert outcome.error is None
        assert outcome.proof is not None
        assert "start" not in outcome.phases_ms
        assert off(server, server.info.model, model) < NOISE
    transport.close([server])
    assert PluginClient(server.request).base()["fingerprint"] == start


def test_a_merge_that_fails_is_called_off_and_the_server_brought_back(
    plain: RunningServer, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers wait in NCCL for buckets that will never come."""
    server, model = VLLMServer(plain.url), peft_model(base, r=16, dtype=torch.bfloat16).to("cuda:0")
    transport = opened(server, model, collective_timeout=60.0)
    redraw(model, 1)
    snapshot, honest, sent = take_snapshot(model), NcclGroup.send, [0]

    def send(self: NcclGroup, *args: Any) -> Any:
        sent[0] += 1
        if sent[0] == 2:
            raise MemoryError("no room for the next weight")
        return honest(self, *args)

    monkeypatch.setattr(NcclGroup, "send", send)
    began = time.monotonic()
    with pytest.raises(MemoryError):
        transport.deliver(Policy("run", 0), snapshot, [server])
    assert time.monotonic() - began < 30
    assert version(server) == PRISTINE
    (outcome,) = transport.deliver(Policy("run", 1), snapshot, [server]).servers.values()
    assert outcome.error is None
    assert off(server, server.info.model, model) < NOISE
    transport.close([server])


def test_a_trainer_that_stalls_holds_the_server_up_for_its_timeout_only(
    plain: RunningServer, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, model = VLLMServer(plain.url), peft_model(base, r=16, dtype=torch.bfloat16).to("cuda:0")
    transport = opened(server, model, collective_timeout=5.0)
    snapshot, honest, stuck = take_snapshot(model), NcclGroup.send, iter([True])

    class Never:
        def done(self) -> bool:
            return False

    monkeypatch.setattr(NcclGroup, "send", lambda *args: Never() if next(stuck, False) else honest(*args))
    began = time.monotonic()
    (outcome,) = transport.deliver(Policy("run", 0), snapshot, [server]).servers.values()
    assert "phase 'broadcast'" in str(outcome.error)
    assert time.monotonic() - began < 30
    assert version(server) == PRISTINE
    (outcome,) = transport.deliver(Policy("run", 1), snapshot, [server]).servers.values()
    assert outcome.error is None
    transport.close([server])

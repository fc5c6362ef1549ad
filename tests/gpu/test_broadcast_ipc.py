"""Merged weights over ipc on one GPU: merged in memory that the worker has mapped, written straight to their places."""

from __future__ import annotations

import subprocess
import sys
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
from loraflow.transports.link import PRISTINE
from loraflow.transports.mapped import MappedGroup
from tests.conftest import ServerPark
from tests.gpu.test_direct_fold import ARGS, NOISE, base, off, redraw
from tests.helpers.tiny import peft_model
from tests.helpers.vllm_process import RunningServer, vllm_server

__all__ = ["base"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KILLED = """
import os, sys, torch
from loraflow.transports.mapped import MappedGroup
from tests.gpu.test_broadcast_ipc import opened, Policy, VLLMServer, peft_model, redraw, take_snapshot
server, model = VLLMServer(sys.argv[1]), peft_model(sys.argv[2], r=16, dtype=torch.bfloat16).cuda()
transport = opened(server, model)
honest, sent = MappedGroup.send, [0]
def send(self, *args):
    sent[0] += 1
    return os._exit(17) if sent[0] == 2 else honest(self, *args)
MappedGroup.send = send
redraw(model, 1)
transport.deliver(Policy("killed", 0), take_snapshot(model), [server])
"""


@pytest.fixture
def plain(server_park: ServerPark, base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    work = tmp_path_factory.mktemp("ipc")
    return server_park.get(
        "gpu_ipc",
        lambda: vllm_server(
            base,
            work,
            args=ARGS,
            env={"CUDA_VISIBLE_DEVICES": "0"},
            max_lora_rank=None,
            weight_transfer="ipc",
        ),
    )


def opened(server: VLLMServer, model: Any, **options: Any) -> BroadcastTransport:
    transport = BroadcastTransport(model, SyncConfig(carrier="ipc", bucket_bytes=1 << 19, **options), "ipc")
    transport.open([server])
    return transport


def test_each_version_is_written_proven_and_taken_back(plain: RunningServer, base: Path) -> None:
    server, model = VLLMServer(plain.url), peft_model(base, r=16, dtype=torch.bfloat16).to("cuda:0")
    start = PluginClient(server.request).base()["fingerprint"]
    transport = opened(server, model)
    for number in range(4):
        redraw(model, number)
        (outcome,) = transport.deliver(Policy("run", number), take_snapshot(model), [server]).servers.values()
        assert outcome.error is None
        assert outcome.proof is not None
        assert "start" not in outcome.phases_ms  # not by vLLM
        assert off(server, server.info.model, model) < NOISE
    transport.close([server])
    assert PluginClient(server.request).base()["fingerprint"] == start


def test_a_merge_that_fails_is_called_off_and_the_server_brought_back(
    plain: RunningServer, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, model = VLLMServer(plain.url), peft_model(base, r=16, dtype=torch.bfloat16).to("cuda:0")
    transport = opened(server, model, collective_timeout=60.0)
    redraw(model, 1)
    snapshot, honest, sent = take_snapshot(model), MappedGroup.send, [0]

    def send(self: MappedGroup, *args: Any) -> Any:
        sent[0] += 1
        if sent[0] == 2:
            raise MemoryError("no room for the next weight")
        return honest(self, *args)

    monkeypatch.setattr(MappedGroup, "send", send)
    began = time.monotonic()
    with pytest.raises(MemoryError):
        transport.deliver(Policy("run", 0), snapshot, [server])
    assert time.monotonic() - began < 30
    assert str(server.request("GET", "/weight_info")["weight_version"]) == PRISTINE
    (outcome,) = transport.deliver(Policy("run", 1), snapshot, [server]).servers.values()
    assert outcome.error is None
    assert outcome.proof is not None
    assert off(server, server.info.model, model) < NOISE
    transport.close([server])


def test_a_trainer_that_is_killed_between_buckets_leaves_a_usable_server(plain: RunningServer, base: Path) -> None:
    server = VLLMServer(plain.url)
    start = PluginClient(server.request).base()["fingerprint"]
    command = [sys.executable, "-c", KILLED, plain.url, str(base)]
    dead = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert dead.returncode == 17, dead.stderr[-2000:]
    model = peft_model(base, r=16, dtype=torch.bfloat16).to("cuda:0")
    began = time.monotonic()
    transport = opened(server, model)
    assert time.monotonic() - began < 30
    redraw(model, 3)
    (outcome,) = transport.deliver(Policy("next", 0), take_snapshot(model), [server]).servers.values()
    assert outcome.error is None
    assert off(server, server.info.model, model) < NOISE
    transport.close([server])
    assert PluginClient(server.request).base()["fingerprint"] == start

"""Direct over a broadcast, from a GPU: over NCCL to a server on another one, over gloo to a server on the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.layout import lora_shapes
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.transports.direct import DirectTransport
from loraflow.transports.group_way import GroupOptions
from tests.gpu.test_direct_fold import NOISE, base, off, redraw, slots, store_of
from tests.helpers.tiny import peft_model
from tests.helpers.vllm_process import RunningServer
from tests.server.test_direct_group import DYING_TRAINER

__all__ = ["base", "slots"]  # fixtures

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def trainer(folder: Path, device: str) -> Any:
    return peft_model(folder, r=16, dtype=torch.bfloat16).to(device)


@pytest.mark.parametrize(("device", "backend"), [("cuda:0", "gloo"), pytest.param("cuda:1", "nccl", marks=two_gpus)])
def test_broadcasts(slots: RunningServer, base: Path, device: str, backend: str) -> None:
    server, model = VLLMServer(slots.url), trainer(base, device)
    with store_of(slots) as store:
        transport = DirectTransport(store, AdapterSpec.from_model(model), device=device, way="broadcast")
        transport.open([server])
        assert [way.backend for way in transport._ways._groups.values()] == [backend]
        for version in range(6):
            redraw(model, version)
            policy = Policy(store.run_id, version)
            if version % 2:
                transport.wait_published()
                assert transport.announce(policy, [server], lambda _: None)
            outcome = transport.deliver(policy, take_snapshot(model), [server]).servers[server.url]
            assert outcome.error is None
            assert outcome.proof is not None
            assert outcome.proof.passed, outcome.proof.detail
            assert off(server, policy.name, model) < NOISE
        transport.close([server])


@two_gpus
def test_a_payload_that_does_not_come_is_aborted_and_the_next_joins_anew(slots: RunningServer, base: Path) -> None:
    server, model = VLLMServer(slots.url), trainer(base, "cuda:1")
    with store_of(slots) as store:
        spec, options = AdapterSpec.from_model(model), GroupOptions(timeout=5.0)
        transport = DirectTransport(store, spec, device="cuda:1", way="broadcast", groups=options)
        transport.open([server])
        (way,) = transport._ways._groups.values()
        client, snapshot = PluginClient(server.request), take_snapshot(model)
        source = {"kind": "broadcast", "group": way._name, "nbytes": transport._copy.nbytes}
        layout_id = client.layout(lora_shapes(spec)).layout_id
        began = time.monotonic()
        with pytest.raises(HTTPFailure, match="did not come"):
            client.direct(f"{store.run_id}-v9", path=store.path(), layout_id=layout_id, source=source)
        assert time.monotonic() - began < 20
        outcome = transport.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[server.url]
        assert outcome.error is None
        assert outcome.proof is not None
        assert outcome.proof.passed
        assert off(server, f"{store.run_id}-v0", model) < NOISE
        transport.close([server])


@two_gpus
def test_what_is_called_off_or_late_leaves_the_group_whole(slots: RunningServer, base: Path) -> None:
    server, model = VLLMServer(slots.url), trainer(base, "cuda:1")
    with store_of(slots) as store:
        transport = DirectTransport(store, AdapterSpec.from_model(model), device="cuda:1", way="broadcast")
        transport.open([server])
        (way,) = transport._ways._groups.values()
        group, snapshot = way._name, take_snapshot(model)
        assert transport.announce(Policy(store.run_id, 0), [server], lambda _: None)
        assert transport.withdraw(Policy(store.run_id, 0), [server]) == {}
        for version, seconds in ((1, 0.01), (2, 0.5)):
            policy = Policy(store.run_id, version)
            transport.wait_published()
            assert transport.announce(policy, [server], lambda _: None)
            time.sleep(seconds)
            outcome = transport.deliver(policy, snapshot, [server]).servers[server.url]
            assert outcome.error is None, outcome.error
            assert outcome.proof is not None
            assert outcome.proof.passed
            assert off(server, policy.name, model) < NOISE
        assert way._name == group
        transport.close([server])


@two_gpus
def test_a_trainer_that_is_killed_in_a_broadcast_is_soon_noticed(slots: RunningServer, base: Path) -> None:
    server, model = VLLMServer(slots.url), trainer(base, "cuda:1")
    layout = PluginClient(server.request).layout(lora_shapes(AdapterSpec.from_model(model)))
    with store_of(slots) as store:
        told = {
            "url": slots.url,
            "workers": 1,
            "nbytes": 2 * sum(rows * cols for rows, cols in layout.tensors.values()),
            "name": f"{store.run_id}-v0",
            "path": store.path(Policy(store.run_id, 0)),
            "layout_id": layout.layout_id,
            "device": "cuda:1",
            "timeout": 60.0,
        }
        command = [sys.executable, "-c", DYING_TRAINER, json.dumps(told)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert b"called\n" in iter(child.stdout.readline, b"")
            time.sleep(0.5)
            child.kill()
            began = time.monotonic()
            assert off(server, server.info.model, model) < 100  # it answers
            assert time.monotonic() - began < 15
        assert f"{store.run_id}-v0" not in {item.id for item in server.models()}

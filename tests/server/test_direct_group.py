"""The direct carrier over a broadcast group, on a real vLLM: one rank, two, two engines; trainers that die in it."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow import SyncManager
from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.errors import AdapterError, LoraflowError
from loraflow.layout import lora_shapes
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy, new_run_id
from loraflow.server import VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.direct import DirectTransport
from loraflow.transports.group_way import GroupOptions
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.server

DYING_TRAINER = """
import json, sys, time, torch
from functools import partial
from loraflow.plugin_client import begin_direct
from loraflow.server import VLLMServer
from loraflow.transports.group_way import GroupOptions, GroupWay

how = json.loads(sys.argv[1])
server = VLLMServer(how.pop("url"))
device, options = torch.device(how.pop("device", "cpu")), GroupOptions(timeout=how.pop("timeout", 9.0))
way = GroupWay(server, how.pop("workers"), device, options, 0)
way.join()
source = {"kind": "broadcast", "group": way._name, "nbytes": how.pop("nbytes"), **how.pop("announced", {})}
answer = begin_direct(server, how.pop("name"), source=source, **how)
print("called", flush=True)
time.sleep(600)  # and never sends
"""


def store_of(running: RunningServer) -> AdapterStore:
    return AdapterStore(str(running.adapter_root), new_run_id(), retain=2, grace_period=0.0)


def served(server: VLLMServer, name: str) -> torch.Tensor:
    return torch.tensor(server.prompt_logprobs(PROMPT, model=name, cache_salt=secrets.token_hex(4)))


@pytest.mark.parametrize("fixture", ["lora_server", "tp2_server", "dp2_server"])
def test_broadcasts_are_served_as_they_were_sent(
    fixture: str, request: pytest.FixtureRequest, tiny_model: Path
) -> None:
    running = request.getfixturevalue(fixture)
    server, model = VLLMServer(running.url), peft_model(tiny_model, r=8, lora_alpha=24, std=0.2)
    with store_of(running) as store:
        transport = DirectTransport(store, AdapterSpec.from_model(model), way="broadcast")
        transport.open([server])
        try:
            for version in range(6):  # more than there are slots, and than host copies
                randomize(model, seed=version, std=0.2)
                policy, announced = Policy(store.run_id, version), version % 2 == 1
                if announced:
                    transport.wait_published()
                    assert transport.announce(policy, [server], lambda _: None)
                snapshot = take_snapshot(model)
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
                assert (served(server, f"{store.run_id}-v{version}") - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
        finally:
            transport.close([server])


@pytest.mark.parametrize("fixture", ["lora_server", "tp2_server"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("announced", [{}, {"serial": 1}], ids=["begun", "announced"])
def test_a_trainer_that_dies_in_a_broadcast_leaves_a_server_that_goes_on(
    fixture: str,
    request: pytest.FixtureRequest,
    tiny_model: Path,
    how: signal.Signals,
    announced: dict[str, int],
) -> None:
    running = request.getfixturevalue(fixture)
    server, model = VLLMServer(running.url), peft_model(tiny_model, r=8, std=0.2)
    spec = AdapterSpec.from_model(model)
    layout = PluginClient(server.request).layout(lora_shapes(spec))
    with store_of(running) as store:
        policy = Policy(store.run_id, 0)
        told = {
            "url": running.url,
            "workers": layout.engines * len(layout.ranks),
            "nbytes": take_snapshot(model).nbytes,
            "name": policy.name,
            "path": store.path(policy),
            "layout_id": layout.layout_id,
            "announced": announced,
        }
        command = [sys.executable, "-c", DYING_TRAINER, json.dumps(told)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"called\n"
            time.sleep(0.02 if announced else 0.3)
            child.send_signal(how)
            began = time.monotonic()
            assert len(served(server, server.info.model)) == len(PROMPT) - 1  # waits as long as the engine does
            assert time.monotonic() - began < 14  # seconds: its timeout is 9
            assert policy.name not in {item.id for item in server.models()}
            transport = DirectTransport(store, spec, way="broadcast")
            transport.open([server])
            snapshot = take_snapshot(model)
            outcome = transport.deliver(Policy(store.run_id, 1), snapshot, [server]).servers[server.url]
            assert outcome.error is None, outcome.error
            assert outcome.proof is not None
            assert outcome.proof.passed
            transport.close([server])
            child.kill()


def test_a_manager_measures_and_says_why(
    lora_server: RunningServer, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = lora_server.url.replace("//127.0.0.1:", "//127.1:")  # an address of this host that does not look like one
    model = peft_model(tiny_model, r=8, std=0.2)
    options: dict[str, Any] = {"adapter_root": str(lora_server.adapter_root), "carrier": "direct"}
    with caplog.at_level("INFO", logger="loraflow"), SyncManager(model, url, **options) as manager:
        manager.start()
        for step in range(3):
            randomize(model, seed=step, std=0.2)
            record = manager.sync(step + 1)
            assert record is not None
            assert record.proven
    told = [r.message for r in caplog.records if "over gloo" in r.message and "over HTTP" in r.message]
    assert len(told) == 1, [r.message for r in caplog.records]


@pytest.mark.parametrize("fixture", ["lora_server", "tp2_server"])
def test_a_version_that_is_called_off_or_late_leaves_the_one_before(
    fixture: str, request: pytest.FixtureRequest, tiny_model: Path
) -> None:
    running = request.getfixturevalue(fixture)
    server, model = VLLMServer(running.url), peft_model(tiny_model, r=8, std=0.2)
    with store_of(running) as store:
        transport = DirectTransport(store, AdapterSpec.from_model(model), way="broadcast")
        transport.open([server])
        (way,) = transport._ways._groups.values()
        group, snapshot = way._name, take_snapshot(model)
        for version in range(6):
            policy = Policy(store.run_id, version)
            transport.wait_published()
            assert transport.announce(policy, [server], lambda _: None)
            time.sleep(0.4 if version % 3 == 1 else 0.01)
            if version % 3 == 2:
                began = time.monotonic()
                assert transport.withdraw(policy, [server]) == {}
                assert time.monotonic() - began < 0.2  # not when its workers give up
                assert policy.name not in {item.id for item in server.models()}
                assert (
                    served(server, f"{store.run_id}-v{version - 1}") - peft_logprobs(model, PROMPT)
                ).abs().max() < 1e-4
                continue
            outcome = transport.deliver(policy, snapshot, [server]).servers[server.url]
            assert outcome.error is None, outcome.error
            assert outcome.proof is not None
            assert outcome.proof.passed
        assert way._name == group  # neither ends it
        transport.close([server])


def test_syncs_are_announced_while_requests_run(lora_server: RunningServer, tiny_model: Path) -> None:
    """Values that are not finite are refused once the call has left, and the next sync works."""
    model = peft_model(tiny_model, r=8, std=0.2)
    options: dict[str, Any] = {
        "adapter_root": str(lora_server.adapter_root),
        "carrier": "direct",
        "direct_way": "broadcast",
    }
    stop, wrong, asked = threading.Event(), list[str](), list[int]()
    with SyncManager(model, lora_server.url, **options) as manager:
        manager.start()
        (server,) = manager.servers
        truth = {0: peft_logprobs(model, PROMPT)}

        def client() -> None:
            while not stop.is_set():
                try:
                    with manager.rollout() as held:
                        found = served(server, held.name)
                    if (found - truth[held.version]).abs().max() > 1e-4:
                        wrong.append(f"{held} answered by another version")
                except Exception as error:  # the test's verdict
                    wrong.append(repr(error))
                asked.append(1)

        clients = [threading.Thread(target=client) for _ in range(2)]
        for each in clients:
            each.start()
        try:
            for step in range(1, 21):
                randomize(model, seed=step, std=0.2)
                if step % 5 == 0:
                    before, (weight, *_) = (
                        manager.policy_name,
                        [p for n, p in model.named_parameters() if "lora_B" in n],
                    )
                    with torch.no_grad():
                        weight[0, 0] = float("nan")
                    with pytest.raises(AdapterError, match="not finite"):
                        manager.sync(step)
                    assert manager.policy_name == before
                    continue
                truth[manager._next_version] = peft_logprobs(model, PROMPT)
                record = manager.sync(step)
                assert record is not None
                assert record.proven
        finally:
            stop.set()
            for each in clients:
                each.join(60)
    assert not wrong, wrong[:3]
    assert len(asked) > 10


def test_a_server_that_is_killed_is_told_in_time(tp2_server: RunningServer, tiny_model: Path) -> None:
    server, model = VLLMServer(tp2_server.url), peft_model(tiny_model, r=8, std=0.2)
    with store_of(tp2_server) as store:
        options = GroupOptions(timeout=9.0)
        transport = DirectTransport(store, AdapterSpec.from_model(model), way="broadcast", groups=options)
        transport.open([server])
        tp2_server.process.stop()
        began = time.monotonic()
        outcome = transport.deliver(Policy(store.run_id, 0), take_snapshot(model), [server]).servers[server.url]
        assert isinstance(outcome.error, LoraflowError)
        assert server.url in str(outcome.error)
        transport.close([])
        assert time.monotonic() - began < 20

"""Merged broadcast, killed in the middle: trainers at every phase, then the server; nobody hangs, the next run works.

One server of each way to load, restarted once: vLLM's own, straight to where the weights are served, and the same from
memory that its worker has mapped (ipc).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import take_snapshot
from loraflow.config import SyncConfig
from loraflow.errors import LoraflowError
from loraflow.policy import Policy
from loraflow.server import VLLMServer
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.link import PRISTINE, Link
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.server

TIMEOUT = 10.0

DYING_TRAINER = """
import os, sys, time
from loraflow.adapter import take_snapshot
from loraflow.config import SyncConfig
from loraflow.policy import Policy
from loraflow.server import VLLMServer
from loraflow.transports import broadcast, groups, link, mapped
from tests.helpers.tiny import peft_model, randomize

url, folder, phase = sys.argv[1:]
server = VLLMServer(url)
carrier = server.info.weight_transfer
Group = mapped.MappedGroup if carrier == "ipc" else groups.GlooGroup

def die(*args, **options):
    os._exit(17)

if phase == "handshake":
    Group.join = die
elif phase == "first bucket":
    Group.send = die
elif phase == "second bucket":
    honest = Group.send
    sent = iter([False])
    Group.send = lambda *args: honest(*args) if not next(sent, True) else die()
elif phase == "finish":
    link.Link.finish = die
elif phase in {"pause", "start", "resume"}:
    targets = {"pause": ["/hold"], "start": ["/update_weights", "/receive"], "resume": ["/resume"]}[phase]
    ask = VLLMServer.request
    def request(self, method, path, **options):
        return die() if path.endswith(tuple(targets)) else ask(self, method, path, **options)
    VLLMServer.request = request
elif phase == "stall":
    honest = Group.send
    sent = iter([False])
    def stall(*args):
        if next(sent, True):
            print("stalled", flush=True)
            time.sleep(1000)
        return honest(*args)
    Group.send = stall

model = peft_model(folder, target_modules=["q_proj", "down_proj"])
config = SyncConfig(carrier=carrier, collective_timeout=10, bucket_bytes=1 << 17)
transport = broadcast.BroadcastTransport(model, config, carrier)
transport.open([server])
for version in range(2):
    randomize(model, seed=version)
    transport.deliver(Policy("dying", version), take_snapshot(model), [server])
"""


WAYS = {"lora_server": "loaded", "straight_server": "straight", "mapped_server": "mapped"}
PHASES = ["handshake", "pause", "start", "first bucket", "second bucket", "finish", "resume"]


def on(*ways: str) -> pytest.MarkDecorator:
    """Run on the servers that take what is sent in one of these ways."""
    servers = [server for server, way in WAYS.items() if way in ways]
    return pytest.mark.parametrize("running", servers, indirect=True, ids=ways)


straight_only, past_vllm = on("straight"), on("straight", "mapped")


@pytest.fixture(params=WAYS, ids=WAYS.values())
def running(request: pytest.FixtureRequest) -> RunningServer:
    found: RunningServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def answered() -> dict[str, Any]:
    """What each server answered before anything was sent to it, by its URL."""
    return {}


@pytest.fixture
def at_start(running: RunningServer, answered: dict[str, Any]) -> Any:
    if running.url not in answered:
        answered[running.url] = answer(VLLMServer(running.url))
    return answered[running.url]


def answer(server: VLLMServer) -> Any:
    (greedy,) = server.generate([PROMPT], model=server.info.model, max_tokens=8, temperature=0.0)
    return server.prompt_logprobs(PROMPT, model=server.info.model), greedy.token_ids, greedy.logprobs


def opened(server: VLLMServer, model: Any, **options: Any) -> BroadcastTransport:
    carrier: Any = server.info.weight_transfer
    config = SyncConfig(carrier=carrier, collective_timeout=TIMEOUT, **options)
    transport = BroadcastTransport(model, config, carrier)
    transport.open([server])
    return transport


def a_whole_run(server: VLLMServer, tiny_model: Path, at_start: Any) -> None:
    """What every next run must be able to do: find the base pristine, serve a version, leave the base pristine."""
    model = peft_model(tiny_model, seed=3, target_modules=["q_proj", "v_proj", "o_proj"])
    transport = opened(server, model)
    assert answer(server) == at_start
    (outcome,) = transport.deliver(Policy("next", 0), take_snapshot(model), [server]).servers.values()
    assert outcome.error is None
    served = torch.tensor(server.prompt_logprobs(PROMPT, model=server.info.model))
    torch.testing.assert_close(served, peft_logprobs(model, PROMPT), rtol=0, atol=1e-4)
    transport.close([server])
    assert answer(server) == at_start
    assert server.request("GET", "/weight_info")["weight_version"] == PRISTINE


def die_in(phase: str, running: RunningServer, tiny_model: Path) -> None:
    command = [sys.executable, "-c", DYING_TRAINER, running.url, str(tiny_model), phase]
    dead = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert dead.returncode == 17, dead.stderr[-2000:]


@past_vllm
@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_that_dies_leaves_a_usable_server(
    running: RunningServer, tiny_model: Path, at_start: Any, phase: str
) -> None:
    die_in(phase, running, tiny_model)
    a_whole_run(VLLMServer(running.url), tiny_model, at_start)


@on("loaded")
@pytest.mark.parametrize("phase", ["second bucket", "finish"])
def test_a_trainer_that_dies_while_vllm_loads_leaves_a_usable_server(
    running: RunningServer, tiny_model: Path, at_start: Any, phase: str
) -> None:
    die_in(phase, running, tiny_model)
    a_whole_run(VLLMServer(running.url), tiny_model, at_start)


@past_vllm
def test_a_trainer_that_stalls_holds_the_server_up_for_a_timeout_only(
    running: RunningServer, tiny_model: Path, at_start: Any
) -> None:
    """It lives, keeps its connections open, and sends nothing more: the workers give up, and another run takes over."""
    command = [sys.executable, "-c", DYING_TRAINER, running.url, str(tiny_model), "stall"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stalled:
        assert stalled.stdout is not None
        assert stalled.stdout.readline() == "stalled\n"
        begin = time.monotonic()
        try:
            a_whole_run(VLLMServer(running.url), tiny_model, at_start)
            assert time.monotonic() - begin < 3 * TIMEOUT
        finally:
            stalled.kill()


@pytest.fixture
def transport(running: RunningServer, tiny_model: Path) -> tuple[Any, BroadcastTransport, VLLMServer]:
    server = VLLMServer(running.url, request_timeout=5)
    model = peft_model(tiny_model)
    # Small buckets: some have left when something fails.
    return model, opened(server, model, bucket_bytes=1 << 17), server


@straight_only
def test_a_worker_that_cannot_join_ends_the_handshake(
    running: RunningServer, tiny_model: Path, at_start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that the workers cannot reach: the trainer's address is wrong."""
    from loraflow.transports import groups

    honest = groups.GlooGroup.handshake
    monkeypatch.setattr(groups.GlooGroup, "handshake", lambda self: {**honest(self), "port": 1})
    server = VLLMServer(running.url)
    config = SyncConfig(carrier="gloo", collective_timeout=3)
    begin = time.monotonic()
    with pytest.raises(LoraflowError, match="'connect'"):
        BroadcastTransport(peft_model(tiny_model), config, "gloo").open([server])
    assert time.monotonic() - begin < 15
    monkeypatch.undo()
    a_whole_run(server, tiny_model, at_start)


@past_vllm
def test_a_failed_merge_brings_the_server_back(
    transport: tuple[Any, BroadcastTransport, VLLMServer], at_start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, server = transport
    snapshot = take_snapshot(model)
    assert made._source is not None
    honest = made._source.merged

    def breaks(*args: Any, **options: Any) -> Iterator[Any]:
        stream = honest(*args, **options)
        for _ in range(5):
            yield next(stream)
        raise MemoryError("no room for the next weight")

    monkeypatch.setattr(made._source, "merged", breaks)
    with pytest.raises(MemoryError):
        made.deliver(Policy("run", 0), snapshot, [server])
    assert answer(server) == at_start
    monkeypatch.undo()
    made.deliver(Policy("run", 1), snapshot, [server])
    assert answer(server) != at_start
    made.close([server])
    assert answer(server) == at_start


@straight_only
def test_a_merge_that_goes_on_failing_is_tried_once_more_and_raised(
    transport: tuple[Any, BroadcastTransport, VLLMServer], at_start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, server = transport
    assert made._source is not None
    tried: list[str] = []

    def breaks(*args: Any, **options: Any) -> Iterator[Any]:
        tried.append("merge")
        raise MemoryError("no room for the next weight")
        yield

    monkeypatch.setattr(made._source, "merged", breaks)
    monkeypatch.setattr(made._source, "pristine", breaks)
    with pytest.raises(MemoryError):
        made.deliver(Policy("run", 0), take_snapshot(model), [server])
    assert tried == ["merge", "merge"]
    monkeypatch.undo()
    made.withdraw(Policy("run", 0), [server])
    assert answer(server) == at_start
    made.close([server])


@past_vllm
def test_an_interrupt_in_the_middle_of_a_bucket_waits_for_nothing(
    transport: tuple[Any, BroadcastTransport, VLLMServer], at_start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, server = transport
    honest = Link.wait
    waits = iter([True])

    def interrupted(self: Link, pending: Any) -> None:
        if next(waits, False):
            raise KeyboardInterrupt
        honest(self, pending)

    monkeypatch.setattr(Link, "wait", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        made.deliver(Policy("run", 0), take_snapshot(model), [server])
    made.close([server])
    assert time.monotonic() - begin < TIMEOUT
    assert answer(server) == at_start


def test_a_server_that_dies_is_named_with_the_phase(
    transport: tuple[Any, BroadcastTransport, VLLMServer],
    running: RunningServer,
    tiny_model: Path,
    at_start: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last test here: it kills the server in the middle of a broadcast, and starts it again."""
    model, made, server = transport
    honest = Link.send
    alive = iter([True])

    def send(self: Link, *args: Any) -> Any:
        if next(alive, False):
            os.killpg(running.process.pid, signal.SIGKILL)
        return honest(self, *args)

    monkeypatch.setattr(Link, "send", send)
    begin = time.monotonic()
    (outcome,) = made.deliver(Policy("run", 0), take_snapshot(model), [server]).servers.values()
    assert isinstance(outcome.error, LoraflowError)
    assert "'broadcast'" in str(outcome.error)
    assert time.monotonic() - begin < 3 * TIMEOUT
    monkeypatch.undo()

    running.process.stop()
    running.process.start()
    running.process.wait_ready(420)
    randomize(model, seed=5)
    (outcome,) = made.deliver(Policy("run", 1), take_snapshot(model), [server]).servers.values()
    assert outcome.error is None  # the same run goes on
    served = torch.tensor(server.prompt_logprobs(PROMPT, model=server.info.model))
    torch.testing.assert_close(served, peft_logprobs(model, PROMPT), rtol=0, atol=1e-4)
    made.close([server])
    a_whole_run(VLLMServer(running.url), tiny_model, at_start)

"""Merged broadcast over gloo, on real CPU servers: one server per parallel layout, LoRA enabled on each.

``straight``: its weights are plain, so that it writes what it receives to where it is served. ``mapped``: the same over
ipc, whose buckets lie in memory that its worker has mapped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import take_snapshot
from loraflow.adapter_files import adapter_files
from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError, LoraflowError
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.link import PRISTINE
from tests.helpers.tiny import PROMPT, load_base, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.server

LAYOUTS = {
    "lora_server": "tp1",
    "straight_server": "straight",
    "mapped_server": "mapped",
    "tp2_server": "tp2",
    "dp2_server": "dp2",
}
WRITES = {"straight", "mapped"}
SOME_SEEDS = (1, 2)


@dataclass
class Site:
    """A running server, its checkpoint, and what it answered before anything was sent to it."""

    server: VLLMServer
    running: RunningServer
    layout: str
    at_start: list[Any]

    def answers(self, model: str | None = None) -> list[Any]:
        """Prompt log-probs and a greedy continuation, from every data-parallel rank."""
        ranks = range(self.server.info.data_parallel or 1)
        return [answer(self.server, model or self.server.info.model, rank) for rank in ranks]

    def open(self, model: Any, **options: Any) -> BroadcastTransport:
        carrier = "ipc" if self.layout == "mapped" else "gloo"
        config = SyncConfig(carrier=carrier, **{"collective_timeout": 30.0, "bucket_bytes": 1 << 19, **options})
        transport = BroadcastTransport(model, config, carrier)
        transport.open([self.server])
        return transport

    def deliver(self, transport: BroadcastTransport, model: Any, version: int, run: str = "run") -> None:
        delivery = transport.deliver(Policy(run, version), take_snapshot(model), [self.server])
        (outcome,) = delivery.servers.values()
        if outcome.error is not None:
            raise outcome.error
        assert ("start" in outcome.phases_ms) == (outcome.proof is None)
        assert self.layout in WRITES or outcome.proof is None

    def assert_serves(self, model: Any) -> None:
        expected = peft_logprobs(model, PROMPT)
        for logprobs, _, _ in self.answers():
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)

    @property
    def version(self) -> str:
        return str(self.server.request("GET", "/weight_info")["weight_version"])


def answer(server: VLLMServer, model: str, rank: int) -> tuple[Any, ...]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0.0,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    found = server.request(
        "POST", "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=60
    )
    (choice,) = found["choices"]
    rows = zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)
    prompt = tuple(row[str(token)]["logprob"] for row, token in rows)
    return prompt, tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])


@pytest.fixture(scope="module")
def answered() -> dict[str, list[Any]]:
    """What each server answered before anything was sent to it, by its URL."""
    return {}


@pytest.fixture(params=LAYOUTS, ids=LAYOUTS.values())
def site(request: pytest.FixtureRequest, answered: dict[str, list[Any]]) -> Iterator[Site]:
    running: RunningServer = request.getfixturevalue(request.param)
    with VLLMServer(running.url) as server:
        here = Site(server, running, LAYOUTS[request.param], [])
        if running.url not in answered:
            answered[running.url] = here.answers()
        here.at_start = answered[running.url]
        yield here


@pytest.fixture
def build(site: Site) -> Iterator[Callable[..., tuple[Any, BroadcastTransport]]]:
    """Makes a PEFT model and an open transport; closes it, and checks that the server is as it was."""
    made: list[BroadcastTransport] = []

    def make(**lora: Any) -> tuple[Any, BroadcastTransport]:
        model = peft_model(site.running.model, **lora)
        made.append(site.open(model))
        return model, made[-1]

    yield make
    for transport in made:
        transport.close([site.server])
    assert site.version == PRISTINE
    assert site.answers() == site.at_start


def test_a_noop_is_bit_identical(site: Site, build: Callable[..., Any]) -> None:
    model, transport = build()
    randomize(model, std=0.0)
    site.deliver(transport, model, 0)
    assert site.version == "run-v0"
    assert site.answers() == site.at_start


FEATURES = {
    "all linear": {},
    "part of a fused layer": {"target_modules": ["q_proj", "up_proj"]},
    "dora": {"use_dora": True},
    "bias": {"bias": "all", "target_modules": ["k_proj"]},
    "whole modules": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_served_is_what_the_trainer_computes(site: Site, build: Callable[..., Any], feature: str) -> None:
    model, transport = build(**FEATURES[feature])
    for version, seed in enumerate(SOME_SEEDS):
        train(model, seed)
        site.deliver(transport, model, version)
        site.assert_serves(model)
        assert site.answers() != site.at_start
    transport.prove_untouched([site.server])


def train(model: Any, seed: int) -> None:
    randomize(model, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            elif "lora_magnitude" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


def test_withdraw_serves_the_version_before(site: Site, build: Callable[..., Any]) -> None:
    model, transport = build()
    first = None
    for version in range(2):
        randomize(model, seed=version)
        site.deliver(transport, model, version)
        first = first or site.answers()
    transport.withdraw(Policy("run", 1), [site.server])
    assert (site.version, site.answers()) == ("run-v0", first)


def test_withdraw_of_the_first_serves_the_base(site: Site, build: Callable[..., Any]) -> None:
    model, transport = build()
    site.deliver(transport, model, 0)
    transport.withdraw(Policy("run", 0), [site.server])
    assert (site.version, site.answers()) == (PRISTINE, site.at_start)


def test_a_server_left_merged_is_restored_for_the_next_run(site: Site, build: Callable[..., Any]) -> None:
    dead = site.open(peft_model(site.running.model, target_modules=["o_proj", "down_proj"]))
    site.deliver(dead, dead._model, 0, run="dead")
    dead._free()  # the trainer is gone; nothing was restored
    assert site.answers() != site.at_start
    build(target_modules=["q_proj"])
    assert (site.version, site.answers()) == (PRISTINE, site.at_start)


def test_requests_in_flight_survive(site: Site, build: Callable[..., Any]) -> None:
    model, transport = build()
    answers: list[Any] = []
    body = {"model": site.server.info.model, "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}

    def ask() -> None:
        answers.append(site.server.request("POST", "/v1/completions", json=body, timeout=120))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for version in range(3):
        randomize(model, seed=version)
        site.deliver(transport, model, version)
    for asker in askers:
        asker.join(120)
    assert [a["usage"]["completion_tokens"] for a in answers] == [200] * 4
    site.assert_serves(model)


def publish(model: Any, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, parts in adapter_files(take_snapshot(model)).items():
        (folder / name).write_bytes(b"".join(bytes(part) for part in parts))
    return folder


def test_adapters_and_merged_weights_alternate(site: Site, build: Callable[..., Any]) -> None:
    """50 alternations: each side serves its own update, never both, and the base is what it was in between."""
    rounds = 50 if site.layout == "tp1" else 3
    adapter = peft_model(site.running.model, seed=1)
    folder = publish(adapter, site.running.adapter_root / "run-a")
    with_adapter = peft_logprobs(adapter, PROMPT)
    model = peft_model(site.running.model, seed=2)
    for number in range(rounds):
        name = f"alternate-v{number}"
        site.server.load_adapter(name, str(folder))
        for logprobs, _, _ in site.answers(name):
            torch.testing.assert_close(torch.tensor(logprobs), with_adapter, rtol=0, atol=1e-4)
        # Without a GPU what is mapped is proven by digest alone.
        transport = site.open(model, verify="canary" if number and site.layout != "mapped" else "auto")
        site.deliver(transport, model, number)
        with pytest.raises(HTTPFailure, match="404"):
            site.answers(name)
        site.assert_serves(model)
        transport.close([site.server])
        assert site.answers() == site.at_start
    build()


def test_a_bad_announcement_is_told_at_once(
    site: Site, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails beside the broadcast: the reason comes up, not the timeout, and the server serves what it did."""
    import loraflow.transports.link as link

    model, transport = build(target_modules=["down_proj"])
    site.deliver(transport, model, 0)
    before = site.answers()
    honest, ask = link.update_info, PluginClient.weights_receive
    lies = iter([True])

    def receive(self: PluginClient, layout_id: str, names: list[str], *args: Any, **options: Any) -> Any:
        last = "model.layers.0.no_such.weight" if next(lies, False) else names[-1]
        return ask(self, layout_id, [*names[:-1], last], *args, **options)

    def announce(*args: Any, **options: Any) -> dict[str, Any]:
        body = honest(*args, **options)
        if next(lies, False):
            body["names"] = [*body["names"][:-1], "model.layers.0.no_such.weight"]
        return body

    monkeypatch.setattr(link, "update_info", announce)
    monkeypatch.setattr(PluginClient, "weights_receive", receive)
    randomize(model, seed=9)
    with pytest.raises(LoraflowError, match="no_such"):
        site.deliver(transport, model, 1)
    assert (site.version, site.answers()) == ("run-v0", before)
    site.deliver(transport, model, 2)
    site.assert_serves(model)


def test_a_broadcast_that_never_completes_ends(
    site: Site, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from loraflow.transports.groups import GlooGroup
    from loraflow.transports.mapped import MappedGroup

    carrier: Any = MappedGroup if site.layout == "mapped" else GlooGroup
    model, _ = build(target_modules=["o_proj"])

    class Never:
        def done(self) -> bool:
            return False

    transport = site.open(model, collective_timeout=7.0)  # joining may wait 5 s for a name server
    honest = carrier.send
    stuck = iter([True])
    monkeypatch.setattr(carrier, "send", lambda *a: Never() if next(stuck, False) else honest(*a))
    begin = time.monotonic()
    with pytest.raises(LoraflowError, match="'broadcast'"):
        site.deliver(transport, model, 0)
    assert time.monotonic() - begin < 20
    assert (site.version, site.answers()) == (PRISTINE, site.at_start)
    site.deliver(transport, model, 1)
    site.assert_serves(model)
    transport.close([site.server])


def test_other_backends_are_refused(site: Site) -> None:
    model = peft_model(site.running.model)
    with pytest.raises(CapabilityError, match="weight-transfer-config") as caught:
        BroadcastTransport(model, SyncConfig(carrier="nccl"), "nccl").open([site.server])
    assert (caught.value.expected, caught.value.found) == ("nccl", "ipc" if site.layout == "mapped" else "gloo")


def test_the_trainers_weights_are_untouched(site: Site, build: Callable[..., Any]) -> None:
    model, transport = build()
    site.deliver(transport, model, 0)
    pristine = load_base(site.running.model).state_dict()
    for name, parameter in model.get_base_model().named_parameters():
        plain = name.replace(".base_layer", "")
        if "lora_" not in name:
            assert torch.equal(parameter, pristine[plain]), name

"""Fold on a real vLLM: nothing, something, back to nothing; on one rank, two, and two engines."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSnapshot, AdapterSpec, take_snapshot
from loraflow.errors import AdapterError, CapabilityError, LoraflowError, VerifyError
from loraflow.manager import SyncManager
from loraflow.plan_features import fold_objection
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy, new_run_id
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports import fold as fold_module
from loraflow.transports.base import Delivered
from loraflow.transports.fold import FoldTransport
from loraflow.transports.fold_modules import base_weight_of
from tests.helpers.tiny import PROMPT, load_base, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer, vllm_server

pytestmark = pytest.mark.server


class Run:
    """A trainer with a PEFT model that folds into one server."""

    def __init__(self, running: RunningServer, folder: Path, **lora: Any) -> None:
        self.server = VLLMServer(running.url)
        self.client = PluginClient(self.server.request)
        self.model = peft_model(folder, **{"std": 0.1, "r": 8, "lora_alpha": 24, **lora})
        self.store = AdapterStore(str(running.adapter_root), new_run_id(), retain=2, grace_period=0.0)
        spec = AdapterSpec.from_model(self.model)
        self.transport = FoldTransport(self.store, spec, base_weight_of(self.model))
        self.version = -1

    def open(self) -> Run:
        self.transport.open([self.server])
        return self

    def fold(self, snapshot: AdapterSnapshot | None = None) -> Delivered:
        self.version += 1
        policy = Policy(self.store.run_id, self.version)
        if self.version % 2:  # the call leaves before the payload is there
            assert self.transport.announce(policy, [self.server], lambda _: None) is (self.transport._block is not None)
        delivery = self.transport.deliver(policy, snapshot or take_snapshot(self.model), [self.server])
        return delivery.servers[self.server.url]

    def redraw(self, seed: int) -> None:
        randomize(self.model, seed=seed, std=0.1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_magnitude" in name:
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
                elif parameter.requires_grad and "lora_" not in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def folded(self, seed: int) -> None:
        self.redraw(seed)
        outcome = self.fold()
        assert outcome.error is None, outcome.error
        assert outcome.proof is not None
        assert outcome.proof.passed

    def served(self) -> torch.Tensor:
        # No salt: a prefix of the old weights must be gone by itself.
        return torch.tensor(self.server.prompt_logprobs(PROMPT, model=self.server.info.model, cache_salt=None))

    def off(self) -> float:
        return float((self.served() - peft_logprobs(self.model, PROMPT)).abs().max())

    def close(self) -> None:
        try:
            self.transport.close([self.server])
        finally:
            self.store.close()


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(running: RunningServer, folder: Path, **lora: Any) -> Run:
        runs.append(Run(running, folder, **lora))
        return runs[-1]

    yield make
    for item in runs:
        item.close()


def check_life(trainer: Run, folder: Path, ranks: int, engines: int) -> None:
    client = trainer.client
    start, untouched = client.base(), trainer.served()
    assert (untouched - peft_logprobs(load_base(folder), PROMPT)).abs().max() < 1e-4
    trainer.open()
    layout = next(iter(trainer.transport._layouts.values()))
    assert (len(layout.ranks), layout.engines, layout.copy) == (ranks, engines, "device")

    randomize(trainer.model, seed=0)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert trainer.fold().error is None
    assert client.base()["fingerprint"] == start["fingerprint"]  # B = 0 changes no bit
    assert torch.equal(trainer.served(), untouched)

    for seed in (1, 2):
        trainer.folded(seed)
        for _ in range(2 * engines):
            assert trainer.off() < 1e-4
    assert client.status()["fold"]["policy"] == f"{trainer.store.run_id}-v{trainer.version}"
    changed = client.base()
    assert changed["fingerprint"] != start["fingerprint"]
    assert not changed["pristine"]
    assert changed["engines_agree"]

    trainer.transport.withdraw(Policy(trainer.store.run_id, trainer.version), [trainer.server])
    randomize(trainer.model, seed=1, std=0.1)
    assert trainer.off() < 1e-4

    client.reset(trainer.store.run_id)
    assert client.base()["fingerprint"] == start["fingerprint"]
    assert torch.equal(trainer.served(), untouched)
    status = client.status()
    assert status["fold"] is None
    assert not status["weights_touched"]


def test_one_rank(fold_server: RunningServer, run: Any, tiny_model: Path) -> None:
    check_life(run(fold_server, tiny_model), tiny_model, ranks=1, engines=1)


def test_two_ranks(fold_tp2_server: RunningServer, run: Any, tiny_model: Path) -> None:
    check_life(run(fold_tp2_server, tiny_model), tiny_model, ranks=2, engines=1)


def test_two_engines(fold_dp2_server: RunningServer, run: Any, tiny_model: Path) -> None:
    check_life(run(fold_dp2_server, tiny_model), tiny_model, ranks=1, engines=2)


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["k_proj"], "r": 1},
        {"target_modules": ["up_proj", "o_proj"], "r": 16, "use_rslora": True},
        {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"layers.2.mlp.down_proj": 7}},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "gate_proj"]},
        {"use_dora": True},
        {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
        {"bias": "all", "target_modules": ["q_proj", "o_proj"]},
        {"lora_bias": True, "target_modules": ["k_proj"]},
        {"modules_to_save": ["lm_head", "input_layernorm"], "target_modules": ["v_proj"]},
    ],
    ids=[
        "k_rank1",
        "some_rslora",
        "patterns",
        "lm_head",
        "embeddings",
        "dora",
        "dora_ends",
        "bias",
        "lora_bias",
        "modules_to_save",
    ],
)
def test_other_adapters_equal_pefts_forward(
    fold_server: RunningServer, run: Any, tiny_model: Path, lora: dict[str, Any]
) -> None:
    trainer = run(fold_server, tiny_model, **lora)
    start, untouched = trainer.client.base()["fingerprint"], trainer.served()
    trainer.open()
    for seed in (3, 4):
        trainer.folded(seed)
        assert trainer.off() < 1e-4
    assert (trainer.served() - untouched).abs().max() > 1e-3
    trainer.client.reset(trainer.store.run_id)
    assert trainer.client.base()["fingerprint"] == start
    assert torch.equal(trainer.served(), untouched)


def test_dora_needs_whole_rows_on_a_rank(fold_tp2_server: RunningServer, run: Any, tiny_model: Path) -> None:
    trainer = run(fold_tp2_server, tiny_model, use_dora=True, target_modules=["q_proj", "up_proj"]).open()
    trainer.folded(3)
    assert trainer.off() < 1e-4
    trainer.client.reset(trainer.store.run_id)
    other = run(fold_tp2_server, tiny_model, use_dora=True, target_modules=["down_proj"])
    with pytest.raises(CapabilityError, match="whole rows"):
        other.open()
    assert trainer.client.base()["pristine"]
    assert trainer.client.status()["fold"] is None
    # Nothing is lost by it: what the plan had chosen is ruled out with the server's reason, and the next best serves.
    with SyncManager(other.model, fold_tp2_server.url, adapter_root=str(fold_tp2_server.adapter_root)) as manager:
        plan = manager.start()
        assert (plan.transport, plan.carrier) == ("merged", "gloo")
        assert "whole rows" in next(item.reason for item in plan.ruled_out if item.carrier == "fold")
        assert other.off() < 1e-4


def test_200_folds_leave_no_trace(fold_server: RunningServer, run: Any, tiny_model: Path) -> None:
    trainer = run(fold_server, tiny_model)
    start = trainer.client.base()["fingerprint"]
    trainer.open()
    for seed in range(200):
        trainer.folded(seed)
        if seed % 50 == 49:
            assert trainer.off() < 1e-4
    trainer.client.reset(trainer.store.run_id)
    assert trainer.client.base()["fingerprint"] == start


def test_a_published_version_folds_like_a_payload(fold_server: RunningServer, run: Any, tiny_model: Path) -> None:
    trainer = run(fold_server, tiny_model).open()
    trainer.folded(4)
    payload = trainer.client.base()["fingerprint"]
    trainer.transport._block.close()
    trainer.transport._block = None  # as with a server on another host
    trainer.folded(4)
    assert trainer.client.base()["fingerprint"] == payload
    assert trainer.off() < 1e-4


def test_requests_in_flight_survive_a_fold(fold_server: RunningServer, run: Any, tiny_model: Path) -> None:
    trainer = run(fold_server, tiny_model).open()
    results: list[Any] = []

    def generate() -> None:
        results.append(
            trainer.server.generate(
                [PROMPT] * 4, model=trainer.server.info.model, max_tokens=200, temperature=1.0, ignore_eos=True
            )
        )

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for seed in range(10):
        trainer.folded(seed)
    for thread in threads:
        thread.join(300)
    assert sum(len(answer) for answer in results) == 12
    assert all(len(item.token_ids) == 200 for answer in results for item in answer)
    assert trainer.off() < 1e-4


def test_one_run_at_a_time(fold_server: RunningServer, run: Any, tiny_model: Path) -> None:
    first = run(fold_server, tiny_model).open()
    first.folded(5)
    second = run(fold_server, tiny_model)
    with pytest.raises(HTTPFailure, match="folds into this server") as caught:
        second.open()
    assert caught.value.status == 423
    with pytest.raises(HTTPFailure, match="folds into"):
        first.server.request("POST", "/update_weights", json={"update_info": {}})
    assert first.off() < 1e-4
    first.client.reset(first.store.run_id)
    second.open()
    second.folded(6)
    outcome = first.fold()
    assert "folds into this server" in str(outcome.error)
    assert second.off() < 1e-4


def test_a_layout_of_other_modules_starts_from_the_pristine_base(
    fold_server: RunningServer, run: Any, tiny_model: Path
) -> None:
    first = run(fold_server, tiny_model, target_modules=["q_proj"]).open()
    start = first.client.base()
    first.folded(1)
    wider = Run(fold_server, tiny_model, target_modules=["q_proj", "down_proj"])
    wider.store.close()
    wider.store = first.store
    wider.transport = FoldTransport(first.store, AdapterSpec.from_model(wider.model), base_weight_of(wider.model))
    wider.open()
    assert wider.client.base()["fingerprint"] == start["pristine_fingerprint"]
    wider.version = 10
    wider.folded(2)
    assert wider.off() < 1e-4
    wider.transport.close([wider.server])


def test_a_payload_that_changed_on_the_way_is_refused(fold_server: RunningServer, run: Any, tiny_model: Path) -> None:
    trainer = run(fold_server, tiny_model).open()
    trainer.folded(7)
    before = trainer.client.base()["fingerprint"]
    put = trainer.transport._block.put

    def damage(payload: torch.Tensor) -> None:
        put(payload)
        trainer.transport._block.view[1000] ^= 1

    trainer.transport._block.put = damage
    outcome = trainer.fold()
    assert "not the one that was sent" in str(outcome.error)
    assert trainer.client.base()["fingerprint"] == before
    assert trainer.client.status()["fold"]["policy"].endswith("-v0")


def test_another_base_is_refused(fold_server: RunningServer, run: Any, tiny_model: Path) -> None:
    trainer = run(fold_server, tiny_model)
    with torch.no_grad():
        weight = trainer.model.get_base_model().model.layers[2].mlp.up_proj.base_layer.weight
        weight.view(torch.int32)[17, 5] ^= 1
    with pytest.raises(VerifyError, match=r"layers\.2\.mlp\.up_proj"):
        trainer.open()


def test_weights_that_are_not_served_are_refused(fold_server: RunningServer) -> None:
    client = PluginClient(VLLMServer(fold_server.url).request)
    for weight in ("model.layers.9.mlp.up_proj.weight", "model.nothing.weight"):
        module = {"weight": weight, "a": "a", "b": "b", "scaling": 1.0}
        with pytest.raises(HTTPFailure) as caught:
            client.fold_layout("run" + secrets.token_hex(4), {"a": (2, 128), "b": (256, 2)}, [module])
        assert caught.value.status == 409
    module = {"weight": "model.layers.0.mlp.up_proj.weight", "a": "a", "b": "b", "scaling": 1.0}
    with pytest.raises(HTTPFailure, match="up_proj") as caught:
        client.fold_layout("run" + secrets.token_hex(4), {"a": (2, 64), "b": (256, 2)}, [module])
    assert caught.value.status == 409
    assert client.base()["pristine"]


def test_repacked_weights_are_refused(lora_server: RunningServer, tiny_model: Path) -> None:
    trainer = Run(lora_server, tiny_model)
    trainer.store.close()
    body = {"run_id": "r", "tensors": {"a": [2, 4]}, "modules": []}
    with pytest.raises(HTTPFailure, match="not plain") as caught:
        trainer.server.request("POST", "/loraflow/v1/fold/layout", json=body)
    assert caught.value.status == 409


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_fold_is_named_and_brought_back(
    run: Any, tiny_model: Path, tmp_path: Path
) -> None:
    with vllm_server(tiny_model, tmp_path, max_lora_rank=None) as running:
        trainer = run(running, tiny_model).open()
        trainer.folded(0)
        honest = fold_module.begin_fold

        def dying(server: VLLMServer, body: Any) -> Any:
            os.killpg(running.process.pid, signal.SIGKILL)
            return honest(server, body)

        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fold_module, "begin_fold", dying)
            outcome = trainer.fold()
        assert isinstance(outcome.error, LoraflowError)
        assert running.url in str(outcome.error)
        assert time.monotonic() - began < 30

        running.process.stop()
        running.process.start()
        running.process.wait_ready(420)
        policy, snapshot = Policy(trainer.store.run_id, trainer.version), take_snapshot(trainer.model)
        trainer.server.refresh()
        assert not trainer.transport.holds(policy, trainer.server)
        attached = trainer.transport.attach(policy, snapshot, trainer.server)
        assert attached.proof is not None
        assert attached.proof.passed
        assert trainer.transport.holds(policy, trainer.server)
        assert trainer.off() < 1e-4
        trainer.transport.close([trainer.server])  # while the server runs


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({"trainable_token_indices": {"embed_tokens": [3]}, "target_modules": ["q_proj"]}, "trainable_tokens"),
        ({"init_lora_weights": "pissa"}, "init_changes_base"),
    ],
)
def test_what_is_not_folded_is_said(tiny_model: Path, lora: dict[str, Any], word: str) -> None:
    spec = AdapterSpec.from_model(peft_model(tiny_model, **lora))
    assert word in str(fold_objection(spec))
    with pytest.raises(AdapterError, match="cannot be folded"):
        FoldTransport(None, spec, lambda module: None)  # type: ignore[arg-type]

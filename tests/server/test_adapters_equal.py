"""What a real vLLM serves equals the PEFT forward, for every kind of adapter that a LoRA slot takes.

Each adapter is delivered as a version of its own run, by the carrier under test, and compared on a fixed prompt; the
right value is computed by PEFT in this process, not taken from the server.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraflow.errors import LoraflowError
from loraflow.manager import SyncManager
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 4, "down_proj": 12}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 64, "up_proj": 2}},
    "both_patterns": {"rank_pattern": {"k_proj": 16}, "alpha_pattern": {"k_proj": 3}, "use_rslora": True},
    "r12": {"r": 12},
    "layers_to_transform": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 3]},
    **{name: {"target_modules": [name]} for name in PROJECTIONS},
}


def deliver_and_compare(server: RunningServer, lora: dict[str, Any], **options: Any) -> SyncManager:
    model = peft_model(server.model, **lora)
    with SyncManager(
        model, server.url, adapter_root=str(server.adapter_root), transport="adapter", **options
    ) as manager:
        manager.start()
        served = torch.tensor(manager.servers[0].prompt_logprobs(PROMPT, model=manager.policy_name))
        assert (served - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
        assert manager.records[-1].proven
    return manager


@pytest.mark.parametrize("kind", KINDS)
def test_filesystem_on_our_server(lora_server: RunningServer, kind: str) -> None:
    manager = deliver_and_compare(lora_server, KINDS[kind], carrier="filesystem")
    assert manager.plan.carrier == "filesystem"
    assert {proof.kind for proof in manager.records[0].proofs.values()} == {"digest"}


@pytest.mark.parametrize("kind", KINDS)
def test_direct(lora_server: RunningServer, kind: str) -> None:
    assert deliver_and_compare(lora_server, KINDS[kind]).plan.carrier == "direct"


@pytest.mark.parametrize("kind", ["plain", "both_patterns", "r12", "layers_to_transform"])
def test_filesystem_on_a_stock_server(plain_server: RunningServer, kind: str) -> None:
    manager = deliver_and_compare(plain_server, KINDS[kind])
    assert manager.plan.carrier == "filesystem"
    assert {proof.kind for proof in manager.records[0].proofs.values()} == {"canary"}


def test_syncs_to_a_stock_server_make_the_forward_while_it_loads(
    plain_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = peft_model(plain_server.model)
    root = str(plain_server.adapter_root)
    with SyncManager(model, plain_server.url, adapter_root=root, transport="adapter") as manager:
        manager.start()
        prover: Any = manager._prover
        for step in (1, 2):
            randomize(model, seed=step)
            record = manager.sync(step)
            assert record is not None
            assert record.proven
            assert {"forward", "forward_wait", "publish", "load", "verify"} <= set(record.phases_ms)
            served = torch.tensor(manager.servers[0].prompt_logprobs(PROMPT, model=manager.policy_name))
            assert (served - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
        name, old = manager.policy_name, prover.expect()
        randomize(model, seed=3)
        with monkeypatch.context() as patch, pytest.raises(LoraflowError, match="Δlogp"):
            patch.setattr(prover, "expect", lambda: old)  # of other weights than the snapshot's
            manager.sync(3)
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(prover, "expect", fail)
            manager.sync(4)
        manager._fleet.settle()  # type: ignore[union-attr]
        listed = {found.id for found in manager.servers[0].models()}
        assert manager.policy_name == name
        assert name in listed
        assert not {f"{manager.run_id}-v{record.version}" for record in manager.records[-2:]} & listed
        last = manager.sync(5)
        assert last is not None
        assert last.proven


def fail() -> None:
    raise torch.OutOfMemoryError("2 GiB")

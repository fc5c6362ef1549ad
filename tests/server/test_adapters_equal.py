"""What a real vLLM serves equals the PEFT forward, for every kind of adapter that a LoRA slot takes.

Each adapter is delivered as a version of its own run, by the carrier under test, and compared on a fixed prompt; the
right value is computed by PEFT in this process, not taken from the server.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraflow.manager import SyncManager
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model
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

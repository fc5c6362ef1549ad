"""A vision-language model on a real server: its adapter's names, pictures in prompts, adapters on its vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from loraflow.commands.push import push
from loraflow.config import SyncConfig
from loraflow.manager import SyncManager
from tests.helpers.tiny import PROMPT, peft_logprobs, randomize
from tests.helpers.tiny_vlm import BOTH, Asked, Said, picture, vlm_policy
from tests.helpers.vllm_process import RunningServer

ON_POLICY = 1e-4  # nats between the server's and the trainer's log-probs of one float32 policy
EFFECT = 0.05  # an adapter, or another picture, changes them by far more


@pytest.fixture(scope="module")
def processor(tiny_vlm: Path) -> Any:
    return AutoProcessor.from_pretrained(tiny_vlm)


@pytest.fixture(params=["direct", "filesystem"])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def policy(tiny_vlm: Path) -> Any:
    return vlm_policy(tiny_vlm)


@pytest.fixture
def manager(vlm_server: RunningServer, policy: Any, carrier: str) -> Iterator[SyncManager]:
    root = str(vlm_server.adapter_root)
    with SyncManager(policy, vlm_server.url, adapter_root=root, carrier=carrier) as manager:
        manager.start()
        yield manager


def say(manager: SyncManager, asked: Asked, processor: Any, **sampling: Any) -> Said:
    return asked.served(manager.servers[0], manager.policy_name, processor.image_token_id, **sampling)


def questions(processor: Any) -> list[Asked]:
    return [
        Asked.about(processor, "the cat", picture(0)),
        Asked.about(processor, "a dog", picture(1), picture(2)),
        Asked.about(processor, "a dog"),
    ]


def assert_served(manager: SyncManager, policy: Any, processor: Any) -> None:
    """Every question is answered by ``policy``, and not by its base."""
    for asked in questions(processor):
        said = say(manager, asked, processor)
        assert float((said.logprobs - asked.own(policy, said.token_ids)).abs().max()) < ON_POLICY
        with policy.disable_adapter():
            assert float((said.logprobs - asked.own(policy, said.token_ids)).abs().max()) > EFFECT


def test_what_is_served_is_the_policy_with_and_without_pictures(
    manager: SyncManager, policy: Any, processor: Any
) -> None:
    [record] = manager.records
    [proof] = record.proofs.values()
    assert (proof.kind, proof.passed) == ("digest", True)
    assert proof.mean_abs_dlogp is not None, "the canary at start saw it too"
    assert proof.mean_abs_dlogp < ON_POLICY
    served = torch.tensor(manager.servers[0].prompt_logprobs(PROMPT, model=manager.policy_name))
    assert float((served - peft_logprobs(policy, PROMPT)).abs().max()) < ON_POLICY
    assert_served(manager, policy, processor)

    asked, other = (Asked.about(processor, "the cat", picture(seed)) for seed in (0, 3))
    said = say(manager, asked, processor)
    assert float((other.own(policy, said.token_ids) - said.logprobs).abs().max()) > EFFECT, "the picture matters"


def test_no_op_perturb_restore(manager: SyncManager, policy: Any, processor: Any) -> None:
    values = {name: value.detach().clone() for name, value in policy.named_parameters() if "lora_" in name}

    def greedy() -> list[tuple[list[int], list[float]]]:
        said = [say(manager, asked, processor, temperature=0.0) for asked in questions(processor)]
        return [(one.token_ids, one.logprobs.tolist()) for one in said]

    before = greedy()
    manager.sync(1)
    assert greedy() == before
    randomize(policy, seed=9, std=0.1)
    manager.sync(2)
    assert all(now[1] != then[1] for now, then in zip(greedy(), before, strict=True))
    assert_served(manager, policy, processor)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if name in values:
                value.copy_(values[name])
    manager.sync(3)
    assert greedy() == before


def test_an_adapter_on_the_vision_tower_is_proven_where_the_server_reaches_it(
    vlm_server: RunningServer, tiny_vlm: Path, processor: Any, carrier: str
) -> None:
    policy = vlm_policy(tiny_vlm, std=0.1, target_modules=BOTH)
    tower = [parameter for name, parameter in policy.named_parameters() if "lora_B" in name and ".visual." in name]
    assert tower
    root = str(vlm_server.adapter_root)
    with SyncManager(policy, vlm_server.url, adapter_root=root, carrier=carrier) as manager:
        manager.start()
        assert_served(manager, policy, processor)
        asked = questions(processor)[0]
        first = say(manager, asked, processor)
        with torch.no_grad():
            for parameter in tower:
                parameter.mul_(-1)
        record = manager.sync(1)
        assert record is not None
        assert record.proven
        assert_served(manager, policy, processor)
        assert float((asked.own(policy, first.token_ids) - first.logprobs).abs().max()) > EFFECT


def test_push_brings_a_saved_adapter(vlm_server: RunningServer, tiny_vlm: Path, policy: Any, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path / "adapter")
    config = SyncConfig(adapter_root=str(vlm_server.adapter_root))
    result = push(tmp_path / "adapter", [vlm_server.url], config, base=str(tiny_vlm))
    assert result["verified"]
    assert result["transport"] == "adapter"

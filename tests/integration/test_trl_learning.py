"""Every trainer learns from what the servers give it, and only because its weights get there.

Rollouts come from the server alone, so their reward can rise only where the trained policy reached it. Each training is
held against the same one whose later syncs are suppressed: there the rollouts stay what they were.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from loraflow.integrations.trl import LoraSyncCallback
from loraflow.manager import SyncManager
from tests.helpers.trl import Witness, arguments, lora, low_tokens, prompts
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration

STEPS, HELD_STEPS = 10, 4
ON_POLICY = 1e-4  # nats between the server's and the trainer's log-probs of one float32 policy


def common(server: RunningServer, out: Path, **options: Any) -> dict[str, Any]:
    fixed = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "temperature": 1.0,
        "learning_rate": 3e-3,
    }
    return arguments(server, out, **{**fixed, **options})


def few_prompts() -> Dataset:
    """The same four prompts at every step, so that the reward of two steps can be compared."""
    return Dataset.from_dict({"prompt": list(prompts(4)["prompt"]) * 64})


def grpo(server: RunningServer, out: Path, callback: LoraSyncCallback) -> Any:
    return GRPOTrainer(
        model=str(server.model),
        reward_funcs=low_tokens,
        args=GRPOConfig(**common(server, out)),
        train_dataset=few_prompts(),
        peft_config=lora(),
        callbacks=[callback],
    )


def rloo(server: RunningServer, out: Path, callback: LoraSyncCallback) -> Any:
    return RLOOTrainer(
        model=str(server.model),
        reward_funcs=low_tokens,
        args=RLOOConfig(**common(server, out, beta=0.0)),
        train_dataset=few_prompts(),
        peft_config=lora(),
        callbacks=[callback],
    )


def online_dpo(server: RunningServer, out: Path, callback: LoraSyncCallback) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    options = common(server, out, max_new_tokens=12, per_device_train_batch_size=16)
    del options["num_generations"], options["max_completion_length"]
    return OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(server.model),
        reward_funcs=low_tokens,
        args=OnlineDPOConfig(**options),
        train_dataset=few_prompts(),
        processing_class=AutoTokenizer.from_pretrained(server.model, padding_side="left"),
        peft_config=lora(),
        callbacks=[callback],
    )


def distillation(server: RunningServer, out: Path, callback: LoraSyncCallback) -> Any:
    options = common(server, out)
    del options["num_generations"]
    return DistillationTrainer(
        model=str(server.model),
        teacher_model=teacher(server.model),
        args=DistillationConfig(**options),
        train_dataset=few_prompts(),
        peft_config=lora(),
        callbacks=[callback],
    )


def teacher(folder: Path) -> Any:
    """The tiny model, trained for a second to say low tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = model(input_ids=torch.randint(3, 384, (8, 16), generator=generator)).logits
        loss = -logits.log_softmax(-1)[..., 3:128].logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("make", [grpo, rloo, online_dpo, distillation])
def test_rollouts_get_better_because_the_policy_is_synced(
    lora_server: RunningServer, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[bool, list[float]] = {}
    for held in (False, True):
        if held:
            monkeypatch.setattr(SyncManager, "due", lambda self, step: False)
        callback = LoraSyncCallback(adapter_root=str(lora_server.adapter_root))
        trainer = make(lora_server, tmp_path, callback)
        trainer.args.max_steps = HELD_STEPS if held else STEPS
        if make is distillation:
            trainer.vllm_generation.logprobs = 0  # it asks for none; the witness wants them
        witness = Witness(trainer, callback)
        trainer.train()
        found[held] = [witness.share_of_low_tokens(batch) for batch in witness.rollouts]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert make is not distillation or held or mean(losses[-3:]) < 0.7 * losses[0]
        assert len(callback.records) == (1 if held else STEPS)
        assert max(witness.gaps()) < ON_POLICY, "every batch is of the policy that it is labelled with"
    rewards, held_rewards = found[False], found[True]
    # Rollouts are drawn anew in each run: the mean of a batch varies by 0.1.
    assert mean(rewards[-3:]) > rewards[0] + 0.2
    assert mean(rewards[-3:]) > mean(held_rewards) + 0.2
    assert mean(held_rewards) == pytest.approx(rewards[0], abs=0.2)

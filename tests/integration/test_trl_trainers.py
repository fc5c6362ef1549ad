"""TRL's other trainers on a real vLLM: RLOO corrected, and those without a ratio kept on the policy of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, RLOOConfig, RLOOTrainer

from loraflow.errors import ConfigError
from loraflow.integrations.trl import LoraSyncCallback, attach
from loraflow.integrations.trl_batch import VERSIONS
from loraflow.server import VLLMServer
from tests.helpers.tiny import peft_logprobs
from tests.helpers.trl import NotesBatches, arguments, lora, low_tokens, prompts
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration
ON_POLICY = 1e-4  # nats


class RLOO(NotesBatches, RLOOTrainer):  # type: ignore[misc]
    pass


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


@pytest.mark.parametrize("mode", ["sequence_truncate", "geometric_mask"])
def test_rloo_is_corrected_through_its_advantages(lora_server: RunningServer, tmp_path: Path, mode: str) -> None:
    callback = LoraSyncCallback(
        adapter_root=str(lora_server.adapter_root),
        vllm_sync_interval=2,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.01,
    )
    sampled: list[torch.Tensor] = []
    trainer = RLOO(
        model=str(lora_server.model),
        reward_funcs=low_tokens,
        args=RLOOConfig(**arguments(lora_server, tmp_path, beta=0.02, max_steps=2)),
        train_dataset=prompts(),
        peft_config=lora(),
        callbacks=[callback],
    )

    def note(rollouts: Any) -> None:
        rows = [torch.tensor(row) for row in rollouts.logprobs]
        sampled.append(torch.stack([row.sum() for row in rows]))

    up_to_date = callback.sync.up_to_date

    def noting() -> Any:
        manager = up_to_date()
        if note not in manager._rollout_hooks:
            manager.on_rollouts(note)
        return manager

    callback.sync.up_to_date = noting
    trainer.train()
    assert [record.step for record in callback.records] == [0]
    assert len(sampled) == 2
    for step, (raw, rollout) in enumerate(zip(trainer.raw, sampled, strict=True)):
        log_ratio = raw["old_logps"] - rollout
        assert (float(log_ratio.abs().max()) < ON_POLICY * 12) == (step == 0)
        if mode == "geometric_mask":
            ratio = (log_ratio / raw["completion_mask"].sum(1)).exp()
            expected = torch.where(ratio > 1.01, 0.0, ratio)
        else:
            expected = log_ratio.exp().clamp(max=1.01)
        seen = {tuple(batch["completion_ids"].flatten().tolist()): batch for batch in trainer.seen}
        order = [
            next(j for j, row in enumerate(raw["completion_ids"].tolist()) if row == ids)
            for ids in trainer.seen[step]["completion_ids"].tolist()
        ]
        assert len(seen) == 2
        torch.testing.assert_close(
            trainer.seen[step]["advantages"], (raw["advantages"] * expected)[order], rtol=1e-4, atol=1e-5
        )
        assert set(trainer.seen[step][VERSIONS].tolist()) == {callback.records[0].version}
    last = [entry for entry in trainer.state.log_history if "loraflow/correction/kl" in entry][-1]
    assert last["loraflow/correction/kl"] > 1e-6
    assert last["loraflow/lag_steps"] == 1


def test_a_correction_per_token_does_not_fit_rloo(lora_server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one ratio per sequence"):
        RLOOTrainer(
            model=str(lora_server.model),
            reward_funcs=low_tokens,
            args=RLOOConfig(**arguments(lora_server, tmp_path)),
            train_dataset=prompts(),
            peft_config=lora(),
            callbacks=[LoraSyncCallback(vllm_importance_sampling_mode="token_truncate")],
        )


@pytest.mark.parametrize("at_construction", [True, False])
def test_online_dpo(lora_server: RunningServer, tmp_path: Path, at_construction: bool) -> None:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    options = without(arguments(lora_server, tmp_path, max_new_tokens=8), "num_generations", "max_completion_length")
    options |= {"use_vllm": at_construction, "max_steps": 2}
    callback = LoraSyncCallback(adapter_root=str(lora_server.adapter_root))
    trainer = OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(lora_server.model),
        reward_funcs=low_tokens,
        args=OnlineDPOConfig(**options),
        train_dataset=prompts(),
        processing_class=AutoTokenizer.from_pretrained(lora_server.model, padding_side="left"),
        peft_config=lora(),
        callbacks=[callback] if at_construction else [],
    )
    sync = callback if at_construction else attach(trainer, adapter_root=str(lora_server.adapter_root))
    trainer.train()
    assert [record.step for record in sync.records] == [0, 1]
    assert all(record.proven for record in sync.records)
    assert trainer.vllm_client.answered == {record.policy: 16 for record in sync.records}
    logged = [entry for entry in trainer.state.log_history if "loraflow/rollout_version" in entry]
    assert [entry["loraflow/rollout_version"] for entry in logged] == [record.version for record in sync.records]


def test_distillation(lora_server: RunningServer, tmp_path: Path) -> None:
    options = without(arguments(lora_server, tmp_path, max_steps=2), "num_generations")
    callback = LoraSyncCallback(adapter_root=str(lora_server.adapter_root))
    trainer = DistillationTrainer(
        model=str(lora_server.model),
        teacher_model=str(lora_server.model),
        args=DistillationConfig(**options),
        train_dataset=prompts(),
        peft_config=lora(),
        callbacks=[callback],
    )
    trainer.train()
    assert [record.step for record in callback.records] == [0, 1]
    assert trainer.vllm_generation.vllm_client.answered == {record.policy: 8 for record in callback.records}
    assert any("loraflow/sync_ms" in entry for entry in trainer.state.log_history)


def test_a_teacher_on_the_generation_server_scores_with_the_policy(lora_server: RunningServer, tmp_path: Path) -> None:
    """SDFT scores with a second client on the same server, which by itself would ask for the base."""
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    options = arguments(
        lora_server,
        tmp_path,
        max_steps=2,
        teacher_model_kind="live",
        use_teacher_server=True,
        distillation_mode="sampled_token",
        distillation_alpha=1.0,
    )
    callback = LoraSyncCallback(adapter_root=str(lora_server.adapter_root))
    data = prompts().map(lambda row: {"privileged_context": f"{row['prompt']} mat"})
    trainer = SDFTTrainer(
        model=str(lora_server.model),
        args=SDFTConfig(**options),
        train_dataset=data,
        peft_config=lora(),
        callbacks=[callback],
    )
    asked: list[tuple[str, str]] = []
    score = trainer.teacher_client.get_sequence_logprobs

    def noting(*args: Any, **kwargs: Any) -> Any:
        tokens = list(range(20, 40))
        with VLLMServer(lora_server.url) as server:
            served = torch.tensor(server.prompt_logprobs(tokens, model=trainer.teacher_client.model))
        own = peft_logprobs(trainer.model, tokens)
        asked.append((trainer.teacher_client.model, callback.manager.policy_name))
        assert float((served - own).abs().max()) < ON_POLICY
        return score(*args, **kwargs)

    trainer.teacher_client.get_sequence_logprobs = noting
    trainer.train()
    assert {name for name, _ in asked} == {record.policy for record in callback.records}
    assert all(name == policy for name, policy in asked)
    assert len(callback.records) == 2


def test_trainers_without_a_correction_sync_at_every_step(lora_server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no correction for that") as refused:
        DistillationTrainer(
            model=str(lora_server.model),
            teacher_model=str(lora_server.model),
            args=DistillationConfig(**without(arguments(lora_server, tmp_path), "num_generations")),
            train_dataset=prompts(),
            peft_config=lora(),
            callbacks=[LoraSyncCallback(vllm_sync_interval=4)],
        )
    assert "vllm_sync_interval=1" in str(refused.value)

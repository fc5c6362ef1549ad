"""TRL's GRPOTrainer on a real vLLM: what is served is what was trained, and every sample weighs what it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from loraflow.errors import LoadError, LoraflowError, StaleError
from loraflow.integrations.trl import LoraSyncCallback, attach
from loraflow.integrations.trl_batch import VERSIONS
from tests.helpers.trl import NotesBatches, arguments, lora, low_tokens, names_served, prompts
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration

ON_POLICY = 1e-4  # nats between the server's and the trainer's log-probs of one float32 policy
OFF_POLICY = 1e-3  # a step at this learning rate moves log-probs by far more


class Trainer(NotesBatches, GRPOTrainer):  # type: ignore[misc]
    pass


@pytest.fixture
def build(lora_server: RunningServer, tmp_path: Path) -> Callable[..., Any]:
    def make(callbacks: list[Any], reward: Any = low_tokens, **options: Any) -> Any:
        extra = {name: options.pop(name) for name in ("rollout_func", "eval_dataset") if name in options}
        data = options.pop("train_dataset", prompts())
        return Trainer(
            model=str(lora_server.model),
            reward_funcs=reward,
            args=GRPOConfig(**arguments(lora_server, tmp_path / "out", **options)),
            train_dataset=data,
            peft_config=lora(),
            callbacks=callbacks,
            **extra,
        )

    return make


@pytest.fixture
def root(lora_server: RunningServer) -> str:
    return str(lora_server.adapter_root)


def gap(batch: dict[str, Any]) -> float:
    """Largest |Δlogp| between the trainer's policy and what the server sampled from, over the batch."""
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"]
    return float(difference.abs().max())


def test_every_second_step_is_synced_and_stale_samples_are_weighed(
    build: Callable[..., Any], root: str, lora_server: RunningServer
) -> None:
    callback = LoraSyncCallback(adapter_root=root, vllm_sync_interval=2)
    trainer = build([callback], max_steps=5)
    trainer.train()

    assert [record.step for record in callback.records] == [0, 2, 4]
    assert all(record.proven for record in callback.records)
    version_at = {record.step: record.version for record in callback.records}
    for batch in trainer.raw:
        fresh = batch["step"] in version_at
        assert (gap(batch) < ON_POLICY) == fresh
        assert fresh or gap(batch) > OFF_POLICY
    for batch in trainer.seen:
        assert batch[VERSIONS].tolist() == [version_at[batch["step"] // 2 * 2]] * 8
        difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"]
        ratio = difference.sum(-1, keepdim=True).exp()
        expected = torch.where(ratio > 3.0, 0.0, ratio)
        torch.testing.assert_close(batch["importance_sampling_ratio"], expected, rtol=1e-5, atol=1e-6)

    run = callback.records[0].policy.rsplit("-v", 1)[0]
    answered = {int(name.rsplit("-v", 1)[1]): count for name, count in callback.generation.vllm_client.answered.items()}
    assert answered == {version_at[0]: 16, version_at[2]: 16, version_at[4]: 8}
    assert {name.rsplit("-v", 1)[0] for name in callback.generation.vllm_client.answered} == {run}
    logged = [entry for entry in trainer.state.log_history if "loraflow/correction/kl" in entry]
    assert [entry["loraflow/lag_steps"] for entry in logged] == [0, 1, 0, 1, 0]
    assert logged[1]["loraflow/correction/kl"] > 100 * max(logged[0]["loraflow/correction/kl"], 1e-9)
    assert logged[0]["loraflow/correction/ess"] == pytest.approx(1.0, abs=1e-4)
    assert all(entry["loraflow/correction/masked_fraction"] <= 1 for entry in logged)
    assert logged[2]["loraflow/version"] == version_at[2]
    assert names_served(lora_server) == [str(lora_server.model)], "the servers were freed at the end"


def test_attach_with_accumulation_and_reused_batches_and_evaluation(build: Callable[..., Any], root: str) -> None:
    trainer = build(
        [],
        use_vllm=False,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=4,
        eval_dataset=prompts(2),
    )
    sync = attach(trainer, adapter_root=root, vllm_sync_interval=3)
    trainer.train()
    # A generation serves 4 optimizer steps (4 micro batches x 2 iterations / 2 of accumulation): at 0 and 4; evaluation
    # at 3 and 6 measures the weights of that moment, whatever the interval says.
    training = [batch for batch in trainer.raw if batch["training"]]
    assert [batch["step"] for batch in training] == [0, 4]
    assert [record.step for record in sync.records] == [0, 3, 6, 8], "Trainer evaluates at the end as well"
    assert gap(training[0]) < ON_POLICY
    assert gap(training[1]) > OFF_POLICY, "generated at step 4 by the policy of step 3"
    evaluated = [batch for batch in trainer.raw if not batch["training"]]
    assert {batch["step"] for batch in evaluated} == {3, 6, 8}
    assert max(gap(batch) for batch in evaluated) < ON_POLICY
    versions = {record.step: record.version for record in sync.records}
    used = [batch for batch in trainer.seen if batch["training"]]
    assert [batch["step"] for batch in used] == [step for step in range(8) for _ in range(2)]
    for batch in used:
        assert set(batch[VERSIONS].tolist()) == {versions[0 if batch["step"] < 4 else 3]}


def test_evaluation_alone_and_a_second_training(build: Callable[..., Any], root: str) -> None:
    callback = LoraSyncCallback(adapter_root=root)
    trainer = build([callback], max_steps=2, eval_dataset=prompts(2))
    before = trainer.evaluate()
    assert before["eval_loraflow/rollout_version"] == callback.records[0].version
    trainer.train()
    first = len(callback.records)
    trainer.evaluate()
    trainer.train()
    assert max(gap(batch) for batch in trainer.raw) < ON_POLICY
    runs = {record.policy.rsplit("-v", 1)[0] for record in callback.records}
    assert len(runs) == 2, "the run before the end of the first training, and the one after it"
    assert [record.step for record in callback.records][:first] == [0, 0, 1]


def test_resume_starts_from_the_policy_as_loaded(build: Callable[..., Any], root: str, tmp_path: Path) -> None:
    trainer = build([LoraSyncCallback(adapter_root=root)], max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    trained = {name: value.clone() for name, value in trainer.model.named_parameters() if "lora_" in name}

    callback = LoraSyncCallback(adapter_root=root, vllm_sync_interval=3)
    resumed = build([callback], max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert [record.step for record in callback.records] == [2]
    assert callback.records[0].version == 0
    assert resumed.raw[0]["step"] == 2
    assert gap(resumed.raw[0]) < ON_POLICY
    assert any(bool(value.abs().sum()) for name, value in trained.items() if "lora_B" in name)


def test_an_error_in_training_frees_the_servers_and_training_can_go_on(
    build: Callable[..., Any], root: str, lora_server: RunningServer
) -> None:
    failing = [True]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if failing and callback.records[-1].step == 1:
            failing.clear()
            raise ValueError("the reward service is down")
        return low_tokens(completion_ids)

    callback = LoraSyncCallback(adapter_root=root)
    trainer = build([callback], reward=reward, max_steps=2)
    with pytest.raises(ValueError, match="reward service"):
        trainer.train()
    assert names_served(lora_server) == [str(lora_server.model)]
    with pytest.raises(LoraflowError):
        callback.manager  # noqa: B018
    trainer.train()
    assert max(gap(batch) for batch in trainer.raw) < ON_POLICY


def test_a_failed_sync_keeps_the_last_policy_until_it_is_too_old(build: Callable[..., Any], root: str) -> None:
    callback = LoraSyncCallback(adapter_root=root, on_failure="keep_last", max_staleness=1)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        transport = callback.manager._fleet.transport
        step = trainer.state.global_step
        if step in {0, 2}:  # the delivery before step 1 fails once; from step 3 on, all do
            deliver = transport.deliver

            def broken(*args: Any, **kwargs: Any) -> Any:
                if step == 0:
                    transport.deliver = deliver
                raise LoadError("no room left")

            transport.deliver = broken
        return low_tokens(completion_ids)

    trainer = build([callback], reward=reward, max_steps=6)
    with pytest.raises(StaleError):
        trainer.train()
    outcomes = [(record.step, record.error is None) for record in callback.records]
    assert outcomes == [(0, True), (1, False), (2, True), (3, False), (4, False)]
    assert [batch["step"] for batch in trainer.raw] == [0, 1, 2, 3]
    served = {record.step: record.version for record in callback.records if record.error is None}
    for batch, version in zip(trainer.seen, [served[0], served[0], served[2], served[2]], strict=True):
        assert set(batch[VERSIONS].tolist()) == {version}
    logged = [entry for entry in trainer.state.log_history if "loraflow/staleness_max" in entry]
    assert [entry["loraflow/staleness_max"] for entry in logged] == [0, 1, 0, 1]
    assert [entry["loraflow/failures"] for entry in logged] == [0, 1, 0, 1]


def test_rollout_func_and_conversations_ask_the_policy(build: Callable[..., Any], root: str) -> None:
    """A user's rollout function that talks to the server by TRL's client, with a regular expression to keep to."""

    def rollout(conversations: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        ids = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=True)["input_ids"]
        answer = trainer.vllm_generation.vllm_client.generate(
            ids, max_tokens=6, structured_outputs_regex="(cat|dog)+", generation_kwargs={"seed": 7}
        )
        logprobs = [[top[0] for top in row] for row in answer["logprobs"]]
        return {"prompt_ids": ids, "completion_ids": answer["completion_ids"], "logprobs": logprobs}

    conversations = prompts(16).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    callback = LoraSyncCallback(adapter_root=root)
    trainer = build([callback], rollout_func=rollout, train_dataset=conversations, max_steps=2, max_completion_length=6)
    trainer.train()
    texts = trainer.processing_class.batch_decode(trainer.raw[0]["completion_ids"], skip_special_tokens=True)
    assert all(set(text) <= set("catdog") and text for text in texts)
    assert [record.step for record in callback.records] == [0, 1]
    answered = callback.generation.vllm_client.answered
    assert answered == {record.policy: 8 for record in callback.records}
    versions = {record.step: record.version for record in callback.records}
    for batch in trainer.seen:
        assert set(batch[VERSIONS].tolist()) == {versions[batch["step"]]}


def test_a_delivery_behind_the_step_is_labelled_by_what_answered(build: Callable[..., Any], root: str) -> None:
    callback = LoraSyncCallback(adapter_root=root, overlap=True)
    trainer = build([callback], max_steps=4)
    trainer.train()
    version_at = {record.step: record.version for record in callback.records}
    for batch in trainer.seen:
        assert set(batch[VERSIONS].tolist()) == {version_at[max(0, batch["step"] - 1)]}
        assert bool(batch["importance_sampling_ratio"].any()), "one version behind is not too old"
    answered = callback.generation.vllm_client.answered
    versions = {int(name.rsplit("-v", 1)[1]): count for name, count in answered.items()}
    assert versions == {version_at[0]: 16, version_at[1]: 8, version_at[2]: 8}
    assert [gap(batch) > OFF_POLICY for batch in trainer.raw] == [False, True, True, True]
    logged = [entry for entry in trainer.state.log_history if "loraflow/staleness_max" in entry]
    assert [entry["loraflow/staleness_max"] for entry in logged] == [0, 1, 1, 1]


def test_the_adaptive_interval_follows_the_measured_drift(build: Callable[..., Any], root: str) -> None:
    callback = LoraSyncCallback(
        adapter_root=root, vllm_sync_interval="adaptive", drift_budget=1e-3, max_sync_interval=5
    )
    trainer = build([callback], max_steps=5)
    trainer.train()
    # On-policy after each sync, so nothing is due at the next step; there the drift of one step passes the budget.
    assert [record.step for record in callback.records] == [0, 2, 4]
    kl = [entry["loraflow/correction/kl"] for entry in trainer.state.log_history if "loraflow/correction/kl" in entry]
    assert [value > 1e-3 for value in kl] == [False, True, False, True, False]

"""TRL's trainers with pictures on a real vLLM: the server's own preprocessing, rows with and without, several a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from loraflow.integrations.trl import LoraSyncCallback
from loraflow.integrations.trl_batch import VERSIONS
from tests.helpers.tiny_vlm import LANGUAGE, picture
from tests.helpers.trl import NotesBatches, arguments, lora, low_tokens
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration

ON_POLICY = 1e-4  # nats between the server's and the trainer's log-probs of one float32 policy


class GRPO(NotesBatches, GRPOTrainer):  # type: ignore[misc]
    pass


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def train(trainer_class: Any, config: Any, server: RunningServer, data: Dataset) -> tuple[Any, LoraSyncCallback]:
    callback = LoraSyncCallback(adapter_root=str(server.adapter_root))
    trainer = trainer_class(
        model=str(server.model),
        reward_funcs=low_tokens,
        args=config,
        train_dataset=data,
        peft_config=lora(target_modules=LANGUAGE),
        callbacks=[callback],
    )
    trainer.train()
    assert [record.step for record in callback.records] == list(range(config.max_steps))
    assert all(record.proven for record in callback.records)
    return trainer, callback


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def counted(batches: Sequence[dict[str, Any]], per_prompt: int) -> list[list[int]]:
    """Pictures of each prompt of each batch."""
    return [batch["num_images"][::per_prompt] if "num_images" in batch else [0] for batch in batches]


def test_grpo_with_none_one_and_two_pictures_a_row(vlm_server: RunningServer, tmp_path: Path) -> None:
    """Micro batches of one prompt each, so that some have no picture at all."""
    rows = [
        {"prompt": question(f"the cat {i}"), "images": [picture(i + j) for j in range(n)]}
        for i, n in enumerate([0, 1, 2] * 4)
    ]
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
        "shuffle_dataset": False,
    }
    config = GRPOConfig(**arguments(vlm_server, tmp_path, **options))
    trainer, callback = train(GRPO, config, vlm_server, Dataset.from_list(rows))
    assert counted(trainer.raw, 4) == [[0, 1, 2]] * 3
    for batch in trainer.raw:
        difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"]
        assert float(difference.abs().max()) < ON_POLICY
    versions = {record.step: record.version for record in callback.records}
    for batch in trainer.seen:
        assert set(batch[VERSIONS].tolist()) == {versions[batch["step"]]}
    assert callback.generation is not None
    assert callback.generation.vllm_client.answered == {record.policy: 12 for record in callback.records}
    alike = logged(trainer, "frac_reward_zero_std")  # prompts whose four rewards are equal teach nothing
    assert alike[0] < 1
    assert all(norm > 0 for norm, share in zip(logged(trainer, "grad_norm"), alike, strict=True) if share < 1)


def test_rloo_with_a_column_of_one_picture_that_may_be_empty(vlm_server: RunningServer, tmp_path: Path) -> None:
    """The first generation sees one prompt with a picture and one without, the second has no picture at all."""
    rows = [
        {"prompt": question(f"a dog {i}"), "image": image} for i, image in enumerate([picture(0), None, None, None])
    ]
    config = RLOOConfig(**arguments(vlm_server, tmp_path, max_steps=2, shuffle_dataset=False))
    trainer, callback = train(RLOOTrainer, config, vlm_server, Dataset.from_list(rows))
    assert all(gap < ON_POLICY for gap in logged(trainer, "loraflow/correction/logp_difference_max"))
    assert len(logged(trainer, "loraflow/correction/logp_difference_max")) == 2
    assert callback.generation is not None
    assert callback.generation.vllm_client.answered == {record.policy: 8 for record in callback.records}

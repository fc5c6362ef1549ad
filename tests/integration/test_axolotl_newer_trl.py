"""The plain trainer on the TRL that Axolotl may pin next: the one of the main environment. No Axolotl is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from loraflow.integrations.axolotl_config import resolve
from loraflow.integrations.axolotl_trainers import attach
from tests.helpers.axolotl_configs import GUIDE, merged, own, trl
from tests.helpers.tiny import load_base
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration


def long(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def test_plain_trainer_syncs_at_the_interval(lora_server: RunningServer, tmp_path: Path) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_vllm=False,  # as the plugin builds it
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=8,
        max_steps=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        beta=0.0,
        learning_rate=1e-3,
    )
    trainer = GRPOTrainer(
        load_base(lora_server.model),
        reward_funcs=[long],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["the cat", "a dog", "one bird", "two trees"]}),
        processing_class=AutoTokenizer.from_pretrained(lora_server.model),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    config = merged(
        GUIDE,
        trl(vllm_server_host=..., vllm_server_port=..., vllm_sync_interval=2),
        own(servers=[lora_server.url], adapter_root=str(lora_server.adapter_root)),
    )
    generation = attach(trainer, resolve(config), {"seed": 3})
    trainer.train()
    records = generation.sync.records
    assert [record.step for record in records] == [0, 2]
    assert all(record.proven for record in records)
    assert len({record.digest for record in records}) == 2
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert generation.sync.manager is None  # the servers are free

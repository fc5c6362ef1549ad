"""Real trainers of TRL, built with the callback, or attached, in every wrong way; no server is asked for anything."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer

from loraflow.errors import ConfigError, LoraflowError
from loraflow.integrations.trl import LoraSyncCallback, LoraVLLMGeneration, attach
from tests.helpers.trl import lora, low_tokens, prompts

Build = Callable[..., Any]


@pytest.fixture
def build(tiny_model: Path, tmp_path: Path) -> Build:
    def built(*callbacks: Any, **options: Any) -> Any:
        arguments: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "max_steps": 1,
            "use_vllm": bool(callbacks),
            "vllm_mode": "server",
            "vllm_server_base_url": "http://127.0.0.1:9",
            "vllm_importance_sampling_correction": False,  # with it, the constructor waits for the server
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            **options,
        }
        return GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=low_tokens,
            args=GRPOConfig(**arguments),
            train_dataset=prompts(4),
            peft_config=lora(),
            callbacks=list(callbacks),
        )

    return built


def test_once_is_enough(build: Build) -> None:
    callback = LoraSyncCallback()
    trainer = build(callback)
    assert type(trainer.vllm_generation) is LoraVLLMGeneration is type(callback.generation)
    with pytest.raises(ConfigError, match="attached to this trainer already"):
        attach(trainer)
    for pair in ((LoraSyncCallback(), LoraSyncCallback()), (callback, callback)):
        with pytest.raises(ConfigError, match="attached to this trainer already"):
            build(*pair)
    plain = build()
    attach(plain)
    with pytest.raises(ConfigError, match="attached to this trainer already"):
        attach(plain)


def test_a_callback_that_comes_too_late_does_not_train_with_stock_weights(build: Build) -> None:
    trainer = build()
    trainer.add_callback(LoraSyncCallback())
    with pytest.raises(ConfigError, match="was added to a trainer that exists already"):
        trainer.train()


def test_a_callback_used_again_follows_the_trainer_built_last(build: Build) -> None:
    callback = LoraSyncCallback()
    first, second = build(callback), build(callback)
    assert callback.sync is second._loraflow is not first._loraflow
    assert callback.generation is second.vllm_generation is not first.vllm_generation
    with pytest.raises(ConfigError, match="use_vllm=False"):
        build(callback, use_vllm=False)
    assert callback.sync is None, "nor does it speak for a trainer that it does not serve"
    with pytest.raises(LoraflowError, match="nothing was generated yet"):
        _ = callback.manager


def test_what_trainers_save_holds_nothing_of_ours(build: Build, tmp_path: Path) -> None:
    trainer = build(LoraSyncCallback(vllm_sync_interval=1))
    pickle.loads(pickle.dumps(trainer.args))
    copy.deepcopy(trainer.args)
    trainer.state.save_to_json(str(tmp_path / "state.json"))
    assert (
        TrainerState.load_from_json(str(tmp_path / "state.json")).stateful_callbacks == trainer.state.stateful_callbacks
    )
    copy.deepcopy(trainer.model)

"""Building our backend in the place of TRL's, whatever happens to constructors on the way."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from transformers import Trainer
from trl.generation import vllm_generation as trl_generation
from trl.generation.vllm_generation import VLLMGeneration

from loraflow.errors import LoraflowError
from loraflow.integrations import trl_construct
from loraflow.integrations.trl_construct import build_instead, trainer_being_built


@pytest.fixture
def module() -> Any:
    """A module like grpo_trainer.py: it names VLLMGeneration, and defines a trainer."""
    # Trainers of other tests whose constructors failed may be alive still, and waiting.
    trl_construct._builders.clear()
    trl_construct._put_back()
    made: Any = ModuleType("made_up_trainer")
    made.VLLMGeneration = VLLMGeneration

    class MadeUpTrainer(Trainer):  # type: ignore[misc]
        def __init__(self, *, fail: bool = False, hook: Any = None) -> None:
            self.accelerator = SimpleNamespace()
            self.state = SimpleNamespace()
            if hook is not None:
                hook(self)
            if fail:
                raise ValueError("bad arguments")
            self.vllm_generation = sys.modules["made_up_trainer"].VLLMGeneration(accelerator=self.accelerator)

    MadeUpTrainer.__module__ = "made_up_trainer"
    made.MadeUpTrainer = MadeUpTrainer
    sys.modules["made_up_trainer"] = made
    yield made
    del sys.modules["made_up_trainer"]
    assert trl_generation.VLLMGeneration is VLLMGeneration


def ours(trainer: Any) -> None:
    build_instead(trainer, lambda *_, **kwargs: ("ours", kwargs["accelerator"]))


def test_the_name_is_ours_once_and_then_trl_s_again(module: Any) -> None:
    trainer = module.MadeUpTrainer(hook=ours)
    assert trainer.vllm_generation == ("ours", trainer.accelerator)
    assert module.VLLMGeneration is VLLMGeneration


def test_a_constructor_that_fails_leaves_the_next_one_whole(module: Any) -> None:
    with pytest.raises(ValueError, match="bad arguments"):
        module.MadeUpTrainer(fail=True, hook=ours)
    gc.collect()
    trainer = module.MadeUpTrainer(hook=ours)
    assert trainer.vllm_generation == ("ours", trainer.accelerator)
    assert module.VLLMGeneration is VLLMGeneration


def test_another_trainer_built_in_between_gets_trl_s(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, **_: None)
    inner: list[Any] = []

    def hook(trainer: Any) -> None:
        ours(trainer)
        inner.append(module.MadeUpTrainer())

    trainer = module.MadeUpTrainer(hook=hook)
    assert type(inner[0].vllm_generation) is VLLMGeneration
    assert trainer.vllm_generation == ("ours", trainer.accelerator)


def test_two_at_a_time_get_one_each(module: Any) -> None:
    inner: list[Any] = []

    def hook(trainer: Any) -> None:
        ours(trainer)
        inner.append(module.MadeUpTrainer(hook=ours))

    trainer = module.MadeUpTrainer(hook=hook)
    assert inner[0].vllm_generation == ("ours", inner[0].accelerator)
    assert trainer.vllm_generation == ("ours", trainer.accelerator)
    assert module.VLLMGeneration is VLLMGeneration


def test_the_trainer_being_built_is_found_by_its_state(module: Any) -> None:
    found: list[Any] = []
    trainer = module.MadeUpTrainer(hook=lambda t: (ours(t), found.append(trainer_being_built(t.state))))
    assert found == [trainer]
    with pytest.raises(LoraflowError, match="exists already"):
        trainer_being_built(trainer.state)

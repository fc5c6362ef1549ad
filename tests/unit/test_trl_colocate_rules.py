"""What a colocated engine refuses before vLLM is started, and where its base comes from after a sleep."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError, ConfigError, VerifyError
from loraflow.sleep import SleepingEngine, base_parameters
from tests.helpers.tiny import load_base, peft_model

pytest.importorskip("trl")
pytest.importorskip("vllm")

from loraflow.integrations.trl import LoraSyncCallback, attach
from loraflow.integrations.trl_colocate import ColocateGeneration, _refuse


def sync(**options: Any) -> Any:
    return SimpleNamespace(config=SyncConfig(**options))


@pytest.mark.parametrize(
    ("options", "processes", "words"),
    [
        ({}, 2, "with 2 processes has an engine in each"),
        ({"overlap": True}, 1, "for one thread"),
        ({"transport": "merged"}, 1, "serves adapters only"),
        ({"vllm_lora_sync": False}, 1, "serves adapters only"),
        ({"carrier": "fold"}, 1, "serves adapters only"),
        ({"carrier": "direct", "direct_way": "broadcast"}, 1, "is for servers"),
        ({"adapter_root": "s3://bucket/adapters"}, 1, "from a folder"),
    ],
)
def test_what_an_engine_in_the_trainer_cannot_do(options: dict[str, Any], processes: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _refuse(sync(**options), processes)


def test_plain_options_are_fine() -> None:
    _refuse(sync(vllm_sync_interval=2, carrier="filesystem"), 1)


def test_an_engine_built_without_slots_is_not_taken_over() -> None:
    trainer = type("GRPOTrainer", (), {"vllm_generation": SimpleNamespace(mode="colocate")})()
    with pytest.raises(ConfigError, match="without LoRA slots") as refused:
        attach(trainer)
    assert "callbacks=[LoraSyncCallback()]" in str(refused.value)


def test_a_trainer_with_an_engine_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(use_vllm=True, vllm_mode="colocate")
    trainer = type("OnlineDPOTrainer", (), {"args": args})()
    monkeypatch.setattr("loraflow.integrations.trl.trainer_being_built", lambda _: trainer)
    with pytest.raises(ConfigError, match="OnlineDPOTrainer, use_vllm=True, vllm_mode='colocate'"):
        LoraSyncCallback().on_init_end(args, None)  # type: ignore[arg-type]


def test_the_base_has_the_names_and_values_of_the_checkpoint(tiny_model: Path) -> None:
    policy = torch.nn.Sequential()
    policy.add_module("module", peft_model(tiny_model, seed=3))
    found = dict(base_parameters(policy))
    expected = dict(load_base(tiny_model).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_quantised_base_cannot_be_given_back(tiny_model: Path) -> None:
    policy = peft_model(tiny_model)
    policy.get_base_model().is_quantized = True
    with pytest.raises(CapabilityError, match="sleep_level=1"):
        next(base_parameters(policy))


def test_an_engine_whose_base_was_lost_never_answers() -> None:
    base = {"layer": 1}

    class Engine:
        asked = 0

        def collective_rpc(self, _: str) -> list[dict[str, Any]]:
            return [{"ok": {"tensors": dict(base)}}]

        def sleep(self, level: int) -> None:
            base["layer"] += level

        def wake_up(self, tags: list[str]) -> None:
            assert "weights" in tags

        def generate(self) -> str:
            self.asked += 1
            return "an answer"

    stock, woken = Engine(), []
    engine = SleepingEngine(stock, 1, None, lambda: woken.append(True))
    assert engine.generate() == "an answer"
    engine.sleep()
    for _ in range(2):  # also when the error was caught, and the engine is asked again
        with pytest.raises(VerifyError, match="not what they were"):
            engine.generate()
    assert (stock.asked, woken) == (1, [])
    base["layer"] = 1
    assert engine.generate() == "an answer"
    assert (woken, engine.wakes) == ([True], 1)


def test_level_2_wants_to_know_where_the_base_comes_from() -> None:
    with pytest.raises(ConfigError, match="level 1"):
        SleepingEngine(object(), 2, None, lambda: None)


@pytest.mark.parametrize("images", [None, [["a"], [], ["b", "c"]], [[], [], []]])
def test_rows_without_images_beside_rows_with_some_reach_the_engine(images: Any) -> None:
    """An empty list is what `accept_rows_without_images` makes of a row that has none."""
    asked: list[dict[str, Any]] = []

    def generate(prompts: list[dict[str, Any]], **_: Any) -> list[Any]:
        asked.extend(prompts)
        done = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-0.5, rank=1)}])
        return [SimpleNamespace(prompt_token_ids=row["prompt_token_ids"], outputs=[done]) for row in prompts]

    generation: Any = object.__new__(ColocateGeneration)
    plain = dict.fromkeys(("structured_outputs_regex", "top_k", "min_p"))
    numbers = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_completion_length": 1, "logprobs": 0}
    mode = {"mode": "colocate", "enable_sleep_mode": False, "tensor_parallel_size": 1, "generation_kwargs": {}}
    generation.__dict__ |= {**plain, **numbers, **mode, "top_k": 0, "accelerator": None, "model": torch.nn.Identity()}
    generation.llm = SimpleNamespace(generate=generate)
    generation._up_to_date = lambda: SimpleNamespace(rollout=lambda: nullcontext("policy"))
    generation._note = lambda *_: None
    assert generation.generate([[1], [2], [3]], images, 1)[1] == [[7], [7], [7]]
    given = [row.get("multi_modal_data", {}).get("image") for row in asked]
    assert given == (["a", None, ["b", "c"]] if images and images[0] else [None, None, None])

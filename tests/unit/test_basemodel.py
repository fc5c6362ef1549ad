"""Shapes of base models, built without weights, against models that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from loraflow.basemodel import BaseShapes
from loraflow.errors import AdapterError
from tests.helpers.tiny import load_base, make_tiny_model, peft_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny_model(folder)
    return folder


def test_equals_the_loaded_model(base: Path) -> None:
    shapes = BaseShapes.from_folder(base)
    model = load_base(base)
    assert shapes.parameters == {n: tuple(p.shape) for n, p in model.named_parameters()}
    linear = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {n: s for n, s in shapes.modules.items() if shapes.kinds[n] == "linear"} == linear
    assert [n for n, k in shapes.kinds.items() if k == "embedding"] == ["model.embed_tokens"]
    assert shapes.modules["model.embed_tokens"] == model.model.embed_tokens.weight.shape[::-1]
    assert shapes.output_embedding == "lm_head"
    assert shapes.architecture == "Qwen2ForCausalLM"
    assert shapes.config["hidden_size"] == model.config.hidden_size


def test_a_live_model_gives_the_same(base: Path) -> None:
    model = torch.compile(peft_model(base, modules_to_save=["lm_head"], target_modules=["q_proj"]), backend="eager")
    live, saved = BaseShapes.from_model(model), BaseShapes.from_folder(base)
    assert (live.modules, live.kinds, live.parameters) == (saved.modules, saved.kinds, saved.parameters)
    assert (live.architecture, live.output_embedding) == (saved.architecture, saved.output_embedding)


def test_building_draws_no_random_numbers(base: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    BaseShapes.from_folder(base)
    assert torch.equal(torch.rand(4), expected)


def test_gpt2_keeps_its_weights_transposed() -> None:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16)
    shapes = BaseShapes.from_config(config, GPT2LMHeadModel)
    assert shapes.kinds["transformer.h.0.attn.c_attn"] == "conv1d"
    assert shapes.modules["transformer.h.0.attn.c_attn"] == (96, 32)
    assert shapes.parameters["transformer.h.0.attn.c_attn.weight"] == (32, 96)


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as caught:
        BaseShapes.from_folder(tmp_path)
    assert caught.value.problems[0].code == "missing_file"

"""Adapters on vision-language models: what reaches beyond the language model, and what serves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from loraflow.adapter import AdapterSpec
from loraflow.basemodel import BaseShapes, architecture_class
from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError
from loraflow.peft_config import beside_language_model
from loraflow.plan import make_plan
from loraflow.preflight import check_folder
from loraflow.server_info import LoraInfo, PluginInfo, ServerInfo
from tests.helpers.tiny_vlm import BOTH, LANGUAGE, tiny_vlm_config

PLUGIN = PluginInfo("1", True, frozenset({"adapters", "digest", "fold"}), (), {})
LORA = LoraInfo(16, 3, 5, None, "float32", runtime_loading=True)
SERVER = ServerInfo("http://a:1", "0.32.0", "m", "m", lora=LORA, lora_known=True, plugin=PLUGIN)


@pytest.fixture(scope="module")
def base() -> BaseShapes:
    return BaseShapes.from_config(tiny_vlm_config())


def adapter(targets: Any, folder: Path) -> Path:
    config = tiny_vlm_config()
    with torch.device("cpu"):
        model = architecture_class(config)._from_config(config)
    get_peft_model(model, LoraConfig(r=4, target_modules=targets)).save_pretrained(folder)
    return folder


def spec_of(folder: Path, base: BaseShapes) -> AdapterSpec:
    live = AdapterSpec.from_folder(folder)
    return AdapterSpec.build(live.config, live.shapes, base.config)


def test_an_adapter_on_the_language_model_is_served(tmp_path: Path, base: BaseShapes) -> None:
    folder = adapter(LANGUAGE, tmp_path)
    assert check_folder(folder, base).transport == "adapter"
    assert make_plan(spec_of(folder, base), [SERVER], SyncConfig()).carrier == "filesystem"


def test_names_that_hit_the_tower_too_are_told(tmp_path: Path, base: BaseShapes) -> None:
    folder = adapter(BOTH, tmp_path)
    checked = check_folder(folder, base)
    assert checked.transport == "merged"
    [problem] = checked.problems
    assert problem.code == "unsupported_feature"
    assert "6 modules lie outside of the language model (model.visual.blocks.0.attn.qkv, …)" in problem.message
    assert check_folder(folder, base, tower=True).transport == "adapter"


def test_the_plan_serves_a_tower_where_it_is_reached_and_proven(tmp_path: Path, base: BaseShapes) -> None:
    spec = spec_of(adapter(BOTH, tmp_path), base)
    reaching = replace(SERVER, lora=replace(LORA, tower=True))
    assert make_plan(spec, [reaching], SyncConfig()).transport == "adapter"
    plan = make_plan(spec, [SERVER], SyncConfig())
    assert (plan.transport, plan.carrier) == ("merged", "fold")
    assert any("--enable-tower-connector-lora" in item.reason for item in plan.ruled_out)
    for server, reason in (
        (replace(SERVER, plugin=None), "--enable-tower-connector-lora"),
        (replace(reaching, plugin=None), "only loraflow's server plugin can prove"),
        (replace(SERVER, plugin=None, lora=None, lora_known=False), "--enable-tower-connector-lora"),
    ):
        with pytest.raises(CapabilityError, match=reason):
            make_plan(spec, [reaching, server], SyncConfig(transport="adapter"))


def test_a_convolution_has_no_place_in_a_slot(tmp_path: Path, base: BaseShapes) -> None:
    folder = adapter(r".*patch_embed\.proj", tmp_path)
    checked = check_folder(folder, base, tower=True)
    assert checked.transport == "merged"
    assert any("convolutions" in problem.message for problem in checked.problems)
    with pytest.raises(CapabilityError, match="no convolutions"):
        make_plan(
            spec_of(folder, base), [replace(SERVER, lora=replace(LORA, tower=True))], SyncConfig(transport="adapter")
        )


def test_language_models_and_towers_are_told_apart_by_name() -> None:
    language = (
        "model.language_model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.mlp.up_proj",
        "model.text_model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
        "thinker.model.layers.3.mlp.up_proj",
        "lm_head",
    )
    towers = (
        "model.visual.blocks.0.attn.qkv",
        "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "model.multi_modal_projector.linear_1",
        "model.audio_tower.layers.0.fc1",
        "thinker.visual.blocks.0.attn.qkv",
        "model.connector.modality_projection.proj",
    )
    names = [f"base_model.model.{module}.lora_A.weight" for module in language + towers]
    assert beside_language_model(dict.fromkeys(names)) == sorted(towers)

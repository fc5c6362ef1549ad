"""Local models and adapters as what is measured, and scaling curves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from loraflow.bench.plot import plot_scale
from loraflow.bench.presets import Preset, load_trainer, make_model, preset_of, preset_of_folders
from loraflow.bench.report import environment
from loraflow.bench.scale import _fits, _settings_at, parse_scale
from loraflow.bench.scale_report import Point, ScaleReport
from loraflow.bench.scenarios import Sample, Timed
from loraflow.bench.session import Settings
from loraflow.bench.summary import Payload, summarise
from loraflow.errors import ConfigError
from tests.helpers.tiny import peft_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family, with heads that are wider than hidden / heads."""
    folder = tmp_path_factory.mktemp("models") / "my-llama"
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_local_model_is_measured_as_it_is(llama: Path, tmp_path: Path) -> None:
    preset = preset_of_folders(llama, None, rank=4, dtype="float32")
    assert (preset.name, preset.layers, preset.vocabulary, preset.rank, preset.tied) == ("my-llama", 3, 384, 4, True)
    assert make_model(preset, tmp_path / "elsewhere") == llama
    assert not (tmp_path / "elsewhere").exists()
    model = load_trainer(llama, preset, preset.rank, "cpu")
    payload = Payload.of_model(preset, model)
    # Per layer: q 64→128, k and v 64→64, o 128→64, gate and up 64→96, down 96→64.
    ends = [(64, 128), (64, 64), (64, 64), (128, 64), (64, 96), (64, 96), (96, 64)]
    assert payload.adapter_tensors == 3 * 7 * 2
    assert payload.adapter_parameters == 3 * 4 * sum(into + out for into, out in ends)
    assert payload.adapter_bytes == 4 * payload.adapter_parameters
    assert payload.folded_bytes == 4 * 3 * sum(into * out for into, out in ends)
    whole = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert payload.model_bytes == 4 * sum(parameter.numel() for parameter in whole.parameters())


def test_a_preset_s_sizes_are_those_of_its_model(tmp_path: Path) -> None:
    preset = preset_of("tiny")
    folder = make_model(preset, tmp_path)
    assert Payload.of_model(preset, load_trainer(folder, preset, 8, "cpu")) == Payload.of(preset, 8)


def test_an_adapter_brings_its_shape_and_its_base(tiny_model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    peft_model(tiny_model, r=3, target_modules=["v_proj", "down_proj"]).save_pretrained(adapter)
    preset = preset_of_folders(None, adapter, rank=None, dtype="float32")
    assert (preset.folder, preset.rank, preset.adapter) == (tiny_model, 3, adapter)
    model = load_trainer(tiny_model, preset, preset.rank, "cpu")
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names
    assert all("v_proj" in name or "down_proj" in name for name in names)
    assert Payload.of_model(preset, model).adapter_tensors == 2 * 2 * preset.layers


def test_what_is_missing_is_said(tiny_model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    peft_model(tiny_model).save_pretrained(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "some/model"}))
    with pytest.raises(ConfigError, match="some/model"):
        preset_of_folders(None, adapter, rank=None, dtype="float32")
    assert preset_of_folders(tiny_model, adapter, rank=None, dtype="float32").folder == tiny_model
    with pytest.raises(ConfigError, match="own rank"):
        preset_of_folders(tiny_model, adapter, rank=4, dtype="float32")
    with pytest.raises(ConfigError, match="no model folder"):
        preset_of_folders(tmp_path, None, rank=None, dtype="float32")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="sizes"):
        preset_of_folders(tmp_path, None, rank=None, dtype="float32")


@pytest.mark.parametrize(
    ("text", "axis", "values"),
    [
        ("rank=1, 4,16", "rank", [1, 4, 16]),
        ("layers=28", "layers", [28]),
        ("preset=0.5b,tiny", "preset", ["0.5b", "tiny"]),
    ],
)
def test_axes(text: str, axis: str, values: list[object]) -> None:
    assert parse_scale(text) == (axis, values)


@pytest.mark.parametrize("text", ["rank", "rank=", "rank=0", "rank=a", "width=3", "preset=9b", "layers=-1"])
def test_axes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_scale(text)


def test_settings_along_an_axis(tmp_path: Path) -> None:
    settings = Settings(preset_of("tiny"), 8, torch.device("cpu"), tmp_path)
    assert _settings_at(settings, "rank", [1, 100, 4]).server_rank == 128
    deep = _settings_at(settings, "layers", [28]).preset
    assert (deep.layers, deep.name) == (28, "tiny-28-layers")
    assert deep == replace(preset_of("tiny"), layers=28, name=deep.name)
    sized = _settings_at(settings, "preset", ["1.5b"])
    assert (sized.preset, sized.rank) == (preset_of("1.5b"), 32)


def point(rank: int, direct_ms: float, links: object) -> Point:
    payload = Payload.of(preset_of("tiny"), rank)
    found = [
        Sample(way, 0, False, Timed(ms + wobble, ms, payload.adapter_bytes, {}, proven=True))
        for way, ms in (("direct", direct_ms), ("stock-adapter", 50.0))
        for wobble in (-0.5, 0.0, 0.5)
    ]
    return Point(rank, payload, summarise(found, links, payload), tuple(found), ())  # type: ignore[arg-type]


def test_the_fit_and_the_plots(tmp_path: Path) -> None:
    from tests.unit.test_bench import CPU_LINKS

    size = Payload.of(preset_of("tiny"), 1).adapter_bytes / 1e6
    points = tuple(point(rank, 3.0 + 2.0 * rank * size, CPU_LINKS) for rank in (1, 8, 64))
    fits = _fits(points)
    assert fits["direct"] == pytest.approx((3.0, 2.0))
    assert fits["stock-adapter"] == pytest.approx((50.0, 0.0), abs=1e-6)
    assert _fits(points[:1]) == {}
    report = ScaleReport("rank", environment(), {}, points, fits)
    written = plot_scale(report, tmp_path / "scale-rank")
    assert [path.suffix for path in written] == [".png", ".svg"]
    assert all(path.stat().st_size > 1000 for path in written)


def test_a_shape_of_other_depth_is_drawn(tmp_path: Path) -> None:
    preset: Preset = replace(preset_of("tiny"), layers=2, name="tiny-2-layers")
    folder = make_model(preset, tmp_path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2

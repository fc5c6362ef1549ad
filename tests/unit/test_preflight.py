"""Preflight: sound adapters of every kind pass; each damage is refused by its code."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.adapter_files import CONFIG_FILE, TENSOR_FILE
from loraflow.basemodel import BaseShapes
from loraflow.errors import AdapterError
from loraflow.preflight import Preflight, check_folder, check_snapshot, check_spec, require_finite, transport_for
from tests.helpers.tiny import make_tiny_model, peft_model
from tests.unit.test_adapter import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
MERGED_ONLY = {"dora", "bias-all", "bias-lora", "lora-bias", "modules_to_save", "norm-saved", "tokens"}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def base(base_folder: Path) -> BaseShapes:
    return BaseShapes.from_folder(base_folder)


@pytest.fixture(scope="module")
def sound(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    peft_model(base_folder).save_pretrained(folder)
    return folder


class Damage:
    """A copy of the sound adapter to change."""

    def __init__(self, sound: Path, folder: Path) -> None:
        self.folder = folder / "adapter"
        shutil.copytree(sound, self.folder)
        self.tensors = load_file(self.folder / TENSOR_FILE)

    def config(self, **values: Any) -> None:
        file = self.folder / CONFIG_FILE
        config = {**json.loads(file.read_text()), **values}
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    def save(self) -> None:
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
        save_file(tensors, self.folder / TENSOR_FILE, metadata={"format": "pt"})

    def rename(self, change: Callable[[str], str]) -> None:
        self.tensors = {change(name): tensor for name, tensor in self.tensors.items()}
        self.save()

    def set(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        self.save()


@pytest.fixture
def damage(sound: Path, tmp_path: Path) -> Damage:
    return Damage(sound, tmp_path)


def codes(result: Preflight) -> set[str]:
    return {problem.code for problem in result.problems}


def refused(damage: Damage, base: BaseShapes, code: str, **options: Any) -> str:
    """Assert that nothing can serve it, for this reason alone; the message of the first problem with it."""
    result = check_folder(damage.folder, base, **options)
    assert not result.servable
    assert result.transport is None
    assert codes(result) - {"base_mismatch", "incomplete"} <= {code}, [str(p) for p in result.problems]
    return next(problem.message for problem in result.problems if problem.code == code)


# ---------------------------------------------------------------- sound adapters


@pytest.mark.parametrize("kind", KINDS)
def test_sound_adapters(kind: str, base_folder: Path, base: BaseShapes, tmp_path: Path) -> None:
    model = peft_model(base_folder, **KINDS[kind])
    model.save_pretrained(tmp_path)  # with the base embeddings where PEFT adds them
    result = check_folder(tmp_path, base, max_lora_rank=16)
    assert result.transport == ("merged" if kind in MERGED_ONLY else "adapter"), result.problems
    assert result.servable
    assert codes(result) == ({"unsupported_feature"} if kind in MERGED_ONLY else set())
    assert [p.code for p in check_snapshot(take_snapshot(model), base)] == [p.code for p in result.problems]


def test_json_form(damage: Damage, base: BaseShapes) -> None:
    assert check_folder(damage.folder, base).to_dict() == {"servable": True, "transport": "adapter", "problems": []}
    del damage.tensors[f"{Q0}.lora_B.weight"]
    damage.save()
    report = check_folder(damage.folder, base).to_dict()
    assert report["servable"] is False
    assert report["transport"] is None
    assert report["problems"][0]["code"] == "missing_pair"
    assert report["problems"][0]["tensor"] == f"{Q0}.lora_A.weight"


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.replace(".layers.0.", ".layers.0._orig_mod."),
        lambda n: n.replace("base_model.model.model.", "base_model.model._orig_mod.model."),
        lambda n: n.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."),
        lambda n: n.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
        lambda n: "module." + n,
        lambda n: n.replace(".lora_", ".base_layer.lora_"),
        lambda n: n.replace(".weight", ".default.weight"),
    ],
    ids=["compiled-layer", "compiled-model", "fsdp", "checkpoint", "ddp", "base_layer", "adapter-name"],
)
def test_segments_left_in_names(change: Callable[[str], str], damage: Damage, base: BaseShapes) -> None:
    names = set(damage.tensors)
    damage.rename(change)
    message = refused(damage, base, "unknown_module")
    assert message.rpartition(": ")[2] in names, "the message gives the name that would be right"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model."),
        ("model.layers", "model.blocks"),
        ("q_proj", "qkv_proj"),
    ],
)
def test_names_that_only_end_right(old: str, new: str, damage: Damage, base: BaseShapes) -> None:
    damage.rename(lambda name: name.replace(old, new))
    assert refused(damage, base, "unknown_module")


def test_a_layer_beyond_the_model(damage: Damage, base: BaseShapes) -> None:
    damage.set("base_model.model.model.layers.4.self_attn.q_proj.lora_A.weight", torch.randn(8, 128))
    damage.set("base_model.model.model.layers.4.self_attn.q_proj.lora_B.weight", torch.randn(128, 8))
    assert "4 layers" in refused(damage, base, "unknown_module")


def test_a_tensor_of_the_wrong_kind(damage: Damage, base: BaseShapes) -> None:
    damage.set("base_model.model.model.embed_tokens.lora_A.weight", torch.randn(8, 384))
    damage.set("base_model.model.model.embed_tokens.lora_B.weight", torch.randn(128, 8))
    assert "embedding" in refused(damage, base, "unknown_module")


def test_a_whole_weight_that_nothing_asks_for(damage: Damage, base: BaseShapes) -> None:
    damage.set("base_model.model.lm_head.weight", torch.randn(384, 128))
    refused(damage, base, "unknown_module")


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_half_a_pair(half: str, damage: Damage, base: BaseShapes) -> None:
    del damage.tensors[f"{Q0}.{half}.weight"]
    damage.save()
    refused(damage, base, "missing_pair")


# ---------------------------------------------------------------- shapes and ranks


@pytest.mark.parametrize(
    ("half", "shape"),
    [
        ("lora_A", (8, 64)),
        ("lora_B", (64, 8)),
        ("lora_A", (1024,)),
        ("lora_A", (128, 8)),
        ("lora_B", (8, 128)),
        ("lora_A", (8, 128, 1)),
        ("lora_A", ()),
    ],
)
def test_wrong_shapes(half: str, shape: tuple[int, ...], damage: Damage, base: BaseShapes) -> None:
    damage.set(f"{Q0}.{half}.weight", torch.randn(shape))
    assert "the base model needs" in refused(damage, base, "bad_shape")


@pytest.mark.parametrize("shape", [(0,), (8, 0), (0, 128)])
def test_empty_tensors(shape: tuple[int, ...], damage: Damage, base: BaseShapes) -> None:
    damage.set(f"{Q0}.lora_A.weight", torch.empty(shape))
    refused(damage, base, "empty_tensor")


def test_a_smaller_models_adapter(base: BaseShapes, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "small", hidden_size=64)
    peft_model(tmp_path / "small").save_pretrained(tmp_path / "adapter")
    result = check_folder(tmp_path / "adapter", base)
    assert codes(result) == {"base_mismatch", "bad_shape"}
    assert result.transport is None
    assert any("hidden_size 64 there, 128 here" in problem.message for problem in result.problems)
    (tmp_path / "small" / "config.json").unlink()
    assert codes(check_folder(tmp_path / "adapter", base)) == {"base_mismatch", "bad_shape"}


def test_a_deeper_base_of_the_same_widths(base: BaseShapes, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "other", layers=2)
    peft_model(tmp_path / "other", target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    assert codes(check_folder(tmp_path / "adapter", base)) == {"base_mismatch", "incomplete"}


def test_rank_in_file_is_not_the_configs(damage: Damage, base: BaseShapes) -> None:
    damage.config(r=16)
    assert "rank 8 in the file, 16 in" in refused(damage, base, "rank_mismatch")


def test_rank_patterns_are_resolved_as_peft_does(damage: Damage, base: BaseShapes) -> None:
    damage.config(rank_pattern={r"layers\.[0-1]\.self_attn\.(q|k)_proj": 4})
    result = check_folder(damage.folder, base)
    wrong = {problem.tensor for problem in result.problems if problem.code == "rank_mismatch"}
    assert wrong == {n for n in damage.tensors if re.search(r"layers\.[01]\.self_attn\.[qk]_proj\.", n)}
    for name in wrong:
        tensor = damage.tensors[name]
        damage.tensors[name] = tensor[:4] if ".lora_A." in name else tensor[:, :4]
    damage.save()
    assert check_folder(damage.folder, base).transport == "adapter"


@pytest.mark.parametrize("values", [{"rank_pattern": {"nothing": 200}}, {"r": 200, "rank_pattern": {".*": 8}}], ids=str)
def test_a_rank_that_the_configuration_names_counts(values: dict[str, Any], damage: Damage, base: BaseShapes) -> None:
    """vLLM compares r and every value of rank_pattern with its limit, whether a module has that rank or not."""
    damage.config(**values)
    result = check_folder(damage.folder, base, max_lora_rank=64)
    assert codes(result) == {"rank_too_large"}
    assert "--max-lora-rank 256" in result.problems[0].message
    assert check_folder(damage.folder, base, max_lora_rank=256).transport == "adapter"


def test_a_rank_above_what_any_server_can_be_given(base_folder: Path, base: BaseShapes, tmp_path: Path) -> None:
    peft_model(base_folder, target_modules=["q_proj"], r=520).save_pretrained(tmp_path)
    result = check_folder(tmp_path, base)
    assert (result.transport, codes(result)) == ("merged", {"rank_too_large"})


def test_a_rank_above_the_servers(damage: Damage, base: BaseShapes) -> None:
    result = check_folder(damage.folder, base, max_lora_rank=4)
    assert codes(result) == {"rank_too_large"}
    assert result.transport == "merged"
    assert "--max-lora-rank 8" in result.problems[0].message
    assert check_folder(damage.folder, base, max_lora_rank=8).transport == "adapter"


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(value: float, damage: Damage, base: BaseShapes, base_folder: Path) -> None:
    damage.tensors[f"{Q0}.lora_B.weight"][3, 2] = value
    damage.save()
    assert "1 of 1024" in refused(damage, base, "not_finite")
    model = peft_model(base_folder)
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight[3, 2] = value
    problems = check_snapshot(take_snapshot(model), base)
    assert [(p.code, p.tensor) for p in problems] == [("not_finite", f"{Q0}.lora_B.weight")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_snapshot_that_is_not_finite_goes_nowhere(dtype: torch.dtype, base_folder: Path) -> None:
    """A digest proves NaN as well as any other value."""
    model = peft_model(base_folder)
    require_finite(take_snapshot(model, dtype=dtype))
    weight = model.get_base_model().model.layers[3].mlp.up_proj.lora_A["default"].weight
    for value in (float("nan"), float("-inf"), 1e38):
        with torch.no_grad():
            weight[7, 120] = value
        snapshot = take_snapshot(model, dtype=dtype, step=4)
        if value == 1e38 and dtype is not torch.float16:
            require_finite(snapshot)
            continue
        with pytest.raises(AdapterError, match="at step 4") as caught:
            require_finite(snapshot)
        assert [(p.code, p.tensor.rpartition("layers.")[2]) for p in caught.value.problems if p.tensor] == [
            ("not_finite", "3.mlp.up_proj.lora_A.weight")
        ]


def test_values_beyond_float32(damage: Damage, base: BaseShapes) -> None:
    damage.set(f"{Q0}.lora_B.weight", torch.full((128, 8), 1e39, dtype=torch.float64))
    refused(damage, base, "not_finite")


def test_whole_numbers_are_no_weights(damage: Damage, base: BaseShapes) -> None:
    damage.set(f"{Q0}.lora_A.weight", torch.ones(8, 128, dtype=torch.int8))
    result = check_folder(damage.folder, base)
    assert codes(result) == {"unsupported_feature"}
    assert result.transport is None


# ---------------------------------------------------------------- completeness


def test_modules_that_are_not_there(damage: Damage, base: BaseShapes) -> None:
    damage.tensors = {name: t for name, t in damage.tensors.items() if ".layers.3." not in name}
    damage.save()
    result = check_folder(damage.folder, base)
    assert codes(result) == {"incomplete"}
    assert result.problems[0].message.startswith("7 targeted modules have no tensors")


def test_an_empty_file(damage: Damage, base: BaseShapes) -> None:
    damage.tensors = {}
    damage.save()
    assert codes(check_folder(damage.folder, base)) == {"incomplete"}


def test_modules_that_the_configuration_leaves_out(damage: Damage, base: BaseShapes) -> None:
    damage.config(target_modules=["q_proj"])
    assert "24 modules have tensors" in refused(damage, base, "bad_config")


def test_dora_without_magnitudes_and_the_reverse(base_folder: Path, base: BaseShapes, tmp_path: Path) -> None:
    peft_model(base_folder, use_dora=True).save_pretrained(tmp_path / "dora")
    reverse = Damage(tmp_path / "dora", tmp_path)
    reverse.config(use_dora=False)
    assert codes(check_folder(reverse.folder, base)) == {"bad_config"}
    reverse.config(use_dora=True)
    reverse.tensors = {n: t for n, t in reverse.tensors.items() if "magnitude" not in n}
    reverse.save()
    assert codes(check_folder(reverse.folder, base)) == {"incomplete", "unsupported_feature"}


@pytest.mark.parametrize(
    ("kind", "values", "lost", "code"),
    [
        ("lora-bias", {"lora_bias": False}, None, "bad_config"),
        ("lora-bias", {}, "layers.1.self_attn.q_proj.lora_B.bias", "incomplete"),
        ("bias-all", {}, "layers.1.self_attn.k_proj.base_layer.bias", "incomplete"),
        ("bias-lora", {}, "layers.1.self_attn.k_proj.base_layer.bias", "incomplete"),
        ("tokens", {}, "embed_tokens.token_adapter.trainable_tokens_delta", "incomplete"),
        ("tokens", {"trainable_token_indices": [3, 7, 9]}, None, "bad_shape"),
        ("tokens", {"trainable_token_indices": {"embed_tokens": [3]}}, None, "bad_shape"),
        ("tokens", {"trainable_token_indices": [3, 384]}, None, "bad_config"),
        ("tokens", {"trainable_token_indices": [3, 3]}, None, "bad_config"),
        ("tokens", {"trainable_token_indices": [-1, 3]}, None, "bad_config"),
    ],
)
def test_what_stands_beside_the_matrices_is_what_the_configuration_says(
    kind: str, values: dict[str, Any], lost: str | None, code: str, base_folder: Path, base: BaseShapes, tmp_path: Path
) -> None:
    """PEFT takes the base's own values for what is missing, and does not read the rest."""
    peft_model(base_folder, **KINDS[kind]).save_pretrained(tmp_path / "sound")
    changed = Damage(tmp_path / "sound", tmp_path)
    changed.config(**values)
    if lost is not None:
        del changed.tensors[f"base_model.model.model.{lost}"]
        changed.save()
    result = check_folder(changed.folder, base)
    assert codes(result) - {"unsupported_feature"} == {code}, result.problems
    assert result.transport is None


def test_a_bias_of_a_is_none_of_the_bases(base_folder: Path, base: BaseShapes, tmp_path: Path) -> None:
    peft_model(base_folder, bias="all").save_pretrained(tmp_path / "sound")
    changed = Damage(tmp_path / "sound", tmp_path)
    changed.set(f"{Q0}.lora_A.bias", torch.zeros(128))
    assert codes(check_folder(changed.folder, base)) == {"unknown_module", "unsupported_feature"}


# ---------------------------------------------------------------- parameters without a module of their own


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BaseShapes]:
    """An adapter on the stacked experts of a tiny Mixtral and on q_proj, and the base's shapes."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    config = MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    targets: dict[str, Any] = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    options = LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={r"experts\.down_proj": 2}, **targets)
    folder = tmp_path_factory.mktemp("experts")
    get_peft_model(MixtralForCausalLM(config), options).save_pretrained(folder)
    return folder, BaseShapes.from_config(config)


def test_adapters_on_stacked_parameters(experts: tuple[Path, BaseShapes]) -> None:
    folder, base = experts
    result = check_folder(folder, base, max_lora_rank=8)
    assert (result.transport, codes(result)) == ("merged", {"unsupported_feature"})


def test_stacked_parameters_that_are_not_the_configurations(experts: tuple[Path, BaseShapes], tmp_path: Path) -> None:
    """Each was taken for sound once, and PEFT would load the rest without it."""
    base = experts[1]
    stem = "base_model.model.model.layers.0.mlp.experts"

    def told(change: Callable[[Damage], None]) -> set[str]:
        shutil.rmtree(tmp_path / "adapter", ignore_errors=True)
        changed = Damage(experts[0], tmp_path)
        change(changed)
        result = check_folder(changed.folder, base)
        assert result.transport is None
        return codes(result) - {"unsupported_feature"}

    def without_down(changed: Damage) -> None:
        for half in "AB":
            del changed.tensors[f"{stem}.lora_{half}.weight"]
        changed.save()

    assert told(without_down) == {"incomplete"}
    assert told(lambda changed: changed.config(target_parameters=["experts.down_proj"])) == {"unknown_module"}
    assert told(lambda changed: changed.config(rank_pattern={})) == {"rank_mismatch"}
    assert told(lambda changed: changed.config(target_modules=[])) == {"bad_config"}
    assert told(lambda changed: changed.config(target_modules=["q_proj", "v_proj"])) == {"incomplete"}


def test_a_saved_module_that_is_not_there(base_folder: Path, base: BaseShapes, tmp_path: Path) -> None:
    peft_model(base_folder, target_modules=["q_proj"]).save_pretrained(tmp_path / "plain")
    lacking = Damage(tmp_path / "plain", tmp_path)
    lacking.config(modules_to_save=["lm_head"])
    result = check_folder(lacking.folder, base)
    assert "incomplete" in codes(result)
    assert result.transport is None


# ---------------------------------------------------------------- files and configuration


@pytest.mark.parametrize("name", [TENSOR_FILE, CONFIG_FILE])
def test_missing_files(name: str, damage: Damage, base: BaseShapes) -> None:
    (damage.folder / name).unlink()
    refused(damage, base, "missing_file")


def test_a_missing_folder(tmp_path: Path, base: BaseShapes) -> None:
    assert codes(check_folder(tmp_path / "nowhere", base)) == {"missing_file"}


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000, -1])
def test_truncated_files(keep: int, damage: Damage, base: BaseShapes) -> None:
    file = damage.folder / TENSOR_FILE
    file.write_bytes(file.read_bytes()[:keep])
    refused(damage, base, "truncated_file")


@pytest.mark.parametrize("keep", [0, 5])
def test_a_file_too_short_for_a_header_says_so(keep: int, damage: Damage, base: BaseShapes) -> None:
    file = damage.folder / TENSOR_FILE
    file.write_bytes(file.read_bytes()[:keep])
    assert refused(damage, base, "truncated_file").startswith(f"it has {keep} bytes")


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [([10**30, 0], 0), ([1] * 100, 4), ([1 << 20, 1 << 18], 1 << 40)],
    ids=["wide", "deep", "large"],
)
def test_sizes_that_are_not_the_bases_are_not_read(
    shape: list[int], nbytes: int, damage: Damage, base: BaseShapes
) -> None:
    """No tensor could be made of them, or none that fits into memory (the file is sparse)."""
    name = next(iter(damage.tensors))
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    with (damage.folder / TENSOR_FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    result = check_folder(damage.folder, base)
    assert result.transport is None
    assert codes(result) >= {"incomplete"}
    assert name in {problem.tensor for problem in result.problems}


@pytest.mark.parametrize(
    "values",
    [
        {"peft_type": "IA3"},
        {"peft_type": ...},
        {"r": ...},
        {"r": 0},
        {"r": -8},
        {"r": "8"},
        {"r": 8.5},
        {"r": True},
        {"lora_alpha": ...},
        {"lora_alpha": 0},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"target_modules": ...},
        {"target_modules": {"q_proj": 1}},
        {"target_modules": "(q_proj"},
        {"target_modules": [1]},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": {"(q_proj": 4}},
        {"alpha_pattern": {"q_proj": None}},
        {"bias": "some"},
        {"bias": ["none"]},
        {"use_dora": "yes"},
        {"use_rslora": 1},
        {"modules_to_save": "lm_head"},
        {"layers_to_transform": [-1]},
        {"base_model_name_or_path": 3},
        {"lora_alpha": 10**400},
        {"lora_alpha": float("inf")},
        {"alpha_pattern": {"q_proj": 10**400}},
        {"bias": None},
        {"trainable_token_indices": "7"},
        {"trainable_token_indices": {"embed_tokens": 7}},
        {"layers_pattern": "layers"},
    ],
    ids=lambda values: str(values)[:60],
)
def test_bad_configurations(values: dict[str, Any], damage: Damage, base: BaseShapes) -> None:
    damage.config(**values)
    message = refused(damage, base, "bad_config")
    assert next(iter(values)) in message


def test_configurations_that_peft_and_vllm_cannot_read(damage: Damage, base: BaseShapes) -> None:
    file = damage.folder / CONFIG_FILE
    text = file.read_text()
    for content in (
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        text.replace("{", '{"r": 4, ', 1).encode(),
        b'{"r": ' + b"9" * 5000 + b"}",
    ):
        file.write_bytes(content)
        assert codes(check_folder(damage.folder, base)) == {"bad_config"}


@pytest.mark.parametrize("name", [TENSOR_FILE, CONFIG_FILE])
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_files_that_are_none(kind: str, name: str, damage: Damage, base: BaseShapes) -> None:
    path = damage.folder / name
    path.unlink()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(name)}[kind]()
    refused(damage, base, "missing_file")


def test_a_folder_of_adapters_and_one_in_pieces(damage: Damage, base: BaseShapes) -> None:
    pieces = damage.folder / "adapter_model-00001-of-00002.safetensors"
    (damage.folder / TENSOR_FILE).rename(pieces)
    assert "in one file" in refused(damage, base, "missing_file")
    pieces.rename(damage.folder / TENSOR_FILE)
    result = check_folder(damage.folder.parent, base)
    assert all("there are adapters in adapter below it" in problem.message for problem in result.problems)


@pytest.mark.parametrize("content", ["{", "[]", '{"text_config": 3}'])
def test_another_bases_damaged_config_is_not_this_adapters(
    content: str, damage: Damage, base: BaseShapes, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    for name in (str(tmp_path), "x" * 5000, "a\0b"):
        damage.config(base_model_name_or_path=name)
        assert check_folder(damage.folder, base).transport == "adapter"
        AdapterSpec.from_folder(damage.folder)


def test_an_adapter_that_names_no_base_takes_none_from_the_current_folder(
    damage: Damage, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage.config(base_model_name_or_path=None)
    monkeypatch.chdir(base_folder)
    assert AdapterSpec.from_folder(damage.folder).base_config == {}


# ---------------------------------------------------------------- features


@pytest.mark.parametrize(
    ("values", "transport"),
    [
        ({"init_lora_weights": "pissa"}, None),
        ({"init_lora_weights": "pissa_niter_4"}, None),
        ({"init_lora_weights": "olora"}, None),
        ({"init_lora_weights": "gaussian"}, "adapter"),
        ({"init_lora_weights": False}, "adapter"),
        ({"alora_invocation_tokens": [1, 2]}, None),
        ({"layer_replication": [[0, 4], [2, 4]]}, None),
        ({"use_qalora": True}, None),
        ({"use_bdlora": {"nblocks": 2}}, None),
        ({"use_newlora": True}, None),
        ({"use_newlora": False, "unknown": True}, "adapter"),
    ],
    ids=str,
)
def test_features(values: dict[str, Any], transport: str | None, damage: Damage, base: BaseShapes) -> None:
    damage.config(**values)
    result = check_folder(damage.folder, base)
    assert result.transport == transport
    assert codes(result) == (set() if transport == "adapter" else {"unsupported_feature"})


def test_a_tied_head_trained_apart_cannot_be_merged(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    base = BaseShapes.from_folder(tmp_path)
    spec = AdapterSpec.from_model(peft_model(tmp_path, target_modules=["lm_head"]))
    assert transport_for(spec, check_spec(spec, base)) == "adapter"
    assert transport_for(spec, check_spec(spec, base, max_lora_rank=4)) is None


TIED: dict[str, tuple[dict[str, Any], str | None]] = {
    "both": ({"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, "adapter"),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, "adapter"),
    "head-saved": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, None),
    "both-saved": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "merged",
    ),
    "tokens": ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]}, "merged"),
}


@pytest.mark.parametrize("kind", TIED)
def test_tied_bases(kind: str, tmp_path: Path) -> None:
    """One tensor on the server is both: merged weights serve it only where PEFT trains both alike."""
    options, transport = TIED[kind]
    make_tiny_model(tmp_path / "base", tie_word_embeddings=True)
    model = peft_model(tmp_path / "base", **options)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    snapshot, theirs = take_snapshot(model), load_file(tmp_path / "adapter" / TENSOR_FILE)
    assert snapshot.tensors.keys() == theirs.keys()
    assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in theirs.items())
    result = check_folder(tmp_path / "adapter", BaseShapes.from_folder(tmp_path / "base"))
    assert result.transport == transport, result.problems
    assert codes(result) == (set() if transport == "adapter" else {"unsupported_feature"})


# ---------------------------------------------------------------- vision-language models


@pytest.fixture(scope="module")
def vlm() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"intermediate_size": 96, "vocab_size": 200, "max_position_embeddings": 64}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def test_vision_language_names(vlm: Any) -> None:
    base = BaseShapes.from_config(vlm.config, type(vlm))
    pattern = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = get_peft_model(vlm, LoraConfig(r=4, target_modules=pattern))
    snapshot = take_snapshot(model)
    assert all(".model.language_model.layers." in name for name in snapshot.tensors)
    assert check_snapshot(snapshot, base) == []
    assert BaseShapes.from_model(model).modules == base.modules

    text_only = {n.replace("model.language_model.", "model."): s for n, s in snapshot.spec.shapes.items()}
    spec = AdapterSpec.build(snapshot.spec.config, text_only, base.config)
    problems = check_spec(spec, base)
    assert {p.code for p in problems} == {"unknown_module", "incomplete"}
    assert "alike: model.language_model.layers.0.self_attn.q_proj" in " ".join(p.message for p in problems)

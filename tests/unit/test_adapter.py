"""Snapshots against PEFT's own `save_pretrained`: names, values, configuration, and the logits that come back."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, LoraGAConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, Qwen3MoeConfig

from loraflow.adapter import AdapterSpec, read_adapter, take_snapshot, write_adapter
from loraflow.errors import AdapterError
from loraflow.peft_config import is_tied
from tests.helpers.tiny import PROMPT, load_base, make_tiny_model, peft_model

if TYPE_CHECKING:
    from pathlib import Path

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 4, r"layers\.0\.mlp\.up_proj": 2}, "alpha_pattern": {"k_proj": 3}},
    "r12": {"r": 12},
    **{name: {"target_modules": [name]} for name in PROJECTIONS},
    "layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 3]},
    "regex": {"target_modules": r".*\.layers\.[02]\..*\.(q|down)_proj"},
    "excluded": {"exclude_modules": ["o_proj"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"use_dora": True},
    "bias-all": {"bias": "all"},
    "bias-lora": {"bias": "lora_only"},
    "lora-bias": {"lora_bias": True, "target_modules": ["q_proj"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "norm-saved": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny_model(folder)
    return folder


def train_everything(model: nn.Module) -> None:
    """Move every trainable parameter, as an optimizer would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_peft_saves(kind: str, base: Path, tmp_path: Path) -> None:
    model = peft_model(base, **KINDS[kind])
    train_everything(model)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    snapshot = take_snapshot(model, step=3)
    (tmp_path / "ours").mkdir()
    write_adapter(snapshot, tmp_path / "ours")

    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name

    their_config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    our_config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    for config in (their_config, our_config):
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
    assert our_config == their_config

    loaded = PeftModel.from_pretrained(load_base(base), tmp_path / "ours").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert snapshot.step == 3


@pytest.mark.parametrize("kind", KINDS)
def test_read_back(kind: str, base: Path, tmp_path: Path) -> None:
    snapshot = take_snapshot(peft_model(base, **KINDS[kind]))
    write_adapter(snapshot, tmp_path, fsync=False)
    back = read_adapter(tmp_path)
    assert back.digest == snapshot.digest
    assert back.spec.shapes == snapshot.spec.shapes
    assert back.spec.features == snapshot.spec.features
    assert back.spec.max_rank == snapshot.spec.max_rank
    assert torch.equal(back.flat, snapshot.flat)


def test_layout_of_the_flat_buffer(base: Path) -> None:
    snapshot = take_snapshot(peft_model(base, use_dora=True))
    assert list(snapshot.tensors) == sorted(snapshot.tensors)
    assert torch.equal(torch.cat([t.reshape(-1) for t in snapshot.tensors.values()]), snapshot.flat)
    assert all(t.untyped_storage().data_ptr() == snapshot.flat.data_ptr() for t in snapshot.tensors.values())
    assert snapshot.nbytes == snapshot.flat.numel() * 4


def test_features(base: Path) -> None:
    def features(**options: Any) -> frozenset[str]:
        return AdapterSpec.from_model(peft_model(base, **options)).features

    assert features() == frozenset()
    assert features(use_rslora=True) == {"rslora"}
    assert features(rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 1}) == {"rank_pattern", "alpha_pattern"}
    assert features(**KINDS["embeddings"]) == {"lora_embedding"}
    assert features(**KINDS["lm_head"]) == {"lm_head"}
    assert features(**KINDS["dora"]) == {"dora"}
    assert features(**KINDS["bias-lora"]) == {"bias"}
    assert features(**KINDS["lora-bias"]) == {"lora_bias"}
    assert features(**KINDS["modules_to_save"]) == {"modules_to_save"}
    assert features(**KINDS["tokens"]) == {"trainable_tokens"}
    assert features(target_modules=["q_proj"], alora_invocation_tokens=[1, 2]) == {"alora"}
    assert features(target_modules=["q_proj"], init_lora_weights="pissa") == {"init_changes_base"}
    assert features(target_modules=["q_proj"], init_lora_weights="gaussian") == frozenset()


def test_lora_ga_changes_the_base_that_it_is_made_for_and_not_the_one_it_is_loaded_on(
    base: Path, tmp_path: Path
) -> None:
    model = peft_model(base, target_modules=["q_proj"], init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    assert AdapterSpec.from_model(model).features == {"init_changes_base"}
    model.save_pretrained(tmp_path)
    assert AdapterSpec.from_folder(tmp_path, base).features == frozenset()


def test_tied_targets(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    assert "tied_target" in AdapterSpec.from_model(peft_model(tmp_path, target_modules=["lm_head"])).features
    assert "tied_target" in AdapterSpec.from_model(peft_model(tmp_path, target_modules=["embed_tokens"])).features
    assert "tied_target" not in AdapterSpec.from_model(peft_model(tmp_path)).features


def test_a_base_s_config_that_leaves_tying_to_its_class(tmp_path: Path) -> None:
    """As transformers 4 saved those of Gemma and GPT-2, which are tied: only what differs from the defaults."""
    config = GemmaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
    )
    config.save_pretrained(tmp_path / "base")
    told = json.loads((tmp_path / "base" / "config.json").read_text())
    del told["tie_word_embeddings"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(told))
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(target_modules=["embed_tokens"]))
    model.save_pretrained(tmp_path / "adapter")
    saved = AdapterSpec.from_folder(tmp_path / "adapter", tmp_path / "base")
    assert saved.features == AdapterSpec.from_model(model).features == {"lora_embedding", "tied_target"}
    del told["model_type"]
    assert not is_tied(told)


def test_largest_rank_and_scalings_are_the_layers_own(base: Path) -> None:
    options = {"rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.(up|gate)_proj": 16}, "alpha_pattern": {"mlp.*": 5}}
    for rslora in (False, True):
        model = peft_model(base, use_rslora=rslora, **options)
        spec = AdapterSpec.from_model(model)
        assert spec.max_rank == 16
        seen = set()
        for name, module in model.get_base_model().named_modules():
            if hasattr(module, "lora_A"):
                assert spec.scaling(name) == pytest.approx(module.scaling["default"], rel=1e-12), name
                seen.add(module.scaling["default"])
        assert len(seen) >= 4


def test_overlapping_patterns_keep_their_order(base: Path, tmp_path: Path) -> None:
    """PEFT takes the first key that matches, and sorts the keys when it saves: its own file then has other ranks."""
    model = peft_model(base, rank_pattern={"q_proj": 4, r"layers\.0\..*": 16})
    write_adapter(take_snapshot(model), tmp_path)
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_a_copy_in_another_dtype(base: Path) -> None:
    model = peft_model(base)
    full, half = take_snapshot(model), take_snapshot(model, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert half.nbytes * 2 == full.nbytes
    assert torch.equal(half.flat, full.flat.bfloat16())
    assert half.digest != full.digest


def test_a_given_buffer_is_filled_and_a_wrong_one_refused(base: Path) -> None:
    model = peft_model(base)
    expected = take_snapshot(model, dtype=torch.float16)
    out = torch.zeros(expected.flat.numel(), dtype=torch.float16)
    assert take_snapshot(model, out=out).flat is out
    assert torch.equal(out, expected.flat)
    for wrong in (out[:-1], out.float(), out.view(2, -1)):
        with pytest.raises(AdapterError, match="buffer"):
            take_snapshot(model, out=wrong, dtype=torch.float16)


def test_training_goes_on_untouched(base: Path) -> None:
    model = peft_model(base, lora_dropout=0.1).train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    snapshot = take_snapshot(model)
    assert torch.equal(torch.randn(4), expected)
    assert model.training
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())
    kept = snapshot.flat.clone()
    train_everything(model)
    assert torch.equal(snapshot.flat, kept)
    assert not torch.equal(take_snapshot(model).flat, kept)


def test_digest_is_of_content(base: Path) -> None:
    model = peft_model(base)
    first = take_snapshot(model)
    assert take_snapshot(model, step=9).digest == first.digest
    with torch.no_grad():
        model.get_base_model().model.layers[2].mlp.up_proj.lora_B["default"].weight[0, 0] += 1e-6
    assert take_snapshot(model).digest != first.digest


def test_the_active_adapter_of_several(base: Path, tmp_path: Path) -> None:
    model = peft_model(base)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "embed_tokens"]))
    default = take_snapshot(model)
    assert default.spec.max_rank == 8
    model.set_adapter("other")
    train_everything(model)
    other = take_snapshot(model)
    model.save_pretrained(tmp_path, save_embedding_layers=False, selected_adapters=["other"])
    theirs = load_file(tmp_path / "other" / "adapter_model.safetensors")
    assert other.tensors.keys() == theirs.keys()
    assert all(torch.equal(other.tensors[name], tensor) for name, tensor in theirs.items())
    assert other.spec.config["r"] == 4
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(AdapterError, match="2 adapters are active"):
        take_snapshot(model)


def test_an_adapter_made_anew_is_seen(base: Path) -> None:
    """The plan of the first adapter points at modules that are gone."""
    model = peft_model(base, target_modules=["q_proj"])
    first = take_snapshot(model)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj"]))
    model.set_adapter("default")
    second = take_snapshot(model)
    assert second.spec.shapes == first.spec.shapes
    assert not second.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].any()


def test_trainable_parameters_outside_of_the_adapter_are_not_lost(base: Path) -> None:
    model = peft_model(base)
    take_snapshot(model)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(AdapterError, match=r"model\.norm\.weight"):
        take_snapshot(model)


def test_a_scaling_set_at_run_time_is_refused(base: Path) -> None:
    model = peft_model(base)
    take_snapshot(model)
    model.get_base_model().model.layers[1].self_attn.q_proj.set_scale("default", 3.0)
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.q_proj is scaled by 6"):
        take_snapshot(model)


def test_a_rescaled_adapter_is_refused_in_the_middle_of_a_run(base: Path) -> None:
    """Carriers agree on the scaling with the servers once, and would go on with the old one."""
    model = peft_model(base, r=8, lora_alpha=16)
    spec = AdapterSpec.from_model(model)
    model.add_adapter("louder", LoraConfig(r=8, lora_alpha=80, target_modules=list(PROJECTIONS)))
    model.set_adapter("louder")
    with pytest.raises(AdapterError, match="scaling that the run started with"):
        take_snapshot(model, spec=spec)
    model.set_adapter("default")
    assert take_snapshot(model, spec=spec).spec == spec


def test_a_scaling_set_at_run_time_on_stacked_parameters_is_refused() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    moe = Qwen3MoeConfig(**shape, num_hidden_layers=1, moe_intermediate_size=8, num_experts=2, vocab_size=32)
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], use_rslora=True)
    model = get_peft_model(AutoModelForCausalLM.from_config(moe), config)
    take_snapshot(model)
    model.get_base_model().model.layers[0].mlp.experts.set_scale("default", 3.0)
    with pytest.raises(AdapterError, match=r"mlp\.experts is scaled by"):
        take_snapshot(model)


def test_an_adapter_that_is_switched_off_is_no_policy(base: Path) -> None:
    model = peft_model(base)
    first = take_snapshot(model)
    with model.disable_adapter(), pytest.raises(AdapterError, match="switched off"):
        take_snapshot(model)
    assert take_snapshot(model).digest == first.digest


def test_another_adapter_than_the_run_started_with_is_refused(base: Path) -> None:
    model = peft_model(base)
    spec = AdapterSpec.from_model(model)
    assert take_snapshot(model, spec=spec).spec == spec
    model.add_adapter("wider", LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=["q_proj"]))
    model.set_adapter("wider")
    with pytest.raises(AdapterError, match="not of the shape"):
        take_snapshot(model, spec=spec)


def test_models_without_one_lora_adapter_are_refused(base: Path) -> None:
    from peft import IA3Config

    with pytest.raises(AdapterError, match="no PEFT model"):
        take_snapshot(load_base(base))
    other = get_peft_model(load_base(base), IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(AdapterError, match="only LoRA"):
        AdapterSpec.from_model(other)


def test_which_of_two_peft_models_is_the_policy(base: Path) -> None:
    """Beside each other (actor and critic), or one in the other, whose tensors no server has a place for."""
    pair = nn.ModuleDict({"critic": peft_model(base), "actor": peft_model(base)})
    with pytest.raises(AdapterError, match=r"2 PEFT models \(critic, actor\)"):
        take_snapshot(pair)
    nested = get_peft_model(peft_model(base), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match="2 PEFT models"):
        take_snapshot(nested)
    value_head = nn.ModuleDict({"policy": peft_model(base), "v_head": nn.Linear(128, 1)})
    assert take_snapshot(value_head).digest == take_snapshot(peft_model(base)).digest


def test_a_merged_adapter_is_refused_until_it_is_unmerged(base: Path) -> None:
    """The base fingerprint would unmerge it for good, and merged weights would be W + 2Δ."""
    model = peft_model(base)
    expected = take_snapshot(model).digest
    model.merge_adapter()
    with pytest.raises(AdapterError, match="unmerge_adapter"):
        take_snapshot(model)
    model.unmerge_adapter()
    assert take_snapshot(model).digest == expected


def test_an_adapter_that_is_switched_off_is_refused(base: Path) -> None:
    """The trainer's policy is the base then, and a digest would prove the adapter."""
    model = peft_model(base)
    expected = take_snapshot(model).digest
    with model.disable_adapter(), pytest.raises(AdapterError, match="switched off"):
        take_snapshot(model)
    assert take_snapshot(model).digest == expected


def test_layers_that_use_another_adapter_than_the_model_are_refused(base: Path) -> None:
    model = peft_model(base)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "embed_tokens"]))
    take_snapshot(model)
    projection = model.get_base_model().model.layers[2].self_attn.q_proj
    projection.set_adapter(["default", "other"])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(AdapterError, match=r"1 layers use other adapters .*layers\.2\.self_attn\.q_proj"):
        take_snapshot(model)


@pytest.mark.parametrize("shape", [(0,), (64,), (0, 128)])
def test_shards_are_refused(base: Path, shape: tuple[int, ...]) -> None:
    """peft#2892: an ungathered ZeRO-3 parameter is empty, an FSDP one is flat."""
    model = peft_model(base)
    owner = model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"]
    owner.weight = nn.Parameter(torch.zeros(shape))
    with pytest.raises(AdapterError) as caught:
        take_snapshot(model)
    assert caught.value.problems[0].code == ("empty_tensor" if 0 in shape else "bad_shape")


def test_a_parameter_that_shrinks_later_is_refused(base: Path) -> None:
    model = peft_model(base)
    take_snapshot(model)
    owner = model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"]
    owner.weight.data = owner.weight.data[:, :4]
    with pytest.raises(AdapterError, match="gathered as"):
        take_snapshot(model)


def test_a_model_can_die_while_its_plan_is_cached(base: Path) -> None:
    import gc
    import weakref

    model = peft_model(base)
    take_snapshot(model)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None


def test_scaling_formula() -> None:
    config = {"r": 8, "lora_alpha": 16, "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 6}}
    spec = AdapterSpec(config, {}, frozenset(), 8, {})
    assert spec.scaling("model.layers.0.self_attn.q_proj") == 2
    assert spec.scaling("model.layers.0.mlp.up_proj") == 8
    assert spec.scaling("model.layers.1.mlp.up_proj") == 3
    rooted = AdapterSpec({**config, "use_rslora": True}, {}, frozenset(), 8, {})
    assert rooted.scaling("model.layers.1.mlp.up_proj") == 6 / math.sqrt(2)

"""The merge stream against PEFT's own merge, done in float64 on a copy of the model."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from loraflow.adapter import take_snapshot
from loraflow.canary import canary_snapshot
from loraflow.config import SyncConfig
from loraflow.errors import AdapterError, CapabilityError
from loraflow.merge import MergeSource
from loraflow.merge_rules import LinearDelta
from loraflow.ranks import Ranks
from loraflow.verify import Prover

SIZES = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen2(**options: Any) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False}
    return build(Qwen2Config(**{**SIZES, **shape, **options}))


def gpt2() -> Any:
    return build(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=64))


def moe() -> Any:
    return build(
        Qwen3MoeConfig(
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            tie_word_embeddings=False,
            **SIZES,
        )
    )


def build(config: Any) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).eval()


def adapted(base: Any, *, seed: int = 0, std: float = 0.1, **options: Any) -> Any:
    """A PEFT model whose every trainable tensor is random, so that no update is zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 6, **options})).eval()
    train(model, seed=seed, std=std)
    return model


def train(model: Any, *, seed: int, std: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * std
                trained_in_place = "lora_magnitude" in name or "lora_" not in name
                parameter.copy_((parameter + noise) if trained_in_place else noise)


def checkpoint(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes: the names and values that a server would load."""
    model.save_pretrained(folder)
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def reference(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """PEFT's own merge in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint(copy.deepcopy(model).double().merge_and_unload(), folder)


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


ALL = {"target_modules": "all-linear"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (qwen2, ALL),
    "two modules": (qwen2, {"target_modules": ["q_proj", "v_proj"]}),
    "rslora": (qwen2, {**ALL, "use_rslora": True}),
    "patterns": (
        qwen2,
        {**ALL, "rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 8}, "alpha_pattern": {"o_proj": 32}},
    ),
    "dora": (qwen2, {**ALL, "use_dora": True}),
    "lora_bias": (qwen2, {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "bias=all": (qwen2, {**ALL, "bias": "all"}),
    "bias=lora_only": (qwen2, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "modules_to_save": (qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm"]}),
    "embedding": (qwen2, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding dora": (qwen2, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "lm_head": (qwen2, {"target_modules": ["lm_head", "up_proj"]}),
    "trainable tokens": (
        qwen2,
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 50, 7]}},
    ),
    "layers": (qwen2, {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d dora": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "mica": (qwen2, {"target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "mica"}),
    "experts": (
        moe,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_pefts_merge_in_float64(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    base = make()
    pristine = checkpoint(base, tmp_path / "base")
    model = adapted(base, **options)
    source = MergeSource(model, dtype=torch.float32)
    before = fingerprint(model)

    merged = dict(source.merged(take_snapshot(model), source.weights))

    expected = reference(model, tmp_path / "merged")
    assert merged.keys() == expected.keys() == pristine.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(
            tensor, expected[name].float(), rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    moved = {name for name in pristine if not torch.equal(expected[name].float(), pristine[name])}
    assert moved == set(source.changed)
    assert fingerprint(model) == before


@pytest.mark.parametrize("case", CASES)
def test_pristine_is_the_checkpoint_whatever_was_trained(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    base = make()
    pristine = checkpoint(base, tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, LoraConfig(r=4, **options))
    source = MergeSource(model, dtype=torch.float32)
    train(model, seed=5)
    streamed = dict(source.pristine(source.weights))
    assert streamed.keys() == pristine.keys()
    assert all(torch.equal(streamed[name], pristine[name]) for name in pristine)


def test_announced_is_what_is_yielded() -> None:
    for case in ("dora", "experts", "bias=all"):
        make, options = CASES[case]
        model = adapted(make().bfloat16(), **options)
        source = MergeSource(model, dtype=torch.float32)
        snapshot = take_snapshot(model)
        for names in (source.weights, source.changed, ["model.layers.1.self_attn.k_proj.weight"]):
            announced = source.announce(names)
            yielded = [(name, t.dtype, tuple(t.shape)) for name, t in source.merged(snapshot, names)]
            assert yielded == [(w.name, w.dtype, w.shape) for w in announced]
            assert {w.name for w in announced} == set(names)


def test_experts_travel_under_checkpoint_names() -> None:
    model = adapted(moe(), target_parameters=["mlp.experts.down_proj"], target_modules=[])
    source = MergeSource(model, dtype=torch.bfloat16)
    assert set(source.changed) == {
        f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for i in (0, 1) for e in range(4)
    }
    assert all(w.dtype == torch.bfloat16 and w.shape == (32, 24) for w in source.announce(source.changed))


def test_bf16_is_rounded_once(tmp_path: Path) -> None:
    """Every value is the bf16 number nearest to the float64 merge: a second rounding would miss some by one step."""
    model = adapted(qwen2().bfloat16(), **CASES["dora"][1])
    source = MergeSource(model, dtype=torch.bfloat16)
    expected = reference(model, tmp_path / "merged")
    for name, tensor in source.merged(take_snapshot(model), source.changed):
        nearest = expected[name].bfloat16()
        away = (tensor.double() - expected[name]).abs() - (nearest.double() - expected[name]).abs()
        assert tensor.dtype == torch.bfloat16
        assert float(away.max()) <= 1e-6 * float(expected[name].abs().max()), name


def test_rounding_error_is_that_of_the_update(tmp_path: Path) -> None:
    model = adapted(qwen2().bfloat16(), std=0.02, **CASES["plain"][1])
    source = MergeSource(model, dtype=torch.bfloat16)
    base = dict(MergeSource(model, dtype=torch.float32).pristine(source.changed))
    expected = reference(model, tmp_path / "merged")
    error = update = 0.0
    for name, tensor in source.merged(take_snapshot(model), source.changed):
        error += float((tensor.double() - expected[name]).square().sum())
        update += float((expected[name] - base[name].double()).square().sum())
    assert source.rounding_error == pytest.approx(math.sqrt(error / update), rel=1e-3)
    assert source.rounding_error > 0.01

    for _ in (wide := MergeSource(model, dtype=torch.float32)).merged(take_snapshot(model), wide.changed):
        pass
    assert wide.rounding_error < 1e-6


def test_five_hundred_merges_leave_the_trainer_bit_identical() -> None:
    model = adapted(qwen2().bfloat16(), **CASES["modules_to_save"][1])
    frozen = [p for p in model.parameters() if not p.requires_grad]
    before = fingerprint(nn.ParameterList(frozen))
    versions = [p._version for p in frozen]
    source = MergeSource(model, dtype=torch.bfloat16)
    seen = set()
    for step in range(500):
        train(model, seed=step)
        digest = hashlib.sha256()
        for _, tensor in source.merged(take_snapshot(model), source.changed):
            digest.update(tensor.view(torch.uint8).numpy().tobytes())
        seen.add(digest.digest())
    assert len(seen) == 500
    assert fingerprint(nn.ParameterList(frozen)) == before
    assert [p._version for p in frozen] == versions


def test_a_snapshot_is_merged_not_the_live_adapter() -> None:
    model = adapted(qwen2(), **ALL)
    source = MergeSource(model, dtype=torch.float32)
    snapshot = take_snapshot(model)
    first = dict(source.merged(snapshot, source.changed))
    train(model, seed=9)
    again = dict(source.merged(snapshot, source.changed))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_an_autocast_around_it_changes_nothing() -> None:
    model = adapted(qwen2(), **ALL)
    source = MergeSource(model, dtype=torch.float32)
    snapshot = take_snapshot(model)
    plain = dict(source.merged(snapshot, source.changed))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = dict(source.merged(snapshot, source.changed))
    assert all(torch.equal(plain[name], inside[name]) for name in plain)


@pytest.mark.parametrize("old_way", [False, True])
def test_a_trainer_that_allows_tf32_merges_in_float32(monkeypatch: pytest.MonkeyPatch, old_way: bool) -> None:
    """transformers sets the new one of torch's two settings for ``tf32=True``; then asking for the old one raises."""
    settings = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    model = adapted(qwen2(), **ALL)
    source = MergeSource(model, dtype=torch.float32)
    seen: list[str] = []
    apply = LinearDelta.apply

    def spied(*args: Any) -> None:
        seen.extend(setting.fp32_precision for setting in settings)
        apply(*args)

    monkeypatch.setattr(LinearDelta, "apply", spied)
    before = torch.get_float32_matmul_precision()
    try:
        if old_way:
            torch.set_float32_matmul_precision("medium")
        else:
            torch.backends.fp32_precision = "tf32"
        allowed = [setting.fp32_precision for setting in settings]
        assert "tf32" in allowed
        for _ in source.merged(take_snapshot(model), source.changed):
            pass
        assert [setting.fp32_precision for setting in settings] == allowed
        assert set(seen) == {"ieee"}
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)


def test_wrappers_leave_no_trace_in_the_names() -> None:
    model = adapted(qwen2(), **ALL)
    names = list(MergeSource(model, dtype=torch.float32).weights)
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer)
    assert list(MergeSource(torch.compile(model), dtype=torch.float32).weights) == names


class TestTied:
    def test_one_of_two_tied_layers_is_refused(self) -> None:
        for target in ("embed_tokens", "lm_head"):
            for options in ({"target_modules": [target]}, {"target_modules": ["q_proj"], "modules_to_save": [target]}):
                with pytest.raises(AdapterError, match="tied"):
                    MergeSource(adapted(qwen2(tie_word_embeddings=True), **options), dtype=torch.float32)

    def test_tied_adapters_travel_once(self) -> None:
        base = qwen2(tie_word_embeddings=True)
        embedding = base.get_input_embeddings().weight.detach().double()
        model = adapted(base, target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True)
        source = MergeSource(model, dtype=torch.float32)
        snapshot = take_snapshot(model)
        merged = dict(source.merged(snapshot, source.changed))
        assert "lm_head.weight" not in source.weights
        a, b = (snapshot.tensors[f"base_model.model.model.embed_tokens.lora_embedding_{x}"].double() for x in "AB")
        expected = (embedding + 1.5 * (b @ a).t()).float()
        torch.testing.assert_close(merged["model.embed_tokens.weight"], expected, rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
    def test_a_canary_of_tied_adapters_is_tied_and_what_the_trainer_computes(self, target: str) -> None:
        base, ids = qwen2(tie_word_embeddings=True), torch.arange(12)
        served = copy.deepcopy(base)
        config = LoraConfig(r=4, target_modules=["q_proj", target], ensure_weight_tying=True)
        model = get_peft_model(base, config).eval()
        canary = canary_snapshot(take_snapshot(model), 0.3)
        source = MergeSource(model, dtype=torch.float32)
        served.load_state_dict(dict(source.merged(canary, source.changed)), strict=False)
        prover = Prover(model, SyncConfig(adapter_root="unused"), Ranks(1, 1))
        prover.tokens = ids.tolist()
        wanted = prover.expect(override=prover.canary_override(canary)).logprobs
        with torch.no_grad():
            found = served(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert (wanted - prover.expect(adapter=False).logprobs).abs().mean() > 0.01

    def test_tied_copies_travel_once(self, tmp_path: Path) -> None:
        model = adapted(
            qwen2(tie_word_embeddings=True),
            target_modules=["q_proj"],
            modules_to_save=["embed_tokens"],
            ensure_weight_tying=True,
        )
        source = MergeSource(model, dtype=torch.float32)
        merged = dict(source.merged(take_snapshot(model), source.changed))
        expected = reference(model, tmp_path / "merged")
        assert "lm_head.weight" not in source.weights
        assert torch.equal(merged["model.embed_tokens.weight"], expected["model.embed_tokens.weight"].float())

    def test_tied_layers_trained_apart_are_refused(self) -> None:
        model = adapted(qwen2(tie_word_embeddings=True), target_modules=["embed_tokens", "lm_head"])
        source = MergeSource(model, dtype=torch.float32)
        with pytest.raises(AdapterError, match="trained apart"):
            list(source.merged(take_snapshot(model), source.changed))

    def test_an_update_elsewhere_is_served(self) -> None:
        source = MergeSource(adapted(qwen2(tie_word_embeddings=True), target_modules=["q_proj"]), dtype=torch.float32)
        assert "lm_head.weight" not in source.weights

    def test_trained_tokens_reach_both(self, tmp_path: Path) -> None:
        model = adapted(
            qwen2(tie_word_embeddings=True), target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 9]}
        )
        source = MergeSource(model, dtype=torch.float32)
        merged = dict(source.merged(take_snapshot(model), source.changed))
        expected = model.get_base_model().get_input_embeddings().token_adapter.get_merged_weights(["default"])
        assert torch.equal(merged["model.embed_tokens.weight"], expected)


class Convolutions(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = PretrainedConfig()
        self.one = nn.Conv1d(4, 8, 3)
        self.two = nn.Conv2d(4, 8, 3, groups=groups)
        self.point = nn.Conv2d(4, 8, 1)


@pytest.mark.parametrize("dora", [False, True])
def test_convolutions(dora: bool) -> None:
    model = adapted(Convolutions(), target_modules=["one", "two", "point"], use_dora=dora)
    source = MergeSource(model, dtype=torch.float32)
    merged = dict(source.merged(take_snapshot(model), source.weights))
    expected = copy.deepcopy(model).double().merge_and_unload().state_dict()
    assert set(source.changed) == {"one.weight", "two.weight", "point.weight"}
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=2e-6, atol=2e-6)


class Int8Params(nn.Parameter):
    """By its name, bitsandbytes' kind of parameter."""


class TestRefused:
    def test_grouped_convolution(self) -> None:
        with pytest.raises(AdapterError, match="groups"):
            MergeSource(adapted(Convolutions(groups=2), target_modules=["two"]), dtype=torch.float32)

    def test_variant_without_a_fixed_merge(self) -> None:
        model = adapted(qwen2(), target_modules=["q_proj"], alora_invocation_tokens=[1, 2])
        with pytest.raises(AdapterError, match="ALora"):
            MergeSource(model, dtype=torch.float32)

    def test_already_merged_trainer(self) -> None:
        model = adapted(qwen2(), **ALL)
        model.merge_adapter()
        with pytest.raises(AdapterError, match="unmerge_adapter"):
            MergeSource(model, dtype=torch.float32)

    def test_trainer_that_merges_in_the_middle_of_a_run(self) -> None:
        """Its base would be read with the adapter inside: W + 2Δ."""
        model = adapted(qwen2(), **ALL)
        source = MergeSource(model, dtype=torch.float32)
        snapshot = take_snapshot(model)
        before = dict(source.merged(snapshot, source.changed))
        model.merge_adapter()
        for stream in (lambda: source.merged(snapshot, source.changed), lambda: source.pristine(source.changed)):
            with pytest.raises(AdapterError, match="unmerge_adapter"):
                stream()
        model.unmerge_adapter()
        after = dict(source.merged(snapshot, source.changed))
        torch.testing.assert_close(after, before)

    def test_a_base_that_the_initialisation_has_changed(self) -> None:
        model = adapted(qwen2(), target_modules=["q_proj"], init_lora_weights="pissa_niter_2")
        with pytest.raises(AdapterError, match="init_lora_weights"):
            MergeSource(model, dtype=torch.float32)

    def test_lora_bias_without_a_bias(self) -> None:
        model = adapted(qwen2(), target_modules=["q_proj", "o_proj"], lora_bias=True)
        with pytest.raises(AdapterError, match="without a bias"):
            MergeSource(model, dtype=torch.float32)

    def test_offloaded_base(self) -> None:
        model = adapted(qwen2(), **ALL)
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.to("meta")
        with pytest.raises(CapabilityError, match="offloaded"):
            MergeSource(model, dtype=torch.float32)

    def test_another_adapters_snapshot(self) -> None:
        source = MergeSource(adapted(qwen2(), **ALL), dtype=torch.float32)
        other = take_snapshot(adapted(qwen2(), target_modules=["q_proj"]))
        with pytest.raises(AdapterError, match="not of the adapter"):
            list(source.merged(other, source.changed))

    def test_int8_base_unless_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stand-in for a quantised layer: integer storage, and the float values that PEFT's dequantiser gives."""
        model = adapted(qwen2(), target_modules=["q_proj"])
        layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        values = layer.weight.detach().clone()
        layer.weight = Int8Params((values * 100).to(torch.int8), requires_grad=False)
        with pytest.raises(AdapterError, match="dequantize_base"):
            MergeSource(model, dtype=torch.float32)
        monkeypatch.setattr("loraflow.merge_model.dequantize_module_weight", lambda module: nn.Parameter(values))
        source = MergeSource(model, dtype=torch.float32, dequantize_base=True)
        name = "model.layers.0.self_attn.q_proj.weight"
        snapshot = take_snapshot(model)
        merged = dict(source.merged(snapshot, [name]))[name]
        prefix = "base_model.model.model.layers.0.self_attn.q_proj"
        a, b = (snapshot.tensors[f"{prefix}.lora_{x}.weight"].double() for x in "AB")
        torch.testing.assert_close(merged, (values.double() + 1.5 * b @ a).float(), rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
    def test_formats_that_nobody_can_dequantise(self, dtype: torch.dtype) -> None:
        """PEFT gives the raw numbers of a weight of float8 back, without its scales."""
        model = adapted(qwen2(), target_modules=["q_proj"])
        layers = model.get_base_model().model.layers
        for layer in (layers[0].self_attn.q_proj.base_layer, layers[1].self_attn.k_proj):
            layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        with pytest.raises(AdapterError) as caught:
            MergeSource(model, dtype=torch.float32, dequantize_base=True)
        assert [problem.tensor for problem in caught.value.problems] == [
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.self_attn.k_proj.weight",
        ]
        assert "dequantise" in caught.value.problems[0].message

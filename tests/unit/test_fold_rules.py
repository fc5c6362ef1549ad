"""Fold's arithmetic in plain torch: every kind of update against PEFT's own merge, and its proof against tampering."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.pytorch_utils import Conv1D

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.transports.fold_modules import base_weight_of, conv1d_modules, fold_modules, payload_shapes
from loraflow_server.errors import PluginError
from loraflow_server.fold import Fold, FoldModule
from loraflow_server.fold_desk import _modules
from tests.helpers.tiny import load_base, make_tiny_model, peft_model

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora_ends": {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
    "bias": {"bias": "lora_only", "target_modules": ["q_proj", "o_proj"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj"]},
    "whole": {"modules_to_save": ["lm_head", "norm"], "target_modules": ["v_proj"]},
    "patterns": {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 7}, "use_rslora": True},
}


class Served(nn.Module):
    """The base model, with a loader that copies checkpoint weights where they belong."""

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.to(dtype)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.base.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fold_rules") / "model", layers=2, hidden_size=64)


def trained(folder: Path, **lora: Any) -> Any:
    model = peft_model(folder, std=0.1, r=4, lora_alpha=12, **lora)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            elif "lora_magnitude" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif "lora_B" in name and name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def fold_of(folder: Path, model: Any, dtype: torch.dtype = torch.float32) -> tuple[Served, Fold]:
    served = Served(load_base(folder), dtype)
    return served, fold_into(served, model)


def fold_into(served: nn.Module, model: Any) -> Fold:
    spec = AdapterSpec.from_model(model)
    shapes = payload_shapes(spec)
    modules = list(fold_modules(spec, conv1d_modules(model)).values())
    checked = _modules(modules, {name: list(shape) for name, shape in shapes.items()})
    return Fold(served, [FoldModule.from_json(item) for item in checked], list(shapes.values()))


def apply(fold: Fold, model: Any, policy: str = "v0", *, whole: bool = True) -> dict[str, Any]:
    payload = take_snapshot(model, dtype=fold.dtype).flat.view(torch.uint8)
    fold.begin(policy, payload)
    return fold.finish(whole=whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_pefts_merge(folder: Path, kind: str, dtype: torch.dtype) -> None:
    model = trained(folder, **KINDS[kind])
    served, fold = fold_of(folder, model, dtype)
    start = fold.served_sums()
    found = apply(fold, model)
    assert found["error"] <= 1
    assert found["checked"] == len(fold.served)
    merged = model.merge_and_unload().state_dict()
    # Two roundings at most: that of the payload, and that of the result.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for name, value in served.base.named_parameters():
        torch.testing.assert_close(value.float(), merged[name].float(), **close, msg=name)
    fold.restore()
    assert fold.served_sums() == start


class ServedGPT2(nn.Module):
    """As vLLM serves GPT-2: ``Conv1D`` weights, (in, out) in the checkpoint, are loaded into (out, in) layers."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.turned = {f"{n}.weight" for n, module in base.named_modules() if isinstance(module, Conv1D)}
        values = {n: (p.detach().T if n in self.turned else p.detach()).clone() for n, p in base.named_parameters()}
        self.weights = nn.ParameterDict({n.replace(".", "/"): nn.Parameter(v) for n, v in values.items()})

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            place = self.weights[name.replace(".", "/")]
            source = weight.t() if name in self.turned else weight
            assert place.shape == source.shape
            place.data.copy_(source)

    def checkpoint(self) -> dict[str, torch.Tensor]:
        named = {name.replace("/", "."): value.detach() for name, value in self.weights.items()}
        return {name: value.T if name in self.turned else value for name, value in named.items()}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", [["c_attn", "c_proj", "c_fc"], ["attn.c_proj", "lm_head"]])
def test_gpt2s_transposed_weights(targets: list[str], dora: bool) -> None:
    """With ``lm_head`` among them PEFT's one flag for all layers ends up false; the square one would fit either way."""
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(GPT2Config(**shape, tie_word_embeddings=False)).eval()
    served = ServedGPT2(base)
    start = {name: value.clone() for name, value in served.checkpoint().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT sets fan_in_fan_out itself, and says so
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=targets, use_dora=dora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    weight = base_weight_of(model)
    for name in fold_modules(AdapterSpec.from_model(model)):
        assert torch.equal(weight(name), start[name])  # type: ignore[arg-type] - a tensor
    fold = fold_into(served, model)
    assert apply(fold, model)["error"] <= 1
    merged = model.merge_and_unload().state_dict()
    for name, value in served.checkpoint().items():
        torch.testing.assert_close(value, merged[name], rtol=1e-5, atol=1e-5, msg=name)
    fold.restore()
    assert all(torch.equal(value, start[name]) for name, value in served.checkpoint().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_element_anywhere_is_found(folder: Path, kind: str) -> None:
    model = trained(folder, **KINDS[kind])
    _, fold = fold_of(folder, model)
    apply(fold, model)
    for piece in fold.served:
        cell = piece.view[piece.rect.rows // 2, piece.rect.cols // 3 :][:1]
        kept = cell.clone()
        cell.add_(1e-2)
        assert fold.largest_error() > 1, piece.parameter
        cell.copy_(kept)
    assert fold.largest_error() <= 1


def test_each_fold_proves_another_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(folder, target_modules="all-linear")
    _, fold = fold_of(folder, model)
    apply(fold, model)
    count = len(fold.served)
    assert sum(apply(fold, model, f"v{n}", whole=False)["checked"] for n in range(1, 9)) == count
    kept = fold.served[5].view.clone()
    wrong, write = 0, Fold._write

    def write_wrongly(self: Fold, payload: Any) -> None:
        write(self, payload)
        self.served[5].view.add_(1)

    with monkeypatch.context() as patched:
        patched.setattr(Fold, "_write", write_wrongly)
        for number in range(9, 17):  # one of eight folds in a row sees a product that is always wrong
            fold.begin(f"v{number}", take_snapshot(model).flat.view(torch.uint8))
            try:
                fold.finish()
            except PluginError as error:
                wrong += error.code == "fold_wrong"
    assert wrong == 1
    apply(fold, model, "v17")
    assert torch.equal(fold.served[5].view, kept)


def test_a_payload_that_is_not_the_one_meant_is_taken_back(folder: Path) -> None:
    model = trained(folder, **KINDS["dora"])
    _, fold = fold_of(folder, model)
    apply(fold, model)
    before = fold.served_sums()
    flat = take_snapshot(trained(folder, **KINDS["dora"], seed=9)).flat
    fold.begin("v1", flat.view(torch.uint8), expected=[0] * len(fold.shapes))
    with pytest.raises(PluginError, match="not the one that was sent"):
        fold.finish()
    assert fold.served_sums() == before
    assert fold.current.policy == "v0"
    with pytest.raises(PluginError, match="no fold is under way"):
        fold.finish()
    with pytest.raises(PluginError, match="bytes"):
        fold.begin("v2", flat[:-1].view(torch.uint8))
    assert fold.served_sums() == before


def test_dora_on_parts_of_rows_is_refused() -> None:
    class Shard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)

        def load_weights(self, weights: Any) -> None:
            for _, weight in weights:
                self.weight.data.copy_(weight[:, 3:])

    module = FoldModule("w", (4, 6), a=0, b=1, magnitude=2)
    with pytest.raises(PluginError, match="whole rows") as caught:
        Fold(Shard(), [module], [(2, 6), (4, 2), (4, 1)])
    assert (caught.value.code, caught.value.status) == ("unsupported_layout", 409)


def test_base_weights_are_the_frozen_ones(folder: Path) -> None:
    plain = dict(load_base(folder).named_parameters())
    for kind in KINDS.values():
        model = trained(folder, **kind)
        layers = model.get_base_model().model.layers
        layers[1] = torch.compile(layers[1])  # wrappers hide nothing
        weight = base_weight_of(model)
        for name in fold_modules(AdapterSpec.from_model(model)):
            found = weight(name)
            if name.endswith("bias") and kind.get("bias"):
                assert found is None  # trained in place: what it was is gone
            else:
                assert found is not None
                assert torch.equal(found, plain[name]), name

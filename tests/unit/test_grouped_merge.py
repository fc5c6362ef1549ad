"""Merges of a whole bucket in one launch against the stream's, weight by weight; Triton's interpreter on the CPU.

The interpreter cuts bfloat16 off where a GPU rounds it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from loraflow.adapter import take_snapshot
from loraflow.merge import MergeSource
from tests.helpers.processes import run_ranks

pytest.importorskip("triton")

BUCKET = 60_000


def _qwen2() -> Any:
    return Qwen2Config(
        vocab_size=96,
        hidden_size=72,
        intermediate_size=152,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (_qwen2, {"target_modules": "all-linear", "rank_pattern": {"q_proj": 5, "down_proj": 40}}),
    "mixed": (_qwen2, {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"], "bias": "all"}),
    "dora": (_qwen2, {"target_modules": "all-linear", "use_dora": True}),
    "conv1d": (
        lambda: GPT2Config(n_layer=1, n_embd=72, n_head=4, vocab_size=96, n_positions=16),
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ),
}


def _model(case: str, base: torch.dtype) -> Any:
    torch.manual_seed(0)
    make, options = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(make()).to(base).eval()
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=13, **options)).eval()
    _train(model)
    return model


def _train(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)


class Update:
    """Buckets filled by the launches and the stream together."""

    def __init__(self, model: Any, wire: torch.dtype) -> None:
        from loraflow.transports.merging import Merging

        self.source = MergeSource(model, dtype=wire)
        self.merging = Merging(self.source, torch.device("cpu"), bucket_bytes=BUCKET, capped=False)
        self.merging._enabled = True  # what a GPU has, and the interpreter

    def fill(self, snapshot: Any) -> dict[str, torch.Tensor]:
        from loraflow.transports.pipeline import _pack, buckets_of

        merge = self.merging.begin(snapshot, tuple(self.source.weights))
        seen: dict[str, torch.Tensor] = {}
        for bucket in buckets_of(merge.tensors, BUCKET):
            buffer = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)  # NaN, where nothing is written
            _pack(buffer, bucket, merge.stream, merge.grouped, seen.update)
        return seen

    @property
    def names(self) -> frozenset[str]:
        assert self.merging._known is not None
        return self.merging._known[1].names


def look(case: str, base: torch.dtype, wire: torch.dtype, factors: torch.dtype) -> dict[str, Any]:
    model = _model(case, base)
    update = Update(model, wire)
    found: dict[str, Any] = {}
    snapshot = take_snapshot(model, dtype=factors)
    found["filled"] = update.fill(snapshot)
    found["names"] = update.names
    found["rounding"] = update.source.rounding_error
    plain = MergeSource(model, dtype=wire)
    found["streamed"] = dict(plain.merged(snapshot, plain.weights))
    found["rounding of the stream"] = plain.rounding_error
    found["again"] = update.fill(take_snapshot(model, dtype=factors))
    _train(model)  # another policy, in other memory
    later = take_snapshot(model, dtype=factors)
    found["later"] = update.fill(later), dict(plain.merged(later, plain.weights))
    for parameter in model.parameters():  # a trainer that moved its weights
        parameter.data = parameter.data.clone()
    moved = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in moved.values():
            if not parameter.requires_grad and parameter.dim() == 2:
                parameter.mul_(1.5)
    found["moved"] = update.fill(later), dict(plain.merged(later, plain.weights))
    for parameter in moved.values():  # and one that keeps them in another dtype from now on
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(F16 if base == F32 else F32)
    found["cast"] = update.fill(later), dict(plain.merged(later, plain.weights))
    return found


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LOOKED_AT = (
    ("plain", F16, F16, F32),
    ("plain", F32, F32, F16),
    ("mixed", BF16, F16, BF16),
    ("conv1d", F16, F16, F32),
)


def look_at_all() -> dict[str, Any]:
    """One process for all: half of its time is its start."""
    return {
        **{str(case): look(*case) for case in LOOKED_AT},
        "dora": look_once("dora", F16, F16),
        "cut off": look_once("plain", BF16, BF16),
        "wrong": look_wrong(),
    }


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("grouped")
    outcome = run_ranks(look_at_all, folder=folder, world_size=1, env={"TRITON_INTERPRET": "1"})[0]
    if outcome.error is not None:
        raise outcome.error
    result: dict[str, Any] = outcome.result
    return result


@pytest.fixture(params=LOOKED_AT, ids=str)
def found(request: pytest.FixtureRequest, looked: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = looked[str(request.param)]
    return result


def _require_alike(filled: dict[str, torch.Tensor], streamed: dict[str, torch.Tensor]) -> None:
    assert filled.keys() == streamed.keys()
    for name, tensor in filled.items():
        wanted = streamed[name]
        assert tensor.dtype == wanted.dtype
        # float32 adds up in another order: another rounding now and then
        eps = torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(tensor, wanted, rtol=2 * eps, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        if tensor.dtype == F16:
            assert (tensor != wanted).float().mean() < 0.01, name


def test_every_weight_is_the_streams(found: dict[str, Any]) -> None:
    _require_alike(found["filled"], found["streamed"])
    assert any(name.endswith(("q_proj.weight", "c_attn.weight")) for name in found["names"])


def test_the_same_adapter_gives_the_same_bits(found: dict[str, Any]) -> None:
    for name, tensor in found["filled"].items():
        assert torch.equal(tensor.view(torch.uint8), found["again"][name].view(torch.uint8)), name


@pytest.mark.parametrize("when", ["later", "moved", "cast"])
def test_tables_follow_the_trainer(found: dict[str, Any], when: str) -> None:
    _require_alike(*found[when])
    name = next(iter(found["names"]))
    assert not torch.equal(found[when][0][name], found["filled"][name])


def test_the_rounding_is_measured(found: dict[str, Any]) -> None:
    assert found["rounding"] == pytest.approx(found["rounding of the stream"], rel=1e-2)


def look_once(case: str, base: torch.dtype, wire: torch.dtype) -> Any:
    model = _model(case, base)
    update, plain, snapshot = Update(model, wire), MergeSource(model, dtype=wire), take_snapshot(model)
    return update.fill(snapshot), dict(plain.merged(snapshot, plain.weights)), update.names


def test_what_is_no_plain_product_is_left_to_the_stream(looked: dict[str, Any]) -> None:
    filled, streamed, names = looked["dora"]
    assert names == frozenset()
    assert all(torch.equal(filled[name], streamed[name]) for name in streamed)


def test_a_kernel_that_rounds_otherwise_is_not_used(looked: dict[str, Any]) -> None:
    """Cut off instead of rounded, by this interpreter."""
    filled, streamed, names = looked["cut off"]
    _require_alike(filled, streamed)
    if not names:
        assert all(torch.equal(filled[name], streamed[name]) for name in streamed)


def look_wrong() -> Any:
    from loraflow.transports import grouped

    class Shifted(grouped.GroupedMerge):
        def _entry(self, name: str, view: int) -> list[int]:
            entry = super()._entry(name, view)
            return [*entry[:3], entry[3] + (8 if "down_proj" in name else 0), *entry[4:]]

    model = _model("plain", F16)
    source, snapshot = MergeSource(model, dtype=F16), take_snapshot(model)
    from loraflow.transports.pipeline import buckets_of

    buckets = buckets_of(source.announce(source.weights), BUCKET)
    return Shifted(source, buckets, torch.device("cpu")).prepare(snapshot)


def test_a_table_that_is_wrong_is_noticed(looked: dict[str, Any]) -> None:
    assert looked["wrong"] == frozenset()


def test_without_triton_weights_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "loraflow.transports.grouped", None)
    model = _model("plain", F32)
    update, snapshot = Update(model, F32), take_snapshot(model)
    filled = update.fill(snapshot)
    assert update.merging._known is None
    streamed = dict(update.source.merged(snapshot, update.source.weights))
    assert all(torch.equal(filled[name], streamed[name]) for name in streamed)

"""What a snapshot keeps from one sync to the next is forgotten as soon as the model is another one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import take_snapshot
from loraflow.capture import SnapshotPlan
from loraflow.gather import FlatViews, Gatherer
from tests.helpers.tiny import peft_model, randomize


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return peft_model(tiny_model)


def lora_a(model: Any) -> Any:
    return model.base_model.model.model.layers[1].self_attn.q_proj.lora_A["default"]


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def check(model: Any, dtype: torch.dtype | None = None) -> None:
    """The snapshot is what the parameters are, one by one."""
    snapshot = take_snapshot(model, dtype=dtype)
    live = {
        name.replace(".default", ""): value
        for name, value in model.named_parameters()
        if "lora_" in name and ".default." in name
    }
    assert list(snapshot.tensors) == sorted(live)
    assert len(snapshot.tensors) == len(live)
    for name, value in live.items():
        assert torch.equal(snapshot.tensors[name], value.detach().to(snapshot.dtype)), name
    assert torch.equal(snapshot.flat, torch.cat([snapshot.tensors[name].reshape(-1) for name in sorted(live)]))


def test_steps_in_place(model: Any) -> None:
    for seed in range(3):
        randomize(model, seed=seed)
        check(model)
        check(model, torch.bfloat16)


def test_a_parameter_replaced(model: Any) -> None:
    check(model)
    lora_a(model).weight = torch.nn.Parameter(torch.randn_like(lora_a(model).weight))
    check(model)


def test_a_parameter_given_other_memory(model: Any) -> None:
    check(model)
    weight = lora_a(model).weight
    for _ in range(3):  # an allocator likes to give the same address again
        weight.data = torch.randn_like(weight)
        check(model)
        model.to(torch.bfloat16)
        check(model)
        model.to(torch.float32)
        check(model)


def test_a_square_parameter_turned(model: Any) -> None:
    weight = torch.nn.Parameter(torch.arange(16.0).view(4, 4))
    owner = torch.nn.Module()
    owner.register_parameter("weight", weight)
    gatherer, flat = Gatherer([owner], ["weight"], [(4, 4)]), torch.empty(16)
    assert gatherer.into(flat)
    weight.data = weight.data.t()  # the same address and shape
    assert not gatherer.into(flat)
    weight.data = weight.data.contiguous()
    assert gatherer.into(flat)
    assert torch.equal(flat.view(4, 4), torch.arange(16.0).view(4, 4).t())


def test_what_is_not_plain_is_left_to_others() -> None:
    owner = torch.nn.Module()
    owner.register_parameter("weight", torch.nn.Parameter(torch.zeros(2, 3)))
    gatherer, flat = Gatherer([owner], ["weight"], [(2, 3)]), torch.empty(6)
    assert gatherer.into(flat)
    full = owner.weight.data
    owner.weight.data = torch.empty(0)  # a shard that is freed
    assert not gatherer.into(flat)
    owner.weight = torch.nn.Parameter(full.to("meta"))
    assert not gatherer.into(flat)
    owner.weight = torch.nn.Parameter(full)
    assert gatherer.into(flat)
    owner.weight.ds_id = 7  # ZeRO-3 took it over
    gatherer_after = Gatherer([owner], ["weight"], [(2, 3)])
    assert not gatherer_after.into(flat)
    del owner.weight
    assert not gatherer.into(flat)


def test_mixed_dtypes_are_rounded_once(model: Any) -> None:
    lora_a(model).weight.data = lora_a(model).weight.data.to(torch.float64)
    snapshot = take_snapshot(model, dtype=torch.bfloat16)
    for name, value in model.named_parameters():
        if "lora_" in name:
            expected = value.detach().to(torch.bfloat16)
            assert torch.equal(snapshot.tensors[name.replace(".default", "")], expected)


def test_the_plan_sees_modules_that_changed(model: Any) -> None:
    plan = SnapshotPlan.of(model)
    assert SnapshotPlan.of(model) is plan
    layers = model.base_model.model.model.layers
    layers[0].mlp.up_proj, layers[0].mlp.gate_proj = layers[0].mlp.gate_proj, layers[0].mlp.up_proj
    assert SnapshotPlan.of(model) is not plan
    check(model)
    plan = SnapshotPlan.of(model)
    name, moved = layers[0].mlp._modules.popitem()  # the last child
    assert not plan.holds()
    layers[0].mlp._modules[name] = moved
    assert plan.holds()
    layers[0]._modules = dict(layers[0]._modules)  # another table with the same children
    assert plan.holds()
    layers[0]._modules = {**layers[0]._modules, "mlp": copy.deepcopy(layers[0].mlp)}
    assert not plan.holds()


def test_views_are_made_when_asked_for() -> None:
    flat = torch.arange(6.0)
    templates = [torch.empty(2, 2, device="meta"), torch.empty(1, 2, device="meta")]
    views = FlatViews(flat, ("a", "b"), templates)
    assert (list(views), len(views)) == (["a", "b"], 2)
    assert "_views" not in vars(views)
    assert views["b"].tolist() == [[4.0, 5.0]]
    views["a"].zero_()
    assert flat.tolist() == [0.0, 0.0, 0.0, 0.0, 4.0, 5.0]
    with pytest.raises(KeyError):
        views["c"]

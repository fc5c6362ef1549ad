"""Whatever wraps the model or its layers, the snapshot is the plain model's."""

from __future__ import annotations

import socket
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from loraflow.adapter import AdapterSnapshot, take_snapshot, write_adapter
from tests.helpers.tiny import PROMPT, load_base, make_tiny_model, peft_model, randomize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny_model(folder)
    return folder


def layers(model: nn.Module) -> nn.ModuleList:
    return model.get_base_model().model.layers


def same(one: AdapterSnapshot, other: AdapterSnapshot) -> bool:
    return one.digest == other.digest and one.spec == other.spec and list(one.tensors) == list(other.tensors)


def compiled(model: Any) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_layers(model: Any) -> nn.Module:
    for i, layer in enumerate(layers(model)):
        layers(model)[i] = torch.compile(layer, backend="eager")
    return model


def compiled_projection(model: Any) -> nn.Module:
    attention = layers(model)[1].self_attn
    attention.q_proj = torch.compile(attention.q_proj, backend="eager")
    return model


def compiled_in_place(model: Any) -> nn.Module:
    model.compile(backend="eager")
    return model


def checkpointed(model: Any) -> nn.Module:
    kind = type(layers(model)[0])
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: type(m) is kind)
    return model


def data_parallel(model: Any) -> nn.Module:
    return nn.DataParallel(model)


def nested(model: Any) -> nn.Module:
    return nn.DataParallel(compiled(compiled_layers(checkpointed(model))))


WRAPPERS = [
    compiled,
    compiled_layers,
    compiled_projection,
    compiled_in_place,
    checkpointed,
    data_parallel,
    nested,
]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda f: f.__name__)
def test_wrapped(wrap: Callable[[Any], nn.Module], base: Path) -> None:
    options = {"bias": "lora_only", "rank_pattern": {"q_proj": 4}}
    expected = take_snapshot(peft_model(base, **options))
    assert same(take_snapshot(wrap(peft_model(base, **options))), expected)


def test_modules_to_save_inside_of_wrappers(base: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}
    assert same(take_snapshot(nested(peft_model(base, **options))), take_snapshot(peft_model(base, **options)))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"], r".*\.q_proj"])
def test_layers_compiled_before_peft_saw_them(targets: Any, base: Path, tmp_path: Path) -> None:
    model = load_base(base)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets)).eval()
    randomize(wrapped)
    write_adapter(take_snapshot(wrapped), tmp_path)
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path).eval()
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, wrapped(input_ids=tokens).logits)


def test_a_wrapper_in_target_modules_and_patterns_is_taken_out(base: Path, tmp_path: Path) -> None:
    """With one projection compiled, PEFT resolves all-linear to a list that holds ``_orig_mod``."""
    model = load_base(base)
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.compile(attention.q_proj, backend="eager")
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj._orig_mod": 4, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {r"q_proj\._orig_mod": 3},
    }
    options = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", use_rslora=True, **patterns)
    wrapped = get_peft_model(model, options)
    assert "_orig_mod" in wrapped.peft_config["default"].target_modules
    snapshot = take_snapshot(wrapped)
    write_adapter(snapshot, tmp_path)
    assert "_orig_mod" not in (tmp_path / "adapter_config.json").read_text()
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path)
    assert take_snapshot(loaded).digest == snapshot.digest
    assert snapshot.spec.config["rank_pattern"] == {
        "model.layers.0.self_attn.q_proj": 4,
        "model.layers.1.mlp.up_proj": 2,
    }
    assert snapshot.spec.config["alpha_pattern"] == {"model.layers.0.self_attn.q_proj": 3}


def test_accelerate(base: Path) -> None:
    from accelerate import Accelerator

    expected = take_snapshot(peft_model(base))
    assert same(take_snapshot(Accelerator(cpu=True).prepare(peft_model(base))), expected)


def test_a_module_of_the_base_that_is_named_module_keeps_its_name() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    from loraflow.capture import SnapshotPlan

    model = get_peft_model(nn.Sequential(Block()), LoraConfig(target_modules=["module"]))
    assert list(SnapshotPlan(model).shapes) == [
        "base_model.model.0.module.lora_A.weight",
        "base_model.model.0.module.lora_B.weight",
    ]


# ---------------------------------------------------------------- several processes


def sharded_by_fsdp2(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers(model):
        fully_shard(layer)
    return fully_shard(model)


def sharded_by_fsdp1(model: Any) -> nn.Module:
    from functools import partial

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy

    def trained_leaf(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return not list(module.children()) and weight is not None and weight.requires_grad

    by_layer = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers(model)[0])})
    policy = partial(_or_policy, policies=[partial(lambda_auto_wrap_policy, lambda_fn=trained_leaf), by_layer])
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def sharded_by_fsdp1_original_parameters(model: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(layers(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def distributed(model: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _run_rank(rank: int, world: int, port: int, base: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    expected = take_snapshot(peft_model(base))
    for shard in (distributed, sharded_by_fsdp2, sharded_by_fsdp1, sharded_by_fsdp1_original_parameters):
        model = shard(peft_model(base))
        frozen = [p.clone() for p in model.parameters()] if shard is distributed else []
        for _ in range(2):
            assert same(take_snapshot(model), expected), f"{shard.__name__} on rank {rank}"
        half = take_snapshot(model, dtype=torch.bfloat16)
        assert torch.equal(half.flat, expected.flat.bfloat16())
        assert all(torch.equal(a, b) for a, b in zip(frozen, model.parameters(), strict=False))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_two_ranks(base: Path) -> None:
    """DDP, FSDP2, and FSDP1 both ways: every rank gets the whole adapter, and only that is gathered."""
    mp.spawn(_run_rank, args=(2, free_port(), str(base)), nprocs=2)


# ---------------------------------------------------------------- ZeRO-3


def test_zero3_gathers_what_it_snapshots_and_nothing_else(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's contract, without DeepSpeed: a parameter is empty, its shape stands in ``ds_shape``, and the values
    are there inside of ``GatheredParameters``.
    """
    expected = take_snapshot(peft_model(base))
    model = peft_model(base)
    whole: dict[int, torch.Tensor] = {}
    for i, parameter in enumerate(model.parameters()):
        whole[id(parameter)] = parameter.data
        parameter.ds_id, parameter.ds_shape = i, parameter.shape
        parameter.data = torch.empty(0)
    gathered: list[int] = []

    @contextmanager
    def gathered_parameters(parameters: list[Any], modifier_rank: int | None = None) -> Iterator[None]:
        assert modifier_rank is None, "nothing is written back"
        for parameter in parameters:
            gathered.append(id(parameter))
            parameter.data = whole[id(parameter)]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)

    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=gathered_parameters)  # no module of its own there either
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    assert same(take_snapshot(model), expected)
    assert set(gathered) == {id(p) for n, p in model.named_parameters() if "lora_" in n}

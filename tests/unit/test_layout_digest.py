"""What the trainer says the ranks of a server must hold, against plain slicing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSnapshot, AdapterSpec, take_snapshot
from loraflow.digest import Agreements, SlotDigest
from loraflow.errors import CapabilityError
from loraflow.layout import ServingCopy, SlotLayout, lora_shapes, module_of
from loraflow.plugin_answers import ServedDigest
from loraflow_server.rects import Rect
from tests.helpers.tiny import make_tiny_model, peft_model, randomize
from tests.unit.test_digest_checksum import bits, plain_checksum


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=1)


@pytest.fixture(scope="module")
def snapshot(base: Path) -> AdapterSnapshot:
    return take_snapshot(peft_model(base, r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=True))


def two_ranks(spec: AdapterSpec, dtype: str = "bfloat16") -> SlotLayout:
    """Rank 0 has the upper half of every B and the left half of every A, rank 1 the rest."""
    shapes = lora_shapes(spec)
    ranks: list[list[list[int]]] = [[], []]
    for index, (name, (rows, cols)) in enumerate(shapes.items()):
        for rank in (0, 1):
            half = (
                (rank * rows // 2, 0, rows // 2, cols) if "lora_B" in name else (0, rank * cols // 2, rows, cols // 2)
            )
            ranks[rank].append(Rect(index, *half).to_list())
    return SlotLayout.from_json({"layout_id": "x", "dtype": dtype, "tensors": shapes, "ranks": ranks, "engines": 2})


def answer(sums: Any, dirty: Any = None, **more: Any) -> ServedDigest:
    engines = [[{"sums": s, "dirty": (dirty or [[], []])[i]} for i, s in enumerate(sums)] for _ in range(2)]
    body = {"name": "n", "path": "p", "lora_int_id": 1, "engines": engines, "weights_touched": False}
    return ServedDigest.from_json({**body, "phases_ms": {"worker": 1.0}, **more})


def test_modules_are_named_as_the_base_names_them() -> None:
    assert module_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight") == "model.layers.0.mlp.up_proj"
    assert module_of("base_model.model.model.embed_tokens.lora_embedding_B") == "model.embed_tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_serving_copy_rounds_as_vllm_does(snapshot: AdapterSnapshot, dtype: torch.dtype) -> None:
    copy = ServingCopy(snapshot.spec, dtype)
    copy.fill(snapshot)
    for name, tensor in snapshot.tensors.items():
        wanted = tensor.to(dtype)
        if "lora_B" in name:
            wanted = wanted.clone()
            wanted *= 6 / 4**0.5  # LoRALayerWeights.optimize: in place, in the slots' dtype
        assert torch.equal(copy.tensors[name], wanted), name
    assert copy.flat.numel() == sum(t.numel() for t in snapshot.tensors.values())


def test_unscaled_copy(snapshot: AdapterSnapshot) -> None:
    copy = ServingCopy(snapshot.spec, torch.float32, scaled=False)
    copy.fill(snapshot)
    assert torch.equal(copy.flat, snapshot.flat)


def test_other_tensors_have_no_slot(base: Path) -> None:
    spec = AdapterSpec.from_model(peft_model(base, use_dora=True, target_modules=["q_proj"]))
    with pytest.raises(CapabilityError, match="no place in a LoRA slot"):
        lora_shapes(spec)


def test_expected_sums_are_those_of_the_pieces(snapshot: AdapterSnapshot) -> None:
    layout = two_ranks(snapshot.spec)
    copy = ServingCopy(snapshot.spec, layout.dtype)
    sums = SlotDigest(layout, copy).expected(snapshot)
    tensors = list(copy.tensors.values())
    for rank in (0, 1):
        row, wanted = 0, []
        for rect in layout.ranks[rank]:
            piece = tensors[rect.tensor][rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
            wanted.append(plain_checksum(bits(piece), row))
            row += -(-len(bits(piece)) // 4096)
        assert list(sums[rank]) == wanted


def test_the_proof_names_what_differs(snapshot: AdapterSnapshot) -> None:
    layout = two_ranks(snapshot.spec)
    digest = SlotDigest(layout, ServingCopy(snapshot.spec, layout.dtype))
    expected = digest.expected(snapshot)
    assert digest.compare(expected, answer(expected)).passed

    wrong = [list(sums) for sums in expected]
    wrong[1][2] += 1
    proof = digest.compare(expected, answer(wrong))
    name = list(layout.tensors)[layout.ranks[1][2].tensor]
    assert not proof.passed
    assert f"{name} (engine 0 rank 1)" in proof.detail
    assert f"{name} (engine 1 rank 1)" in proof.detail

    assert "layers.0.o_proj" in digest.compare(expected, answer(expected, [["layers.0.o_proj"], []])).detail
    assert "not proven pristine" in digest.compare(expected, answer(expected, weights_touched=True)).detail
    assert not digest.compare(expected, answer([expected[0]])).passed
    assert not digest.compare(expected, answer([expected[0], expected[1][:-1]])).passed


def test_a_missing_engine_is_no_proof(snapshot: AdapterSnapshot) -> None:
    layout = two_ranks(snapshot.spec)
    digest = SlotDigest(layout, ServingCopy(snapshot.spec, layout.dtype))
    expected = digest.expected(snapshot)
    served = answer(expected)
    one = ServedDigest(served.name, served.path, 1, served.sums[:1], served.dirty[:1], False, 0.0)
    assert "1 engines answered, 2 expected" in digest.compare(expected, one).detail


class Server:
    url = "http://one"
    load_timeout = 1.0

    def __init__(self, spec: AdapterSpec) -> None:
        shapes = lora_shapes(spec)
        rects = [Rect(i, 0, 0, *shape).to_list() for i, shape in enumerate(shapes.values())]
        self.layout = {"layout_id": "x", "dtype": "float32", "tensors": shapes, "ranks": [rects], "engines": 1}
        self.asked = 0

    def request(self, method: str, path: str, **more: Any) -> Any:
        assert path == "/loraflow/v1/layout"
        self.asked += 1
        return self.layout


def test_agreements_ask_once_and_compute_once_per_snapshot(base: Path) -> None:
    model = peft_model(base, r=2, target_modules=["v_proj"])
    first = take_snapshot(model)
    server: Any = Server(first.spec)
    agreements = Agreements(first.spec)
    digest = agreements.agree(server)
    assert agreements.agree(server) is digest
    assert server.asked == 1
    sums = agreements.expected(digest, first)
    assert agreements.expected(digest, first) is sums
    randomize(model, seed=9)
    assert agreements.expected(digest, take_snapshot(model)) != sums

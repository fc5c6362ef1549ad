"""What travels and how it is cut: against vLLM's own packing, its own message classes, and its own fused layers."""

from __future__ import annotations

import base64
import importlib
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraflow.errors import CapabilityError
from loraflow.merge import WireTensor
from loraflow.transports.requirements import check_alignment
from loraflow.transports.wire import (
    fill,
    init_info,
    plan_buckets,
    reload_groups,
    start_body,
    touched_tensors,
    update_info,
    with_siblings,
)

LAYER = "model.layers.7"
QWEN2 = [
    "model.embed_tokens.weight",
    *(f"{LAYER}.self_attn.{p}_proj.{leaf}" for p in "qkv" for leaf in ("weight", "bias")),
    f"{LAYER}.self_attn.o_proj.weight",
    *(f"{LAYER}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    f"{LAYER}.input_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
]

tensors = st.lists(
    st.builds(
        lambda dtype, rows, columns: WireTensor("", dtype, (rows, columns)),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.integers(1, 9),
        st.integers(1, 7),
    ),
    min_size=1,
    max_size=30,
).map(lambda found: [WireTensor(f"t{i}", t.dtype, t.shape) for i, t in enumerate(found)])


def values(announced: list[WireTensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=generator).to(t.dtype) for t in announced]


class TestSiblings:
    def test_fused_projections_travel_together(self) -> None:
        sent = with_siblings([f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mlp.up_proj.weight"], QWEN2)
        qkv = [name for name in QWEN2 if any(f".{p}_proj." in name for p in "qkv")]
        assert list(sent) == [*qkv, f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"]

    def test_what_stands_alone_travels_alone(self) -> None:
        for name in ("model.embed_tokens.weight", f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"):
            assert with_siblings([name], QWEN2) == (name,)

    def test_all_experts_of_a_layer_travel_together(self) -> None:
        moe = [f"{LAYER}.mlp.experts.{e}.{p}_proj.weight" for e in range(3) for p in ("gate", "up", "down")]
        moe.append(f"{LAYER}.mlp.gate.weight")
        assert set(with_siblings([f"{LAYER}.mlp.experts.1.up_proj.weight"], [*QWEN2[:1], *moe])) == set(moe)

    def test_an_unknown_block_travels_whole(self) -> None:
        mla = [f"{LAYER}.self_attn.{p}.weight" for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")]
        assert with_siblings(mla[3:], mla) == tuple(mla)

    def test_groups_share_their_members(self) -> None:
        groups = reload_groups(QWEN2)
        assert list(groups) != []
        for name, members in groups.items():
            assert name in members
            assert all(groups[other] == members for other in members)

    def test_served_names_of_touched_blocks(self) -> None:
        served = [
            "dp0:pp0:pcp0:tp1:model.layers.7.self_attn.qkv_proj.base_layer.weight",
            "dp0:pp0:pcp0:tp1:model.layers.17.self_attn.qkv_proj.weight",
            "dp0:pp0:pcp0:tp1:model.layers.7.mlp.gate_up_proj.weight",
            "dp0:pp0:pcp0:tp1:model.embed_tokens.weight",
        ]
        assert touched_tensors(served, [f"{LAYER}.self_attn.q_proj.weight"]) == {served[0]}
        assert touched_tensors(served, ["model.embed_tokens.weight"]) == {served[3]}


class TestPacking:
    @settings(deadline=None)  # the first example pays for importing vLLM
    @given(tensors, st.integers(1, 400))
    def test_buckets_are_vllms(self, announced: list[WireTensor], size: int) -> None:
        """Cut and bytes of every bucket equal what vLLM's `pack_tensors` makes of the same stream."""
        pack = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor").pack_tensors
        made = values(announced)
        stream: Any = iter(zip((t.name for t in announced), made, strict=True))
        supply = iter(made)
        for bucket in plan_buckets(announced, size):
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            for slot in bucket.slots:
                fill(buffer, slot, next(supply))
            chunk = _pack_quietly(pack, stream, size)
            assert chunk.names == [slot.tensor.name for slot in bucket.slots]
            assert torch.equal(buffer, chunk.packed_tensor)
        assert next(stream, None) is None

    @settings(deadline=None)  # the first example pays for importing vLLM
    @given(tensors, st.integers(1, 400))
    def test_buckets_are_the_gloo_engines(self, announced: list[WireTensor], size: int) -> None:
        engine = importlib.import_module("loraflow_server.gloo_engine")
        body = update_info("gloo", (0, 32), announced, bucket_bytes=size)
        made = values(announced)
        theirs = list(engine._buckets(engine.GlooUpdateInfo(update=1, **body), size))
        supply, found = iter(made), []
        for bucket, slots in zip(plan_buckets(announced, size), theirs, strict=True):
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            for slot in bucket.slots:
                fill(buffer, slot, next(supply))
            found += [(slot.name, engine._unpack(buffer, slot)) for slot in slots]
        assert [name for name, _ in found] == [t.name for t in announced]
        assert all(torch.equal(tensor, value) for (_, tensor), value in zip(found, made, strict=True))

    @settings(deadline=None)  # the first example pays for importing vLLM
    @given(tensors, st.integers(1, 400))
    def test_capped_buckets_fit(self, announced: list[WireTensor], size: int) -> None:
        limit = max(size, *(t.nbytes for t in announced))
        buckets = plan_buckets(announced, limit, capped=True)
        assert all(bucket.nbytes <= limit for bucket in buckets)
        assert [slot.tensor for bucket in buckets for slot in bucket.slots] == announced


def test_unaligned_tensors_are_refused_where_vllm_receives() -> None:
    odd = WireTensor("odd", torch.bfloat16, (3,))
    wide = WireTensor("wide", torch.float32, (2,))
    check_alignment(plan_buckets([wide, odd], 100))
    with pytest.raises(CapabilityError, match="wide"):
        check_alignment(plan_buckets([odd, wide], 100))


def _pack_quietly(pack: Any, stream: Any, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tensor larger than a bucket
        return pack(stream, lambda item: item[1], size)


class TestDialects:
    """Bodies are taken by the message classes of the vLLM that is installed; older ones as written down in FACTS."""

    announced = (WireTensor("a", torch.bfloat16, (2, 3)), WireTensor("b", torch.float32, (4,)))

    def handshake(self, carrier: str, version: tuple[int, ...]) -> dict[str, Any]:
        return init_info(carrier, version, address="10.0.0.1", port=5, world_size=3, bucket_bytes=77, timeout=9.0)

    def test_nccl_now(self) -> None:
        classes = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
        info = classes.NCCLWeightTransferInitInfo(**self.handshake("nccl", (0, 32, 0)))
        assert (info.master_address, info.master_port, info.rank_offset, info.world_size) == ("10.0.0.1", 5, 1, 3)
        assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (True, 77, 2)
        update = classes.NCCLWeightTransferUpdateInfo(
            **update_info("nccl", (0, 32, 0), self.announced, bucket_bytes=77)
        )
        assert (update.names, update.dtype_names, update.shapes) == (["a", "b"], ["bfloat16", "float32"], [[2, 3], [4]])

    def test_nccl_before_028(self) -> None:
        assert self.handshake("nccl", (0, 27, 1)).keys() == {
            "master_address",
            "master_port",
            "rank_offset",
            "world_size",
        }
        body = update_info("nccl", (0, 27, 1), self.announced, bucket_bytes=77)
        assert (body["packed"], body["packed_buffer_size_bytes"], body["packed_num_buffers"]) == (True, 77, 2)

    def test_ipc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        classes = importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
        monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        assert classes.IPCWeightTransferInitInfo(**self.handshake("ipc", (0, 32))).packed
        body = update_info("ipc", (0, 32), self.announced, bucket_bytes=77)
        handle = base64.b64encode(pickle.dumps({"uuid": ()})).decode()
        update = classes.IPCWeightTransferUpdateInfo(**body, ipc_handles_pickled=handle)
        assert update.tensor_sizes == [12, 16]
        assert update_info("ipc", (0, 27), self.announced, bucket_bytes=77)["packed"] is True
        assert self.handshake("ipc", (0, 27)) == {}

    def test_gloo(self) -> None:
        engine = importlib.import_module("loraflow_server.gloo_engine")
        info = engine.GlooInitInfo(**self.handshake("gloo", (0, 32)))
        assert (info.timeout, info.packed_buffer_size_bytes) == (9.0, 77)
        with pytest.raises(ValueError, match="differ in length"):
            engine.GlooUpdateInfo(1, ["a"], ["float32"], [])

    def test_start(self) -> None:
        assert start_body((0, 24, 0)) == {"is_checkpoint_format": True}
        assert start_body((0, 32, 0)) == {}

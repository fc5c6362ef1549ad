"""Buckets written straight to where their weights are served: sharded, packed, cast, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from loraflow.merge import WireTensor
from loraflow.transports.pipeline import buckets_of
from loraflow.transports.wire import Bucket, fill
from loraflow_server import core
from loraflow_server.checks import check_incoming
from loraflow_server.collective import Arrival, GlooLine, Receiving
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.receive import Incoming, line_of, receive
from loraflow_server.served import ServedWeights
from loraflow_server.settings import Limits
from tests.unit.test_hold import Core, engine_of
from tests.unit.test_plugin_doors import WEIRD
from tests.unit.test_weight_digest import SHAPES, Rank

CPU = torch.device("cpu")
NAMES = ("head", "q", "norm", "o", "k")  # not the layout's order


class Played(Receiving):
    """A line on which packed buckets lie ready."""

    device = CPU

    def __init__(self, pieces: Sequence[torch.Tensor], breaks_at: int | None = None) -> None:
        self.ready, self.breaks_at, self.taken = list(pieces), breaks_at, 0

    def receive(self, buffer: torch.Tensor) -> Arrival:
        number, self.taken = self.taken, self.taken + 1

        def settle() -> None:
            if number == self.breaks_at:
                raise PluginError("broadcast_timeout", "not in time", status=504)
            buffer.copy_(self.ready[number])

        return SimpleNamespace(settle=settle)


def packed(dtype: torch.dtype, bucket_bytes: int) -> tuple[dict[str, torch.Tensor], list[Bucket], list[torch.Tensor]]:
    weights = {name: torch.randn(SHAPES[name]) for name in NAMES}
    buckets = buckets_of([WireTensor(name, dtype, SHAPES[name]) for name in NAMES], bucket_bytes)
    buffers = [torch.empty(bucket.nbytes, dtype=torch.uint8) for bucket in buckets]
    for bucket, buffer in zip(buckets, buffers, strict=True):
        for slot in bucket.slots:
            fill(buffer, slot, weights[slot.tensor.name])
    return weights, buckets, buffers


def incoming(dtype: torch.dtype, buckets: Sequence[Bucket]) -> Incoming:
    name = str(dtype).removeprefix("torch.")
    return Incoming("id", NAMES, [name] * len(NAMES), [len(bucket.slots) for bucket in buckets])


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_each_rank_has_what_its_own_loaders_would_have_loaded(
    served: torch.dtype, wire: torch.dtype, bucket_bytes: int
) -> None:
    weights, buckets, buffers = packed(wire, bucket_bytes)
    for number in (0, 1):
        rank, wanted = Rank(number, served), Rank(number, served)
        receive(Played(buffers), incoming(wire, buckets), ServedWeights(rank, dict(sorted(SHAPES.items()))), rank)
        wanted.load_weights([(name, weight.to(wire)) for name, weight in weights.items()])
        for (name, found), (_, right) in zip(rank.named_parameters(), wanted.named_parameters(), strict=True):
            assert torch.equal(found, right), name


def test_a_bucket_that_cannot_be_written_leaves_none_on_the_line() -> None:
    rank = Rank(0, torch.float32)
    served = ServedWeights(rank, dict(sorted(SHAPES.items())))
    _, buckets, buffers = packed(torch.float32, 1)
    rank.qk.data = torch.zeros(5, 8)
    line = Played(buffers)
    honest = served.places

    def places(model: Any) -> Any:
        found = honest(model)
        del found["q"]
        return found

    served.places = places  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="q"):
        receive(line, incoming(torch.float32, buckets), served, rank)
    assert line.taken == len(buckets)
    assert torch.equal(rank.norm, torch.zeros(8))  # nothing is written behind the failure


def test_a_bucket_that_does_not_come_ends_it() -> None:
    rank = Rank(0, torch.float32)
    _, buckets, buffers = packed(torch.float32, 1)
    served = ServedWeights(rank, dict(sorted(SHAPES.items())))
    with pytest.raises(PluginError, match="not in time"):
        receive(Played(buffers, breaks_at=2), incoming(torch.float32, buckets), served, rank)


def test_a_weight_of_no_layout_is_refused_before_anything_is_read() -> None:
    rank = Rank(0, torch.float32)
    line = Played([])
    other = Incoming("id", ["x"], ["float32"], [1])
    with pytest.raises(PluginError, match="x is not of the layout"):
        receive(line, other, ServedWeights(rank, dict(sorted(SHAPES.items()))), rank)
    assert line.taken == 0


def test_a_gloo_line_waits_for_a_time_only() -> None:
    class Work:
        def wait(self, limit: Any) -> None:
            raise RuntimeError(f"Timed out waiting {limit.total_seconds()}s")

    class Broken:
        def wait(self, limit: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    group = SimpleNamespace(broadcast=lambda buffer, root: work)
    work: Any = Work()
    with pytest.raises(PluginError, match=r"within 0\.5 s") as late:
        GlooLine(group, 0.5).receive(torch.empty(0)).settle()
    assert late.value.code == "broadcast_timeout"
    work = Broken()
    with pytest.raises(PluginError, match="closed by peer") as broken:
        GlooLine(group, 0.5).receive(torch.empty(0)).settle()
    assert broken.value.code == "broadcast_failed"


def test_a_worker_in_no_group_says_so() -> None:
    with pytest.raises(PluginError, match="no broadcast group"):
        line_of(SimpleNamespace(process_group=None), CPU, 1.0)
    with pytest.raises(PluginError, match="no broadcast group"):
        line_of(None, CPU, 1.0)


class Receiving(Core):
    loraflow_receive = core.receive
    model_executor = SimpleNamespace(sleeping_tags=())


def take(engine: Engine) -> Any:
    return asyncio.run(engine.receive("v1", {"layout_id": "id"}, 1.0, 5.0))


@pytest.mark.parametrize("count", [1, 2])
def test_weights_are_named_once_every_engine_has_them(count: int) -> None:
    cores = [Receiving() for _ in range(count)]
    engine = engine_of(*cores)
    with pytest.raises(PluginError, match="hold requests"):
        take(engine)
    assert [one.label for one in cores] == ["default"] * count
    asyncio.run(engine.hold("v1.partial"))
    ranks, version = take(engine)
    assert ([[rank["sums"] for rank in found] for found in ranks], version) == ([[[3]]] * count, "v1")
    assert [one.label for one in cores] == ["v1"] * count


def test_a_rank_that_failed_leaves_the_weights_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Receiving()
    engine = engine_of(one)
    asyncio.run(engine.hold("v1.partial"))
    failed = {"error": {"code": "broadcast_timeout", "message": "not in time", "status": 504}}
    monkeypatch.setattr(one, "collective_rpc", lambda *_: [{"ok": {"sums": [3]}}, failed])
    with pytest.raises(PluginError, match="not in time") as caught:
        take(engine)
    assert caught.value.details["worker"] == "engine 0, rank 1"
    assert one.label == "v1.partial"
    one.model_executor = SimpleNamespace(sleeping_tags=("weights",))
    with pytest.raises(PluginError, match="sleeps"):
        take(engine)


BODY = {
    "layout_id": "l", "names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "buckets": [1, 1], "label": "v1",
    "timeout": 3,
}  # fmt: skip


def test_announcements_of_every_wrong_form_are_refused() -> None:
    found, label, timeout = check_incoming(BODY, Limits())
    assert (found, label, timeout) == ({k: BODY[k] for k in ("layout_id", "names", "dtypes", "buckets")}, "v1", 3.0)
    mapped = {"name": "loraflow-x", "first": 4}
    assert check_incoming({**BODY, "mapped": {**mapped, "more": 1}}, Limits())[0]["mapped"] == mapped
    wrong = [{**BODY, key: weird} for key in BODY for weird in WEIRD]
    wrong += [{k: v for k, v in BODY.items() if k != key} for key in BODY]
    wrong += [
        {**BODY, "names": ["a", "a"]},
        {**BODY, "dtypes": ["float32"]},
        {**BODY, "dtypes": ["float32", "int8"]},
        {**BODY, "buckets": [2, 0]},
        {**BODY, "buckets": [3]},
        {**BODY, "buckets": [True, True]},
        {**BODY, "timeout": 1e9},
        *({**BODY, "mapped": weird} for weird in WEIRD if weird is not None),
        *({**BODY, "mapped": {"name": "loraflow-x", "first": first}} for first in (-1, 1.0, True, "1", 1 << 62)),
        {**BODY, "mapped": {"first": 0}},
    ]
    for body in wrong:
        text = [key for key in ("layout_id", "label") if body.get(key) != BODY[key] and _is_text(body.get(key))]
        if text or body.get("timeout") == 1.5:  # some of the weird are texts and numbers after all
            check_incoming(body, Limits())
            continue
        with pytest.raises(PluginError):
            check_incoming(body, Limits())


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 128

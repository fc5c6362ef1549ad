"""The digest of merged weights without a server: packed, sharded and cast on one side, checksummed on both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loraflow.layout import dtype_of
from loraflow.merge import WireTensor
from loraflow.transports.weight_digest import WeightDigest, WeightLayout
from loraflow.transports.wire import Slot, fill
from loraflow_server.checksum import StreamSums, byte_checksum
from loraflow_server.errors import PluginError
from loraflow_server.served import ServedWeights

SHAPES = {"q": (6, 8), "k": (4, 8), "o": (5, 12), "norm": (8,), "head": (7, 8)}


class Rank(nn.Module):
    """One of two ranks: q and k packed and cut by rows, o cut by columns, the norm whole, head and embedding tied."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.number = number

        def make(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.qk, self.o, self.norm = make(5, 8), make(5, 6), make(8, dtype=torch.float32)
        self.head = self.embedding = make(7, 8)

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "q":
                self.qk.data[:3].copy_(weight.narrow(0, 3 * self.number, 3))
            elif name == "k":
                self.qk.data[3:].copy_(weight.narrow(0, 2 * self.number, 2))
            elif name == "o":
                self.o.data.copy_(weight.narrow(1, 6 * self.number, 6))
            else:
                getattr(self, name).data.copy_(weight)


class Site:
    """Two ranks, the layout that they answer, and an update that is on its way to them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.ranks = [Rank(number, dtype) for number in (0, 1)]
        shapes = dict(sorted(SHAPES.items()))
        self.served = [ServedWeights(rank, shapes) for rank in self.ranks]
        pieces = tuple(
            tuple(zip(served.rects, [dtype_of(name) for name in served.dtypes], strict=True)) for served in self.served
        )
        self.layout = WeightLayout("id", tuple(shapes), pieces, 1)
        self.digest = WeightDigest([self.layout], torch.device("cpu"))
        for name, shape in SHAPES.items():
            tensor = torch.randn(shape)
            wire = WireTensor(name, dtype, shape)
            placed = fill(torch.empty(wire.nbytes, dtype=torch.uint8), Slot(wire, 0), tensor)
            self.digest.see(name, placed)
            for rank in self.ranks:
                rank.load_weights([(name, placed)])

    def wrong(self) -> list[str]:
        sums = [served.sums(rank) for served, rank in zip(self.served, self.ranks, strict=True)]
        return self.digest.wrong(self.layout, [sums])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_is_what_is_served(dtype: torch.dtype) -> None:
    site = Site(dtype)
    assert {name for name in SHAPES if name in site.layout.names} == set(SHAPES)
    assert site.wrong() == []


@pytest.mark.parametrize(
    ("parameter", "row", "named"),
    [("qk", 1, "q"), ("qk", 4, "k"), ("o", 4, "o"), ("norm", 2, "norm"), ("embedding", 6, "head")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_bit_on_one_rank_is_named(rank: int, parameter: str, row: int, named: str) -> None:
    site = Site(torch.bfloat16)
    flat = getattr(site.ranks[rank], parameter).data[row].view(-1)
    flat.view(torch.uint8)[0] ^= 1
    assert site.wrong() == [f"{named} (engine 0 rank {rank})"]


def test_missing_engines_ranks_and_pieces_are_no_proof() -> None:
    site = Site(torch.float32)
    sums = [served.sums(rank) for served, rank in zip(site.served, site.ranks, strict=True)]
    assert site.digest.wrong(site.layout, [sums, sums]) != []
    assert site.digest.wrong(site.layout, []) != []
    assert site.digest.wrong(site.layout, [sums[:1]]) != []
    assert site.digest.wrong(site.layout, [[sums[0], sums[1][:-1]]]) != []


def test_a_weight_that_did_not_travel_is_no_proof() -> None:
    site = Site(torch.float32)
    digest = WeightDigest([site.layout], torch.device("cpu"))
    sums = [served.sums(rank) for served, rank in zip(site.served, site.ranks, strict=True)]
    assert len(digest.wrong(site.layout, [sums])) == 10


def test_the_next_update_starts_from_nothing() -> None:
    site = Site(torch.float32)
    assert site.wrong() == []
    site.digest.restart()
    assert len(site.wrong()) == 10, "nothing travelled since"
    site.digest.restart()
    tensor = torch.randn(SHAPES["o"])
    site.digest.see("o", tensor)
    for rank in site.ranks:
        rank.load_weights([("o", tensor)])
    left = site.wrong()
    assert left
    assert not any(found.startswith("o ") for found in left), "what travelled is proven"


def test_parameters_of_another_shape_are_refused() -> None:
    site = Site(torch.float32)
    site.ranks[0].o = nn.Parameter(torch.zeros(5, 7), requires_grad=False)
    with pytest.raises(PluginError, match="another layout"):
        site.served[0].sums(site.ranks[0])


def test_sums_of_a_stream_are_those_of_each_tensor() -> None:
    tensors = [
        torch.randn(1000, 333).bfloat16(),
        torch.randn(4096 * 5),
        torch.randn(7),
        torch.randn(2048, 1024).bfloat16().T,
        torch.randn(33, 5)[:, 1:3],
    ]
    stream = StreamSums([tensor.numel() * tensor.element_size() for tensor in tensors])
    for index in (3, 0, 4, 1, 2):
        stream.take(index, tensors[index], rows_at_once=3)
    assert stream.finish() == [byte_checksum(tensor) for tensor in tensors]
    with pytest.raises(ValueError, match="bytes"):
        stream.take(0, tensors[2])


def test_an_unaligned_place_gets_the_rounded_bytes() -> None:
    wire = WireTensor("w", torch.float32, (3, 2))
    buffer = torch.zeros(wire.nbytes + 2, dtype=torch.uint8)
    tensor = torch.randn(3, 2, dtype=torch.float64)
    placed = fill(buffer, Slot(wire, 2), tensor)
    assert torch.equal(placed, tensor.float())
    assert torch.equal(buffer[2:].clone().view(torch.float32).view(3, 2), tensor.float())

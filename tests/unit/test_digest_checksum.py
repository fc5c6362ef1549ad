"""The checksum against a version of it in plain Python integers, and what it must notice."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraflow_server.checksum import BLOCK, byte_checksum, checksums, plan_image

MASK = (1 << 64) - 1


def odd(position: int) -> int:
    """splitmix64 of a position, made odd: the published constants, in unbounded integers."""
    z = (position + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def plain_checksum(data: bytes, first_row: int = 0) -> int:
    data += bytes(-len(data) % 4)
    total = 0
    for index, word in enumerate(struct.unpack(f"<{len(data) // 4}i", data)):
        row, column = divmod(index, BLOCK)
        total += word * odd(column) * odd(BLOCK + first_row + row)
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_image_checksums_are_those_of_plain_integers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in [(3, 5), (1, 1), (40, 70), (2, 1024)]]
    plan = plan_image([t.numel() for t in tensors], dtype.itemsize)
    image = plan.empty_image(dtype)
    torch._foreach_copy_(plan.views(image, [t.shape for t in tensors]), tensors)
    row, wanted = 0, []
    for tensor in tensors:
        wanted.append(plain_checksum(bits(tensor), row))
        row += -(-len(bits(tensor)) // (4 * BLOCK))
    assert checksums(image, plan).tolist() == wanted


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=1, max_size=9000), st.integers(1, 3))
def test_byte_checksum_is_that_of_plain_integers(data: bytes, rows_at_once: int) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert byte_checksum(tensor, rows_at_once) == plain_checksum(data)


def test_byte_checksum_of_any_dtype_and_of_views() -> None:
    tensor = torch.randn(7, 33)
    assert byte_checksum(tensor.T) == plain_checksum(bits(tensor.T))
    assert byte_checksum(tensor.bfloat16()[:, 1:]) == plain_checksum(bits(tensor.bfloat16()[:, 1:].contiguous()))
    odd_offset = torch.arange(9, dtype=torch.int16)[1:]
    assert byte_checksum(odd_offset) == plain_checksum(bits(odd_offset.clone()))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2499), st.integers(0, 15))
def test_every_flipped_bit_is_seen(element: int, bit: int) -> None:
    tensor = torch.randn(50, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = byte_checksum(tensor)
    flip = 1 << bit if bit < 15 else -(1 << 15)
    tensor.view(torch.int16).view(-1)[element] ^= flip
    assert byte_checksum(tensor) != before


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4999), st.integers(0, 4999))
def test_exchanged_values_are_seen(first: int, second: int) -> None:
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    if tensor[first] == tensor[second]:
        return
    before = byte_checksum(tensor)
    tensor[[first, second]] = tensor[[second, first]]
    assert byte_checksum(tensor) != before


def test_shifted_and_negated_tensors_are_seen() -> None:
    tensor = torch.randn(64, 64)
    sums = {byte_checksum(t) for t in (tensor, tensor.roll(1, 0), tensor.roll(1, 1), -tensor, tensor.T, tensor.flip(0))}
    assert len(sums) == 6


def test_equal_tensors_at_different_places_have_different_sums() -> None:
    plan = plan_image([100, 100], 4)
    image = plan.empty_image(torch.float32)
    for view in plan.views(image, [(100,), (100,)]):
        view.copy_(torch.arange(100.0))
    first, second = checksums(image, plan).tolist()
    assert first != second


def test_an_empty_image_has_no_sums() -> None:
    plan = plan_image([], 2)
    assert checksums(plan.empty_image(torch.bfloat16), plan).tolist() == []

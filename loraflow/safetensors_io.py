"""The safetensors format, written down here to the byte, because it decides what a server may trust.

``N`` (8 bytes, little-endian) · ``N`` bytes of JSON · data. The JSON maps each tensor's name to ``{"dtype", "shape",
"data_offsets": [begin, end]}``, offsets counted from the start of the data; ``__metadata__`` maps strings to strings.
The ranges must cover the data exactly: no gap, no overlap, nothing after the last one. (huggingface/safetensors.)
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from loraflow.errors import AdapterError
from loraflow.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Header", "TensorInfo", "build_header", "read_header", "unique"]

MAX_HEADER_BYTES = 64 << 20
"""Largest header that is read; an adapter's is some hundred bytes per tensor."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its dtype, shape, and byte range ``[begin, end)`` in the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header: tensors in the order of their data, and where the data begins in the file, in bytes."""

    tensors: Mapping[str, TensorInfo]
    data_start: int


def build_header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """Length prefix and JSON for tensors of one ``dtype`` that follow each other in the order of ``shapes``.

    The JSON is padded with spaces to a multiple of 8 bytes, so that the data is aligned.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> Header:
    """Read and check the header of ``path``; sizes are bounded by the file's own size before anything is allocated.

    Raises:
        AdapterError: With problems ``truncated_file`` (the bytes do not add up), or ``missing_file``.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, f"it has {size} bytes, fewer than the length of a header takes")
            length = struct.unpack("<Q", prefix)[0]
            if length > size - 8:
                raise _damaged(path, f"the header needs {length} bytes, the file has {size - 8} after its length")
            if length > MAX_HEADER_BYTES:
                raise _damaged(path, f"a header of {length} bytes is larger than the {MAX_HEADER_BYTES} allowed")
            text = file.read(length)
    except FileNotFoundError as error:
        problem = Problem("missing_file", f"{path.name} is not there")
        raise AdapterError(f"cannot read {path}", [problem]) from error
    tensors = _parse(path, text)
    _check_ranges(path, tensors, size - 8 - length)
    return Header(tensors, 8 + length)


def _damaged(path: Path, why: str, tensor: str | None = None) -> AdapterError:
    return AdapterError(f"{path} is damaged", [Problem("truncated_file", why, tensor)], hint="write the adapter again")


def _parse(path: Path, text: bytes) -> dict[str, TensorInfo]:
    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    infos = {name: _tensor_info(path, name, entry) for name, entry in entries.items()}
    return dict(sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's ``pairs`` as a dictionary (``object_pairs_hook``); `ValueError` where a name stands twice."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"the name {name[:80]!r} stands twice")
        out[name] = value
    return out


def _tensor_info(path: Path, name: str, entry: object) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _damaged(path, "its entry is not an object", name)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(path, f"unknown dtype {dtype!r}", name)
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _damaged(path, f"shape {shape!r} and data_offsets {offsets!r} must be non-negative whole numbers", name)
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _damaged(path, f"{end - begin} bytes for shape {tuple(shape)} of {dtype}", name)
    return TensorInfo(DTYPES[dtype], tuple(shape), begin, end)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _check_ranges(path: Path, tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    offset = 0
    for name, info in tensors.items():
        if info.begin != offset:
            kind = "overlaps the tensor before it" if info.begin < offset else "leaves a gap before it"
            raise _damaged(path, f"its data [{info.begin}, {info.end}) {kind}", name)
        offset = info.end
    if offset != data_bytes:
        raise _damaged(path, f"the tensors need {offset} bytes of data, the file has {data_bytes}")

"""Adapter folders made to hurt: each is refused with a 4xx before the engine sees it, in little memory."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from loraflow_server.settings import Limits, Settings
from tests.attacks.plugin_app import attackable, folder_of

GOOD = {"a.lora_A.weight": torch.ones(2, 8), "a.lora_B.weight": torch.ones(8, 2)}


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def post(root: Path, folder: Path, name: str = "run-v1", **more: Any) -> tuple[int, dict[str, Any], list[str]]:
    client, engine = attackable(Settings(roots=(root.resolve(),)))
    answer = client.post("/loraflow/v1/adapters", json={"name": name, "path": str(folder), **more})
    return answer.status_code, answer.json(), engine.added


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path)


def test_a_good_folder_is_loaded(tmp_path: Path, folder: Path) -> None:
    save_file(GOOD, folder / "adapter_model.safetensors")
    status, body, added = post(tmp_path, folder)
    assert (status, body["name"], added) == (200, "run-v1", [str(folder.resolve())])


HEADERS: dict[str, Callable[[], bytes]] = {
    "header_of_exabytes": lambda: struct.pack("<Q", 1 << 60),
    "header_of_all_ones": lambda: b"\xff" * 8,
    "header_beyond_the_file": lambda: raw({}, length=1 << 20),
    "truncated_length": lambda: b"\x01\x02",
    "empty_file": lambda: b"",
    "no_json": lambda: raw(b"{nonsense"),
    "a_list": lambda: raw([1, 2]),
    "deep_nesting": lambda: raw(b'{"a":' * 200_000),
    "deep_lists": lambda: raw(b'{"a":' + b"[" * 500_000),
    "no_tensors": lambda: raw({}),
    "only_metadata": lambda: raw({"__metadata__": {"a": "b"}}),
    "metadata_of_numbers": lambda: raw({"__metadata__": {"a": 1}, "t": entry()}, bytes(8)),
    "negative_offsets": lambda: raw({"t": entry(offsets=(-8, 0))}, bytes(8)),
    "reversed_offsets": lambda: raw({"t": entry(offsets=(8, 0))}, bytes(8)),
    "overlapping": lambda: raw({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the_same_bytes_twice": lambda: raw({"a": entry(), "b": entry()}, bytes(8)),
    "a_gap": lambda: raw({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "beyond_the_end": lambda: raw({"a": entry(shape=(1 << 28,), offsets=(0, 1 << 30))}, bytes(8)),
    "bytes_behind": lambda: raw({"a": entry()}, bytes(9)),
    "truncated_data": lambda: raw({"a": entry()}, bytes(7)),
    "offsets_unlike_shape": lambda: raw({"a": entry(shape=(3,))}, bytes(8)),
    "huge_shape": lambda: raw({"a": entry(shape=(1 << 62, 4))}, bytes(8)),
    "negative_shape": lambda: raw({"a": entry(shape=(-1, -2))}, bytes(8)),
    "overflowing_shape": lambda: raw({"a": entry(shape=(1 << 33, 1 << 31), offsets=(0, 0))}),
    "shape_of_floats": lambda: raw({"a": entry(shape=(2.0,))}, bytes(8)),
    "shape_of_booleans": lambda: raw({"a": entry(shape=(True,), offsets=(0, 4))}, bytes(4)),
    "five_dimensions": lambda: raw({"a": entry(shape=(1, 1, 1, 1, 2))}, bytes(8)),
    "offsets_of_strings": lambda: raw({"a": entry(offsets=("0", "8"))}, bytes(8)),
    "unknown_dtype": lambda: raw({"a": entry(dtype="PICKLE")}, bytes(8)),
    "wide_dtype": lambda: raw({"a": entry(dtype="I64", shape=(1,))}, bytes(8)),
    "missing_field": lambda: raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "another_field": lambda: raw({"a": {**entry(), "__reduce__": "os.system"}}, bytes(8)),
    "the_same_name_twice": lambda: raw(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "name_with_newline": lambda: raw({"a\nb": entry()}, bytes(8)),
    "name_with_null": lambda: raw({"a\0b": entry()}, bytes(8)),
    "name_like_a_path": lambda: raw({"../../a": entry()}, bytes(8)),
    "name_of_a_megabyte": lambda: raw({"a" * (1 << 20): entry()}, bytes(8)),
    "not_a_number": lambda: raw(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', bytes(8)),
    "a_pickle": lambda: pickle.dumps({"a": torch.ones(2)}),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_weights_files_are_refused(tmp_path: Path, folder: Path, attack: str) -> None:
    (folder / "adapter_model.safetensors").write_bytes(HEADERS[attack]())
    status, body, added = post(tmp_path, folder)
    assert status == 400, body
    assert body["error"]["code"] == "bad_file"
    assert len(body["error"]["message"]) < 1000
    assert added == []


def test_a_million_tensors_are_refused_without_being_read(tmp_path: Path, folder: Path) -> None:
    tiny = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000))
    (folder / "adapter_model.safetensors").write_bytes(raw(b"{" + tiny.encode() + b"}"))
    del tiny
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    status, _, added = post(tmp_path, folder)
    assert (status, added) == (400, [])  # its header is longer than any adapter's
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert time.perf_counter() - start < 5


def test_too_many_tensors_are_counted_before_they_are_parsed(tmp_path: Path, folder: Path) -> None:
    many = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1 << 16))
    more = many + ',"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    (folder / "adapter_model.safetensors").write_bytes(raw(b"{" + more.encode() + b"}"))
    status, body, added = post(tmp_path, folder)
    assert (status, body["error"]["code"], added) == (413, "too_large", [])


def test_renamed_pickles_are_refused(tmp_path: Path, folder: Path) -> None:
    torch.save(GOOD, folder / "adapter_model.safetensors")
    assert post(tmp_path, folder)[0] == 400
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    status, body, added = post(tmp_path, folder)
    assert (status, added) == (400, [])
    assert "pickled" in body["error"]["message"]


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b'{"r": 1, "r": 2}', b"[" * 100_000, b"\xff\xfe"])
def test_configs_are_refused(tmp_path: Path, folder: Path, config: bytes) -> None:
    save_file(GOOD, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(config)
    status, _, added = post(tmp_path, folder)
    assert (status, added) == (400, [])


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path, folder: Path) -> None:
    save_file(GOOD, folder / "adapter_model.safetensors")
    with (folder / "adapter_config.json").open("wb") as file:
        file.truncate(Limits().config + 1)
    assert post(tmp_path, folder)[0] == 413


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device", "socket"])
def test_files_that_are_none(tmp_path: Path, folder: Path, name: str, kind: str) -> None:
    save_file(GOOD, folder / "adapter_model.safetensors")
    path = folder / name
    kept = tmp_path / "kept"
    path.rename(kept)
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "fifo":
        os.mkfifo(path)  # opening it for reading would wait for ever
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mknod(path, 0o600 | 0o140000)
    status, _, added = post(tmp_path, folder)
    assert (status, added) == (400, [])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_single_change_of_a_header_is_taken_for_another_adapter(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever changes in a header, the file is refused, or what it says still fits its bytes."""
    from loraflow_server.checks import check_header
    from loraflow_server.errors import PluginError

    path = tmp_path / "base.safetensors"
    if not path.exists():
        save_file(GOOD, path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    changed = tmp_path / "changed.safetensors"
    changed.write_bytes(content)
    with changed.open("rb") as file, contextlib.suppress(PluginError):
        tensors = check_header(file, len(content), Limits())
        claimed = sum(torch.Size(shape).numel() * (4 if dtype == "F32" else 2) for dtype, shape in tensors.values())
        assert claimed == len(content) - 8 - int.from_bytes(content[:8], "little")

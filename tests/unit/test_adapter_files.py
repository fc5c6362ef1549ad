"""The safetensors writer and reader: what they write others read, and what is damaged is refused."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from loraflow.adapter import AdapterSnapshot, AdapterSpec, read_adapter, write_adapter
from loraflow.adapter_files import CONFIG_FILE, TENSOR_FILE, read_config
from loraflow.errors import AdapterError
from loraflow.safetensors_io import MAX_HEADER_BYTES, build_header, read_header

if TYPE_CHECKING:
    from pathlib import Path

names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda n: n != "__metadata__"
)
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def snapshot_of(tensors: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> AdapterSnapshot:
    ordered = {name: tensors[name] for name in sorted(tensors)}
    sizes = [int(torch.tensor(shape).prod()) if shape else 1 for shape in ordered.values()]
    flat = torch.randn(sum(sizes)).to(dtype)
    views = {n: part.view(s) for (n, s), part in zip(ordered.items(), flat.split(sizes), strict=True)}
    return AdapterSnapshot(AdapterSpec({"r": 1}, ordered, frozenset(), 1, {}), flat, views)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(names, shapes, min_size=1, max_size=6), dtypes)
def test_others_read_what_we_write(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    folder = tmp_path_factory.mktemp("a")
    snapshot = snapshot_of(tensors, dtype)
    write_adapter(snapshot, folder, fsync=False)
    read = load_file(folder / TENSOR_FILE)
    assert read.keys() == snapshot.tensors.keys()
    assert all(read[n].dtype is dtype and torch.equal(read[n], t) for n, t in snapshot.tensors.items())
    with safe_open(folder / TENSOR_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert read_header(folder / TENSOR_FILE).data_start % 8 == 0
    assert read_adapter(folder).digest == snapshot.digest


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(names, shapes, min_size=1, max_size=6), st.lists(dtypes, min_size=6, max_size=6))
def test_we_read_what_others_write(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[int, ...]], kinds: list[torch.dtype]
) -> None:
    folder = tmp_path_factory.mktemp("a")
    values = {n: torch.randn(s).to(d) for (n, s), d in zip(tensors.items(), kinds, strict=False)}
    save_file(values, folder / TENSOR_FILE)
    (folder / CONFIG_FILE).write_text("{}")
    read = read_adapter(folder)
    assert list(read.tensors) == sorted(values)
    assert all(torch.equal(read.tensors[n].float(), t.float()) for n, t in values.items())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_cut_or_changed_file_never_passes_as_another_layout(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any byte of the header changed, any length cut: refused, or read as safetensors itself reads it."""
    folder = tmp_path_factory.mktemp("a")
    write_adapter(snapshot_of({"a": (2, 3), "b": (4,)}), folder, fsync=False)
    file = folder / TENSOR_FILE
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, read_header(file).data_start - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        header = read_header(file)
    except AdapterError:
        return
    assert {n: tuple(t.shape) for n, t in load_file(file).items()} == {n: i.shape for n, i in header.tensors.items()}


def entry(shape: Any = (2,), begin: Any = 0, end: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS: dict[str, Any] = {
    "overlap": {"a": entry(), "b": entry(begin=4, end=12)},
    "gap": {"a": entry(), "b": entry(begin=12, end=20)},
    "gap at the start": {"a": entry(begin=8, end=16)},
    "negative offset": {"a": entry(begin=-8, end=0)},
    "end before begin": {"a": entry(begin=8, end=0)},
    "beyond the file": {"a": entry(shape=(1 << 40,), end=4 << 40)},
    "more bytes than the shape needs": {"a": entry(shape=(1,))},
    "negative shape": {"a": entry(shape=(-2,))},
    "fractional shape": {"a": entry(shape=(2.0,))},
    "flag in the shape": {"a": entry(shape=(True, 2))},
    "unknown dtype": {"a": entry(dtype="F33")},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "three offsets": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}},
    "entry is a list": {"a": [1, 2]},
    "no object": [1, 2],
}


@pytest.mark.parametrize("kind", HEADERS)
def test_bad_headers(kind: str, tmp_path: Path) -> None:
    text = json.dumps(HEADERS[kind]).encode()
    (tmp_path / TENSOR_FILE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(AdapterError) as caught:
        read_header(tmp_path / TENSOR_FILE)
    assert caught.value.problems[0].code == "truncated_file"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"{}" + b"trailing",
        struct.pack("<Q", 4) + b"\xff\xfe{}",
        struct.pack("<Q", 21) + b'{"a":{},"a":{}}      ',
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
    ids=["empty", "short", "huge-header", "trailing", "not-utf8", "name-twice", "deep"],
)
def test_bad_bytes(content: bytes, tmp_path: Path) -> None:
    (tmp_path / TENSOR_FILE).write_bytes(content)
    with pytest.raises(AdapterError) as caught:
        read_header(tmp_path / TENSOR_FILE)
    assert caught.value.problems[0].code == "truncated_file"


def test_a_header_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / TENSOR_FILE).open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 1024)  # sparse
    with pytest.raises(AdapterError, match="larger than"):
        read_header(tmp_path / TENSOR_FILE)


def test_every_tensor_lies_where_the_header_says_whatever_the_order_of_the_shapes(tmp_path: Path) -> None:
    shapes = {"b.lora_B.weight": (3, 2), "a.lora_A.weight": (2, 4)}  # not sorted, as the values are
    flat = torch.arange(14.0)
    tensors = {"a.lora_A.weight": flat[:8].view(2, 4), "b.lora_B.weight": flat[8:].view(3, 2)}
    spec = AdapterSpec({"r": 2}, shapes, frozenset(), 2, {})
    write_adapter(AdapterSnapshot(spec, flat, tensors), tmp_path)
    found = load_file(tmp_path / TENSOR_FILE)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_version_is_never_written_over(tmp_path: Path) -> None:
    snapshot = snapshot_of({"a": (2,)})
    write_adapter(snapshot, tmp_path)
    with pytest.raises(FileExistsError):
        write_adapter(snapshot, tmp_path)


def test_pickles_are_refused_unread(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (tmp_path.joinpath("exploded").touch, ())

    torch.save({"a": Bomb()}, tmp_path / "adapter_model.bin")
    (tmp_path / CONFIG_FILE).write_text("{}")
    with pytest.raises(AdapterError, match="pickle") as caught:
        read_adapter(tmp_path)
    assert caught.value.problems[0].code == "missing_file"
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "missing_file"),
        ("{", "bad_config"),
        ("[]", "bad_config"),
        ("\xff", "bad_config"),
        ("[" * 99999, "bad_config"),
    ],
    ids=["missing", "cut", "list", "bytes", "deep"],
)
def test_bad_config_files(text: str | None, code: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / CONFIG_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(AdapterError) as caught:
        read_config(tmp_path)
    assert caught.value.problems[0].code == code


def test_header_bytes() -> None:
    """The format to the byte, written out by hand."""
    header = build_header({"a": (1, 2), "é": (3,)}, torch.bfloat16)
    text = (
        '{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},'
        '"é":{"dtype":"BF16","shape":[3],"data_offsets":[4,10]}}'
    ).encode()
    padded = text + b" " * ((8 - len(text) % 8) % 8)
    assert header == len(padded).to_bytes(8, "little") + padded

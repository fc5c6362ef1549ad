"""An adapter on disk: ``adapter_model.safetensors`` and ``adapter_config.json``, as vLLM and PEFT read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loraflow.errors import AdapterError
from loraflow.problems import Problem
from loraflow.safetensors_io import read_header, unique

if TYPE_CHECKING:
    from loraflow.adapter import AdapterSnapshot

__all__ = [
    "CONFIG_FILE",
    "TENSOR_FILE",
    "adapter_files",
    "read_base_config",
    "read_config",
    "read_folder",
    "require_tensor_file",
    "write_adapter",
]

TENSOR_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_MAX_CONFIG_BYTES = 8 << 20


def write_adapter(snapshot: AdapterSnapshot, folder: str | Path, *, fsync: bool = True) -> None:
    """Write ``snapshot`` into ``folder``, which exists and holds neither file.

    The tensor file is one write of its header and one of the snapshot's bytes: they are laid out alike. With ``fsync``
    both files are on the disk when this returns; the folder's own entry is the caller's.

    Raises:
        OSError: The disk is full, or a file is there already (a version is never overwritten).
    """
    for name, parts in adapter_files(snapshot).items():
        _write(Path(folder) / name, parts, fsync)


def adapter_files(snapshot: AdapterSnapshot) -> dict[str, list[bytes | memoryview]]:
    """The files of ``snapshot``: name -> parts in order. The tensors are the snapshot's own host buffer, not a copy."""
    header, config = snapshot.spec.file_heads(snapshot.dtype)
    data = snapshot.host().view(torch.uint8).numpy().data
    return {TENSOR_FILE: [header, data], CONFIG_FILE: [config]}


def _write(path: Path, parts: list[bytes | memoryview], fsync: bool) -> None:
    with path.open("xb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]
        if fsync:
            os.fsync(file.fileno())


def read_config(folder: str | Path) -> dict[str, Any]:
    """``adapter_config.json`` of ``folder`` as a dictionary.

    Raises:
        AdapterError: ``missing_file`` or ``bad_config``.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        if not path.is_file():  # nothing else is opened: reading from a pipe would wait for ever
            raise FileNotFoundError(f"{CONFIG_FILE} is not there{_elsewhere(path.parent)}")
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise _bad_config(path, f"it is larger than {_MAX_CONFIG_BYTES} bytes")
        # As PEFT and vLLM read it: UTF-8, and no byte order mark.
        config = json.loads(path.read_bytes().decode(), object_pairs_hook=unique)
    except OSError as error:
        raise AdapterError(f"cannot read {path}", [Problem("missing_file", str(error))]) from error
    except (ValueError, RecursionError) as error:
        raise _bad_config(path, f"it cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise _bad_config(path, f"it holds a {type(config).__name__}, expected an object")
    return config


def read_base_config(model: object) -> dict[str, Any]:
    """``config.json`` of the model folder ``model``; empty where no readable one lies there."""
    if not model:
        return {}
    try:
        config = json.loads((Path(str(model)) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def require_tensor_file(folder: str | Path) -> Path:
    """The path of the tensor file in ``folder``.

    Raises:
        AdapterError: ``missing_file``; where a pickled one lies there instead, it says how to convert it.
    """
    path = Path(folder) / TENSOR_FILE
    if path.is_file():
        return path
    pickled = [name for name in _PICKLED if (path.parent / name).exists()]
    shards = sorted(path.parent.glob("*-of-*.safetensors"))
    why = "not there" + _elsewhere(path.parent)
    if pickled:
        why = f"only {pickled[0]}, a pickle that runs code when read: save it as safetensors"
    elif shards:
        why = f"only pieces of it ({shards[0].name}, …), which neither PEFT nor vLLM joins: save it in one file"
    raise AdapterError(f"cannot read {path}", [Problem("missing_file", f"{TENSOR_FILE}: {why}")])


def _elsewhere(folder: Path) -> str:
    """Where adapters lie instead: PEFT saves one that is not called ``default`` into a folder of its name."""
    below = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG_FILE}"))
    return f"; there are adapters in {', '.join(below[:3])} below it" if below else ""


def _bad_config(path: Path, why: str) -> AdapterError:
    return AdapterError(f"{path} cannot be used", [Problem("bad_config", why)])


def read_folder(folder: str | Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The tensors of ``folder``: one flat buffer on the CPU, and views of it by name, sorted.

    Tensors of another order or of mixed dtypes (other writers' files) are brought into the snapshot's form; mixed
    dtypes become float32.

    Raises:
        AdapterError: ``missing_file`` or ``truncated_file``.
    """
    path = require_tensor_file(folder)
    header = read_header(path)
    with path.open("rb") as file:
        file.seek(header.data_start)
        raw = torch.frombuffer(bytearray(file.read()) or bytearray(1), dtype=torch.uint8)
    stored = {
        name: raw[info.begin : info.end].clone().view(info.dtype).view(info.shape)
        for name, info in sorted(header.tensors.items())
    }
    dtypes = {tensor.dtype for tensor in stored.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in stored.values()]) if stored else torch.empty(0)
    parts = flat.split_with_sizes([tensor.numel() for tensor in stored.values()]) if stored else ()
    return flat, {n: part.view(t.shape) for (n, t), part in zip(stored.items(), parts, strict=True)}

"""Is this folder an adapter that may be loaded? Told from names, sizes and headers, before anything is allocated."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from loraflow_server.errors import PluginError
from loraflow_server.settings import Limits

__all__ = [
    "AdapterFile",
    "check_adapter",
    "check_folder",
    "check_header",
    "check_incoming",
    "check_name",
    "check_shapes",
    "check_tensor_name",
    "check_text",
    "no_key_twice",
    "resolve_inside",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_TENSOR = re.compile(r"[A-Za-z0-9_.\-]{1,512}")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_DIM = 1 << 31
_PLAIN_DTYPES = ("float32", "bfloat16", "float16")
_LONGEST = 86_400
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True)
class AdapterFile:
    """What a checked safetensors file holds.

    Attributes:
        path: The folder, links resolved.
        tensors: Name to (dtype code, shape).
        nbytes: Size of the file.
    """

    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    nbytes: int


def check_name(name: object) -> str:
    """A name that is safe in URLs, logs, file names and headers; raises ``bad_name`` for any other."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise PluginError("bad_name", "a name is 1 to 128 of A-Z a-z 0-9 _ . - and begins with a letter or digit")
    return name


def resolve_inside(path: object, roots: Sequence[Path], *, must_exist: bool = True) -> Path:
    """The folder behind ``path``, all links followed, if it lies under one of ``roots``.

    Args:
        path: As the caller gave it.
        roots: Allowed folders, links resolved.
        must_exist: False for a folder that is going to be written.

    Raises:
        PluginError: ``bad_path`` (not an absolute path), ``outside_roots`` (403), ``not_found`` (404: perhaps not
            visible yet on a network file system).
    """
    if not isinstance(path, str) or not path or "\0" in path or len(path) > 4096 or not Path(path).is_absolute():
        raise PluginError("bad_path", "an adapter's path is an absolute path of this server")
    try:
        resolved = Path(os.path.realpath(path))
    except ValueError as error:  # no text: half of a surrogate pair
        raise PluginError("bad_path", "an adapter's path is an absolute path of this server") from error
    if not any(resolved != root and resolved.is_relative_to(root) for root in roots):
        # The same answer whether it exists or not: what lies outside is nobody's business.
        raise PluginError(
            "outside_roots", "this path is under none of the folders in LORAFLOW_ADAPTER_ROOTS", status=403
        )
    try:
        if must_exist and not resolved.is_dir():
            raise PluginError("not_found", f"there is no folder {str(resolved)!r} on this server (yet)", status=404)
    except OSError as error:
        raise PluginError("bad_path", f"{str(resolved)!r} cannot be looked at: {error.strerror}") from error
    return resolved


def _open_regular(path: Path, limit: int) -> tuple[BinaryIO, int]:
    """Open a regular file that is no link; refuses one above ``limit`` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PluginError("not_found", f"{path.name} is missing from the adapter's folder", status=404) from error
    except OSError as error:
        raise PluginError("bad_file", f"{path.name} cannot be read: {error.strerror}") from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise PluginError("bad_file", f"{path.name} is not a regular file")
    if info.st_size > limit:
        os.close(descriptor)
        raise PluginError("too_large", f"{path.name} has {info.st_size} bytes, more than {limit}", status=413)
    return os.fdopen(descriptor, "rb"), info.st_size


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (an ``object_pairs_hook``); `ValueError` where one key has two values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _parse(raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(raw, object_pairs_hook=no_key_twice)
    except (ValueError, RecursionError) as error:
        raise PluginError("bad_file", f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise PluginError("bad_file", f"{what} is not a JSON object")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_tensor_name(name: object) -> str:
    """A tensor name as PEFT writes them; raises ``bad_file`` for any other."""
    if not isinstance(name, str) or _TENSOR.fullmatch(name) is None:
        raise PluginError("bad_file", "a tensor's name is 1 to 512 of A-Z a-z 0-9 _ . -")
    return name


def _check_entry(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    check_tensor_name(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise PluginError("bad_file", f"{name}: a header entry has dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise PluginError("bad_file", f"{name}: dtype {str(dtype)[:16]!r} is none of {', '.join(_ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 4 or not all(_is_count(n) and n < _MAX_DIM for n in shape):
        raise PluginError("bad_file", f"{name}: a shape is a list of at most four sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise PluginError("bad_file", f"{name}: data_offsets are two positions in the file")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise PluginError("bad_file", f"{name}: data_offsets do not fit dtype and shape")
    return dtype, tuple(shape), begin, end


def check_header(file: BinaryIO, size: int, limits: Limits) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Check the header of a safetensors file of ``size`` bytes; the tensors' bytes are not read.

    The format: 8 bytes of header length (little-endian), a JSON object, then the tensors without gap or overlap.

    Raises:
        PluginError: ``bad_file`` or ``too_large``.
    """
    prefix = file.read(8)
    if len(prefix) != 8:
        raise PluginError("bad_file", "adapter_model.safetensors is shorter than its header's length field")
    length = int.from_bytes(prefix, "little")
    if length > limits.header:
        raise PluginError("bad_file", f"the header claims {length} bytes, more than {limits.header}")
    if length > size - 8:
        raise PluginError("bad_file", "the header is longer than the file: truncated, or no safetensors file")
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise PluginError("bad_file", "this is no safetensors file (pickled weights are never loaded)")
    # Every entry has a "data_offsets": counted in the bytes, so that a million tiny entries are never parsed.
    if raw.count(b"data_offsets") > limits.tensors:
        raise PluginError("too_large", f"more than {limits.tensors} tensors", status=413)
    header = _parse(raw, "the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise PluginError("bad_file", "__metadata__ is not an object of strings")
    if not 0 < len(header) <= limits.tensors:
        raise PluginError("bad_file", f"an adapter has 1 to {limits.tensors} tensors, this one {len(header)}")
    entries = {name: _check_entry(name, entry) for name, entry in header.items()}
    position = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise PluginError("bad_file", f"{name}: its bytes overlap others, or leave a gap")
        position = end
    if position != size - 8 - length:
        raise PluginError("bad_file", "the tensors' bytes are not those of the file: truncated, or something follows")
    return {name: (dtype, shape) for name, (dtype, shape, _, _) in entries.items()}


def check_folder(folder: Path, limits: Limits) -> AdapterFile:
    """Check an adapter folder: a config and a safetensors file, both regular files of sane size and content.

    Raises:
        PluginError: ``not_found`` (404), ``bad_file``, ``too_large`` (413).
    """
    pickled = [os.path.lexists(folder / name) for name in ("adapter_model.bin", "adapter_model.pt")]
    if any(pickled) and not os.path.lexists(folder / "adapter_model.safetensors"):
        raise PluginError("bad_file", "the adapter is pickled: only safetensors files are loaded")
    config, _ = _open_regular(folder / "adapter_config.json", limits.config)
    with config:
        _parse(config.read(limits.config + 1), "adapter_config.json")
    weights, size = _open_regular(folder / "adapter_model.safetensors", limits.payload)
    with weights:
        return AdapterFile(folder, check_header(weights, size, limits), size)


def check_adapter(given: object, limits: Limits) -> dict[str, list[int]]:
    """Names and shapes of an adapter's matrices, as `check_shapes` takes them; all together no more than a payload.

    Raises:
        PluginError: ``bad_request``, or ``too_large`` (413): workers would take memory for it.
    """
    tensors = check_shapes(given, limits.tensors)
    nbytes = sum(rows * cols for rows, cols in tensors.values()) * min(_ITEM_BYTES.values())
    if nbytes > limits.payload:
        raise PluginError("too_large", f"this adapter has {nbytes} bytes, more than {limits.payload}", status=413)
    return tensors


def check_text(body: Mapping[str, Any], key: str, limit: int = 128) -> str:
    """The string ``key`` of a request.

    Raises:
        PluginError: ``bad_request``: it is none, empty, or longer than ``limit``.
    """
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        raise PluginError("bad_request", f"{key} is a string of 1 to {limit} characters")
    return value


def check_shapes(given: object, limit: int, *, dims: tuple[int, ...] = (2,)) -> dict[str, list[int]]:
    """Names and shapes of matrices, as a request gives them; sorted by name.

    Args:
        given: What the request gives.
        limit: How many at most.
        dims: Numbers of dimensions that are taken.

    Raises:
        PluginError: ``bad_request``.
    """
    if not isinstance(given, dict) or not 0 < len(given) <= limit:
        raise PluginError("bad_request", f"tensors is an object of 1 to {limit} names and shapes")
    for name, shape in given.items():
        check_tensor_name(name)
        whole = isinstance(shape, list) and len(shape) in dims and all(_is_count(n) and 0 < n < _MAX_DIM for n in shape)
        if not whole:
            raise PluginError("bad_request", f"{name}: a shape is [rows, columns]")
    return {name: given[name] for name in sorted(given)}


def check_incoming(body: Mapping[str, Any], limits: Limits) -> tuple[dict[str, Any], str, float]:
    """What a trainer is about to broadcast (`loraflow_server.receive.Incoming`), the label, and seconds per bucket.

    Raises:
        PluginError: ``bad_request``.
    """
    names, dtypes, buckets = (body.get(key) for key in ("names", "dtypes", "buckets"))
    if not isinstance(names, list) or not 0 < len(names) <= limits.tensors:
        raise PluginError("bad_request", f"names is a list of 1 to {limits.tensors} weights")
    for name in names:
        check_tensor_name(name)
    if len(set(names)) < len(names):
        raise PluginError("bad_request", "a weight travels once")
    known = isinstance(dtypes, list) and len(dtypes) == len(names) and all(d in _PLAIN_DTYPES for d in dtypes)
    if not known:
        raise PluginError("bad_request", f"dtypes is a list as long as names, of {', '.join(_PLAIN_DTYPES)}")
    counts = isinstance(buckets, list) and all(_is_count(n) and n > 0 for n in buckets)
    if not counts or sum(buckets or ()) != len(names):
        raise PluginError("bad_request", "buckets is a list of counts that add up to names")
    timeout = body.get("timeout")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
        raise PluginError("bad_request", f"timeout is a number of seconds, at most {_LONGEST}")
    incoming = {"layout_id": check_text(body, "layout_id"), "names": names, "dtypes": dtypes, "buckets": buckets}
    mapped = body.get("mapped")
    if mapped is not None:
        if not isinstance(mapped, dict) or not _is_count(mapped.get("first")) or mapped["first"] >= _MAX_NUMBER:
            raise PluginError("bad_request", "mapped is an object, its first a count")
        incoming["mapped"] = {"name": check_text(mapped, "name"), "first": mapped["first"]}
    return incoming, check_text(body, "label", 256), float(timeout)

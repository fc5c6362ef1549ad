"""``loraflow push``: a saved adapter reaches servers as a proven version, without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from loraflow.adapter import read_adapter, take_snapshot
from loraflow.adapter_files import read_base_config, read_config, require_tensor_file
from loraflow.basemodel import BaseShapes, architecture_class
from loraflow.config import SyncConfig
from loraflow.connect import clients, wait_for
from loraflow.errors import AdapterError, LoraflowError
from loraflow.manager import SyncManager
from loraflow.peft_config import check_config
from loraflow.preflight import check_folder
from loraflow.problems import Problem
from loraflow.records import SyncRecord
from loraflow.safetensors_io import read_header
from loraflow.server import VLLMServer

__all__ = ["find_base", "load_policy", "push", "require_readable"]


def push(
    adapter: Path,
    servers: Sequence[str],
    config: SyncConfig,
    *,
    base: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Preflight, publish, load on every server, prove, commit; the servers keep the version.

    The proof needs the trainer's forward, so the base model is loaded here, from ``base``, from the adapter's config,
    or from the folder that the server serves.

    Args:
        adapter: Folder of the adapter, of any writer.
        servers: Base URLs.
        config: Options.
        base: Folder or name of the base model.
        progress: Told what is being done.

    Returns:
        ``{"policy", "version", "digest", "verified", "servers", "timings_ms", "transport", "carrier", "proofs"}``.

    Raises:
        LoraflowError: Refused or failed; every server still serves what it served before.
    """
    require_readable(adapter)
    probe = clients(servers, config)
    wait_for(probe, config.start_timeout)
    base = find_base(adapter, probe, base)
    progress(f"checking {adapter} against {base}")
    ranks = [server.info.lora.max_rank for server in probe if server.info.lora is not None]
    tower = all(server.info.lora is not None and server.info.lora.tower for server in probe)
    checked = check_folder(adapter, BaseShapes.from_folder(base), max_lora_rank=min(ranks, default=None), tower=tower)
    if checked.transport is None or (config.wanted_transport == "adapter" and checked.transport != "adapter"):
        raise AdapterError(f"{adapter} cannot be served", checked.problems)
    progress("loading the base model to prove what is served")
    model = load_policy(adapter, base)
    manager = SyncManager(model, probe, config)
    progress("publishing, loading, proving")
    try:
        manager.start()
    finally:
        manager.close(keep_serving=True)
    return _result(manager, manager.records[-1])


def require_readable(adapter: Path) -> None:
    """Raise `AdapterError` where ``adapter`` is no folder with a usable configuration and a whole tensor file."""
    if not adapter.is_dir():
        raise AdapterError(f"cannot read {adapter}", [Problem("missing_file", "it is not a folder")])
    problems = check_config(read_config(adapter))
    if problems:
        raise AdapterError(f"{adapter} cannot be used", problems)
    read_header(require_tensor_file(adapter))


def find_base(adapter: Path, servers: Sequence[VLLMServer], given: str | None) -> str:
    """The base model's folder: given, or named by the adapter, or served from a folder that is there.

    Raises:
        LoraflowError: None of them is to be had here.
    """
    named = given or read_config(adapter).get("base_model_name_or_path")
    candidates = [named, *(server.info.model_root for server in servers)]
    for candidate in candidates:
        if read_base_config(candidate):
            return str(candidate)
    if given:
        return given
    raise LoraflowError(
        f"the base model is not to be found here (tried {', '.join(str(c) for c in candidates if c)})",
        hint="give its folder with --base: the proof compares the server with the base and the adapter loaded here",
    )


def load_policy(adapter: Path, base: str) -> Any:
    """The base with the adapter on it, as PEFT loads them, in evaluation mode."""
    from peft import PeftModel
    from transformers import AutoConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model_class = architecture_class(AutoConfig.from_pretrained(base))
        model = model_class.from_pretrained(base, dtype="auto").to(device)
        policy = PeftModel.from_pretrained(model, str(adapter), is_trainable=False).eval()
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise AdapterError(f"PEFT cannot load {adapter} on {base}: {error}") from error
    _require_same(policy, adapter, base)
    return policy


def _require_same(policy: Any, adapter: Path, base: str) -> None:
    """What PEFT made of the folder is what lies in it: it drops tensors that it has no place for without an error, and
    draws those that it misses."""
    loaded, saved = take_snapshot(policy), read_adapter(adapter, base)
    kept = {name: t for name, t in saved.tensors.items() if not name.endswith(".base_layer.weight")}  # the base's own
    differ = sorted(loaded.tensors.keys() ^ kept.keys())
    differ += [n for n in sorted(loaded.tensors.keys() & kept.keys()) if not _equal(loaded.tensors[n].cpu(), kept[n])]
    if differ:
        raise AdapterError(
            f"PEFT loads {adapter} with other tensors than the file's: {', '.join(differ[:3])}"
            + (", …" if len(differ) > 3 else ""),
            hint="was the adapter saved by another version of PEFT, or on another base?",
        )


def _equal(loaded: torch.Tensor, saved: torch.Tensor) -> bool:
    """Bit for bit, in the narrower of the two dtypes."""
    narrow = min(loaded.dtype, saved.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(loaded.to(narrow), saved.to(narrow))


def _result(manager: SyncManager, record: SyncRecord) -> dict[str, Any]:
    return {
        "policy": record.policy,
        "version": record.version,
        "digest": record.digest,
        "verified": record.proven,
        "servers": list(record.proofs),
        "timings_ms": {name: round(ms, 3) for name, ms in record.phases_ms.items()},
        "transport": record.transport,
        "carrier": record.carrier,
        "bytes": record.bytes,
        "proofs": {url: proof.to_dict() for url, proof in record.proofs.items()},
        "run_id": manager.run_id,
    }

"""``loraflow serve --axolotl config.yaml``: upstream vLLM as an Axolotl config describes it.

Takes the place of ``axolotl vllm-serve``. Axolotl need not be installed where the server runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import TypeAdapter, ValidationError

from loraflow.config import SyncConfig
from loraflow.errors import ConfigError
from loraflow.integrations.axolotl_config import resolve, section_of, server_urls, sync_config, unknown_keys
from loraflow.launch import ServeOptions

__all__ = ["serve_options", "serve_options_from_axolotl"]

_LORA_SERVE_MODULE = "axolotl.scripts.vllm_serve_lora"
_THIS_HOST = {"localhost", "127.0.0.1", "::1"}

_TYPES: Mapping[str, Any] = {
    "host": str,
    "port": int,
    "device": str,
    "tensor_parallel_size": int,
    "data_parallel_size": int,
    "gpu_memory_utilization": float,
    "dtype": str,
    "max_model_len": int,
    "enable_prefix_caching": bool,
    "enable_reasoning": bool,
    "reasoning_parser": str,
    "enforce_eager": bool,
    "serve_module": str,
    "worker_extension_cls": str,
}
"""The options of Axolotl's ``vllm:`` section."""

_BOUNDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "port": (lambda value: 1 <= value <= 65535, "a port, 1 to 65535"),
    "tensor_parallel_size": (lambda value: value >= 1, "at least 1"),
    "data_parallel_size": (lambda value: value >= 1, "at least 1"),
    "gpu_memory_utilization": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "max_model_len": (lambda value: value >= 1, "at least 1"),
}


def serve_options_from_axolotl(path: str) -> ServeOptions:
    """What `serve_options` makes of the config file ``path``.

    Raises:
        ConfigError: The file is not there, is no YAML, or asks for what cannot be served.
    """
    try:
        parsed = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the Axolotl config cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or a date that is none
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{path} is no Axolotl config: it has no keys")
    return serve_options(parsed)


def serve_options(cfg: Mapping[str, Any]) -> ServeOptions:
    """The server that an Axolotl config describes: every option of its ``vllm:`` section, honoured or refused.

    The LoRA rank is the largest of ``lora_r`` and ``lora_rank_pattern``, rounded up to one that vLLM takes; slots and
    adapter folder follow the ``loraflow:`` section, as the trainer's side does. Without ``vllm.port`` it is the port
    that the trainer asks; without ``vllm.host`` the server listens on this host alone.

    Args:
        cfg: The parsed file.

    Raises:
        ConfigError: An unknown key, a wrong type or bound, or a combination that cannot be served.
    """
    vllm = _checked(section_of(cfg, "vllm"))
    sync = sync_config(resolve(cfg))
    model = cfg.get("base_model")
    if not isinstance(model, str) or not model:
        raise ConfigError("base_model: the model to serve is not given")
    return ServeOptions(
        model=model,
        max_lora_rank=_rank(cfg, sync),
        max_staleness=sync.max_staleness,
        adapter_root=sync.server_adapter_root or sync.adapter_root,
        host=_host(cfg, vllm),
        port=vllm.get("port") or urlsplit(server_urls(cfg)[0]).port or 8000,
        device=_device(vllm.get("device")),
        weight_transfer=sync.carrier if sync.carrier in {"nccl", "ipc", "gloo"} else None,
        extra=tuple(_arguments(cfg, vllm)),
    )


def _checked(vllm: Mapping[str, Any]) -> dict[str, Any]:
    """The section without nulls, every value of the type that Axolotl gives it."""
    found = unknown_keys(vllm, _TYPES, "vllm")
    if found:
        raise ConfigError("; ".join(found))
    out: dict[str, Any] = {}
    for key, value in vllm.items():
        if value is None:
            continue
        try:
            out[key] = TypeAdapter(_TYPES[key]).validate_python(value, strict=not isinstance(value, int))
        except ValidationError as error:
            raise ConfigError(f"vllm.{key}: {error.errors()[0]['msg']} (given: {value!r})") from error
        if isinstance(value, bool) is not (_TYPES[key] is bool):
            raise ConfigError(f"vllm.{key}: {value!r} is of the wrong type")
        within, wanted = _BOUNDS.get(key, (lambda _: True, ""))
        if not within(out[key]):
            raise ConfigError(f"vllm.{key}: must be {wanted} (given: {value!r})")
    return out


def _rank(cfg: Mapping[str, Any], sync: SyncConfig) -> int | None:
    """Largest LoRA rank to serve; None where merged weights are asked for."""
    if sync.wanted_transport == "merged" or cfg.get("adapter") not in ("lora", "qlora"):
        return None
    pattern = section_of(cfg, "lora_rank_pattern")
    given = [("lora_r", cfg.get("lora_r")), *((f"lora_rank_pattern.{key}", rank) for key, rank in pattern.items())]
    ranks: list[int] = []
    for key, rank in given:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"{key}: the adapter's rank must be at least 1 (given: {rank!r})")
        ranks.append(rank)
    return max(ranks)


def _host(cfg: Mapping[str, Any], vllm: Mapping[str, Any]) -> str:
    host: str | None = vllm.get("host")
    if host is not None:
        return host
    trainer_uses = urlsplit(server_urls(cfg)[0]).hostname
    if trainer_uses not in _THIS_HOST:
        raise ConfigError(
            f"the trainer connects to {trainer_uses!r}, and without vllm.host the server listens on this host alone: "
            "set vllm.host (0.0.0.0 for every address; whoever reaches it can load adapters)"
        )
    return "::1" if trainer_uses == "::1" else "127.0.0.1"


def _device(device: str | None) -> str | None:
    if device in {None, "auto"}:
        return None
    kind = str(device).split(":", 1)[0]
    if kind not in {"cpu", "cuda"}:
        raise ConfigError(f"vllm.device: {device!r} is not auto, cuda or cpu")
    if kind != device:
        raise ConfigError(f"vllm.device: choose the GPU of {device!r} with CUDA_VISIBLE_DEVICES, and write {kind}")
    return kind


def _arguments(cfg: Mapping[str, Any], vllm: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM for the rest of the section, and for what the model needs."""
    if vllm.get("serve_module") not in {None, _LORA_SERVE_MODULE}:
        raise ConfigError(
            f"vllm.serve_module: {vllm['serve_module']} is a server of its own; loraflow serves with upstream vLLM: "
            "remove it"
        )
    out: list[str] = []
    for key in ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "dtype", "max_model_len"):
        if key in vllm:
            out += [f"--{key.replace('_', '-')}", str(vllm[key])]
    if "enable_prefix_caching" in vllm:
        out.append("--enable-prefix-caching" if vllm["enable_prefix_caching"] else "--no-enable-prefix-caching")
    if vllm.get("enforce_eager"):
        out.append("--enforce-eager")
    out += _reasoning(vllm)
    if "worker_extension_cls" in vllm:
        out += ["--worker-extension-cls", vllm["worker_extension_cls"]]
    if cfg.get("trust_remote_code"):
        out.append("--trust-remote-code")
    if cfg.get("revision_of_model"):
        out += ["--revision", str(cfg["revision_of_model"])]
    return out


def _reasoning(vllm: Mapping[str, Any]) -> list[str]:
    """Upstream vLLM has no flag ``enable_reasoning`` any more: the parser's name switches it on."""
    enabled, parser = vllm.get("enable_reasoning"), vllm.get("reasoning_parser")
    if enabled and not parser:
        raise ConfigError("vllm.enable_reasoning: name the parser with vllm.reasoning_parser")
    return ["--reasoning-parser", parser] if parser and enabled is not False else []

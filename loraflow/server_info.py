"""What a server says it can do: frozen facts, read from its own routes rather than guessed from its version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "LoraInfo",
    "PluginInfo",
    "ServedModel",
    "ServerInfo",
    "info_from_config",
    "info_with_plugin",
    "parse_version",
]


@dataclass(frozen=True)
class ServedModel:
    """One entry of ``/v1/models``: the base (``parent`` is None) or an adapter (``root`` is its path)."""

    id: str
    root: str
    parent: str | None

    @classmethod
    def from_answer(cls, entry: Mapping[str, Any]) -> ServedModel:
        """The entry as the server gives it; raises `TypeError` where a name in it is no text."""
        name, root, parent = entry["id"], entry.get("root") or entry["id"], entry.get("parent")
        if not (isinstance(name, str) and isinstance(root, str) and isinstance(parent, str | None)):
            raise TypeError(f"a model is called {name!r}")
        return cls(name, root, parent)


@dataclass(frozen=True)
class LoraInfo:
    """The server's LoRA limits.

    Attributes:
        max_rank: Largest adapter rank.
        max_loras: Adapters that can be in one batch (slots).
        max_cpu_loras: Adapters kept in host memory.
        target_modules: Module suffixes that take adapters; None for all that the model supports.
        dtype: dtype of the slots, e.g. ``"bfloat16"``.
        runtime_loading: Whether ``/v1/load_lora_adapter`` is there.
        tower: Whether adapters reach a multimodal model's towers and connectors (``--enable-tower-connector-lora``).
    """

    max_rank: int
    max_loras: int
    max_cpu_loras: int
    target_modules: tuple[str, ...] | None
    dtype: str | None
    runtime_loading: bool
    tower: bool = False


@dataclass(frozen=True)
class PluginInfo:
    """loraflow's own plugin on the server, as its ``/loraflow/v1/status`` describes it."""

    version: str
    worker_extension: bool
    capabilities: frozenset[str]
    roots: tuple[str, ...]
    status: Mapping[str, Any]


@dataclass(frozen=True)
class ServerInfo:
    """What one server is. None means that the server does not say (dev mode off, no plugin).

    Attributes:
        url: Base URL.
        vllm_version: As ``/version`` gives it.
        model: Name that requests use for the base.
        model_root: Path or hub name of the base weights.
        architecture: First entry of the model config's ``architectures``.
        max_model_len: Tokens of prompt and completion.
        vocab_size: Rows of the output head.
        dtype: dtype that the base is served in.
        quantization: vLLM's name of the quantisation method; None for plain weights.
        lora: LoRA limits; None where LoRA is off.
        lora_known: Whether ``lora`` is the server's word (False: it does not say).
        logprobs_mode: ``raw_logprobs``, ``processed_logprobs``, …
        max_logprobs: Largest number of log-probs per token; -1 for all.
        tensor_parallel: Ranks per engine.
        data_parallel: Engines behind this API server.
        dev_mode: Whether the development routes are there.
        weight_transfer: Backend given to ``--weight-transfer-config``.
        weight_routes: Weight-transfer routes that are there, without the slash.
        kv_connector: Whether a connector keeps prefixes outside of the GPU too (``--kv-offloading-size`` and the like).
        plugin: loraflow's plugin; None where it is not loaded.
        instance: Changes when the server's process does; empty where the server does not say.
    """

    url: str
    vllm_version: str
    model: str
    model_root: str
    architecture: str | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    lora: LoraInfo | None = None
    lora_known: bool = False
    logprobs_mode: str | None = None
    max_logprobs: int | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    dev_mode: bool = False
    weight_transfer: str | None = None
    weight_routes: frozenset[str] = frozenset()
    kv_connector: bool = False
    plugin: PluginInfo | None = None
    instance: str = ""

    @property
    def version(self) -> tuple[int, ...]:
        """``vllm_version`` as numbers, e.g. ``(0, 32, 0)``."""
        return parse_version(self.vllm_version)

    @property
    def takes_checkpoints(self) -> bool:
        """Whether it loads weights by their checkpoint names as it was started; with LoRA, vLLM does from 0.28 on."""
        return self.lora is None or self.version >= (0, 28)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, for ``loraflow status`` and the records."""
        lora = self.lora
        return {
            "url": self.url,
            "vllm": self.vllm_version,
            "model": self.model,
            "model_root": self.model_root,
            "architecture": self.architecture,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "max_model_len": self.max_model_len,
            "lora": None
            if lora is None
            else {
                "max_rank": lora.max_rank,
                "max_loras": lora.max_loras,
                "max_cpu_loras": lora.max_cpu_loras,
                "target_modules": lora.target_modules,
                "runtime_loading": lora.runtime_loading,
                "tower": lora.tower,
            },
            "logprobs_mode": self.logprobs_mode,
            "tensor_parallel": self.tensor_parallel,
            "data_parallel": self.data_parallel,
            "dev_mode": self.dev_mode,
            "weight_transfer": self.weight_transfer,
            "plugin": None
            if self.plugin is None
            else {
                "version": self.plugin.version,
                "worker_extension": self.plugin.worker_extension,
                "capabilities": sorted(self.plugin.capabilities),
            },
            "instance": self.instance,
        }


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``"0.32.0+cpu"`` gives ``(0, 32, 0)``; empty where there are none."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = re.match(r"[0-9]{1,9}", part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
    return tuple(numbers)


def info_from_config(
    base: ServerInfo, config: Mapping[str, Any], env: Mapping[str, Any], routes: frozenset[str]
) -> ServerInfo:
    """``base`` with what ``/server_info?config_format=json`` adds; pure.

    Args:
        base: What ``/version`` and ``/v1/models`` gave.
        config: Its ``vllm_config`` object.
        env: Its ``vllm_env`` object.
        routes: Paths of the server's OpenAPI document.
    """
    model = config.get("model_config") or {}
    parallel = config.get("parallel_config") or {}
    hf = model.get("hf_config")
    hf = hf if isinstance(hf, Mapping) else {}
    text = hf.get("text_config") if isinstance(hf.get("text_config"), Mapping) else hf
    lora = config.get("lora_config")
    transfer = config.get("weight_transfer_config")
    dtype = _dtype_name(model.get("dtype"))
    return replace(
        base,
        architecture=next(iter(hf.get("architectures") or ()), None),
        vocab_size=(text or {}).get("vocab_size"),
        dtype=dtype,
        quantization=model.get("quantization"),
        lora=None if lora is None else _lora_info(lora, dtype, env, routes),
        lora_known=True,
        logprobs_mode=model.get("logprobs_mode"),
        max_logprobs=model.get("max_logprobs"),
        tensor_parallel=parallel.get("tensor_parallel_size"),
        data_parallel=parallel.get("data_parallel_size"),
        dev_mode=True,
        weight_transfer=transfer.get("backend") if isinstance(transfer, Mapping) else None,
        kv_connector=config.get("kv_transfer_config") is not None,
        instance=str(config.get("instance_id") or base.instance),
    )


def info_with_plugin(info: ServerInfo, status: Mapping[str, Any], routes: frozenset[str]) -> ServerInfo:
    """``info`` with what ``/loraflow/v1/status`` adds; pure."""
    plugin = PluginInfo(
        version=str(status.get("version", "")),
        worker_extension=bool(status.get("worker_extension")),
        capabilities=frozenset(status.get("capabilities") or ()),
        roots=tuple(status.get("roots") or ()),
        status=status,
    )
    info = replace(info, plugin=plugin, instance=str(status.get("instance") or info.instance))
    config = status.get("vllm_config")
    if not info.dev_mode and isinstance(config, Mapping):  # without dev mode the plugin says the same things
        info = replace(info_from_config(info, config, {}, routes), dev_mode=False)
    return info


def _lora_info(
    lora: Mapping[str, Any], model_dtype: str | None, env: Mapping[str, Any], routes: frozenset[str]
) -> LoraInfo:
    targets = lora.get("target_modules")
    dtype = _dtype_name(lora.get("lora_dtype"))
    loading = "/v1/load_lora_adapter" in routes or bool(env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"))
    return LoraInfo(
        max_rank=int(lora["max_lora_rank"]),
        max_loras=int(lora["max_loras"]),
        max_cpu_loras=int(lora.get("max_cpu_loras") or lora["max_loras"]),
        target_modules=None if not targets else tuple(sorted(targets)),
        dtype=model_dtype if dtype in {None, "auto"} else dtype,
        runtime_loading=loading,
        tower=bool(lora.get("enable_tower_connector_lora")),
    )


def _dtype_name(value: object) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")

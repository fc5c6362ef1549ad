"""What an Axolotl config asks of loraflow: its options, its servers, and what is refused.

Pure functions on the parsed YAML, so that `LoraflowPlugin` (in Axolotl's environment) and ``loraflow serve --axolotl``
(in vLLM's) read one config in one way. Nothing of Axolotl is imported here.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import field_validator

from loraflow.config import SyncConfig
from loraflow.correction import CorrectionOptions
from loraflow.errors import ConfigError

__all__ = [
    "PLUGIN",
    "LoraflowSection",
    "is_async",
    "is_set",
    "prefetch_depth",
    "resolve",
    "server_urls",
    "sync_config",
    "uses_plugin",
]

PLUGIN = "loraflow.integrations.axolotl.LoraflowPlugin"

_SHARED = {
    "vllm_lora_sync": "vllm_lora_sync",
    "vllm_sync_interval": "vllm_sync_interval",
    "vllm_server_timeout": "vllm_server_timeout",
    "vllm_importance_sampling_correction": "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode": "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min": "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max": "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "off_policy_mask_threshold": "off_policy_mask_threshold",
}
"""Keys under ``trl:`` and the option of `SyncConfig` that each one is."""

_DEFAULT_HOST, _DEFAULT_PORT = "0.0.0.0", 8000  # noqa: S104 - Axolotl's defaults; compared, not bound
_ANY_HOST = {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound
_ASYNC_MODE = "token_truncate"  # of Axolotl's async trainers; TRL's own default is sequence_mask


class LoraflowSection(SyncConfig):
    """The ``loraflow:`` section: every option of `SyncConfig`, and the servers."""

    servers: tuple[str, ...] = ()
    """Base URLs. Where not given: ``trl.vllm_server_base_url``, or ``trl.vllm_server_host`` and ``…_port``."""

    @field_validator("servers")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not _is_url(url):
                raise ValueError(f"{url!r} is not a URL: write http://HOST:PORT")
        return value


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or an address in half a bracket
        return False


def section_of(cfg: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The section ``name`` of a config, empty where it is not there; raises `ConfigError` where it is no mapping."""
    value = cfg.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: must be a section of keys and values, not {value!r}")
    return value


def uses_plugin(cfg: Mapping[str, Any]) -> bool:
    """Whether the config names the plugin: Axolotl also asks plugins that an earlier config of the process named."""
    plugins = cfg.get("plugins")
    return isinstance(plugins, list | tuple) and PLUGIN in plugins


def is_set(cfg: Mapping[str, Any], section: str, key: str) -> bool:
    """Whether the flag ``section.key`` is true; raises `ConfigError` where it is no flag."""
    value = section_of(cfg, section).get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    raise ConfigError(f"{section}.{key}: must be true or false, not {value!r}")


def is_async(cfg: Mapping[str, Any]) -> bool:
    """Whether Axolotl trains with its async trainer: ``use_data_producer`` or ``async_prefetch``."""
    return is_set(cfg, "trl", "use_data_producer") or is_set(cfg, "trl", "async_prefetch")


def prefetch_depth(cfg: Mapping[str, Any]) -> int:
    """Rollouts that are generated ahead of training; 0 without ``async_prefetch``."""
    if not is_set(cfg, "trl", "async_prefetch"):
        return 0
    depth = section_of(cfg, "trl").get("prefetch_depth")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise ConfigError(f"trl.prefetch_depth: must be at least 1, not {depth!r}")
    return depth or 1


def server_urls(cfg: Mapping[str, Any]) -> list[str]:
    """Base URLs of the servers that the trainer generates on; 0.0.0.0 means this host.

    Raises:
        ConfigError: They are named twice, and differently.
    """
    trl = section_of(cfg, "trl")
    given = section_of(cfg, "loraflow").get("servers") or ()
    if not isinstance(given, str | list | tuple):
        raise ConfigError(f"loraflow.servers: must be a list of URLs, not {given!r}")
    listed = [str(url).rstrip("/") for url in ([given] if isinstance(given, str) else given)]
    base = trl.get("vllm_server_base_url")
    host, port = trl.get("vllm_server_host") or _DEFAULT_HOST, trl.get("vllm_server_port") or _DEFAULT_PORT
    from_host = f"http://{_in_url(host)}:{port}"
    has_own_address = (host, port) != (_DEFAULT_HOST, _DEFAULT_PORT)
    chosen = listed or [str(base).rstrip("/") if base else from_host]
    for name, url, given in (
        ("trl.vllm_server_base_url", str(base).rstrip("/"), bool(base)),
        ("trl.vllm_server_host and trl.vllm_server_port", from_host, has_own_address),
    ):
        if given and url not in chosen:
            raise ConfigError(f"{name} say {url}, but the servers are {', '.join(chosen)}: name them once")
    return chosen


def _in_url(host: object) -> str:
    """``host`` as it stands in a URL: this host for every address, brackets around IPv6."""
    if isinstance(host, str):
        bare = host.strip("[]")
        if bare in _ANY_HOST:
            return "127.0.0.1"
        with contextlib.suppress(ValueError):
            return f"[{ipaddress.IPv6Address(bare)}]"
        if set(host).isdisjoint("/:[]"):
            return host
    raise ConfigError(
        f"trl.vllm_server_host: must be a host name or an address, not {host!r} (the port has a key of its own, and a "
        "URL goes to trl.vllm_server_base_url)"
    )


def resolve(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The ``loraflow:`` section with what stands under ``trl:`` folded in: everything that a run needs.

    Values are of the options' own types, however they were written ("false" in quotes is false). Options that neither
    section gives are left out, and have `SyncConfig`'s defaults, but for two in Axolotl's async trainers: their
    importance-sampling mode, and a ``max_staleness`` that holds what is prefetched.

    Raises:
        ConfigError: An option is unknown, impossible, or given twice with different values.
    """
    trl, own = section_of(cfg, "trl"), dict(section_of(cfg, "loraflow"))
    cap, high = trl.get("vllm_importance_sampling_cap"), trl.get("vllm_importance_sampling_clip_max")
    if cap is not None and high is not None and cap != high:
        raise ConfigError(
            f"trl.vllm_importance_sampling_cap ({cap}) is the old name of "
            f"trl.vllm_importance_sampling_clip_max ({high}): say it once"
        )
    for key, option in _SHARED.items():
        value = trl.get(key)
        if value is None:
            continue
        if option in own and own[option] != value:
            raise ConfigError(f"trl.{key} is {value!r}, but loraflow.{option} is {own[option]!r}: say it once")
        own[option] = value
    if isinstance(own.get("vllm_sync_interval"), bool):
        raise ConfigError("vllm_sync_interval: must be a number of optimizer steps, or 'adaptive', not true or false")
    if is_async(cfg):
        own.setdefault("vllm_importance_sampling_mode", _ASYNC_MODE)
    own["servers"] = server_urls(cfg)
    section = LoraflowSection.from_dict(own)
    depth = prefetch_depth(cfg)
    if depth and "max_staleness" not in own:
        own["max_staleness"] = max(depth + section.overlap, section.max_staleness)
        section = LoraflowSection.from_dict(own)
    CorrectionOptions.from_config(section)
    return {name: getattr(section, name) for name in own} | {"servers": own["servers"]}


def sync_config(resolved: Mapping[str, Any]) -> SyncConfig:
    """The options of a section that `resolve` made."""
    return SyncConfig(**{name: value for name, value in resolved.items() if name != "servers"})


def unknown_keys(given: Mapping[str, Any], known: Collection[str], section: str) -> list[str]:
    """One sentence for each key of ``given`` that is not ``known``, with the nearest right name."""
    found = []
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.6)
        found.append(f"unknown key {section}.{key}" + (f"; did you mean {near[0]}?" if near else ""))
    return found

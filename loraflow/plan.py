"""Which transport and carrier, and why: a pure function of the adapter, the servers, the trainer and the config.

The order of preference is the order of `_CARRIERS`: an adapter before merged weights, the faster carrier before the
slower one; or, with measured costs, the least time for a sync and the rollouts after it. Every way that is not taken
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from loraflow.adapter import AdapterSpec
from loraflow.config import SyncConfig
from loraflow.costs import Costs, Rollout, payload_bytes
from loraflow.errors import CapabilityError
from loraflow.peft_config import beside_language_model
from loraflow.plan_features import MERGE_REFUSES, SLOT_REFUSES, fold_objection
from loraflow.server_info import ServerInfo

__all__ = ["Plan", "RuledOut", "TrainerInfo", "make_plan"]

TransportName = Literal["adapter", "merged"]
CarrierName = Literal["direct", "filesystem", "fold", "ipc", "nccl", "gloo"]

_PATTERNS_SINCE = (0, 32)
_PATTERN_FEATURES = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class TrainerInfo:
    """What the plan must know of the trainer.

    Attributes:
        device: ``cuda`` or ``cpu``.
        sharded: FSDP or ZeRO-3: base weights lie in pieces on several ranks.
        quantized: The base is quantised on the trainer (QLoRA).
        has_vllm: vLLM can be imported here (its NCCL and IPC engines are used from the trainer's side).
        local_servers: URLs of servers on this host.
        shares_gpu: Whether a server runs on this process's GPU, by URL; servers of which it is not known are left out.
    """

    device: str = "cpu"
    sharded: bool = False
    quantized: bool = False
    has_vllm: bool = True
    local_servers: frozenset[str] = frozenset()
    shares_gpu: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class RuledOut:
    """A way not taken."""

    transport: TransportName
    carrier: CarrierName
    reason: str


@dataclass(frozen=True)
class Plan:
    """What will be used.

    Attributes:
        transport: ``adapter`` or ``merged``.
        carrier: ``direct``, ``filesystem``, ``fold``, ``ipc``, ``nccl`` or ``gloo``.
        reasons: Why, in sentences.
        warnings: What a user should know beforehand.
        ruled_out: The other ways, with reasons.
        payload_bytes: Estimated bytes per sync and server.
    """

    transport: TransportName
    carrier: CarrierName
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    payload_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "transport": self.transport,
            "carrier": self.carrier,
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
            "ruled_out": [vars(item) for item in self.ruled_out],
            "payload_bytes": self.payload_bytes,
        }

    def __str__(self) -> str:
        return f"{self.transport} over {self.carrier}: {self.reasons[0]}"


@dataclass(frozen=True)
class _Case:
    spec: AdapterSpec
    servers: Sequence[ServerInfo]
    trainer: TrainerInfo
    config: SyncConfig
    refused: Mapping[str, str]


_Way = tuple[TransportName, CarrierName]


def make_plan(
    spec: AdapterSpec,
    servers: Sequence[ServerInfo],
    config: SyncConfig,
    trainer: TrainerInfo | None = None,
    *,
    costs: Costs | None = None,
    refused: Mapping[str, str] | None = None,
) -> Plan:
    """Choose for one adapter and all its servers.

    Args:
        spec: The adapter.
        servers: What each server can do.
        config: Options.
        trainer: What this process can do.
        costs: Measured costs, for ``rollout_streams`` and ``rollout_tokens`` of the config.
        refused: Carriers that were tried and refused by a server, with its reason.

    Raises:
        CapabilityError: No way is left; the message lists every way with its reason.
    """
    case = _Case(spec, servers, trainer or TrainerInfo(), config, refused or {})
    objections: dict[_Way, str | None] = {
        (transport, carrier): _unwanted(transport, carrier, config.wanted_transport, config)
        or case.refused.get(carrier)
        or _general(case, transport)
        or objection(case)
        or _unproven(case, carrier)
        for transport, carrier, objection in _CARRIERS
    }
    ways = [way for way, reason in objections.items() if reason is None]
    if not ways:
        listed = "; ".join(f"{transport}/{carrier}: {why}" for (transport, carrier), why in objections.items())
        raise CapabilityError(f"no way to bring this adapter to the servers: {listed}")
    cycles = _cycles(case, ways, costs)
    chosen = min(cycles, key=lambda way: cycles[way]) if len(cycles) > 1 else ways[0]
    second = dict.fromkeys(ways, f"{chosen[1]} comes first")
    if chosen in cycles:
        second |= {way: f"slower: {ms:,.0f} ms for a sync and its rollouts" for way, ms in cycles.items()}
    ruled_out = tuple(RuledOut(*way, reason or second[way]) for way, reason in objections.items() if way != chosen)
    reasons = _reasons(case, *chosen, ruled_out)
    if len(cycles) > 1:
        measured = ", ".join(f"{carrier} {ms:,.0f} ms" for (_, carrier), ms in sorted(cycles.items(), key=_by_time))
        reasons += (f"a sync and {config.rollout_streams} × {config.rollout_tokens} tokens, measured: {measured}",)
    return Plan(
        *chosen,
        reasons=reasons,
        warnings=_warnings(case, *chosen),
        ruled_out=ruled_out,
        payload_bytes=payload_bytes(chosen[1], spec, servers),
    )


def _cycles(case: _Case, ways: Sequence[_Way], costs: Costs | None) -> dict[_Way, float]:
    """Milliseconds of a sync and the rollouts after it, of those ways that were measured."""
    if costs is None or case.config.rollout_streams is None or case.config.rollout_tokens is None:
        return {}
    rollout = Rollout(case.config.rollout_streams, case.config.rollout_tokens)
    lora = any(server.lora is not None for server in case.servers)
    found = {way: costs.cycle_ms(*way, rollout, lora_enabled=lora) for way in ways}
    return {way: ms for way, ms in found.items() if ms is not None}


def _by_time(item: tuple[_Way, float]) -> float:
    return item[1]


# ---------------------------------------------------------------- objections: None, or why not


def _unwanted(transport: TransportName, carrier: str, wanted: str, config: SyncConfig) -> str | None:
    if wanted not in {"auto", transport}:
        flag = "vllm_lora_sync=false" if config.vllm_lora_sync is False else f"transport={wanted!r}"
        return f"{flag} asks for {wanted}"
    if config.carrier not in {"auto", carrier}:
        return f"carrier={config.carrier!r} is asked for"
    return None


def _general(case: _Case, transport: TransportName) -> str | None:
    return _slot_objection(case) if transport == "adapter" else _merge_objection(case)


def _unproven(case: _Case, carrier: str) -> str | None:
    """Why a digest, where one is asked for, cannot prove what ``carrier`` brings; a fold always proves by one."""
    if case.config.verify != "digest" or carrier == "fold":
        return None
    missing = _needs(case, "digest" if carrier in {"direct", "filesystem"} else "weights")
    return missing and f"verify='digest' is asked for, and {missing}"


def _slot_objection(case: _Case) -> str | None:
    for feature, why in SLOT_REFUSES.items():
        if feature in case.spec.features:
            return why
    for server in case.servers:
        reason = _server_slot_objection(case.spec, server)
        if reason is not None:
            return f"{server.url}: {reason}"
    return None


def _server_slot_objection(spec: AdapterSpec, server: ServerInfo) -> str | None:
    if server.lora is None and server.lora_known:
        return "started without LoRA (--enable-lora)"
    if "tower" in spec.features and not (server.lora is not None and server.lora.tower and server.plugin is not None):
        return _tower_objection(spec, server)
    if server.lora is None:
        return None
    if spec.max_rank > server.lora.max_rank:
        return f"the adapter's rank {spec.max_rank} is above --max-lora-rank {server.lora.max_rank}"
    if server.lora.target_modules is not None:
        missing = sorted(_suffixes(spec) - set(server.lora.target_modules))
        if missing:
            return f"--lora-target-modules leaves out {', '.join(missing)}: those tensors would be ignored"
    old = server.version < _PATTERNS_SINCE
    for feature in _PATTERN_FEATURES:
        if old and feature in spec.features:
            return f"vLLM {server.vllm_version} ignores {feature} and would scale wrongly; 0.32 reads it"
    return None


def _tower_objection(spec: AdapterSpec, server: ServerInfo) -> str:
    """Why the part of the adapter that lies outside of the language model cannot be served."""
    start = f"the adapter reaches beyond the language model ({beside_language_model(spec.shapes)[0]}, …)"
    if server.lora is None or not server.lora.tower:
        return (
            f"{start}, which vLLM serves only with --enable-tower-connector-lora and otherwise ignores "
            "(exclude_modules in LoraConfig keeps the adapter out of there)"
        )
    return f"{start}, and only loraflow's server plugin can prove that those tensors arrive"


def _suffixes(spec: AdapterSpec) -> set[str]:
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in spec.shapes if ".lora_" in name}


def _merge_objection(case: _Case) -> str | None:
    if case.config.overlap:
        return "overlap=True lets requests run while a version travels, and merged weights would change under them"
    for feature, why in MERGE_REFUSES.items():
        if feature in case.spec.features:
            return why
    for server in case.servers:
        if server.quantization:
            return f"{server.url}: its base is quantised ({server.quantization}); merged weights do not fit it"
    return None


def _filesystem(case: _Case) -> str | None:
    for server in case.servers:
        by_plugin = server.plugin is not None and "adapters" in server.plugin.capabilities
        if server.lora is not None and not server.lora.runtime_loading and not by_plugin:
            return f"{server.url}: loads no adapters at run time (VLLM_ALLOW_RUNTIME_LORA_UPDATING=True is missing)"
        if "://" in case.config.adapter_root and not by_plugin:
            return f"{server.url}: cannot read {case.config.adapter_root} without loraflow's plugin"
    return None


def _direct(case: _Case) -> str | None:
    missing = _needs(case, "direct")
    if missing is not None:
        return missing
    far, way = _far(case), case.config.direct_way
    for url in far:
        if way == "shared":
            return f"{url}: it is on another host, and direct_way='shared'"
    for url in [server.url for server in case.servers] if way in {"upload", "broadcast"} else far:
        server = next(server for server in case.servers if server.url == url)
        if server.plugin is None or "upload" not in server.plugin.capabilities:
            return f"{url}: shared memory needs trainer and server on one host, and its plugin takes no uploads"
        if "://" in case.config.adapter_root:
            return f"{url}: evicted adapters are read from a folder, and adapter_root is a URL"
        if way == "broadcast" and "group" not in server.plugin.capabilities:
            return f"{url}: its plugin knows no broadcast groups (direct_way='broadcast'): update loraflow there"
    return None


def _fold(case: _Case) -> str | None:
    if case.trainer.quantized:
        return "the trainer's base is quantised, the server's is not: a fold would not be what was trained"
    return fold_objection(case.spec) or _needs(case, "fold")


def _ipc(case: _Case) -> str | None:
    if case.trainer.device != "cuda":
        far = _far(case)
        return (
            _broadcast(case, "ipc")
            or (f"{far[0]}: without a GPU, ipc needs trainer and server on one host" if far else None)
            or _needs(case, "mapped")
            or ("without a GPU, ipc is proven by digest alone, and verify='canary'" if _canary(case) else None)
        )
    return (
        _broadcast(case, "ipc")
        or _needs_vllm(case)
        or (
            None
            if all(case.trainer.shares_gpu.get(s.url, s.url in case.trainer.local_servers) for s in case.servers)
            else "IPC needs trainer and server on one GPU"
        )
    )


def _canary(case: _Case) -> bool:
    return case.config.verify == "canary"


def _nccl(case: _Case) -> str | None:
    return (
        _broadcast(case, "nccl")
        or _needs_cuda(case)
        or _needs_vllm(case)
        or ("NCCL refuses two ranks on one GPU" if any(case.trainer.shares_gpu.values()) else None)
    )


def _gloo(case: _Case) -> str | None:
    return _broadcast(case, "gloo")


def _broadcast(case: _Case, backend: str) -> str | None:
    if case.trainer.sharded:
        return "the base is sharded over ranks (FSDP, ZeRO-3): gathering it at each sync is not supported"
    if case.trainer.quantized and not case.config.dequantize_base:
        return "the trainer's base is quantised: merging is lossy (dequantize_base=true allows it)"
    for server in case.servers:
        if not server.dev_mode:
            return f"{server.url}: weight-transfer routes need VLLM_SERVER_DEV_MODE=1"
        if server.weight_transfer != backend:
            return (
                f"{server.url}: was started with weight-transfer backend {server.weight_transfer!r}, not {backend!r} "
                f"(`loraflow serve --weight-transfer {backend}`)"
            )
        if not server.takes_checkpoints:
            return f"{server.url}: vLLM {server.vllm_version} loads no merged weights with --enable-lora; 0.28 does"
    return None


def _needs(case: _Case, capability: str) -> str | None:
    for server in case.servers:
        if server.plugin is None or capability not in server.plugin.capabilities:
            return f"{server.url}: needs loraflow's server plugin with {capability!r} (`loraflow serve` starts it)"
    return None


def _far(case: _Case) -> list[str]:
    """URLs of servers on other hosts."""
    return [server.url for server in case.servers if server.url not in case.trainer.local_servers]


def _needs_cuda(case: _Case) -> str | None:
    return None if case.trainer.device == "cuda" else "the trainer has no CUDA device"


def _needs_vllm(case: _Case) -> str | None:
    return (
        None if case.trainer.has_vllm else "vLLM's sender is needed beside the trainer, and vLLM is not installed here"
    )


_CARRIERS: tuple[tuple[TransportName, CarrierName, Callable[[_Case], str | None]], ...] = (
    ("adapter", "direct", _direct),
    ("adapter", "filesystem", _filesystem),
    ("merged", "fold", _fold),
    ("merged", "ipc", _ipc),
    ("merged", "nccl", _nccl),
    ("merged", "gloo", _gloo),
)


# ---------------------------------------------------------------- what a user reads

_BECAUSE: Mapping[str, str] = {
    "direct": "the adapter goes from shared memory straight into the servers' LoRA slots",
    "filesystem": "the servers load the adapter natively from a shared folder",
    "fold": "the adapter travels, and the servers merge it into their own base weights",
    "ipc": "merged weights are handed over in memory that trainer and server share",
    "nccl": "merged weights are broadcast from GPU to GPU",
    "gloo": "merged weights are broadcast over the network from host memory",
}

_OVER = {
    "upload": "over HTTP",
    "broadcast": "by broadcast",
    "auto": "by broadcast or over HTTP, whichever is faster when both are tried at the start,",
}


def _reasons(case: _Case, transport: TransportName, carrier: str, ruled_out: Sequence[RuledOut]) -> tuple[str, ...]:
    reasons = [_BECAUSE[carrier]]
    way = case.config.direct_way
    if carrier == "direct" and way in {"upload", "broadcast"}:
        reasons.append(f"{_OVER[way]} to every server: direct_way={way!r} was asked for")
    elif carrier == "direct" and _far(case):
        reasons.append(f"{_OVER[way]} to {', '.join(_far(case))}: shared memory does not reach another host")
    if transport == "merged" and case.config.wanted_transport == "auto":
        why = next((item.reason for item in ruled_out if item.carrier == "filesystem"), None)
        if why is not None:
            reasons.append(f"not as an adapter: {why}")
    if case.config.carrier != "auto":
        reasons.append(f"carrier={carrier!r} was asked for")
    return tuple(reasons)


def _warnings(case: _Case, transport: TransportName, carrier: CarrierName) -> tuple[str, ...]:
    found = []
    for server in case.servers:
        if server.logprobs_mode not in {None, "processed_logprobs"}:
            found.append(
                f"{server.url} returns {server.logprobs_mode}: importance ratios ignore the temperature "
                "(start it with --logprobs-mode processed_logprobs)"
            )
        if not server.lora_known and transport == "adapter":
            found.append(f"{server.url} does not say what it can do (dev mode off, no plugin): loads may be refused")
        slots = case.config.retained_versions
        if transport == "adapter" and server.lora is not None and server.lora.max_loras < slots:
            found.append(
                f"{server.url} has {server.lora.max_loras} LoRA slots for {slots} retained versions: "
                "older ones are swapped in when asked for (--max-loras)"
            )
    narrow = sorted({server.dtype or "a narrow dtype" for server in case.servers} - {"float32"})
    if transport == "merged" and narrow:
        told = "nothing measures how much of them" if carrier == "fold" else "the record carries the rounding error"
        found.append(f"{', '.join(narrow)} rounds small updates away when merged: {told}")
    return tuple(found)

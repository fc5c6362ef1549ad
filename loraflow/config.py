"""`SyncConfig`: every option of loraflow, in one validated place.

Options that TRL or Axolotl already have keep their names, so that a value can be copied from one to the other.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from loraflow.errors import ConfigError

__all__ = ["SyncConfig", "default_adapter_root"]

_RUN_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


def default_adapter_root() -> str:
    """Memory-backed folder where there is one (``/dev/shm``), the system's temporary folder elsewhere."""
    shm = Path("/dev/shm")  # noqa: S108 - the place where Linux mounts tmpfs
    return str((shm if shm.is_dir() else Path(tempfile.gettempdir())) / "loraflow")


class SyncConfig(BaseModel):
    """All options. Unknown names and impossible combinations raise `ConfigError` with the nearest right name.

    Groups, in order: what travels and how; when; the store; proof; waits; correction; records.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    # --- what travels, and how
    transport: Literal["auto", "adapter", "merged"] = "auto"
    """What serves the policy: a LoRA slot (``adapter``) or the base weights with the update inside (``merged``)."""
    carrier: Literal["auto", "filesystem", "direct", "nccl", "ipc", "gloo", "fold"] = "auto"
    """How it travels. ``filesystem`` and ``direct`` fill LoRA slots; ``nccl``, ``ipc``, ``gloo`` broadcast merged
    weights; ``fold`` ships the adapter and merges it on the server."""
    direct_way: Literal["auto", "shared", "upload", "broadcast"] = "auto"
    """How ``direct`` brings payloads to a server: ``shared`` memory (or CUDA IPC) of one host, ``upload`` in the HTTP
    call, or ``broadcast`` over a group of its own (NCCL from GPU to GPU, gloo elsewhere). ``auto`` takes shared memory
    where it reaches, and elsewhere the faster of the other two, measured at the start. Another needs
    ``carrier="direct"``."""
    vllm_lora_sync: bool | None = None
    """Axolotl's flag: true is ``transport="auto"`` with the adapter first, false is ``transport="merged"``."""
    run_id: str | None = Field(default=None, pattern=rf"^{_RUN_ID}$")
    """Unique per run; policy names are ``{run_id}-v{version}``. Made up where not given."""
    adapter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of published adapters; ``auto`` is the one that the servers serve."""
    dequantize_base: bool = False
    """Allow merging into a quantised base by dequantising it (lossy; refused otherwise)."""
    sleep_level: Literal[1, 2] = 1
    """A colocated engine's sleep: 1 keeps the base weights in host memory, 2 takes them from the trainer again."""
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes of one packed buffer of a merged broadcast; two are in flight."""
    group_host: str | None = None
    """Address of this host that the servers' workers can reach, for broadcasts; found where not given."""
    group_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the broadcast group's store, and of the second server's the next one; free ones where not given (TRL:
    ``vllm_group_port``)."""

    # --- what it costs
    cost_file: str | None = None
    """Report of ``loraflow bench --out`` for servers like these: ``auto`` then takes the way that needs the least time
    for a sync and the rollouts after it, ``rollout_streams`` sequences of ``rollout_tokens`` tokens."""
    rollout_streams: int | None = Field(default=None, ge=1)
    """Sequences generated at once between two syncs."""
    rollout_tokens: int | None = Field(default=None, ge=1)
    """Tokens of each, on average."""

    # --- when
    vllm_sync_interval: int | Literal["adaptive"] = 1
    """Optimizer steps between syncs; ``adaptive`` syncs when the measured drift passes ``drift_budget``."""
    min_sync_interval: int = Field(default=1, ge=1)
    """Adaptive: never sync more often than every so many steps."""
    max_sync_interval: int = Field(default=16, ge=1)
    """Adaptive: always sync after so many steps."""
    drift_budget: float = Field(default=0.01, gt=0)
    """Adaptive: k3 estimate of KL(rollout policy ‖ trainer policy), nats per token, that triggers a sync."""
    max_staleness: int = Field(default=1, ge=0)
    """How many versions behind the newest attempted one a rollout may be; older samples are masked, and a sync that
    keeps failing raises `StaleError` beyond it. Retention keeps ``max_staleness + 2`` versions."""
    on_failure: Literal["raise", "keep_last"] = "raise"
    """A failed sync raises, or keeps the last proven version (counted, until ``max_staleness``)."""
    on_server_failure: Literal["fail", "quarantine"] = "fail"
    """Several servers: one that fails stops the sync, or is set aside until it is proven again. At the start, all must
    answer within ``start_timeout``, or one."""
    overlap: bool = False
    """``sync()`` returns once the snapshot is taken; publish, load and proof run behind it."""

    # --- the store
    adapter_root: str = Field(default_factory=default_adapter_root)
    """Folder or fsspec URL where versions are published. On tmpfs the ``filesystem`` carrier holds memory for one
    version more, ahead of the next sync, where there is room for two."""
    server_adapter_root: str | None = None
    """The same folder as the servers see it, where that differs (another mount point)."""
    grace_period: float = Field(default=30.0, ge=0)
    """Seconds that a retired version stays on disk after it was unloaded everywhere."""
    min_free_bytes: int = Field(default=64 << 20, ge=0)
    """Free space to leave on the store beyond the version being written."""

    # --- proof
    verify: Literal["auto", "digest", "canary"] = "auto"
    """``digest`` needs loraflow's server plugin, and rules out what cannot be proven so; ``canary`` compares log-probs;
    ``auto`` takes the strongest there."""
    verify_interval: int = Field(default=1, ge=1)
    """Canary: prove every so many syncs; a sync between is recorded as ``unproven``. A digest is checked each time."""
    verify_tokens: int = Field(default=48, ge=8, le=2048)
    """Tokens of the fixed canary prompt."""
    logprob_atol: float | None = Field(default=None, gt=0)
    """Mean |Δlogp| allowed between server and trainer; measured from the noise floor at start where not given."""
    base_atol: float | None = Field(default=None, gt=0)
    """The same for the base fingerprint at start. A quantised trainer (QLoRA) wants a wider one."""

    # --- waits, seconds
    start_timeout: float = Field(default=600.0, gt=0)
    """Waiting for servers to come up at `start`."""
    vllm_server_timeout: float = Field(default=240.0, gt=0)
    """One generation request (TRL's name)."""
    request_timeout: float = Field(default=30.0, gt=0)
    """Any other HTTP call."""
    load_timeout: float = Field(default=120.0, gt=0)
    """Loading one version on one server."""
    collective_timeout: float = Field(default=120.0, gt=0)
    """One broadcast (a ``direct`` one: 240 at most), or one collective among trainer ranks."""

    # --- off-policy correction (TRL's names)
    vllm_importance_sampling_correction: bool = True
    """Weight samples by the ratio of trainer to rollout probability."""
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"
    ] = "sequence_mask"
    """``truncate`` clamps the ratio to the bounds, ``mask`` zeroes it outside of them."""
    vllm_importance_sampling_clip_max: float | None = Field(default=3.0, gt=0)
    """Upper bound of the ratio (TRL's ``vllm_importance_sampling_cap``, before)."""
    vllm_importance_sampling_clip_min: float | None = Field(default=None, ge=0)
    """Lower bound of the ratio."""
    off_policy_mask_threshold: float | None = Field(default=None, gt=0)
    """Off-policy sequence masking: drop sequences of negative advantage with a larger mean log-prob gap."""

    # --- access and records
    server_token_env: str = "LORAFLOW_TOKEN"  # noqa: S105 - the name of a variable, not a token
    """Environment variable that holds the bearer token of loraflow's server plugin."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable that holds vLLM's own API key."""
    record_file: str | None = None
    """JSONL file that every sync record is appended to."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from error

    @field_validator("*", mode="before")
    @classmethod
    def _flags_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool and bool not in get_args(kind):
            raise ValueError("is no flag")
        return value

    @field_validator("adapter_root", "server_adapter_root", "record_file", "cost_file")
    @classmethod
    def _paths_name_something(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "\0" in value):
            raise ValueError("names no folder or file")
        return value

    @field_validator("adapter_root", "record_file", "cost_file")
    @classmethod
    def _paths_begin_at_home(cls, value: str | None) -> str | None:
        return value and os.path.expanduser(value)  # noqa: PTH111 - of text, which may be a URL

    @field_validator("adapter_root", "server_adapter_root")
    @classmethod
    def _file_urls_are_folders(cls, value: str | None) -> str | None:
        if value is None or not value.startswith("file://"):
            return value
        folder = value.removeprefix("file://")
        if not folder.startswith("/"):
            raise ValueError("must name a folder of this host: file:///…")
        return folder

    @field_validator("server_adapter_root")
    @classmethod
    def _servers_have_folders_of_their_own(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value and not value.startswith("/"):
            raise ValueError("must be an absolute path, or a URL: a server would look below a folder of its own")
        return value

    @field_validator("vllm_sync_interval")
    @classmethod
    def _interval_is_positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or 'adaptive'")
        return value

    @field_validator("group_host")
    @classmethod
    def _host_is_an_address(cls, value: str | None) -> str | None:
        if value in {"", "0.0.0.0", "::"}:  # noqa: S104 - compared
            raise ValueError("is no address that workers could connect to: name this host's own, or leave it out")
        if value is not None and not set(value).isdisjoint("/[]"):
            raise ValueError("must be a host name or an address, not a URL")
        return value

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        slots, merged = {"filesystem", "direct"}, {"nccl", "ipc", "gloo", "fold"}
        if self.transport == "adapter" and self.carrier in merged:
            raise ValueError(
                f"carrier={self.carrier!r} moves merged weights: set transport='merged', or carrier='auto'"
            )
        if self.transport == "merged" and self.carrier in slots:
            raise ValueError(f"carrier={self.carrier!r} fills LoRA slots: set transport='adapter', or carrier='auto'")
        if self.vllm_lora_sync is False and (self.transport == "adapter" or self.carrier in slots):
            raise ValueError("vllm_lora_sync=false asks for merged weights, but an adapter transport is set")
        if self.vllm_lora_sync is True and (self.transport == "merged" or self.carrier in {"nccl", "ipc", "gloo"}):
            raise ValueError("vllm_lora_sync=true asks for the adapter, but a merged transport is set")
        if self.direct_way != "auto" and self.carrier != "direct":
            raise ValueError(f"direct_way={self.direct_way!r} is a way of carrier='direct': set that too")
        if self.cost_file is not None and None in (self.rollout_streams, self.rollout_tokens):
            raise ValueError("cost_file compares whole cycles: set rollout_streams and rollout_tokens too")
        if self.min_sync_interval > self.max_sync_interval:
            raise ValueError("min_sync_interval is above max_sync_interval")
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError("vllm_importance_sampling_clip_min must be below vllm_importance_sampling_clip_max")
        return self

    @property
    def retained_versions(self) -> int:
        """Committed versions kept on the servers and in the store (rule 7)."""
        return self.max_staleness + 2

    @property
    def wanted_transport(self) -> Literal["auto", "adapter", "merged"]:
        """``transport`` with Axolotl's flag folded in."""
        return "merged" if self.vllm_lora_sync is False else self.transport

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> Self:
        """Build from parsed YAML or JSON; the same checks, the same `ConfigError`."""
        if not isinstance(options, dict):
            raise ConfigError(f"the options are {options!r}, expected names and values")
        odd = [name for name in options if not isinstance(name, str)]
        if odd:
            raise ConfigError(
                f"invalid sync options: {odd[0]!r} is no name of an option (YAML reads `on`, `yes` as true)"
            )
        return cls(**options)


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"][:1])
        if item["type"] == "extra_forbidden":
            near = _nearest(name, model.model_fields)
            lines.append(f"unknown option {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        elif name:
            lines.append(f"{name}: {item['msg'].removeprefix('Value error, ')} (given: {item['input']!r})")
        else:
            lines.append(item["msg"].removeprefix("Value error, "))
    return "invalid sync options: " + "; ".join(dict.fromkeys(lines))


def _nearest(name: str, known: Collection[str]) -> str | None:
    """The option that ``name`` was meant for: TRL's prefix forgotten, or misspelt."""
    if f"vllm_{name}" in known:
        return f"vllm_{name}"
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)

"""One record per sync: what was delivered, how long each phase took, and what proves it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Proof", "RecordFile", "Rollouts", "SyncRecord"]


@dataclass(frozen=True)
class Proof:
    """What one server showed for one version.

    Attributes:
        kind: ``digest`` (every tensor of the slots, checksummed on the server), ``canary`` (log-probs on a fixed
            prompt against the trainer's forward), or ``unproven`` (between two canaries of ``verify_interval``).
        passed: Whether it held.
        mean_abs_dlogp: Canary: mean |Δlogp| between server and trainer, nats.
        max_abs_dlogp: Canary: the largest.
        atol: Canary: what was allowed for the mean.
        detail: What failed, in words.
    """

    kind: Literal["digest", "canary", "unproven"]
    passed: bool
    mean_abs_dlogp: float | None = None
    max_abs_dlogp: float | None = None
    atol: float | None = None
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form without the fields that do not apply."""
        return {k: v for k, v in self.__dict__.items() if _plain(v) not in {None, ""}}

    def __str__(self) -> str:
        mark = "✓" if self.passed else "✗"
        if self.kind == "canary" and self.mean_abs_dlogp is not None:
            return f"{mark} canary {self.mean_abs_dlogp:.1e} ≤ {self.atol:.0e}"
        return f"{mark} {self.kind}" if self.kind != "unproven" else "– unproven"


@dataclass(frozen=True)
class SyncRecord:
    """One attempted sync.

    Attributes:
        step: The trainer's optimizer step.
        policy: The version's name.
        version: Its number.
        transport: ``adapter`` or ``merged``.
        carrier: ``filesystem``, ``direct``, ``nccl``, …
        outcome: ``committed``, or ``failed`` (rolled back: every server serves what it served before).
        bytes: Payload to each server.
        digest: Content digest (hex).
        phases_ms: Milliseconds per phase: ``snapshot``, ``publish``, ``load``, ``verify``, …
        total_ms: Milliseconds from the call to the commit.
        stall_ms: Milliseconds that the trainer waited in the call.
        proofs: Proof by server URL.
        servers: Milliseconds per phase by server URL.
        staleness: Versions that the served policy is behind the newest attempted one, once this sync has ended.
        aside: Servers that get no requests after this sync, with the reason.
        joined: URLs of servers that began to get requests since the record before: they joined, returned, or were
            restarted; each was brought to the version and proven.
        error: Why it failed.
        extra: What a carrier adds, e.g. the rounding error of a merge.
        time: Unix time of the outcome, seconds.
    """

    step: int
    policy: str
    version: int
    transport: str
    carrier: str
    outcome: Literal["committed", "failed"]
    bytes: int = 0
    digest: str = ""
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    total_ms: float = 0.0
    stall_ms: float = 0.0
    proofs: Mapping[str, Proof] = field(default_factory=dict)
    servers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    staleness: int = 0
    aside: Mapping[str, str] = field(default_factory=dict)
    joined: Sequence[str] = ()
    error: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    @property
    def proven(self) -> bool:
        """Whether every server proved this version (never true of an ``unproven`` one)."""
        return bool(self.proofs) and all(p.passed and p.kind != "unproven" for p in self.proofs.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        out = {**self.__dict__, "proofs": {url: proof.to_dict() for url, proof in self.proofs.items()}}
        out["phases_ms"] = {k: round(v, 3) for k, v in self.phases_ms.items()}
        out["servers"] = {u: {k: round(v, 3) for k, v in phases.items()} for u, phases in self.servers.items()}
        out |= {"extra": dict(self.extra), "aside": dict(self.aside), "joined": list(self.joined)}
        out["proven"] = self.proven
        plain: dict[str, Any] = _plain(out)
        return plain

    def metrics(self, prefix: str = "loraflow/") -> dict[str, float]:
        """Flat numbers for the trainer's log."""
        out = {
            f"{prefix}version": float(self.version),
            f"{prefix}sync_ms": self.total_ms,
            f"{prefix}stall_ms": self.stall_ms,
            f"{prefix}bytes": float(self.bytes),
            f"{prefix}proven": float(self.proven),
            f"{prefix}servers_aside": float(len(self.aside)),
        }
        out |= {f"{prefix}{phase}_ms": ms for phase, ms in self.phases_ms.items()}
        gaps = [p.mean_abs_dlogp for p in self.proofs.values() if p.mean_abs_dlogp is not None]
        if gaps:
            out[f"{prefix}canary_dlogp"] = max(gaps)
        return out | {f"{prefix}{name}": value for name, value in self.extra.items()}


@dataclass(frozen=True)
class Rollouts:
    """One batch of generated samples, as `SyncManager.on_rollouts` gives it to hooks.

    Attributes:
        prompt_ids: Prompt tokens of each sample.
        completion_ids: Completion tokens of each sample.
        logprobs: Log-prob of each completion token under the policy that generated it (natural log).
        versions: Policy version that generated each sample.
        newest_version: The newest attempted version when they were generated, not counting numbers that a canary spent
            since ``versions``.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None
    versions: Sequence[int]
    newest_version: int

    @property
    def staleness(self) -> tuple[int, ...]:
        """Versions that each sample was behind when it was generated."""
        return tuple(self.newest_version - version for version in self.versions)


def _plain(value: Any) -> Any:
    """``value`` as JSON has it, which knows no number that is not finite: None in its place."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RecordFile:
    """Appends records to a JSONL file, one line each, flushed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: SyncRecord) -> None:
        """Write one record, on a line of its own also where a process or a disk left the last one unfinished."""
        begin = b"\n" if _is_torn(self.path) else b""
        with self.path.open("ab") as file:
            file.write(begin + json.dumps(record.to_dict(), allow_nan=False).encode() + b"\n")


def _is_torn(path: Path) -> bool:
    """Whether a file's last line has no end; a pipe has none to look at."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"

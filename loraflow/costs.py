"""What a sync costs, and what it does to generation: rough figures for a user's eyes, and a `loraflow bench` report.

With a report the plan compares whole cycles: one sync, and the rollouts that are generated between two of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraflow.adapter import AdapterSpec
from loraflow.errors import ConfigError
from loraflow.server_info import ServerInfo

__all__ = ["BASE", "FOLDED", "SLOT", "Costs", "Rollout", "estimate_ms", "payload_bytes"]

BASE, SLOT, FOLDED = "base, LoRA server", "slot", "folded"
"""What the windows of a report served."""

# Fixed milliseconds and GB/s per carrier, rounded from benchmarks/results on one H200 host: an order of magnitude for a
# user's eyes; `loraflow bench` measures the real ones.
_COST: Mapping[str, tuple[float, float]] = {
    "direct": (4.0, 30.0),
    "filesystem": (15.0, 1.2),
    "fold": (8.0, 20.0),
    "ipc": (50.0, 25.0),
    "nccl": (50.0, 25.0),
    "gloo": (50.0, 1.0),
}


def estimate_ms(carrier: str, payload_bytes: int) -> float:
    """Rough milliseconds of one sync of ``payload_bytes`` to one server."""
    fixed, rate = _COST[carrier]
    return fixed + payload_bytes / rate / 1e6


def payload_bytes(carrier: str, spec: AdapterSpec, servers: Sequence[ServerInfo]) -> int:
    """Adapter bytes in the serving dtype, or those of every weight that the adapter changes."""
    width = 4 if any(server.dtype == "float32" for server in servers) else 2
    if carrier in {"direct", "filesystem", "fold"}:
        return width * sum(math.prod(shape) for shape in spec.shapes.values())
    total = 0
    for name, shape in spec.shapes.items():
        partner = spec.shapes.get(name.replace(".lora_A.", ".lora_B."))
        if ".lora_A." in name and partner is not None:
            total += partner[0] * shape[-1]
    return width * total


@dataclass(frozen=True)
class Rollout:
    """What is generated between two syncs.

    Attributes:
        streams: Sequences at once.
        tokens: Tokens of each, on average.
    """

    streams: int
    tokens: int


@dataclass(frozen=True)
class Costs:
    """What a `loraflow bench` report says.

    Attributes:
        sync_ms: Median milliseconds of one sync, by carrier.
        rates: Tokens per second over all streams, by what was served and the number of streams.
    """

    sync_ms: Mapping[str, float]
    rates: Mapping[tuple[str, int], float]

    @classmethod
    def from_file(cls, path: str | Path) -> Costs:
        """Read a report that ``loraflow bench --out`` wrote.

        Raises:
            ConfigError: It is no such report, or says nothing of syncs.
        """
        try:
            content = json.loads(Path(path).read_text())
            reports = content.get("reports", [content])
            sync_ms = {str(item["way"]): float(item["p50_ms"]) for report in reports for item in report["summary"]}
            found: dict[tuple[str, int], list[float]] = {}
            for rate in (rate for report in reports for rate in report["generation"]):
                key = (str(rate["arm"]), int(rate["streams"]))
                found.setdefault(key, []).append(float(rate["tokens_per_second"]))
            numbers = [
                *sync_ms.values(),
                *(streams for _, streams in found),
                *(r for rates in found.values() for r in rates),
            ]
            if not all(math.isfinite(number) and number > 0 for number in numbers):
                raise ValueError("a time, a rate or a number of streams is not above zero")  # noqa: TRY301
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"cost_file {path} is no report of `loraflow bench`: {error}",
                hint="loraflow bench --out DIR writes one",
            ) from error
        if not sync_ms:
            raise ConfigError(f"cost_file {path} has no measured syncs")
        return cls(sync_ms, {key: sum(values) / len(values) for key, values in found.items()})

    def cycle_ms(self, transport: str, carrier: str, rollout: Rollout, *, lora_enabled: bool) -> float | None:
        """Milliseconds of one sync and the rollouts after it; None where something of it was not measured.

        Args:
            transport: ``adapter`` or ``merged``.
            carrier: Which.
            rollout: What is generated between two syncs.
            lora_enabled: The server has LoRA slots: it generates slower then, merged weights included.
        """
        arm = SLOT if transport == "adapter" else (BASE if lora_enabled else FOLDED)
        measured = [streams for name, streams in self.rates if name == arm]
        if carrier not in self.sync_ms or not measured:
            return None
        nearest = min(measured, key=lambda streams: abs(math.log(streams / rollout.streams)))
        return self.sync_ms[carrier] + 1e3 * rollout.streams * rollout.tokens / self.rates[arm, nearest]

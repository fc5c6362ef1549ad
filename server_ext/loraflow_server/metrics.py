"""Counters of the plugin, shown in Prometheus' text form."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

__all__ = ["Metrics", "elapsed_ms"]

_HELP = {
    "loraflow_loads_total": "Adapters loaded, by carrier.",
    "loraflow_unloads_total": "Adapters unloaded.",
    "loraflow_verifies_total": "Checksum calls answered.",
    "loraflow_folds_total": "Adapters folded into the base weights.",
    "loraflow_resets_total": "Returns to the pristine base weights.",
    "loraflow_refusals_total": "Requests refused or failed, by code.",
    "loraflow_payload_bytes_total": "Bytes of adapters taken, by carrier.",
    "loraflow_request_seconds_total": "Seconds spent in requests, by route.",
    "loraflow_requests_total": "Requests, by route.",
    "loraflow_adapters_loaded": "Adapter names that requests may use now.",
    "loraflow_names_used": "Adapter names that were ever used: none is taken again.",
    "loraflow_weights_touched": "1 where the base weights were updated and are not proven pristine.",
    "loraflow_cache_bytes": "Bytes of fetched versions in the cache.",
}


def elapsed_ms(start: float) -> float:
    """Milliseconds since ``start`` on the performance counter."""
    return round((time.perf_counter() - start) * 1e3, 3)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Metrics:
    """Counters by name and labels. Used from the API server's event loop only."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(lambda: defaultdict(float))

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add ``amount`` to counter ``name``; its labels are few and bounded."""
        self._values[name][tuple(sorted(labels.items()))] += amount

    def text(self, gauges: Mapping[str, float]) -> str:
        """All counters and the given gauges in Prometheus' text exposition format 0.0.4."""
        lines = []
        for name, series in sorted(self._values.items()):
            lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} counter"]
            for labels, value in sorted(series.items()):
                shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
                lines.append(f"{name}{{{shown}}} {value:.17g}" if shown else f"{name} {value:.17g}")
        for name, value in sorted(gauges.items()):
            lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge", f"{name} {value:.17g}"]
        return "\n".join(lines) + "\n"

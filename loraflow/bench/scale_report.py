"""The report of a scaling curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loraflow.bench.report import Environment
from loraflow.bench.scenarios import Failure, Sample
from loraflow.bench.summary import Payload, Summary

__all__ = ["Axis", "Point", "ScaleReport"]

Axis = Literal["rank", "layers", "preset"]


@dataclass(frozen=True)
class Point:
    """One place on the axis.

    Attributes:
        value: Rank, number of layers, or name of the preset.
        payload: Sizes.
        summary: By way.
        samples: Every sync.
        failures: Ways that failed.
    """

    value: int | str
    payload: Payload
    summary: tuple[Summary, ...]
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class ScaleReport:
    """All places.

    Attributes:
        axis: What was varied.
        environment: Where.
        settings: How, but for what was varied.
        points: In the order in which they were asked for.
        fit_ms: By way: milliseconds of a sync without payload, and per MB, of the straight line through the medians.
    """

    axis: Axis
    environment: Environment
    settings: Mapping[str, Any]
    points: tuple[Point, ...]
    fit_ms: Mapping[str, tuple[float, float]]

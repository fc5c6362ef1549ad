"""When a sync is due: every N optimizer steps, or when the measured drift passes a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loraflow.config import SyncConfig

__all__ = ["AdaptiveSchedule", "FixedSchedule", "Schedule", "make_schedule"]


class Schedule(Protocol):
    """Decides when to sync."""

    def due(self, step: int, last: int | None) -> bool:
        """Whether to sync at ``step``, when ``last`` was the step of the last sync (None: never).

        A step before ``last`` is of weights that were loaded since, or counted anew: a sync is due.
        """
        ...

    def observe(self, drift: float) -> None:
        """Take note of the drift of the committed version's rollouts: k3 KL(rollout ‖ trainer), nats per token."""
        ...

    def synced(self) -> None:
        """Forget the drift: a new version was committed."""
        ...


@dataclass(frozen=True)
class FixedSchedule:
    """Every ``interval`` steps, counted from the last sync: trainers do not generate at every step, so a remainder
    would skip syncs."""

    interval: int

    def due(self, step: int, last: int | None) -> bool:  # noqa: D102
        return last is None or not 0 <= step - last < self.interval

    def observe(self, drift: float) -> None:  # noqa: D102
        del drift

    def synced(self) -> None:  # noqa: D102
        pass


class AdaptiveSchedule:
    """When the drift of the last rollouts is above ``budget``, at the earliest after ``low`` and at the latest after
    ``high`` steps.

    The drift is measured on rollouts that the served version generated, so it already covers how far the trainer has
    moved since.
    """

    def __init__(self, budget: float, low: int, high: int) -> None:
        self.budget, self.low, self.high = budget, low, high
        self._drift = 0.0

    def due(self, step: int, last: int | None) -> bool:  # noqa: D102
        if last is None or not 0 <= step - last < self.high:
            return True
        # NaN drift means that log-probs are broken: sync rather than wait.
        return step - last >= self.low and not self._drift <= self.budget

    def observe(self, drift: float) -> None:  # noqa: D102
        self._drift = drift

    def synced(self) -> None:  # noqa: D102
        self._drift = 0.0


def make_schedule(config: SyncConfig) -> Schedule:
    """The schedule that ``vllm_sync_interval`` asks for."""
    if config.vllm_sync_interval == "adaptive":
        return AdaptiveSchedule(config.drift_budget, config.min_sync_interval, config.max_sync_interval)
    return FixedSchedule(config.vllm_sync_interval)

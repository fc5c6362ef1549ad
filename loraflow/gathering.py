"""Taking the snapshot of a sync: by all ranks together, or by one while the servers are on their way to wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from loraflow.adapter import AdapterSnapshot, AdapterSpec, take_snapshot
from loraflow.capture import SnapshotPlan
from loraflow.policy import Policy
from loraflow.ranks import Ranks
from loraflow.verify import Prover

if TYPE_CHECKING:
    from loraflow.fleet import Fleet

__all__ = ["Gathering"]


@dataclass(frozen=True)
class Gathering:
    """The adapter of a model, gathered anew for each version.

    Attributes:
        model: The trainer's.
        spec: What the adapter was when the run started; another one is refused.
        dtype: dtype of the snapshots; that of the parameters where None.
    """

    model: nn.Module
    spec: AdapterSpec | None
    dtype: torch.dtype | None

    def together(self, ranks: Ranks, step: int) -> AdapterSnapshot:
        """By every rank. Collective."""

        def prepare() -> tuple[SnapshotPlan, torch.Tensor]:
            plan = SnapshotPlan.of(self.model)
            return plan, plan.buffer(self.dtype)

        # Apart, so that a rank without room is not missed in the middle of the others' gathers.
        prepared = ranks.together(prepare)
        return ranks.together(lambda: self._take(*prepared, step))

    def announced(self, fleet: Fleet, policy: Policy, prover: Prover, step: int) -> AdapterSnapshot:
        """By the only rank, the servers having been called for it: see `Fleet.announced`. Several ranks come to a sync
        at different times, and an engine waits for an announced version.

        Where the carrier checks it while the servers work, the tensors are gathered by the plan of the last sync,
        before anybody has looked whether the model is still the same.

        Raises:
            ModelChangedError: It is not, and could not be gathered by that plan.
        """
        used: list[SnapshotPlan] = []

        def unchanged() -> None:
            for plan in used:
                plan.require_holds()

        with fleet.announced(policy, prover, unchanged) as checked_later:
            used.append((SnapshotPlan.known if checked_later else SnapshotPlan.of)(self.model))
            try:
                return self._take(used[0], used[0].buffer(self.dtype), step)
            except Exception:
                unchanged()  # then that is why
                raise

    def _take(self, plan: SnapshotPlan, room: torch.Tensor, step: int) -> AdapterSnapshot:
        return take_snapshot(self.model, dtype=self.dtype, step=step, spec=self.spec, out=room, plan=plan)

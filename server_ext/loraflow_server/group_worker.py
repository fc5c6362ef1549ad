"""The worker's part of broadcasts of payloads, as `LoraflowWorker` mixes it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraflow_server.answers import answers
from loraflow_server.fold_worker import FoldWorker
from loraflow_server.lines import Meeting

__all__ = ["GroupWorker"]


class GroupWorker(FoldWorker):
    """Methods of a worker that join and leave trainers' broadcast groups; ``self.parallel_config`` is the worker's."""

    parallel_config: Any

    def loraflow_place(self) -> int:
        """Place of this worker among all engines', from 0."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)

    @answers
    def loraflow_group_join(self, group: str, meeting: Mapping[str, Any]) -> Mapping[str, Any]:
        """Join a trainer's group: a `Meeting` without the rank, which is this worker's place among all engines'."""
        rank = 1 + self.loraflow_place()
        self.loraflow_payloads().lines.join(group, Meeting(rank=rank, **meeting))
        return {"rank": rank}

    @answers
    def loraflow_group_leave(self, group: str) -> Mapping[str, Any]:
        """Leave it."""
        return {"left": self.loraflow_payloads().lines.leave(group)}

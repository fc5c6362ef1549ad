"""The worker's part of merged updates, as `LoraflowWorker` mixes it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loraflow_server.answers import answers
from loraflow_server.collective import Line
from loraflow_server.errors import PluginError
from loraflow_server.group_worker import GroupWorker
from loraflow_server.lifeline import still_wanted
from loraflow_server.mapped import MappedBuffers, Where
from loraflow_server.receive import Incoming, line_of, receive
from loraflow_server.served import ServedWeights

__all__ = ["WeightsWorker"]

_LAYOUTS = 2
"""That of an adapter's weights, and that of all."""


class WeightsWorker(GroupWorker):
    """Methods of a worker that find weights, receive merged ones, and checksum them."""

    weight_transfer_engine: Any

    @answers
    def loraflow_weights_layout(self, layout_id: str, tensors: Mapping[str, Sequence[int]]) -> Mapping[str, Any]:
        """Find where checkpoint weights (name to shape) are served here."""
        layouts = self._loraflow_served()
        layouts.pop(layout_id, None)
        while len(layouts) >= _LAYOUTS:
            del layouts[next(iter(layouts))]
        served = layouts[layout_id] = ServedWeights(self.model_runner.get_model(), tensors)
        return {"rects": [rect.to_list() for rect in served.rects], "dtypes": served.dtypes}

    @answers
    def loraflow_weights_sums(self, layout_id: str) -> Mapping[str, Any]:
        """Checksum of each of them, as served now."""
        return {"sums": self._loraflow_served_of(layout_id).sums(self.model_runner.get_model())}

    @answers
    def loraflow_map(self, where: Mapping[str, Any]) -> Mapping[str, Any]:
        """Map a trainer's buffers, in place of those of the one before; the token that lies there."""
        self._loraflow_let_go()
        mapped = MappedBuffers(Where(**where), self.loraflow_place(), torch.device(self.device))
        self.__dict__["_loraflow_mapped"] = mapped
        return {"head": mapped.token}

    @answers
    def loraflow_unmap(self, name: str | None) -> Mapping[str, Any]:
        """Let go of them, where they are those of ``name``, or whose ever (None)."""
        known: MappedBuffers | None = self.__dict__.get("_loraflow_mapped")
        mine = known is not None and name in {None, known.name}
        if mine:
            self._loraflow_let_go()
        return {"unmapped": mine}

    @answers
    def loraflow_receive(self, incoming: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        """Write what the trainer sends to where it is served, and checksum all of the layout's weights then.

        What has arrived before a failure stays: requests must not be let in before another update. What was mapped is
        not, then: its trainer may have gone, and maps anew where it has not.
        """
        coming, model = Incoming(**incoming), self.model_runner.get_model()
        served = self._loraflow_served_of(coming.layout_id)
        try:
            receive(self._loraflow_line(coming, timeout), coming, served, model)
        except BaseException:
            mapped: MappedBuffers | None = self.__dict__.pop("_loraflow_mapped", None)
            if mapped is not None:
                mapped.give_up()
            raise
        return {"sums": served.sums(model)}

    def _loraflow_line(self, coming: Incoming, timeout: float) -> Line:
        if coming.mapped is None:
            return line_of(self.weight_transfer_engine, torch.device(self.device), timeout, coming.lifeline)
        mapped: MappedBuffers | None = self.__dict__.get("_loraflow_mapped")
        if mapped is None or mapped.name != coming.mapped["name"]:
            raise PluginError("not_mapped", "this worker has not mapped the trainer's buffers", status=409)
        return mapped.line(coming.mapped["first"], timeout, still_wanted(coming.lifeline))

    def _loraflow_let_go(self) -> None:
        mapped: MappedBuffers | None = self.__dict__.pop("_loraflow_mapped", None)
        if mapped is not None:
            mapped.close()

    def _loraflow_served(self) -> dict[str, ServedWeights]:
        layouts: dict[str, ServedWeights] = self.__dict__.setdefault("_loraflow_weights", {})
        return layouts

    def _loraflow_served_of(self, layout_id: str) -> ServedWeights:
        served = self._loraflow_served().get(layout_id)
        if served is None:
            raise PluginError("unknown_layout", f"layout {layout_id!r} was not agreed with this server", status=409)
        return served

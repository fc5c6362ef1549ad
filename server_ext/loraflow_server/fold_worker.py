"""The worker's part of fold, as `LoraflowWorker` mixes it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loraflow_server.answers import answers
from loraflow_server.errors import PluginError
from loraflow_server.fold import Fold, FoldModule
from loraflow_server.payload import Payloads, read_folder

__all__ = ["FoldWorker"]


class FoldWorker:
    """Methods of a worker that fold adapters into its weights."""

    model_runner: Any
    device: torch.device

    def loraflow_payloads(self) -> Payloads:
        """The payload blocks that this worker has open."""
        payloads: Payloads = self.__dict__.setdefault("_loraflow_payloads", Payloads(torch.device(self.device)))
        return payloads

    def loraflow_fold_of(self, layout_id: str) -> Fold:
        """The fold agreed under ``layout_id``; refused where this worker does not know it."""
        known: tuple[str, Fold] | None = self.__dict__.get("_loraflow_fold")
        if known is None or known[0] != layout_id:
            raise PluginError(
                "unknown_layout", f"fold layout {layout_id!r} was not agreed with this server", status=409
            )
        return known[1]

    @answers
    def loraflow_fold_layout(
        self, layout_id: str, modules: Sequence[Mapping[str, Any]], tensors: Sequence[Sequence[int]]
    ) -> Mapping[str, Any]:
        """Find the served weights that an adapter targets, copy them, and checksum the copy.

        A fold of another layout is restored first, and its copy let go of.
        """
        known: tuple[str, Fold] | None = self.__dict__.get("_loraflow_fold")
        if known is None or known[0] != layout_id:
            if known is not None:
                known[1].restore()
                del self.__dict__["_loraflow_fold"], known
            shapes = [(int(rows), int(cols)) for rows, cols in tensors]
            fold = Fold(self.model_runner.get_model(), [FoldModule.from_json(item) for item in modules], shapes)
            self.__dict__["_loraflow_fold"] = (layout_id, fold)
        fold = self.loraflow_fold_of(layout_id)
        return {
            "dtype": str(fold.dtype).removeprefix("torch."),
            "rects": [rect.to_list() for rect in fold.rects],
            "base_sums": fold.base_sums(),
            "copy": fold.copy_place,
            "copy_bytes": fold.nbytes,
        }

    @answers
    def loraflow_fold(
        self, layout_id: str, policy: str, source: Mapping[str, Any], expected: list[int] | None
    ) -> Mapping[str, Any]:
        """Launch the fold of a payload: the adapter's tensors in sorted order of names, in the weights' dtype.

        With a payload that was announced (`Payloads.bytes_of`) come the checksums that are expected of it.
        """
        fold = self.loraflow_fold_of(layout_id)
        if source["kind"] == "folder":
            payload = read_folder(source["path"], fold.shapes, fold.dtype).view(torch.uint8)
        else:
            payload = self.loraflow_payloads().bytes_of(source)
            if "flag" in source:
                expected = self.loraflow_payloads().numbers_of(source)
        fold.begin(policy, payload, expected)
        return {}

    @answers
    def loraflow_fold_finish(self, layout_id: str, whole: bool) -> Mapping[str, Any]:
        """Wait for the fold that was launched, prove it, and keep it or take it back."""
        return self.loraflow_fold_of(layout_id).finish(whole=whole)

    @answers
    def loraflow_fold_undo(self, layout_id: str, policy: str) -> Mapping[str, Any]:
        """Put back what was served before ``policy``."""
        return {"undone": self.loraflow_fold_of(layout_id).undo(policy)}

    @answers
    def loraflow_fold_reset(self) -> Mapping[str, Any]:
        """Put the pristine weights back, and let go of the copy."""
        known: tuple[str, Fold] | None = self.__dict__.pop("_loraflow_fold", None)
        if known is not None:
            known[1].restore()
        return {"restored": known is not None}

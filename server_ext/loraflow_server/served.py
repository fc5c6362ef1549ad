"""`ServedWeights`: where the served model holds given checkpoint weights, and checksums of what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loraflow_server.checksum import StreamSums
from loraflow_server.errors import PluginError
from loraflow_server.placement import find_served, require_live
from loraflow_server.rects import Rect

__all__ = ["ServedWeights"]


@dataclass(frozen=True)
class _Place:
    """Where a rectangle lies in a parameter: found by the parameter's name, which an update does not change."""

    rect: Rect
    parameter: str
    shape: torch.Size
    stride: tuple[int, ...]
    size: torch.Size
    steps: tuple[int, ...]
    offset: int

    def of(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = parameters.get(self.parameter)
        if found is None or found.shape != self.shape or found.stride() != self.stride:
            raise PluginError("moved", f"{self.parameter} has another layout than was agreed on", status=409)
        return torch.as_strided(found, self.size, self.steps, found.storage_offset() + self.offset)


class ServedWeights:
    """The places of checkpoint weights in the served model.

    Args:
        model: The served model.
        weights: Checkpoint name to shape.

    Attributes:
        dtypes: Of each piece, as served.
        shapes: Of each weight, by name; one of shape (n,) counts as (n, 1).

    Raises:
        PluginError: ``unsupported_layout`` or ``not_live`` (409): what is served cannot be told from such places.
    """

    def __init__(self, model: Any, weights: Mapping[str, Sequence[int]]) -> None:
        found = find_served(model, weights, shared=True)
        require_live(model, found)
        self._names = list(weights)
        self.shapes = {name: _matrix(shape) for name, shape in weights.items()}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._places = []
        for piece in found:
            whole = parameters[piece.parameter]
            offset = piece.view.storage_offset() - whole.storage_offset()
            place = (piece.view.shape, piece.view.stride(), offset)
            self._places.append(_Place(piece.rect, piece.parameter, whole.shape, whole.stride(), *place))
        self.dtypes = [str(piece.view.dtype).removeprefix("torch.") for piece in found]
        device = found[0].view.device if found else torch.device("cpu")
        self._stream = StreamSums([piece.view.numel() * piece.view.element_size() for piece in found], device)

    @property
    def rects(self) -> list[Rect]:
        """The pieces, ``Rect.tensor`` indexing ``weights``; one (n,) counts as (n, 1)."""
        return [place.rect for place in self._places]

    def places(self, model: Any) -> dict[str, list[tuple[Rect, torch.Tensor]]]:
        """Each weight's pieces with the memory that serves them, by name.

        Raises:
            PluginError: ``moved`` (409).
        """
        found: dict[str, list[tuple[Rect, torch.Tensor]]] = {}
        for place, view in zip(self._places, self._views(model), strict=True):
            found.setdefault(self._names[place.rect.tensor], []).append((place.rect, view))
        return found

    def sums(self, model: Any) -> list[int]:
        """Checksum of each piece as served now, row by row in its own dtype."""
        views = self._views(model)
        self._stream.restart()
        self._stream.take_all(range(len(views)), views)
        return self._stream.finish()

    def _views(self, model: Any) -> list[torch.Tensor]:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return [place.of(parameters) for place in self._places]


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 1)

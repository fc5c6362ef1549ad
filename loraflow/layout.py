"""The trainer's side of the slot layout: which piece of which tensor lies on which rank of a server.

A server reads the layout back from its own layers once per run (`PluginClient.layout`); the trainer uses it to compute
what every rank must hold (`loraflow.digest`) and nothing else: it never guesses how a projection is packed or sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.errors import CapabilityError
from loraflow_server.rects import Rect

__all__ = ["Rect", "ServingCopy", "SlotLayout", "dtype_of", "lora_shapes", "module_of"]

_PREFIX = "base_model.model."
_A_SUFFIXES = (".lora_A.weight", ".lora_embedding_A")
_B_SUFFIXES = (".lora_B.weight", ".lora_embedding_B")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: object) -> torch.dtype:
    """The dtype that a server calls ``name``.

    Raises:
        CapabilityError: One that the trainer does not compute with.
    """
    if name not in _DTYPES:
        raise CapabilityError("the server's dtype is none of those known", expected=sorted(_DTYPES), found=name)
    return _DTYPES[str(name)]


def module_of(tensor: str) -> str:
    """Name of the adapted module in the base model: ``base_model.model.X.lora_A.weight`` gives ``X``."""
    name = tensor.removeprefix(_PREFIX)
    for suffix in (*_A_SUFFIXES, *_B_SUFFIXES):
        name = name.removesuffix(suffix)
    return name


def lora_shapes(spec: AdapterSpec) -> dict[str, tuple[int, int]]:
    """Shapes of the adapter's LoRA matrices, sorted by name.

    Raises:
        CapabilityError: The adapter has other tensors (DoRA magnitudes, biases, whole modules), which no slot holds.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, shape in sorted(spec.shapes.items()):
        if not name.endswith((*_A_SUFFIXES, *_B_SUFFIXES)) or len(shape) != 2:
            raise CapabilityError(
                f"the tensor {name!r} has no place in a LoRA slot", hint="use transport='merged' for this adapter"
            )
        shapes[name] = (shape[0], shape[1])
    return shapes


@dataclass(frozen=True)
class SlotLayout:
    """Where an adapter's tensors lie on one kind of server.

    Attributes:
        layout_id: The server's handle for it; the same for the same tensors.
        dtype: dtype of the slots.
        tensors: Name to shape, sorted by name; ``Rect.tensor`` indexes it.
        ranks: The pieces on each rank of an engine, in the order of the server's checksums.
        engines: Data-parallel engines; each has all ranks.
    """

    layout_id: str
    dtype: torch.dtype
    tensors: Mapping[str, tuple[int, int]]
    ranks: tuple[tuple[Rect, ...], ...]
    engines: int

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> SlotLayout:
        """Read the plugin's answer.

        Raises:
            CapabilityError: A dtype of slots that the trainer cannot compute with.
        """
        return cls(
            layout_id=str(answer["layout_id"]),
            dtype=dtype_of(answer["dtype"]),
            tensors={name: (int(shape[0]), int(shape[1])) for name, shape in answer["tensors"].items()},
            ranks=tuple(tuple(Rect.from_list(item) for item in rank) for rank in answer["ranks"]),
            engines=int(answer["engines"]),
        )


class ServingCopy:
    """An adapter as a LoRA slot holds it: in the slots' dtype, every B multiplied by its scaling in that dtype.

    The same two roundings, in the same order, as vLLM's loader makes them. One buffer, filled again for each version.

    Args:
        spec: The adapter.
        dtype: dtype of the slots.
        device: Where the snapshots are.
        scaled: False leaves B as it is (fold multiplies in float32).

    Attributes:
        flat: All values, shape (n,), contiguous, sorted by tensor name, no gaps.
        tensors: Tensor name to its view of ``flat``.
    """

    def __init__(
        self, spec: AdapterSpec, dtype: torch.dtype, device: torch.device | str = "cpu", *, scaled: bool = True
    ) -> None:
        shapes = lora_shapes(spec)
        sizes = [rows * cols for rows, cols in shapes.values()]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = self.flat.split_with_sizes(sizes)
        self.tensors: dict[str, torch.Tensor] = {
            name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }
        scalings = {name: spec.scaling(module_of(name)) for name in shapes if name.endswith(_B_SUFFIXES)}
        factors = [
            (self.tensors[name], float(scaling)) for name, scaling in scalings.items() if scaled and scaling != 1
        ]
        self._scaled = [tensor for tensor, _ in factors]
        self._scalings = [scaling for _, scaling in factors]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.flat.numel() * self.flat.element_size()

    def fill(self, snapshot: AdapterSnapshot) -> None:
        """Take a snapshot's values: one cast and copy, one multiplication."""
        self.flat.copy_(snapshot.flat)
        if self._scaled:
            torch._foreach_mul_(self._scaled, self._scalings)

"""`MergeSource`: a stream of merged weights, made from the frozen base of a live PEFT model and a snapshot.

The trainer's weights are only read (rule 5): each base tensor is copied into a float32 scratch buffer, the update is
applied there, and the result is rounded once. Names are those of the base model's checkpoint, which is what servers
load; where transformers keeps tensors under other names, or stacked, they are turned back as `save_pretrained` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from loraflow.capture import active_adapter, find_peft_model
from loraflow.errors import AdapterError
from loraflow.merge_model import BaseTensor, Unit, read_model
from loraflow.merge_rules import LinearDelta, same_update
from loraflow.problems import Problem
from loraflow_server.precision import true_float32

if TYPE_CHECKING:
    from loraflow.adapter import AdapterSnapshot

__all__ = ["MergeSource", "PlainWeight", "WireTensor"]


@dataclass(frozen=True)
class WireTensor:
    """What is announced of one tensor before it travels.

    Attributes:
        name: As in the base model's checkpoint.
        dtype: dtype on the wire.
        shape: Whole (unsharded) shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """How vLLM spells ``dtype``, e.g. ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PlainWeight:
    """A weight that is ``W + s · B · A`` and nothing else, and travels as the base keeps it.

    Attributes:
        source: The base tensor; not quantised, not trained itself.
        rule: Its update.
        keys: Names of ``A`` and ``B`` in the snapshot, by role.
    """

    source: BaseTensor
    rule: LinearDelta
    keys: Mapping[str, str]


def _plain_weights(units: Iterable[Unit]) -> Iterator[tuple[str, PlainWeight]]:
    for unit in units:
        source = unit.sources[0]
        own = unit.convert is dict and len(unit.sources) == len(unit.outputs) == 1
        if own and len(source.updates) == 1 and source.initial is None and not source.quantised:
            rule, keys = source.updates[0].rule, source.updates[0].keys
            if isinstance(rule, LinearDelta) and keys.keys() == {"A", "B"}:
                yield next(iter(unit.outputs)), PlainWeight(source, rule, keys)


@dataclass
class _Rounding:
    """Squared norms, summed over the tensors of one pass, kept on the device until they are asked for."""

    error: list[Tensor] = field(default_factory=list)
    update: list[Tensor] = field(default_factory=list)

    def relative(self) -> float:
        if not self.update:
            return 0.0
        error, update = (torch.stack(values).double().sum().item() for values in (self.error, self.update))
        return math.sqrt(error / update) if update > 0 else (math.inf if error > 0 else 0.0)


class MergeSource:
    """The weights of one trainer's model, as a server would load them: pristine, or with a snapshot merged in.

    Attributes:
        weights: Every weight by checkpoint name, in the model's order.
        changed: Names that a snapshot of this adapter can change, in the model's order.
        plain: Those that can be merged in other ways than by `merged`: see `loraflow.transports.grouped`.

    Args:
        model: The trainer's model; wrappers around the PEFT model are looked through.
        dtype: dtype that the server serves; weights with a low-rank update travel in it.
        dequantize_base: Merge into quantised weights by dequantising them (lossy).
        measure_every: Measure the rounding error of every so manieth merged weight, in each pass of others (four more
            reads of each); 0 measures none.

    Raises:
        AdapterError: The adapter has an update that cannot be merged; each is listed with its reason.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype, dequantize_base: bool = False, measure_every: int = 1
    ) -> None:
        peft_model = find_peft_model(model)
        layout = read_model(peft_model, active_adapter(peft_model), dtype=dtype, dequantize=dequantize_base)
        self._layers = [module for module in peft_model.modules() if isinstance(module, LoraLayer)]
        self._units = layout.units
        self._tied = layout.tied_updates
        self._measure_every = measure_every
        self._merges = 0
        self._passes = 0
        self._rounding = _Rounding()
        self.weights: Mapping[str, WireTensor] = {
            name: WireTensor(name, unit.dtype, shape) for unit in layout.units for name, shape in unit.outputs.items()
        }
        self.changed: tuple[str, ...] = tuple(
            name for unit in layout.units if any(s.updates for s in unit.sources) for name in unit.outputs
        )
        self.plain: Mapping[str, PlainWeight] = dict(_plain_weights(layout.units))

    def announce(self, names: Iterable[str]) -> list[WireTensor]:
        """What `merged` and `pristine` yield for ``names``, in the order in which they yield it."""
        wanted = set(names)
        return [tensor for name, tensor in self.weights.items() if name in wanted]

    def merged(
        self, snapshot: AdapterSnapshot, names: Iterable[str], *, rounded: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Weights with ``snapshot`` merged in.

        Args:
            snapshot: The adapter; copied off the trainer, so that the next training step may run meanwhile.
            names: Checkpoint names to yield; those that the adapter does not change come as they are.
            rounded: False leaves the last step to the receiver: tensors come in float32, or in the base's dtype, and
                are rounded as they are copied to where they travel from.

        Yields:
            Name and tensor (dtype and shape as announced, contiguous, on the base weight's device). A tensor may be
            a view of the trainer's own weight: read it, and let go of it before the next one.

        Raises:
            AdapterError: Before a tensor is asked for: the snapshot lacks one, tied layers were trained apart, or an
                adapter was merged into the trainer's weights.
        """
        self._require_unmerged()
        self._check(snapshot.tensors)
        self._rounding = _Rounding()
        self._passes += 1
        self._merges = self._passes  # so that each pass measures others
        return self._stream(set(names), snapshot.tensors, rounded=rounded)

    def pristine(self, names: Iterable[str], *, rounded: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The base weights ``names``, as `merged` yields them."""
        self._require_unmerged()
        return self._stream(set(names), None, rounded=rounded)

    @property
    def rounding_error(self) -> float:
        """``‖round(W + Δ) − (W + Δ)‖ / ‖Δ‖`` of the last `merged` pass (Frobenius, over the weights measured in it).

        ``W + Δ`` is the float32 result; on a float32 wire nothing is rounded after it, and this is 0.
        """
        return self._rounding.relative()

    def measured(self, errors: Tensor, updates: Tensor) -> None:
        """Count weights of the last `merged` pass that were merged elsewhere in `rounding_error`: every so manieth.

        Args:
            errors: ``‖round(W + Δ) − (W + Δ)‖²`` of each; float32, shape (n,).
            updates: ``‖Δ‖²`` of each.
        """
        every = self._measure_every
        if every > 0:
            first = -(self._merges + 1) % every
            self._rounding.error.append(errors[first::every].sum())
            self._rounding.update.append(updates[first::every].sum())
        self._merges += len(errors)

    def _require_unmerged(self) -> None:
        """The base is read from the trainer's weights: with an adapter inside, it would be served twice."""
        if any(layer.merged for layer in self._layers):
            raise AdapterError(
                "an adapter is merged into the trainer's weights, which are taken for the base",
                hint="call model.unmerge_adapter() before a sync",
            )

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        expected = {key for unit in self._units for s in unit.sources for u in s.updates for key in u.keys.values()}
        missing = sorted(expected - tensors.keys())
        if missing:
            raise AdapterError(
                "the snapshot is not of the adapter that this stream was made for",
                [Problem("incomplete", "missing from the snapshot", name) for name in missing[:5]],
            )
        for name, one, other in self._tied:
            if not same_update(one.rule, other.rule, one.parts(tensors), other.parts(tensors)):
                raise AdapterError(
                    "tied layers were trained apart",
                    [
                        Problem(
                            "unsupported_feature",
                            "its tied partner has another update; one server weight is both",
                            name,
                        )
                    ],
                )

    def _stream(
        self, wanted: set[str], tensors: Mapping[str, Tensor] | None, *, rounded: bool
    ) -> Iterator[tuple[str, Tensor]]:
        for unit in self._units:
            if wanted.isdisjoint(unit.outputs):
                continue
            with torch.no_grad(), _full_precision():
                made = {s.name: self._make(s, unit.dtype, tensors, rounded) for s in unit.sources}
                made = unit.convert(made)
            for name in unit.outputs:
                tensor = made.pop(name)
                if name in wanted:
                    yield name, tensor.contiguous()
                del tensor

    def _make(
        self, source: BaseTensor, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None, rounded: bool
    ) -> Tensor:
        base = source.read()
        if tensors is None or not source.updates:
            return base.to(dtype) if rounded else base
        scratch = base.to(torch.float32, copy=True)
        for update in source.updates:
            update.rule.apply(scratch, update.parts(tensors))
        if dtype != torch.float32 and self._measures():
            result = scratch.to(dtype)
            self._measure_one(base, scratch, result)
            return result
        return scratch.to(dtype) if rounded else scratch

    def _measures(self) -> bool:
        """Whether the rounding of the next merged weight is measured."""
        self._merges += 1
        return self._measure_every > 0 and self._merges % self._measure_every == 0

    def _measure_one(self, base: Tensor, scratch: Tensor, rounded: Tensor) -> None:
        """Add one tensor's norms to the pass; in place in the scratch, which nothing reads afterwards."""
        scratch.sub_(base)  # exact: the two are within a factor of two wherever it matters, so adding restores it
        self._rounding.update.append(torch.linalg.vector_norm(scratch).square())
        scratch.add_(base).sub_(rounded)
        self._rounding.error.append(torch.linalg.vector_norm(scratch).square())


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matrix products in true float32: neither TF32 nor autocast, whatever the trainer uses for its own."""
    with true_float32():
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            yield
            return
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield

"""The canary: an adapter that certainly does something, so that one that loads and does nothing is seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from loraflow.adapter import AdapterSnapshot, AdapterSpec, take_snapshot
from loraflow.connect import is_sharded
from loraflow.errors import LoraflowError
from loraflow.verify import Expected, Prover

__all__ = ["canary_snapshot", "find_canary"]

_STDS = (0.02, 0.05, 0.1, 0.3, 1.0)
_STD_UNSEEN = 0.1  # where its effect on the trainer cannot be computed


def find_canary(
    model: nn.Module, spec: AdapterSpec | None, dtype: torch.dtype, prover: Prover, base: Expected
) -> tuple[AdapterSnapshot, Expected | None]:
    """The smallest canary whose effect on the trainer stands clear of the noise. Collective.

    Args:
        model: The trainer's PEFT model; it is not written.
        spec: What the adapter is, if it is known already.
        dtype: dtype of the snapshot.
        prover: Computes the trainer's log-probs under the canary.
        base: The same with the adapter off.

    Returns:
        The canary, and what it makes the trainer compute: None on a sharded trainer, where the forward with other
        weights is not to be had. There the canary must only change the served log-probs.
    """
    snapshot = take_snapshot(model, dtype=dtype, spec=spec)
    if is_sharded(model):
        return canary_snapshot(snapshot, _STD_UNSEEN), None
    for std in _STDS:
        canary = canary_snapshot(snapshot, std)
        expected = prover.expect(override=prover.canary_override(canary))
        if prover.effect(expected, base) >= prover.visible:
            return canary, expected
    raise LoraflowError("no canary changes the trainer's own output: does the adapter reach the forward?")


def canary_snapshot(snapshot: AdapterSnapshot, std: float, *, seed: int = 0) -> AdapterSnapshot:
    """``snapshot`` with A drawn from N(0, 1/in) and B from N(0, ``std``²): an adapter that certainly does something.

    What the model ties (an output layer's update to its embedding's, ``ensure_weight_tying``) stays tied.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = snapshot.flat.clone()
    parts = flat.split_with_sizes([tensor.numel() for tensor in snapshot.tensors.values()])
    tensors = {
        name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, snapshot.tensors.items(), strict=True)
    }
    for name, tensor in tensors.items():
        if ".lora_" not in name or tensor.dim() != 2:
            continue  # magnitudes, biases and full modules stay as they are
        is_b = ".lora_B." in name or ".lora_embedding_B" in name
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * (std if is_b else tensor.shape[-1] ** -0.5))
    for name, partner in _tied(snapshot.tensors):
        tensors[name].copy_(tensors[partner].t())
    return AdapterSnapshot(snapshot.spec, flat, tensors, snapshot.step)


def _tied(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Matrices of linear layers that are an embedding's, turned: each with the one it equals."""
    embeddings = [name.removesuffix("_A") for name in tensors if name.endswith(".lora_embedding_A")]
    linears = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    for embedding, linear in itertools.product(embeddings, linears):
        pairs = (f"{linear}.lora_B.weight", f"{embedding}_A"), (f"{linear}.lora_A.weight", f"{embedding}_B")
        if all(torch.equal(tensors[name], tensors[partner].t()) for name, partner in pairs):
            yield from pairs

"""The three checks of weight sync: a no-op changes nothing, a perturbation propagates, restoring restores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraflow.adapter import take_snapshot
from loraflow.capture import SnapshotPlan
from loraflow.manager import SyncManager

__all__ = ["Check", "run_checks"]

_PROMPTS = [[5, 70, 33, 120, 64, 9, 201, 18], [77, 250, 99, 41], [160, 12, 300, 58, 7, 7]]


@dataclass(frozen=True)
class Check:
    """One check, whether it held, and what was seen."""

    name: str
    passed: bool
    seen: str


def run_checks(model: Path, url: str, out: Path) -> list[Check]:
    """Sync an adapter four times (as it is, again, perturbed, restored) and compare greedy output of the server."""
    policy = _policy(model)
    with SyncManager(policy, url, transport="adapter", adapter_root=str((out / "adapters").resolve())) as manager:
        manager.start()
        before = _greedy(manager)
        manager.sync(1)
        again = _greedy(manager)
        saved = _values(policy)
        _perturb(policy)
        manager.sync(2)
        moved = _greedy(manager)
        _restore(policy, saved)
        manager.sync(3)
        restored = _greedy(manager)
    return [
        Check("a no-op sync leaves greedy output bit-identical", again == before, _compare(before, again)),
        Check("a perturbation propagates", moved != before, _compare(before, moved)),
        Check("restoring the weights restores the output", restored == before, _compare(before, restored)),
    ]


Outputs = list[tuple[tuple[int, ...], tuple[float, ...]]]


def _greedy(manager: SyncManager) -> Outputs:
    """Tokens and log-probs of greedy completions under the policy that is served now."""
    answers = manager.servers[0].generate(_PROMPTS, model=manager.policy_name, max_tokens=12, temperature=0.0)
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def _compare(one: Outputs, other: Outputs) -> str:
    tokens = sum(a == b for (x, _), (y, _) in zip(one, other, strict=True) for a, b in zip(x, y, strict=False))
    total = sum(len(tokens) for tokens, _ in one)
    gap = max(abs(a - b) for (_, x), (_, y) in zip(one, other, strict=True) for a, b in zip(x, y, strict=False))
    return f"{tokens} of {total} tokens the same, log-probs differ by at most {gap:.2g}"


def _policy(model: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    policy = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    _perturb(policy)
    return policy.eval()


def _values(policy: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in take_snapshot(policy).tensors.values()]


@torch.no_grad()
def _perturb(policy: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for entry in SnapshotPlan.of(policy).entries:
        parameter = entry.parameter()
        parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.device))


@torch.no_grad()
def _restore(policy: Any, saved: list[torch.Tensor]) -> None:
    for entry, value in zip(SnapshotPlan.of(policy).entries, saved, strict=True):
        entry.parameter().copy_(value)

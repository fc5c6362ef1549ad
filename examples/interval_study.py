"""How often must a policy travel? Means and standard errors over many seeds, in minutes on one core.

    python examples/interval_study.py --out examples/results

An own loop with a policy small enough to sample from in-process, and exactly: a low-rank adapter (PEFT) on a network
that sees the token before and the position. When to sync is loraflow's schedule, what a stale sample weighs is
loraflow's correction; only the server is left out. The task is to count: a token is right where it is the one before
plus one, modulo four. The learning rate is high on purpose, so that a policy four steps old is another policy.
adaptive_interval.py is the same question on a real server.

Writes interval_study.json and interval_study.png.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from loraflow.config import SyncConfig
from loraflow.correction import CorrectionOptions, correct, drift
from loraflow.schedule import make_schedule

VOCABULARY, LENGTH, PROMPTS, GENERATIONS = 64, 12, 4, 16
TOKEN = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
GEOMETRIC = {"vllm_importance_sampling_mode": "geometric_truncate", "vllm_importance_sampling_clip_max": 2.0}
NONE = {"vllm_importance_sampling_correction": False}
WAYS: dict[str, dict[str, Any]] = {
    "interval 1": {"vllm_sync_interval": 1, **TOKEN},
    "adaptive": {"vllm_sync_interval": "adaptive", "drift_budget": 0.05, "max_sync_interval": 8, **TOKEN},
    "interval 4, token level": {"vllm_sync_interval": 4, **TOKEN},
    "interval 4, geometric level": {"vllm_sync_interval": 4, **GEOMETRIC},
    "interval 4, uncorrected": {"vllm_sync_interval": 4, **NONE},
}


class Policy(nn.Module):
    """Log-probs of the next token, (…, VOCABULARY), from the token before (…) and the position (…)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY + PROMPTS, 48)
        self.place = nn.Embedding(LENGTH, 16)
        self.hidden, self.head = nn.Linear(64, 128), nn.Linear(128, VOCABULARY)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, before: Tensor, places: Tensor) -> Tensor:
        seen = torch.cat([self.token(before), self.place(places)], -1)
        return self.head(torch.tanh(self.hidden(seen))).log_softmax(-1)


@dataclass
class Run:
    """One training: by step the mean reward of the rollouts and their drift; and the steps that synced."""

    seed: int
    reward: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    synced_at: list[int] = field(default_factory=list)


def make_model(seed: int) -> Any:
    torch.manual_seed(0)
    base = Policy()
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["hidden", "head"]))


@torch.no_grad()
def sample(model: Any, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, (B, LENGTH) each."""
    ids, logps = [prompts], []
    for position in range(LENGTH):
        table = model(ids[-1], torch.full_like(prompts, position))
        ids.append(torch.multinomial(table.exp(), 1, generator=generator)[:, 0])
        logps.append(table.gather(-1, ids[-1][:, None])[:, 0])
    return torch.stack(ids[1:], 1), torch.stack(logps, 1)


def logprobs(model: Any, prompts: Tensor, ids: Tensor) -> Tensor:
    before = torch.cat([prompts[:, None], ids[:, :-1]], 1)
    return model(before, torch.arange(LENGTH).expand_as(ids)).gather(-1, ids[..., None])[..., 0]


def counts_on(ids: Tensor) -> Tensor:
    """Reward of each row: the share of tokens that are the one before plus one, modulo four."""
    return ((ids[:, 1:] % 4) == ((ids[:, :-1] + 1) % 4)).float().mean(1)


def train(config: SyncConfig, *, seed: int, steps: int, learning_rate: float) -> Run:
    trainer, server = make_model(seed), make_model(seed)
    adapter = {name: value for name, value in trainer.named_parameters() if value.requires_grad}
    served = dict(server.named_parameters())
    optimizer = torch.optim.AdamW(adapter.values(), lr=learning_rate, weight_decay=0.0)
    schedule, options = make_schedule(config), CorrectionOptions.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    prompts = (VOCABULARY + torch.arange(PROMPTS)).repeat_interleave(GENERATIONS)
    mask = torch.ones(len(prompts), LENGTH)
    run = Run(seed)
    for step in range(steps):
        if schedule.due(step, run.synced_at[-1] if run.synced_at else None):
            with torch.no_grad():
                for name, value in adapter.items():
                    served[name].copy_(value)
            schedule.synced()
            run.synced_at.append(step)

        ids, rollout_logps = sample(server, prompts, generator)
        rewards = counts_on(ids).view(PROMPTS, GENERATIONS)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        current = logprobs(trainer, prompts, ids)
        found = correct(current.detach(), rollout_logps, mask, options=options)
        schedule.observe(drift(found).kl)
        loss = -(current * found.weights * advantages.view(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.values(), 1.0)
        optimizer.step()
        run.reward.append(float(rewards.mean()))
        run.kl.append(drift(found).kl)
    return run


def summary(runs: list[Run]) -> dict[str, list[float]]:
    """Mean over the seeds and its standard error."""

    def of(values: list[float]) -> list[float]:
        numbers = torch.tensor(values)
        error = numbers.std() / len(numbers) ** 0.5 if len(numbers) > 1 else torch.tensor(0.0)
        return [round(float(numbers.mean()), 3), round(float(error), 3)]

    last = max(1, len(runs[0].reward) // 6)
    return {
        "reward over the run": of([sum(run.reward) / len(run.reward) for run in runs]),
        "reward at the end": of([sum(run.reward[-last:]) / last for run in runs]),
        "syncs": of([float(len(run.synced_at)) for run in runs]),
        "KL per token": of([sum(run.kl) / len(run.kl) for run in runs]),
    }


def plot(found: dict[str, list[Run]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rewards, kl) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    for name, runs in found.items():
        curves = torch.tensor([run.reward for run in runs])
        mean, error = curves.mean(0), curves.std(0) / len(runs) ** 0.5
        [line] = rewards.plot(mean, label=f"{name} ({summary(runs)['syncs'][0]:.0f} syncs)")
        rewards.fill_between(range(len(mean)), mean - error, mean + error, color=line.get_color(), alpha=0.25)
        kl.plot(torch.tensor([run.kl for run in runs]).mean(0).clamp(min=1e-6), color=line.get_color())
    rewards.set_ylabel(f"reward of the rollouts, mean ± s.e. of {len(runs)} seeds")
    rewards.legend()
    kl.set(yscale="log", xlabel="optimizer step", ylabel="KL(rollout ‖ trainer), nats per token")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-2)
    parser.add_argument("--out", type=Path, default=Path("interval-study-out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    found: dict[str, list[Run]] = {}
    for name, way in WAYS.items():
        found[name] = [
            train(SyncConfig(**way), seed=seed, steps=options.steps, learning_rate=options.learning_rate)
            for seed in range(options.seeds)
        ]
        told = ", ".join(f"{what} {mean} ± {error}" for what, (mean, error) in summary(found[name]).items())
        print(f"{name}: {told}", flush=True)
    report = {
        "steps": options.steps,
        "seeds": options.seeds,
        "learning_rate": options.learning_rate,
        "ways": WAYS,
        "mean and standard error": {name: summary(runs) for name, runs in found.items()},
        "reward by step": {
            name: [[round(value, 3) for value in run.reward] for run in runs] for name, runs in found.items()
        },
    }
    (options.out / "interval_study.json").write_text(json.dumps(report) + "\n")
    plot(found, options.out / "interval_study.png")


if __name__ == "__main__":
    main()

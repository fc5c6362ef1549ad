"""How often must a policy travel? GRPO on a task that a tiny model learns, under four ways to sync.

    loraflow serve MODEL --max-lora-rank 16
    python examples/adaptive_interval.py --model MODEL --out examples/results

Writes adaptive_interval.json and adaptive_interval.png. "Uncorrected" is what training takes stale samples for when
nothing corrects them: bounds of 1 on both sides make every importance weight 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from loraflow.config import default_adapter_root
from loraflow.integrations.trl import LoraSyncCallback

PROMPTS = ["the cat sat on", "a bird flew over", "two dogs ran in", "the small red hill"]
CORRECTED: dict[str, Any] = {
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
UNCORRECTED: dict[str, Any] = {
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": 1.0 - 1e-6,
    "vllm_importance_sampling_clip_max": 1.0 + 1e-6,
}
WAYS: dict[str, dict[str, Any]] = {
    "interval 1": {"vllm_sync_interval": 1, **CORRECTED},
    "adaptive": {"vllm_sync_interval": "adaptive", "drift_budget": 0.03, "max_sync_interval": 8, **CORRECTED},
    "interval 4, corrected": {"vllm_sync_interval": 4, **CORRECTED},
    "interval 4, uncorrected": {"vllm_sync_interval": 4, **UNCORRECTED},
}


def low_tokens(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The share of tokens whose id is below 128."""
    return [sum(token < 128 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def counting(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The share of tokens that are the one before plus one, modulo four: learnt later, and easily lost again."""
    steps = [[(b - a) % 4 == 1 for a, b in itertools.pairwise(ids)] for ids in completion_ids]
    return [sum(row) / max(1, len(row)) for row in steps]


REWARDS = {"low-tokens": low_tokens, "counting": counting}


def train(options: argparse.Namespace, way: dict[str, Any], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    sync = LoraSyncCallback(adapter_root=options.adapter_root, **way)
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=REWARDS[options.reward],
        args=GRPOConfig(
            output_dir=str(options.out / "trainer"),
            max_steps=options.steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=16,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options.server,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 200}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[sync],
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seed": seed,
        "reward": [entry["reward"] for entry in log],
        "kl": [entry["loraflow/correction/kl"] for entry in log],
        "synced_at": [record.step for record in sync.records],
    }


def plot(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rewards, drift) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    for name, runs in found.items():
        reward = torch.tensor([run["reward"] for run in runs]).mean(0)
        syncs = sum(len(run["synced_at"]) for run in runs) / len(runs)
        rewards.plot(reward, label=f"{name} ({syncs:.0f} syncs)")
        drift.plot(torch.tensor([run["kl"] for run in runs]).mean(0).clamp(min=1e-6), label=name)
    rewards.set_ylabel("mean reward")
    rewards.legend()
    drift.set(yscale="log", xlabel="optimizer step", ylabel="KL(rollout ‖ trainer), nats per token")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--reward", choices=REWARDS, default="low-tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("adaptive-interval-out"))
    parser.add_argument("--adapter-root", default=default_adapter_root(), help="the server's --adapter-root")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.ways:
        found[name] = [train(options, WAYS[name], seed) for seed in range(options.seeds)]
        last = sum(sum(run["reward"][-4:]) / 4 for run in found[name]) / len(found[name])
        print(
            f"{name}: reward {last:.3f} at the end, synced at {[run['synced_at'] for run in found[name]]}", flush=True
        )
    report = {
        "reward": options.reward,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "ways": {name: WAYS[name] for name in options.ways},
        "runs": found,
    }
    (options.out / "adaptive_interval.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(found, options.out / "adaptive_interval.png")


if __name__ == "__main__":
    main()

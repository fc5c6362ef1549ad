"""GRPO with its rollouts from a vLLM server that loraflow keeps on the policy.

loraflow serve Qwen/Qwen2.5-0.5B-Instruct --max-lora-rank 16
python examples/grpo.py --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from loraflow.config import default_adapter_root
from loraflow.integrations.trl import LoraSyncCallback

PROMPTS = ["the cat sat on", "a bird flew over", "two dogs ran in", "the small red hill"]


def lower_case_share(completions: list[str], **_: object) -> list[float]:
    """The share of characters that are lower-case letters: any model can learn that."""
    return [sum("a" <= ch <= "z" for ch in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="grpo-out")
    parser.add_argument("--adapter-root", default=default_adapter_root(), help="the server's --adapter-root")
    options = parser.parse_args()

    sync = LoraSyncCallback(vllm_sync_interval=2, adapter_root=options.adapter_root)
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=lower_case_share,
        args=GRPOConfig(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=16,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options.server,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 100}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[sync],
    )
    trainer.train()

    if trainer.accelerator.is_main_process:
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
        for record in sync.records:
            proof = "; ".join(map(str, record.proofs.values()))
            print(f"step {record.step}: {record.policy}, {record.total_ms:.0f} ms, {proof}")


if __name__ == "__main__":
    main()

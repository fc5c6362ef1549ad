"""Online DPO, attached after the trainer was built (``use_vllm=False`` needs no GPU and opens no communicator).

loraflow serve Qwen/Qwen2.5-0.5B-Instruct --max-lora-rank 16
python examples/online_dpo.py --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from loraflow.config import default_adapter_root
from loraflow.integrations.trl import attach

PROMPTS = ["the cat sat on", "a bird flew over", "two dogs ran in", "the small red hill"]


def lower_case_share(completions: list[str], **_: object) -> list[float]:
    return [sum("a" <= ch <= "z" for ch in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="online-dpo-out")
    parser.add_argument("--adapter-root", default=default_adapter_root(), help="the server's --adapter-root")
    options = parser.parse_args()

    trainer = OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        reward_funcs=lower_case_share,
        args=OnlineDPOConfig(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            max_new_tokens=16,
            learning_rate=1e-3,
            vllm_server_base_url=options.server,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 100}),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    sync = attach(trainer, adapter_root=options.adapter_root)
    trainer.train()

    for record in sync.records:
        print(f"step {record.step}: {record.policy}, {record.total_ms:.0f} ms, proven: {record.proven}")


if __name__ == "__main__":
    main()

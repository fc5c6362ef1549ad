"""An own training loop, without TRL: `SyncManager` delivers the policy, and `correction` weighs what is off-policy.

loraflow serve Qwen/Qwen2.5-0.5B-Instruct --max-lora-rank 16
python examples/own_loop.py --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraflow import SyncManager
from loraflow.config import default_adapter_root

PROMPTS = ["the cat sat on", "a bird flew over"]
GENERATIONS = 8


def reward(text: str) -> float:
    return sum("a" <= ch <= "z" for ch in text) / max(1, len(text))


def logprobs(model: torch.nn.Module, prompts: list[list[int]], completions: list[tuple[int, ...]]) -> Tensor:
    """Log-probs of the completions' tokens, (B, T), 0 where padded."""
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *completion]], device=model.device)).logits[0].float()
        table = logits[len(prompt) - 1 : -1].log_softmax(-1)
        rows.append(table.gather(-1, torch.tensor(completion, device=model.device)[:, None])[:, 0])
    return pad_sequence(rows, batch_first=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--adapter-root", default=default_adapter_root(), help="the server's --adapter-root")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    base = AutoModelForCausalLM.from_pretrained(options.model).to(device)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    prompts = [ids for ids in tokenizer(PROMPTS)["input_ids"] for _ in range(GENERATIONS)]

    with SyncManager(model, options.server, vllm_sync_interval=2, adapter_root=options.adapter_root) as manager:
        print(manager.start())
        for step in range(options.steps):
            if step > 0 and manager.due(step):
                manager.sync(step)
            with manager.rollout() as policy:
                answers = manager.generate(prompts, max_tokens=16, temperature=1.0)

            completions = [answer.token_ids for answer in answers]
            rewards = torch.tensor([reward(tokenizer.decode(ids)) for ids in completions]).view(-1, GENERATIONS)
            advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().to(device)
            sampled = pad_sequence([torch.tensor(answer.logprobs) for answer in answers], batch_first=True).to(device)
            mask = pad_sequence([torch.ones(len(ids)) for ids in completions], batch_first=True).to(device)

            current = logprobs(model, prompts, completions)
            versions = torch.full((len(prompts),), policy.version)
            found = manager.correction(current.detach(), sampled, mask, versions=versions.to(device))
            loss = -(current * found.weights * advantages[:, None] * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kl = float(found.diagnostics.kl)
            print(f"step {step}: reward {float(rewards.mean()):.2f}, served by {policy}, KL {kl:.1e} nats per token")


if __name__ == "__main__":
    main()

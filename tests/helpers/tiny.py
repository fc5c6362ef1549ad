"""Tiny models and adapters for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loraflow.demo.tiny import make_tiny_model, make_tiny_tokenizer

__all__ = ["PROMPT", "load_base", "make_tiny_model", "make_tiny_tokenizer", "peft_logprobs", "peft_model", "randomize"]

PROMPT = [5, 70, 33, 120, 64, 9, 201, 18, 77, 250, 99, 41, 160, 12, 300, 58]


def load_base(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def peft_model(
    folder: str | Path, *, seed: int = 0, std: float = 0.05, dtype: torch.dtype = torch.float32, **lora: Any
) -> Any:
    """A PEFT model over the tiny base with a random, non-zero B (so that a no-op is seen)."""
    options: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **lora}
    model = get_peft_model(load_base(folder, dtype), LoraConfig(task_type="CAUSAL_LM", **options))
    randomize(model, seed=seed, std=std)
    return model.eval()


def randomize(model: Any, *, seed: int = 0, std: float = 0.05) -> None:
    """Draw every LoRA parameter of `model` anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


@torch.no_grad()
def peft_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probs of tokens[1:], float32, shape (len(tokens) - 1,)."""
    logits = model(input_ids=torch.tensor([tokens])).logits.float()
    return logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]

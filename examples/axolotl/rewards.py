"""The dataset's prompts and the reward of grpo_lora_sync.yaml."""

from __future__ import annotations

import re
from typing import Any


def question(cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows of questions.jsonl as conversations; the answer goes on to the reward."""

    def transform(example: dict[str, Any], tokenizer: Any = None) -> dict[str, Any]:
        text = f"{example['question']} Answer with a number only."
        return {"prompt": [{"role": "user", "content": text}], "answer": example["answer"]}

    return transform, {"remove_columns": ["question"]}


def right_answer(completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
    """1 for the right number, and nothing else; 0.5 for the right number in a longer text."""

    def score(text: str, wanted: int) -> float:
        numbers = re.findall(r"-?\d+", text)
        if not numbers or int(numbers[-1]) != wanted:
            return 0.0
        return 1.0 if text.strip() == str(wanted) else 0.5

    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [score(text, int(wanted)) for text, wanted in zip(texts, answer, strict=True)]

"""Imported by Axolotl itself: the reward, and what makes prompts of the dataset's rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def long(completions: list[Any], **_: Any) -> list[float]:
    """The more distinct characters, the better; every completion is kept for the test to read."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    seen = os.environ.get("LORAFLOW_TEST_COMPLETIONS")
    if seen:
        with Path(seen).open("a") as file:
            file.writelines(json.dumps(text) + "\n" for text in texts)
    return [float(len(set(text))) for text in texts]


def prompt(cfg: Any, *_: Any, **__: Any) -> Any:
    return (lambda example, tokenizer=None: {"prompt": example["prompt"]}), {"remove_columns": []}


def conversation(cfg: Any, *_: Any, **__: Any) -> Any:
    def transform(example: Any, tokenizer: Any = None) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": example["prompt"]}]}

    return transform, {"remove_columns": []}

"""What TRL needs to train the tiny model in a test, and trainers that note their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from loraflow.integrations.trl import LoraSyncCallback, TrainerSync
from loraflow.records import Rollouts
from tests.helpers.vllm_process import RunningServer

_TEXT = "the a cat dog bird sat ran flew on in over mat tree hill red blue green big small one two three"
WORDS = tuple(_TEXT.split())


def prompts(count: int = 64) -> Dataset:
    """Distinct prompts of three words each."""
    texts = [f"{WORDS[i % 22]} {WORDS[(3 * i + 1) % 22]} {WORDS[(7 * i + 2) % 22]}" for i in range(count)]
    return Dataset.from_dict({"prompt": texts})


def low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of tokens whose id is below 128: about a third at first, and easily learnt."""
    return [sum(token < 128 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options})


def arguments(server: RunningServer, out: Path, **options: Any) -> dict[str, Any]:
    """Training arguments: eight completions of 12 tokens a step, a learning rate at which a step matters."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 4,
        **options,
    }


class NotesBatches:
    """Mixed into a trainer: keeps every batch as TRL scored it, and as it reached the loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.raw: list[dict[str, Any]] = []
        self.seen: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.raw.append({"step": self.state.global_step, "training": self.model.training, **batch})
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.seen.append({"step": self.state.global_step, "training": self.model.training, **inputs})
        return super()._compute_loss(model, inputs)


def names_served(server: RunningServer) -> list[str]:
    """Models that the server lists now."""
    import requests

    return [model["id"] for model in requests.get(f"{server.url}/v1/models", timeout=10).json()["data"]]


class Witness(TrainerCallback):  # type: ignore[misc]
    """Keeps the adapter of every optimizer step and everything that was generated, and judges it afterwards.

    Args:
        trainer: Where the policy is trained.
        sync: What loraflow gave for it.
    """

    def __init__(self, trainer: Any, sync: LoraSyncCallback | TrainerSync) -> None:
        self.rollouts: list[Rollouts] = []
        self._model, self._sync = trainer.model, sync
        self._adapter_at = {0: self._adapter()}
        trainer.add_callback(self)
        sync.on_rollouts(self.rollouts.append)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter_at[state.global_step] = self._adapter()

    def share_of_low_tokens(self, rollouts: Rollouts) -> float:
        return sum(low_tokens([list(ids) for ids in rollouts.completion_ids])) / len(rollouts.completion_ids)

    def gaps(self, *, steps_before: int = 0) -> list[float]:
        """Largest |Δlogp| of each rollout batch against the adapter of the version that it is labelled with.

        Args:
            steps_before: Take the adapter of so many optimizer steps earlier instead; batches without one are left out.
        """
        step_of = {record.version: record.step for record in self._sync.records if record.error is None}
        kept = self._adapter()
        found = []
        for batch in self.rollouts:
            [version] = set(batch.versions)
            adapter = self._adapter_at.get(step_of[version] - steps_before)
            if adapter is not None:
                self._load(adapter)
                found.append(self._gap(batch))
        self._load(kept)
        return found

    def _adapter(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._model.named_parameters() if "lora_" in name}

    @torch.no_grad()
    def _load(self, adapter: dict[str, Tensor]) -> None:
        for name, value in self._model.named_parameters():
            if name in adapter:
                value.copy_(adapter[name])

    @torch.no_grad()
    def _gap(self, batch: Rollouts) -> float:
        assert batch.logprobs is not None
        training = self._model.training
        rows = [
            torch.tensor([*prompt, *ids]) for prompt, ids in zip(batch.prompt_ids, batch.completion_ids, strict=True)
        ]
        logits = self._model.eval()(input_ids=pad_sequence(rows, batch_first=True)).logits  # causal: padding is unseen
        self._model.train(training)
        table = logits.float().log_softmax(-1)
        largest = 0.0
        for row, prompt, ids, served in zip(table, batch.prompt_ids, batch.completion_ids, batch.logprobs, strict=True):
            at = torch.arange(len(ids)) + len(prompt) - 1
            largest = max(largest, float((row[at, torch.tensor(ids)] - torch.tensor(served)).abs().max()))
        return largest

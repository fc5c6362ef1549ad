"""One GRPO run of the demo: TRL's own trainer on a reward that a tiny model can learn."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraflow.records import SyncRecord

__all__ = ["TrainedRun", "ascii_share", "train"]

_PROMPTS = (
    "the cat sat on",
    "a dog ran over",
    "the big bird flew",
    "one red tree in",
    "two small hills",
    "blue and green",
)


@dataclass(frozen=True)
class TrainedRun:
    """What a run left: the records of its syncs, and the mean reward of each step."""

    transport: str
    carrier: str
    records: tuple[SyncRecord, ...]
    rewards: tuple[float, ...]

    @property
    def reward_before(self) -> float:
        """Mean reward of the first two steps."""
        return sum(self.rewards[:2]) / len(self.rewards[:2])

    @property
    def reward_after(self) -> float:
        """Mean reward of the last four steps."""
        return sum(self.rewards[-4:]) / len(self.rewards[-4:])

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "transport": self.transport,
            "carrier": self.carrier,
            "reward_before": self.reward_before,
            "reward_after": self.reward_after,
            "rewards": list(self.rewards),
            "syncs": [record.to_dict() for record in self.records],
        }


def ascii_share(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of a completion's characters that is plain ASCII. A random model babbles other bytes."""
    return [sum(ch.isascii() for ch in text) / len(text) if text else 0.0 for text in completions]


def train(
    model: Path,
    url: str,
    out: Path,
    steps: int,
    *,
    transport: str,
    rank: int,
    report: Callable[[int, str], None],
) -> TrainedRun:
    """Train ``steps`` GRPO steps of the model in folder ``model``, with its rollouts from the server at ``url``."""
    _quiet()
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from loraflow.integrations.trl import LoraSyncCallback

    class Teller(TrainerCallback):  # type: ignore[misc]
        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                served = sync.records[-1].policy.rsplit("-", 1)[-1] if sync.records else "–"
                report(state.global_step, f"reward {logs['reward']:.2f}, serving {served}")

    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # as the server: a tiny model gains nothing from more
    sync = LoraSyncCallback(
        transport=transport,
        vllm_sync_interval=2,
        adapter_root=str((out / "adapters").resolve()),
        record_file=str(out / f"syncs-{transport}.jsonl"),
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=ascii_share,
        args=GRPOConfig(
            output_dir=str(out / "trainer"),
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=16,
            max_steps=steps,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=Dataset.from_dict({"prompt": list(_PROMPTS) * 40}),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[sync, Teller()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rewards = tuple(entry["reward"] for entry in trainer.state.log_history if "reward" in entry)
    records = tuple(sync.records)
    return TrainedRun(transport, records[-1].carrier, records, rewards)


def _quiet() -> None:
    """Leave the screen to the demo: libraries speak up from ERROR on."""
    warnings.filterwarnings("ignore")
    for name in ("transformers", "trl", "datasets", "vllm", "httpx", "urllib3", "accelerate", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("loraflow").setLevel(logging.WARNING)
    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

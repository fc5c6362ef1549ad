"""Seconds per step of a real GRPO run, by the way in which its weights travel: TRL's own, and loraflow's.

A section of ``h200.py`` (``--sections grpo``): the model of the preset, random prompts, LoRA on all linear layers, a
sync before every step. Equal seeds and equal batches; rewards are not looked at.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from loraflow.bench.session import Session

WAYS = {"direct": "lora", "filesystem": "lora", "fold": "plain", "stock-merged": "plain"}
"""The kind of server that each takes. TRL's own comes last: its merge and unmerge move the base that it sends."""

_WARM_UP = 3


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each optimizer step was over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From one step's end to the next, the first few left out."""
        return [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)][_WARM_UP:]


def grpo(session: Session, way: str, url: str, steps: int, batch: int, tokens: int) -> dict[str, Any]:
    """Train ``steps`` steps; seconds per step and milliseconds per sync, medians and samples."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from loraflow.integrations.trl import LoraSyncCallback

    cpu = session.settings.device.type == "cpu"
    config = GRPOConfig(
        output_dir=str(Path(session.settings.work) / f"grpo-{way}"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        num_generations=8,
        max_completion_length=tokens,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        use_cpu=cpu,
        bf16=not cpu,
        # TRL's own choice would spread the model over all GPUs (device_map="auto"), and its own sync packs from one.
        model_init_kwargs={"dtype": session.settings.preset.dtype, "device_map": {"": str(session.settings.device)}},
        generation_kwargs={"ignore_eos": True},
        logging_strategy="no",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=7,
    )
    assert config.n_gpu >= 0  # settles the devices, of which one trains
    config._n_gpu = min(1, config._n_gpu)
    clock, spent = Clock(), list[float]()
    callbacks: list[Any] = [clock]
    sync = None
    if way != "stock-merged":
        sync = LoraSyncCallback(
            carrier=way, adapter_root=str(session.root), base_atol=None if cpu else 0.2, vllm_sync_interval=1
        )
        callbacks.append(sync)
    rank = session.settings.rank
    trainer = GRPOTrainer(
        model=str(session.folder),
        reward_funcs=_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{chr(97 + i % 26)} {i} of {7 * i}" for i in range(512)]}),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=callbacks,
    )
    if sync is None:
        generation = trainer.vllm_generation
        plain = generation.sync_weights

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                spent.append((time.perf_counter() - began) * 1e3)

        generation.sync_weights = timed
    trainer.train()
    if sync is not None:
        spent = [record.total_ms for record in sync.records]
    seconds = clock.seconds()
    return {
        "s per step, p50": statistics.median(seconds),
        "ms per sync, p50": statistics.median(spent[1:]),
        "syncs": len(spent),
        "proven": sync is not None and all(record.proven for record in sync.records),
        "tokens per step": batch * tokens,
        "step_s": seconds,
        "sync_ms": spent,
    }


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / max(1, len(ids)) for ids in completion_ids]

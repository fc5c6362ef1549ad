"""Axolotl: one line in the YAML file.

::

    plugins:
      - loraflow.integrations.axolotl.LoraflowPlugin

The keys that Axolotl's guide gives for LoRA sync then do what it says, against an upstream vLLM server that
``loraflow serve --axolotl config.yaml`` starts. More options stand in a ``loraflow:`` section (see `SyncConfig`).
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.dict import DictDefault
from transformers import Trainer

from loraflow.config import SyncConfig
from loraflow.integrations.axolotl_config import is_async, sync_config, uses_plugin
from loraflow.integrations.axolotl_trainers import attach

__all__ = ["LoraflowPlugin"]

_TRL_MODES = {"token_truncate", "token_mask", "sequence_truncate", "sequence_mask"}


class LoraflowPlugin(BasePlugin):  # type: ignore[misc]
    """loraflow as a plugin of Axolotl."""

    def get_input_args(self) -> str:
        """The schema of the ``loraflow:`` section, which also refuses what cannot be served."""
        return "loraflow.integrations.axolotl_args.LoraflowArgs"

    def get_training_args(self, cfg: DictDefault) -> dict[str, Any]:
        """Build the trainer without vLLM, so that it neither waits for a server nor opens a communicator."""
        plain = cfg.to_dict()
        if not uses_plugin(plain):
            return {}
        given = {"chat_template_kwargs": plain["trl"].get("chat_template_kwargs")}  # Axolotl does not pass it on
        return {
            "use_vllm": False,
            **correction_args(sync_config(plain["loraflow"]), asynchronous=is_async(plain)),
            **{name: value for name, value in given.items() if value is not None},
        }

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer) -> None:
        """Let the trainer that was built generate on the servers."""
        plain = cfg.to_dict()
        if uses_plugin(plain):
            show_in_axolotls_log()
            attach(trainer, plain["loraflow"], plain["trl"].get("generation_kwargs"))


class _AsAxolotl(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        shown = copy.copy(record)
        shown.name = "axolotl.loraflow"
        logging.getLogger(shown.name).handle(shown)


def show_in_axolotls_log() -> None:
    """Pass on what loraflow logs as Axolotl's own: Axolotl drops what other packages log below WARNING."""
    ours = logging.getLogger("loraflow")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.handlers = [_AsAxolotl()]
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == "loraflow":
            logging.getLogger(name).filters.clear()  # Axolotl's, set as each logger was made


def correction_args(config: SyncConfig, *, asynchronous: bool) -> dict[str, Any]:
    """The off-policy correction as training arguments of TRL, or of Axolotl's async trainer.

    A mode that TRL does not know is left out: its ratio is replaced when a batch was scored. ``…_cap`` is TRL's old
    name of the upper bound; the async trainer's arguments still have it, always set, and it wins there.
    """
    high = config.vllm_importance_sampling_clip_max
    mode = config.vllm_importance_sampling_mode
    return {
        "vllm_importance_sampling_correction": config.vllm_importance_sampling_correction,
        **({"vllm_importance_sampling_mode": mode} if mode in _TRL_MODES else {}),
        "vllm_importance_sampling_clip_min": config.vllm_importance_sampling_clip_min,
        "vllm_importance_sampling_clip_max": high,
        "vllm_importance_sampling_cap": (float("inf") if high is None else high) if asynchronous else None,
        "off_policy_mask_threshold": config.off_policy_mask_threshold,
    }

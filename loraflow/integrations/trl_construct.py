"""Taking hold while a trainer is being built, before it opens an engine or a communicator of its own."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformers import Trainer, TrainerState
from trl.generation import vllm_generation as trl_generation
from trl.generation.vllm_generation import VLLMGeneration

from loraflow.errors import LoraflowError

__all__ = ["build_instead", "trainer_being_built"]

Builder = Callable[..., VLLMGeneration]

_builders: weakref.WeakKeyDictionary[Trainer, Builder] = weakref.WeakKeyDictionary()
"""Trainers whose constructors are running, and what to build for them; one that fails drops out with its trainer."""
_places: list[ModuleType] = []
"""Modules whose ``VLLMGeneration`` is `_build` now."""


def trainer_being_built(state: TrainerState) -> Trainer:
    """The trainer whose constructor is running: callbacks are given everything but the trainer itself."""
    frame = sys._getframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and getattr(candidate, "state", None) is state:
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    raise LoraflowError(
        "LoraSyncCallback was added to a trainer that exists already",
        hint="give it in callbacks=[…] when building the trainer, or call attach(trainer)",
    )


def build_instead(trainer: Trainer, builder: Builder) -> None:
    """Let the constructor of ``trainer``, which is running, call ``builder`` where it names ``VLLMGeneration``.

    The name is put back once every trainer waiting for it was served; a call for any other trainer gets TRL's class.
    """
    _builders[trainer] = builder
    modules = [sys.modules.get(cls.__module__) for cls in type(trainer).__mro__]
    for module in (trl_generation, *modules):
        if module is not None and getattr(module, "VLLMGeneration", None) is VLLMGeneration:
            module.VLLMGeneration = _build
            _places.append(module)


def _build(*args: Any, **kwargs: Any) -> VLLMGeneration:
    accelerator = kwargs.get("accelerator")
    wanted = [trainer for trainer in _builders if getattr(trainer, "accelerator", None) is accelerator]
    builder = _builders.pop(wanted[0]) if wanted else VLLMGeneration
    if not _builders:
        _put_back()
    return builder(*args, **kwargs)


def _put_back() -> None:
    while _places:
        _places.pop().VLLMGeneration = VLLMGeneration  # type: ignore[attr-defined]

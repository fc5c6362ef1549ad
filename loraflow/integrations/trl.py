"""TRL: one line on top of a user's script.

Either, where the script already says ``use_vllm=True, vllm_mode="server"``::

    GRPOTrainer(…, callbacks=[LoraSyncCallback()])

or, for a trainer that exists::

    attach(trainer)

Both put a `LoraVLLMGeneration` in the place of TRL's own ``VLLMGeneration``: no merge, no communicator; every request
names the proven policy, every answer is compared with the name that was asked for, and every sample is weighed by how
far off-policy it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError, ConfigError, LoraflowError
from loraflow.integrations.trl_backend import LoraVLLMGeneration
from loraflow.integrations.trl_batch import correct_batches
from loraflow.integrations.trl_construct import build_instead, trainer_being_built
from loraflow.integrations.trl_online_dpo import serve_at_first_generation, serve_online_dpo
from loraflow.integrations.trl_support import (
    Support,
    check_combination,
    config_from_args,
    listed,
    servers_from_args,
    support_of,
)
from loraflow.integrations.trl_sync import TrainerSync
from loraflow.manager import SyncManager
from loraflow.records import Rollouts, SyncRecord

__all__ = [
    "LoraSyncCallback",
    "LoraVLLMGeneration",
    "TrainerSync",
    "attach",
    "config_from_args",
    "servers_from_args",
    "support_of",
]

_GENERATION_ARGS = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "generation_kwargs")


def attach(
    trainer: Trainer,
    config: SyncConfig | None = None,
    *,
    servers: str | Sequence[str] | None = None,
    **options: Any,
) -> TrainerSync:
    """Let ``trainer`` generate on vLLM servers that loraflow keeps on its policy.

    Works for trainers built with ``use_vllm=True`` (the stock communicator is closed) and with ``use_vllm=False``
    (which need no GPU); TRL's own arguments (``vllm_server_base_url``, the importance-sampling options, …) are used.

    Args:
        trainer: A trainer that generates on a server: GRPO, RLOO, Distillation, OnlineDPO, ….
        config: All options; or give options of `SyncConfig` as keywords.
        servers: Base URLs, where they differ from TRL's own arguments.
        **options: See `SyncConfig`.

    Returns:
        What follows the trainer; its ``manager`` is there from the first generation on.

    Raises:
        ConfigError: An impossible combination, with the option to set.
        CapabilityError: This trainer does not generate in a way that can be served.
    """
    support = support_of(trainer)
    _refuse_twice(trainer)
    if _stock_mode(trainer, support) == "colocate":
        raise ConfigError(
            "this trainer's colocated engine was built without LoRA slots",
            hint="give callbacks=[LoraSyncCallback()] when building the trainer: it adds them"
            if support.generates == "backend"
            else 'build it with vllm_mode="server", or with use_vllm=False',
        )
    sync = _sync_for(trainer, support, config, listed(servers), options)
    if support.generates == "client":
        _close_stock(getattr(trainer, "vllm_client", None))
        serve_online_dpo(trainer, sync)
    else:
        stock = getattr(trainer, "vllm_generation", None)
        _close_stock(getattr(stock, "vllm_client", None))
        trainer.use_vllm = True
        trainer.vllm_mode = "server"
        trainer.vllm_generation = _backend(trainer, sync, logprobs=getattr(stock, "logprobs", 0))
        trainer._last_loaded_step = -1
        if hasattr(trainer.args, "vllm_sync_frequency"):  # GOLD and IW-OPD ask at each of their steps; we decide
            trainer.vllm_sync_frequency, trainer._last_vllm_sync_step = 1, -1
        _correct(trainer, trainer.vllm_generation, support)
    sync.take_hold()
    return sync


class LoraSyncCallback(TrainerCallback):  # type: ignore[misc]
    """loraflow in one line: ``callbacks=[LoraSyncCallback()]`` in a trainer with ``use_vllm=True``.

    It takes hold while the trainer is being built, before TRL opens its own communicator (``vllm_mode="server"``) or
    builds its own engine (``"colocate"``, which then gets LoRA slots).

    Args:
        config: All options; or give options of `SyncConfig` as keywords.
        servers: Base URLs, where they differ from TRL's own arguments.
        **options: See `SyncConfig`.

    Attributes:
        sync: What follows the trainer, once that is built.
        generation: The generation backend, once the trainer is built; None for a trainer with a client of its own.
    """

    def __init__(
        self, config: SyncConfig | None = None, *, servers: str | Sequence[str] | None = None, **options: Any
    ) -> None:
        self._config, self._servers, self._options = config, listed(servers), options
        self._sync_hooks: list[Callable[[SyncRecord], None]] = []
        self._rollout_hooks: list[Callable[[Rollouts], None]] = []
        self._saw_a_trainer = False
        self.sync: TrainerSync | None = None
        self.generation: LoraVLLMGeneration | None = None

    @property
    def manager(self) -> SyncManager:
        """The manager; there from the first generation to the end of the training."""
        if self.sync is None or self.sync.manager is None:
            raise LoraflowError("nothing was generated yet, or the training has ended")
        return self.sync.manager

    @property
    def records(self) -> list[SyncRecord]:
        """Every sync so far."""
        return [] if self.sync is None else self.sync.records

    def on_sync(self, hook: Callable[[SyncRecord], None]) -> None:
        """Call ``hook`` with every record; may be said before the trainer is built. See `TrainerSync.on_sync`."""
        self._sync_hooks.append(hook)
        if self.sync is not None:
            self.sync.on_sync(hook)

    def on_rollouts(self, hook: Callable[[Rollouts], None]) -> None:
        """Call ``hook`` with all that is generated; may be said before the trainer is built."""
        self._rollout_hooks.append(hook)
        if self.sync is not None:
            self.sync.on_rollouts(hook)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Called from within the trainer's constructor: make it build our backend instead of TRL's."""
        trainer = trainer_being_built(state)
        self._saw_a_trainer, self.sync, self.generation = True, None, None
        support = support_of(trainer)
        _refuse_twice(trainer)
        mode = getattr(args, "vllm_mode", "server")
        if not getattr(args, "use_vllm", False) or (mode, support.generates) == ("colocate", "client"):
            raise ConfigError(
                "LoraSyncCallback serves trainers that generate on a vLLM server, or through TRL's colocated engine",
                found=f"{type(trainer).__name__}, use_vllm={getattr(args, 'use_vllm', None)}, vllm_mode={mode!r}",
                hint='set use_vllm=True and vllm_mode="server" in the training arguments, or call '
                "loraflow.integrations.trl.attach(trainer) after building the trainer",
            )
        sync = _sync_for(trainer, support, self._config, self._servers, self._options)
        if support.generates == "client":
            serve_at_first_generation(trainer, sync)
            self._take(sync)
            return

        def build(*build_args: Any, **build_kwargs: Any) -> LoraVLLMGeneration:
            if support.corrected is not None:
                build_kwargs["logprobs"] = build_kwargs.get("logprobs") or 0  # RLOO asks for none
            self.generation = _backend_of(mode)(*build_args, loraflow=sync, **build_kwargs)
            _correct(trainer, self.generation, support)
            self._take(sync)
            return self.generation

        build_instead(trainer, build)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Refuse to train where the trainer was built with something else than our backend."""
        if not self._saw_a_trainer:
            raise ConfigError(
                "LoraSyncCallback was added to a trainer that exists already",
                hint="give it in callbacks=[…] when building the trainer, or call attach(trainer)",
            )
        if self.sync is None:
            raise CapabilityError(
                "this trainer did not build TRL's VLLMGeneration, so its weights were not taken over",
                hint="use loraflow.integrations.trl.attach(trainer), or loraflow.SyncManager in an own loop",
            )

    def _take(self, sync: TrainerSync) -> None:
        self.sync = sync
        for hook in self._sync_hooks:
            sync.on_sync(hook)
        for tell in self._rollout_hooks:
            sync.on_rollouts(tell)
        sync.take_hold()


def _sync_for(
    trainer: Trainer, support: Support, config: SyncConfig | None, servers: list[str], options: dict[str, Any]
) -> TrainerSync:
    sync_config = config_from_args(trainer.args, config, options)
    check_combination(trainer, sync_config, support)
    sync = TrainerSync(trainer, sync_config, servers or servers_from_args(trainer.args))
    trainer._loraflow = sync
    return sync


def _stock_mode(trainer: Trainer, support: Support) -> str | None:
    """How ``trainer`` was built to generate: ``server``, ``colocate``, or None where without vLLM."""
    if support.generates == "client":
        return getattr(trainer, "vllm_mode", None)
    return getattr(getattr(trainer, "vllm_generation", None), "mode", None)


def _refuse_twice(trainer: Trainer) -> None:
    if isinstance(getattr(trainer, "_loraflow", None), TrainerSync):
        raise ConfigError("loraflow is attached to this trainer already", hint="one LoraSyncCallback, or one attach()")


def _backend_of(mode: str) -> type[LoraVLLMGeneration]:
    if mode != "colocate":
        return LoraVLLMGeneration
    from loraflow.integrations.trl_colocate import ColocateGeneration  # needs what vLLM brings

    return ColocateGeneration


def _backend(trainer: Trainer, sync: TrainerSync, *, logprobs: int | None) -> LoraVLLMGeneration:
    args = trainer.args
    return LoraVLLMGeneration(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        mode="server",
        structured_outputs_regex=getattr(args, "vllm_structured_outputs_regex", None),
        server_timeout=args.vllm_server_timeout,
        max_completion_length=getattr(trainer, "max_completion_length", None) or args.max_completion_length,
        logprobs=logprobs or 0,
        loraflow=sync,
        **{name: getattr(args, name) for name in _GENERATION_ARGS if hasattr(args, name)},
    )


def _correct(trainer: Trainer, generation: LoraVLLMGeneration, support: Support) -> None:
    if support.corrected is not None:
        correct_batches(trainer, generation, support)


def _close_stock(client: Any) -> None:
    if client is not None and getattr(client, "communicator", None) is not None:
        client.close_communicator()

"""OnlineDPO: a trainer that talks to the server with a client of its own, instead of through ``VLLMGeneration``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from transformers import Trainer

from loraflow.errors import LoraflowError
from loraflow.integrations.trl_backend import sampled_logprobs
from loraflow.integrations.trl_client import PolicyClient
from loraflow.integrations.trl_sync import TrainerSync
from loraflow.manager import SyncManager

__all__ = ["OnlineDPOClient", "serve_at_first_generation", "serve_online_dpo"]


Rows = list[list[int]]


class OnlineDPOClient(PolicyClient):
    """A `PolicyClient` whose failures wait: the trainer broadcasts what it returns, and the other ranks wait for that.

    `raise_failure` raises them afterwards, on every rank.

    Attributes:
        answer: What the last request gave: ``prompt_ids`` by prompt; ``completion_ids``, ``logprobs`` by completion.
    """

    answer: dict[str, Any] | None = None
    _failure: BaseException | None = None

    def generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As TRL's; an empty answer of the right shape where it fails."""
        return self._held(super().generate, prompts, *args, **kwargs)

    def chat(self, messages: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As TRL's; an empty answer of the right shape where it fails."""
        return self._held(super().chat, messages, *args, **kwargs)

    def raise_failure(self) -> None:
        """Raise what the last request failed with."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _held(self, ask: Any, asked: Sequence[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.answer = None
        try:
            answer: dict[str, Any] = ask(asked, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised by raise_failure, on every rank
            self._failure = error
            return {"completion_ids": [[]] * (len(asked) * kwargs.get("n", 1))}
        self.answer = answer
        return answer


def serve_online_dpo(trainer: Trainer, sync: TrainerSync) -> OnlineDPOClient | None:
    """Let ``trainer`` generate on servers that are kept on its policy. Returns the client, on rank 0.

    The trainer may have been built with ``use_vllm=False``, which needs no GPU. Its own sync is replaced, and every
    value that its server path reads is set.
    """
    args = trainer.args
    client = None
    if trainer.accelerator.is_main_process:
        client = OnlineDPOClient(lambda: _manager(sync), sync.servers, sync.config)
    args.use_vllm = trainer.use_vllm = True
    args.vllm_mode = trainer.vllm_mode = "server"
    trainer.vllm_client = client
    trainer.structured_outputs_regex = args.vllm_structured_outputs_regex
    trainer.generation_config = SimpleNamespace(max_tokens=args.max_new_tokens)
    trainer._last_loaded_step = -1
    trainer._move_model_to_vllm = sync.up_to_date
    inner = trainer._generate_vllm_server

    @functools.wraps(inner)
    def generate(prompts: list[Any], images: list[Any] | None = None) -> tuple[Any, Any]:
        manager = sync.up_to_date()
        with manager.rollout() as policy:
            completion_ids, prompt_ids = inner(prompts, images)
        manager.ranks.on_main(client.raise_failure if client is not None else lambda: None)
        sync.tell(manager, policy.version, *_samples(client))
        return completion_ids, prompt_ids

    trainer._generate_vllm_server = generate
    return client


def _samples(client: OnlineDPOClient | None) -> tuple[Rows, Rows, list[list[float]] | None]:
    """Prompts, completions and log-probs that rank 0 was answered for all ranks; nothing on the others.

    The trainer's own broadcast drops the log-probs.
    """
    if client is None or client.answer is None:
        return [], [], None
    answer = client.answer
    completions = answer["completion_ids"]
    each = len(completions) // len(answer["prompt_ids"])
    prompts = [ids for ids in answer["prompt_ids"] for _ in range(each)]
    return prompts, completions, sampled_logprobs(completions, answer["logprobs"], answer["logprob_token_ids"])


def serve_at_first_generation(trainer: Trainer, sync: TrainerSync) -> None:
    """Called while the trainer is being built: keep it from opening a communicator, and take over later.

    Its constructor goes on as for ``use_vllm=False``; the first generation finds everything set.
    """
    trainer.use_vllm = False
    inner = trainer._generate_vllm

    @functools.wraps(inner)
    def first(prompts: list[Any], images: list[Any] | None = None) -> Any:
        del trainer._generate_vllm
        serve_online_dpo(trainer, sync)
        return inner(prompts, images)

    trainer._generate_vllm = first


def _manager(sync: TrainerSync) -> SyncManager:
    if sync.manager is None:
        raise LoraflowError("nothing was synced yet")
    return sync.manager

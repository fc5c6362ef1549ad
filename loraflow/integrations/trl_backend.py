"""`LoraVLLMGeneration`: TRL's generation backend, with loraflow's sync in the place of merge and broadcast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from loraflow.errors import CapabilityError, LoraflowError
from loraflow.integrations.trl_client import PolicyClient
from loraflow.integrations.trl_images import accept_rows_without_images
from loraflow.integrations.trl_support import same_server, support_of
from loraflow.integrations.trl_sync import TrainerSync
from loraflow.integrations.trl_tools import Turns, take_turns_together
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from loraflow.records import Rollouts, SyncRecord

__all__ = ["LoraVLLMGeneration"]


class LoraVLLMGeneration(VLLMGeneration):  # type: ignore[misc]
    """TRL's generation backend for servers that loraflow keeps on the policy.

    Attributes:
        sync: When and what is synced.
        last: The last generation on this rank, with the policy version of each sample.
    """

    def __init__(self, *args: Any, loraflow: TrainerSync, **kwargs: Any) -> None:
        self.sync = loraflow
        self.last: Rollouts | None = None
        self._batch: list[Rollouts] | None = None
        self._turns: Turns | None = None
        super().__init__(*args, **kwargs)
        accept_rows_without_images(loraflow.trainer)
        take_turns_together(loraflow.trainer, self)

    @property
    def manager(self) -> SyncManager | None:
        """The run's manager; None before the first generation and after `close`."""
        return self.sync.manager

    @property
    def records(self) -> list[SyncRecord]:
        """Every sync of every run of this trainer."""
        return self.sync.records

    def close(self) -> None:
        """Free the servers of this run; the next generation starts a new one."""
        self.sync.close()

    def _init_vllm(self) -> None:
        """No engine and no communicator: only a client on rank 0, which asks for nothing before it is used."""
        if self.mode != "server":
            raise CapabilityError(
                f"vllm_mode={self.mode!r} runs the engine inside of the trainer; loraflow syncs servers",
                hint='set vllm_mode="server" and start one with `loraflow serve MODEL`',
            )
        if self.accelerator.is_main_process:
            self.vllm_client = PolicyClient(self._require_manager, self.sync.servers, self.sync.config)

    def sync_weights(self) -> None:
        """Called by the trainer before it generates at a new step; syncs where that is due. Collective."""
        self._up_to_date()

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, ...]:
        """As TRL's, on the proven policy; tells the hooks of ``manager.on_rollouts``.

        Collective: an error of rank 0, which asks the servers, is raised on every rank.
        """
        with self._turns.turn() if self._turns is not None else nullcontext():
            return self._generate(prompts, images, num_generations, profiler)

    def answer_along(self) -> None:
        """Take part in a generation of other ranks, inside of `turns`."""
        self._generate([], None, 1, None)

    def _generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None,
    ) -> tuple[Any, ...]:
        manager = self._up_to_date()
        with manager.rollout() as policy:
            shares = manager.ranks.gather((prompts, images or [None] * len(prompts)))
            all_prompts = [prompt for share, _ in shares for prompt in share]
            all_images = [image for _, share in shares for image in share]

            def ask() -> dict[str, Any]:
                with profiler or nullcontext():
                    return self._ask(all_prompts, all_images, num_generations)

            output = manager.ranks.on_main(ask)
        before = sum(len(share) for share, _ in shares[: manager.ranks.rank])
        local = slice(before, before + len(prompts))
        prompt_ids = [ids for ids in output["prompt_ids"] for _ in range(num_generations)][local]
        completion_ids = output["completion_ids"][local]
        logprobs, token_ids = output["logprobs"], output["logprob_token_ids"]
        if logprobs is not None:
            logprobs, token_ids = logprobs[local], token_ids[local]
        self._note(manager, policy, prompt_ids, completion_ids, logprobs, token_ids)
        return prompt_ids, completion_ids, logprobs, token_ids

    @contextmanager
    def batch(self) -> Iterator[list[Rollouts]]:
        """Inside, every generation on this rank is listed, e.g. the turns of a conversation with tools."""
        self._batch = []
        try:
            yield self._batch
        finally:
            self._batch = None

    @contextmanager
    def turns(self) -> Iterator[Turns]:
        """Inside, each generation is a turn that some ranks take, and others answer along."""
        self._turns = Turns(self._require_manager().ranks)
        try:
            yield self._turns
        finally:
            self._turns = None

    def _ask(
        self, prompts: Sequence[list[int]], images: Sequence[list[Any] | None], num_generations: int
    ) -> dict[str, Any]:
        unique = list(prompts[::num_generations])  # every prompt stands there once per generation, side by side
        features = None
        if any(images):
            found = self.vllm_client.image_features(list(images[::num_generations]))
            features = [self._place_features(one, ids) for one, ids in zip(found, unique, strict=True)]
        output: dict[str, Any] = self.vllm_client.generate(
            prompts=unique,
            features=features,
            n=num_generations,
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=0.0 if self.min_p is None else self.min_p,
            max_tokens=self.max_completion_length,
            logprobs=self.logprobs,
            structured_outputs_regex=self.structured_outputs_regex,
            generation_kwargs=self.generation_kwargs,
        )
        if len(output["completion_ids"]) != len(prompts):
            raise LoraflowError(
                f"the servers returned {len(output['completion_ids'])} completions for {len(prompts)} prompts",
                hint="generation_kwargs must not change n",
            )
        return output

    def _up_to_date(self) -> SyncManager:
        manager = self.sync.up_to_date()
        _route_teacher(self.sync, manager)
        return manager

    def _note(
        self,
        manager: SyncManager,
        policy: Policy,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[Sequence[float | None]]] | None,
        token_ids: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        """Keep what ``policy`` generated on this rank, and tell of it. Collective."""
        sampled = None if logprobs is None else sampled_logprobs(completion_ids, logprobs, token_ids)
        self.last = self.sync.tell(manager, policy.version, prompt_ids, completion_ids, sampled)
        if self._batch is not None:
            self._batch.append(self.last)

    def _require_manager(self) -> SyncManager:
        if self.manager is None:
            raise LoraflowError("nothing was synced yet")
        return self.manager


def sampled_logprobs(
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Sequence[float | None]]],
    token_ids: Sequence[Sequence[Sequence[int]]],
) -> list[list[float]]:
    """The log-prob of each sampled token, out of the likeliest ones listed at its position; NaN where unknown."""
    return [
        [
            math.nan if (value := tops[candidates.index(token)]) is None else value
            for token, tops, candidates in zip(ids, row, listed, strict=True)
        ]
        for ids, row, listed in zip(completion_ids, logprobs, token_ids, strict=True)
    ]


def _route_teacher(sync: TrainerSync, manager: SyncManager) -> None:
    """Let a client that scores on the generation server ask for the right policy. Collective.

    SDFT and SDPO score with the policy itself; their client, one on every rank, would go on to ask for the base by
    name. Other teachers are asked for by the name of their own model, which a merged update takes from the base.
    """
    trainer = sync.trainer
    client = getattr(trainer, "teacher_client", None)
    if client is None:
        return
    if support_of(trainer).live_teacher:
        client.model = manager.ranks.on_main(lambda: manager.policy_name)
    elif manager.plan.transport == "merged" and any(same_server(client.base_url, url) for url in sync.servers):
        raise CapabilityError(
            f"the teacher is asked for on {client.base_url}, whose base weights are the student's with merged updates",
            hint="give the teacher a server of its own, or serve the student's adapter: transport='adapter'",
        )

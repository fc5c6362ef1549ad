"""Generation for Axolotl's trainers, on upstream vLLM's routes: token ids in, token ids and log-probs out.

Axolotl pins a TRL whose client speaks the routes of TRL's own server of old. `RolloutClient` has that client's methods,
and makes each request through loraflow's own: it names the proven policy, and the answer must be of that policy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from loraflow.errors import CapabilityError, LoraflowError
from loraflow.integrations.trl_sync import TrainerSync, labelled
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from loraflow.records import SyncRecord
from loraflow.server import Completion, VLLMServer
from loraflow.spread import spread

__all__ = ["AxolotlGeneration", "RolloutClient"]

_log = logging.getLogger(__name__)


class RolloutClient:
    """What Axolotl's trainers call on ``vllm_generation.vllm_client``; on rank 0. Usable from several threads.

    Args:
        sync: Has the run's manager.
        tokenizer: Renders chats and text to token ids.
    """

    def __init__(self, sync: TrainerSync, tokenizer: Any) -> None:
        self._sync = sync
        self._tokenizer = tokenizer
        self._own = threading.local()

    @property
    def model(self) -> str:
        """The name that requests use now."""
        return require_manager(self._sync).policy_name

    @property
    def base_url(self) -> str:
        """URL of the first server."""
        return self._sync.servers[0]

    @property
    def last_version(self) -> int:
        """Version of the policy that this thread's last completions are from; -1 before any."""
        return getattr(self._own, "version", -1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[str],
        images: object = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        features: object = None,
    ) -> dict[str, Any]:
        """Completions of the prompts, ``n`` per prompt, prompt-major.

        Args:
            prompts: Token ids, or text, which is tokenized as the trainer does it.
            images: Not supported, as ``features`` is not.
            n: Completions per prompt.
            repetition_penalty: As vLLM's.
            temperature: As vLLM's.
            top_p: As vLLM's.
            top_k: As vLLM's; 0 takes all tokens.
            min_p: As vLLM's.
            max_tokens: Tokens per completion.
            logprobs: 0: the sampled token's log-prob; more are not supported.
            structured_outputs_regex: Completions match it.
            generation_kwargs: More sampling parameters of vLLM; they win over the arguments above.
            features: Newer TRL's name for images.

        Returns:
            ``prompt_ids`` (one list per prompt), ``completion_ids`` (one list per completion), ``logprobs`` and
            ``logprob_token_ids`` (per completion and token a list with one entry; NaN where the server gave none).
        """
        if images is not None or features is not None:
            raise CapabilityError("images are not supported: loraflow generates from token ids")
        if logprobs:
            raise CapabilityError(f"logprobs={logprobs}: the log-prob of the sampled token is all that is asked for")
        sampling: dict[str, Any] = {
            "n": n,
            "max_tokens": max_tokens,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            **(generation_kwargs or {}),
        }
        if structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        rows = self._tokenized(prompts)
        completions = self._complete(rows, sampling)
        if len(completions) != n * len(prompts):
            raise LoraflowError(
                f"{len(completions)} completions for {len(prompts)} prompts with {n} each",
                hint="generation_kwargs must not change n",
            )
        return {
            "prompt_ids": rows,
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": [[[value] for value in completion.logprobs] for completion in completions],
            "logprob_token_ids": [[[token] for token in completion.token_ids] for completion in completions],
        }

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """As `generate`, of conversations: rendered here, so that trainer and server see the same tokens."""
        prompts = [
            self._tokenizer.apply_chat_template(
                list(conversation),
                tools=list(tools) if tools else None,
                chat_template=chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **(chat_template_kwargs or {}),
            )
            for conversation in messages
        ]
        return self.generate(prompts, **sampling)

    def reset_prefix_cache(self) -> None:
        """Nothing to do: a policy's name means one content for ever, so no cached prefix is ever of another one."""

    def _tokenized(self, prompts: Sequence[Sequence[int]] | Sequence[str]) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [[*map(int, prompt)] for prompt in prompts]
        return [list(ids) for ids in self._tokenizer(text=texts)["input_ids"]]

    def _complete(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[Completion]:
        manager = require_manager(self._sync)
        with manager.rollout() as policy:
            names = {server.url: manager.model_name(server.url) for server in manager.servers}
            salt = {"cache_salt": str(policy)} if manager.plan.transport == "merged" else {}

            def ask(server: VLLMServer, share: Sequence[Sequence[int]]) -> list[Completion]:
                return server.generate(share, model=names[server.url], **{**salt, **sampling})

            def failed(_: VLLMServer, error: LoraflowError) -> None:
                if manager.config.on_server_failure == "fail":
                    raise error
                _log.warning("its share goes to the other servers: %s", error)

            completions = spread(prompts, manager.servers, ask, failed)
        named = Policy.parse(completions[0].model) if completions else None
        self._own.version = (named or policy).version
        return completions


class AxolotlGeneration(VLLMGeneration):  # type: ignore[misc]
    """TRL's generation backend with loraflow in the place of its client and of its weight sync.

    Args:
        *args: As TRL's.
        loraflow: When and what is synced.
        **kwargs: As TRL's.
    """

    def __init__(self, *args: Any, loraflow: TrainerSync, **kwargs: Any) -> None:
        self.sync = loraflow
        self._own = threading.local()
        self._reported = 0
        super().__init__(*args, mode="server", **kwargs)

    def _init_vllm(self) -> None:
        """No communicator, and nothing is asked of any server before the first generation."""
        if self.accelerator.is_main_process:
            self.vllm_client = RolloutClient(self.sync, self.processing_class)

    @property
    def last_version(self) -> int:
        """Policy version of the completions that this thread generated last, here or on the client; -1 before any."""
        here: int | None = getattr(self._own, "version", None)
        if here is not None:
            return here
        return self.vllm_client.last_version if self.accelerator.is_main_process else -1

    def sync_weights(self) -> None:
        """Bring the servers to the trainer's policy where that is due. Collective.

        In a background thread this does nothing: the weights belong to the thread that trains.
        """
        if self._trains_here():
            self._up_to_date()

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, ...]:
        """As TRL's, by the proven policy; tells the hooks of ``manager.on_rollouts``.

        Collective: an error of rank 0, which asks the servers, is raised on every rank.
        """
        manager = self._up_to_date() if self._trains_here() else require_manager(self.sync)
        shares = manager.ranks.gather((prompts, images or []))
        everything = [prompt for share, _ in shares for prompt in share]
        pictures = [image for _, share in shares for image in share if image is not None]

        def ask() -> tuple[dict[str, Any], int]:
            with profiler or nullcontext():
                output = self.vllm_client.generate(
                    everything[::num_generations],  # every prompt stands there once per generation, side by side
                    images=pictures or None,
                    n=num_generations,
                    repetition_penalty=self.repetition_penalty,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    top_k=self.top_k,
                    min_p=self.min_p or 0.0,
                    max_tokens=self.max_completion_length,
                    logprobs=self.logprobs,
                    structured_outputs_regex=self.structured_outputs_regex,
                    generation_kwargs=self.generation_kwargs,
                )
            return output, self.vllm_client.last_version

        output, self._own.version = manager.ranks.on_main(ask)
        before = sum(len(share) for share, _ in shares[: manager.ranks.rank])
        local = slice(before, before + len(prompts))
        completion_ids, logprobs = output["completion_ids"][local], output["logprobs"][local]
        sampled = [[token[0] for token in row] for row in logprobs]
        rollouts = labelled(manager, self._own.version, prompts, completion_ids, sampled)
        manager.ranks.together(lambda: manager.rollouts_done(rollouts))
        return prompts, completion_ids, logprobs, output["logprob_token_ids"][local]

    def _trains_here(self) -> bool:
        """Whether this thread is the one that trains: the main one, or another (Ray)."""
        return threading.current_thread() is self.sync.thread

    def _up_to_date(self) -> SyncManager:
        """The manager, with the servers brought to where they should be; says in Axolotl's log what was done."""
        manager = self.sync.up_to_date()
        if not self.accelerator.is_main_process:
            return manager
        if not self._reported:
            _log.info("run %s: %s", manager.run_id, manager.plan)
        for record in self.sync.records[self._reported :]:
            _log.info("%s", describe(record))
        self._reported = len(self.sync.records)
        return manager


def describe(record: SyncRecord) -> str:
    """One line of the log: what was delivered, and what proves it."""
    what = f"step {record.step}: {record.policy} {record.outcome} by {record.transport}/{record.carrier}"
    proofs = ", ".join(f"{url} {proof}" for url, proof in record.proofs.items())
    return f"{what}, {record.bytes} bytes in {record.total_ms:.0f} ms: {record.error or proofs}"


def require_manager(sync: TrainerSync) -> SyncManager:
    """The manager of a run that has begun."""
    if sync.manager is None:
        raise LoraflowError("nothing was synced yet", hint="the first training step syncs, before it generates")
    return sync.manager

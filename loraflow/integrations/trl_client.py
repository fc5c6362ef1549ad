"""TRL's HTTP client, on loraflow's: every request names the proven policy, every answer is checked, every wait ends."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from trl.generation.vllm_client import VLLMClient, to_openai_messages

from loraflow.completion import logprob_of
from loraflow.connect import clients, wait_for
from loraflow.errors import CapabilityError, LoraflowError
from loraflow.server import HTTPFailure
from loraflow.spread import spread

if TYPE_CHECKING:
    from loraflow.config import SyncConfig
    from loraflow.manager import SyncManager
    from loraflow.server import VLLMServer

__all__ = ["PolicyClient"]

_RENDER = "/v1/chat/completions/render"
_FORBIDDEN = 403  # what a route that was not enabled answers from vLLM 0.32 on
_NO_ROUTE = "Not Found"  # the reason for 404 before; a name that is not known there gives another one


class PolicyClient(VLLMClient):  # type: ignore[misc]
    """TRL's ``VLLMClient`` for servers that loraflow keeps on the policy.

    Building it asks nothing of any server. Completions of many prompts are spread over all servers, and what fails on
    one that is then set aside is asked of another; other requests take turns.

    Args:
        manager: Gives the run's manager; raises before the first sync.
        servers: Base URLs.
        config: Timeouts.

    Attributes:
        answered: Completions by the policy that the server says gave them.
    """

    def __init__(self, manager: Callable[[], SyncManager], servers: Sequence[str], config: SyncConfig) -> None:
        # TRL's own constructor waits for the server and reads its model; ours must not, so it is not called.
        self._manager = manager
        self._servers, self._config = servers, config
        self.base_url = servers[0].rstrip("/")
        self.host = urlparse(self.base_url).hostname
        self.communicator = None
        self.answered: Counter[str] = Counter()
        self._updating_weights = False
        self._turn = itertools.count()
        self._lock = threading.Lock()

    @property
    def model(self) -> str:
        """The name that requests use now."""
        return self._manager().policy_name

    def get_server_info(self) -> dict[str, Any]:
        """The part of the server's configuration that TRL's constructors read. Waits for the server to come up."""
        [server] = clients(self._servers[:1], self._config)
        with server:
            wait_for([server], self._config.start_timeout)
            info = server.info
        return {"model_config": {"logprobs_mode": info.logprobs_mode, "max_model_len": info.max_model_len}}

    def image_features(
        self, images: list[list[Any] | None], max_concurrent_requests: int = 64
    ) -> list[dict[str, Any] | None]:
        """Features of each prompt's images, by the server's own preprocessing; None for a prompt without images.

        Raises:
            CapabilityError: The server does not preprocess images for others.
        """

        def render(images_of_prompt: list[Any] | None) -> dict[str, Any] | None:
            if not images_of_prompt:
                return None
            parts = [{"type": "image", "image": image} for image in images_of_prompt]
            messages = to_openai_messages([{"role": "user", "content": parts}])
            body = {"model": self.model, "messages": messages, "max_tokens": 1}
            [answer] = spread([body], self._in_turn(), ask, self._manager().blame)
            features: dict[str, Any] = answer["features"]
            return features

        def ask(server: VLLMServer, bodies: Sequence[dict[str, Any]]) -> list[Any]:
            try:
                return [self._ask(server, _RENDER, bodies[0])]
            except HTTPFailure as error:
                if error.status != _FORBIDDEN and error.reason != _NO_ROUTE:
                    raise
                raise CapabilityError(
                    "prompts with images need the route /v1/chat/completions/render",
                    server=server.url,
                    hint="restart it with --enable-scale-out (vLLM 0.30 or newer)",
                ) from error

        with ThreadPoolExecutor(min(max_concurrent_requests, len(images))) as pool:
            return list(pool.map(render, images))

    def _get(self, url: str, **kwargs: Any) -> Any:
        return self._in_turn()[0].request("GET", self._path(url), params=kwargs.get("params"), retry=True)

    def _post(self, url: str, **kwargs: Any) -> Any:
        path, body = self._path(url), dict(kwargs.get("json") or {})
        prompts = body.get("prompt")
        manager = self._manager()
        with manager.rollout():  # also for callers that come here directly, such as a rollout_func
            if path != "/v1/completions" or not isinstance(prompts, list) or isinstance(prompts[0], int):
                [answer] = spread([body], self._in_turn(), lambda s, _: [self._ask(s, path, body)], manager.blame)
                return answer
            n, template = int(body.get("n") or 1), dict[str, Any]()

            def ask(server: VLLMServer, share: Sequence[Any]) -> list[Any]:
                answer = self._ask(server, path, {**body, "prompt": list(share)})
                template.update({key: value for key, value in answer.items() if key != "choices"})
                choices: list[Any] = answer["choices"]
                if len(choices) != n * len(share):
                    raise LoraflowError(f"{len(choices)} completions for {len(share)} prompts", server=server.url)
                return choices

            choices = spread(prompts, manager.servers, ask, manager.blame)
            return {**template, "choices": choices}

    def _ask(self, server: VLLMServer, path: str, body: dict[str, Any]) -> Any:
        manager = self._manager()
        name = manager.model_name(server.url)
        if "model" in body:
            body = {**body, "model": name}
        if manager.plan.transport == "merged" and path != _RENDER:
            body["cache_salt"] = str(manager.policy)  # one base name serves every version: keep their caches apart
        answer = server.request("POST", path, json=body, timeout=server.generate_timeout)
        if isinstance(answer, Mapping) and "model" in answer:
            server.check_answer(answer, name)
        with self._lock:
            self.answered[str(manager.policy)] += len(answer.get("choices", ())) if isinstance(answer, Mapping) else 1
        return _as_trl_reads(answer) if isinstance(answer, Mapping) else answer

    def _in_turn(self) -> list[VLLMServer]:
        """All servers; another one is first at each call."""
        servers = self._manager().servers
        if not servers:
            raise LoraflowError("there is no server to ask: rank 0 alone has them, and each may be set aside")
        first = next(self._turn) % len(servers)
        return [*servers[first:], *servers[:first]]

    def _path(self, url: str) -> str:
        return url.removeprefix(self.base_url)


def _as_trl_reads(answer: Mapping[str, Any]) -> Any:
    """An answer with its log-probs as TRL reads them; changed in place.

    vLLM 0.32 gives tokens of ``/inference/v1/generate`` as numbers (``token_id``), versions before it as text
    (``token``). A sampled token's log-prob that the server does not have becomes NaN, so that the correction sees it.
    """
    for choice in answer.get("choices", ()):
        logprobs = choice.get("logprobs") or {}
        for entry in logprobs.get("content") or ():
            for candidate in (entry, *entry["top_logprobs"]):
                candidate.setdefault("token", f"token_id:{candidate.get('token_id')}")
                if candidate["token"] == entry["token"]:
                    candidate["logprob"] = logprob_of(candidate["logprob"])
        sampled = [*map(logprob_of, logprobs.get("token_logprobs") or ())]
        if sampled:
            logprobs["token_logprobs"] = sampled
            for token, tops, value in zip(logprobs["tokens"], logprobs["top_logprobs"], sampled, strict=True):
                if tops is not None and token in tops:
                    tops[token] = value
    return answer

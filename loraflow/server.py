"""`VLLMServer`: typed HTTP client of one vLLM server. Every call has a timeout; only reads are repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from json import dumps
from typing import Any, Self

import requests
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from loraflow.access import secret
from loraflow.completion import Completion, read_completion
from loraflow.errors import CapabilityError, LoadError, LoraflowError, VerifyError
from loraflow.hotline import Body, Hotline
from loraflow.http_errors import (
    BadAnswer,
    HTTPFailure,
    Unreachable,
    cause_of,
    hidden_error,
    load_hint,
    no_answer,
    once_visible,
    reason_of,
    refused,
    too_late,
    understood,
)
from loraflow.http_session import BoundedSession
from loraflow.server_info import ServedModel, ServerInfo, info_from_config, info_with_plugin
from loraflow.urls import server_url

__all__ = ["BadAnswer", "Completion", "HTTPFailure", "Unreachable", "VLLMServer"]

_log = logging.getLogger(__name__)

_PLAIN_SAMPLING: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Samples from the policy itself; what a request leaves out, vLLM takes from the model's ``generation_config.json``."""


class VLLMServer:
    """One server.

    Args:
        url: Base URL, e.g. ``http://127.0.0.1:8000``; ``http`` where no scheme is given (see
            `loraflow.urls.server_url`). It may have a path, where a reverse proxy gives the server one.
        request_timeout: Seconds for calls that neither generate nor load.
        load_timeout: Seconds for loading one adapter.
        generate_timeout: Seconds for one generation request.
        api_key: vLLM's API key, sent as a bearer token; from ``api_key_env`` where not given.
        token: Bearer token of loraflow's plugin; from ``token_env`` where not given.
    """

    def __init__(
        self,
        url: str,
        *,
        request_timeout: float = 30.0,
        load_timeout: float = 120.0,
        generate_timeout: float = 240.0,
        api_key: str | None = None,
        token: str | None = None,
        api_key_env: str = "VLLM_API_KEY",
        token_env: str = "LORAFLOW_TOKEN",  # noqa: S107 - the name of a variable
    ) -> None:
        self.url = server_url(url)
        self.request_timeout = request_timeout
        self.load_timeout = load_timeout
        self.generate_timeout = generate_timeout
        self._api_key = secret(api_key, api_key_env)
        self._token = secret(token, token_env)
        self._session = BoundedSession()
        self._hotline = Hotline(self.url)
        self._info: ServerInfo | None = None

    # ---------------------------------------------------------------- plumbing

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        retry: bool = False,
        kept: bool = False,
    ) -> Any:
        """One call; the parsed JSON body, or the text where it is none.

        Args:
            method: ``GET``, ``POST`` or ``DELETE``.
            path: From the slash on.
            json: Body.
            params: Query.
            data: Raw body (bytes or a stream), instead of ``json``.
            headers: More headers.
            timeout: Seconds for the whole answer; the client's ``request_timeout`` where not given.
            retry: Repeat on broken connections. Only for calls that change nothing.
            kept: For a POST of ``json`` and nothing else: over the connection of `begin`, which is quicker.

        Raises:
            Unreachable: No answer.
            SyncTimeout: Not within ``timeout``.
            HTTPFailure: A status that is no success, a redirection as well; or an error that came with a success.
        """
        if retry:
            for attempt in Retrying(
                retry=retry_if_exception_type(Unreachable),
                stop=stop_after_attempt(3),
                wait=wait_exponential(multiplier=0.1, max=1.0),
                reraise=True,
            ):
                with attempt:
                    return self.request(
                        method, path, json=json, params=params, data=data, headers=headers, timeout=timeout, kept=kept
                    )
        if kept:
            return self.begin(path, json=json, timeout=timeout)()
        limit = timeout or self.request_timeout
        sent = {**(headers or {}), **self._authorization(path)}
        try:
            response = self._session.request(
                method, self.url + path, json=json, params=params, data=data, headers=sent, timeout=limit
            )
        except requests.exceptions.InvalidJSONError as error:  # such as a temperature of NaN
            raise LoraflowError(f"{method} {path}: what was to be sent is no JSON: {error}", server=self.url) from error
        except requests.Timeout as error:
            raise too_late(f"{method} {path}", self.url, limit) from error
        except OSError as error:  # of requests, or a bundle of certificates that is not there
            raise no_answer(f"{method} {path}", self.url, cause_of(error)) from error
        try:
            body = response.json()
        except ValueError:
            body = response.text
        found = hidden_error(body)
        if response.status_code >= requests.codes.multiple_choices:
            found = response.status_code, reason_of(response)
        if found is not None:
            raise refused(f"{method} {path}", self.url, response.status_code, *found)
        return body

    def begin(
        self, path: str, *, json: Any = None, body: Body | None = None, timeout: float | None = None
    ) -> Callable[[], Any]:
        """Send a POST now; what is returned waits for its answer, so that the caller works while the server does.

        Args:
            path: From the slash on.
            json: Body.
            body: Raw bytes instead, in parts that are sent one after the other.
            timeout: Seconds for the whole call; the client's ``request_timeout`` where not given.

        Raises:
            LoraflowError: As `request` does; here, or when the answer is taken.
        """
        limit = timeout or self.request_timeout
        kind = {} if body is None else {"Content-Type": "application/octet-stream"}
        if not Hotline.serves(self.url):
            data = None if body is None else b"".join(body)
            return lambda: self.request("POST", path, json=json, data=data, headers=kind, timeout=limit)
        parts = body or [b"" if json is None else dumps(json).encode()]
        sent = {"Content-Type": "application/json", **kind, **self._authorization(path)}
        return self._hotline.begin(path, parts, sent, limit)

    def _authorization(self, path: str) -> dict[str, str]:
        token = self._token if path.startswith("/loraflow/") and self._token else self._api_key
        return {"Authorization": f"Bearer {token}"} if token else {}

    def close(self) -> None:
        """Close the pooled connections."""
        self._session.close()
        self._hotline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"VLLMServer({self.url!r})"

    # ---------------------------------------------------------------- what it is

    def health(self) -> bool:
        """Whether it answers ``/health`` with success now."""
        return self.ailment() is None

    def ailment(self) -> str | None:
        """Why it does not; None where it does."""
        try:
            self.request("GET", "/health", timeout=min(5.0, self.request_timeout))
        except LoraflowError as error:
            return error.message
        return None

    @property
    def info(self) -> ServerInfo:
        """What it can do, asked once (see `refresh`)."""
        return self._info or self.refresh()

    def refresh(self) -> ServerInfo:
        """Ask again what it can do.

        Raises:
            CapabilityError: It serves no base model.
            BadAnswer: It is no vLLM, or its answers were cut.
        """
        with understood("what the server says of itself", self.url):
            self._info = self._ask_info()
        return self._info

    def _ask_info(self) -> ServerInfo:
        version = str(self.request("GET", "/version", retry=True).get("version", ""))
        base = next((m for m in self.models() if m.parent is None), None)
        if base is None:
            raise CapabilityError("the server lists no base model", server=self.url)
        raw = self.request("GET", "/v1/models", retry=True)["data"]
        length = next((m.get("max_model_len") for m in raw if m["id"] == base.id), None)
        routes = self._routes()
        info = ServerInfo(self.url, version, base.id, base.root, max_model_len=length)
        if "/server_info" in routes:
            # The first time, vLLM runs a dozen programs to describe its environment.
            limit = max(self.request_timeout, self.load_timeout)
            answer = self.request("GET", "/server_info", params={"config_format": "json"}, timeout=limit, retry=True)
            config = answer.get("vllm_config")
            if isinstance(config, Mapping):
                info = info_from_config(info, config, answer.get("vllm_env") or {}, routes)
        if "/loraflow/v1/status" in routes:
            info = info_with_plugin(info, self.request("GET", "/loraflow/v1/status", retry=True), routes)
        weight_routes = {"init_weight_transfer_engine", "weight_info", "weight_checker", "update_weights", "pause"}
        present = frozenset(name for name in weight_routes if f"/{name}" in routes)
        return replace(info, weight_routes=present)

    def _routes(self) -> frozenset[str]:
        try:
            document = self.request("GET", "/openapi.json", retry=True)
        except HTTPFailure as error:
            if error.status == requests.codes.not_found:  # --disable-fastapi-docs: ask the routes themselves
                return frozenset(path for path in ("/server_info", "/loraflow/v1/status") if self._answers(path))
            raise
        return frozenset(document.get("paths", ()))

    def _answers(self, path: str) -> bool:
        try:
            self.request("GET", path, retry=True)
        except HTTPFailure as error:
            return bool(error.status != requests.codes.not_found)
        return True

    def models(self) -> list[ServedModel]:
        """The base model and every adapter name that requests may use."""
        answer = self.request("GET", "/v1/models", retry=True)
        with understood("the list of models", self.url):
            return [ServedModel.from_answer(model) for model in answer["data"]]

    # ---------------------------------------------------------------- adapters

    def load_adapter(self, name: str, path: str, *, timeout: float | None = None) -> str:
        """Load the adapter folder ``path`` (as the server sees it) under the new name ``name``.

        ``load_inplace`` is never set: it makes every engine step read the folder again (rule 1).

        Returns:
            The path that the server lists it with: links resolved, or its cache's folder for a URL.

        Raises:
            LoadError: Refused; the message carries the server's reason.
            SyncTimeout: Not loaded within ``timeout``.
        """
        limit = timeout or self.load_timeout
        try:
            path = once_visible(path, lambda: self._load(name, path, limit))
        except Unreachable:
            if not any(m.id == name for m in self.models()):
                raise
            _log.warning("%s: the answer to loading %s was lost, and it is there", self.url, name)
        except HTTPFailure as error:
            raise LoadError(
                f"loading adapter {name!r} from {path} failed: {error.reason}",
                server=self.url,
                hint=load_hint(error, path),
            ) from error
        loaded = next((m for m in self.models() if m.id == name), None)
        if loaded is None:
            raise LoadError(f"adapter {name!r} is not listed after loading", server=self.url)
        if loaded.root.rstrip("/") != path.rstrip("/"):
            raise LoadError(
                f"the name {name!r} was taken",
                server=self.url,
                expected=path,
                found=loaded.root,
                hint="use a new run_id",
            )
        return path

    def _load(self, name: str, path: str, limit: float) -> str:
        plugin = self.info.plugin
        if plugin is None or "adapters" not in plugin.capabilities:
            body = {"lora_name": name, "lora_path": path}
            self.request("POST", "/v1/load_lora_adapter", json=body, timeout=limit)
            return path
        body = {"name": name, "path": path}  # harmless when repeated
        answer = self.request("POST", "/loraflow/v1/adapters", json=body, timeout=limit, retry=True)
        with understood("the answer to a load", self.url):
            return str(answer["path"])

    def unload_adapter(self, name: str) -> bool:
        """Make the server forget ``name``; False where it did not have it."""
        plugin = self.info.plugin
        try:
            if plugin is not None and "adapters" in plugin.capabilities:
                self.request("DELETE", f"/loraflow/v1/adapters/{name}", retry=True)
            else:
                self.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        except HTTPFailure as error:
            if error.status == requests.codes.not_found and name not in {m.id for m in self.models()}:
                return False
            raise LoadError(f"unloading adapter {name!r} failed: {error.reason}", server=self.url) from error
        return True

    # ---------------------------------------------------------------- generation

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        model: str,
        n: int = 1,
        max_tokens: int = 16,
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Completions of token-id prompts, ``n`` per prompt, prompt-major.

        Args:
            prompts: Token ids, one list per prompt.
            model: Policy name.
            n: Completions per prompt.
            max_tokens: Tokens per completion.
            timeout: Seconds; ``generate_timeout`` where not given.
            **sampling: vLLM's sampling parameters (``temperature``, ``top_p``, ``seed``, ``cache_salt``, …). Those not
                given change nothing of the policy's distribution, whatever the server's defaults are.

        Raises:
            VerifyError: The answer is of another model than the one asked for.
        """
        body = {
            "model": model,
            "prompt": [list(p) for p in prompts],
            "n": n,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **_PLAIN_SAMPLING,
            **sampling,
        }
        answer = self.request("POST", "/v1/completions", json=body, timeout=timeout or self.generate_timeout)
        self.check_answer(answer, model)
        with understood("the completions", self.url):
            completions = [read_completion(choice, model, index // n) for index, choice in enumerate(answer["choices"])]
        if len(completions) != n * len(prompts):
            raise VerifyError(
                "the server returned the wrong number of completions",
                server=self.url,
                expected=n * len(prompts),
                found=len(completions),
            )
        return completions

    def check_answer(self, answer: Mapping[str, Any], model: str) -> None:
        """Raise `VerifyError` where ``answer`` is of another model than ``model``: status 200 proves nothing."""
        with understood("the answer", self.url):
            found = answer.get("model")
        if found != model:
            raise VerifyError(
                "the answer is of another policy than the one asked for",
                server=self.url,
                expected=model,
                found=found,
            )

    def prompt_logprobs(self, tokens: Sequence[int], *, model: str, cache_salt: str | None = None) -> list[float]:
        """Log-probs (natural log) of ``tokens[1:]``, each given the ones before; ``len(tokens) - 1`` floats.

        Args:
            tokens: The sequence.
            model: Policy name.
            cache_salt: Separates this request's prefix cache from every other's.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            **({"cache_salt": cache_salt} if cache_salt else {}),
        }
        answer = self.begin("/v1/completions", json=body)()
        self.check_answer(answer, model)
        with understood("the completion", self.url):
            rows = answer["choices"][0].get("prompt_logprobs")
            complete = bool(rows) and len(rows) == len(tokens)
        if not complete:
            raise CapabilityError(
                "the server returned no prompt log-probs",
                server=self.url,
                hint="start it with --max-logprobs -1 (`loraflow serve` does)",
            )
        with understood("the prompt log-probs", self.url):
            return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], tokens[1:], strict=True)]

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, and that of a KV connector; raises `LoraflowError` where the server says 200 and did
        nothing.
        """
        params = {"reset_running_requests": "true"}
        if self.info.kv_connector:  # asked without one, older vLLM says that it failed
            params["reset_external"] = "true"
        answer = self.request("POST", "/reset_prefix_cache", params=params)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise LoraflowError(
                "the prefix cache was not reset", server=self.url, hint="requests are running: pause first"
            )

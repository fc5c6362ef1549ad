"""`EngineServer`: an engine in this process, asked as a server is.

vLLM's ``LLM`` runs inside of a colocated trainer. The same plugin service that answers a server's routes answers here,
over `LocalEngine` instead of an API server's client: names that are used once, slots that are checksummed, answers that
say which policy gave them. Manager, fleet, proofs and carriers see one more `VLLMServer`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import unquote

import torch

from loraflow.http_errors import HTTPFailure
from loraflow.launch import WORKER_EXTENSION, round_up_rank
from loraflow.server import VLLMServer
from loraflow.sleep import SleepingEngine, Weights
from loraflow_server import core
from loraflow_server.engine import CALL_TIMEOUT, Engine, Loaded
from loraflow_server.errors import PluginError
from loraflow_server.service import Service
from loraflow_server.settings import Settings

__all__ = ["EngineServer", "LocalEngine", "engine_options", "served_by"]

_PLUGIN = "/loraflow/v1"
_ROUTES = {
    ("GET", "/status"): "status",
    ("POST", "/adapters"): "load",
    ("POST", "/layout"): "layout",
    ("POST", "/verify"): "verify",
    ("POST", "/direct"): "direct",
    ("POST", "/direct/probe"): "probe",
    ("POST", "/direct/sees"): "sees",
    ("GET", "/base"): "base",
}
"""Methods of `Service` by the route that a server has them under; those that serve adapters."""
_ASLEEP = frozenset({("GET", "/status"), ("POST", "/direct/sees")})
"""Routes that need nothing of the engine's memory; unloading does not either: it forgets a name."""
_NOT_SAMPLING = frozenset({"model", "prompt", "cache_salt", "return_token_ids", "return_tokens_as_token_ids"})


def engine_options(rank: int, versions: int) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` for an engine that is kept on a policy.

    Args:
        rank: Largest rank of the adapter.
        versions: How many versions are kept (``SyncConfig.retained_versions``).
    """
    return {
        "enable_lora": True,
        "max_lora_rank": round_up_rank(rank),
        "max_loras": versions,
        "max_cpu_loras": versions + 2,
        "worker_extension_cls": WORKER_EXTENSION,
        "max_logprobs": -1,
    }


class LocalEngine(Engine):
    """What the plugin asks of vLLM, asked of an ``LLM`` of this process.

    Args:
        llm: vLLM's ``LLM``, without a process of its own (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
    """

    def __init__(self, llm: Any) -> None:
        names = SimpleNamespace(lora_requests={}, lora_resolver_lock=defaultdict(asyncio.Lock))
        super().__init__(llm.llm_engine, names)
        self._ids = itertools.count(1)

    async def utility(self, method: str, *args: Any, limit: float = CALL_TIMEOUT) -> list[Any]:  # noqa: ARG002
        """One call to the engine; its answer in a list of one. There is nobody to wait for, so no ``limit``.

        Raises:
            PluginError: ``engine_failed``.
        """
        try:
            return [getattr(self.client.engine_core.engine_core, method)(*args)]
        except Exception as error:
            raise PluginError("engine_failed", f"{method}: {error}", status=500) from error

    async def asleep(self) -> bool:
        """Whether the engine sleeps; also where its process lets no plugin of loraflow's give it a utility for that."""
        return core.asleep(self.client.engine_core.engine_core)

    def is_base(self, name: str) -> bool:
        """Whether ``name`` is the base model's."""
        return name == str(self.config.model_config.model)

    def next_id(self) -> int:
        """A new adapter id; nobody else loads adapters here."""
        return next(self._ids)

    async def add_adapter(self, name: str, int_id: int, path: str) -> None:
        """Load the folder ``path``.

        Raises:
            PluginError: ``load_failed`` with vLLM's reason.
        """
        try:
            self.client.add_lora(self.lora_request(Loaded(name, int_id, path)))
        except Exception as error:
            raise PluginError("load_failed", f"vLLM refused the adapter: {error}", status=400) from error

    def lora_request(self, loaded: Loaded) -> Any:
        """What a generation by ``loaded`` passes to vLLM."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=loaded.name, lora_int_id=loaded.int_id, lora_path=loaded.path)


class EngineServer(VLLMServer):
    """One engine of this process.

    Args:
        llm: vLLM's ``LLM``, in this process, with ``enable_lora`` and ``worker_extension_cls`` as `engine_options` has
            them.
        roots: Folders that adapters may be loaded from.
        sleep_level: How it sleeps, where it does.
        base: Gives the base weights by their names in the checkpoint; for sleep level 2.
        url: Its name in records and messages; the host part says that it is this one.

    Attributes:
        llm: The ``LLM``, awake whenever it is used.
    """

    def __init__(
        self,
        llm: Any,
        roots: Sequence[str | Path],
        *,
        sleep_level: Literal[1, 2] = 1,
        base: Callable[[], Weights] | None = None,
        url: str = "engine://localhost",
    ) -> None:
        super().__init__("http://localhost")  # where nothing is ever sent
        self.url = url
        self.llm = SleepingEngine(llm, sleep_level, base, self.lose_adapters)
        self._settings = Settings(roots=tuple(Path(root).resolve() for root in roots))
        self._engine = LocalEngine(llm)
        self._service = Service(self._engine, self._settings, importlib.metadata.version("loraflow"))
        self._lock = threading.RLock()  # vLLM's engine is for one thread at a time
        # A thread of its own has no event loop that runs already, as a notebook's has.
        self._loop = ThreadPoolExecutor(1, "loraflow-engine", initializer=_same_device, initargs=(_device_of(llm),))

    # ---------------------------------------------------------------- what a server answers

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,  # noqa: ARG002 - no route here takes any
        data: Any = None,  # noqa: ARG002 - nor a raw body
        headers: Mapping[str, str] | None = None,  # noqa: ARG002
        timeout: float | None = None,  # noqa: ARG002 - a call of this process cannot be left
        retry: bool = False,  # noqa: ARG002
        kept: bool = False,  # noqa: ARG002
    ) -> Any:
        """See `VLLMServer.request`; answered by the engine."""
        with self._lock:
            if path.startswith(_PLUGIN):
                return self._plugin(method, path.removeprefix(_PLUGIN), json or {})
            if (method, path) == ("POST", "/v1/completions"):
                return self._complete(json)
            if method == "GET" and path in {"/health", "/version", "/v1/models", "/openapi.json"}:
                return self._describe(path)
        raise self._failure(f"{method} {path}", 404, "an engine in the trainer's process has no such route")

    def close(self) -> None:
        """Nothing to close: the engine goes on, for its owner and for the next run."""

    def lose_adapters(self) -> None:
        """After a sleep: hold nothing, as a server that was restarted, until a version is loaded again and proven."""
        with self._lock:
            self.llm.collective_rpc(_remove_adapters)
            self._engine.models.lora_requests.clear()
            # Names may be loaded again, with the same content, since nothing of them is left.
            self._service = Service(self._engine, self._settings, self._service.version)

    def lora_request(self, name: str) -> Any:
        """What a generation by ``name`` passes to vLLM; None for the base.

        Raises:
            HTTPFailure: 404: no such policy is loaded.
        """
        if self._engine.is_base(name):
            return None
        loaded = self._engine.loaded().get(name)
        if loaded is None:
            raise self._failure("a request", 404, f"the model {name!r} does not exist")
        return self._engine.lora_request(loaded)

    def _failure(self, what: str, status: int, reason: str) -> HTTPFailure:
        return HTTPFailure(f"{what} answered {status}: {reason}", status=status, reason=reason, server=self.url)

    def _describe(self, path: str) -> dict[str, Any]:
        if path == "/version":
            return {"version": importlib.import_module("vllm").__version__}
        if path == "/openapi.json":
            return {"paths": {f"{_PLUGIN}{route}": {} for _, route in _ROUTES}}
        config = self.llm.llm_engine.vllm_config.model_config
        base = {"id": str(config.model), "root": str(config.model), "max_model_len": config.max_model_len}
        adapters = [{"id": a.name, "root": a.path, "parent": base["id"]} for a in self._engine.loaded().values()]
        return {"data": [base, *adapters]}

    def _plugin(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        name = unquote(path.removeprefix("/adapters/"))
        arguments: tuple[Any, ...] = (name,)
        if method == "DELETE" and name != path:
            action = self._service.unload
        elif (method, path) in _ROUTES:
            action = getattr(self._service, _ROUTES[method, path])
            arguments = () if method == "GET" else (body,)
        else:
            raise self._failure(f"{method} {path}", 404, "an engine in the trainer's process has no such route")
        if (method, path) not in _ASLEEP and method != "DELETE":
            self.llm.wake_up(tags=["weights"])
        try:
            return self._loop.submit(asyncio.run, action(*arguments)).result()
        except PluginError as error:
            raise self._failure(f"{method} {_PLUGIN}{path}", error.status, error.message) from error

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        name, prompts = str(body["model"]), body["prompt"]
        options = {key: value for key, value in body.items() if key not in _NOT_SAMPLING}
        if "logit_bias" in options:
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        salt = {"cache_salt": body["cache_salt"]} if body.get("cache_salt") else {}
        every = prompts if isinstance(prompts[0], list) else [prompts]
        items = [{"prompt_token_ids": list(ids), **salt} for ids in every]
        self.llm.wake_up()
        outputs = self.llm.generate(
            items, sampling_params=SamplingParams(**options), lora_request=self.lora_request(name), use_tqdm=False
        )
        choices = [_choice(output, completion) for output in outputs for completion in output.outputs]
        return {"model": served_by(outputs, name, self._engine.is_base(name)), "choices": choices}


def served_by(outputs: Sequence[Any], asked: str, base: bool) -> str:
    """The policy that vLLM says gave ``outputs``: ``asked``, unless one is of another."""
    wanted = None if base else asked
    found = {None if output.lora_request is None else output.lora_request.lora_name for output in outputs}
    return asked if found == {wanted} else ", ".join(sorted(str(name) for name in found))


def _choice(output: Any, completion: Any) -> dict[str, Any]:
    rows = output.prompt_logprobs
    sampled = completion.logprobs
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": None
        if sampled is None
        else {"token_logprobs": [row[ids].logprob for ids, row in zip(completion.token_ids, sampled, strict=True)]},
        "finish_reason": completion.finish_reason,
        "prompt_logprobs": None
        if rows is None
        else [row and {str(token): {"logprob": value.logprob} for token, value in row.items()} for row in rows],
    }


def _remove_adapters(worker: Any) -> None:
    worker.loraflow_manager().remove_all_adapters()


def _device_of(llm: Any) -> torch.device:
    device: torch.device = llm.collective_rpc(lambda worker: worker.device)[0]
    return device


def _same_device(device: torch.device) -> None:
    """A new thread's current GPU is the first one, not the engine's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)

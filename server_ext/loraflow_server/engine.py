"""The engine behind the API server: all that differs between vLLM versions is in this file.

The plugin uses these parts of vLLM (0.27.1 to 0.32): ``engine_client.add_lora``, ``.reset_prefix_cache``,
``.engine_core._call_utility_async`` with ``.core_engines`` (a call to *every* data-parallel engine, where
``collective_rpc`` gives the first one's answer only), ``OpenAIServingModels.lora_requests`` (the names that requests
may use), ``.lora_id_counter`` and ``.lora_resolver_lock``. Where there are, ``engine_client.get_weight_version`` and
``.update_weight_version``, with the utilities behind them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from loraflow_server.errors import PluginError
from loraflow_server.group_flag import SPARED

__all__ = ["CALL_TIMEOUT", "Engine", "Loaded", "answers_of", "require_fresh"]

CALL_TIMEOUT = 300.0
"""Seconds that one call to the workers may take."""


@dataclass(frozen=True)
class Loaded:
    """An adapter name that requests may use now."""

    name: str
    int_id: int
    path: str


class Engine:
    """What the plugin asks of vLLM.

    Args:
        client: vLLM's engine client.
        models: vLLM's registry of served model names.
        api_servers: How many API server processes share the engines.
    """

    def __init__(self, client: Any, models: Any, api_servers: int = 1) -> None:
        self.client = client
        self.models = models
        self.api_servers = api_servers

    @property
    def config(self) -> Any:
        """The whole configuration of vLLM."""
        return self.client.vllm_config

    @cached_property
    def has_extension(self) -> bool:
        """Whether the workers have `LoraflowWorker`, or a class made from it."""
        dotted = str(self.config.parallel_config.worker_extension_cls or "")
        module, _, name = dotted.rpartition(".")
        if not module:
            return False
        from loraflow_server.worker import LoraflowWorker

        found = getattr(importlib.import_module(module), name, None)
        return isinstance(found, type) and issubclass(found, LoraflowWorker)

    @property
    def plain_weights(self) -> bool:
        """Whether the base weights may lie in memory as the checkpoint has them: no quantisation, no CPU packing."""
        packed = self.config.device_config.device_type == "cpu" and os.environ.get("LORAFLOW_FOLD") != "1"
        return self.config.model_config.quantization is None and not packed

    # ---------------------------------------------------------------- workers

    @property
    def worker_count(self) -> int:
        """Workers of all data-parallel engines."""
        return len(self.client.engine_core.core_engines) * int(self.config.parallel_config.world_size)

    async def utility(self, method: str, *args: Any, limit: float = CALL_TIMEOUT) -> list[Any]:
        """One call to every data-parallel engine; their answers in order.

        Raises:
            PluginError: ``engine_failed``, or ``engine_timeout`` after ``limit`` seconds.
        """
        core = self.client.engine_core
        calls = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
        try:
            async with asyncio.timeout(limit):
                return list(await asyncio.gather(*calls))
        except TimeoutError as error:
            raise PluginError("engine_timeout", f"no answer after {limit:.0f} s", status=504) from error
        except Exception as error:  # vLLM raises a bare Exception with the engine's reason in it
            raise PluginError("engine_failed", f"{method}: {error}", status=500) from error

    async def workers(self, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        """Call ``method`` of `LoraflowWorker` on every worker; results by engine, then by rank.

        Raises:
            PluginError: A worker's own, or ``engine_failed``.
        """
        engines = await self.utility("collective_rpc", method, None, args, None)
        errors = [error for number, ranks in enumerate(engines) for error in _errors(ranks, number)]
        if errors:
            raise _telling(errors)
        return [[answer["ok"] for answer in ranks] for ranks in engines]

    # ---------------------------------------------------------------- names

    def loaded(self) -> dict[str, Loaded]:
        """Adapter names that requests may use."""
        requests: Mapping[str, Any] = self.models.lora_requests
        return {name: Loaded(name, item.lora_int_id, item.lora_path) for name, item in requests.items()}

    def need_no_adapters(self) -> None:
        """Refuse to change the base under adapters (rule 8).

        Raises:
            PluginError: ``adapters_loaded`` (409).
        """
        if self.loaded():
            raise PluginError(
                "adapters_loaded",
                "adapters are loaded: unload them before the base weights change (rule 8)",
                status=409,
            )

    def is_base(self, name: str) -> bool:
        """Whether ``name`` is one of the base model's."""
        return bool(self.models.is_base_model(name))

    def next_id(self) -> int:
        """A new adapter id, of the same counter that vLLM's own routes use."""
        return int(self.models.lora_id_counter.inc(1))

    @asynccontextmanager
    async def name_lock(self, name: str) -> AsyncIterator[None]:
        """The lock that vLLM's own routes hold while they load or unload ``name``."""
        async with self.models.lora_resolver_lock[name]:
            yield

    async def add_adapter(self, name: str, int_id: int, path: str) -> None:
        """Have every worker of every engine load the folder ``path``.

        Raises:
            PluginError: ``load_failed`` with vLLM's reason.
        """
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await self.client.add_lora(_lora_request(name, int_id, path))
        except TimeoutError as error:
            raise PluginError("engine_timeout", f"not loaded after {CALL_TIMEOUT:.0f} s", status=504) from error
        except Exception as error:  # vLLM raises a bare Exception with the engine's reason in it
            raise PluginError("load_failed", f"vLLM refused the adapter: {error}", status=400) from error

    def register(self, name: str, int_id: int, path: str) -> None:
        """Let requests use ``name``."""
        self.models.lora_requests[name] = _lora_request(name, int_id, path)

    def forget(self, name: str) -> None:
        """Refuse new requests for ``name``; slot and host copy stay until vLLM's caches need the room."""
        del self.models.lora_requests[name]

    def in_flight(self, name: str | None = None) -> int:
        """Requests running or waiting in this API server: all, or those that use adapter ``name``."""
        states = self.client.output_processor.request_states.values()
        return sum(1 for state in states if name is None or state.lora_name == name)

    # ---------------------------------------------------------------- weights

    async def asleep(self) -> bool:
        """Whether an engine sleeps: reading weights that are not in memory would kill it."""
        return any(await self.utility("loraflow_asleep"))

    async def need_awake(self) -> None:
        """Refuse to touch weights or LoRA slots that are not in memory. Costs no call where no engine can sleep.

        Raises:
            PluginError: ``asleep`` (409).
        """
        model = self.config.model_config
        may_sleep = any(getattr(model, key, False) for key in ("enable_sleep_mode", "enable_cumem_allocator"))
        if may_sleep and await self.asleep():
            raise PluginError("asleep", "the server sleeps: wake it up before the sync", status=409)

    async def fresh_caches(self) -> None:
        """Forget what was computed with the old weights, on every engine; requests in flight are computed again.

        Raises:
            PluginError: ``cache_not_reset``.
        """
        for error in await self.utility("loraflow_fresh_caches"):
            require_fresh(error)

    @property
    def several(self) -> bool:
        """Whether there is more than one engine (data parallelism)."""
        return len(self.client.engine_core.core_engines) > 1

    @asynccontextmanager
    async def paused(self, *, needed: bool = True) -> AsyncIterator[None]:
        """No step runs inside; requests keep their place and go on afterwards, also where the inside failed.

        Engines that somebody else has paused stay paused. Where it is not ``needed``, nothing is done.
        """
        if not needed or not await self.pause():
            yield
            return
        try:
            yield
        finally:
            await self.resume()

    async def pause(self) -> bool:
        """Let no step run from now on; requests keep their place. False where somebody else has paused them."""
        if any(await self.utility("is_scheduler_paused")):
            return False
        await self.utility("pause_scheduler", "keep", False)
        return True

    async def resume(self) -> None:
        """Let steps run again."""
        await self.utility("resume_scheduler")

    @property
    def has_version(self) -> bool:
        """Whether vLLM keeps a name of the weights."""
        return hasattr(self.client, "get_weight_version") and hasattr(self.client, "update_weight_version")

    async def weight_version(self) -> str | None:
        """The name of the weights; None where vLLM keeps none."""
        return str(await self.client.get_weight_version()) if self.has_version else None

    async def hold(self, label: str) -> dict[str, Any]:
        """Name the weights ``label`` and pause; ``was``, their name before, and ``paused_here``. See `pause`."""
        if self.several:
            was = await self.weight_version()
            await self.client.update_weight_version(label)
            return {"was": was, "paused_here": await self.pause()}
        (answer,) = await self.utility("loraflow_hold", label)
        return dict(answer)

    @property
    def has_group(self) -> bool:
        """Whether workers can join a trainer's broadcast group."""
        transfer = getattr(self.config, "weight_transfer_config", None)
        return getattr(transfer, "backend", None) in {"nccl", "gloo"}

    async def receive(
        self, label: str, incoming: Mapping[str, Any], timeout: float, limit: float
    ) -> tuple[list[list[dict[str, Any]]], str]:
        """Have every worker receive what a trainer sends; their answers by engine and rank, and the weights' name.

        Args:
            label: The name that they get.
            incoming: See `loraflow_server.receive.Incoming`.
            timeout: Seconds for one bucket.
            limit: Seconds for all of it.
        """
        engines = await self.utility("loraflow_receive", label, dict(incoming), timeout, limit=limit)
        ranks = [answers_of(engine["ranks"], number) for number, engine in enumerate(engines)]
        return ranks, next((found["version"] for found in engines if found["version"] != label), label)

    async def release(self) -> None:
        """`fresh_caches` and `resume`; where the first fails on any engine, none goes on."""
        if self.several:
            await self.fresh_caches()
            await self.resume()
            return
        for error in await self.utility("loraflow_release"):
            require_fresh(error)

    # ---------------------------------------------------------------- description

    def describe(self) -> dict[str, Any]:
        """The parts of vLLM's configuration that a trainer plans with, shaped as ``/server_info`` shapes them."""
        config = self.config
        model, parallel, lora = config.model_config, config.parallel_config, config.lora_config
        hf = model.hf_config
        text = hf.get_text_config() if hasattr(hf, "get_text_config") else hf
        transfer = getattr(config, "weight_transfer_config", None)
        return {
            "instance_id": config.instance_id,
            "model_config": {
                "model": model.model,
                "dtype": str(model.dtype).removeprefix("torch."),
                "quantization": model.quantization,
                "logprobs_mode": _text(model.logprobs_mode),
                "max_logprobs": model.max_logprobs,
                "max_model_len": model.max_model_len,
                "hf_config": {
                    "architectures": list(getattr(hf, "architectures", None) or ()),
                    "model_type": getattr(hf, "model_type", None),
                    "vocab_size": getattr(text, "vocab_size", None),
                },
            },
            "parallel_config": {
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
            "lora_config": None
            if lora is None
            else {
                "max_lora_rank": lora.max_lora_rank,
                "max_loras": lora.max_loras,
                "max_cpu_loras": lora.max_cpu_loras,
                "lora_dtype": str(lora.lora_dtype).removeprefix("torch."),
                "target_modules": _names(lora.target_modules),
                "fully_sharded_loras": lora.fully_sharded_loras,
            },
            "weight_transfer_config": None if transfer is None else {"backend": transfer.backend},
        }


def answers_of(ranks: Sequence[Mapping[str, Any]], engine: int) -> list[dict[str, Any]]:
    """What the workers of one engine answered; the first error among them is raised, with the worker's place."""
    errors = _errors(ranks, engine)
    if errors:
        raise _telling(errors)
    return [answer["ok"] for answer in ranks]


def _errors(ranks: Sequence[Mapping[str, Any]], engine: int) -> list[PluginError]:
    found = []
    for rank, answer in enumerate(ranks):
        if "error" in answer:
            error = PluginError.from_dict(answer["error"])
            error.details.setdefault("worker", f"engine {engine}, rank {rank}")
            found.append(error)
    return found


def _telling(errors: Sequence[PluginError]) -> PluginError:
    """The first; before those after which a group is as it was (`SPARED`), any other."""
    return min(errors, key=lambda error: error.code in SPARED)


def require_fresh(cache_error: str | None) -> None:
    """Raise ``cache_not_reset`` where `loraflow_server.core.fresh_caches` says so."""
    if cache_error is not None:
        raise PluginError(
            "cache_not_reset", f"the prefix cache of the old weights could not be reset: {cache_error}", status=500
        )


def _lora_request(name: str, int_id: int, path: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=int_id, lora_path=path)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _names(value: Sequence[str] | None) -> list[str] | None:
    return None if not value else sorted(value)

"""Holding and releasing an engine in one call, as its own loop does it; vLLM's ``EngineCore`` is played."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from loraflow_server import core
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.weights import BaseWeights


class Core:
    """One engine: its pause, the name of its weights, its caches."""

    loraflow_hold = core.hold
    loraflow_release = core.release
    loraflow_fresh_caches = core.fresh_caches

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))
        self.label = "default"
        self.paused = self.stuck = False
        self.step: Future[None] | None = None
        self.log: list[str] = []

    def get_weight_version(self) -> str:
        return self.label

    def set_weight_version(self, label: str) -> None:
        self.log.append(f"label {label}")
        self.label = label

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear: bool) -> Future[None] | None:
        assert (mode, clear) == ("keep", False)
        self.log.append("pause")
        self.paused = True
        return self.step

    def resume_scheduler(self) -> None:
        self.log.append("resume")
        self.paused = False

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.log.append("forget")
        return not self.stuck

    def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        return [{"ok": {"sums": [3], "ms": 1.0}}]


def engine_of(*cores: Core, versions: bool = True) -> Engine:
    async def call(method: str, *args: Any, engine: int) -> Any:
        found = getattr(cores[engine], method)(*args)
        return await asyncio.wrap_future(found) if isinstance(found, Future) else found

    async def update(label: str) -> None:
        for one in cores:
            one.set_weight_version(label)

    async def get() -> str:
        return cores[0].label

    named = {"get_weight_version": get, "update_weight_version": update} if versions else {}
    client = SimpleNamespace(_call_utility_async=call, core_engines=list(range(len(cores))))
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
    return Engine(
        SimpleNamespace(engine_core=client, vllm_config=config, **named), SimpleNamespace(lora_requests={}), 1
    )


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_is_marked_then_held_then_released(count: int) -> None:
    cores = [Core() for _ in range(count)]
    engine = engine_of(*cores)
    assert engine.has_version
    assert asyncio.run(engine.hold("v1.partial")) == {"was": "default", "paused_here": True}
    assert all(one.paused and one.label == "v1.partial" for one in cores)
    assert all(one.log == ["label v1.partial", "pause"] for one in cores)
    assert asyncio.run(engine.hold("v2.partial")) == {"was": "v1.partial", "paused_here": False}
    asyncio.run(engine.release())
    assert all(one.log[-2:] == ["forget", "resume"] and not one.paused for one in cores)


def test_a_pause_that_waits_for_a_step_is_answered_after_it() -> None:
    one = Core()
    one.step = Future()

    async def hold() -> tuple[bool, Any]:
        task = asyncio.create_task(engine_of(one).hold("v1.partial"))
        await asyncio.sleep(0.01)
        early = task.done()
        assert one.step is not None
        one.step.set_result(None)
        return early, await task

    assert asyncio.run(hold()) == (False, {"was": "default", "paused_here": True})


def test_a_pause_that_fails_is_told() -> None:
    one = Core()
    one.step = Future()
    one.step.set_exception(RuntimeError("no"))
    with pytest.raises(PluginError, match="loraflow_hold: no"):
        asyncio.run(engine_of(one).hold("v1.partial"))


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_runs_over_the_caches_of_old_weights(count: int) -> None:
    cores = [Core() for _ in range(count)]
    cores[-1].stuck = True
    engine = engine_of(*cores)
    asyncio.run(engine.hold("v1"))
    with pytest.raises(PluginError, match="prefix cache"):
        asyncio.run(engine.release())
    assert all(one.paused for one in cores)


@pytest.mark.parametrize("versions", [True, False])
def test_sums_come_with_the_name_of_the_weights(versions: bool) -> None:
    engine = engine_of(Core(), versions=versions)
    assert engine.has_version is versions
    answer = asyncio.run(BaseWeights(engine).sums("layout"))
    assert answer["engines"] == [[[3]]]
    assert answer["weight_version"] == ("default" if versions else None)

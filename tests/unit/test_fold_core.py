"""Fold from the desk to the workers, with everything of ours real and vLLM's engine played by a loop of calls.

What a running server cannot be made to do on purpose: one rank of two that fails, a cache that cannot be emptied, one
engine of two that lags behind. All ranks and engines, or none, and the version before keeps being served.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.transports.fold_modules import fold_modules, payload_shapes
from loraflow_server import core
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.fold import Fold
from loraflow_server.fold_desk import FoldDesk
from loraflow_server.fold_rules import Recipe
from loraflow_server.fold_worker import FoldWorker
from loraflow_server.settings import Settings
from loraflow_server.weights import BaseWeights
from tests.helpers.tiny import load_base, make_tiny_model, peft_model, randomize
from tests.unit.test_fold_rules import Served


class Rank(FoldWorker):
    """A worker with a model of its own; payloads come by name instead of through shared memory."""

    def __init__(self, folder: Path, payloads: dict[str, torch.Tensor]) -> None:
        self.served = Served(load_base(folder), torch.float32)
        self.model_runner = SimpleNamespace(get_model=lambda: self.served)
        self.device = torch.device("cpu")
        self._payloads = payloads

    def loraflow_payloads(self) -> Any:
        return SimpleNamespace(bytes_of=lambda source: self._payloads[source["name"]])

    def loraflow_base(self) -> Any:
        return {"ok": {"tensors": {name: float(p.double().sum()) for name, p in self.served.named_parameters()}}}

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.flatten() for parameter in self.served.parameters()])


class Core:
    """vLLM's ``EngineCore`` as far as it is used."""

    loraflow_fold = core.fold
    loraflow_fresh_caches = core.fresh_caches
    loraflow_asleep = core.asleep

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.model_executor = SimpleNamespace(is_sleeping=False, sleeping_tags=set())
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))
        self.paused = False
        self.resets = 0
        self.stuck: str | None = None
        self.calls: list[str] = []

    def collective_rpc(self, method: str, timeout: Any, args: tuple[Any, ...], kwargs: Any) -> list[Any]:
        self.calls.append(method)
        return [getattr(rank, method)(*args) for rank in self.ranks]

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        assert (running, connector) == (True, False)
        self.resets += 1
        if self.stuck == "raises":
            raise RuntimeError("waiting for remote KV")
        return self.stuck is None

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear: bool) -> None:
        assert (mode, clear) == ("keep", False)
        self.paused = True

    def resume_scheduler(self) -> None:
        self.paused = False


class Site:
    """A server of so many engines with two ranks each, and a trainer."""

    def __init__(self, folder: Path, engines: int) -> None:
        self.payloads: dict[str, torch.Tensor] = {}
        self.cores = [Core([Rank(folder, self.payloads) for _ in range(2)]) for _ in range(engines)]

        async def call(method: str, *args: Any, engine: int) -> Any:
            return getattr(self.cores[engine], method)(*args)

        client = SimpleNamespace(_call_utility_async=call, core_engines=list(range(engines)))
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls="loraflow_server.worker.LoraflowWorker"),
            model_config=SimpleNamespace(enable_sleep_mode=True),
        )
        self.adapters: dict[str, Any] = {}
        models = SimpleNamespace(lora_requests=self.adapters)
        engine = Engine(SimpleNamespace(engine_core=client, vllm_config=config), models, 1)
        self.desk = FoldDesk(engine, BaseWeights(engine), Settings())
        self.model = peft_model(folder, r=4, target_modules=["q_proj", "up_proj"])
        spec = AdapterSpec.from_model(self.model)
        self.folder = folder
        self.shapes = {name: list(shape) for name, shape in payload_shapes(spec).items()}
        self.modules = list(fold_modules(spec).values())
        answer = self.run(self.desk.layout({"run_id": "run", "tensors": self.shapes, "modules": self.modules}))
        self.layout_id = answer["layout_id"]

    def run(self, work: Any) -> Any:
        return asyncio.run(work)

    def fold(self, version: int, **more: Any) -> dict[str, Any]:
        randomize(self.model, seed=version, std=0.1)
        name = f"v{version}"
        self.payloads[name] = take_snapshot(self.model).flat.clone().view(torch.uint8)
        body = {"run_id": "run", "policy": name, "layout_id": self.layout_id, "check": True, **more}

        async def source(_: Any) -> dict[str, Any]:
            return {"kind": "shm", "name": name}

        answer: dict[str, Any] = self.run(self.desk.fold(body, source))
        return answer

    @property
    def ranks(self) -> list[Rank]:
        return [rank for engine in self.cores for rank in engine.ranks]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [rank.weights for rank in self.ranks]

    def serves(self, weights: list[torch.Tensor]) -> bool:
        return all(torch.equal(now, then) for now, then in zip(self.weights, weights, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fold_core") / "model", layers=2, hidden_size=64)


@pytest.fixture(params=[1, 2], ids=["one_engine", "two_engines"])
def site(request: pytest.FixtureRequest, folder: Path) -> Site:
    return Site(folder, request.param)


def test_one_call_of_the_engine_folds_proves_and_empties_the_cache(site: Site) -> None:
    start = site.weights
    for engine in site.cores:
        engine.calls.clear()
    answer = site.fold(0)
    assert not site.serves(start)
    assert all(torch.equal(site.weights[0], other) for other in site.weights)
    assert answer["checked"] == 4
    assert answer["error"] <= 1
    for engine in site.cores:
        assert engine.calls == ["loraflow_base", "loraflow_fold", "loraflow_fold_finish"]  # the first only once
        assert engine.resets == 1
        assert not engine.paused
    site.run(site.desk.undo({"run_id": "run", "policy": "v0", "layout_id": site.layout_id}))
    assert site.serves(start)


@pytest.mark.parametrize("when", ["launch", "finish"])
def test_one_rank_that_fails_takes_all_back(site: Site, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    site.fold(0)
    before, victim = site.weights, site.ranks[-1].served
    views = {parameter.data_ptr() for parameter in victim.parameters()}
    failures = iter([True])
    if when == "launch":
        kept = Recipe.add_product

        def breaks(recipe: Recipe) -> None:
            if recipe.view.data_ptr() in views and next(failures, False):
                raise RuntimeError("CUDA out of memory")
            kept(recipe)

        monkeypatch.setattr(Recipe, "add_product", breaks)
    else:
        finish = Fold.finish

        def wrong(fold: Fold, *, whole: bool = False) -> dict[str, Any]:
            if fold.served[0].view.data_ptr() in views:
                fold.served[0].view[0, 0] += 1
            return finish(fold, whole=whole)

        monkeypatch.setattr(Fold, "finish", wrong)
    with pytest.raises(PluginError, match="out of memory" if when == "launch" else "off by"):
        site.fold(1)
    assert site.serves(before)
    assert site.desk.describe()["policy"] == "v0"
    assert not any(engine.paused for engine in site.cores)
    monkeypatch.undo()
    site.fold(2)
    assert not site.serves(before)


@pytest.mark.parametrize("how", ["says no", "raises"])
def test_a_cache_that_cannot_be_emptied_takes_all_back(site: Site, how: str) -> None:
    site.fold(0)
    before = site.weights
    site.cores[-1].stuck = how
    with pytest.raises(PluginError, match="prefix cache") as caught:
        site.fold(1)
    assert caught.value.code == "cache_not_reset"
    assert site.serves(before)
    site.cores[-1].stuck = None
    site.fold(2)


@pytest.mark.parametrize("how", ["cache", "rank"])
def test_after_a_fold_that_was_taken_back_nobody_goes_back_further(
    site: Site, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Ranks that had proven it have let go of what was before the version that is served; others have not."""
    site.fold(0)
    site.fold(1)
    before = site.weights
    if how == "cache":
        site.cores[-1].stuck = "says no"
        with pytest.raises(PluginError, match="prefix cache"):
            site.fold(2)
        site.cores[-1].stuck = None
    else:
        finish, victim = Fold.finish, site.ranks[-1].served
        views = {parameter.data_ptr() for parameter in victim.parameters()}

        def wrong(fold: Fold, *, whole: bool = False) -> dict[str, Any]:
            if fold.served[0].view.data_ptr() in views:
                fold.served[0].view[0, 0] += 1
            return finish(fold, whole=whole)

        with monkeypatch.context() as patch:
            patch.setattr(Fold, "finish", wrong)
            with pytest.raises(PluginError, match="off by"):
                site.fold(2)
    with pytest.raises(PluginError, match="'v1' cannot be taken back any more") as caught:
        site.run(site.desk.undo({"run_id": "run", "policy": "v1", "layout_id": site.layout_id}))
    assert (caught.value.code, caught.value.status) == ("not_kept", 409)
    undone = site.run(site.desk.undo({"run_id": "run", "policy": "v2", "layout_id": site.layout_id}))
    assert undone == {"policy": "v1", "undone": False}
    assert site.serves(before)
    site.fold(3)
    assert site.run(site.desk.undo({"run_id": "run", "policy": "v3", "layout_id": site.layout_id}))["policy"] == "v1"
    assert site.serves(before)


def test_an_undo_whose_caches_stay_is_told_and_the_status_says_what_the_weights_hold(site: Site) -> None:
    site.fold(0)
    before = site.weights
    site.fold(1)
    site.cores[-1].stuck = "says no"
    with pytest.raises(PluginError, match="prefix cache") as caught:
        site.run(site.desk.undo({"run_id": "run", "policy": "v1", "layout_id": site.layout_id}))
    assert caught.value.code == "cache_not_reset"
    assert site.serves(before)
    assert site.desk.describe()["policy"] == "v0"


def test_a_fold_that_cannot_be_taken_back_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.fold(0)
    before = site.weights
    site.cores[-1].stuck = "says no"

    def breaks(fold: Fold, policy: str) -> bool:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Fold, "undo", breaks)
    with pytest.raises(PluginError, match=r"could not be put back \(RuntimeError: CUDA error\): restart") as caught:
        site.fold(1)
    assert caught.value.code == "undo_failed"
    assert site.desk.describe()["policy"] is None  # nobody may take it for the version before
    monkeypatch.undo()
    site.cores[-1].stuck = None
    undone = site.run(site.desk.undo({"run_id": "run", "policy": "v1", "layout_id": site.layout_id}))
    assert undone["policy"] == "v0"
    assert site.serves(before)


def test_a_rank_that_cannot_take_its_own_half_back_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    start = site.weights
    site.fold(0)
    views = {parameter.data_ptr() for parameter in site.ranks[-1].served.parameters()}
    kept = Recipe.add_product

    def breaks(recipe: Recipe) -> None:
        if recipe.view.data_ptr() in views:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        kept(recipe)

    monkeypatch.setattr(Recipe, "add_product", breaks)
    with pytest.raises(PluginError, match=r"could not be put back \(RuntimeError: CUDA error") as caught:
        site.fold(1)
    assert caught.value.code == "undo_failed"
    assert site.desk.describe()["policy"] is None
    site.run(site.desk.reset({"run_id": "run"}))
    assert site.serves(start)


def test_a_payload_that_differs_is_never_served(site: Site) -> None:
    site.fold(0)
    before = site.weights
    with pytest.raises(PluginError, match="not the one that was sent") as caught:
        site.fold(1, expected=[1] * len(site.shapes))
    assert caught.value.status == 409
    assert site.serves(before)


def test_a_server_that_sleeps_is_not_written_to(site: Site) -> None:
    before = site.weights
    site.cores[-1].model_executor.is_sleeping = True
    with pytest.raises(PluginError, match="wake it up"):
        site.fold(0)
    assert site.serves(before)


def test_a_fold_that_a_sleeping_server_refused_leaves_it_as_it_was(site: Site) -> None:
    """Its base was not updated, and counts as pristine: no restart is needed for what comes after the wake-up."""
    start = site.weights
    put_to_sleep(site)
    with pytest.raises(PluginError, match="wake it up"):
        site.fold(0)
    put_to_sleep(site, tags=())
    site.fold(1)
    assert site.run(site.desk.reset({"run_id": "run"}))["pristine"]
    assert site.serves(start)


def test_weights_that_are_not_in_memory_are_not_touched(site: Site) -> None:
    """A CUDA error would kill the engine: the places are tried out, and the copy is put back, by writing."""
    site.fold(0)
    before = site.weights
    put_to_sleep(site)
    for engine in site.cores:
        engine.calls.clear()
    layout = {"run_id": "run", "tensors": site.shapes, "modules": site.modules}
    undo = {"run_id": "run", "policy": "v0", "layout_id": site.layout_id}
    for call in (site.desk.layout(layout), site.desk.undo(undo), site.desk.reset({"run_id": "run"})):
        with pytest.raises(PluginError, match="wake it up") as caught:
            site.run(call)
        assert (caught.value.code, caught.value.status) == ("asleep", 409)
    assert [engine.calls for engine in site.cores] == [[]] * len(site.cores)
    put_to_sleep(site, tags=())
    assert site.serves(before)
    assert site.run(site.desk.undo(undo)) == {"policy": None, "undone": True}


def put_to_sleep(site: Site, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
    for engine in site.cores:
        engine.model_executor = SimpleNamespace(is_sleeping=bool(tags), sleeping_tags=set(tags))


def test_a_layout_that_one_rank_refuses_leaves_no_copy_on_the_others(site: Site) -> None:
    start = site.weights
    site.run(site.desk.reset({"run_id": "run"}))
    victim = site.ranks[-1]

    def refuses() -> Any:
        raise PluginError("too_little_memory", "no room for a pristine copy", status=409)

    honest, victim.model_runner.get_model = victim.model_runner.get_model, refuses
    body = {"run_id": "run", "tensors": site.shapes, "modules": site.modules}
    with pytest.raises(PluginError, match="no room"):
        site.run(site.desk.layout(body))
    assert site.desk.describe() is None
    assert not any("_loraflow_fold" in vars(rank) for rank in site.ranks)
    victim.model_runner.get_model = honest
    site.run(site.desk.layout(body))
    assert site.serves(start)


def test_what_was_taken_back_twice_is_the_base_and_says_so(site: Site) -> None:
    start = site.weights
    site.fold(0)
    site.fold(1)
    for policy, left in (("v1", "v0"), ("v0", None)):
        body = {"run_id": "run", "policy": policy, "layout_id": site.layout_id}
        assert site.run(site.desk.undo(body)) == {"policy": left, "undone": True}
    assert site.serves(start)
    assert (site.desk.describe()["policy"], site.desk.describe()["digest"]) == (None, None)


def test_a_name_that_is_folded_means_what_it_meant(site: Site) -> None:
    site.fold(0)
    site.fold(1)
    before = site.weights
    for version in (1, 0):
        with pytest.raises(PluginError, match="a name is used once") as caught:
            site.fold(version, expected=[1] * len(site.shapes))
        assert caught.value.code == "name_used"
        assert site.serves(before)
        assert site.desk.describe()["policy"] == "v1"


def test_an_adapter_that_came_after_the_layout_is_not_served_over_folded_weights(site: Site) -> None:
    """Loaded while the base was pristine still, by a push beside the run or through vLLM's own route."""
    start = site.weights
    site.adapters["other-v1"] = SimpleNamespace(lora_int_id=1, lora_path="/adapters/other")
    with pytest.raises(PluginError, match="adapters are loaded") as caught:
        site.fold(0)
    assert (caught.value.code, caught.value.status) == ("adapters_loaded", 409)
    assert site.serves(start)
    assert site.desk.describe()["policy"] is None
    site.adapters.clear()
    site.fold(0)


def test_a_module_that_makes_no_sense_is_refused(site: Site) -> None:
    tensors = {"a": [2, 4], "b": [6, 2], "m": [6, 1], "v": [6, 1]}
    for module, word in (
        ({"a": "a"}, "name tensors"),
        ({"a": "a", "b": "b", "value": "v"}, "name tensors"),
        ({"a": "a", "b": "nothing"}, "name tensors"),
        ({"a": "a", "b": "b", "scaling": "2"}, "name tensors"),
        ({"a": "a", "b": "b", "scaling": 10**400}, "name tensors"),
        ({"a": "a", "b": "b", "scaling": float("inf")}, "name tensors"),  # 1e999 in JSON
        ({"value": "v", "adds": 1}, "name tensors"),
        ({"a": "b", "b": "a"}, "has rank"),
        ({"a": "a", "b": "b", "magnitude": "a"}, "magnitudes"),
    ):
        body = {"run_id": "run", "tensors": tensors, "modules": [{"weight": "w", **module}]}
        with pytest.raises(PluginError, match=word) as caught:
            site.run(site.desk.layout(body))
        assert caught.value.status == 400


def test_a_trainer_that_was_killed_is_followed_by_the_next_one(site: Site) -> None:
    start = [rank.weights for rank in Site(site.folder, len(site.cores)).ranks]
    site.fold(0)
    other = {"run_id": "other", "tensors": site.shapes, "modules": site.modules}
    with pytest.raises(PluginError, match=r"run 'run' folds into this server, 0 s ago.*wait until it has been idle"):
        site.run(site.desk.layout(other))
    site.desk._lease.used -= 121.0  # as if two minutes had passed
    site.run(site.desk.layout(other))
    assert site.serves(start)
    with pytest.raises(PluginError, match="folds into this server now") as caught:
        site.fold(1)
    assert caught.value.status == 423
    assert site.serves(start)

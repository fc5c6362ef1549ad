"""Parts of the server plugin that need no vLLM: settings, the watch over the base weights, fold in plain torch."""

from __future__ import annotations

import asyncio
import json
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from loraflow.engine_server import LocalEngine
from loraflow_server import core
from loraflow_server.errors import PluginError
from loraflow_server.fold import Fold, FoldModule
from loraflow_server.fold_rules import Recipe
from loraflow_server.payload import Payloads
from loraflow_server.placement import find_served
from loraflow_server.settings import Settings
from loraflow_server.weights import BaseWeights

# ---------------------------------------------------------------- settings and errors


def test_settings_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    env = {
        "LORAFLOW_ADAPTER_ROOTS": f"{tmp_path}/link:{tmp_path}",
        "LORAFLOW_TOKEN": "t",
        "LORAFLOW_STORE_ROOTS": "s3://a/b/, gs://c",
        "LORAFLOW_CACHE_BYTES": "123",
    }
    found = Settings.from_env(env)
    assert found.roots == (tmp_path / "real", tmp_path)
    assert (found.token, found.stores, found.cache_bytes) == ("t", ("s3://a/b", "gs://c"), 123)
    assert found.cache_dir == tmp_path / "real" / "loraflow-cache"
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"LORAFLOW_TOKEN": ""}).token is None


@pytest.mark.parametrize(
    "env", [{"LORAFLOW_ADAPTER_ROOTS": "relative"}, {"LORAFLOW_ADAPTER_ROOTS": "s3:"}, {"LORAFLOW_CACHE_BYTES": "0"}]
)
def test_bad_settings_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="LORAFLOW_"):
        Settings.from_env(env)


def test_errors_survive_the_way_through_json() -> None:
    error = PluginError("code", "message", status=409, details={"tensors": ["a"]})
    again = PluginError.from_dict(json.loads(json.dumps(error.to_dict())))
    assert (again.code, again.message, again.status, again.details) == ("code", "message", 409, {"tensors": ["a"]})


# ---------------------------------------------------------------- the base weights


class Engines:
    """Two engines of one rank, with one weight."""

    has_extension = True

    def __init__(self) -> None:
        self.sums = [7, 7]
        self.sleeps = False

    async def asleep(self) -> bool:
        return self.sleeps

    async def need_awake(self) -> None:
        if self.sleeps:
            raise PluginError("asleep", "wake it up", status=409)

    async def workers(self, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        assert method == "loraflow_base"
        assert not self.sleeps, "weights that are not in memory were read"
        return [[{"tensors": {"w": value}}] for value in self.sums]


def test_an_updated_base_takes_no_adapter_until_it_is_pristine_again() -> None:
    engines: Any = Engines()
    weights = BaseWeights(engines)

    async def story() -> None:
        await weights.need_pristine()
        await begun(weights)
        assert weights.touched
        await weights.need_pristine()  # begun, but nothing changed: proven by the checksums
        assert not weights.touched
        await begun(weights)
        engines.sums = [7, 8]  # one engine only
        with pytest.raises(PluginError, match="not proven pristine"):
            await weights.need_pristine()
        found = await weights.compare()
        assert (found["pristine"], found["engines_agree"], found["changed"]) == (False, False, ["w"])
        engines.sums = [7, 7]
        assert (await weights.compare())["pristine"]
        await weights.need_pristine()

    asyncio.run(story())


def test_the_weights_of_a_server_that_sleeps_are_not_read_and_count_as_unproven() -> None:
    engines: Any = Engines()
    weights = BaseWeights(engines)

    async def story() -> None:
        engines.sleeps = True
        await begun(weights)
        assert weights.touched
        with pytest.raises(PluginError, match="wake it up"):
            await weights.need_pristine()
        engines.sleeps = False
        with pytest.raises(PluginError, match="not proven pristine"):  # nobody knows what it was before
            await weights.need_pristine()

    asyncio.run(story())


async def begun(weights: BaseWeights) -> None:
    """An update that wrote nothing yet, or whose writing is played by the caller."""
    async with weights.updating():
        pass


class SlowEngines(Engines):
    """What it read of the weights takes a while to arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.arrives = asyncio.Event(), asyncio.Event()

    async def workers(self, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        found = await super().workers(method, *args)
        self.read.set()
        await self.arrives.wait()
        return found


def test_a_base_that_is_read_before_an_update_writes_is_not_taken_for_what_it_leaves() -> None:
    engines: Any = SlowEngines()
    weights = BaseWeights(engines)

    async def story() -> None:
        engines.arrives.set()
        async with weights.updating():
            engines.arrives.clear()
            engines.read.clear()
            comparing = asyncio.create_task(weights.compare())
            await engines.read.wait()
            engines.sums = [8, 8]
        engines.arrives.set()
        assert (await comparing)["pristine"]
        assert weights.touched
        with pytest.raises(PluginError, match="not proven pristine"):
            await weights.need_pristine()

    asyncio.run(story())


def test_an_update_that_begins_while_the_base_is_compared_is_not_forgotten() -> None:
    engines: Any = SlowEngines()
    weights = BaseWeights(engines)

    async def story() -> None:
        engines.arrives.set()
        await begun(weights)
        engines.arrives.clear()
        engines.read.clear()
        comparing = asyncio.create_task(weights.compare())
        loading = asyncio.create_task(weights.need_pristine())
        await engines.read.wait()
        await begun(weights)
        engines.sums = [8, 8]
        engines.arrives.set()
        await comparing
        assert weights.touched
        with pytest.raises(PluginError, match="not proven pristine"):
            await loading
        with pytest.raises(PluginError, match="not proven pristine"):
            await weights.need_pristine()

    asyncio.run(story())


def test_of_two_updates_that_begin_together_the_second_one_notes_nothing() -> None:
    engines: Any = SlowEngines()
    weights = BaseWeights(engines)
    written, late = asyncio.Event(), list[Any]()

    async def update() -> None:
        async with weights.updating():
            engines.sums = [8, 8]
            written.set()

    async def asleep() -> bool:
        await asyncio.sleep(0)
        if asyncio.current_task() in late:
            await written.wait()
        return False

    async def story() -> None:
        engines.asleep = asleep
        engines.arrives.set()
        first, second = asyncio.create_task(update()), asyncio.create_task(begun(weights))
        late.append(second)
        await asyncio.wait_for(asyncio.gather(first, second), 5)
        assert not (await weights.compare())["pristine"]
        assert weights.touched

    asyncio.run(story())


def test_an_update_that_a_sleeping_server_refuses_leaves_its_base_proven() -> None:
    engines: Any = Engines()
    weights = BaseWeights(engines)

    async def receive(label: str, *_: Any) -> Any:
        assert not engines.sleeps, "weights that are not in memory were written"
        return [[{"sums": [1], "ms": 1.0}]], label

    async def story() -> None:
        engines.receive, engines.sleeps = receive, True
        calls = (
            weights.receive({"buckets": [1]}, "v1", 1.0),
            weights.layout({"w": [2, 2]}),
            weights.sums("layout"),
        )
        for call in calls:
            with pytest.raises(PluginError, match="wake it up"):
                await call
        assert not weights.touched
        engines.sleeps = False
        assert (await weights.receive({"buckets": [1]}, "v1", 1.0))["weight_version"] == "v1"
        assert (await weights.compare())["pristine"]

    asyncio.run(story())


@pytest.mark.parametrize(("tags", "sleeps"), [((), False), (("kv_cache",), False), (("weights", "kv_cache"), True)])
def test_a_server_whose_weights_are_back_is_awake(tags: tuple[str, ...], *, sleeps: bool) -> None:
    assert core.asleep(SimpleNamespace(model_executor=SimpleNamespace(sleeping_tags=set(tags)))) is sleeps


@pytest.mark.parametrize("tags", [(), ("weights", "kv_cache")])
def test_an_engine_of_this_process_needs_no_plugin_to_tell_that_it_sleeps(tags: tuple[str, ...]) -> None:
    inside = SimpleNamespace(model_executor=SimpleNamespace(sleeping_tags=set(tags)))
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    client = SimpleNamespace(engine_core=SimpleNamespace(engine_core=inside), vllm_config=config)
    engine = LocalEngine(SimpleNamespace(llm_engine=client))
    if not tags:
        asyncio.run(engine.need_awake())
        return
    with pytest.raises(PluginError, match="wake it up"):
        asyncio.run(engine.need_awake())


def test_gpu_memory_that_is_shared_anew_in_another_size_is_mapped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's allocator gives a freed place of one segment to the next payload: same handle, same offset."""
    mapped: list[int] = []

    def maps(source: Any, _: torch.device) -> torch.Tensor:
        mapped.append(source["nbytes"])
        return torch.zeros(source["nbytes"], dtype=torch.uint8)

    monkeypatch.setattr("loraflow_server.payload.map_gpu", maps)
    payloads = Payloads(torch.device("cpu"))
    for nbytes in (8, 8, 16, 16, 4):
        source = {"kind": "cuda_ipc", "handle": "aGFuZGxl", "storage_offset": 0, "nbytes": nbytes}
        assert payloads.bytes_of(source).shape == (nbytes,)
    assert mapped == [8, 16, 4]


def test_without_the_extension_an_updated_base_is_never_pristine() -> None:
    weights = BaseWeights(SimpleNamespace(has_extension=False))  # type: ignore[arg-type]

    async def story() -> None:
        await begun(weights)
        with pytest.raises(PluginError):
            await weights.need_pristine()

    asyncio.run(story())


# ---------------------------------------------------------------- where weights are served


class Model(nn.Module):
    """Loaders of the kinds that vLLM has: packed rows, a column shard, a transpose; and some that are none."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(6, 4).to(dtype), requires_grad=False)
        self.shard = nn.Parameter(torch.randn(5, 3).to(dtype), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, 2).to(dtype), requires_grad=False)
        self.tied = self.shard_alias = nn.Parameter(torch.randn(2, 2).to(dtype), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "q":
                self.packed.data[:4].copy_(weight)
            elif name == "k":
                self.packed.data.narrow(0, 4, 2).copy_(weight.narrow(0, 2, 2))
            elif name == "s":
                self.shard.data.copy_(weight[:, 3:6])
            elif name == "t":
                self.turned.data.copy_(weight.t())
                self.turned.data[3:].fill_(0)
            elif name == "scaled":
                self.shard.data.copy_(weight * 2)
            elif name == "added":
                self.shard.data.add_(weight)
            elif name == "strided":
                self.shard.data.copy_(weight[:, ::2])
            elif name == "broadcast":
                self.shard.data.copy_(weight[:1])
            elif name == "tied":
                self.tied.data.copy_(weight)
            else:
                raise ValueError(f"no parameter named {name}")


def test_weights_are_found_without_being_written() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.named_parameters()}
    shapes = {"q": (4, 4), "k": (6, 4), "s": (5, 6), "t": (2, 4)}
    found = find_served(model, shapes)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    torch.manual_seed(1)
    sources = {name: torch.randn(shape) for name, shape in shapes.items()}
    for piece in found:  # writing through what was found is what the loaders do
        piece.view.copy_(piece.rect.of(list(sources.values())[piece.rect.tensor]))
    after = {name: value.clone() for name, value in model.named_parameters()}
    model.load_weights(sources.items())
    model.turned.data[3:].copy_(after["turned"][3:])  # padding, which a loader clears and find_served leaves
    assert all(torch.equal(after[name], value) for name, value in model.named_parameters())
    assert [piece.parameter for piece in found] == ["packed", "packed", "shard", "turned"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("scaled", (5, 3)),
        ("added", (5, 3)),
        ("strided", (5, 6)),
        ("broadcast", (5, 3)),
        ("tied", (2, 2)),
        ("unknown", (2, 2)),
        ("q", (9, 9, 9)),
    ],
)
def test_loaders_that_do_more_than_slice_are_refused(name: str, shape: tuple[int, ...]) -> None:
    model = Model()
    before = {key: value.clone() for key, value in model.named_parameters()}
    with pytest.raises(PluginError) as caught:
        find_served(model, {name: shape})
    assert caught.value.code == "unsupported_layout"
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())


def test_what_an_update_left_on_a_parameter_is_looked_behind() -> None:
    """vLLM's wrapper of layers that an update did not touch: between updates it ignores what it is given."""

    class Updated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

            def own(parameter: nn.Parameter, weight: torch.Tensor) -> None:
                parameter.data.copy_(weight)

            @wraps(own, assigned=("__doc__",))
            def online_process_loader(parameter: nn.Parameter, weight: torch.Tensor) -> None:
                return

            self.bias.weight_loader = online_process_loader  # type: ignore[attr-defined]

        def load_weights(self, weights: Any) -> None:
            for _, weight in weights:
                self.bias.weight_loader(self.bias, weight)  # type: ignore[attr-defined]

    model = Updated()
    left = model.bias.weight_loader  # type: ignore[attr-defined]
    (piece,) = find_served(model, {"b": (4,)})
    assert (piece.rect.rows, piece.rect.cols, piece.parameter) == (4, 1, "bias")
    assert model.bias.weight_loader is left  # type: ignore[attr-defined]


# ---------------------------------------------------------------- folding


MODULES = [
    FoldModule("q", (4, 4), 0, 1, 0.5, transposed=False),
    FoldModule("k", (6, 4), 2, 3, 2.0, transposed=False),
    FoldModule("s", (5, 6), 4, 5, 1.0, transposed=False),
]
SHAPES = [(2, 4), (4, 2), (3, 4), (6, 3), (1, 6), (5, 1)]


def adapter(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def apply(fold: Fold, policy: str, tensors: list[torch.Tensor]) -> dict[str, Any]:
    payload = torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)
    fold.begin(policy, payload)
    return fold.finish(whole=True)


def folded(base: dict[str, torch.Tensor], tensors: list[torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same in float64, written out by hand."""
    a = [tensor.double() for tensor in tensors]
    out = {name: value.double() for name, value in base.items()}
    out["packed"][:4] += 0.5 * a[1] @ a[0]
    out["packed"][4:] += 2.0 * (a[3] @ a[2])[2:4]
    out["shard"] += (a[5] @ a[4])[:, 3:6]
    return {name: value.to(dtype) for name, value in out.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fold_is_the_rounded_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model(dtype)
    base = {name: value.clone() for name, value in model.named_parameters()}
    fold = Fold(model, MODULES, SHAPES)
    sums = fold.base_sums()
    for seed in range(3):
        apply(fold, f"v{seed}", adapter(seed, dtype))
        wanted = folded(base, adapter(seed, dtype), dtype)
        for name, value in model.named_parameters():
            # Rounded once: the value next to the exact sum, or its neighbour where float32 sums meet a tie.
            assert torch.allclose(value.double(), wanted[name].double(), rtol=torch.finfo(dtype).eps, atol=1e-6), name
        assert fold.largest_error() <= 1
    assert fold.served_sums() != sums
    fold.restore()
    assert fold.served_sums() == sums == fold.base_sums()
    assert all(torch.equal(base[name], value) for name, value in model.named_parameters())


def test_undo_goes_back_one_version() -> None:
    model = Model()
    fold = Fold(model, MODULES, SHAPES)
    start = fold.served_sums()
    apply(fold, "v0", adapter(0, torch.float32))
    first = fold.served_sums()
    apply(fold, "v1", adapter(1, torch.float32))
    assert not fold.undo("v0")
    assert fold.undo("v1")
    assert fold.served_sums() == first
    assert fold.undo("v0")
    assert fold.served_sums() == start


def test_a_fold_that_fails_half_way_puts_back_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    fold = Fold(model, MODULES, SHAPES)
    apply(fold, "v0", adapter(0, torch.float32))
    before = fold.served_sums()
    kept = Recipe.add_product

    def breaks(recipe: Recipe) -> None:
        if recipe.view.shape == (5, 3) and not failed:
            failed.append(recipe)
            raise RuntimeError("the last product does not fit")
        kept(recipe)

    failed: list[Recipe] = []
    monkeypatch.setattr(Recipe, "add_product", breaks)
    with pytest.raises(RuntimeError, match="does not fit"):
        apply(fold, "v1", adapter(1, torch.float32))
    assert fold.served_sums() == before
    assert fold.current is not None
    assert fold.current.policy == "v0"


def test_a_wrong_fold_is_found_by_its_projection() -> None:
    model = Model()
    fold = Fold(model, MODULES, SHAPES)
    apply(fold, "v0", adapter(0, torch.float32))
    assert fold.largest_error() <= 1
    model.packed.data[5, 2] += 1e-3
    assert fold.largest_error() > 10


def test_weights_that_were_moved_are_not_written() -> None:
    model = Model()
    fold = Fold(model, MODULES, SHAPES)
    fold.served[0].view.set_(torch.zeros(4, 4))
    with pytest.raises(PluginError, match="moved"):
        apply(fold, "v0", adapter(0, torch.float32))


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()

    def full(*args: Any, **more: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("loraflow_server.fold.torch.empty", full)
    monkeypatch.setattr("loraflow_server.fold.find_served", lambda *args: _found(model))
    with pytest.raises(PluginError) as caught:
        Fold(model, MODULES, SHAPES)
    assert (caught.value.code, caught.value.status) == ("too_little_memory", 409)


def _found(model: Model) -> list[Any]:
    from loraflow_server.placement import Served
    from loraflow_server.rects import Rect

    return [Served(Rect(0, 0, 0, 4, 4), model.packed.data[:4], "packed")]


class Repacked(nn.Module):
    """A linear layer that computes with a copy of its weight, as CPU kernels do."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        packed = self.layer.weight if live else self.layer.weight.clone()
        apply = lambda layer, x, bias: x @ packed.T  # noqa: E731
        self.layer.quant_method = SimpleNamespace(apply=apply)

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            self.layer.weight.data.copy_(weight)


def test_a_repacked_weight_is_refused() -> None:
    modules, shapes = [FoldModule("w", (4, 4), 0, 1, 1.0, transposed=False)], [(2, 4), (4, 2)]
    Fold(Repacked(live=True), modules, shapes)
    model = Repacked(live=False)
    before = model.layer.weight.clone()
    with pytest.raises(PluginError) as caught:
        Fold(model, modules, shapes)
    assert caught.value.code == "not_live"
    assert torch.equal(model.layer.weight, before)


def test_a_layer_that_fails_while_it_is_tried_keeps_its_weights() -> None:
    model = Repacked(live=True)
    before, calls = model.layer.weight.clone(), iter((False, True))
    honest = model.layer.quant_method.apply

    def apply(layer: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
        if next(calls):
            raise RuntimeError("CUDA out of memory")
        return honest(layer, x, bias)

    model.layer.quant_method.apply = apply
    with pytest.raises(RuntimeError, match="out of memory"):
        Fold(model, [FoldModule("w", (4, 4), 0, 1, 1.0, transposed=False)], [(2, 4), (4, 2)])
    assert torch.equal(model.layer.weight, before)

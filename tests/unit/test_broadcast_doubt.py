"""A merged update that breaks anywhere: afterwards the server has the weights from before, or is told to be in doubt.

vLLM's routes are played, with its refusals, since a running server cannot be made to lose the answer to one call; what
a real one does is tested in ``tests/server``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loraflow.adapter import take_snapshot
from loraflow.config import SyncConfig
from loraflow.errors import LoadError, LoraflowError
from loraflow.policy import Policy
from loraflow.server import HTTPFailure, Unreachable, VLLMServer
from loraflow.server_info import PluginInfo, ServedModel, ServerInfo
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.groups import Group
from loraflow.transports.link import PRISTINE, Link
from loraflow.transports.wire import Bucket
from tests.helpers.tiny import load_base, make_tiny_model, peft_model, randomize

ROUTES = frozenset({"init_weight_transfer_engine", "weight_info", "weight_checker", "update_weights", "pause"})


class Serving(VLLMServer):
    """A server with weights.

    Attributes:
        lost: Path of a call that has its effect, and whose answer is lost; with how often.
        refused: The same of a call that is refused.
    """

    def __init__(self, url: str, weights: dict[str, Tensor]) -> None:
        super().__init__(url)
        self.weights = weights
        self.paused = self.asleep = self.updating = False
        self.label = PRISTINE
        self.adapters: list[str] = []
        self.lost: tuple[str, int] = ("", 0)
        self.refused: tuple[str, int] = ("", 0)
        self._info = ServerInfo(
            url, "0.32.0", "base", "/m", dtype="float32", weight_transfer="gloo", weight_routes=ROUTES
        )

    def refresh(self) -> ServerInfo:
        return self.info

    def models(self) -> list[ServedModel]:
        return [ServedModel("base", "/m", None), *(ServedModel(name, f"/{name}", "base") for name in self.adapters)]

    def unload_adapter(self, name: str) -> bool:
        self._may_fail("/unload")
        self.adapters.remove(name)
        return True

    def request(self, method: str, path: str, **options: Any) -> Any:
        if self.refused[0] == path and self.refused[1]:
            self.refused = path, self.refused[1] - 1
            raise HTTPFailure(f"{path} answered 500", status=500, reason="no", server=self.url)
        answer = self._do(path, options.get("json") or {})
        if self.lost[0] == path and self.lost[1]:
            self.lost = path, self.lost[1] - 1
            raise Unreachable(f"{path}: connection reset", server=self.url)
        return answer

    def _may_fail(self, path: str) -> None:
        if self.refused[0] == path and self.refused[1]:
            self.refused = path, self.refused[1] - 1
            raise LoadError(f"{path} answered 500", server=self.url)

    def _do(self, path: str, body: dict[str, Any]) -> Any:
        if path in {"/start_weight_update", "/finish_weight_update"}:
            if self.updating == path.startswith("/start"):
                raise HTTPFailure("out of order", status=500, reason="out of order", server=self.url)
            self.updating = not self.updating
            self.label = body.get("weight_version", self.label)
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path in {"/pause", "/resume"}:
            self.paused = path == "/pause"
        elif path == "/loraflow/v1/hold":
            held = {"was": self.label, "paused_here": not (self.paused or self.asleep), "adapters": self.adapters}
            self.label, self.paused = body["label"], self.paused or not self.asleep
            return held
        elif path == "/loraflow/v1/resume":
            self.paused = False
        return {
            "/get_world_size": {"world_size": 1},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.paused or self.asleep},
            "/metrics": 'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1' if self.asleep else "",
            "/weight_checker": {"checksums": {name: _sha(tensor) for name, tensor in self.weights.items()}},
        }.get(path, {})


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


class Sent:
    def done(self) -> bool:
        return True


class Wire(Group):
    """A group whose buckets are in the server's weights at once."""

    device = torch.device("cpu")
    buffers = 2

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.breaks_at: int | None = None

    def close(self) -> None:
        pass

    def send(self, buffer: Tensor, bucket: Bucket) -> Sent:
        assert self.server.updating
        assert self.server.paused
        for slot in bucket.slots:
            part = buffer[slot.start : slot.start + slot.tensor.nbytes].view(slot.tensor.dtype)
            self.server.weights[slot.tensor.name] = part.clone().view(slot.tensor.shape)
        return Sent()


PLUGIN = PluginInfo(
    "0.1", worker_extension=False, capabilities=frozenset({"pause", "hold"}), roots=(), status={"instance": "i"}
)


class Site:
    def __init__(self, model: Any, base: dict[str, Tensor], count: int, *, plugin: bool = False) -> None:
        self.servers = [Serving(f"http://s{i}", dict(base)) for i in range(count)]
        for server in self.servers if plugin else ():
            server._info = replace(server.info, plugin=PLUGIN)
        self.model = model
        self.transport = BroadcastTransport(self.model, SyncConfig(carrier="gloo", bucket_bytes=1 << 16), "gloo")
        self.version = -1

    def deliver(self) -> dict[str, Exception | None]:
        self.version += 1
        randomize(self.model, seed=self.version, std=0.1)
        delivery = self.transport.deliver(self.policy, take_snapshot(self.model), self.servers)
        return {url: outcome.error for url, outcome in delivery.servers.items()}

    @property
    def policy(self) -> Policy:
        return Policy("run", self.version)

    def held(self) -> list[dict[str, Tensor]]:
        return [dict(server.weights) for server in self.servers]

    def serves(self, held: list[dict[str, Tensor]]) -> list[bool]:
        return [
            all(torch.equal(server.weights[name], tensor) for name, tensor in then.items())
            for server, then in zip(self.servers, held, strict=True)
        ]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Tensor]]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("doubt") / "model", layers=2, hidden_size=64)
    base = {name: p.detach().clone() for name, p in load_base(folder).state_dict().items()}
    return peft_model(folder, target_modules=["q_proj", "down_proj"]), base


@pytest.fixture
def sites(parts: tuple[Any, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Site]:
    def wired(transport: BroadcastTransport, server: Any, *place: int) -> Link:
        return Link(server, "gloo", lambda link, world: Wire(server), bucket_bytes=1 << 16, timeout=2.0)

    monkeypatch.setattr(BroadcastTransport, "_link", wired)

    def make(count: int, **options: Any) -> Site:
        site = Site(*parts, count, **options)
        site.transport.open(site.servers)
        return site

    return make


CALLS = [
    "/update_weight_version",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


CALLS_BY_PLUGIN = [
    "/loraflow/v1/hold",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/loraflow/v1/resume",
]


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("how", ["lost", "refused"])
@pytest.mark.parametrize(("path", "plugin"), [(c, False) for c in CALLS] + [(c, True) for c in CALLS_BY_PLUGIN])
def test_every_call_may_fail(sites: Any, path: str, how: str, times: int, plugin: bool) -> None:
    site: Site = sites(2, plugin=plugin)
    assert set(site.deliver().values()) == {None}
    before, victim = site.held(), site.servers[1]
    setattr(victim, how, (path, times))
    assert victim.url in [url for url, error in site.deliver().items() if error is not None]
    left = site.transport.withdraw(site.policy, site.servers)
    assert site.servers[0].url not in left
    assert site.serves(before)[0]
    if times == 1:
        assert left == {}
    if victim.url not in left:
        assert site.serves(before)[1]
        assert not victim.paused, "requests wait for ever"
        assert victim.label == "run-v0"
    victim.lost = victim.refused = ("", 0)
    if left:  # it is brought back like one that returns
        site.transport.attach(Policy("run", 0), _snapshot_of(site, 0), victim)
        assert site.serves(before)[1]
        assert not victim.paused
    assert set(site.deliver().values()) == {None}
    site.transport.close(site.servers)
    assert [server.label for server in site.servers] == [PRISTINE] * 2
    assert not any(server.paused for server in site.servers)


def _snapshot_of(site: Site, version: int) -> Any:
    randomize(site.model, seed=version, std=0.1)
    return take_snapshot(site.model)


@pytest.mark.parametrize("plugin", [False, True])
def test_adapters_that_cannot_be_unloaded_leave_nobody_waiting(sites: Any, plugin: bool) -> None:
    site: Site = sites(1, plugin=plugin)
    [server] = site.servers
    site.deliver()
    before = site.held()
    server.adapters.append("other-v3")
    server.refused = ("/unload", 1)
    [error] = site.deliver().values()
    assert "unload" in str(error)
    assert site.transport.withdraw(site.policy, site.servers) == {}
    assert not server.paused
    assert site.serves(before) == [True]


def test_a_merge_that_never_works_ends_and_leaves_doubt(sites: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site: Site = sites(2)
    site.deliver()
    tries = []

    def failing(*args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        tries.append(1)
        raise RuntimeError("CUDA out of memory")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(site.transport._source, "merged", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            site.deliver()
        assert len(tries) == 3  # the version, and the one before for each
        with pytest.raises(RuntimeError, match="out of memory"):
            site.transport.withdraw(site.policy, site.servers)
    assert all(server.paused for server in site.servers)  # nobody is answered with half of it
    site.transport.close(site.servers)
    assert not any(server.paused for server in site.servers)
    assert [server.label for server in site.servers] == [PRISTINE] * 2


def test_a_repair_that_fails_here_forgets_nobody_who_succeeded(sites: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site: Site = sites(2)
    site.deliver()
    before = site.held()
    site.servers[0].refused = ("/finish_weight_update", 1)
    merged, calls = site.transport._source.merged, iter(range(9))  # type: ignore[union-attr]

    def once(*args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise LoadError("the merge failed")
        return merged(*args, **options)

    monkeypatch.setattr(site.transport._source, "merged", once)
    errors = site.deliver()
    assert [error is None for error in errors.values()] == [False, True]
    assert site.transport.withdraw(site.policy, site.servers) == {}
    assert site.serves(before) == [True, True]


def test_a_first_version_that_changed_more_than_it_was_to_is_not_taken_back_quietly(sites: Any) -> None:
    site: Site = sites(1)
    [server] = site.servers
    name = next(name for name in server.weights if "embed" in name)
    server.weights[name] = server.weights[name] + 1.0  # by somebody else, or by a loader that does not slice
    [error] = site.deliver().values()
    assert "not what they were" in str(error)
    left = site.transport.withdraw(site.policy, site.servers)
    assert "not what they were" in str(left[server.url])


@pytest.mark.parametrize("plugin", [False, True])
def test_a_server_that_sleeps_is_as_it_was(sites: Any, plugin: bool) -> None:
    site: Site = sites(1, plugin=plugin)
    [server] = site.servers
    site.deliver()
    before = site.held()
    server.asleep = True
    [error] = site.deliver().values()
    assert isinstance(error, LoraflowError)
    assert error.hint == "POST /wake_up before the sync"
    assert site.transport.withdraw(site.policy, site.servers) == {}
    server.asleep = False
    assert site.serves(before) == [True]
    assert site.transport.holds(Policy("run", 0), server)
    assert set(site.deliver().values()) == {None}
    assert not server.paused

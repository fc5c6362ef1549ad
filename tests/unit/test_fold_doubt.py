"""Fold taken back, from the trainer to the workers: a server that serves something else than before is named.

The carrier, the desk and the workers are real; the HTTP between them and vLLM's engine are played (`test_fold_core`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.errors import CapabilityError, LoadError, LoraflowError, PublishError, VerifyError
from loraflow.policy import Policy
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.server_info import PluginInfo, ServerInfo
from loraflow.store import AdapterStore
from loraflow.transports import fold as fold_module
from loraflow.transports.fold import FoldTransport
from loraflow.transports.fold_modules import base_weight_of
from loraflow_server import checks
from loraflow_server.errors import PluginError
from loraflow_server.fold import Fold
from tests.helpers.tiny import load_base, randomize
from tests.unit import test_fold_rules
from tests.unit.test_fold_core import Site, folder

__all__ = ["folder"]


class Served(VLLMServer):
    """The server of a site; `restart` puts another process in its place."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url)
        self.folder = folder
        self.restart()
        plugin = PluginInfo("0.1", True, frozenset({"fold"}), (), {})
        self._info = ServerInfo(url, "0.32.0", "base", "/m", dtype="float32", plugin=plugin)

    def restart(self) -> None:
        self.site = Site(self.folder, 1)
        self.site.desk._lease = None

    def request(self, method: str, path: str, **options: Any) -> Any:
        desk, body = self.site.desk, options.get("json") or {}

        async def source(_: Any) -> dict[str, Any]:
            checks.check_folder(Path(body["path"]), desk._settings.limits)
            return {"kind": "folder", "path": body["path"]}

        work = {
            "/loraflow/v1/fold/layout": lambda: desk.layout(body),
            "/loraflow/v1/fold": lambda: desk.fold(body, source),
            "/loraflow/v1/fold/undo": lambda: desk.undo(body),
            "/loraflow/v1/reset": lambda: desk.reset(body),
        }[path]
        try:
            return self.site.run(work())
        except PluginError as error:
            raise HTTPFailure(error.message, status=error.status, reason=error.message, server=self.url) from error

    def begin(self, path: str, **options: Any) -> Callable[[], Any]:
        answer = self.request("POST", path, **options)
        return lambda: answer


class Trainer:
    def __init__(self, folder: Path, store: AdapterStore) -> None:
        self.servers = [Served(f"http://s{i}", folder) for i in range(2)]
        self.model, self.store = self.servers[0].site.model, store
        self.transport = FoldTransport(store, AdapterSpec.from_model(self.model), base_weight_of(self.model))
        self.transport.open(self.servers)
        self.version = -1

    def deliver(self) -> list[Exception | None]:
        self.version += 1
        randomize(self.model, seed=self.version, std=0.1)
        delivery = self.transport.deliver(self.policy, take_snapshot(self.model), self.servers)
        return [outcome.error for outcome in delivery.servers.values()]

    @property
    def policy(self) -> Policy:
        return Policy("run", self.version)

    def weights(self) -> list[Any]:
        return [server.site.weights for server in self.servers]

    def serve(self, weights: list[Any]) -> list[bool]:
        return [server.site.serves(then) for server, then in zip(self.servers, weights, strict=True)]


@pytest.fixture
def trainer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def far(*args: Any) -> Any:
        raise CapabilityError("it is on another host")

    monkeypatch.setattr(fold_module, "reachable_block", far)
    with AdapterStore(str(tmp_path), "run", retain=2, grace_period=0.0) as store:
        yield Trainer(folder, store)


@pytest.mark.parametrize("why", ["dtype", "probe"])
def test_a_carrier_that_cannot_be_opened_gives_every_lease_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Else each server keeps a copy of its weights, for a run that has taken another way, and refuses other runs."""

    def breaks(*args: Any) -> Any:
        raise LoadError("the probe failed")

    monkeypatch.setattr(fold_module, "reachable_block", breaks)
    servers = [Served(f"http://s{i}", folder) for i in range(2)]
    model = servers[0].site.model
    if why == "dtype":
        for rank in servers[1].site.ranks:
            rank.served = test_fold_rules.Served(load_base(folder), torch.bfloat16)
            rank.loraflow_fold_reset()  # of the site's own layout
    with AdapterStore(str(tmp_path), "run", retain=2, grace_period=0.0) as store:
        transport = FoldTransport(store, AdapterSpec.from_model(model), base_weight_of(model))
        with pytest.raises(LoraflowError, match="differ in dtype" if why == "dtype" else "the probe failed"):
            transport.open(servers)
    assert [server.site.desk.describe() for server in servers] == [None, None]
    assert not [rank for server in servers for rank in server.site.ranks if "_loraflow_fold" in vars(rank)]


def test_all_go_back_and_nobody_is_named(trainer: Trainer) -> None:
    assert trainer.deliver() == [None, None]
    before = trainer.weights()
    assert trainer.deliver() == [None, None]
    assert trainer.serve(before) == [False, False]
    assert trainer.transport.withdraw(trainer.policy, trainer.servers) == {}
    assert trainer.serve(before) == [True, True]
    assert trainer.deliver() == [None, None]
    assert trainer.transport.withdraw(trainer.policy, trainer.servers) == {}
    assert trainer.serve(before) == [True, True]


def test_one_that_cannot_go_back_is_named(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.deliver()
    before = trainer.weights()
    trainer.deliver()
    victim = trainer.servers[1].site.ranks[0].served
    undo: Callable[[Fold, str], bool] = Fold.undo

    def breaks(fold: Fold, policy: str) -> bool:
        if fold.served[0].view.data_ptr() in {p.data_ptr() for p in victim.parameters()}:
            raise RuntimeError("CUDA error")
        return undo(fold, policy)

    monkeypatch.setattr(Fold, "undo", breaks)
    left = trainer.transport.withdraw(trainer.policy, trainer.servers)
    assert list(left) == ["http://s1"]
    assert "CUDA error" in str(left["http://s1"])
    assert trainer.serve(before) == [True, False]


def test_one_that_was_restarted_meanwhile_goes_back_to_its_base_and_is_named(trainer: Trainer) -> None:
    """It takes the version, since it has agreed again, and has nothing before it to go back to."""
    trainer.deliver()
    trainer.servers[0].restart()
    assert trainer.deliver() == [None, None]
    [(url, error)] = trainer.transport.withdraw(trainer.policy, trainer.servers).items()
    assert url == "http://s0"
    assert isinstance(error, VerifyError)
    assert "the base is served, not run-v0" in str(error)


def test_another_run_that_took_it_over_is_named(trainer: Trainer) -> None:
    trainer.deliver()
    site = trainer.servers[1].site
    site.desk._lease.used -= 121.0  # type: ignore[union-attr]
    site.run(site.desk.layout({"run_id": "other", "tensors": site.shapes, "modules": site.modules}))
    errors = trainer.deliver()
    assert errors[0] is None
    assert isinstance(errors[1], LoraflowError)
    assert list(trainer.transport.withdraw(trainer.policy, trainer.servers)) == ["http://s1"]


def test_a_store_that_fails_keeps_nobody_from_going_back(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.deliver()
    before = trainer.weights()
    trainer.deliver()

    def lost(policy: Policy) -> None:
        raise PublishError("this writer lost its lease")

    monkeypatch.setattr(trainer.store, "mark_burnt", lost)
    assert trainer.transport.withdraw(trainer.policy, trainer.servers) == {}
    assert trainer.serve(before) == [True, True]

"""The filesystem carrier between a real store and servers of which only the list of names is played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from loraflow.adapter import AdapterSnapshot, take_snapshot
from loraflow.errors import LoadError, LoraflowError, PublishError, SyncTimeout
from loraflow.policy import Policy
from loraflow.server import Unreachable
from loraflow.server_info import ServedModel
from loraflow.store import AdapterStore
from loraflow.transports.filesystem import FilesystemTransport

POLICY = Policy("run", 0)


class Server:
    """Lists what it loaded, under ``prefix`` in the place of the store's root."""

    def __init__(self, url: str = "http://s", *, root: str = "", listed: str = "") -> None:
        self.url = url
        self.info = SimpleNamespace(plugin=None)
        self.names: dict[str, str] = {}
        self.fails: Exception | None = None
        self._root, self._listed = root, listed

    def models(self) -> list[ServedModel]:
        return [ServedModel("base", "/m", None), *(ServedModel(n, path, "base") for n, path in self.names.items())]

    def load_adapter(self, name: str, path: str) -> str:
        assert Path(path.replace(self._listed, self._root) if self._listed else path, "manifest.json").is_file()
        self.names[name] = path.replace(self._root, self._listed) if self._listed else path
        return self.names[name]

    def unload_adapter(self, name: str) -> bool:
        if self.fails is not None:
            raise self.fails
        return self.names.pop(name, None) is not None


@pytest.fixture(scope="module")
def snapshot() -> AdapterSnapshot:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
    return take_snapshot(model)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(str(tmp_path), "run", retain=2, grace_period=0.0) as opened:
        yield opened


def deliver(store: AdapterStore, snapshot: AdapterSnapshot, *servers: Any) -> FilesystemTransport:
    transport = FilesystemTransport(store)
    delivery = transport.deliver(POLICY, snapshot, servers)
    assert [outcome.error for outcome in delivery.servers.values()] == [None] * len(servers)
    return transport


def test_a_path_that_the_server_lists_otherwise_is_its_own(
    store: AdapterStore, snapshot: AdapterSnapshot, tmp_path: Path
) -> None:
    """Links resolved, or the folder of its cache for a URL: it must not look like a server that lost the version."""
    plain: Any = Server("http://plain")
    resolved: Any = Server("http://resolved", root=str(tmp_path), listed="/cache/of/its/own")
    transport = deliver(store, snapshot, plain, resolved)
    assert transport.holds(POLICY, plain)
    assert transport.holds(POLICY, resolved)
    resolved.names[POLICY.name] = "/somewhere/else"
    assert not transport.holds(POLICY, resolved)
    plain.names.clear()
    assert not transport.holds(POLICY, plain)


def test_a_version_damaged_since_is_mended_before_a_server_gets_it(
    store: AdapterStore, snapshot: AdapterSnapshot
) -> None:
    server: Any = Server()
    transport = deliver(store, snapshot, server)
    store.mark_committed(POLICY)
    weights = Path(store.path(POLICY), "adapter_model.safetensors")
    good = weights.read_bytes()
    weights.write_bytes(good[: len(good) // 2])
    server.names = {"run-v9": "/left", "other-v0": "/other"}
    transport.attach(POLICY, snapshot, server)
    assert weights.read_bytes() == good
    assert server.names == {"other-v0": "/other", POLICY.name: store.path(POLICY)}


def test_a_store_that_fails_does_not_leave_the_name_on_the_servers(
    store: AdapterStore, snapshot: AdapterSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = Server()
    transport = deliver(store, snapshot, server)

    def failing(policy: Policy) -> None:
        raise PublishError("the lease is another's")

    monkeypatch.setattr(store, "mark_burnt", failing)
    with pytest.raises(PublishError):
        transport.withdraw(POLICY, [server])
    assert server.names == {}


def test_close_frees_every_server_that_can_be_freed(store: AdapterStore, snapshot: AdapterSnapshot) -> None:
    servers: list[Any] = [Server(f"http://s{index}") for index in range(3)]
    transport = deliver(store, snapshot, *servers)
    servers[0].fails = LoadError("the engine is dead", server="http://s0")
    with pytest.raises(LoadError):
        transport.close(servers)
    assert [bool(server.names) for server in servers] == [True, False, False]


def test_unloading_where_nobody_answers_is_no_error(store: AdapterStore, snapshot: AdapterSnapshot) -> None:
    server: Any = Server()
    transport = deliver(store, snapshot, server)
    server.fails = Unreachable("connection refused", server=server.url)
    transport.retire(POLICY, [server])


@pytest.mark.parametrize("error", [LoadError("the engine is busy"), SyncTimeout("no answer in 30 s")], ids=repr)
def test_a_version_that_a_server_kept_is_not_retired(
    store: AdapterStore, snapshot: AdapterSnapshot, error: LoraflowError
) -> None:
    """Rule 7: it lists the name, and reads the folder when somebody asks for it. The next version tries again."""
    server: Any = Server()
    transport = deliver(store, snapshot, server)
    server.fails = error
    with pytest.raises(LoraflowError, match=error.message):
        transport.retire(POLICY, [server])
    store.verify(POLICY)
    server.fails = None
    transport.retire(POLICY, [server])
    assert server.names == {}
    assert not Path(store.path(POLICY)).exists()

"""Payloads that are broadcast, whose call leaves before they are there: taken once they are, waited for a moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraflow.errors import AdapterError, LoraflowError
from loraflow.policy import Policy
from loraflow.server import VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.base import Delivered
from loraflow.transports.direct import DirectTransport
from loraflow.transports.group_way import GroupWay
from loraflow_server import group_flag
from loraflow_server.group_flag import GroupFlag
from tests.helpers.lora_worker import LoraHost
from tests.helpers.plugin_server import plugin_server
from tests.unit.test_group_way import QUICK, host, root, snapshot, store, url

__all__ = ["host", "root", "snapshot", "store", "url"]  # fixtures

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def server(url: str) -> VLLMServer:
    return VLLMServer(url)


@pytest.fixture
def broadcast(server: VLLMServer, store: AdapterStore, snapshot: Any) -> Iterator[DirectTransport]:
    transport = DirectTransport(store, snapshot.spec, way="broadcast", groups=QUICK)
    transport.open([server])
    yield transport
    transport.close([server])


@pytest.fixture(params=[0, 3], ids=["idle", "busy"])
def in_flight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests run."""
    monkeypatch.setattr("loraflow_server.engine.Engine.in_flight", lambda *_: request.param)
    return int(request.param)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each payload that the worker, and the engine with it, was asked to wait for: was anything said already?"""
    plain, found = GroupFlag.wait, list[bool]()

    def noted(self: GroupFlag, serial: int) -> None:
        found.append(self._store.check([group_flag._key(serial)]))
        plain(self, serial)

    monkeypatch.setattr(GroupFlag, "wait", noted)
    return found


def the_way(transport: DirectTransport, server: VLLMServer) -> GroupWay:
    return transport._ways._groups[server.url]


def called(transport: DirectTransport, policy: Policy, *servers: VLLMServer) -> None:
    transport.wait_published()
    assert transport.announce(policy, servers, lambda _: None)


def proven(outcome: Delivered) -> bool:
    return outcome.error is None and outcome.proof is not None and outcome.proof.passed


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_it_is_received_once_it_is_there(
    in_flight: int,
    told: list[bool],
    broadcast: DirectTransport,
    server: VLLMServer,
    store: AdapterStore,
    snapshot: Any,
    seconds: float,
) -> None:
    """Also one that comes later than an engine may wait: it is asked for again, over the same group."""
    group = the_way(broadcast, server)._name
    for version in range(3):
        policy = Policy(store.run_id, version)
        called(broadcast, policy, server)
        time.sleep(seconds)
        outcome = broadcast.deliver(policy, snapshot, [server]).servers[server.url]
        assert proven(outcome), outcome
        assert outcome.phases_ms["load"] < 1e3
    assert the_way(broadcast, server)._name == group
    assert the_way(broadcast, server).joined
    if in_flight:
        assert all(told)  # an engine with requests never waits for the trainer
    elif seconds == 0.05:
        assert not any(told)


def test_one_that_does_not_come_releases_the_workers_and_keeps_the_group(
    in_flight: int,
    told: list[bool],
    host: LoraHost,
    broadcast: DirectTransport,
    server: VLLMServer,
    store: AdapterStore,
    snapshot: Any,
) -> None:
    group, first, second = the_way(broadcast, server)._name, Policy(store.run_id, 0), Policy(store.run_id, 1)
    called(broadcast, first, server)
    time.sleep(0.02)
    began = time.perf_counter()
    assert broadcast.withdraw(first, [server]) == {}
    assert time.perf_counter() - began < 0.2  # nobody waited until an engine gave up
    assert not broadcast.holds(first, server)
    called(broadcast, second, server)
    assert proven(broadcast.deliver(second, snapshot, [server]).servers[server.url])
    assert the_way(broadcast, server)._name == group
    assert len(told) == (1 if in_flight else 2)


@pytest.mark.parametrize("again", [True, False], ids=["announced", "not announced"])
def test_it_is_not_taken_for_the_next(
    broadcast: DirectTransport, server: VLLMServer, store: AdapterStore, snapshot: Any, again: bool
) -> None:
    """A trainer that was interrupted in between, say."""
    called(broadcast, Policy(store.run_id, 0), server)
    second = Policy(store.run_id, 1)
    if again:
        called(broadcast, second, server)
    outcome = broadcast.deliver(second, snapshot, [server]).servers[server.url]
    assert proven(outcome)
    assert outcome.model == second.name
    assert not broadcast.holds(Policy(store.run_id, 0), server)


def test_what_must_not_be_committed_is_withdrawn_and_says_why(
    broadcast: DirectTransport, server: VLLMServer, store: AdapterStore, snapshot: Any
) -> None:
    """NaN, or a model that has changed: seen while the servers work."""

    def refuse(_: Any) -> None:
        raise AdapterError("3 values are not finite")

    first, second, third = (Policy(store.run_id, version) for version in range(3))
    assert proven(broadcast.deliver(first, snapshot, [server]).servers[server.url])
    broadcast.wait_published()
    assert broadcast.announce(second, [server], refuse)
    with pytest.raises(AdapterError, match="not finite"):
        broadcast.deliver(second, snapshot, [server])
    assert broadcast.withdraw(second, [server]) == {}
    assert broadcast.holds(first, server)
    assert not broadcast.holds(second, server)
    called(broadcast, third, server)
    assert proven(broadcast.deliver(third, snapshot, [server]).servers[server.url])


def test_a_call_that_is_refused_is_told_and_the_next_version_works(
    broadcast: DirectTransport, server: VLLMServer, store: AdapterStore, snapshot: Any
) -> None:
    first, second = Policy(store.run_id, 0), Policy(store.run_id, 1)
    assert proven(broadcast.deliver(first, snapshot, [server]).servers[server.url])
    broadcast.withdraw(first, [server])
    broadcast.wait_published()
    broadcast._store.announce = lambda _: None  # type: ignore[method-assign] - its own name would be refused here
    began = time.perf_counter()
    called(broadcast, first, server)
    outcome = broadcast.deliver(first, snapshot, [server]).servers[server.url]
    assert isinstance(outcome.error, LoraflowError)
    assert "used" in str(outcome.error)
    assert time.perf_counter() - began < QUICK.timeout
    broadcast._publishing = None
    assert proven(broadcast.deliver(second, snapshot, [server]).servers[server.url])


def test_of_two_servers_one_may_refuse(
    host: LoraHost, root: Path, server: VLLMServer, store: AdapterStore, snapshot: Any
) -> None:
    with plugin_server(host, root) as url:
        servers = [server, VLLMServer(url)]
        transport = DirectTransport(store, snapshot.spec, way="broadcast", groups=QUICK)
        transport.open(servers)
        first, second = Policy(store.run_id, 0), Policy(store.run_id, 1)
        assert proven(transport.deliver(first, snapshot, servers[1:]).servers[url])
        transport.withdraw(first, servers[1:])
        transport.wait_published()
        transport._store.announce = lambda _: None  # type: ignore[method-assign] - as above
        began = time.perf_counter()
        called(transport, first, *servers)
        outcomes = transport.deliver(first, snapshot, servers).servers
        assert proven(outcomes[server.url])
        assert isinstance(outcomes[url].error, LoraflowError)
        assert time.perf_counter() - began < QUICK.timeout
        transport._publishing = None
        assert transport.withdraw(first, servers) == {}  # as the fleet does then
        assert not any(transport.holds(first, each) for each in servers)
        assert all(map(proven, transport.deliver(second, snapshot, servers).servers.values()))
        transport.close(servers)


def test_servers_of_this_host_and_of_others_are_told_together(
    host: LoraHost, root: Path, server: VLLMServer, store: AdapterStore, snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plugin_server(host, root) as url:
        servers = [server, VLLMServer(url)]
        transport = DirectTransport(store, snapshot.spec, far=[url], groups=QUICK)
        monkeypatch.setattr(transport._ways, "_time_upload", lambda *_: 1e9)
        transport.open(servers)
        assert transport._ways.block is not None
        assert list(transport._ways._groups) == [url]
        for version in range(2):
            called(transport, Policy(store.run_id, 2 * version), *servers)
            transport.withdraw(Policy(store.run_id, 2 * version), servers)
            policy = Policy(store.run_id, 2 * version + 1)
            called(transport, policy, *servers)
            assert all(map(proven, transport.deliver(policy, snapshot, servers).servers.values()))
        transport.close(servers)


def test_a_group_that_a_failure_ended_is_not_announced_to(
    broadcast: DirectTransport, server: VLLMServer, store: AdapterStore, snapshot: Any
) -> None:
    the_way(broadcast, server)._drop()
    policy = Policy(store.run_id, 0)
    assert not broadcast.announce(policy, [server], lambda _: None)
    assert proven(broadcast.deliver(policy, snapshot, [server]).servers[server.url])
    called(broadcast, Policy(store.run_id, 1), server)


def test_a_server_that_left_the_group_meanwhile_joins_anew(
    host: LoraHost, in_flight: int, broadcast: DirectTransport, server: VLLMServer, store: AdapterStore, snapshot: Any
) -> None:
    """Its trainer does not know: it is told, joins anew, and sends again."""
    way, policy = the_way(broadcast, server), Policy(store.run_id, 0)
    name = way._name
    server.request("POST", "/loraflow/v1/group/leave", json={"group": name})
    called(broadcast, policy, server)
    assert proven(broadcast.deliver(policy, snapshot, [server]).servers[server.url])
    assert way._name != name


def test_an_older_plugin_is_called_once_the_payload_is_there(
    server: VLLMServer, store: AdapterStore, snapshot: Any
) -> None:
    plugin = server.info.plugin
    assert plugin is not None
    object.__setattr__(plugin, "capabilities", plugin.capabilities - {"group_announced"})
    transport = DirectTransport(store, snapshot.spec, way="broadcast", groups=QUICK)
    transport.open([server])
    policy = Policy(store.run_id, 0)
    assert not transport.announce(policy, [server], lambda _: None)
    assert proven(transport.deliver(policy, snapshot, [server]).servers[server.url])
    transport.close([server])


@pytest.mark.parametrize("serial", [0, -1, True, "1", 1.5, 1 << 62], ids=str)
def test_bad_serials_are_refused(server: VLLMServer, serial: Any) -> None:
    source = {"kind": "broadcast", "group": "g", "nbytes": 8, "serial": serial}
    with pytest.raises(LoraflowError, match=r"source\.serial is a positive number"):
        server.request("POST", "/loraflow/v1/direct/probe", json={"source": source})

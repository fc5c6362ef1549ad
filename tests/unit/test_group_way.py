"""Payloads over a broadcast group of loraflow's own: joined, timed, left after a failure, and joined anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.adapter import take_snapshot
from loraflow.errors import CapabilityError, LoadError, LoraflowError
from loraflow.launch import free_port
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy, new_run_id
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.base import Delivered
from loraflow.transports.blocks import SharedBlock
from loraflow.transports.direct import DirectTransport
from loraflow.transports.group_way import GroupOptions, GroupWay
from loraflow.transports.groups import GlooGroup
from loraflow.transports.ways import Ways
from loraflow.transports.wire import Bucket
from loraflow_server.errors import PluginError
from loraflow_server.lines import Lines, Meeting
from loraflow_server.unique_id import CheckedStore
from tests.helpers.lora_worker import LoraHost, lora_host
from tests.helpers.plugin_server import plugin_server
from tests.helpers.tiny import peft_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = GroupOptions(timeout=8.0)  # joining may wait 5 s for a name server that does not answer
JOIN = {"backend": "gloo", "address": "127.0.0.1", "port": 1, "world_size": 2, "timeout": 1}


@pytest.fixture(scope="module")
def host(tiny_model: Path) -> Iterator[LoraHost]:
    with lora_host(tiny_model, dtype="bfloat16") as made:
        yield made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def url(host: LoraHost, root: Path) -> Iterator[str]:
    with plugin_server(host, root) as found:
        yield found


@pytest.fixture
def store(root: Path) -> Iterator[AdapterStore]:
    with AdapterStore(str(root), new_run_id(), retain=3, grace_period=0.0) as made:
        yield made


@pytest.fixture
def snapshot(tiny_model: Path) -> Any:
    return take_snapshot(peft_model(tiny_model, std=0.2), dtype=torch.bfloat16)


@pytest.fixture
def broadcast(url: str, store: AdapterStore, snapshot: Any) -> Iterator[DirectTransport]:
    transport = DirectTransport(store, snapshot.spec, way="broadcast", groups=QUICK)
    transport.open([VLLMServer(url)])
    yield transport
    transport.close([VLLMServer(url)])


def the_way(transport: DirectTransport) -> GroupWay:
    (way,) = transport._ways._groups.values()
    return way


def proven(outcome: Delivered) -> bool:
    return outcome.error is None and outcome.proof is not None and outcome.proof.passed


# ---------------------------------------------------------------- workers


def test_two_workers_get_what_is_sent_and_nothing_twice() -> None:
    lines = [Lines(torch.device("cpu")) for _ in range(2)]
    group = GlooGroup("127.0.0.1", 0, 3, 5.0)
    port = group.handshake()["port"]
    joins = [
        threading.Thread(target=line.join, args=("g", Meeting("gloo", "127.0.0.1", port, rank, 3, 5.0, 5.0)))
        for rank, line in enumerate(lines, 1)
    ]
    for join in joins:
        join.start()
    group.join()
    for join in joins:
        join.join()
    places = set()
    for seed in range(3):
        payload = torch.randint(256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        pending = group.send(payload, Bucket((), 100_000))
        found = [line.receive("g", 100_000) for line in lines]
        assert all(torch.equal(payload, item) for item in found)
        places.add(found[0].data_ptr())
        while not pending.done():
            time.sleep(0.001)
    assert len(places) == 1  # memory that is kept
    for line in lines:
        line.close()
        with pytest.raises(PluginError, match="join again") as caught:
            line.receive("g", 100_000)
        assert (caught.value.code, caught.value.status) == ("no_group", 409)
    group.close()


def test_a_worker_s_rank_is_its_place_among_all_engines(host: LoraHost, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(data_parallel_index=2, world_size=4, rank=3)
    monkeypatch.setattr(host.worker, "parallel_config", parallel)
    met: list[Meeting] = []
    monkeypatch.setattr(host.worker.loraflow_payloads().lines, "join", lambda _, meeting: met.append(meeting))
    meeting = {"backend": "gloo", "address": "a", "port": 1, "world_size": 17, "join_timeout": 1.0, "timeout": 1.0}
    assert host.worker.loraflow_group_join("g", meeting)["ok"]["rank"] == 12
    assert met[0].rank == 12


def test_joining_ends() -> None:
    lines, began = Lines(torch.device("cpu")), time.perf_counter()
    group = GlooGroup("127.0.0.1", 0, 3, 1.0)  # whose other worker never comes
    meeting = Meeting("gloo", "127.0.0.1", group.handshake()["port"], 1, 3, 1.0, 1.0)
    with pytest.raises(PluginError) as caught:
        lines.join("g", meeting)
    assert caught.value.code in {"join_timeout", "join_failed"}
    with pytest.raises(PluginError) as refused:
        lines.join("g", Meeting("nccl", "127.0.0.1", 1, 1, 2, 1.0, 1.0))
    assert refused.value.code == "no_gpu"
    assert time.perf_counter() - began < 2 * QUICK.timeout
    group.close()


class _Opens:
    """What a trainer that is none may put in its store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_of_a_trainer_s_store_nothing_but_nccl_ids_is_unpickled(tmp_path: Path) -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.utils import StatelessProcessGroup

    port, made = free_port(""), list[Any]()
    thread = threading.Thread(target=lambda: made.append(StatelessProcessGroup.create("127.0.0.1", port, 0, 2)))
    thread.start()
    worker = StatelessProcessGroup.create("127.0.0.1", port, 1, 2)
    thread.join()
    (trainer,) = made
    worker.store = CheckedStore(worker.store)
    sent = ncclUniqueId()
    sent.internal[3] = 7
    trainer.broadcast_obj(sent, 0)
    assert bytes(worker.broadcast_obj(None, 0).internal) == bytes(sent.internal)
    for harm in (_Opens(tmp_path / "touched"), Path, ncclUniqueId.__init__):
        trainer.broadcast_obj(harm, 0)
        with pytest.raises(PluginError, match="NCCL id"):
            worker.broadcast_obj(None, 0)
        worker.broadcast_recv_src_counter[0] += 1
    assert not (tmp_path / "touched").exists()


# ---------------------------------------------------------------- routes


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "mpi"}, {"backend": None}, {"address": "a/b"}, {"address": ""}, {"address": 7}, {"port": 0},
        {"port": 65536}, {"port": True}, {"port": "1"}, {"world_size": 3}, {"world_size": 2.0}, {"timeout": 0},
        {"timeout": 1e9}, {"timeout": True}, {"timeout": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_with_a_join_is_told(url: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(HTTPFailure) as caught:
        PluginClient(VLLMServer(url).request).join_group({**JOIN, **wrong})
    assert caught.value.status == 400
    assert next(iter(wrong)) in caught.value.reason


def test_a_trainer_that_cannot_be_reached_keeps_no_engine_waiting(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraflow_server.group_desk._KNOCK_SECONDS", 0.2)
    with pytest.raises(HTTPFailure, match="cannot be reached") as caught:
        PluginClient(VLLMServer(url).request).join_group({**JOIN, "port": free_port("")})
    assert caught.value.status == 409


@pytest.mark.parametrize(
    "source", [{"group": ""}, {"group": 3}, {"nbytes": 0}, {"nbytes": 1 << 50}, {"group": "x" * 65}], ids=str
)
def test_bad_sources_are_refused(url: str, source: dict[str, Any]) -> None:
    with pytest.raises(HTTPFailure) as caught:
        PluginClient(VLLMServer(url).request).probe({"kind": "broadcast", "group": "g", "nbytes": 8, **source})
    assert caught.value.status in {400, 413}


def test_leaving_what_was_not_joined_is_harmless(url: str) -> None:
    server = VLLMServer(url)
    assert server.request("POST", "/loraflow/v1/group/leave", json={"group": "g"}) == {"left": False}


# ---------------------------------------------------------------- the trainer


def test_a_payload_that_does_not_come_ends_the_group_and_the_next_joins_anew(
    host: LoraHost, url: str, broadcast: DirectTransport, store: AdapterStore, snapshot: Any
) -> None:
    server, way = VLLMServer(url), the_way(broadcast)
    layout, began = broadcast._agreements.agree(server).layout, time.perf_counter()
    source = {"kind": "broadcast", "group": way._name, "nbytes": snapshot.nbytes}
    how = {"path": store.path(Policy(store.run_id, 9)), "layout_id": layout.layout_id, "source": source}
    with pytest.raises(HTTPFailure, match="did not come") as late:
        PluginClient(server.request).direct(f"{store.run_id}-v9", **how)
    assert late.value.status == 504
    assert time.perf_counter() - began < 2 * QUICK.timeout
    assert way._name not in host.worker.loraflow_payloads().lines._lines
    with pytest.raises(HTTPFailure, match="join again"):
        PluginClient(server.request).direct(f"{store.run_id}-v9", **how)
    # The trainer does not know of it: it is told, joins anew, and sends again.
    name = way._name
    assert proven(broadcast.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url])
    assert way._name != name


def test_a_version_that_is_refused_ends_the_group_on_both_sides(
    host: LoraHost, url: str, broadcast: DirectTransport, store: AdapterStore, snapshot: Any
) -> None:
    server, way = VLLMServer(url), the_way(broadcast)
    assert proven(broadcast.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url])
    broadcast.withdraw(Policy(store.run_id, 0), [server])
    began = time.perf_counter()
    broadcast.wait_published()
    broadcast._store.announce = lambda _: None  # type: ignore[method-assign] - its own name would be refused here
    outcome = broadcast.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url]
    assert isinstance(outcome.error, LoraflowError)
    assert time.perf_counter() - began < QUICK.timeout  # at once, not when the broadcast's time is up
    assert not way.joined
    broadcast._publishing = None
    assert proven(broadcast.deliver(Policy(store.run_id, 1), snapshot, [server]).servers[url])
    assert way.joined
    assert len(host.worker.loraflow_payloads().lines._lines) == 1


def test_after_an_interrupt_nobody_takes_what_was_sent_before_for_the_next(
    url: str, broadcast: DirectTransport, store: AdapterStore, snapshot: Any
) -> None:
    way = the_way(broadcast)
    name, stale = way._name, torch.full((snapshot.nbytes,), 7, dtype=torch.uint8)
    way.begin(stale, lambda source, timeout: lambda: None)  # sent; no server was called, no answer taken
    assert not way.joined
    assert proven(broadcast.deliver(Policy(store.run_id, 0), snapshot, [VLLMServer(url)]).servers[url])
    assert way._name != name


def test_of_another_size_nothing_is_received(url: str, broadcast: DirectTransport, store: AdapterStore) -> None:
    server, way = VLLMServer(url), the_way(broadcast)
    layout = broadcast._agreements.agree(server).layout
    source = {"kind": "broadcast", "group": way._name, "nbytes": 8}
    with pytest.raises(HTTPFailure, match="8 bytes") as caught:
        PluginClient(server.request).direct(
            f"{store.run_id}-v0",
            path=store.path(Policy(store.run_id, 0)),
            layout_id=layout.layout_id,
            source=source,
        )
    assert caught.value.status == 400


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall: the trainer's store cannot be reached from the server."""
    port = free_port("")
    monkeypatch.setattr(GlooGroup, "handshake", lambda self: {"address": "127.0.0.1", "port": port})
    monkeypatch.setattr("loraflow_server.group_desk._KNOCK_SECONDS", 0.2)


@pytest.mark.usefixtures("unreachable")
def test_without_a_group_payloads_go_over_http_and_why_is_told(
    url: str, store: AdapterStore, snapshot: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = VLLMServer(url)
    transport = DirectTransport(store, snapshot.spec, far=[url], groups=QUICK)
    transport.open([server])
    told = [record.message for record in caplog.records if "over HTTP" in record.message]
    assert len(told) == 1
    assert "cannot be reached" in told[0]
    assert proven(transport.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url])
    transport.close([server])


@pytest.mark.usefixtures("unreachable")
def test_a_broadcast_that_was_asked_for_is_not_replaced(url: str, store: AdapterStore, snapshot: Any) -> None:
    transport = DirectTransport(store, snapshot.spec, way="broadcast", groups=QUICK)
    with pytest.raises(CapabilityError, match="cannot be reached") as caught:
        transport.open([VLLMServer(url)])
    assert caught.value.hint
    transport.close([])


def test_a_group_that_cannot_be_joined_anew_is_replaced_by_http(
    request: pytest.FixtureRequest,
    url: str,
    store: AdapterStore,
    snapshot: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = VLLMServer(url)
    transport = DirectTransport(store, snapshot.spec, far=[url], groups=QUICK)
    monkeypatch.setattr(transport._ways, "_time_upload", lambda *_: 1e9)
    with caplog.at_level("INFO", logger="loraflow"):
        transport.open([server])
    assert any("by broadcast" in record.message and "over gloo" in record.message for record in caplog.records)
    assert proven(transport.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url])
    the_way(transport)._drop()
    request.getfixturevalue("unreachable")
    assert proven(transport.deliver(Policy(store.run_id, 1), snapshot, [server]).servers[url])
    assert any("joined anew" in record.message for record in caplog.records)
    transport.close([server])


def test_an_older_plugin_is_asked_for_nothing_new(url: str, store: AdapterStore, snapshot: Any) -> None:
    server = VLLMServer(url)
    plugin = server.info.plugin
    assert plugin is not None
    object.__setattr__(plugin, "capabilities", plugin.capabilities - {"group"})
    with pytest.raises(CapabilityError, match="no broadcast groups"):
        DirectTransport(store, snapshot.spec, way="broadcast").open([server])
    transport = DirectTransport(store, snapshot.spec, far=[url])
    transport.open([server])
    assert proven(transport.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url])
    transport.close([server])


def test_a_server_that_is_gone_is_told_at_once(host: LoraHost, tmp_path: Path, snapshot: Any) -> None:
    with (
        plugin_server(host, tmp_path) as url,
        AdapterStore(str(tmp_path), new_run_id(), retain=3, grace_period=0.0) as store,
    ):
        server = VLLMServer(url)
        transport = DirectTransport(store, snapshot.spec, way="broadcast", groups=QUICK)
        transport.open([server])
    began = time.perf_counter()
    outcome = transport._installation(Policy(store.run_id, 0)).on(
        [server], snapshot, transport._ways.put(torch.zeros(snapshot.nbytes, dtype=torch.uint8), [server])
    )[url]
    assert isinstance(outcome.error, LoraflowError)
    assert time.perf_counter() - began < 2 * QUICK.timeout
    transport._ways.close()


def test_a_server_that_is_attached_later_gets_a_group_too(
    host: LoraHost, url: str, root: Path, broadcast: DirectTransport, store: AdapterStore, snapshot: Any
) -> None:
    policy = Policy(store.run_id, 0)
    assert proven(broadcast.deliver(policy, snapshot, [VLLMServer(url)]).servers[url])
    broadcast.wait_published()
    with plugin_server(host, root) as other:
        servers = [VLLMServer(url), VLLMServer(other)]
        host.worker.loraflow_installer().drop(PluginClient(servers[0].request).status()["adapters"][0]["lora_int_id"])
        assert broadcast.attach(policy, snapshot, servers[1]).error is None
        assert len(broadcast._ways._groups) == 2
        before = {way.server.url: way._name for way in broadcast._ways._groups.values()}
        assert broadcast.attach(policy, snapshot, servers[1]).error is None  # again: joined anew
        after = {way.server.url: way._name for way in broadcast._ways._groups.values()}
        assert before[url] == after[url]
        assert before[other] != after[other]
        broadcast._ways._forget(servers[1])


def test_a_port_that_is_taken_is_told(url: str, store: AdapterStore, snapshot: Any) -> None:
    held = GlooGroup("127.0.0.1", 0, 2, 1.0)
    port = held.handshake()["port"]
    way = GroupWay(VLLMServer(url), 1, torch.device("cpu"), GroupOptions(port=port, timeout=1.0), 0)
    with pytest.raises(LoadError, match="gloo group failed"):
        way.join()
    held.close()


def test_what_was_opened_for_some_servers_is_closed_where_another_one_is_not_reached(
    host: LoraHost, url: str, root: Path, store: AdapterStore, snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run takes another carrier then: nothing of this one stays in memory, or joined, as long as that lasts."""
    reach, reached, files = Ways.reach, list[GroupWay](), list[Path]()
    lines = host.worker.loraflow_payloads().lines
    before = set(lines._lines)

    def fails_second(ways: Ways, server: VLLMServer, digest: Any) -> None:
        if reached:
            raise CapabilityError("the server does not see the folder")
        reach(ways, server, digest)
        assert isinstance(ways.block, SharedBlock)
        files.append(ways.block._path)
        reached.append(ways._groups[server.url])

    monkeypatch.setattr(
        Ways, "_why_not_shared", lambda _, server: "it is on another host" if server.url == url else None
    )
    monkeypatch.setattr(Ways, "reach", fails_second)
    with plugin_server(host, root) as other, VLLMServer(url) as first, VLLMServer(other) as second:
        transport = DirectTransport(store, snapshot.spec, groups=QUICK)
        monkeypatch.setattr(transport._ways, "_time_upload", lambda *_: 1e9)
        with pytest.raises(CapabilityError, match="does not see"):
            transport.open([first, second])
    assert transport._ways.block is None
    assert [path.exists() for path in files] == [False]
    assert [way.joined for way in reached] == [False]
    assert set(lines._lines) <= before


def test_closing_leaves_the_group(host: LoraHost, url: str, store: AdapterStore, snapshot: Any) -> None:
    transport = DirectTransport(store, snapshot.spec, way="broadcast", groups=QUICK)
    transport.open([VLLMServer(url)])
    name = the_way(transport)._name
    assert name in host.worker.loraflow_payloads().lines._lines
    transport.close([VLLMServer(url)])
    assert name not in host.worker.loraflow_payloads().lines._lines

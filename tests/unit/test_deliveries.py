"""Direct, uploads and files, from the trainer's tensors to vLLM's slots over real HTTP; without an engine."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from blake3 import blake3

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.errors import CapabilityError, LoadError
from loraflow.layout import lora_shapes
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy, new_run_id
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports.blocks import SharedBlock
from loraflow.transports.direct import DirectTransport
from loraflow.transports.filesystem import FilesystemTransport
from loraflow_server import slot_desk
from loraflow_server.engine import Engine
from loraflow_server.slots import SlotReading
from tests.helpers.lora_worker import LoraHost, lora_host
from tests.helpers.plugin_server import plugin_server
from tests.helpers.tiny import peft_model, randomize

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")
SHM = Path("/dev/shm")
OCTETS = {"Content-Type": "application/octet-stream"}
UPLOAD = "/loraflow/v1/direct/upload"


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


def carrier(name: str, store: AdapterStore, spec: AdapterSpec, url: str) -> Any:
    if name == "filesystem":
        return FilesystemTransport(store, spec=spec)
    way = name if name in {"upload", "broadcast"} else "auto"
    return DirectTransport(store, spec, far=[url] if name in {"upload", "auto"} else [], way=way)


@pytest.mark.parametrize("name", ["direct", "announced", "upload", "broadcast", "auto", "filesystem"])
def test_every_version_lies_in_a_slot_as_vllm_would_load_it(
    name: str, host: LoraHost, url: str, store: AdapterStore, tiny_model: Path
) -> None:
    server = VLLMServer(url)
    model = peft_model(tiny_model, r=8, lora_alpha=24, std=0.2)
    transport = carrier(name, store, AdapterSpec.from_model(model), url)
    transport.open([server])
    for version in range(5):
        randomize(model, seed=version, std=0.2)
        policy = Policy(store.run_id, version)
        called = name in {"announced", "broadcast"} or (name == "auto" and bool(transport._ways._groups))
        if called:
            transport.wait_published()
        if name != "direct":  # uploads and files cannot be announced, and are delivered all the same
            assert transport.announce(policy, [server], lambda _: None) is called
        snapshot = take_snapshot(model, dtype=torch.bfloat16)
        delivery = transport.deliver(policy, snapshot, [server])
        outcome = delivery.servers[url]
        assert outcome.error is None, outcome.error
        assert outcome.proof is not None
        assert outcome.proof.passed, outcome.proof.detail
        store.mark_committed(policy)
        assert transport.holds(policy, server)
        item = next(m for m in server.models() if m.id == policy.name)
        assert item.root == store.path(policy)
        status = PluginClient(server.request).status()
        int_id = next(a["lora_int_id"] for a in status["adapters"] if a["name"] == policy.name)
        found = host.slots_of(int_id)
        if name != "filesystem":
            transport.wait_published()
        stock = host.load(Path(store.path(policy)), 1000 + 10 * version + len(name))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, stock, strict=True))
    transport.close([server])
    assert not [m for m in server.models() if m.id.startswith(store.run_id)]


@pytest.fixture
def announcing(url: str, store: AdapterStore, tiny_model: Path) -> Iterator[tuple[DirectTransport, VLLMServer, Any]]:
    """A carrier that has announced version 0, over a block full of something else; the server, and the model."""
    server, model = VLLMServer(url), peft_model(tiny_model, std=0.2)
    transport = DirectTransport(store, AdapterSpec.from_model(model))
    transport.open([server])
    assert transport._ways.block is not None
    transport._ways.block.view.fill_(7)
    assert transport.announce(Policy(store.run_id, 0), [server], lambda _: None)
    yield transport, server, model
    transport.close([server])


@pytest.fixture(params=[0, 3], ids=["idle", "busy"])
def in_flight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests run."""
    monkeypatch.setattr("loraflow_server.engine.Engine.in_flight", lambda *_: request.param)
    return int(request.param)


@pytest.mark.parametrize("looks", [0, 2, 10_000], ids=["at once", "later", "never by itself"])
def test_what_lies_in_a_slot_is_looked_for_while_requests_run_and_waited_for_on_an_idle_engine(
    looks: int,
    in_flight: int,
    host: LoraHost,
    url: str,
    store: AdapterStore,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    left = iter(range(looks))
    monkeypatch.setattr(SlotReading, "ready", property(lambda _: next(left, None) is None))
    monkeypatch.setattr(slot_desk, "_LOOK_SECONDS", 0.001)
    sums = host.worker.loraflow_direct_sums
    monkeypatch.setattr(
        host.worker, "loraflow_direct_sums", lambda int_id, wait: asked.append(wait) or sums(int_id, wait)
    )
    server, model = VLLMServer(url), peft_model(tiny_model, std=0.2)
    transport = DirectTransport(store, AdapterSpec.from_model(model))
    transport.open([server])
    randomize(model, seed=looks, std=0.2)
    policy = Policy(store.run_id, 0)
    outcome = transport.deliver(policy, take_snapshot(model, dtype=torch.bfloat16), [server]).servers[url]
    assert outcome.error is None, outcome.error
    assert outcome.proof is not None
    assert outcome.proof.passed, outcome.proof.detail
    # The worker is asked until it is there, and told to wait the last time: the engine must not be asked for ever.
    wanted = {0: [], 2: [False, False], 10_000: [False] * 24 + [True]}[looks] if in_flight else []
    assert asked == wanted
    transport.close([server])


def test_what_lies_in_a_slot_is_told_of_the_adapter_that_was_put_there_last(host: LoraHost) -> None:
    assert host.worker.loraflow_direct_sums(987_654, True)["error"]["code"] == "nothing_begun"


@pytest.mark.parametrize(
    ("name", "counted"), [("direct", "direct"), ("upload", "direct"), ("filesystem", "filesystem")]
)
def test_loads_and_their_bytes_are_counted_for_the_carrier_that_they_came_by(
    name: str, counted: str, url: str, store: AdapterStore, tiny_model: Path
) -> None:
    server, model = VLLMServer(url), peft_model(tiny_model, std=0.2)
    transport = carrier(name, store, AdapterSpec.from_model(model), url)
    transport.open([server])
    client = PluginClient(server.request)
    before = client.metrics().splitlines()
    delivery = transport.deliver(Policy(store.run_id, 0), take_snapshot(model, dtype=torch.bfloat16), [server])
    assert delivery.servers[url].error is None
    grown = {line.split(" ")[0] for line in client.metrics().splitlines() if line not in before}
    moved = {series for series in grown if series.startswith(("loraflow_loads", "loraflow_payload_bytes"))}
    assert moved == {
        f'loraflow_loads_total{{carrier="{counted}"}}',
        f'loraflow_payload_bytes_total{{carrier="{counted}"}}',
    }
    transport.close([server])


@pytest.mark.parametrize("loaded_again", [False, True])
def test_a_name_that_is_unloaded_while_it_is_checksummed_is_not_there(
    host: LoraHost, url: str, store: AdapterStore, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, loaded_again: bool
) -> None:
    """By another trainer, or through vLLM's own routes: what was checksummed is not what the name means then."""
    server, model = VLLMServer(url), peft_model(tiny_model, std=0.2)
    transport = carrier("direct", store, AdapterSpec.from_model(model), url)
    transport.open([server])
    policy, snapshot = Policy(store.run_id, 0), take_snapshot(model, dtype=torch.bfloat16)
    assert transport.deliver(policy, snapshot, [server]).servers[url].error is None
    layout_id = transport._agreements.agree(server).layout.layout_id
    utility = Engine.utility

    async def unloading(engine: Engine, method: str, *args: Any, **options: Any) -> list[Any]:
        found = await utility(engine, method, *args, **options)
        known = engine.loaded()[policy.name]
        engine.forget(policy.name)
        if loaded_again:
            engine.register(policy.name, known.int_id + 5_000_000, known.path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "utility", unloading)
        with pytest.raises(HTTPFailure, match="unloaded meanwhile") as caught:
            PluginClient(server.request).verify(policy.name, layout_id)
    assert caught.value.status == 404
    transport.close([server])


@pytest.mark.parametrize("name", ["direct", "filesystem"])
def test_slots_that_are_not_in_memory_are_not_touched(
    name: str, host: LoraHost, url: str, store: AdapterStore, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM frees them with the weights, and a write into them would kill the engine."""
    server, model = VLLMServer(url), peft_model(tiny_model, std=0.2)
    transport = carrier(name, store, AdapterSpec.from_model(model), url)
    transport.open([server])
    snapshot = take_snapshot(model, dtype=torch.bfloat16)
    first, second, third = (Policy(store.run_id, version) for version in range(3))
    assert transport.deliver(first, snapshot, [server]).servers[url].error is None
    registered = set(host.manager.list_adapters())
    digest = transport._agreements.agree(server).layout.layout_id
    monkeypatch.setattr(host.config.model_config, "enable_sleep_mode", True)
    monkeypatch.setattr(host, "asleep", True)
    outcome = transport.deliver(second, snapshot, [server]).servers[url]
    assert "the server sleeps: wake it up before the sync" in str(outcome.error)
    for call in (
        lambda: PluginClient(server.request).verify(first.name, digest),
        lambda: PluginClient(server.request).load(second.name, path=store.path(first)),
    ):
        with pytest.raises(HTTPFailure, match="the server sleeps") as caught:
            call()
        assert caught.value.status == 409
    assert set(host.manager.list_adapters()) == registered
    monkeypatch.undo()
    assert transport.deliver(third, snapshot, [server]).servers[url].error is None
    transport.close([server])


@pytest.fixture
def there(host: LoraHost, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each payload that the worker was asked to wait for, whether it was there already."""
    payloads, found = host.worker.loraflow_payloads(), list[bool]()
    plain = payloads._wait

    def noted(flag: Any) -> None:
        found.append(payloads._flag(flag)[0] == flag["serial"])
        plain(flag)

    monkeypatch.setattr(payloads, "_wait", noted)
    return found


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_an_announced_payload_is_read_once_it_is_there(
    in_flight: int,
    there: list[bool],
    announcing: tuple[DirectTransport, VLLMServer, Any],
    store: AdapterStore,
    seconds: float,
) -> None:
    """Also one that comes later than an engine may wait: it is asked for again. An engine with requests never waits."""
    transport, server, model = announcing
    time.sleep(seconds)
    snapshot, policy = take_snapshot(model, dtype=torch.bfloat16), Policy(store.run_id, 0)
    outcome = transport.deliver(policy, snapshot, [server]).servers[server.url]
    assert outcome.error is None
    assert outcome.proof is not None
    assert outcome.proof.passed, outcome.proof.detail
    assert outcome.phases_ms["load"] < 1e3 * seconds + 500
    if in_flight:
        assert all(there)
    elif seconds == 0.05:
        assert there == [False]


def test_an_announced_version_that_does_not_come_leaves_nothing(
    announcing: tuple[DirectTransport, VLLMServer, Any], store: AdapterStore
) -> None:
    transport, server, model = announcing
    first, began = Policy(store.run_id, 0), time.perf_counter()
    assert transport.withdraw(first, [server]) == {}
    assert time.perf_counter() - began < 0.2  # nobody waited until an engine gave up
    assert not transport.holds(first, server)
    snapshot, second = take_snapshot(model, dtype=torch.bfloat16), Policy(store.run_id, 1)
    assert transport.announce(second, [server], lambda _: None)
    outcome = transport.deliver(second, snapshot, [server]).servers[server.url]
    assert outcome.error is None
    assert outcome.proof is not None
    assert outcome.proof.passed, outcome.proof.detail


@pytest.mark.parametrize("again", [True, False], ids=["announced", "not announced"])
def test_an_announced_version_is_not_taken_for_the_next(
    announcing: tuple[DirectTransport, VLLMServer, Any], store: AdapterStore, again: bool
) -> None:
    """A trainer that was interrupted in between, say."""
    transport, server, model = announcing
    snapshot, second = take_snapshot(model, dtype=torch.bfloat16), Policy(store.run_id, 1)
    if again:
        assert transport.announce(second, [server], lambda _: None)
    outcome = transport.deliver(second, snapshot, [server]).servers[server.url]
    assert outcome.error is None
    assert outcome.proof is not None
    assert outcome.proof.passed, outcome.proof.detail
    assert outcome.model == second.name
    assert transport.holds(second, server)
    assert not transport.holds(Policy(store.run_id, 0), server)


def test_an_old_plugin_is_not_called_before_the_payload_is_there(
    url: str, store: AdapterStore, tiny_model: Path
) -> None:
    server = VLLMServer(url)
    plugin = server.info.plugin
    assert plugin is not None
    object.__setattr__(plugin, "capabilities", plugin.capabilities - {"announced"})
    transport = DirectTransport(store, AdapterSpec.from_model(peft_model(tiny_model)))
    transport.open([server])
    assert not transport.announce(Policy(store.run_id, 0), [server], lambda _: None)
    transport.close([server])


def test_a_change_on_the_way_is_seen(host: LoraHost, url: str, store: AdapterStore, tiny_model: Path) -> None:
    """The proof is of what lies in the slot, and names what differs."""
    server, snapshot = VLLMServer(url), take_snapshot(peft_model(tiny_model), dtype=torch.bfloat16)
    transport = FilesystemTransport(store, spec=snapshot.spec)
    transport.open([server])
    install = host.worker.loraflow_installer().install

    def other(layout: Any, payload: torch.Tensor, *rest: Any) -> int:
        changed = payload.clone()
        changed[1000] ^= 1
        return install(layout, changed, *rest)

    host.worker.loraflow_installer().install = other
    try:
        outcome = transport.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url]
    finally:
        del host.worker.loraflow_installer().install
    assert outcome.proof is not None
    assert not outcome.proof.passed
    assert "layers" in outcome.proof.detail


def test_a_server_without_the_extension_loads_natively(
    host: LoraHost, url: str, store: AdapterStore, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, snapshot = VLLMServer(url), take_snapshot(peft_model(tiny_model), dtype=torch.bfloat16)
    transport = FilesystemTransport(store)  # no spec: nothing is agreed on
    transport.open([server])
    outcome = transport.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url]
    assert (outcome.error, outcome.proof) == (None, None)
    transport.close([server])


def test_a_version_that_the_server_does_not_see_is_told_with_what_to_do(
    url: str, root: Path, store: AdapterStore, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraflow.http_errors.VISIBLE_SECONDS", 0.1)
    server, snapshot = VLLMServer(url), take_snapshot(peft_model(tiny_model), dtype=torch.bfloat16)
    for elsewhere, said in ((str(root / "mounted"), "server_adapter_root"), ("/nowhere", "none of the folders")):
        transport = FilesystemTransport(store, spec=snapshot.spec, server_root=elsewhere)
        transport.open([server])
        outcome = transport.deliver(Policy(store.run_id, store.next_version()), snapshot, [server]).servers[url]
        assert isinstance(outcome.error, LoadError)
        assert said in str(outcome.error)


def test_a_folder_that_the_server_does_not_see_is_told_at_the_start(
    url: str, root: Path, store: AdapterStore, tiny_model: Path
) -> None:
    spec = AdapterSpec.from_model(peft_model(tiny_model))
    for elsewhere in (str(root / "mounted"), "/nowhere/at/all"):
        transport = DirectTransport(store, spec, server_root=elsewhere, far=[url])
        with pytest.raises(CapabilityError, match="does not see the folder"):
            transport.open([VLLMServer(url)])
    assert not [path for path in Path(store.path()).iterdir() if path.name.startswith(".draft")]


def test_a_server_that_does_not_reach_the_block_gets_uploads(
    url: str, store: AdapterStore, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is on this host by its URL, and elsewhere behind a tunnel: there is no block of that name there."""
    server, snapshot = VLLMServer(url), take_snapshot(peft_model(tiny_model), dtype=torch.bfloat16)
    source = SharedBlock.source
    monkeypatch.setattr(SharedBlock, "source", lambda self: {**source(self), "name": "loraflow-elsewhere"})
    transport = DirectTransport(store, snapshot.spec)
    monkeypatch.setattr(transport._ways, "_time_broadcast", lambda *_: 1e9)
    transport.open([server])
    assert any("over HTTP" in record.message for record in caplog.records)
    outcome = transport.deliver(Policy(store.run_id, 0), snapshot, [server]).servers[url]
    assert outcome.proof is not None
    assert outcome.proof.passed
    transport.close([server])


def test_an_old_plugin_takes_no_uploads(url: str, store: AdapterStore, tiny_model: Path) -> None:
    server = VLLMServer(url)
    plugin = server.info.plugin
    assert plugin is not None
    object.__setattr__(plugin, "capabilities", plugin.capabilities - {"upload"})
    transport = DirectTransport(store, AdapterSpec.from_model(peft_model(tiny_model)), far=[url])
    with pytest.raises(CapabilityError, match="another host"):
        transport.open([server])


def test_a_layout_that_is_agreed_again_takes_no_other_ones_place(url: str, tiny_model: Path) -> None:
    """Several trainers on one server, one of which comes back: the others' uploads are those that were agreed."""
    client, layouts = PluginClient(VLLMServer(url).request), list[Any]()
    for rank in (3, 5, 6, 7):
        shapes = lora_shapes(AdapterSpec.from_model(peft_model(tiny_model, r=rank)))
        layouts.append((client.layout(shapes), shapes))
    for _ in range(3):
        assert client.layout(layouts[-1][1]).layout_id == layouts[-1][0].layout_id
    for layout, shapes in layouts:
        query = {"layout_id": layout.layout_id, "blake3": "0" * 64}
        nothing = requests.post(url + UPLOAD + "/probe", params=query, data=b"", headers=OCTETS, timeout=10)
        wanted = sum(rows * columns for rows, columns in shapes.values()) * 2
        assert nothing.json()["error"]["message"] == f"the payload has 0 bytes, not {wanted}"


@pytest.fixture
def agreed(url: str, store: AdapterStore, tiny_model: Path) -> dict[str, str]:
    """The query of a right upload of zeros, and its size under ``nbytes``."""
    shapes = lora_shapes(AdapterSpec.from_model(peft_model(tiny_model, r=2)))
    layout = PluginClient(VLLMServer(url).request).layout(shapes)
    payload = bytes(2 * sum(rows * cols for rows, cols in shapes.values()))
    return {
        "name": f"{store.run_id}-v0",
        "path": store.path(Policy(store.run_id, 0)),
        "layout_id": layout.layout_id,
        "blake3": blake3(payload).hexdigest(),
        "nbytes": str(len(payload)),
    }


def test_uploads_that_are_not_what_was_announced_leave_nothing(
    url: str, agreed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, payload = VLLMServer(url), bytes(int(agreed.pop("nbytes")))
    mark, count = secrets.token_hex(8), iter(range(1000))  # other servers have inboxes too
    named = SimpleNamespace(token_hex=lambda _: f"{mark}-{next(count)}")
    monkeypatch.setattr("loraflow_server.inbox.secrets", named)
    cases: list[tuple[Any, dict[str, str], dict[str, str], int]] = [
        (payload[:-4], {}, OCTETS, 400),
        (b"", {}, OCTETS, 400),
        (payload + b"more", {}, OCTETS, 413),
        (iter([payload]), {}, OCTETS, 411),  # in chunks, of no length that is known
        (payload[:-1] + b"x", {}, OCTETS, 400),  # another content
        (payload, {"blake3": "no"}, OCTETS, 400),
        (payload, {"layout_id": "unknown"}, OCTETS, 409),
        (payload, {"path": "/etc/x"}, OCTETS, 403),
        (payload, {"name": "../x"}, OCTETS, 400),
        (payload, {}, {"Content-Type": "application/json"}, 415),
        (payload, {}, {**OCTETS, "Origin": "http://evil"}, 403),
    ]
    for body, other, headers, status in cases:
        with pytest.raises(HTTPFailure) as caught:
            server.request("POST", UPLOAD, params={**agreed, **other}, data=body, headers=headers)
        assert caught.value.status == status, (other, caught.value.reason)
    assert len(list(SHM.glob(f"*{mark}*"))) <= 1
    assert agreed["name"] not in {m.id for m in server.models()}
    # The name was not used up by any of them, and what is right is taken.
    assert server.request("POST", UPLOAD, params=agreed, data=payload, headers=OCTETS)["name"] == agreed["name"]
    with pytest.raises(HTTPFailure) as again:
        server.request("POST", UPLOAD, params=agreed, data=payload, headers=OCTETS)
    assert again.value.status == 409
    server.unload_adapter(agreed["name"])


def test_an_upload_that_is_cut_blocks_nobody(url: str, agreed: dict[str, str]) -> None:
    nbytes = int(agreed.pop("nbytes"))
    where, port = url.removeprefix("http://").split(":")
    query = "&".join(f"{key}={value}" for key, value in agreed.items())
    head = f"POST {UPLOAD}?{query} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
    with socket.create_connection((where, int(port))) as cut:
        cut.sendall(f"{head}Content-Length: {nbytes}\r\n\r\n".encode() + bytes(nbytes // 2))
        time.sleep(0.2)
    with VLLMServer(url) as server:
        answer = server.request("POST", UPLOAD, params=agreed, data=bytes(nbytes), headers=OCTETS, timeout=10)
        assert answer["name"] == agreed["name"]
        server.unload_adapter(agreed["name"])


def test_an_upload_that_dribbles_ends(url: str, agreed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraflow_server.inbox._UPLOAD_SECONDS", 0.3)
    nbytes = int(agreed.pop("nbytes"))
    where, port = url.removeprefix("http://").split(":")
    query = "&".join(f"{key}={value}" for key, value in agreed.items())
    head = f"POST {UPLOAD}?{query} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
    with socket.create_connection((where, int(port)), timeout=5) as slow:
        slow.sendall(f"{head}Content-Length: {nbytes}\r\n\r\n".encode() + b"a few bytes")
        assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]


def test_uploads_need_the_token(host: LoraHost, root: Path) -> None:
    with plugin_server(host, root, token="secret") as guarded:
        for token in (None, "wrong"):
            with VLLMServer(guarded, token=token, token_env="NONE_SET") as server, pytest.raises(HTTPFailure) as caught:
                server.request("POST", UPLOAD, params={"layout_id": "x"}, data=b"x", headers=OCTETS)
            assert caught.value.status == 401
        with VLLMServer(guarded, token="secret") as server, pytest.raises(HTTPFailure) as caught:
            server.request("POST", UPLOAD, params={"layout_id": "x"}, data=b"x", headers=OCTETS)
        assert caught.value.status == 409


def test_only_files_under_the_roots_are_told_of(url: str, root: Path) -> None:
    client = PluginClient(VLLMServer(url).request)
    (root / "there").touch()
    assert client.sees(str(root / "there"))
    assert not client.sees(str(root / "not there"))
    with pytest.raises(HTTPFailure) as caught:
        client.sees("/etc/passwd")
    assert caught.value.status == 403

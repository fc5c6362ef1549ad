"""The trainer's end of a broadcast: the address that it listens on, and a port that it takes again."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

from loraflow.config import SyncConfig
from loraflow.errors import ConfigError
from loraflow.launch import free_port
from loraflow.server import VLLMServer
from loraflow.transports import carriers
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.groups import GlooGroup, address_towards, require_own
from loraflow.transports.wire import Bucket

_c10d: Any = torch.distributed


class Worker:
    """Joins as a server's worker does; what it is sent it never reads."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._group: Any = None
        self._thread = threading.Thread(target=self._join)
        self._thread.start()

    def _join(self) -> None:
        limit = timedelta(seconds=10)
        store = _c10d.TCPStore("127.0.0.1", self._port, None, is_master=False, timeout=limit, wait_for_workers=False)
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = _c10d.ProcessGroupGloo(_c10d.PrefixStore("loraflow", store), 1, 2, options)

    def joined(self) -> None:
        self._thread.join(10)

    def leave(self) -> None:
        self._group = None


def test_a_fixed_port_is_taken_again_at_once() -> None:
    """A run that connects anew does so within milliseconds, while the group before is still being left."""
    port = free_port("")
    for _ in range(3):
        group = GlooGroup("127.0.0.1", port, 2, 10.0)
        worker = Worker(port)
        group.join()
        worker.joined()
        group.send(torch.zeros(1 << 16, dtype=torch.uint8), Bucket((), 1 << 16))
        group.close()
        worker.leave()


def test_only_an_address_of_this_host_can_be_listened_on() -> None:
    assert require_own("127.0.0.1") == "127.0.0.1"
    for other in ("192.0.2.7", "no-such-host.invalid"):
        begin = time.monotonic()
        with pytest.raises(ConfigError, match="not an address of this host"):
            require_own(other)
        assert time.monotonic() - begin < 10
    for url in ("http://127.0.0.1:8000", "http://0.0.0.0:8000"):
        assert address_towards(url) == "127.0.0.1"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "http://10.0.0.7", "[fd00::1]"])
def test_what_no_worker_could_connect_to_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="group_host"):
        SyncConfig(group_host=host)


def test_each_server_has_its_own_port_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "GlooGroup", lambda address, port, world, timeout: (address, port))
    made = BroadcastTransport(torch.nn.Linear(1, 1), SyncConfig(group_port=65534), "gloo")
    servers = [VLLMServer(f"http://127.0.0.1:{port}") for port in (8000, 8001, 8002)]
    links = [made._link(server) for server in (servers[0], servers[1], servers[0])]  # the first is connected anew
    places: list[Any] = [link._make_group(link, 2) for link in links]
    assert places == [("127.0.0.1", 65534), ("127.0.0.1", 65535), ("127.0.0.1", 65534)]
    with pytest.raises(ConfigError, match=r"leaves no port for .*:8002"):
        made._link(servers[2])

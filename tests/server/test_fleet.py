"""A real server that is killed, restarted, cut off and joined again: who answers, and with what."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from loraflow.launch import free_port
from loraflow.manager import SyncManager
from loraflow.membership import Aside
from loraflow.server import VLLMServer
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import vllm_server

pytestmark = pytest.mark.server


class Cable(socketserver.ThreadingTCPServer):
    """Another address of the same server, that can be unplugged."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, target: int) -> None:
        self.target = target
        self.plugged = True
        super().__init__(("127.0.0.1", 0), _Relay)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        cable = self.server
        assert isinstance(cable, Cable)
        if not cable.plugged:
            return
        with socket.create_connection(("127.0.0.1", cable.target)) as there:
            back = threading.Thread(target=self._copy, args=(there, self.request, cable), daemon=True)
            back.start()
            self._copy(self.request, there, cable)
            back.join()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket, cable: Cable) -> None:
        source.settimeout(0.2)
        while cable.plugged:
            try:
                data = source.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data:
                break
            sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cable_to(port: int) -> Iterator[Cable]:
    cable = Cable(port)
    try:
        yield cable
    finally:
        cable.plugged = False
        cable.shutdown()
        cable.server_close()


def shared_memory(group: int) -> set[Path]:
    """Blocks that the processes of ``group`` have open."""
    names = set()
    for process in processes_of(group):
        with suppress(OSError):
            mapped = Path(f"/proc/{process}/maps").read_text().splitlines()
            names |= {line.split("/dev/shm/")[1] for line in mapped if "/dev/shm/" in line}
            names |= {path.readlink().name for path in Path(f"/proc/{process}/fd").iterdir()}
    return {path for name in names if (path := Path("/dev/shm") / name).is_file()}


def processes_of(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(entry.parent.name))
    return found


def end_by_sigterm(leader: int, port: int) -> None:
    """As a container is stopped: the first process is asked to end, and all others end with it."""
    assert len(processes_of(leader)) >= 2  # the API server and its engine
    os.kill(leader, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while processes_of(leader) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(leader) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def assert_serves(server: VLLMServer, name: str, expected: torch.Tensor) -> None:
    served = torch.tensor(server.prompt_logprobs(PROMPT, model=name))
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-4)


def test_restart_cut_and_join(tiny_model: Path, tmp_path: Path) -> None:
    model = peft_model(tiny_model, seed=1)
    port, threads = free_port(), set(threading.enumerate())
    options = {"carrier": "filesystem", "adapter_root": str(tmp_path / "adapters"), "run_id": "fleet"}
    with vllm_server(tiny_model, tmp_path, port=port) as running:
        manager = SyncManager(model, running.url, on_server_failure="quarantine", start_timeout=300.0, **options)
        manager.start()
        fleet, prover = manager._fleet, manager._prover
        assert fleet is not None
        assert prover is not None
        try:
            with cable_to(port) as cable:
                fleet.join(VLLMServer(cable.url), prover)
                manager.ready()
                assert [server.url for server in manager.servers] == [running.url, cable.url]
                expected = peft_logprobs(model, PROMPT)
                for server in manager.servers:
                    assert_serves(server, manager.policy_name, expected)

                cable.plugged = False
                randomize(model, seed=2)
                record = manager.sync(1)
                assert record is not None
                assert record.proven
                assert [server.url for server in manager.servers] == [running.url]
                answers = fleet.generate([PROMPT, PROMPT[:5]], n=2, max_tokens=4)
                assert {answer.model for answer in answers} == {manager.policy_name}

                cable.plugged = True
                fleet._roster._aside[cable.url] = Aside("cut", 0.0)  # due at once
                manager.ready()
                assert len(manager.servers) == 2
                assert_serves(manager.servers[1], manager.policy_name, peft_logprobs(model, PROMPT))

                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.stop()
            fleet._roster.set_aside(cable.url, "pulled out for good")
            own_tmp = Path(tempfile.mkdtemp(dir=tmp_path.parent, prefix="t"))
            with vllm_server(tiny_model, tmp_path, port=port, env={"TMPDIR": str(own_tmp)}) as again:
                server = VLLMServer(again.url)
                names = {served.id for served in server.models()}
                assert manager.policy_name not in names
                manager.ready()
                assert_serves(server, manager.policy_name, peft_logprobs(model, PROMPT))
                randomize(model, seed=3)
                record = manager.sync(2)
                assert record is not None
                assert record.proven
                assert_serves(server, manager.policy_name, peft_logprobs(model, PROMPT))
                manager.close()
                assert [served.id for served in server.models() if served.parent] == []
                server.close()
                left = [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("loraflow")]
                assert not left
                shared = shared_memory(again.process.pid)
                assert shared
                end_by_sigterm(again.process.pid, port)
                assert not [path for path in shared if path.exists()]
                sockets = Path(again.process._sockets.name)  # type: ignore[union-attr]
                again.process.stop()
                assert not sockets.exists()
                assert not [path for path in own_tmp.rglob("*") if path.is_socket() or "loraflow" in path.name]
        finally:
            manager.close()

"""Fixtures shared by all tests: one tiny model, and one real vLLM per configuration, started when a test wants it.

Two servers at once are too much for two cores, so tests are ordered by the server that they use, and a server is
stopped as soon as a test wants another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny import make_tiny_model
from tests.helpers.vllm_process import RunningServer, vllm_server

SERVERS = (
    "lora_server",
    "straight_server",
    "mapped_server",
    "plain_server",
    "vlm_server",
    "tp2_server",
    "dp2_server",
    "fold_server",
    "fold_tp2_server",
    "fold_dp2_server",
)
"""Server fixtures, in the order in which their tests run."""


class ServerPark:
    """Keeps one server alive at a time, by configuration."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._context: AbstractContextManager[RunningServer] | None = None
        self._server: RunningServer | None = None

    def get(self, name: str, start: Callable[[], AbstractContextManager[RunningServer]]) -> RunningServer:
        alive = self._server is not None and self._server.process.returncode is None
        if self._name != name or not alive:
            self.stop()
            self._context = start()
            self._server = self._context.__enter__()
            self._name = name
        assert self._server is not None
        return self._server

    def stop(self) -> None:
        context, self._context, self._server, self._name = self._context, None, None, None
        if context is not None:
            context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def server_park() -> Iterator[ServerPark]:
    park = ServerPark()
    yield park
    park.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of 4 layers, float32, with its tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lora_server(server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """`loraflow serve` as it stands: LoRA rank 16, plugin, worker extension, gloo weight transfer; float32."""
    return server_park.get("lora", lambda: vllm_server(tiny_model, tmp_path_factory.mktemp("lora")))


def _writing(park: ServerPark, model: Path, work: Path, name: str, weight_transfer: str | None) -> RunningServer:
    env = {"LORAFLOW_FOLD": "1"}
    return park.get(name, lambda: vllm_server(model, work, env=env, weight_transfer=weight_transfer))


@pytest.fixture
def straight_server(
    server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    """As `lora_server`, with plain weights: it writes what it receives to where it is served."""
    return _writing(server_park, tiny_model, tmp_path_factory.mktemp("straight"), "straight", None)


@pytest.fixture
def mapped_server(server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """As `straight_server`, over ipc: buckets lie in memory that its worker has mapped."""
    return _writing(server_park, tiny_model, tmp_path_factory.mktemp("mapped"), "mapped", "ipc")


@pytest.fixture
def plain_server(server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """Stock vLLM with LoRA as a user would start it: no plugin, no worker extension."""
    return server_park.get(
        "plain",
        lambda: vllm_server(
            tiny_model, tmp_path_factory.mktemp("plain"), stock=True, extra=("--max-loras", "3", "--max-cpu-loras", "5")
        ),
    )


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL of 2 layers, float32, with its processor."""
    from tests.helpers.tiny_vlm import make_tiny_vlm  # its imports are slow, and few tests need them

    return make_tiny_vlm(tmp_path_factory.mktemp("tiny_vlm"))


@pytest.fixture
def vlm_server(server_park: ServerPark, tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """As `lora_server`, of a vision-language model: images for trainers, adapters on the vision tower too."""
    extra = ("--enable-scale-out", "--enable-tower-connector-lora")
    return server_park.get("vlm", lambda: vllm_server(tiny_vlm, tmp_path_factory.mktemp("vlm"), extra=extra))


@pytest.fixture
def tp2_server(server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """As `lora_server`, on two tensor-parallel ranks."""
    return server_park.get(
        "tp2", lambda: vllm_server(tiny_model, tmp_path_factory.mktemp("tp2"), extra=("--tensor-parallel-size", "2"))
    )


@pytest.fixture
def dp2_server(server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """As `lora_server`, with two data-parallel engines behind one API server."""
    return server_park.get(
        "dp2", lambda: vllm_server(tiny_model, tmp_path_factory.mktemp("dp2"), extra=("--data-parallel-size", "2"))
    )


def _fold(park: ServerPark, model: Path, work: Path, name: str, *extra: str) -> RunningServer:
    return park.get(name, lambda: vllm_server(model, work, max_lora_rank=None, extra=extra))


@pytest.fixture
def fold_server(server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """`loraflow serve` without LoRA slots."""
    return _fold(server_park, tiny_model, tmp_path_factory.mktemp("fold"), "fold")


@pytest.fixture
def fold_tp2_server(
    server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    """As `fold_server`, on two tensor-parallel ranks."""
    work = tmp_path_factory.mktemp("fold_tp2")
    return _fold(server_park, tiny_model, work, "fold_tp2", "--tensor-parallel-size", "2")


@pytest.fixture
def fold_dp2_server(
    server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    """As `fold_server`, with two data-parallel engines."""
    work = tmp_path_factory.mktemp("fold_dp2")
    return _fold(server_park, tiny_model, work, "fold_dp2", "--data-parallel-size", "2")


def pytest_configure() -> None:
    """One thread per process: on two cores, beside a server, every parallel region waits for a core (10 ms a copy)."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs no server first, then server by server, so that each is started once.

    A server is a fixture of the test, or a parameter of it that is named as the fixture is.
    """

    def order(item: pytest.Item) -> int:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = {*getattr(item, "fixturenames", ()), *(value for value in given if isinstance(value, str))}
        wanted = [SERVERS.index(name) + 1 for name in SERVERS if name in names]
        return wanted[-1] if wanted else 0

    items.sort(key=order)

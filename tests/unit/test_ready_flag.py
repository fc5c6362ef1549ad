"""Payloads that are announced before they are there: a worker reads one once it is, and waits for none for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loraflow.transports.blocks import SharedBlock
from loraflow.transports.ready_flag import ReadyFlag
from loraflow_server.errors import PluginError
from loraflow_server.payload import Payloads, check_source

CPU = torch.device("cpu")
SUMS = [1, -1, 2**63 - 1, -(2**63)]


@pytest.fixture
def block() -> Iterator[SharedBlock]:
    made = SharedBlock(64, CPU)
    yield made
    made.close()


@pytest.fixture
def flag() -> Iterator[ReadyFlag]:
    made = ReadyFlag(len(SUMS))
    yield made
    made.close()


def test_a_worker_waits_until_the_payload_is_there(block: SharedBlock, flag: ReadyFlag) -> None:
    payloads = Payloads(CPU)
    for version in (1, 2):
        source = check_source(flag.announced(block.source()), limit=64)

        def later(version: int = version) -> None:
            time.sleep(0.05)
            block.put(torch.full((64,), version, dtype=torch.uint8))
            flag.payload_is_there(SUMS)

        trainer = threading.Thread(target=later)
        trainer.start()
        began = time.perf_counter()
        found = payloads.bytes_of(source).clone()
        waited = time.perf_counter() - began
        trainer.join()
        assert found.tolist() == [version] * 64
        assert waited >= 0.04
        assert payloads.numbers_of(source) == SUMS


def test_a_payload_that_does_not_come_is_given_up(
    block: SharedBlock, flag: ReadyFlag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraflow_server.payload.PATIENCE", 0.05)
    payloads, source = Payloads(CPU), flag.announced(block.source())
    began = time.perf_counter()
    with pytest.raises(PluginError, match="did not come") as late:
        payloads.bytes_of(source)
    assert (late.value.code, late.value.status) == ("late", 409)
    assert 0.05 <= time.perf_counter() - began < 1
    flag.call_off()
    with pytest.raises(PluginError, match="called off") as called_off:
        payloads.bytes_of(source)
    assert called_off.value.code == "called_off"


def test_payloads_of_trainers_that_are_gone_are_let_go(flag: ReadyFlag) -> None:
    """Flags are kept beside them, and take no payload's place."""
    payloads, made = Payloads(CPU), [SharedBlock(64, CPU) for _ in range(4)]
    for block in made:
        source = flag.announced(block.source())
        flag.payload_is_there(SUMS)
        payloads.bytes_of(source)
    assert list(payloads._blocks) == [block.name for block in made[2:]]
    assert list(payloads._flags) == [source["flag"]["name"]]
    for _ in range(10):
        other = ReadyFlag()
        source = other.announced(made[3].source())
        other.payload_is_there()
        payloads.bytes_of(source)
        other.close()
    assert len(payloads._flags) == 8
    assert list(payloads._blocks) == [block.name for block in made[2:]]
    for block in made:
        block.close()


def test_a_version_that_is_over_is_not_waited_for(block: SharedBlock, flag: ReadyFlag) -> None:
    """The block holds a later one's payload."""
    payloads, first = Payloads(CPU), flag.announced(block.source())
    flag.announced(block.source())
    flag.payload_is_there(SUMS)
    began = time.perf_counter()
    with pytest.raises(PluginError, match="did not come"):
        payloads.bytes_of(first)
    assert time.perf_counter() - began < 0.2


def test_a_trainer_that_closes_is_not_waited_for(block: SharedBlock) -> None:
    flag = ReadyFlag()
    payloads, source = Payloads(CPU), flag.announced(block.source())
    payloads._flag(source["flag"])  # mapped, as it would be from the version before
    words = payloads._flag(source["flag"])
    flag.close()
    assert words[0] == -1


@pytest.mark.parametrize(
    "change",
    [
        {"serial": 0},
        {"serial": True},
        {"serial": "1"},
        {"serial": 1 << 62},
        {"numbers": -1},
        {"numbers": 1 << 40},
        {"name": "../etc/passwd"},
        {"name": "loraflow-\n"},
        {"name": None},
    ],
)
def test_bad_flags_are_refused(block: SharedBlock, change: dict[str, Any]) -> None:
    flag = {"name": "loraflow-1", "serial": 1, "numbers": 0, **change}
    with pytest.raises(PluginError) as refused:
        check_source({**block.source(), "flag": flag}, limit=64)
    assert refused.value.code == "bad_source"


@pytest.mark.parametrize("flag", [None, [], "loraflow-1", 1])
def test_what_is_no_flag_is_refused(block: SharedBlock, flag: Any) -> None:
    with pytest.raises(PluginError, match="flag"):
        check_source({**block.source(), "flag": flag}, limit=64)


def test_a_flag_that_is_shorter_than_it_says_is_refused(block: SharedBlock, flag: ReadyFlag) -> None:
    source = flag.announced(block.source())
    source["flag"]["numbers"] += 1
    with pytest.raises(PluginError, match="bytes"):
        Payloads(CPU).bytes_of(source)


def test_an_api_server_waits_and_goes_on_with_other_requests(block: SharedBlock, flag: ReadyFlag) -> None:
    payloads, source = Payloads(CPU), flag.announced(block.source())

    async def both() -> int:
        waiting = asyncio.ensure_future(payloads.arrival(source))
        for _ in range(10):
            await asyncio.sleep(0.002)
            assert not waiting.done()
        flag.payload_is_there(SUMS)
        await waiting
        await payloads.arrival(block.source())  # nothing to wait for
        return 1

    assert asyncio.run(both()) == 1


def test_an_api_server_gives_up_too(block: SharedBlock, flag: ReadyFlag) -> None:
    payloads, source = Payloads(CPU), flag.announced(block.source())
    flag.call_off()
    with pytest.raises(PluginError, match="called off"):
        asyncio.run(payloads.arrival(source))

"""What is said of a payload that a group was announced: one word, the first, for the trainer and for all workers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed

from loraflow.transports.groups import GlooGroup
from loraflow.transports.wire import Bucket
from loraflow_server import group_flag
from loraflow_server.engine import answers_of
from loraflow_server.errors import PluginError
from loraflow_server.group_flag import OFF, THERE, GroupFlag, Pulse, forget, say
from loraflow_server.lines import Lines, Meeting

_c10d: Any = torch.distributed

TRAINER = """
import sys, torch.distributed as d
from datetime import timedelta
store = d.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=9), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(
    params=[True, False], ids=["libuv", "plain"]
)  # gloo's group here has the one, vLLM's for NCCL the other
def store(request: pytest.FixtureRequest) -> Any:
    limit = timedelta(seconds=9)
    return _c10d.TCPStore(
        "127.0.0.1", 0, None, is_master=True, timeout=limit, wait_for_workers=False, use_libuv=request.param
    )


@pytest.fixture
def flags(store: Any) -> list[GroupFlag]:
    return [GroupFlag.connected("127.0.0.1", store.port, 30.0) for _ in range(3)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_flag, "PATIENCE", 0.05)


def code_of(wait: Callable[[], object]) -> str:
    try:
        wait()
    except PluginError as error:
        return error.code
    return "there"


def arrived(flag: GroupFlag, serial: int) -> None:
    asyncio.run(flag.arrival(serial))


@pytest.mark.parametrize(("word", "code"), [(THERE, "there"), (OFF, "called_off")])
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_word_wakes_whoever_waits(store: Any, flags: list[GroupFlag], word: str, code: str, seconds: float) -> None:
    with ThreadPoolExecutor(3) as pool:
        for serial in (1, 2):
            waits = [pool.submit(code_of, partial(flag.wait, serial)) for flag in flags[:2]]
            waits.append(pool.submit(code_of, partial(arrived, flags[2], serial)))
            time.sleep(seconds)
            began = time.perf_counter()
            assert say(store, serial, word) == word
            assert [wait.result(5) for wait in waits] == [code] * 3
            assert time.perf_counter() - began < 0.15  # woken, not when its patience ends
            forget(store, serial)


@pytest.mark.usefixtures("impatient")
def test_what_one_has_given_up_on_is_late_for_all(store: Any, flags: list[GroupFlag]) -> None:
    began = time.perf_counter()
    with pytest.raises(PluginError, match="did not come") as late:
        flags[0].wait(1)
    assert (late.value.code, late.value.status) == ("late", 409)
    assert time.perf_counter() - began < 0.2
    assert say(store, 1, THERE) == "late"
    assert [code_of(partial(flag.wait, 1)) for flag in flags] == ["late"] * 3
    assert code_of(partial(arrived, flags[1], 1)) == "late"
    assert say(store, 2, THERE) == THERE
    assert [code_of(partial(flag.wait, 2)) for flag in flags] == ["there"] * 3


def test_a_trainer_and_workers_that_speak_at_once_agree(
    store: Any, flags: list[GroupFlag], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_flag, "PATIENCE", 0.004)
    seen = set()
    with ThreadPoolExecutor(3) as pool:
        for serial in range(1, 41):
            waits = [pool.submit(code_of, partial(flag.wait, serial)) for flag in flags]
            time.sleep(serial * 0.0002)
            word = say(store, serial, THERE)
            assert {wait.result(5) for wait in waits} == {word}
            seen.add(word)
    assert seen == {"there", "late"}


class Stopped:
    """The store of a trainer that is stopped: no call of it returns."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = threading.Event()

    def compare_set(self, *_: Any) -> None:
        self.go.wait(30)

    def check(self, *_: Any) -> None:
        self.asked += 1
        self.go.wait(30)


@pytest.fixture
def stopped() -> Iterator[Stopped]:
    made = Stopped()
    yield made
    made.go.set()


@pytest.mark.usefixtures("impatient")
def test_a_trainer_that_is_stopped_holds_nobody(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_flag, "_GRACE", 0.05)
    began = time.perf_counter()
    with pytest.raises(PluginError, match="does not answer") as gone:
        GroupFlag(stopped).wait(1)
    assert gone.value.code == "broadcast_failed"
    assert code_of(partial(arrived, GroupFlag(stopped), 1)) == "broadcast_failed"
    pulse = Pulse(stopped)
    for _ in range(5):
        pulse()
    assert stopped.asked <= 1
    assert time.perf_counter() - began < 2


def test_a_trainer_that_is_killed_is_noticed_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        flag, looked = (GroupFlag.connected("127.0.0.1", port, 30.0) for _ in range(2))
        pulse = Pulse(looked._store)
        pulse()
        time.sleep(0.1)
        pulse()  # it lives
        threading.Timer(0.05, child.kill).start()
        began = time.perf_counter()
        assert code_of(lambda: flag.wait(1)) == "broadcast_failed"
        assert time.perf_counter() - began < 0.2
        with pytest.raises(RuntimeError):
            for _ in range(50):
                pulse()
                time.sleep(0.02)


@pytest.mark.usefixtures("impatient")
def test_a_group_whose_payload_was_late_or_called_off_gets_the_next() -> None:
    lines = [Lines(torch.device("cpu")) for _ in range(2)]
    group = GlooGroup("127.0.0.1", 0, 3, 5.0)
    port = group.handshake()["port"]
    with ThreadPoolExecutor(2) as pool:
        meetings = [Meeting("gloo", "127.0.0.1", port, rank, 3, 5.0, 5.0) for rank in (1, 2)]
        joins = [pool.submit(line.join, "g", meeting) for line, meeting in zip(lines, meetings, strict=True)]
        group.join()
        for join in joins:
            join.result()
        for serial, word, code in ((1, None, "late"), (2, OFF, "called_off"), (3, THERE, "there")):
            payload = torch.full((1000,), serial, dtype=torch.uint8)
            found = [pool.submit(line.receive, "g", 1000, serial) for line in lines]
            if word is not None:
                say(group.store, serial, word)
            if word == THERE:
                pending = group.send(payload, Bucket((), 1000))
                assert all(torch.equal(receive.result(), payload) for receive in found)
                assert pending.done() or time.sleep(0.1) is None
            else:
                assert [code_of(receive.result) for receive in found] == [code] * 2
    for line in lines:
        line.close()
    group.close()


def test_an_error_that_ends_a_group_is_told_before_one_that_does_not() -> None:
    """Whoever reads ``late`` takes the group for whole, on every rank."""
    late = {"error": PluginError("late", "it came late", status=409).to_dict()}
    broken = {"error": PluginError("broadcast_failed", "it broke off", status=502).to_dict()}
    with pytest.raises(PluginError) as told:
        answers_of([late, broken], 0)
    assert told.value.code == "broadcast_failed"
    assert told.value.details["worker"] == "engine 0, rank 1"
    with pytest.raises(PluginError) as told:
        answers_of([{"ok": {}}, late], 1)
    assert told.value.code == "late"

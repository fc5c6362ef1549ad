"""A file that is there for as long as a caller waits, and a worker that looks at it while it waits for a broadcast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraflow.transports import blocks
from loraflow_server.collective import NcclLine
from loraflow_server.errors import PluginError
from loraflow_server.lifeline import Lifeline, still_wanted


async def stays() -> bool:
    return False


async def left() -> bool:
    return True


def seen(look: Callable[[], None]) -> bool:
    try:
        look()
    except PluginError as error:
        return error.code != "called_off"
    return True


def test_it_is_there_until_the_end(tmp_path: Path) -> None:
    async def call() -> list[bool]:
        line = Lifeline(tmp_path)
        async with line.held(stays) as path:
            look = still_wanted(path)
            found = [seen(look)]
            await asyncio.sleep(0.15)
            found.append(seen(look))
        return [*found, seen(look), line.cut()]

    assert asyncio.run(call()) == [True, True, False, False]
    assert list(tmp_path.iterdir()) == []


def test_it_is_cut_where_the_caller_leaves_or_says_so(tmp_path: Path) -> None:
    async def call(gone: Any, *, cut: bool) -> tuple[bool, bool]:
        line = Lifeline(tmp_path)
        async with line.held(gone) as path:
            look = still_wanted(path)
            assert seen(look)
            said = line.cut() if cut else False
            await asyncio.sleep(0.05)
            return said, seen(look)

    assert asyncio.run(call(stays, cut=True)) == (True, False)
    assert asyncio.run(call(left, cut=False)) == (False, False)
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_that_starts_meanwhile_does_not_take_it_for_an_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers sweep shared memory of what dead processes left there."""
    monkeypatch.setattr(blocks, "_SHM", tmp_path)
    (tmp_path / "loraflow-call-of-a-killed-server").touch()

    async def call() -> bool:
        async with Lifeline(tmp_path).held(stays) as path:
            look = still_wanted(path)
            blocks._remove_orphans()
            assert [str(found) for found in tmp_path.iterdir()] == [path]
            return seen(look)

    assert asyncio.run(call())


def test_a_call_that_fails_leaves_no_file(tmp_path: Path) -> None:
    async def call() -> None:
        async with Lifeline(tmp_path).held(stays):
            raise ValueError

    with pytest.raises(ValueError):
        asyncio.run(call())
    assert list(tmp_path.iterdir()) == []


def test_what_another_host_does_not_see_is_wanted(tmp_path: Path) -> None:
    assert seen(still_wanted(None))
    assert seen(still_wanted(str(tmp_path / "elsewhere")))


class Communicator:
    """A broadcast that never ends."""

    destroyed = 0

    def destroy(self) -> None:
        self.destroyed += 1


def line_over(communicator: Communicator, timeout: float, **more: Any) -> NcclLine:
    line = object.__new__(NcclLine)  # its stream needs a GPU
    line._communicator, line._timeout = communicator, timeout
    line._alive = more.get("alive", lambda: None)
    line._aborted = more.get("aborted", lambda: None)
    return line


NEVER = SimpleNamespace(query=lambda: False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PluginError("called_off", "the trainer has gone"), "called_off"),
        (RuntimeError("connection reset by peer"), "broadcast_failed"),
    ],
)
def test_a_broadcast_whose_trainer_has_gone_is_aborted_soon(error: Exception, code: str) -> None:
    communicator, told = Communicator(), []
    looks = iter([None, error])

    def alive() -> None:
        found = next(looks)
        if found is not None:
            raise found

    line = line_over(communicator, 60.0, alive=alive, aborted=lambda: told.append(1))
    began = time.monotonic()
    with pytest.raises(PluginError) as caught:
        line.await_event(NEVER)
    assert caught.value.code == code
    assert (communicator.destroyed, told) == (1, [1])
    assert time.monotonic() - began < 2


def test_a_broadcast_that_does_not_come_is_aborted_in_time() -> None:
    communicator = Communicator()
    with pytest.raises(PluginError) as caught:
        line_over(communicator, 0.05).await_event(NEVER)
    assert (caught.value.code, communicator.destroyed) == ("broadcast_timeout", 1)


def test_a_broadcast_that_comes_is_left_alone() -> None:
    communicator, looks = Communicator(), iter([False, False, True])
    line_over(communicator, 1.0).await_event(SimpleNamespace(query=lambda: next(looks)))
    assert communicator.destroyed == 0

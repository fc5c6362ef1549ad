"""Requests go to proven servers only, and what fails on one is answered by another."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraflow.errors import ConfigError, LoraflowError, SyncTimeout, VerifyError
from loraflow.server import HTTPFailure, Unreachable, VLLMServer
from loraflow.spread import is_servers_fault, shares, spread

GONE = Unreachable("connection refused")


def servers(count: int) -> list[VLLMServer]:
    return [VLLMServer(f"http://127.0.0.1:{18150 + i}") for i in range(count)]


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_shares_are_the_items_in_order_and_even(items: list[int], count: int) -> None:
    parts = shares(items, count)
    assert [item for part in parts for item in part] == items
    sizes = [len(part) for part in parts]
    assert len(sizes) == min(count, len(items))
    assert not sizes or max(sizes) - min(sizes) <= 1


def http(status: int) -> HTTPFailure:
    return HTTPFailure("no", status=status, reason="no", server="s")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GONE, True),
        (SyncTimeout("slow"), True),
        (VerifyError("another policy"), True),
        (http(404), True),
        (http(503), True),
        (http(400), False),
        (http(401), False),
        (ConfigError("no"), False),
    ],
)
def test_whose_fault_it_is(error: LoraflowError, expected: bool) -> None:
    assert is_servers_fault(error) is expected


def ask_with(failing: dict[str, LoraflowError], log: list[tuple[str, tuple[int, ...]]]):
    def ask(server: VLLMServer, items: Sequence[int]) -> list[int]:
        log.append((server.url, tuple(items)))
        if server.url in failing:
            raise failing[server.url]
        return [answer for item in items for answer in (item * 10, item * 10 + 1)]

    return ask


@pytest.mark.parametrize("total", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("down", [(), (0,), (1,), (0, 2)])
def test_answers_are_complete_and_in_order_whoever_fails(total: int, down: tuple[int, ...]) -> None:
    fleet = servers(3)
    log: list[tuple[str, tuple[int, ...]]] = []
    told = []
    failing: dict[str, LoraflowError] = {fleet[i].url: GONE for i in down}
    answers = spread(range(total), fleet, ask_with(failing, log), lambda server, error: told.append(server.url))
    assert answers == [n for item in range(total) for n in (item * 10, item * 10 + 1)]
    assert len(told) == len(set(told))
    assert set(told) <= set(failing)
    good = [item for url, items in log if url not in failing for item in items]
    assert sorted(good) == list(range(total))  # each answered once


def test_a_bad_request_is_not_repeated() -> None:
    fleet = servers(3)
    log: list[tuple[str, tuple[int, ...]]] = []
    told = []
    with pytest.raises(HTTPFailure):
        spread(range(6), fleet, ask_with({fleet[1].url: http(400)}, log), lambda server, error: told.append(server))
    assert len(log) == 3
    assert told == []


def test_when_all_are_gone_it_says_so() -> None:
    fleet = servers(3)
    told = []
    with pytest.raises(Unreachable):
        spread(
            range(6), fleet, ask_with({s.url: GONE for s in fleet}, []), lambda server, error: told.append(server.url)
        )
    assert sorted(told) == sorted(s.url for s in fleet)


def test_the_caller_may_end_it() -> None:
    fleet = servers(2)
    log: list[tuple[str, tuple[int, ...]]] = []

    def failed(server: VLLMServer, error: LoraflowError) -> None:
        raise error

    with pytest.raises(Unreachable):
        spread(range(4), fleet, ask_with({fleet[0].url: GONE}, log), failed)
    assert len(log) == 2


def test_servers_are_asked_at_the_same_time() -> None:
    together = threading.Barrier(4, timeout=10)

    def ask(server: VLLMServer, items: Sequence[int]) -> Sequence[int]:
        together.wait()  # breaks unless all four are inside
        return items

    assert spread(range(8), servers(4), ask, lambda server, error: None) == list(range(8))

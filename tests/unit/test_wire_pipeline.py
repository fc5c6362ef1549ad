"""Several servers in one update: each gets every byte in order, and one that fails is left out, not waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loraflow.errors import LoadError, SyncTimeout
from loraflow.merge import WireTensor
from loraflow.transports.background import Task, wait_until
from loraflow.transports.pipeline import buckets_of, send
from loraflow.transports.wire import place_of, plan_buckets

TENSORS = [WireTensor(f"t{i}", torch.float32, (5, i + 1)) for i in range(12)]
BUCKET = 100


class Receiver:
    """A link whose far end reads a buffer only when it is waited for: a buffer filled too early shows."""

    def __init__(self, url: str, fails_at: int = -1, *, on: str = "wait") -> None:
        self.url = url
        self.server = self.group = self
        self.buffers = 2
        self.device = torch.device("cpu")
        self.received: list[torch.Tensor] = []
        self.sent = 0
        self._fails_at = fails_at if on == "wait" else -1
        self._refuses_at = fails_at if on == "send" else -1

    def send(self, buffer: torch.Tensor, bucket: Any) -> Any:
        if self.sent == self._refuses_at:
            raise LoadError("no group", server=self.url)
        self.sent += 1
        return buffer[: bucket.nbytes].clone

    def wait(self, pending: Any) -> None:
        if len(self.received) == self._fails_at:
            raise SyncTimeout("stuck", server=self.url)
        self.received.append(pending())


def stream(made: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from made.items()


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {t.name: torch.randn(t.shape, generator=generator) for t in TENSORS}


def whole(made: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in made.values()])


@pytest.mark.parametrize("on", ["wait", "send"])
def test_a_server_that_fails_is_left_out(on: str) -> None:
    made = values()
    good: Any = Receiver("http://good")
    bad: Any = Receiver("http://bad", fails_at=2, on=on)
    errors: dict[str, Exception] = {}
    spent = send([bad, good], buckets_of(TENSORS, BUCKET), stream(made), errors)
    buckets = plan_buckets(TENSORS, BUCKET)
    assert len(buckets) > 5
    assert torch.equal(torch.cat(good.received), whole(made))
    assert errors.keys() == {"http://bad"}
    assert bad.sent <= 4
    assert spent.keys() == {"merge", "broadcast"}


def test_nothing_is_merged_for_nobody() -> None:
    taken: list[str] = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in values().items():
            taken.append(name)
            yield name, tensor

    bad: Any = Receiver("http://bad", fails_at=0)
    errors: dict[str, Exception] = {}
    send([bad], buckets_of(TENSORS, BUCKET), counted(), errors)
    assert errors
    assert len(taken) < len(TENSORS)


def test_another_order_than_announced_is_refused() -> None:
    good: Any = Receiver("http://good")
    turned = dict(reversed(list(values().items())))
    with pytest.raises(LoadError, match="announced"):
        send([good], buckets_of(TENSORS, BUCKET), stream(turned), {})


class Told:
    """Servers that are being told what comes: how many tensors were merged meanwhile, and who could not be told."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.merged: list[str] = []
        self.before = -1

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in values().items():
            self.merged.append(name)
            yield name, tensor

    def wait(self) -> dict[str, Exception]:
        self.before = len(self.merged)
        return {url: LoadError("asleep", server=url) for url in self.failing}


def test_the_first_buckets_are_filled_while_servers_are_told() -> None:
    good: Any = Receiver("http://good")
    bad: Any = Receiver("http://bad")
    told, errors = Told("http://bad"), dict[str, Exception]()
    send([bad, good], buckets_of(TENSORS, BUCKET), told.stream(), errors, begun=told.wait)
    buckets = plan_buckets(TENSORS, BUCKET)
    assert told.before == sum(len(bucket.slots) for bucket in buckets[:2])
    assert torch.equal(torch.cat(good.received), whole(values()))
    assert errors.keys() == {"http://bad"}
    assert bad.sent == 0


def test_servers_without_a_group_are_told_first() -> None:
    good: Any = Receiver("http://good")
    good.group = None
    told = Told()

    def connect() -> dict[str, Exception]:
        good.group = good
        return told.wait()

    send([good], buckets_of(TENSORS, BUCKET), told.stream(), {}, begun=connect)
    assert told.before == 0
    assert torch.equal(torch.cat(good.received), whole(values()))


def test_nothing_is_sent_where_nobody_could_be_told() -> None:
    bad: Any = Receiver("http://bad")
    told, errors = Told("http://bad"), dict[str, Exception]()
    send([bad], buckets_of(TENSORS, BUCKET), told.stream(), errors, begun=told.wait)
    assert bad.sent == 0
    assert len(told.merged) < len(TENSORS)


class AtOnce:
    """Writes every second tensor of a bucket by itself."""

    def __init__(self) -> None:
        self.names = frozenset(tensor.name for tensor in TENSORS[::2])

    def prepare(self, snapshot: Any) -> frozenset[str]:
        return self.names

    def write(self, bucket: Any, buffer: torch.Tensor) -> None:
        for slot in bucket.slots:
            if slot.tensor.name in self.names:
                place_of(buffer, slot).copy_(values()[slot.tensor.name])


def test_what_is_written_at_once_and_one_by_one_is_all_there_and_seen() -> None:
    good: Any = Receiver("http://good")
    apart, seen = AtOnce(), dict[str, torch.Tensor]()
    rest = {name: tensor for name, tensor in values().items() if name not in apart.names}

    def look(placed: Any) -> None:
        seen.update({name: tensor.clone() for name, tensor in placed})

    send([good], buckets_of(TENSORS, BUCKET), stream(rest), {}, seen=look, grouped=apart)
    assert torch.equal(torch.cat(good.received), whole(values()))
    assert list(seen) == [tensor.name for tensor in TENSORS]
    assert all(torch.equal(seen[name], tensor) for name, tensor in values().items())


def test_capped_buckets_hold_the_largest_tensor() -> None:
    made = values()
    good: Any = Receiver("http://good")
    send([good], buckets_of(TENSORS, 8, capped=True), stream(made), {})
    assert max(len(part) for part in good.received) == TENSORS[-1].nbytes
    assert torch.equal(torch.cat(good.received), whole(made))


def test_a_task_is_given_up_on() -> None:
    gate = threading.Event()
    task = Task(gate.wait, name="test")
    with pytest.raises(TimeoutError):
        task.result(0.05)
    assert not wait_until(task.done, time.monotonic() + 0.05)
    gate.set()
    assert task.result(5) is True
    failing: Task[None] = Task(lambda: (_ for _ in ()).throw(ValueError("reason")), name="test")
    assert wait_until(failing.failed, time.monotonic() + 5)
    with pytest.raises(ValueError, match="reason"):
        failing.result(0)

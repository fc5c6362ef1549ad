"""Buckets in memory that trainer and workers have mapped: each worker copies each one whole, and none too late."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.errors import CapabilityError, LoadError
from loraflow.http_errors import HTTPFailure
from loraflow.transports.mapped import MappedGroup, TrainerBuffers
from loraflow.transports.pipeline import send
from loraflow_server import mapped
from loraflow_server.answers import answers
from loraflow_server.blocks import SHM_DIR
from loraflow_server.engine import answers_of
from loraflow_server.errors import PluginError
from loraflow_server.mapped import MappedBuffers, check_where
from loraflow_server.served import ServedWeights
from loraflow_server.weights_worker import WeightsWorker
from tests.unit.test_plugin_doors import WEIRD
from tests.unit.test_receive import NAMES, incoming, packed
from tests.unit.test_weight_digest import SHAPES, Rank

CPU = torch.device("cpu")
LIMIT = 1 << 30


class Worker(WeightsWorker):
    """One of two workers, with what vLLM would give it."""

    device = CPU
    weight_transfer_engine = None

    def __init__(self, number: int) -> None:
        self.model = Rank(number, torch.float32)
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=2, rank=number)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    @answers
    def loraflow_agree(self) -> dict[str, Any]:
        self._loraflow_served()["id"] = ServedWeights(self.model, dict(sorted(SHAPES.items())))
        return {}


class Served:
    """A server of two workers: the plugin's routes that this needs, in one process."""

    url = "http://here"
    load_timeout = 5.0

    def __init__(self) -> None:
        self.workers = [Worker(number) for number in (0, 1)]
        self.error: PluginError | None = None
        for worker in self.workers:
            worker.loraflow_agree()

    def request(self, method: str, path: str, *, json: Any, **options: Any) -> Any:
        body = json
        if path.endswith("/weights/map"):
            where = check_where(body, len(self.workers), LIMIT)
            found = [worker.loraflow_map(where) for worker in self.workers]
            for answer in found:
                if "error" in answer:
                    error = PluginError.from_dict(answer["error"])
                    raise HTTPFailure(str(error), status=error.status, reason=str(error), server=self.url)
            return {"heads": [[answer["ok"]["head"] for answer in found]]}
        assert path.endswith("/weights/unmap")
        return [worker.loraflow_unmap(body.get("name")) for worker in self.workers]

    def receive(self, coming: dict[str, Any], timeout: float = 5.0) -> Callable[[], list[Any]]:
        """All workers at the same time; what they answer, once it is asked for."""
        found: list[Any] = [None] * len(self.workers)

        def run(number: int) -> None:
            found[number] = self.workers[number].loraflow_receive(coming, timeout)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(self.workers))]
        for thread in threads:
            thread.start()

        def wait() -> list[Any]:
            for thread in threads:
                thread.join(10)
            return found

        return wait


@pytest.fixture
def site() -> Iterator[tuple[Served, TrainerBuffers, Callable[..., MappedGroup]]]:
    before = set(SHM_DIR.iterdir())
    with ExitStack() as stack:
        served: Any = Served()
        buffers = TrainerBuffers(max(bucket.nbytes for bucket in packed(torch.float32, 1)[1]), CPU)
        stack.callback(buffers.close)

        def make(**options: Any) -> MappedGroup:
            group = MappedGroup(served, options.get("mapped", buffers), 3, 5.0, options.get("loaded"))
            stack.callback(group.close)
            return group

        yield served, buffers, make
    assert {path for path in set(SHM_DIR.iterdir()) - before if path.name.startswith("loraflow-")} == set()


def link_of(group: MappedGroup, patience: float = 5.0) -> Any:
    def wait(pending: Any) -> None:
        deadline = time.monotonic() + patience
        while not pending.done():
            if time.monotonic() > deadline:
                raise LoadError("a bucket was not taken")
            time.sleep(1e-4)

    return SimpleNamespace(group=group, server=SimpleNamespace(url="http://here"), send=group.send, wait=wait)


def body(group: MappedGroup, buckets: Any) -> dict[str, Any]:
    coming = incoming(torch.float32, buckets)
    return {key: getattr(coming, key) for key in ("layout_id", "names", "dtypes", "buckets")} | group.stamp_straight()


def test_each_update_is_written_by_all_workers(site: Any) -> None:
    served, buffers, make = site
    group = make()
    group.join()
    assert group.reached
    for _ in range(3):  # each begins in the first buffer again, whatever the number of buckets
        weights, buckets, _ = packed(torch.float32, 1)
        assert len(buckets) == len(NAMES)
        wait, errors = served.receive(body(group, buckets)), dict[str, Exception]()
        send([link_of(group)], buckets, iter(weights.items()), errors, buffers=buffers.views)
        assert errors == {}
        for worker, answer in zip(served.workers, wait(), strict=True):
            assert "ok" in answer, answer
            wanted = Rank(worker.model.number, torch.float32)
            wanted.load_weights(weights.items())
            for (name, found), (_, right) in zip(
                worker.model.named_parameters(), wanted.named_parameters(), strict=True
            ):
                assert torch.equal(found, right), name
    group.leave()
    assert all("_loraflow_mapped" not in worker.__dict__ for worker in served.workers)


def test_a_buffer_is_filled_again_once_the_slowest_worker_has_copied_it(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker has launched on its GPU is not done yet: the trainer must not be told of it."""
    served, buffers, make = site
    group = make()
    group.join()
    done = threading.Event()
    slow = served.workers[1]

    def event_on(device: torch.device) -> Any:
        mine = threading.current_thread().name == "slow"
        return SimpleNamespace(query=lambda: done.is_set() or not mine)

    monkeypatch.setattr(mapped, "_event_on", event_on)
    _, buckets, pieces = packed(torch.float32, 1)
    coming = body(group, buckets)
    answers_: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers_.append(served.workers[0].loraflow_receive(coming, 5.0))),
        threading.Thread(target=lambda: answers_.append(slow.loraflow_receive(coming, 5.0)), name="slow"),
    ]
    for thread in threads:
        thread.start()
    sent = []
    for number in range(2):
        buffers.views[number][: buckets[number].nbytes].copy_(pieces[number])
        sent.append(group.send(buffers.views[number], buckets[number]))
    time.sleep(0.2)
    assert [one.done() for one in sent] == [False, False]
    done.set()
    deadline = time.monotonic() + 5
    while not sent[1].done():
        assert time.monotonic() < deadline
    group.close()
    for thread in threads:
        thread.join(5)
    assert {answer["error"]["code"] for answer in answers_} == {"called_off"}


def test_a_trainer_that_calls_off_releases_the_workers_at_once(site: Any) -> None:
    served, _, make = site
    group = make()
    group.join()
    _, buckets, _ = packed(torch.float32, 1)
    wait = served.receive(body(group, buckets), timeout=60.0)
    time.sleep(0.05)
    began = time.monotonic()
    group.close()
    assert {answer["error"]["code"] for answer in wait()} == {"called_off"}
    assert time.monotonic() - began < 1
    assert all("_loraflow_mapped" not in worker.__dict__ for worker in served.workers)  # nothing stays mapped


def test_a_bucket_that_does_not_come_is_given_up_on_in_time(site: Any) -> None:
    served, _, make = site
    group = make()
    group.join()
    _, buckets, _ = packed(torch.float32, 1)
    began = time.monotonic()
    assert {answer["error"]["code"] for answer in served.receive(body(group, buckets), timeout=0.2)()} == {
        "broadcast_timeout"
    }
    assert time.monotonic() - began < 2
    again = served.receive(body(group, buckets))()  # it maps anew first
    assert {answer["error"]["code"] for answer in again} == {"not_mapped"}


def test_a_trainer_that_has_gone_is_noticed_by_its_call(site: Any, tmp_path: Path) -> None:
    served, _, make = site
    group = make()
    group.join()
    _, buckets, _ = packed(torch.float32, 1)
    (tmp_path / "call").touch()
    wait = served.receive({**body(group, buckets), "lifeline": str(tmp_path / "call")}, timeout=60.0)
    time.sleep(0.05)
    began = time.monotonic()
    (tmp_path / "call").unlink()
    assert {answer["error"]["code"] for answer in wait()} == {"called_off"}
    assert time.monotonic() - began < 2


def test_a_worker_that_gives_up_holds_nobody_up(site: Any) -> None:
    served, buffers, make = site
    group = make()
    group.join()
    served.workers[1].model.qk.data = torch.zeros(4, 8)
    weights, buckets, _ = packed(torch.float32, 1)
    wait = served.receive(body(group, buckets), timeout=60.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="given up"):
        send([link_of(group)], buckets, iter(weights.items()), {}, buffers=buffers.views)
    found = wait()
    assert time.monotonic() - began < 2
    assert [answer["error"]["code"] for answer in found] == ["called_off", "moved"]
    with pytest.raises(PluginError, match="another layout"):  # the one that says why
        answers_of(found, 0)


def test_memory_that_is_not_the_trainers_is_not_taken(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served, _, make = site
    other = TrainerBuffers(64, CPU)
    other.token = "00" * 16
    with pytest.raises(CapabilityError, match="other memory of that name"):
        make(mapped=other).join()
    assert all("_loraflow_mapped" not in worker.__dict__ for worker in served.workers)
    fallen = make(mapped=other, loaded=SimpleNamespace(close=lambda: None, send=lambda *_: "sent by vLLM"))
    fallen.join()
    assert not fallen.reached
    assert fallen.stamp() == {}
    assert fallen.send(torch.empty(0), None) == "sent by vLLM"  # type: ignore[comparison-overlap, arg-type]
    (SHM_DIR / other.where("flags", 2)["source"]["name"]).unlink()
    with pytest.raises(CapabilityError, match="No such file"):
        make(mapped=other).join()
    other.close()
    monkeypatch.setattr(served, "request", lambda *_, **__: (_ for _ in ()).throw(LoadError("gone", server="s")))
    with pytest.raises(LoadError, match="gone"):
        make().join()


KILLED = """
import os, signal, sys
from types import SimpleNamespace
import torch
from loraflow.transports.mapped import MappedGroup, TrainerBuffers
buffers = TrainerBuffers(1 << 16, torch.device("cpu"))
group = MappedGroup(SimpleNamespace(), buffers, 3, 5.0, None)
where = buffers.where(group._flags.name, 2)
print(where["flags"], where["source"]["name"], where["stride"], where["source"]["nbytes"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_trainer_left_is_removed_by_the_next(site: Any) -> None:
    served, _, make = site
    found = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    flags, name, stride, nbytes = found.stdout.split()
    where = {"flags": flags, "source": {"kind": "shm", "name": name, "nbytes": int(nbytes)}, "workers": 2}
    buffers = MappedBuffers(mapped.Where(**where, buffers=2, stride=int(stride)), 0, CPU)
    assert {flags, name} <= {path.name for path in SHM_DIR.iterdir()}
    group = make()
    group.join()
    assert {flags, name}.isdisjoint(path.name for path in SHM_DIR.iterdir())
    assert len(buffers.token) == 32  # what is mapped stays readable until it is let go of
    buffers.close()
    assert served.workers[0].__dict__["_loraflow_mapped"].name == group._flags.name


GOOD = {
    "source": {"kind": "shm", "name": "loraflow-x", "nbytes": 1040}, "buffers": 2, "stride": 512,
    "flags": "loraflow-f", "workers": 2,
}  # fmt: skip


def test_what_is_to_be_mapped_is_checked() -> None:
    assert check_where({**GOOD, "more": 1}, 2, LIMIT) == GOOD
    wrong = [{**GOOD, key: weird} for key in GOOD for weird in (*WEIRD, 0, -1, 17)]
    wrong += [{k: v for k, v in GOOD.items() if k != key} for key in GOOD]
    wrong += [
        {**GOOD, "stride": 513},
        {**GOOD, "workers": 1},
        {**GOOD, "flags": "loraflow-../x"},
        {**GOOD, "source": {"kind": "broadcast", "group": "g", "nbytes": 1040}},
        {**GOOD, "source": {**GOOD["source"], "flag": {"name": "loraflow-y", "serial": 1, "numbers": 0}}},  # type: ignore[dict-item]
        {**GOOD, "source": {**GOOD["source"], "nbytes": LIMIT + 1}},  # type: ignore[dict-item]
    ]
    for bad in wrong:
        with pytest.raises(PluginError):
            check_where(bad, 2, LIMIT)

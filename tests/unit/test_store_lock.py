"""One writer per run: between stores of one process, between processes, and where file locks do not exist."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from loraflow import store_lock
from loraflow.errors import PublishError
from loraflow.policy import Policy
from loraflow.store import AdapterStore
from loraflow.store_lock import LEASE_NAME, Lease, Owner
from loraflow.store_objects import ObjectRun

HOLDER = """
import os, sys, time
from loraflow.store import AdapterStore
from loraflow.policy import Policy
store = AdapterStore(sys.argv[1], "run", retain=1, grace_period=0)
store.publish(Policy("run", store.next_version()), {"a": [b"x"]}, digest="")
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


def open_store(root: str, run_id: str = "run") -> AdapterStore:
    return AdapterStore(root, run_id, retain=1, grace_period=0)


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest):
    mode = getattr(request, "param", "plain")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), mode], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def test_a_second_writer_of_one_run_is_refused(root: str) -> None:
    with open_store(root) as first:
        with pytest.raises(PublishError, match=f"process {os.getpid()} .*this process opened before"):
            open_store(root)
        with open_store(root, "another"):
            pass
        first.publish(Policy("run", 0), {"a": [b"x"]}, digest="")
    with open_store(root) as second:
        assert second.next_version() == 1
    second.close()


def test_a_store_that_nobody_closes_gives_its_lock_back(root: str) -> None:
    open_store(root)  # dropped at once
    gc.collect()
    open_store(root).close()


def test_the_end_of_a_forked_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    code = """
import os, sys
from loraflow.store import AdapterStore
store = AdapterStore(sys.argv[1], "run", retain=1, grace_period=0)
if os.fork() == 0:
    sys.exit(0)
os.wait()
store._lock.check()
import subprocess
open_again = '''
import sys
from loraflow.store import AdapterStore
AdapterStore(sys.argv[1], "run", retain=1, grace_period=0)
'''
found = subprocess.run([sys.executable, "-c", open_again, sys.argv[1]], capture_output=True, text=True)
assert "writer already" in found.stderr, found.stderr
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_end_of_a_forked_child_leaves_the_lease_to_its_parent(backend: ObjectRun) -> None:
    lease = Lease(backend)
    lease._owner = replace(lease._owner, pid=lease._owner.pid + 1)  # as a child sees its parent's
    lease.release()
    lease.check()
    lease._owner = replace(lease._owner, pid=os.getpid())
    lease.release()
    assert backend.get(LEASE_NAME, 4096) is None


def test_a_writer_in_another_process_is_named_and_respected(tmp_path: Path, holder: subprocess.Popen) -> None:
    with pytest.raises(PublishError, match=rf"process {holder.pid} on .*another run_id"):
        open_store(str(tmp_path))


def test_a_stopped_writer_is_still_a_writer(tmp_path: Path, holder: subprocess.Popen) -> None:
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(PublishError, match="writer already"):
        open_store(str(tmp_path))


@pytest.mark.parametrize("holder", ["plain", "fork"], indirect=True)
def test_a_killed_writer_is_followed_at_once(tmp_path: Path, holder: subprocess.Popen) -> None:
    holder.kill()  # with "fork" a child of it lives on, as a data loader's worker would
    holder.wait()
    with open_store(str(tmp_path)) as store:
        assert store.recover().burnt == (Policy("run", 0),)
        assert store.next_version() == 1


def test_a_folder_without_file_locks_gets_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with open_store(str(tmp_path)):
        assert (tmp_path / "run" / LEASE_NAME).exists()
        with pytest.raises(PublishError, match="writer already"):
            open_store(str(tmp_path))
    assert not (tmp_path / "run" / LEASE_NAME).exists()


# --- leases


@pytest.fixture
def backend(tmp_path: Path) -> ObjectRun:
    return ObjectRun(fsspec.filesystem("memory"), f"/{tmp_path.name}/run")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lock, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(store_lock, "RENEW_SECONDS", 0.1)


def elsewhere() -> Owner:
    return replace(Owner.current(), host="other", machine="other-boot/pid:[1]", nonce="theirs")


def dead_here() -> Owner:
    process = subprocess.Popen(["true"])
    process.wait()
    return replace(Owner.current(), pid=process.pid, nonce="theirs")


def another_process_with_its_pid() -> Owner:
    return replace(Owner.current(), started=1, nonce="theirs")


@pytest.mark.parametrize("make", [dead_here, another_process_with_its_pid])
def test_a_lease_of_a_dead_process_is_taken_at_once(backend: ObjectRun, make) -> None:
    backend.put(LEASE_NAME, make().to_bytes())
    start = time.monotonic()
    lease = Lease(backend)
    assert time.monotonic() - start < 1
    lease.check()
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_a_damaged_lease_is_taken(backend: ObjectRun, content: bytes) -> None:
    backend.put(LEASE_NAME, content)
    Lease(backend).release()


def test_a_lease_from_elsewhere_is_watched_and_then_taken(backend: ObjectRun, quick: None) -> None:
    backend.put(LEASE_NAME, elsewhere().to_bytes())
    start = time.monotonic()
    lease = Lease(backend)
    assert 0.5 < time.monotonic() - start < 5
    lease.release()


def test_a_lease_that_is_renewed_elsewhere_is_refused(
    backend: ObjectRun, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = elsewhere()
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "current", classmethod(lambda cls: theirs))
        first = Lease(backend)
    with pytest.raises(PublishError, match=r"writer already: process \d+ on other"):
        Lease(backend)
    first.check()
    first.release()
    Lease(backend).release()


def test_a_writer_that_lost_its_lease_publishes_nothing(tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}"
    store = open_store(root)
    store.publish(Policy("run", 0), {"a": [b"x"]}, digest="")
    store._backend.put(LEASE_NAME, elsewhere().to_bytes())  # what a writer that waited long enough does
    for action in (
        lambda: store.publish(Policy("run", 1), {"a": [b"x"]}, digest=""),
        lambda: store.mark_committed(Policy("run", 0)),
        store.recover,
    ):
        with pytest.raises(PublishError, match="lost its lease to process"):
            action()
    assert store._backend.versions() == {0}
    store.close()
    assert Owner.parse(store._backend.get(LEASE_NAME, 4096) or b"") == elsewhere()


def test_losing_the_lease_in_the_middle_of_a_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"memory://{tmp_path.name}") as store:
        fs = type(store._backend.fs)
        real = fs.pipe

        def pipe(self, *args, **options):
            real(self, *args, **options)
            store._backend.put(LEASE_NAME, elsewhere().to_bytes())

        monkeypatch.setattr(fs, "pipe", pipe)
        with pytest.raises(PublishError, match="lost its lease"):
            store.publish(Policy("run", 0), {"a": [b"x"]}, digest="")
        assert store._backend._folders() == set()


def test_renewal_goes_on_and_ends_with_the_store(tmp_path: Path, quick: None) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        owner = Owner.parse(store._backend.get(LEASE_NAME, 4096) or b"")
        assert owner is not None
        if owner.renewals >= 2:
            break
        time.sleep(0.05)
    assert owner.renewals >= 2
    thread = store._lock._thread
    store.close()
    assert not thread.is_alive()
    assert store._backend.get(LEASE_NAME, 4096) is None

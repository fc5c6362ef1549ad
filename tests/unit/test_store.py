"""The life of versions: publish, commit, burn, retire, collect, recover — on a folder and on ``memory://``."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import blake3
import fsspec
import pytest

from loraflow import store as store_module
from loraflow import store_guard, store_local
from loraflow.errors import PublishError
from loraflow.policy import Policy
from loraflow.store import AdapterStore
from loraflow.store_ledger import Ledger
from loraflow.store_objects import ObjectRun

FILES = {
    "adapter_model.safetensors": [b"header", bytes(range(256)) * 64],
    "adapter_config.json": [b'{"r": 8}'],
}
DIGEST = "ab" * 32


def policy(version: int) -> Policy:
    return Policy("run", version)


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "local":
        yield str(tmp_path / "root")
    else:
        yield f"memory://{tmp_path.name}"
        fs = fsspec.filesystem("memory")
        if fs.exists(f"/{tmp_path.name}"):
            fs.rm(f"/{tmp_path.name}", recursive=True)


def open_store(root: str, **options) -> AdapterStore:
    return AdapterStore(root, "run", **{"retain": 2, "grace_period": 0.0, **options})


@pytest.fixture
def store(root: str):
    with open_store(root) as opened:
        yield opened


def listing(root: str) -> set[str]:
    fs, path = fsspec.core.url_to_fs(root)
    fs.invalidate_cache()
    found = fs.find(f"{path}/run")
    start = f"{path}/run/".lstrip("/")
    return {name.lstrip("/").removeprefix(start) for name in found}


def poke(root: str, name: str, content: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(root)
    fs.makedirs(f"{path}/run/{name}".rsplit("/", 1)[0], exist_ok=True)
    fs.pipe_file(f"{path}/run/{name}", content)


def version_files(root: str, version: int) -> set[str]:
    return {name for name in listing(root) if name.startswith(f"v{version}/")}


def crash(store: AdapterStore) -> None:
    """What the operating system does for a process that dies, or a day of silence for a lease."""
    store._lock.release()


def test_published_content_is_what_was_given(store: AdapterStore, root: str) -> None:
    published = store.publish(policy(0), FILES, digest=DIGEST)
    expected = {name: b"".join(parts) for name, parts in FILES.items()}
    assert store.read(policy(0)) == expected
    assert published.bytes == sum(map(len, expected.values()))
    assert published.digest == DIGEST
    assert {"write", "publish"} <= set(published.phases_ms)
    fs, path = fsspec.core.url_to_fs(published.path)
    assert {name: fs.cat_file(f"{path}/{name}") for name in expected} == expected
    manifest = json.loads(fs.cat_file(f"{path}/manifest.json"))
    assert (manifest["run_id"], manifest["version"], manifest["digest"]) == ("run", 0, DIGEST)
    assert [(f["name"], f["size"], f["blake3"]) for f in manifest["files"]] == [
        (name, len(expected[name]), blake3.blake3(expected[name]).hexdigest()) for name in sorted(expected)
    ]


def test_parts_may_be_any_contiguous_buffer(store: AdapterStore) -> None:
    floats = memoryview(bytearray(range(24))).cast("f", (2, 3))
    store.publish(policy(0), {"a": [floats, b"", bytearray(b"tail")], "empty": []}, digest=DIGEST)
    assert store.read(policy(0)) == {"a": bytes(range(24)) + b"tail", "empty": b""}


def test_many_parts_and_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(
        store_local.os, "writev", lambda fd, parts: real(fd, [b"".join(parts)[:1000]])
    )  # a file system may take less than it was given
    parts = [bytes([n % 251]) * (n % 7) for n in range(2000)]
    with open_store(str(tmp_path)) as store:
        store.publish(policy(0), {"a": parts}, digest=DIGEST)
        assert store.read(policy(0))["a"] == b"".join(parts)


@pytest.mark.parametrize("outcome", ["committed", "burnt", "failed", "collected", "undecided"])
def test_a_name_is_never_used_twice(root: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(root, retain=1) as store:
        assert store.next_version() == 0
        if outcome == "failed":
            with monkeypatch.context() as patch:
                patch.setattr(type(store._backend), "write", _raise(OSError(errno.EIO, "broken")))
                with pytest.raises(PublishError, match="broken"):
                    store.publish(policy(0), FILES, digest=DIGEST)
        else:
            store.publish(policy(0), FILES, digest=DIGEST)
        if outcome == "committed":
            store.mark_committed(policy(0))
        if outcome in {"burnt", "collected"}:
            store.mark_burnt(policy(0))
        if outcome == "collected":
            assert store.collect() == []
            store.retire(policy(0))
            assert store.collect() == [policy(0)]
        assert store.next_version() == 1
        with pytest.raises(PublishError, match="used before"):
            store.publish(policy(0), FILES, digest=DIGEST)
    with open_store(root) as later:
        later.recover()
        assert later.next_version() == 1
        with pytest.raises(PublishError, match="used before"):
            later.publish(policy(0), FILES, digest=DIGEST)
        later.publish(policy(7), FILES, digest=DIGEST)
        assert later.next_version() == 8


def _raise(error: BaseException):
    def raising(*args, **options):
        raise error

    return raising


def test_a_burnt_name_that_was_never_published_is_used_up(root: str) -> None:
    with open_store(root) as store:
        store.mark_burnt(policy(4))
    with open_store(root) as store:
        assert store.next_version() == 5


def test_a_reserved_name_is_published_once_and_by_this_process_only(root: str) -> None:
    with open_store(root) as store:
        store.reserve(policy(0))
        store.reserve(policy(1))
        store.reserve(policy(1))
        store.publish(policy(0), FILES, digest=DIGEST)
        with pytest.raises(PublishError, match="used before"):
            store.reserve(policy(0))
        with pytest.raises(PublishError, match="used before"):
            store.publish(policy(0), FILES, digest=DIGEST)
        assert store.next_version() == 2
    with open_store(root) as later:
        assert later.next_version() == 2
        with pytest.raises(PublishError, match="used before"):
            later.publish(policy(1), FILES, digest=DIGEST)


def test_an_announced_version_may_be_committed_before_its_files_are_there(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_guard, "VISIBILITY_SECONDS", 0.05)
    with open_store(root) as store:
        commit(store, range(1))
        store.announce(policy(1))
        with pytest.raises(PublishError, match="used before"):
            store.announce(policy(1))
        store.mark_committed(policy(1))
        store.publish(policy(1), FILES, digest=DIGEST)
        assert store.committed() == policy(1)
        store.verify(policy(1))
        store.announce(policy(2))
        store.mark_committed(policy(2))
        crash(store)  # before its files were written
        with open_store(root) as later:
            found = later.recover()
            assert found.committed == policy(1)
            assert later.next_version() > 2
            with pytest.raises(PublishError, match="used before"):
                later.announce(policy(2))


def test_announcing_writes_once_in_a_while_and_a_commit_with_the_files(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root) as store:
        written: list[str] = []
        put = type(store._backend).put
        monkeypatch.setattr(
            type(store._backend), "put", lambda self, name, document: (written.append(name), put(self, name, document))
        )
        store.announce(policy(0))  # uses up this name and those that follow
        assert len(written) == 1
        store.mark_committed(policy(0))
        for version in range(1, 10):
            store.announce(policy(version))
            store.mark_committed(policy(version))
        assert len(written) == 1
        assert (store.committed(), store.next_version()) == (policy(9), 10)
        for version in range(10):
            store.publish(policy(version), FILES, digest=DIGEST)
        store.announce(policy(40))  # beyond what is used up: stored before it may travel
        stored = Ledger.parse(store._backend.get("ledger.json", 1 << 20))
        assert stored.next_version > 40
        crash(store)
        with open_store(root) as later:
            assert later.recover().committed == policy(9)
            for version in (9, 10, 40):
                with pytest.raises(PublishError, match="used before"):
                    later.announce(policy(version))
            later.announce(policy(later.next_version()))


def test_a_commit_during_publishing_is_stored_with_the_files(root: str) -> None:
    with open_store(root) as store:
        store.announce(policy(0))

        def digest() -> str:
            store.mark_committed(policy(0))  # while the files are being written
            return DIGEST

        assert store.publish(policy(0), FILES, digest=digest).digest == DIGEST
        crash(store)
        with open_store(root) as later:
            assert later.recover().committed == policy(0)
            assert later.manifest(policy(0)).digest == DIGEST


def test_an_announcement_that_could_not_be_stored_is_repeated(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(root) as store:
        monkeypatch.setattr(type(store._backend), "put", lambda *_: (_ for _ in ()).throw(OSError(5, "no")))
        for _ in range(2):  # it does not count as used up because a write was tried
            with pytest.raises(PublishError):
                store.announce(policy(0))
        monkeypatch.undo()
        store.announce(policy(0))
        assert Ledger.parse(store._backend.get("ledger.json", 1 << 20)).next_version > 0


def test_an_announced_version_can_be_burnt_before_its_files_are_there(root: str) -> None:
    with open_store(root) as store:
        store.announce(policy(0))
        store.mark_burnt(policy(0))
        store.retire(policy(0))
        with pytest.raises(PublishError, match="burnt"):
            store.mark_committed(policy(0))
        assert store.collect() == [policy(0)]


def test_an_announced_version_that_could_not_be_written_is_written_later(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root) as store:
        store.announce(policy(0))
        store.mark_committed(policy(0))
        with monkeypatch.context() as patch:
            patch.setattr(store._backend, "write", failing_write)
            with pytest.raises(PublishError):
                store.publish(policy(0), FILES, digest=DIGEST)
        assert store.committed() == policy(0)
        store.publish(policy(0), FILES, digest=DIGEST)
        store.verify(policy(0))
        with pytest.raises(PublishError, match="was used before"):
            store.publish(policy(0), FILES, digest=DIGEST)
    with open_store(root) as store:
        assert store.recover().committed == policy(0)


def test_a_ledger_that_could_not_follow_an_announced_version_follows_when_that_is_repeated(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full just then: the files are there, and the next version must not wait for them for ever."""
    with open_store(root) as store:
        store.announce(policy(0))
        with monkeypatch.context() as patch:
            write = store._backend.write

            def last_that_fits(*args: Any) -> dict[str, float]:
                phases = write(*args)
                store.mark_committed(policy(0))
                patch.setattr(store._backend, "put", failing_write)
                return phases

            patch.setattr(store._backend, "write", last_that_fits)
            with pytest.raises(PublishError, match="the store is away"):
                store.publish(policy(0), FILES, digest=DIGEST)
        store.publish(policy(0), FILES, digest=DIGEST)
        with pytest.raises(PublishError, match="was used before"):
            store.publish(policy(0), FILES, digest=DIGEST)
    with open_store(root) as store:
        assert store.recover().committed == policy(0)


def failing_write(*args: object) -> None:
    raise OSError(errno.EIO, "the store is away")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "folder", "added"])
def test_a_damaged_version_is_mended_with_its_own_content(
    root: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraflow.store_guard.VISIBILITY_SECONDS", 0.2)
    with open_store(root) as store:
        store.publish(policy(0), FILES, digest=DIGEST)
        with pytest.raises(PublishError):
            store.mend(policy(1), FILES, digest=DIGEST)
        store.mark_committed(policy(0))
        assert store.mend(policy(0), FILES, digest=DIGEST) is False
        fs, path = fsspec.core.url_to_fs(f"{root}/run/v0")
        name = "manifest.json" if damage == "manifest" else "adapter_model.safetensors"
        content = fs.cat_file(f"{path}/{name}")
        if damage == "folder":
            fs.rm(path, recursive=True)
        elif damage == "remove":
            fs.rm(f"{path}/{name}")
        elif damage == "added":
            fs.pipe_file(f"{path}/adapter_model.bin", b"pickle")
        else:
            fs.pipe_file(f"{path}/{name}", content[:-9] if damage == "cut" else content[:-9] + b"!" + content[-8:])
        assert store.mend(policy(0), FILES, digest=DIGEST) is True
        store.verify(policy(0))
        assert store.read(policy(0)) == {file: b"".join(parts) for file, parts in FILES.items()}
        assert store.committed() == policy(0)


def test_a_full_disk_does_not_keep_versions_from_being_freed(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger cannot be written either; removing files is what makes room for it."""
    with open_store(root, retain=1) as store:
        for version in range(3):
            store.publish(policy(version), FILES, digest=DIGEST)
        store.mark_committed(policy(1))
        real = store._backend.put

        def full(name: str, document: bytes) -> None:
            if 0 in store._backend.versions():
                raise OSError(errno.ENOSPC, "No space left on device")
            real(name, document)

        monkeypatch.setattr(store._backend, "put", full)
        store.mark_burnt(policy(0))
        store.retire(policy(0))
        with pytest.raises(PublishError):
            store.mark_committed(policy(2))  # this must last, or not be
        assert store.committed() == policy(1)
        assert store.collect() == [policy(0)]
        store.mark_committed(policy(2))
    with open_store(root) as store:
        assert store.recover().committed == policy(2)


def test_credentials_and_endpoint_are_read_when_a_store_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec keeps file systems by their arguments: the second store would get the first one's endpoint."""
    pytest.importorskip("s3fs")
    found = []
    for endpoint in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        backend = store_module._open("s3://bucket/runs", "run", None)
        assert isinstance(backend, ObjectRun)
        backend.fs.connect()
        found.append(backend.fs.s3.meta.endpoint_url)
    assert found == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def test_a_foreign_policy_is_refused(store: AdapterStore) -> None:
    with pytest.raises(PublishError, match="not of this run"):
        store.publish(Policy("other", 0), FILES, digest=DIGEST)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "manifest.json", "a\nb", "a\\b", "x" * 129])
def test_bad_file_names_are_refused_before_anything_is_written(store: AdapterStore, root: str, name: str) -> None:
    before = listing(root)
    with pytest.raises(PublishError, match="file names"):
        store.publish(policy(0), {name: [b"x"]}, digest=DIGEST)
    assert listing(root) == before


def test_commit_and_burn_exclude_each_other(store: AdapterStore) -> None:
    for version in (0, 1):
        store.publish(policy(version), FILES, digest=DIGEST)
    store.mark_committed(policy(0))
    store.mark_committed(policy(0))
    store.mark_burnt(policy(1))
    with pytest.raises(PublishError, match="committed"):
        store.mark_burnt(policy(0))
    with pytest.raises(PublishError, match="burnt"):
        store.mark_committed(policy(1))
    with pytest.raises(PublishError, match="not in the store"):
        store.mark_committed(policy(2))
    assert store.committed() == policy(0)


def test_marks_survive_the_process(root: str) -> None:
    with open_store(root) as store:
        for version in range(3):
            store.publish(policy(version), FILES, digest=DIGEST)
        store.mark_committed(policy(0))
        store.mark_committed(policy(1))
        store.mark_burnt(policy(2))
        crash(store)
        with open_store(root) as later:
            assert later.committed() == policy(1)
            with pytest.raises(PublishError, match="burnt"):
                later.mark_committed(policy(2))


# --- rule 7


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(store_module.time, "monotonic", made)
    return made


def commit(store: AdapterStore, versions: range) -> None:
    for version in versions:
        store.publish(policy(version), FILES, digest=DIGEST)
        store.mark_committed(policy(version))


def test_collect_keeps_what_is_in_use_young_or_retained(root: str, clock: Clock) -> None:
    with open_store(root, grace_period=30.0, retain=2) as store:
        commit(store, range(5))
        for version in (0, 2, 3, 4):  # 1 is still in use
            store.retire(policy(version))
        clock.now += 29.9
        assert store.collect() == []
        clock.now += 0.2
        assert store.collect() == [policy(0), policy(2)]
        assert version_files(root, 0) == set()
        assert version_files(root, 1) != set()
        for version in (1, 3, 4):
            store.verify(policy(version))
        store.retire(policy(1))
        assert store.collect() == []
        clock.now += 30.0
        assert store.collect() == [policy(1)]
        assert store.collect() == []


def test_retiring_twice_does_not_restart_the_grace_period(root: str, clock: Clock) -> None:
    with open_store(root, grace_period=30.0, retain=1) as store:
        commit(store, range(2))
        store.retire(policy(0))
        clock.now += 20
        store.retire(policy(0))
        clock.now += 11
        assert store.collect() == [policy(0)]


def test_a_jump_of_the_wall_clock_deletes_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(root, grace_period=30.0, retain=1) as store:
        commit(store, range(2))
        store.retire(policy(0))
        real = time.time()
        for jump in (1e9, -1e8):
            monkeypatch.setattr(time, "time", lambda jump=jump: real + jump)
            assert store.collect() == []
    with open_store(root, grace_period=30.0, retain=1) as later:  # nor does a restart after the jump
        assert later.collect() == []


def test_a_restart_starts_the_grace_period_again(root: str, clock: Clock) -> None:
    with open_store(root, grace_period=30.0, retain=1) as store:
        commit(store, range(2))
        store.retire(policy(0))
    clock.now -= 500  # the new process may be on a machine that was booted later
    with open_store(root, grace_period=30.0, retain=1) as later:
        clock.now += 29
        assert later.collect() == []
        clock.now += 2
        assert later.collect() == [policy(0)]


def test_burnt_versions_go_once_they_are_retired(root: str, clock: Clock) -> None:
    with open_store(root, grace_period=30.0, retain=1) as store:
        commit(store, range(1))
        store.publish(policy(1), FILES, digest=DIGEST)
        store.mark_burnt(policy(1))
        clock.now += 31
        assert store.collect() == []  # a server may still hold it
        store.retire(policy(1))
        clock.now += 29
        assert store.collect() == []
        clock.now += 2
        assert store.collect() == [policy(1)]
        assert store.committed() == policy(0)


def test_disk_use_is_bounded_by_retention(root: str) -> None:
    with open_store(root, retain=3) as store:
        for version in range(50):
            commit(store, range(version, version + 1))
            if version >= 3:
                store.retire(policy(version - 3))
            store.collect()
            folders = {name.split("/")[0] for name in listing(root) if name.startswith("v")}
            assert len(folders) <= 3
        documents = [name for name in listing(root) if not name.startswith("v")]
        assert len(documents) <= 3
        assert len(store._ledger.to_bytes()) < 1000


# --- crashes


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["writev", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("nth", range(1, 8))
def test_a_failure_at_any_step_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, call: str, nth: int
) -> None:
    with open_store(str(tmp_path)) as store:
        commit(store, range(1))
        before, count = listing(str(tmp_path)), 0
        owner = os if call in {"writev", "fsync"} else Path
        real = getattr(owner, call)

        def failing(*args, **options):
            nonlocal count
            count += 1
            if count == nth:
                raise error
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, failing)
            try:
                store.publish(policy(1), FILES, digest=DIGEST)
            except (PublishError, KeyboardInterrupt):
                assert listing(str(tmp_path)) == before
                assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
            else:
                assert count < nth
        store.verify(policy(0))
        assert store.committed() == policy(0)
        commit(store, range(2, 3))


def test_full_disk_says_what_to_do(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(store._backend), "write", _raise(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(PublishError, match="adapter_root to a larger"):
        store.publish(policy(0), FILES, digest=DIGEST)


def test_space_is_checked_before_writing(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with open_store(str(tmp_path), min_free_bytes=free + (1 << 30)) as store:
        before = listing(str(tmp_path))
        with pytest.raises(PublishError, match=r"\d+ bytes are missing") as caught:
            store.publish(policy(0), FILES, digest=DIGEST)
        assert "max_staleness" in str(caught.value)
        assert listing(str(tmp_path)) == before
        assert store.next_version() == 0


def test_recover_after_a_crash_while_writing(root: str) -> None:
    with open_store(root) as store:
        commit(store, range(2))
        store.publish(policy(2), FILES, digest=DIGEST)  # never decided
        store._update(lambda ledger: ledger.enter(3))  # died before, or while, writing 3
        poke(root, "v3/adapter_config.json", b"{")
        if store._backend.local:
            poke(root, ".staging-0123/adapter_config.json", b"{")
            poke(root, ".trash-0123/adapter_config.json", b"{")
            poke(root, ".draft-0123", b"{")
        crash(store)
        with open_store(root) as later:
            found = later.recover()
            assert found.committed == policy(1)
            assert found.live == (policy(0), policy(1), policy(2))
            assert found.burnt == (policy(2),)
            assert found.lost == ()
            assert "v3" in found.removed
            assert later.next_version() == 4
            assert not [name for name in listing(root) if name.startswith((".", "v3"))]
            for version in range(3):
                later.verify(policy(version))
            assert later.collect() == []  # servers may have it loaded: the caller retires it
            assert later.recover().burnt == (policy(2),)
            later.retire(policy(2))
            assert later.collect() == [policy(2)]
            assert later.recover().removed == ()


def test_recover_touches_other_runs_never(root: str) -> None:
    with AdapterStore(root, "other", retain=1, grace_period=0) as other, open_store(root) as store:
        other.publish(Policy("other", 0), FILES, digest=DIGEST)
        store.recover()
        store.collect()
        other.verify(Policy("other", 0))


def test_recover_reports_lost_versions(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_guard, "VISIBILITY_SECONDS", 0.05)
    with open_store(root) as store:
        commit(store, range(2))
        store._backend.remove(1)
        found = store.recover()
        assert found.committed == policy(0)
        assert found.lost == (policy(1),)
        assert store.next_version() == 2


def test_a_version_that_is_visible_only_later_is_not_lost(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(root) as store:
        commit(store, range(2))
        backend = type(store._backend)
        real = backend.versions
        monkeypatch.setattr(backend, "versions", lambda self: real(self) - {1})
        found = store.recover()
        assert (found.committed, found.lost) == (policy(1), ())
        store.verify(policy(1))


def test_names_in_the_folder_are_used_up_even_without_a_ledger(root: str) -> None:
    with open_store(root) as store:
        commit(store, range(3))
        store._backend.drop("ledger.json")
        crash(store)
        with open_store(root) as later:
            assert later.next_version() == 3
            assert later.recover().burnt == (policy(0), policy(1), policy(2))


def test_a_damaged_ledger_is_refused(root: str) -> None:
    with open_store(root) as store:
        commit(store, range(1))
    poke(root, "ledger.json", b'{"format":1}')
    with pytest.raises(PublishError, match=r"ledger.json is damaged.*new run_id"):
        open_store(root)
    poke(root, "ledger.json", b"")
    with pytest.raises(PublishError, match="damaged"):
        open_store(root)
    poke(root, "ledger.json", Ledger("other", 3).to_bytes())
    with pytest.raises(PublishError, match="not of this run"):
        open_store(root)


def test_one_thread_publishes_while_another_retires_and_collects(root: str) -> None:
    total, errors = 60, []
    with open_store(root, retain=2) as store:

        def cleaner() -> None:
            try:
                while not done.wait(0.001):
                    newest = store.committed()
                    for version in range(0 if newest is None else newest.version - 1):
                        store.retire(policy(version))
                    store.collect()
                    if newest is not None:
                        store.verify(newest)
            except Exception as error:
                errors.append(error)

        done = threading.Event()
        thread = threading.Thread(target=cleaner)
        thread.start()
        try:
            commit(store, range(total))
        finally:
            done.set()
            thread.join()
        assert errors == []
        assert store.committed() == policy(total - 1)
        store.verify(policy(total - 2))
        assert Ledger.parse(store._backend.get("ledger.json", 1 << 20)) == store._ledger


# --- reading


def damage(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "flipped": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
        "truncated": content[:-1],
        "longer": content + b"\0",
        "emptied": b"",
    }[how]


@pytest.mark.parametrize("how", ["flipped", "truncated", "longer", "emptied"])
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_every_change_is_noticed_and_named(store: AdapterStore, root: str, name: str, how: str) -> None:
    store.publish(policy(0), FILES, digest=DIGEST)
    fs, path = fsspec.core.url_to_fs(store.path(policy(0)))
    poke(root, f"v0/{name}", damage(fs.cat_file(f"{path}/{name}"), how))
    with pytest.raises(PublishError, match=name):
        store.verify(policy(0))
    with pytest.raises(PublishError, match=name):
        store.read(policy(0))


def test_missing_added_and_swapped_files(store: AdapterStore, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_guard, "VISIBILITY_SECONDS", 0.05)
    commit(store, range(3))
    poke(root, "v0/adapter_model.bin", b"pickle")
    with pytest.raises(PublishError, match=r"adapter_model\.bin"):
        store.verify(policy(0))
    fs, path = fsspec.core.url_to_fs(root)
    fs.rm_file(f"{path}/run/v1/adapter_config.json")
    with pytest.raises(PublishError, match=r"v1/adapter_config\.json"):
        store.verify(policy(1))
    poke(root, "v2/manifest.json", fs.cat_file(f"{path}/run/v0/manifest.json"))
    with pytest.raises(PublishError, match="another version"):
        store.verify(policy(2))
    with pytest.raises(PublishError, match="v9"):
        store.verify(policy(9))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        store.publish(policy(0), FILES, digest=DIGEST)
        config = tmp_path / "run/v0/adapter_config.json"
        secret = tmp_path / "secret"
        config.rename(secret)
        config.symlink_to(secret)
        with pytest.raises(PublishError, match="adapter_config"):
            store.verify(policy(0))


def test_a_file_that_appears_late_is_waited_for(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(policy(0), FILES, digest=DIGEST)
    backend = type(store._backend)
    real, missing = backend.read, {"manifest.json": 2, "adapter_model.safetensors": 3}

    def lagging(self, version: int, name: str, limit: int) -> bytes:
        if missing.get(name, 0) > 0:
            missing[name] -= 1
            raise FileNotFoundError(errno.ENOENT, "not visible yet", name)
        return real(self, version, name, limit)

    monkeypatch.setattr(backend, "read", lagging)
    store.verify(policy(0))
    assert set(missing.values()) == {0}


def test_waiting_for_a_file_ends(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_guard, "VISIBILITY_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(PublishError, match="v3"):
        store.read(policy(3))
    assert time.monotonic() - start < 2


# --- objects


def test_objects_are_written_before_the_manifest_and_removed_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, calls = fsspec.filesystem("memory"), []
    real = {name: getattr(type(fs), name) for name in ("pipe_file", "rm_file")}
    for method, original in real.items():

        def recording(self, path, *args, method=method, original=original, **options):
            calls.append((method, path.rsplit("/", 1)[-1]))
            return original(self, path, *args, **options)

        monkeypatch.setattr(type(fs), method, recording)
    with open_store(f"memory://{tmp_path.name}") as store:
        store.publish(policy(0), FILES, digest=DIGEST)
        written = [name for method, name in calls if method == "pipe_file" and not name.startswith(("l", "w"))]
        assert sorted(written[:2]) == sorted(FILES)
        assert written[2:] == ["manifest.json"]
        calls.clear()
        store.retire(policy(0))
        store.collect()
        removed = [name for method, name in calls if method == "rm_file"]
        assert removed[0] == "manifest.json"


def test_errors_of_a_store_library_become_publish_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        pass

    with open_store(f"memory://{tmp_path.name}") as store:
        fs = store._backend.fs
        assert isinstance(store._backend, ObjectRun)
        monkeypatch.setattr(type(fs), "pipe", _raise(ClientError("403 Forbidden")))
        with pytest.raises(PublishError, match="403 Forbidden"):
            store.publish(policy(0), FILES, digest=DIGEST)
        assert version_files(f"memory://{tmp_path.name}", 0) == set()


# --- places


def test_a_file_url_is_the_folder(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/root") as store:
        assert store.publish(policy(0), FILES, digest=DIGEST).path == str(tmp_path / "root/run/v0")


def test_a_file_system_that_cannot_sync_folders_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with open_store(str(tmp_path)) as store:
        commit(store, range(1))
        store.verify(policy(0))


def test_a_real_full_disk(small_disk: Path) -> None:
    with open_store(str(small_disk)) as store:
        commit(store, range(1))
        free = shutil.disk_usage(small_disk).free
        real = shutil.disk_usage

        class Roomy:
            free = 1 << 40

        shutil.disk_usage = lambda path: Roomy  # another program fills it after the check
        try:
            with pytest.raises(PublishError, match="No space left") as caught:
                store.publish(policy(1), {"adapter_model.safetensors": [b"x" * (free + 8192)]}, digest=DIGEST)
        finally:
            shutil.disk_usage = real
        assert "adapter_root" in str(caught.value)
        assert sorted(path.name for path in (small_disk / "run").iterdir()) == ["ledger.json", "v0", "writer.lock"]
        store.verify(policy(0))
        commit(store, range(2, 3))


def test_a_real_read_only_disk(small_disk: Path) -> None:
    with open_store(str(small_disk)) as store:
        commit(store, range(1))
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=False).returncode:
        pytest.skip("remounting is not permitted")
    with pytest.raises(PublishError, match="read-only"):
        open_store(str(small_disk))


@pytest.fixture
def small_disk(tmp_path: Path):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=False, capture_output=True
    ).returncode:
        pytest.skip("mounting is not permitted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_root_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="cannot open the store"):
        open_store(str(tmp_path / "file"))


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with open_store(str(tmp_path)) as store:
            store.publish(policy(0), FILES, digest=DIGEST)
    finally:
        os.umask(before)
    folder = tmp_path / "run/v0"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_clear_removes_what_is_over_and_keeps_the_names(tmp_path: Path) -> None:
    with AdapterStore(str(tmp_path), "run", retain=2, grace_period=1000.0) as store:
        for version in range(4):
            store.publish(Policy("run", version), {"a": [b"x"]}, digest="d")
            if version != 3:
                store.mark_committed(Policy("run", version))
        assert store.clear(keep=1) == [Policy("run", 0), Policy("run", 1), Policy("run", 3)]
        assert store.committed() == Policy("run", 2)
        store.verify(Policy("run", 2))
        assert store.clear() == [Policy("run", 2)]
        assert store.committed() is None
    with AdapterStore(str(tmp_path), "run", retain=2, grace_period=1000.0) as store:
        assert store.next_version() == 4


@pytest.mark.parametrize("odd", ["a[b]c", "a*", "a?c", "s p", "ü%20%", "a#b"])
def test_odd_characters_in_a_root_are_no_patterns(tmp_path: Path, odd: str) -> None:
    """Removing what this run retired leaves alone what a pattern of the same letters would match."""
    roots = [f"memory://{tmp_path.name}/{name}" for name in (odd, "abc", "ab", "ac")]
    with open_store(roots[1]) as bystander, open_store(roots[2]) as another, open_store(roots[3]) as third:
        for store in (bystander, another, third):
            store.publish(policy(1), FILES, digest=DIGEST)
        with open_store(roots[0]) as own:
            for version in range(12):
                own.publish(policy(version), FILES, digest=DIGEST)
            own.clear()
            assert version_files(roots[0], 1) == version_files(roots[0], 10) == set()
        for store in (bystander, another, third):
            store.verify(policy(1))


def test_a_version_that_is_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "manifest.json").write_text("of somebody else")
    with open_store(str(tmp_path / "root")) as store:
        (Path(store.path()) / "v3").symlink_to(precious)
        store.clear()
        assert not [path.name for path in Path(store.path()).iterdir() if path.name.startswith(("v", ".trash"))]
    assert (precious / "manifest.json").read_text() == "of somebody else"

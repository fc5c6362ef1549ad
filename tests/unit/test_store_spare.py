"""Pages that are there before their content: on a real tmpfs, and what happens where there is none."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraflow import store_local, store_spare
from loraflow.errors import PublishError
from loraflow.policy import Policy
from loraflow.store import AdapterStore
from loraflow.store_spare import Pages, Spare, in_memory

SHM = Path("/dev/shm")
MB = 1 << 20

pytestmark = pytest.mark.skipif(not SHM.is_dir() or not in_memory(SHM), reason="no tmpfs here")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = SHM / f"loraflow-test-{uuid.uuid4().hex}"
    made.mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)


def content(seed: int, size: int) -> bytes:
    return bytes([seed]) * 8 + bytes(range(256)) * (size // 256) + bytes(size % 256)


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def taken_from(spare: Spare) -> Pages:
    pages = spare.take(MB)
    assert pages is not None
    return pages


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_versions_through_a_spare_hold_their_own_content_in_files_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Pages | None] = []
    take = Spare.take
    monkeypatch.setattr(Spare, "take", lambda self, size: (taken.append(take(self, size)), taken[-1])[1])
    before = descriptors()
    with AdapterStore(str(folder), "run", retain=3, grace_period=0.0) as store:
        whole = [content(seed, 2 * MB) for seed in range(3)]
        for version, data in enumerate(whole):
            files = {"adapter_model.safetensors": [data[:100], memoryview(data)[100:]], "adapter_config.json": [b"{}"]}
            store.publish(Policy("run", version), files, digest="d")
            store.prepare(len(data))
        paths = [folder / "run" / f"v{version}" / "adapter_model.safetensors" for version in range(3)]
        assert [path.read_bytes() for path in paths] == whole
        assert len({path.stat().st_ino for path in paths}) == 3
        assert all(path.stat().st_nlink == 1 for path in paths)
        for version in range(3):
            store.verify(Policy("run", version))
        assert [taken[0] is None, *(pages is not None for pages in taken[2::2])] == [True, True, True]
        assert taken[1::2] == [None] * 3  # small files have none
    assert descriptors() <= before


def test_modes_follow_the_umask(folder: Path) -> None:
    spare = Spare(folder)
    spare.prepare(MB)
    store_local._write(folder / "x", [memoryview(b"a" * MB)], taken_from(spare))
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((folder / "x").stat().st_mode) == 0o666 & ~umask


def test_a_name_that_is_there_is_not_written_over(folder: Path) -> None:
    (folder / "x").write_bytes(b"mine")
    spare = Spare(folder)
    spare.prepare(MB)
    pages = taken_from(spare)
    with pytest.raises(FileExistsError):
        store_local._write(folder / "x", [memoryview(b"a" * MB)], pages)
    assert (folder / "x").read_bytes() == b"mine"
    assert not is_open(pages.descriptor)


def test_parts_of_any_size_are_written_one_after_the_other(folder: Path) -> None:
    """Small and read-only ones, and large ones that torch copies; a file ends in the middle of a page."""
    parts = [b"header", content(1, 2 * MB), bytearray(content(2, MB + 3)), bytearray(b"tail"), b""]
    whole = b"".join(parts)
    spare = Spare(folder)
    spare.prepare(len(whole))
    pages = spare.take(len(whole))
    assert pages is not None
    store_local._write(folder / "x", [memoryview(part) for part in parts], pages)
    assert (folder / "x").read_bytes() == whole
    assert not is_open(pages.descriptor)
    assert pages._memory is None  # nothing can be written to it any more
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_it_is_allocated_ahead_and_given_back(folder: Path) -> None:
    spare = Spare(folder)
    spare.prepare(16 * MB)
    spare._wait()
    assert spare._pages is not None
    descriptor = spare._pages.descriptor
    assert spare.bytes == 16 * MB
    assert os.fstat(descriptor).st_blocks * 512 == 16 * MB
    assert list(folder.iterdir()) == []  # it has no name
    spare.prepare(16 * MB)
    assert spare._pages.descriptor == descriptor  # one is enough
    assert spare.take(32 * MB) is None  # another size: it is let go
    assert spare.bytes == 0
    assert not is_open(descriptor)
    spare.prepare(16 * MB)
    spare.prepare(2 * MB)
    assert spare.bytes == 2 * MB
    spare._wait()
    assert spare._pages is not None
    descriptor = spare._pages.descriptor
    assert os.fstat(descriptor).st_blocks * 512 == 2 * MB
    del spare  # nobody closed it
    assert not is_open(descriptor)


def test_a_small_file_leaves_it_where_it_is(folder: Path) -> None:
    spare = Spare(folder)
    spare.prepare(1000)
    assert spare.bytes == 0
    spare.prepare(MB)
    assert spare.take(1000) is None
    assert spare.bytes == MB
    spare.close()
    spare.close()
    assert spare.bytes == 0


def test_one_that_found_no_room_is_not_written_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    spare = Spare(folder)
    before = descriptors()
    monkeypatch.setattr(store_spare.os, "posix_fallocate", full)
    spare.prepare(MB)
    assert spare.take(MB) is None
    assert spare.bytes == 0
    assert descriptors() <= before


def test_space_that_it_holds_counts_as_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AdapterStore(str(folder), "run", retain=1, grace_period=0.0, min_free_bytes=MB) as store:
        left = [9 * MB]
        usage = lambda _: shutil._ntuple_diskusage(100 * MB, 0, left[0])  # noqa: E731
        monkeypatch.setattr(store_local.shutil, "disk_usage", usage)
        store.prepare(4 * MB)
        left[0] -= 4 * MB
        assert store._backend.free_bytes() == 9 * MB
        store.publish(Policy("run", 0), {"a": [content(0, 4 * MB)[: 4 * MB]]}, digest="d")
        store.prepare(4 * MB)  # 5 are left: not as much again beside it
        assert store._backend.free_bytes() == 5 * MB
        with pytest.raises(PublishError, match="no space"):
            store.publish(Policy("run", 1), {"a": [content(0, 5 * MB)]}, digest="d")


def test_a_disk_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_spare, "_MOUNTS", tmp_path / "mountinfo")
    assert not in_memory(SHM)  # the system does not tell
    device = SHM.stat().st_dev
    line = f"1 2 {os.major(device)}:{os.minor(device)} / /x rw shared:1 - ext4 /dev/y rw\n"
    (tmp_path / "mountinfo").write_text(line)
    assert not in_memory(SHM)
    spare = Spare(SHM)
    spare.prepare(MB)
    assert spare.bytes == 0

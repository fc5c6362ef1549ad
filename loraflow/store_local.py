"""`LocalRun`: a run's versions in a folder of a local, memory-backed or network file system."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from typing_extensions import override

from loraflow.store_backend import VERSION, Backend, Sealer, elapsed_ms, hash_files
from loraflow.store_manifest import MANIFEST_NAME
from loraflow.store_spare import Pages, Spare

__all__ = ["LocalRun"]

_STAGING, _TRASH, _DRAFT = ".staging-", ".trash-", ".draft-"
_PARTS_PER_CALL = 512


class LocalRun(Backend):
    """A run in a folder of a local, memory-backed or network file system. Modes of new files follow the umask."""

    local = True

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._spare = Spare(folder)

    @override
    def location(self, version: int | None = None) -> str:
        return str(self.folder if version is None else self.folder / f"v{version}")

    @override
    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.folder).free + self._spare.bytes

    @override
    def prepare(self, size: int) -> None:
        self._spare.prepare(size)

    @override
    def close(self) -> None:
        self._spare.close()

    @override
    def get(self, name: str, limit: int) -> bytes | None:
        with suppress(FileNotFoundError):
            return _read(self.folder / name, limit)
        return None

    @override
    def put(self, name: str, document: bytes) -> None:
        draft = self._hidden(_DRAFT)
        try:
            _write(draft, [memoryview(document)])
            draft.replace(self.folder / name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync_folder(self.folder)

    @override
    def create(self, name: str, document: bytes) -> bool:
        draft = self._hidden(_DRAFT)
        try:
            _write(draft, [memoryview(document)])
            (self.folder / name).hardlink_to(draft)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(self.folder)
        return True

    @override
    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    @override
    def versions(self) -> set[int]:
        found = (VERSION.fullmatch(path.name) for path in self.folder.iterdir())
        return {int(match[1]) for match in found if match and (self.folder / match[0] / MANIFEST_NAME).is_file()}

    @override
    def write(self, version: int, files: Mapping[str, Sequence[memoryview]], sealer: Sealer) -> dict[str, float]:
        target, staging = self.folder / f"v{version}", self._hidden(_STAGING)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "a version folder is never reused", str(target))
        start = time.perf_counter()
        phases = {}
        try:
            staging.mkdir()
            with ThreadPoolExecutor(1, "loraflow-hash") as hashing:
                entries = hashing.submit(hash_files, files)
                for name, parts in files.items():
                    _write(staging / name, parts, self._spare.take(sum(part.nbytes for part in parts)))
                phases["write"] = elapsed_ms(start)
                document = sealer(entries.result())
            phases["hash_wait"] = elapsed_ms(start) - phases["write"]
            _write(staging / MANIFEST_NAME, [memoryview(document)])
            _sync_folder(staging)
            staging.rename(target)
            _sync_folder(self.folder)
        except BaseException:
            with suppress(OSError):
                self.remove(version)
            shutil.rmtree(staging, ignore_errors=True)
            raise
        phases["publish"] = elapsed_ms(start)
        return phases

    @override
    def names(self, version: int) -> set[str]:
        return {path.name for path in (self.folder / f"v{version}").iterdir()}

    @override
    def read(self, version: int, name: str, limit: int) -> bytes:
        return _read(self.folder / f"v{version}" / name, limit)

    @override
    def remove(self, version: int) -> None:
        trash = self._hidden(_TRASH)
        with suppress(FileNotFoundError):
            (self.folder / f"v{version}").rename(trash)
            _delete(trash)

    @override
    def sweep(self, keep: Collection[int]) -> list[str]:
        kept = {f"v{version}" for version in keep}
        half = [
            path
            for path in self.folder.iterdir()
            if path.name.startswith((_STAGING, _TRASH, _DRAFT))
            or (VERSION.fullmatch(path.name) and path.name not in kept)
        ]
        for path in half:
            _delete(path)
        return sorted(path.name for path in half)

    def _hidden(self, prefix: str) -> Path:
        return self.folder / f"{prefix}{secrets.token_hex(8)}"


def _delete(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link, never what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, parts: Sequence[memoryview], pages: Pages | None = None) -> None:
    """Write a new file through to the disk; in ``pages``, which are closed then, where those are given."""
    if pages is not None:
        with closing(pages):
            pages.fill(parts)
            os.fsync(pages.descriptor)
            pages.link(path)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        pending = [part for part in parts if part.nbytes]
        while pending:
            written = os.writev(descriptor, pending[:_PARTS_PER_CALL])
            pending = _after(pending, written)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _after(parts: Sequence[memoryview], written: int) -> list[memoryview]:
    """What is left of ``parts`` after ``written`` bytes (one call writes at most 2 GiB)."""
    for index, part in enumerate(parts):
        if written < part.nbytes:
            return [part[written:], *parts[index + 1 :]]
        written -= part.nbytes
    return []


def _read(path: Path, limit: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(min(limit, os.fstat(descriptor).st_size) + 1)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network and FUSE file systems sync files only
            raise
    finally:
        os.close(descriptor)

"""`ObjectRun`: a run's versions under a prefix of any fsspec file system without atomic rename."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from typing_extensions import override

from loraflow.store_backend import VERSION, Backend, Sealer, elapsed_ms, hash_files
from loraflow.store_manifest import MANIFEST_NAME

__all__ = ["ObjectRun", "fsspec_errors"]

T = TypeVar("T")


class ObjectRun(Backend):
    """A run under a prefix of an fsspec file system without atomic rename (S3, GCS, ``memory://``, …).

    Credentials come from the environment, as the file system's own library reads them.
    """

    local = False

    def __init__(self, fs: Any, prefix: str) -> None:
        self.fs = fs
        self.prefix = prefix

    @override
    def location(self, version: int | None = None) -> str:
        return str(self.fs.unstrip_protocol(self._key(version)))

    @override
    def free_bytes(self) -> int | None:
        return None

    @override
    def prepare(self, size: int) -> None:
        pass

    @override
    def close(self) -> None:
        pass

    @override
    def get(self, name: str, limit: int) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._cat(f"{self.prefix}/{name}", limit)
        return None

    @override
    def put(self, name: str, document: bytes) -> None:
        fsspec_errors(self.fs.pipe_file, f"{self.prefix}/{name}", document)

    @override
    def create(self, name: str, document: bytes) -> bool:
        try:
            fsspec_errors(self.fs.pipe_file, f"{self.prefix}/{name}", document, mode="create")
        except OSError:
            if self.get(name, len(document)) is None:
                raise
            return False
        return True

    @override
    def drop(self, name: str) -> None:
        with suppress(FileNotFoundError):
            fsspec_errors(self.fs.rm_file, f"{self.prefix}/{name}")

    @override
    def versions(self) -> set[int]:
        return {v for v in self._folders() if MANIFEST_NAME in self.names(v)}

    @override
    def write(self, version: int, files: Mapping[str, Sequence[memoryview]], sealer: Sealer) -> dict[str, float]:
        key = self._key(version)
        if self._list(key):
            raise FileExistsError(errno.EEXIST, "a version prefix is never reused", self.location(version))
        start = time.perf_counter()
        try:
            with ThreadPoolExecutor(1, "loraflow-hash") as hashing:
                entries = hashing.submit(hash_files, files)
                fsspec_errors(self.fs.pipe, {f"{key}/{name}": b"".join(parts) for name, parts in files.items()})
                phases = {"write": elapsed_ms(start)}
                document = sealer(entries.result())
            fsspec_errors(self.fs.pipe_file, f"{key}/{MANIFEST_NAME}", document)
        except BaseException:
            with suppress(OSError):
                self.remove(version)
            raise
        phases["publish"] = elapsed_ms(start)
        return phases

    @override
    def names(self, version: int) -> set[str]:
        return set(self._list(self._key(version)))

    @override
    def read(self, version: int, name: str, limit: int) -> bytes:
        return self._cat(f"{self._key(version)}/{name}", limit)

    @override
    def remove(self, version: int) -> None:
        # Each by its name: what removes a whole tree takes brackets and stars in the root's name for patterns.
        key = self._key(version)
        for name in (MANIFEST_NAME, *self._list(key)):
            with suppress(FileNotFoundError):
                fsspec_errors(self.fs.rm_file, f"{key}/{name}")
        with suppress(OSError):  # where there are folders; an object store has none
            fsspec_errors(self.fs.rmdir, key)

    @override
    def sweep(self, keep: Collection[int]) -> list[str]:
        half = sorted(self._folders().difference(keep))
        for version in half:
            self.remove(version)
        return [f"v{version}" for version in half]

    def _key(self, version: int | None) -> str:
        return self.prefix if version is None else f"{self.prefix}/v{version}"

    def _folders(self) -> set[int]:
        matches = (VERSION.fullmatch(name) for name in self._list(self.prefix))
        return {int(match[1]) for match in matches if match}

    def _list(self, key: str) -> list[str]:
        self.fs.invalidate_cache()  # listings are cached by path, and other processes write too
        try:
            found = fsspec_errors(self.fs.ls, key, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found if path.rstrip("/") != key.rstrip("/")]

    def _cat(self, key: str, limit: int) -> bytes:
        try:
            found: bytes = fsspec_errors(self.fs.cat_file, key, start=0, end=limit + 1)
        except OSError as error:
            if error.errno != errno.EINVAL or fsspec_errors(self.fs.size, key):
                raise
            return b""  # S3 refuses any range of an empty object
        return found


def fsspec_errors(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call into fsspec; what its file systems raise of their own (botocore, aiohttp, …) becomes an `OSError`."""
    try:
        return call(*args, **options)
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

"""`StoreCache`: published versions fetched from an object store into a folder that vLLM loads from.

An entry appears whole or not at all: it is fetched beside its place, compared with the version's manifest byte for byte
(blake3), and renamed. Every process that serves an entry holds a shared lock on it, so eviction, which needs the lock
for itself, never takes what is loaded; several servers on one host share the folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from loraflow_server.errors import PluginError
from loraflow_server.events import log_event
from loraflow_server.ids import content_id

__all__ = ["StoreCache", "allowed_url"]

logger = logging.getLogger("vllm.loraflow")

_CHUNK = 16 << 20
_WORKERS = 8
_TRIES = 4
_ENTRY = re.compile(r"[0-9a-f]{32}")


def allowed_url(url: object, stores: Sequence[str]) -> str:
    """A version's URL under one of the configured stores.

    Raises:
        PluginError: ``bad_url``, or ``outside_stores`` (403).
    """
    if not isinstance(url, str) or len(url) > 2048 or not url.isprintable() or "://" not in url:
        raise PluginError("bad_url", "a URL names a version in a store, such as s3://bucket/runs/my-run/v3")
    clean = url.rstrip("/")
    parts = urlsplit(clean)
    inside = any(clean.startswith(store + "/") for store in stores)
    steps = set(re.split(r"[/\\]", unquote(parts.path)))  # some file systems decode
    if not inside or parts.query or parts.fragment or "::" in clean or {"..", "."} & steps:
        raise PluginError("outside_stores", "this URL is under none of LORAFLOW_STORE_ROOTS", status=403)
    return clean


class StoreCache:
    """A folder of fetched versions.

    Args:
        folder: The cache's own folder.
        max_bytes: Bytes that its entries may have together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._held: dict[Path, int] = {}

    def fetch(self, url: str, name: str) -> tuple[Path, dict[str, float]]:
        """The folder of the version at ``url``, fetched if it is not here yet, and held; with milliseconds by phase.

        Raises:
            PluginError: ``not_found`` (404: perhaps not visible yet), ``damaged``, ``wrong_version`` (409),
                ``too_large`` (413), ``store_failed`` (502), ``cache_failed`` (507: such as a full disk).
        """
        try:
            return self._fetched(url, name)
        except OSError as error:
            raise PluginError("cache_failed", f"{self._folder}: {error.strerror or error}", status=507) from error

    def _fetched(self, url: str, name: str) -> tuple[Path, dict[str, float]]:
        started = time.perf_counter()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fs, key = _open_store(url)
        manifest = _manifest(fs, key, name)
        entry = self._folder / content_id([url, manifest.to_bytes().decode()])
        known = time.perf_counter()
        for _ in range(_TRIES):
            if self._hold(fs, key, manifest, entry):
                return entry, {"manifest": (known - started) * 1e3, "fetch": (time.perf_counter() - known) * 1e3}
        raise PluginError("busy", "other servers evict what this one fetches: raise LORAFLOW_CACHE_BYTES", status=503)

    def release(self, entries: Collection[Path]) -> None:
        """Let go of entries that nothing here loads from any more; they may be evicted."""
        for entry in entries:
            descriptor = self._held.pop(entry, None)
            if descriptor is not None:
                os.close(descriptor)

    def held(self) -> frozenset[Path]:
        """Entries that this process serves from."""
        return frozenset(self._held)

    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(self._sizes().values())

    def close(self) -> None:
        """Let go of everything."""
        self.release(self.held())

    # ---------------------------------------------------------------- inside

    def _hold(self, fs: Any, key: str, manifest: Any, entry: Path) -> bool:
        """Hold the entry, fetched first if it is missing; False where it was evicted again before it was held."""
        if entry in self._held:
            return True
        descriptor = _open_lock(entry)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not entry.is_dir():
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not entry.is_dir() and _is_current(descriptor, entry):  # nobody was faster
                    self._make_room(manifest.nbytes)
                    _fetch_into(fs, key, manifest, entry)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            held = entry.is_dir() and _is_current(descriptor, entry)
            if held:
                os.utime(entry)
                self._held[entry] = descriptor
        except BaseException:
            os.close(descriptor)
            raise
        if not held:
            os.close(descriptor)
        return held

    def _make_room(self, needed: int) -> None:
        """Evict the entries used longest ago, except those that some process serves from."""
        if needed > self._max_bytes:
            raise PluginError("too_large", f"the version has {needed} bytes, the cache {self._max_bytes}", status=413)
        self._sweep()
        sizes = self._sizes()
        total = sum(sizes.values())
        for path in sorted(sizes, key=_last_use):
            if total + needed <= self._max_bytes:
                return
            if self._evict(path):
                total -= sizes[path]
        if total + needed > self._max_bytes:
            raise PluginError(
                "cache_full", f"{total} bytes of {self._max_bytes} are loaded: raise LORAFLOW_CACHE_BYTES", status=507
            )

    def _sizes(self) -> dict[Path, int]:
        """Bytes of every entry; one that another process evicts meanwhile is left out."""
        sizes = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if _ENTRY.fullmatch(path.name):
                with suppress(FileNotFoundError, NotADirectoryError):
                    sizes[path] = sum(file.stat().st_size for file in path.iterdir())
        return sizes

    def _evict(self, entry: Path) -> bool:
        if entry in self._held:
            return False
        with _exclusive(entry) as alone:
            if alone:
                shutil.rmtree(entry, ignore_errors=True)
                entry.with_suffix(".lock").unlink(missing_ok=True)
                log_event(logger, logging.INFO, "cache_evicted", entry=entry.name)
            return alone

    def _sweep(self) -> None:
        """Remove what processes that were killed left: half-fetched entries, and locks of nothing."""
        for path in self._folder.iterdir():
            entry = self._folder / path.name.partition(".")[0]
            if path.suffix not in {".part", ".lock"} or entry.is_dir():
                continue
            with _exclusive(entry) as alone:
                if alone and path.suffix == ".part":
                    shutil.rmtree(path, ignore_errors=True)
                if alone and not entry.is_dir():
                    entry.with_suffix(".lock").unlink(missing_ok=True)


def _last_use(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _open_lock(entry: Path) -> int:
    return os.open(entry.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _is_current(descriptor: int, entry: Path) -> bool:
    """Whether an open lock still is the one at its place: whoever removes an entry removes its lock with it."""
    try:
        there = entry.with_suffix(".lock").stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


@contextmanager
def _exclusive(entry: Path) -> Iterator[bool]:
    """Whether nobody else, this process included, uses the entry now; inside, nobody can begin to."""
    descriptor = _open_lock(entry)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = _is_current(descriptor, entry)
    except BlockingIOError:
        alone = False
    try:
        yield alone
    finally:
        os.close(descriptor)


def _open_store(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, key = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise PluginError("store_failed", f"{url}: {error}", status=502) from error
    return fs, str(key)


def _read(fs: Any, key: str, start: int, end: int) -> bytes:
    """Bytes ``start`` to ``end`` of an object; tried again where it is not visible yet, or the store stumbles."""
    for attempt in range(_TRIES):
        try:
            found: bytes = fs.cat_file(key, start=start, end=end)
        except FileNotFoundError as error:
            failure = PluginError("not_found", f"{key} is not in the store (yet)", status=404)
            failure.__cause__ = error
        except Exception as error:  # noqa: BLE001 - each file system has exceptions of its own; raised below
            failure = PluginError("store_failed", f"{key}: {type(error).__name__}: {error}", status=502)
            failure.__cause__ = error
        else:
            return found
        time.sleep(0.1 * 2**attempt)
    raise failure


def _manifest(fs: Any, key: str, name: str) -> Any:
    from loraflow.store_manifest import MANIFEST_NAME, MAX_DOCUMENT_BYTES, Manifest

    try:
        manifest = Manifest.parse(_read(fs, f"{key}/{MANIFEST_NAME}", 0, MAX_DOCUMENT_BYTES + 1))
    except ValueError as error:
        raise PluginError("damaged", f"{key}/{MANIFEST_NAME}: {error}") from error
    policy = f"{manifest.run_id}-v{manifest.version}"
    if policy != name:
        raise PluginError("wrong_version", f"the version at {key} is {policy}, not {name}", status=409)
    return manifest


def _fetch_into(fs: Any, key: str, manifest: Any, entry: Path) -> None:
    staging = entry.with_suffix(f".{os.getpid()}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700)
    try:
        paths = {item: staging / item.name for item in manifest.files}
        for item, path in paths.items():
            _allocate(path, item.size)
        with ThreadPoolExecutor(_WORKERS, "loraflow-fetch") as pool:
            parts = [
                pool.submit(_fetch_part, fs, f"{key}/{item.name}", path, start, min(start + _CHUNK, item.size))
                for item, path in paths.items()
                for start in range(0, item.size, _CHUNK)
            ]
            for part in parts:
                part.result()
            found = pool.map(_digest, paths.values())
            wrong = [item for item, digest in zip(paths, found, strict=True) if digest != item.blake3]
        _require_intact(key, wrong)
        staging.rename(entry)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _require_intact(key: str, wrong: Sequence[Any]) -> None:
    if wrong:
        raise PluginError("damaged", f"{key}/{wrong[0].name} is not what its manifest says")


def _allocate(path: Path, size: int) -> None:
    with path.open("xb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)


def _fetch_part(fs: Any, key: str, path: Path, start: int, end: int) -> None:
    part = _read(fs, key, start, end)
    if len(part) != end - start:
        raise PluginError("damaged", f"{key} ends at {start + len(part)}, before {end}")
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), part, start)


def _digest(path: Path) -> str:
    from blake3 import blake3

    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()

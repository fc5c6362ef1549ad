"""The protocol of the places where versions lie, and what they share.

A backend holds one run, always in the same layout: ``vN/`` per version with its files and ``manifest.json``, beside the
run's small documents. It makes a version visible whole or not at all (rule 2): a folder by an atomic rename
(`loraflow.store_local`), objects by the manifest, which is written last and removed first (`loraflow.store_objects`).
Its methods raise `OSError` and nothing else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from blake3 import blake3

from loraflow.store_manifest import FileEntry

__all__ = ["VERSION", "Backend", "Sealer", "elapsed_ms", "hash_files"]

Sealer = Callable[[Sequence[FileEntry]], bytes]
"""Makes the manifest, given every file written; raising from it abandons the version."""

VERSION = re.compile(r"v(0|[1-9]\d{0,8})")
"""Name of a version's folder."""


class Backend(Protocol):
    """One run's place in the store. Versions are numbers, names are plain file names."""

    local: bool

    def location(self, version: int | None = None) -> str:
        """Folder or URL of a version, or of the run."""
        ...

    def free_bytes(self) -> int | None:
        """Free space for this user, None where it is unknown."""
        ...

    def prepare(self, size: int) -> None:
        """Allocate ahead what a file of ``size`` bytes needs, behind the caller, where that hastens its write."""
        ...

    def close(self) -> None:
        """Let go of what was prepared."""
        ...

    def get(self, name: str, limit: int) -> bytes | None:
        """Up to ``limit`` + 1 bytes of a document of the run, None where it is not there."""
        ...

    def put(self, name: str, document: bytes) -> None:
        """Replace a document of the run, durably, whole or not at all."""
        ...

    def create(self, name: str, document: bytes) -> bool:
        """Write a document unless it is there; whether it was written."""
        ...

    def drop(self, name: str) -> None:
        """Remove a document of the run."""
        ...

    def versions(self) -> set[int]:
        """The versions that are visible: those with a manifest."""
        ...

    def write(self, version: int, files: Mapping[str, Sequence[memoryview]], sealer: Sealer) -> dict[str, float]:
        """Write a version; milliseconds per phase. On any failure nothing of it is left."""
        ...

    def names(self, version: int) -> set[str]:
        """Names of all that lies in a version's folder."""
        ...

    def read(self, version: int, name: str, limit: int) -> bytes:
        """Up to ``limit`` + 1 bytes of one file of a version."""
        ...

    def remove(self, version: int) -> None:
        """Remove a version: at no time is a part of it visible. Removing what is gone is no error."""
        ...

    def sweep(self, keep: Collection[int]) -> list[str]:
        """Remove what dead writers left half-written, and versions not in ``keep``; the names removed.

        The caller is this run's only writer.
        """
        ...


def hash_files(files: Mapping[str, Sequence[memoryview]]) -> list[FileEntry]:
    """Entries of ``files``, sorted by name, hashed on all cores."""
    entries = []
    for name in sorted(files):
        hasher = blake3(max_threads=blake3.AUTO)
        for part in files[name]:
            hasher.update(part)
        entries.append(FileEntry(name, sum(part.nbytes for part in files[name]), hasher.hexdigest()))
    return entries


def elapsed_ms(start: float) -> float:
    """Milliseconds since ``start``, a reading of `time.perf_counter`."""
    return (time.perf_counter() - start) * 1e3

"""`Spare`: a file whose pages are there before its content is.

Two thirds of a write into memory (tmpfs) are the allocation of its pages, one after the other under the file's lock,
which more threads do not hasten. Here they are allocated ahead, behind the training step, in a new file without a name:
the page of an older version is never written again, and nothing is left of a process that dies.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["Spare", "in_memory", "link_unnamed"]

_MOUNTS = Path("/proc/self/mountinfo")
_SMALLEST = 1 << 20  # bytes; below it there is nothing to gain


class Spare:
    """At most one file ahead, in one folder; thread-safe.

    Args:
        folder: Where it will be named, on the file system that it lies in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worth_it: bool | None = None  # found out when it is asked for first
        self._state = threading.Lock()
        self._size = 0
        self._close: Callable[[], object] | None = None
        self._descriptor = -1
        self._filling: threading.Thread | None = None

    def prepare(self, size: int) -> None:
        """Allocate a file of ``size`` bytes, in a thread; nothing where the file system is none in memory.

        What fails (no space) is met again, and told, by the write itself.
        """
        with self._state:
            if self._worth_it is None:
                self._worth_it = in_memory(self._folder)
            if not self._worth_it or size < _SMALLEST or (size == self._size and self._close is not None):
                return
            self._drop()
            with suppress(OSError):
                self._descriptor = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
                self._size, self._close = size, weakref.finalize(self, os.close, self._descriptor)
                self._filling = threading.Thread(
                    target=_allocate, args=(self._descriptor, size), name="loraflow-spare", daemon=True
                )
                self._filling.start()

    def take(self, size: int) -> int | None:
        """Descriptor of the file, to write from its start and close; None where none of just ``size`` bytes is there.

        One of another size is let go, unless a small file asks.
        """
        if size < _SMALLEST:
            return None
        with self._state:
            if self._close is None or self._size != size:
                self._drop()
                return None
            self._wait()
            finalizer, self._close = self._close, None
            assert isinstance(finalizer, weakref.finalize)  # noqa: S101 - as made above
            finalizer.detach()
            if os.fstat(self._descriptor).st_size != size:  # there was no room for it
                os.close(self._descriptor)
                return None
            return self._descriptor

    @property
    def bytes(self) -> int:
        """Bytes of the file system that it holds, free for the next version."""
        with self._state:
            return self._size if self._close is not None else 0

    def close(self) -> None:
        """Let it go."""
        with self._state:
            self._drop()

    def _drop(self) -> None:
        self._wait()
        if self._close is not None:
            self._close()
        self._close = None

    def _wait(self) -> None:
        if self._filling is not None:
            self._filling.join()
        self._filling = None


def in_memory(folder: Path) -> bool:
    """Whether ``folder`` lies on a tmpfs; False where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        device = folder.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in _MOUNTS.read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1] == "tmpfs"
    return False


def link_unnamed(descriptor: int, path: Path) -> None:
    """Give an unnamed file its name; raises `FileExistsError` where there is one."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # a folder's descriptor, or Python calls link(), which names the link in /proc
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _allocate(descriptor: int, size: int) -> None:
    with suppress(OSError):
        os.posix_fallocate(descriptor, 0, size)

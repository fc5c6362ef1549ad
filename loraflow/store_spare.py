"""`Spare`: a file whose pages are there before its content is.

Two thirds of a write into memory (tmpfs) are the allocation of its pages, one after the other under the file's lock,
which more threads do not hasten; and of what is left, half is the kernel's way from page to page. Here the pages are
allocated and mapped ahead, behind the training step, in a new file without a name, and a write is a copy of memory: the
page of an older version is never written again, and nothing is left of a process that dies.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["Pages", "Spare", "in_memory"]

_MOUNTS = Path("/proc/self/mountinfo")
_SMALLEST = 1 << 20  # bytes; below it there is nothing to gain


class Pages:
    """A new file without a name, of ``size`` bytes, and its memory.

    Args:
        folder: Where it will be named, on the file system that it lies in.
        size: Bytes, at least 1.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._memory: mmap.mmap | None = None

    def allocate(self) -> None:
        """Get every page, and map it; raises `OSError` where there is no room."""
        os.posix_fallocate(self.descriptor, 0, self.size)  # from here on, no write finds the disk full
        memory = mmap.mmap(self.descriptor, self.size)
        torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()  # without the interpreter's lock
        self._memory = memory

    @property
    def ready(self) -> bool:
        """Whether they are allocated."""
        return self._memory is not None

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Write ``parts``, bytes, one after the other; together just ``size``."""
        assert self._memory is not None  # noqa: S101 - see `ready`
        with memoryview(self._memory) as whole:
            begin = 0
            for part in parts:
                place = whole[begin : begin + part.nbytes]
                if part.readonly or part.nbytes < _SMALLEST:
                    place[:] = part
                else:  # without the interpreter's lock, and by as many threads as torch has
                    torch.frombuffer(place, dtype=torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))
                begin += part.nbytes
                place.release()

    def link(self, path: Path) -> None:
        """Give the file its name; raises `FileExistsError` where there is one."""
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # a folder's descriptor, or Python calls link(), which names the link in /proc
            os.link(f"/proc/self/fd/{self.descriptor}", path.name, dst_dir_fd=folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Let it go: what has no name is gone. Harmless when repeated."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        self._close()


class Spare:
    """At most one file ahead, in one folder; thread-safe.

    Args:
        folder: Where it will be named, on the file system that it lies in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worth_it: bool | None = None  # found out when it is asked for first
        self._state = threading.Lock()
        self._pages: Pages | None = None
        self._filling: threading.Thread | None = None

    def prepare(self, size: int) -> None:
        """Allocate a file of ``size`` bytes, in a thread; nothing where the file system is none in memory.

        What fails (no space) is met again, and told, by the write itself.
        """
        with self._state:
            if self._worth_it is None:
                self._worth_it = in_memory(self._folder)
            if not self._worth_it or size < _SMALLEST or (self._pages is not None and size == self._pages.size):
                return
            self._drop()
            with suppress(OSError):
                self._pages = Pages(self._folder, size)
                self._filling = threading.Thread(
                    target=_allocate, args=(self._pages,), name="loraflow-spare", daemon=True
                )
                self._filling.start()

    def take(self, size: int) -> Pages | None:
        """The file, to fill, name and close; None where none of just ``size`` bytes is there.

        One of another size is let go, unless a small file asks.
        """
        if size < _SMALLEST:
            return None
        with self._state:
            self._wait()
            if self._pages is None or self._pages.size != size or not self._pages.ready:  # there was no room for it
                self._drop()
                return None
            pages, self._pages = self._pages, None
            return pages

    @property
    def bytes(self) -> int:
        """Bytes of the file system that it holds, free for the next version."""
        with self._state:
            return 0 if self._pages is None else self._pages.size

    def close(self) -> None:
        """Let it go."""
        with self._state:
            self._drop()

    def _drop(self) -> None:
        self._wait()
        if self._pages is not None:
            self._pages.close()
        self._pages = None

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


def _allocate(pages: Pages) -> None:
    with suppress(OSError):
        pages.allocate()

"""One writer per run: a lock of the operating system on a local folder, a lease on an object store.

The operating system frees its lock when the process dies, however it dies, so nothing is ever stale there. A lease is
an object that its holder renews; it is taken over when its holder is provably dead (same machine, other process), or
when it was watched for `LEASE_SECONDS` without a renewal. No two clocks are compared for that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from loraflow.errors import PublishError
from loraflow.store_backend import Backend

__all__ = ["FileLock", "Lease", "Owner", "WriterLock", "acquire"]

LOCK_NAME = "writer.lock"
LEASE_NAME = "lease.json"
LEASE_SECONDS = 45.0
"""A lease that was not renewed for so long is free."""
RENEW_SECONDS = 10.0

_LIMIT = 4096
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_log = logging.getLogger(__name__)
_held: set[str] = set()  # the operating system grants a process its own lock twice
_held_guard = threading.Lock()


@dataclass(frozen=True)
class Owner:
    """Identity of a writer.

    Attributes:
        host: Its host name, for people.
        machine: Boot id and pid namespace: within one of them, a pid means something. Empty where unknown.
        pid: Its process.
        started: When the process started, in ticks since boot: a pid alone may be another process by now.
        nonce: Random, one per store opened.
        renewals: How often a lease was renewed.
    """

    host: str
    machine: str
    pid: int
    started: int
    nonce: str
    renewals: int = 0

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or 0, secrets.token_hex(8))

    @classmethod
    def parse(cls, document: bytes) -> Owner | None:
        """The owner that a lock names, None where it cannot be read."""
        try:
            return cls(**json.loads(document))
        except (ValueError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """JSON form."""
        return json.dumps(asdict(self)).encode()

    def life(self) -> Literal["alive", "dead", "unknown"]:
        """Whether its process runs; ``unknown`` from another machine or pid namespace."""
        if not self.machine or self.machine != _machine():
            return "unknown"
        return "alive" if _started(self.pid) == self.started else "dead"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class WriterLock(Protocol):
    """What makes its holder the only writer of a run."""

    def check(self) -> None:
        """Raise `PublishError` where another writer has taken over."""
        ...

    def release(self) -> None:
        """Let the next writer in; harmless when repeated."""
        ...


def acquire(backend: Backend) -> WriterLock:
    """Become the only writer of ``backend``'s run.

    Raises:
        PublishError: Another writer lives; it is named.
        OSError: The store cannot be written.
    """
    if backend.local:
        try:
            return FileLock(Path(backend.location()) / LOCK_NAME)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _log.info("%s: no file locks there (%s), using a lease", backend.location(), error)
    return Lease(backend)


def _refusal(place: str, owner: Owner | None) -> PublishError:
    mine = owner is not None and owner.machine == _machine() and owner.pid == os.getpid()
    stop = "close the SyncManager or store that this process opened before" if mine else "stop that process"
    return PublishError(
        f"{place} has a writer already: {owner or 'unknown'}",
        hint=f"{stop}, or use another run_id: two trainers must never share one",
    )


class FileLock:
    """A lock that the operating system holds for this process (POSIX record lock: it also works over NFS)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = os.path.realpath(path)
        with _held_guard:
            if self._key in _held:
                raise _refusal(str(path.parent), Owner.current())
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                document = Owner.current().to_bytes()
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, document, 0)
            except OSError as error:
                holder = Owner.parse(os.pread(self._descriptor, _LIMIT, 0))
                os.close(self._descriptor)
                if error.errno in {errno.EACCES, errno.EAGAIN}:
                    raise _refusal(str(path.parent), holder) from error
                raise
            _held.add(self._key)
        self._open = True

    def check(self) -> None:
        """Nobody takes it from a living process."""

    def release(self) -> None:
        """Unlock. The file stays: removing a lock file lets two writers in."""
        with _held_guard:
            if self._open:
                self._open = False
                _held.discard(self._key)
                os.close(self._descriptor)


class Lease:
    """A lease object that a thread of this process renews every `RENEW_SECONDS`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._owner = Owner.current()
        self._take()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="loraflow-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Read the lease again; `PublishError` where it is another's, or gone."""
        holder = self._holder()
        if holder is None or holder.nonce != self._owner.nonce:
            raise PublishError(
                f"{self._backend.location()}: this writer lost its lease to {holder or 'nobody'}",
                hint="it was stopped or cut off for too long; end this process, the other one goes on",
            )

    def release(self) -> None:
        """Stop renewing and remove the lease, where it still is this writer's."""
        if os.getpid() != self._owner.pid:
            return  # a forked child leaves its parent's lease alone
        self._stop.set()
        self._thread.join()
        holder = self._holder()
        if holder is not None and holder.nonce == self._owner.nonce:
            self._backend.drop(LEASE_NAME)

    def _holder(self) -> Owner | None:
        document = self._backend.get(LEASE_NAME, _LIMIT)
        return None if document is None else Owner.parse(document)

    def _take(self) -> None:
        if not self._backend.create(LEASE_NAME, self._owner.to_bytes()):
            self._outlive(self._holder())
            self._backend.put(LEASE_NAME, self._owner.to_bytes())
        self.check()

    def _outlive(self, holder: Owner | None) -> None:
        if holder is None or holder.life() == "dead":
            return
        if holder.life() == "alive":
            raise _refusal(self._backend.location(), holder)
        _log.info("%s: waiting for a renewal by %s", self._backend.location(), holder)
        deadline = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, RENEW_SECONDS / 4))
            seen = self._holder()
            if seen is None:
                return
            if seen != holder:
                raise _refusal(self._backend.location(), seen)

    def _renew(self) -> None:
        renewals = 0
        while not self._stop.wait(RENEW_SECONDS):
            renewals += 1
            with suppress(PublishError):  # lost: the next operation checks again, and says so
                try:
                    self.check()
                    renewed = Owner(**{**asdict(self._owner), "renewals": renewals})
                    self._backend.put(LEASE_NAME, renewed.to_bytes())
                except OSError as error:
                    _log.warning("%s: the lease could not be renewed: %s", self._backend.location(), error)

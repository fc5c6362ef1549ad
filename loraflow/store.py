"""`AdapterStore`: immutable versions of one run, on a local folder or any fsspec URL.

Layout, under the root::

    {run_id}/v{N}/manifest.json       size and blake3 of every file, the snapshot's digest
    {run_id}/v{N}/adapter_model.safetensors, adapter_config.json, …
    {run_id}/ledger.json              what became of every version; next_version never falls
    {run_id}/writer.lock, lease.json  the one writer (a lock on a folder, a lease on an object store)

Files and folders get the modes that the umask gives: a server that runs as another user needs a umask such as 022.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import fsspec
from fsspec.implementations.local import LocalFileSystem

from loraflow.errors import PublishError
from loraflow.policy import Policy
from loraflow.store_backend import Backend, Sealer
from loraflow.store_guard import SPACE, explained, patiently
from loraflow.store_ledger import Ledger
from loraflow.store_local import LocalRun
from loraflow.store_lock import acquire
from loraflow.store_manifest import MANIFEST_NAME, MAX_DOCUMENT_BYTES, FileEntry, Manifest, is_file_name
from loraflow.store_objects import ObjectRun, fsspec_errors
from loraflow.store_outcomes import Published, Recovered
from loraflow.store_reader import VersionReader

__all__ = ["AdapterStore", "Buffer", "Published", "Recovered"]

Buffer: TypeAlias = bytes | bytearray | memoryview
LEDGER_NAME = "ledger.json"
_AHEAD = 16
"""Names that the stored ledger uses up beyond the newest, so that most announcements write nothing."""

_log = logging.getLogger(__name__)


class AdapterStore:
    """The one writer of a run's versions. Opening it takes the run's lock; `close` gives it back.

    All methods may be called from several threads. Each raises `PublishError` where the store fails, is damaged, or is
    asked for what its rules forbid.

    Args:
        root: Folder or fsspec URL.
        run_id: The run; all that the store touches lies under ``{root}/{run_id}``.
        retain: This many newest committed versions are never collected, at least 1.
        grace_period: Seconds between `retire` and removal. Measured on a clock that does not jump, and from the
            opening of the store for what an earlier process retired.
        min_free_bytes: Free space to leave beside a version being written; not checked where the store cannot tell.
        storage_options: Passed to the fsspec file system, such as ``endpoint_url``; no credentials.
    """

    def __init__(
        self,
        root: str,
        run_id: str,
        *,
        retain: int,
        grace_period: float,
        min_free_bytes: int = 0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if Policy.parse(Policy(run_id, 0).name) is None or retain < 1:
            raise PublishError(f"cannot open a store: run_id={run_id!r}, retain={retain}", hint="see SyncConfig")
        self.run_id = run_id
        self._retain, self._grace, self._min_free = retain, grace_period, min_free_bytes
        self._io, self._state = threading.RLock(), threading.RLock()
        with explained(f"open the store {root}"):
            self._backend = _open(root, run_id, storage_options)
            self._lock = acquire(self._backend)
        self._reader = VersionReader(self._backend)
        self._release = weakref.finalize(self, self._lock.release)  # also where nobody calls close
        try:
            with explained(f"read {self.path()}"):
                self._ledger = self._load_ledger()
        except BaseException:
            self._release()
            raise
        self._reserved: set[int] = set()
        self._written: dict[int, Mapping[str, float]] = {}  # of those, with files there and a ledger that is behind
        self._stored, self._used_up = self._ledger, self._ledger.next_version  # what the stored ledger says
        self._retired_at: dict[int, float] = {}
        self._note_retired()

    def path(self, policy: Policy | None = None) -> str:
        """Folder or URL of a version, or of the run."""
        return self._backend.location(None if policy is None else self._version(policy))

    def next_version(self) -> int:
        """Above every version that this run ever attempted, whatever became of it."""
        with self._state:
            return self._ledger.next_version

    def reserve(self, policy: Policy) -> None:
        """Use up the name of a version that travels before its files are written, or without any (rule 1).

        Repeating it before they are written changes nothing.

        Raises:
            PublishError: The name is used up already.
        """
        version = self._version(policy)
        if version in self._reserved:
            return
        with self._state, explained(f"reserve {policy} in {self.path()}"):
            self._require_unused(policy)
            self._update(lambda ledger: ledger.above({version}))
            self._reserved.add(version)

    def announce(self, policy: Policy) -> None:
        """Like `reserve`, for a version whose files follow its delivery: it may be committed before they are there.

        After a crash in between it is lost: the run continues from the one before. Nothing is written where the stored
        ledger has used the name up already; a process that comes after this one begins behind all of those.

        Raises:
            PublishError: The name is used up already.
        """
        version = self._version(policy)
        with self._state, explained(f"announce {policy} in {self.path()}"):
            self._require_unused(policy)
            if version < self._used_up:
                self._ledger = self._ledger.enter(version)  # stored with the next change
            else:
                self._update(lambda ledger: ledger.enter(version), ahead=_AHEAD)
            self._reserved.add(version)

    def publish(
        self, policy: Policy, files: Mapping[str, Sequence[Buffer]], *, digest: str | Callable[[], str]
    ) -> Published:
        """Write one version; it appears whole or not at all (rule 2), and its name is used up either way (rule 1).

        What failed may be repeated for a version that was reserved or announced, whose content is out already.

        Args:
            policy: Of this run, with a version of at least `next_version`, or one that was reserved.
            files: Contents by plain file name, each in parts that are written one after the other, uncopied.
            digest: Content digest of the snapshot (hex), recorded in the manifest; or what gives it, asked for once the
                files are written.

        Raises:
            PublishError: The name is used up, there is no space, or the store fails; nothing of it is visible then.
        """
        version = self._version(policy)
        contents = {name: [_view(part) for part in parts] for name, parts in files.items()}
        bad = [name for name in contents if not is_file_name(name)]
        if bad or not contents:
            raise PublishError(f"cannot publish {policy}: bad file names {bad}" if bad else f"{policy} has no files")
        size = sum(part.nbytes for parts in contents.values() for part in parts)
        with self._io, explained(f"publish {policy} to {self.path()}"):
            known = version in self._reserved
            if not known:
                self._require_unused(policy)
            if version not in self._written:
                self._check_space(policy, size)
            self._update(lambda ledger: ledger.enter(version))
            try:
                if version in self._written:
                    phases = self._written[version]
                else:
                    phases = self._backend.write(version, contents, self._sealer(version, digest))
            except BaseException:
                if not known:
                    with self._state:  # next_version stays; the file follows with the next change
                        self._ledger = self._ledger.forget({version})
                raise
            if known:
                self._written[version] = phases
            with self._state:
                self._update(lambda ledger: ledger)  # it may have been committed meanwhile
                self._reserved.discard(version)
                self._written.pop(version, None)
        return Published(policy, self.path(policy), size, digest if isinstance(digest, str) else digest(), phases)

    def prepare(self, size: int) -> None:
        """Allocate a file of ``size`` bytes ahead, behind the caller, where that hastens the next version's write.

        It is done where as much again stays free beside it. What fails here is met, and told, by that write.
        """
        with suppress(OSError):
            free = self._backend.free_bytes()
            if free is not None and free >= 2 * size + self._min_free:
                self._backend.prepare(size)

    def mend(self, policy: Policy, files: Mapping[str, Sequence[Buffer]], *, digest: str) -> bool:
        """Write a committed version again where it is damaged or gone; whether that was needed.

        Args:
            policy: A committed version.
            files: Its contents as they were published: a name means one content for ever.
            digest: Content digest of the snapshot (hex).

        Raises:
            PublishError: It is not committed, or the store fails.
        """
        version = self._version(policy)
        try:
            self.verify(policy)
        except PublishError as error:
            if self._ledger.outcome(version) != "committed":
                raise
            _log.warning("writing %s again: %s", policy, error)
        else:
            return False
        contents = {name: [_view(part) for part in parts] for name, parts in files.items()}
        with self._io, explained(f"write {policy} to {self.path()} again"):
            self._lock.check()
            self._backend.remove(version)
            self._backend.write(version, contents, self._sealer(version, digest))
        return True

    def mark_committed(self, policy: Policy) -> None:
        """Requests use this version from now on; a new process of the run continues from it.

        Where its files are not there yet (`announce`), that is stored with them.
        """
        version = self._version(policy)
        with self._state:
            if version in self._reserved and self._ledger.outcome(version) == "begun":
                self._ledger = self._ledger.commit(version)
                return
        self._change(policy, "commit", Ledger.commit)

    def mark_burnt(self, policy: Policy) -> None:
        """The version is never used: it was refused, or withdrawn. Its files stay until it is retired and collected.

        A version whose publishing failed, or never began, may be marked too: its name is used up.
        """
        self._change(policy, "burn", Ledger.burn, lasting=False)

    def committed(self) -> Policy | None:
        """The newest committed version, for resume; None before the first."""
        with self._state:
            committed = self._ledger.committed_versions
        return Policy(self.run_id, committed[-1]) if committed else None

    def retire(self, policy: Policy) -> None:
        """The caller has unloaded the version everywhere and no request uses it: its grace period starts (rule 7)."""
        self._change(policy, "retire", Ledger.retire, lasting=False)

    def collect(self) -> list[Policy]:
        """Remove the retired versions whose grace period has passed, except the ``retain`` newest committed ones."""
        with self._io:
            with self._state:
                now = time.monotonic()
                ripe = [v for v in self._ledger.removable(self._retain) if now - self._retired_at[v] >= self._grace]
            if not ripe:
                return []
            with explained(f"remove old versions from {self.path()}"):
                self._lock.check()
                for version in ripe:
                    self._backend.remove(version)
                self._update(lambda ledger: ledger.forget(ripe))
        return [Policy(self.run_id, version) for version in ripe]

    def clear(self, *, keep: int = 0) -> list[Policy]:
        """Remove the versions of a run that is over: nothing has one loaded, and no request uses one.

        The ledger stays, so that no name is used again.

        Args:
            keep: This many newest committed versions stay, for a later process of the run.
        """
        with self._io, self._state, explained(f"clear {self.path()}"):
            self._lock.check()
            kept = set(self._ledger.committed_versions[-keep:]) if keep else set()
            gone = sorted(self._backend.versions() - kept)
            for version in gone:
                self._backend.remove(version)
            self._update(lambda ledger: ledger.forget(gone))
        return [Policy(self.run_id, version) for version in gone]

    def recover(self) -> Recovered:
        """Clean up after an earlier process of this run, and say where it stood. Only this run is touched.

        Holding the run's lock, this is the only writer: whatever is half-written has no living writer.
        """
        with self._io, self._state, explained(f"recover {self.path()}"):
            self._lock.check()
            shown = self._backend.versions()
            wanted = [v for v in self._ledger.committed_versions if not self._ledger.versions[v].retired]
            shown |= {v for v in wanted if v not in shown and self._appears(v)}
            removed = self._backend.sweep(shown)
            lost = [v for v in wanted if v not in shown]
            self._update(lambda ledger: ledger.reconcile(shown))
            live = [v for v, entry in self._ledger.versions.items() if not entry.retired]
            burnt = [v for v in live if self._ledger.outcome(v) == "burnt"]
        found = Recovered(
            self.committed(), self._policies(live), self._policies(burnt), self._policies(lost), tuple(removed)
        )
        _log.info("recovered %s: %s", self.path(), found)
        return found

    def manifest(self, policy: Policy) -> Manifest:
        """The manifest of a version.

        Raises:
            PublishError: It is not there, damaged, or another version's.
        """
        return self._reader.manifest(self._of_this_run(policy))

    def read(self, policy: Policy) -> dict[str, bytes]:
        """Contents of a version by file name, each checked against the manifest; raises as `verify` does."""
        return dict(self._reader.contents(self._of_this_run(policy)))

    def verify(self, policy: Policy) -> None:
        """Check every file of a version against its manifest.

        Raises:
            PublishError: A file is missing, added or changed; it is named.
        """
        for _ in self._reader.contents(self._of_this_run(policy)):
            pass

    def close(self) -> None:
        """Give the run's lock back. Versions stay; harmless when repeated."""
        with explained(f"close {self.path()}"):
            self._backend.close()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _sealer(self, version: int, digest: str | Callable[[], str]) -> Sealer:
        def seal(entries: Sequence[FileEntry]) -> bytes:
            self._lock.check()
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            found = digest if isinstance(digest, str) else digest()
            return Manifest(self.run_id, version, found, created, tuple(entries)).to_bytes()

        return seal

    def _version(self, policy: Policy) -> int:
        if policy.run_id != self.run_id:
            raise PublishError(f"{policy} is not of this run", expected=self.run_id, found=policy.run_id)
        return policy.version

    def _of_this_run(self, policy: Policy) -> Policy:
        self._version(policy)
        return policy

    def _policies(self, versions: Sequence[int]) -> tuple[Policy, ...]:
        return tuple(Policy(self.run_id, version) for version in sorted(versions))

    def _require_unused(self, policy: Policy) -> None:
        if policy.version < self.next_version():
            raise PublishError(
                f"{policy} was used before: a name means one content for ever",
                hint=f"use version {self.next_version()} or later",
            )

    def _check_space(self, policy: Policy, size: int) -> None:
        free = self._backend.free_bytes()
        if free is not None and free < size + self._min_free:
            raise PublishError(
                f"no space for {policy} in {self.path()}: {size + self._min_free - free} bytes are missing",
                expected=f"{size} bytes and {self._min_free} to spare (min_free_bytes)",
                found=f"{free} bytes",
                hint=SPACE,
            )

    def _appears(self, version: int) -> bool:
        try:
            patiently(lambda: self._backend.read(version, MANIFEST_NAME, MAX_DOCUMENT_BYTES))
        except FileNotFoundError:
            return False
        return True

    def _load_ledger(self) -> Ledger:
        document = self._backend.get(LEDGER_NAME, MAX_DOCUMENT_BYTES)
        try:
            ledger = Ledger(self.run_id) if document is None else Ledger.parse(document)
        except ValueError as error:
            raise PublishError(
                f"{self.path()}/{LEDGER_NAME} is damaged: {error}",
                hint="start with a new run_id: which names were used can no longer be told",
            ) from error
        if ledger.run_id != self.run_id:
            raise PublishError(
                f"{self.path()}/{LEDGER_NAME} is not of this run", expected=self.run_id, found=ledger.run_id
            )
        return ledger.above(self._backend.versions())

    def _change(
        self, policy: Policy, action: str, change: Callable[[Ledger, int], Ledger], *, lasting: bool = True
    ) -> None:
        version = self._version(policy)
        with explained(f"{action} {policy} in {self.path()}"):
            try:
                self._update(lambda ledger: change(ledger, version), lasting=lasting)
            except ValueError as error:
                raise PublishError(f"cannot {action} {policy}: {error}") from error

    def _update(self, change: Callable[[Ledger], Ledger], *, lasting: bool = True, ahead: int = 0) -> None:
        """Change the ledger, first in the store.

        Args:
            change: Makes the new one.
            lasting: False where a store that fails now gets it with the next change (a full disk must not keep versions
                from being freed).
            ahead: Names to use up beyond the newest in the stored one.
        """
        with self._state:
            changed = change(self._ledger)
            used_up = max(self._used_up, changed.next_version + ahead)
            stored = changed.above({used_up - 1})
            if stored != self._stored:
                self._lock.check()
                try:
                    self._backend.put(LEDGER_NAME, stored.to_bytes())
                    self._stored, self._used_up = stored, used_up
                except OSError as error:
                    if lasting:
                        raise
                    _log.warning("%s: the ledger could not be written now: %s", self.path(), error)
            self._ledger = changed
            self._note_retired()

    def _note_retired(self) -> None:
        retired = {v for v, entry in self._ledger.versions.items() if entry.retired}
        self._retired_at = {v: self._retired_at.get(v, time.monotonic()) for v in retired}


def _open(root: str, run_id: str, storage_options: Mapping[str, Any] | None) -> Backend:
    # A file system of its own: fsspec keeps one per process, with the endpoint and the credentials of its first use.
    options = {"skip_instance_cache": True, **(storage_options or {})}
    fs, path = fsspec_errors(fsspec.core.url_to_fs, root, **options)
    if isinstance(fs, LocalFileSystem):
        return LocalRun(Path(path).absolute() / run_id)
    return ObjectRun(fs, f"{path.rstrip('/')}/{run_id}")


def _view(part: Buffer) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")

"""The ledger: what became of every version of a run. One small sealed document, replaced atomically at every change.

It is written *before* what it permits: a version is entered before its first byte is written, so no crash can make a
name free again. Versions whose files are gone leave it, since ``next_version`` stays above all that was ever entered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from loraflow.store_manifest import seal, unseal

__all__ = ["Entry", "Ledger", "Outcome"]

_FORMAT = 1

Outcome = Literal["begun", "committed", "burnt"]


@dataclass(frozen=True)
class Entry:
    """State of one version whose files may exist.

    Attributes:
        outcome: ``begun`` (being written, or written and not yet decided), ``committed`` or ``burnt``.
        retired: No server has it loaded and no request uses it; its files may go after the grace period.
    """

    outcome: Outcome
    retired: bool = False


@dataclass(frozen=True)
class Ledger:
    """All that a run remembers about its versions; every change makes a new one.

    Attributes:
        run_id: The run.
        next_version: Above every version that was ever entered; never falls.
        versions: The versions whose files may exist.
    """

    run_id: str
    next_version: int = 0
    versions: Mapping[int, Entry] = field(default_factory=dict)

    @property
    def committed_versions(self) -> list[int]:
        """Committed versions whose files may exist, oldest first."""
        return sorted(v for v, entry in self.versions.items() if entry.outcome == "committed")

    def outcome(self, version: int) -> Outcome | None:
        """What became of ``version``; None where its files cannot exist."""
        entry = self.versions.get(version)
        return None if entry is None else entry.outcome

    def above(self, seen: Collection[int]) -> Ledger:
        """With ``next_version`` above every version in ``seen``."""
        return replace(self, next_version=max(self.next_version, max(seen, default=-1) + 1))

    def enter(self, version: int) -> Ledger:
        """With ``version`` about to be written, and its name used up; what was decided about it already stays."""
        return self.above({version})._with(version, self.versions.get(version, Entry("begun")))

    def commit(self, version: int) -> Ledger:
        """With ``version`` committed; repeating it changes nothing.

        Raises:
            ValueError: It is not there, or it is burnt.
        """
        entry = self.versions.get(version)
        if entry is None:
            raise ValueError("it is not in the store")
        if entry.outcome == "burnt":
            raise ValueError("it is burnt")
        return self._with(version, replace(entry, outcome="committed"))

    def burn(self, version: int) -> Ledger:
        """With ``version`` burnt and its name used up, whether or not it was ever written.

        Raises:
            ValueError: It is committed.
        """
        entry = self.versions.get(version)
        if entry is None:
            return self.above({version})
        if entry.outcome == "committed":
            raise ValueError("it is committed")
        return self._with(version, replace(entry, outcome="burnt"))

    def retire(self, version: int) -> Ledger:
        """With ``version`` marked as used by nothing any more; unknown versions are gone already."""
        entry = self.versions.get(version)
        return self if entry is None else self._with(version, replace(entry, retired=True))

    def reconcile(self, shown: Collection[int]) -> Ledger:
        """What is true after a crash, given the versions that lie whole in the store.

        Those that were not decided are burnt, but not retired: servers may have them loaded. Those that are gone, or
        never became whole, are forgotten.
        """
        versions = {v: self.versions.get(v, Entry("begun")) for v in sorted(shown)}
        decided = {v: replace(e, outcome="burnt") if e.outcome == "begun" else e for v, e in versions.items()}
        return replace(self.above(shown), versions=decided)

    def forget(self, versions: Collection[int]) -> Ledger:
        """Without ``versions``, whose files are gone."""
        return replace(self, versions={v: entry for v, entry in self.versions.items() if v not in versions})

    def removable(self, retain: int) -> list[int]:
        """Retired versions, oldest first, without the ``retain`` newest committed ones."""
        kept = set(self.committed_versions[-retain:])
        return sorted(v for v, entry in self.versions.items() if entry.retired and v not in kept)

    def _with(self, version: int, entry: Entry) -> Ledger:
        return replace(self, versions={**self.versions, version: entry})

    def to_bytes(self) -> bytes:
        """The sealed document."""
        versions = {str(v): {"outcome": entry.outcome, "retired": entry.retired} for v, entry in self.versions.items()}
        return seal({"format": _FORMAT, "run_id": self.run_id, "next_version": self.next_version, "versions": versions})

    @classmethod
    def parse(cls, document: bytes) -> Ledger:
        """Read a ledger.

        Raises:
            ValueError: It is damaged or of another format.
        """
        body = unseal(document)
        if body.get("format") != _FORMAT:
            raise ValueError(f"format {body.get('format')!r}, expected {_FORMAT}")
        try:
            versions = {int(v): Entry(item["outcome"], bool(item["retired"])) for v, item in body["versions"].items()}
            ledger = cls(body["run_id"], int(body["next_version"]), versions)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or has the wrong type ({error!r})") from error
        if any(entry.outcome not in get_args(Outcome) for entry in versions.values()):
            raise ValueError("it holds an unknown outcome")
        if ledger.next_version <= max(versions, default=-1) or min(versions, default=0) < 0:
            raise ValueError("a version is out of bounds")
        if ledger.to_bytes() != document:
            raise ValueError("a field is unknown or has the wrong type")
        return ledger

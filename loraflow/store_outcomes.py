"""What the store tells of a version that was published, and of what an earlier process left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraflow.policy import Policy

__all__ = ["Published", "Recovered"]


@dataclass(frozen=True)
class Published:
    """A version that lies whole in the store.

    Attributes:
        policy: Its name.
        path: Its folder, or URL.
        bytes: Size of all its files, in bytes.
        digest: Content digest of the snapshot (hex), as the publisher gave it.
        phases_ms: Milliseconds: ``write`` until the files were written, ``publish`` until it was visible.
    """

    policy: Policy
    path: str
    bytes: int
    digest: str
    phases_ms: Mapping[str, float]


@dataclass(frozen=True)
class Recovered:
    """What `AdapterStore.recover` found.

    Attributes:
        committed: The version that the run continues from, None where there is none.
        live: Whole versions that were never retired, oldest first: servers may still have them loaded. The caller
            unloads and `retire`s those that it does not need.
        burnt: Those of ``live`` that are of no use: refused before, or never committed and burnt by this.
        lost: Committed versions that were not retired, and that the store does not hold any more.
        removed: Names of half-written leftovers that were removed.
    """

    committed: Policy | None
    live: tuple[Policy, ...]
    burnt: tuple[Policy, ...]
    lost: tuple[Policy, ...]
    removed: tuple[str, ...]

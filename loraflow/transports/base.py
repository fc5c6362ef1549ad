"""The protocol that every carrier implements, and nothing else to implement.

The life of a version, as `SyncManager` drives it (rank 0 alone, except for the snapshot, which every rank enters):

1. the manager takes an `AdapterSnapshot` of the trainer's adapter: the tensors that can have changed, and only those;
   a carrier may call the servers beforehand (``announce``), so that they wait for the content, not it for them;
2. ``deliver`` brings it to every server, where it can be asked for but where nothing asks for it yet;
3. the manager proves it on every server (`loraflow.verify`);
4. it commits, by switching the name that requests use, or calls ``withdraw`` everywhere;
5. ``retire`` frees an old version once nothing uses it; ``close`` leaves the servers as a new run wants them.

Merged carriers read the frozen base weights of the trainer's model and the snapshot, never the live adapter, so a
delivery may run behind the next training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from loraflow.adapter import AdapterSnapshot
    from loraflow.policy import Policy
    from loraflow.records import Proof
    from loraflow.server import VLLMServer

__all__ = ["Delivered", "Delivery", "NotAnnounced", "Transport"]


@dataclass(frozen=True)
class Delivered:
    """What one server did with one version.

    Attributes:
        model: Value of ``model`` that requests must use on this server to get the version.
        phases_ms: Milliseconds per phase on this server, e.g. ``{"load": 28.0}``.
        error: Why it failed; None where it did not. A failed server serves what it served before.
        proof: What the carrier itself proved in the same call; the manager then asks for nothing more.
    """

    model: str
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    error: Exception | None = None
    proof: Proof | None = None


@dataclass(frozen=True)
class Delivery:
    """The outcome of ``Transport.deliver``.

    Attributes:
        policy: The version delivered.
        bytes: Payload that travelled to each server, in bytes.
        digest: Content digest of the version (hex), the same for equal content.
        phases_ms: Milliseconds per phase shared by all servers, e.g. ``{"publish": 12.0}``.
        servers: Outcome by server URL.
        extra: More numbers for the record, e.g. the rounding error of a merge.
    """

    policy: Policy
    bytes: int
    digest: str
    phases_ms: Mapping[str, float]
    servers: Mapping[str, Delivered]
    extra: Mapping[str, float] = field(default_factory=dict)


class NotAnnounced:
    """For carriers whose servers cannot be called before the content is there."""

    def announce(
        self,
        policy: Policy,  # noqa: ARG002 - the protocol's
        servers: Sequence[VLLMServer],  # noqa: ARG002
        check: Callable[[AdapterSnapshot], None],  # noqa: ARG002
    ) -> bool:
        """Nothing is done. See `Transport.announce`."""
        return False


class Transport(Protocol):
    """One way to bring a version to servers.

    Attributes:
        kind: What serves it: a LoRA slot (``adapter``) or the base weights (``merged``).
        name: The carrier: ``filesystem``, ``direct``, ``nccl``, ``ipc``, ``gloo`` or ``fold``.
    """

    @property
    def kind(self) -> Literal["adapter", "merged"]: ...  # noqa: D102 - described above

    @property
    def name(self) -> str: ...  # noqa: D102 - described above

    def open(self, servers: Sequence[VLLMServer]) -> None:
        """Agree with the servers on what is constant for the run; raises `CapabilityError` where one cannot."""
        ...

    def announce(self, policy: Policy, servers: Sequence[VLLMServer], check: Callable[[AdapterSnapshot], None]) -> bool:
        """Call the servers before the content of ``policy`` is there; ``deliver`` or ``withdraw`` follows at once.

        Args:
            policy: The version.
            servers: All that it will be delivered to.
            check: Raises where the content must not be committed. An adapter carrier makes it part of ``deliver``,
                while the servers work: nobody asks for the version yet. A merged one does not: what is wrong would be
                served.

        Returns:
            Whether they were called. What concerns all raises, as from ``deliver``.
        """
        ...

    def deliver(self, policy: Policy, snapshot: AdapterSnapshot, servers: Sequence[VLLMServer]) -> Delivery:
        """Bring ``snapshot`` to every server under ``policy``'s name. Failures of single servers are in the result;
        what concerns all (a full disk, a broken group) raises."""
        ...

    def withdraw(self, policy: Policy, servers: Sequence[VLLMServer]) -> Mapping[str, Exception]:
        """Undo a delivery that was not committed: every server serves what it served before; the name is burnt.

        Returns:
            Why not, by URL, for servers of which that is not known now: requests must not go there.
        """
        ...

    def retire(self, policy: Policy, servers: Sequence[VLLMServer]) -> None:
        """Free a version that no request uses any more."""
        ...

    def holds(self, policy: Policy, server: VLLMServer) -> bool:
        """Whether ``server`` says that it still serves ``policy``; one that was restarted does not."""
        ...

    def digests(self, server: VLLMServer) -> bool:
        """Whether versions are proven on ``server`` by checksums of what it serves, so that no forward is needed."""
        ...

    def attach(self, policy: Policy, snapshot: AdapterSnapshot, server: VLLMServer) -> Delivered:
        """Bring a committed version to a server that was restarted, set aside, or not there when it was delivered.

        Nothing else of this run is left on it. Raises where it cannot be done.
        """
        ...

    def close(self, servers: Sequence[VLLMServer]) -> None:
        """Leave ``servers`` as a new run wants them: no adapter of this run, a pristine base, no open group. Servers
        that are not given keep what they serve; this side is closed in any case."""
        ...

"""What a fleet asks of one server before it gets requests for a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from loraflow.adapter import AdapterSnapshot
from loraflow.digest import prove_digest
from loraflow.errors import VerifyError
from loraflow.policy import Policy
from loraflow.records import Proof
from loraflow.server import VLLMServer
from loraflow.transports.base import Delivered
from loraflow.verify import Expected, Prover

__all__ = ["Held", "prove", "require_effect", "require_match", "slowest"]


@dataclass(frozen=True)
class Held:
    """A version that requests use, kept to bring it to a server that returns or joins.

    Attributes:
        policy: The version.
        snapshot: Its content.
        expected: The trainer's forward on the probe at that version; None where no canary was made for it.
    """

    policy: Policy
    snapshot: AdapterSnapshot
    expected: Expected | None


def prove(
    server: VLLMServer,
    outcome: Delivered,
    version: Held,
    prover: Prover,
    *,
    by_digest: bool,
    awaited: Callable[[], Expected] | None = None,
) -> Proof:
    """The strongest proof at hand that ``server`` serves ``version``; never raises for a mismatch.

    What the carrier proved in its own call is not asked again; a canary comes on top where there is a forward to
    compare with: the version's, or ``awaited``, which is called once the server has answered.
    """
    proof = outcome.proof or Proof("unproven", passed=True)
    if by_digest and outcome.proof is None:
        proof = prove_digest(server, version.policy, version.snapshot)
    expected = awaited or version.expected
    if expected is not None and proof.passed:
        canary = prover.check(server, outcome.model, expected)
        proof = replace(canary, kind="digest") if canary.passed and proof.kind == "digest" else canary
    return proof


def slowest(outcomes: Mapping[str, Delivered]) -> dict[str, float]:
    """Milliseconds of the slowest server, per phase: what the fleet waited for."""
    phases: dict[str, float] = {}
    for outcome in outcomes.values():
        for phase, ms in outcome.phases_ms.items():
            phases[phase] = max(ms, phases.get(phase, 0.0))
    return phases


def require_effect(server: VLLMServer, moves: Proof) -> None:
    """Raise `VerifyError` where a canary serves what the base serves."""
    if not moves.passed:
        raise VerifyError(
            "an adapter that must change the output was loaded, and changes nothing",
            server=server.url,
            hint="its tensor names do not reach the served model, or --lora-target-modules leaves its modules out",
        )


def require_match(server: VLLMServer, proof: Proof) -> None:
    """Raise `VerifyError` where a canary is served otherwise than the trainer computes it."""
    if not proof.passed:
        raise VerifyError(
            f"an adapter is served otherwise than the trainer computes it ({proof.detail})",
            server=server.url,
            hint="does the server scale it the same way (rank patterns, rsLoRA), and serve every targeted module?",
        )

"""Who belongs to a fleet, and what one attempt at a version means for each server: pure decisions, no effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from loraflow.errors import CommitError, LoraflowError, VerifyError
from loraflow.policy import Policy
from loraflow.records import Proof
from loraflow.server_info import ServerInfo

__all__ = ["Aside", "Decision", "Verdict", "blocked", "decide", "difference", "words"]

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class Verdict:
    """What one server made of one version.

    Attributes:
        error: Why it was not delivered, or could not be asked; None where neither is so.
        proof: What it showed; None where it was not asked.
    """

    error: Exception | None = None
    proof: Proof | None = None

    @property
    def reason(self) -> str | None:
        """Why it must not get requests for the version; None where it may."""
        if self.error is not None:
            return words(self.error)
        if self.proof is None:
            return "it was not asked for a proof"
        return None if self.proof.passed else f"something else is served ({self.proof.detail})"


@dataclass(frozen=True)
class Decision:
    """What to do after an attempt.

    Attributes:
        serving: Servers that get requests for the version; empty: roll back everywhere.
        aside: Servers to set aside, with the reason.
        error: What to report where nothing is committed.
    """

    serving: tuple[str, ...] = ()
    aside: Mapping[str, str] = field(default_factory=dict)
    error: Exception | None = None


def decide(policy: Policy, verdicts: Mapping[str, Verdict], on_failure: Literal["fail", "quarantine"]) -> Decision:
    """Commit on all, or on none (rule 6); with ``quarantine``, on all that remain once the failed ones are set aside.

    Where every server fails, the version is at fault rather than the servers: none is set aside.
    """
    reasons = {url: reason for url, verdict in verdicts.items() if (reason := verdict.reason) is not None}
    serving = tuple(url for url in verdicts if url not in reasons)
    if not reasons:
        return Decision(serving)
    if on_failure == "quarantine" and serving:
        return Decision(serving, reasons)
    return Decision(error=_failure(policy, {url: verdicts[url] for url in reasons}, len(verdicts)))


def blocked(kind: type[CommitError], aside: Mapping[str, str], because: Exception | None = None) -> CommitError:
    """The error that nothing goes on without the servers that are set aside.

    Args:
        kind: Its class.
        aside: Why they are, by URL.
        because: What failed before.
    """
    reasons = "; ".join(f"{url} is set aside: {reason}" for url, reason in aside.items())
    return kind(
        reasons if because is None else f"{words(because)}; {reasons}",
        hint="restart it, or find out what else writes to its weights; it is taken back once it is proven",
    )


def words(error: Exception) -> str:
    """What an error says, without the server's URL and the hint: for reports that name the server themselves."""
    return error.message if isinstance(error, LoraflowError) else f"{type(error).__name__}: {error}"


def _failure(policy: Policy, failed: Mapping[str, Verdict], total: int) -> Exception:
    url, verdict = next(iter(failed.items()))
    if total == 1 and verdict.error is not None:
        return verdict.error
    if all(verdict.error is None for verdict in failed.values()):
        return VerifyError(f"{policy} was loaded, but {verdict.reason}", server=url, hint="the name is burnt")
    reasons = "; ".join(f"{url}: {verdict.reason}" for url, verdict in failed.items())
    return CommitError(f"{policy} failed on {len(failed)} of {total} servers, none was moved: {reasons}")


@dataclass(frozen=True)
class Aside:
    """A server that gets no requests until it is proven again.

    Attributes:
        reason: Why, in words.
        since: When it was set aside, seconds on a monotonic clock.
        tries: How often it was tried again, in vain.
        next_try: When to try again, on the same clock.
    """

    reason: str
    since: float
    tries: int = 0
    next_try: float = 0.0

    @classmethod
    def now(cls, reason: str, now: float) -> Aside:
        """Set aside at ``now``."""
        return cls(reason, now, next_try=now + FIRST_RETRY_SECONDS)

    def failed_again(self, reason: str, now: float) -> Aside:
        """After another try in vain: the next one waits twice as long."""
        wait = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(self.tries + 1, 16))
        return replace(self, reason=reason, tries=self.tries + 1, next_try=now + wait)

    def due(self, now: float) -> bool:
        """Whether to try it again."""
        return now >= self.next_try


def difference(reference: ServerInfo, found: ServerInfo) -> str | None:
    """Why a server that returns or joins does not fit the fleet that ``reference`` is of; None where it fits.

    What a server does not say is not held against it: the proof comes after.
    """
    said = reference.lora_known and found.lora_known  # both show their configuration, where None is a word too
    for name in ("architecture", "vocab_size", "dtype", "logprobs_mode", "quantization", "weight_transfer"):
        expected, got = getattr(reference, name), getattr(found, name)
        if got != expected and (said or (got is not None and expected is not None)):
            return f"its {name} is {got!r}, the others' is {expected!r}"
    if reference.lora is not None and found.lora is None and found.lora_known:
        return "it was started without LoRA"
    if reference.lora is not None and found.lora is not None and found.lora.max_rank < reference.lora.max_rank:
        return f"its --max-lora-rank is {found.lora.max_rank}, the others' is {reference.lora.max_rank}"
    wanted = reference.plugin.capabilities if reference.plugin else frozenset()
    missing = wanted - (found.plugin.capabilities if found.plugin else frozenset())
    return f"loraflow's plugin lacks {', '.join(sorted(missing))} there" if missing else None

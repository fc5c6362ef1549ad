"""Which servers get requests: those that have proven the version in force.

One that was set aside, was restarted, or joins in the middle of a run is brought to that version and proven before it
gets any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError, CommitError, LoraflowError, UnsettledError, VerifyError
from loraflow.fleet_proof import Held, prove
from loraflow.membership import Aside, blocked, difference, words
from loraflow.plan import Plan
from loraflow.records import Proof
from loraflow.server import VLLMServer
from loraflow.transports.base import Delivered, Transport
from loraflow.transports.filesystem import on_every_server
from loraflow.verify import Expected, Prover

__all__ = ["Roster"]

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.5


class Roster:
    """The servers of one run.

    Args:
        servers: Clients, connected and checked; at least one.
        plan: What was chosen for them.
        transport: Its carrier, opened.
        config: Options.

    Attributes:
        known: All servers, by URL.
        held: The version in force; None before the first.
        model_names: Value of ``model`` in requests for it, by URL.
        base: The trainer's forward without the adapter, to compare the base of servers that return or join with;
            None where it is not known.
        by_digest: Versions are proven by digest alone: no forward is made for them.
    """

    def __init__(self, servers: Sequence[VLLMServer], plan: Plan, transport: Transport, config: SyncConfig) -> None:
        self.known = {server.url: server for server in servers}
        self.held: Held | None = None
        self.model_names: dict[str, str] = {}
        self.base: Expected | None = None
        self.by_digest = False
        self._plan = plan
        self._transport = transport
        self._config = config
        self._reference = servers[0].info
        self._aside: dict[str, Aside] = {}
        self._joined: list[str] = []  # since they were asked for

    @property
    def servers(self) -> tuple[VLLMServer, ...]:
        """Those that get requests."""
        return tuple(server for url, server in self.known.items() if url not in self._aside)

    @property
    def aside(self) -> Mapping[str, str]:
        """Why servers get no requests now, by URL."""
        return {url: aside.reason for url, aside in self._aside.items()}

    def take_joined(self) -> tuple[str, ...]:
        """URLs of those that began to get requests since this was asked the last time."""
        joined, self._joined = tuple(self._joined), []
        return joined

    # ---------------------------------------------------------------- out

    def set_aside(self, url: str, reason: str) -> None:
        """No requests go there until it is proven again."""
        self._aside[url] = Aside.now(reason, time.monotonic())
        _log.error("%s is set aside until it is proven again: %s", url, reason)

    def blame(self, server: VLLMServer, error: LoraflowError) -> None:
        """A request failed there: with ``quarantine`` it is set aside where others remain; else it is raised."""
        if self._config.on_server_failure == "fail" or {s.url for s in self.servers} <= {server.url}:
            raise error
        self.set_aside(server.url, words(error))

    def doubt(self, left: Mapping[str, Exception], suspects: Collection[str], prover: Prover) -> None:
        """After a version that failed: set aside whoever does not serve the version in force any more.

        Args:
            left: Servers that the version could not be taken back from, and why.
            suspects: Servers that showed something else than the version: is it the version, or the server?
            prover: Asks the suspects, and all servers of merged weights where log-probs prove those.
        """
        held, merged, reasons = self.held, self._plan.transport == "merged", {u: words(e) for u, e in left.items()}
        if held is not None and (held.expected is not None or not merged):
            asked = [s for s in self.servers if s.url not in reasons and (merged or s.url in suspects)]
            ask = partial(self._prove_again, held, prover, by_digest=not merged)
            outcomes = on_every_server(asked, ask, held.policy.name)
            # A name means one content for ever: a server that only did not answer is not in doubt for that.
            kinds = Exception if merged else VerifyError
            reasons |= {url: words(o.error) for url, o in outcomes.items() if isinstance(o.error, kinds)}
        for url, reason in reasons.items():
            self.set_aside(url, f"it is not known what it serves: {reason}")

    def _prove_again(self, held: Held, prover: Prover, server: VLLMServer, *, by_digest: bool) -> Delivered:
        outcome = Delivered(self.model_names[server.url])
        digest = by_digest and self._config.verify != "canary" and self._transport.digests(server)
        self._require(server, prove(server, outcome, held, prover, by_digest=digest), str(held.policy))
        return outcome

    def not_enough(self, because: Exception | None = None) -> CommitError | None:
        """Why nothing goes on without those that are set aside; None where it does.

        `UnsettledError` where one of them answers: a server that does not gives no wrong answers.
        """
        if not self._aside or (self._config.on_server_failure == "quarantine" and self.servers):
            return None
        kind = UnsettledError if any(self.known[url].health() for url in self._aside) else CommitError
        return blocked(kind, self.aside, because)

    # ---------------------------------------------------------------- in

    def join(self, server: VLLMServer, prover: Prover) -> None:
        """Take one more server in: it is brought to the version in force and proven before it gets requests.

        Raises:
            CapabilityError: It does not fit the others.
            LoraflowError: It cannot be brought there, or proves otherwise.
        """
        if server.url in self.known:
            raise CommitError("it is in the fleet already", server=server.url)
        self._bring(server, prover)
        self.known[server.url] = server
        self._joined.append(server.url)

    def try_again(self, prover: Prover) -> None:
        """Try those that are set aside and whose time has come; all of them where nothing goes on without."""
        needed = self._config.on_server_failure == "fail" or not self.servers
        due = {url: aside for url, aside in self._aside.items() if needed or aside.due(time.monotonic())}
        errors = self._brought([self.known[url] for url in due], prover)
        for url, error in errors.items():
            self._aside[url] = due[url].failed_again(words(error), time.monotonic())

    def mend(self, prover: Prover) -> None:
        """See that every server still serves the version in force, and bring back what does not.

        Raises:
            LoraflowError: Too few came back within ``start_timeout``; the last server's error. Those that did not are
                set aside.
        """
        held, quarantine = self.held, self._config.on_server_failure == "quarantine"
        if held is None:
            return
        self.try_again(prover)
        lacking = self._lacking(held)
        if self._aside and not (quarantine and self.servers):
            lacking += [self.known[url] for url in self._aside]
        deadline = time.monotonic() + self._config.start_timeout
        while lacking:
            errors = self._brought(lacking, prover)
            lacking = [server for server in lacking if server.url in errors]
            enough = quarantine and any(server not in lacking for server in self.servers)
            if enough or (lacking and time.monotonic() >= deadline):
                for server in lacking:
                    if server.url not in self._aside:
                        self.set_aside(server.url, words(errors[server.url]))
                if not enough:
                    raise errors[lacking[0].url]
                return
            if lacking:
                time.sleep(_RETRY_SECONDS)

    def _lacking(self, held: Held) -> list[VLLMServer]:
        def ask(server: VLLMServer) -> Delivered:
            if not self._transport.holds(held.policy, server):
                raise VerifyError(f"{held.policy} is not served any more", server=server.url)
            return Delivered(held.policy.name)

        outcomes = on_every_server(self.servers, ask, held.policy.name)
        for url, outcome in outcomes.items():
            if outcome.error is not None:
                _log.warning("%s lost %s: %s", url, held.policy, outcome.error)
        return [server for server in self.servers if outcomes[server.url].error is not None]

    def _brought(self, servers: Sequence[VLLMServer], prover: Prover) -> dict[str, Exception]:
        """Bring ``servers`` to the version in force, prove it, and let requests go there; why one could not be brought
        there, by URL."""

        def ask(server: VLLMServer) -> Delivered:
            if not server.health():
                raise LoraflowError("it does not answer", server=server.url)
            return Delivered("")

        asked = on_every_server(servers, ask, "")  # at the same time: one that was stopped answers nobody for seconds
        errors = {url: outcome.error for url, outcome in asked.items() if outcome.error is not None}
        for server in servers:
            if server.url in errors:
                continue
            try:
                self._bring(server, prover)
            except LoraflowError as error:
                errors[server.url] = error
                continue
            except BaseException:
                self.set_aside(server.url, "bringing it to the version in force was broken off")
                raise
            self._joined.append(server.url)
            if self._aside.pop(server.url, None) is not None:
                _log.info("%s is back, and proven", server.url)
        return errors

    def _bring(self, server: VLLMServer, prover: Prover) -> None:
        unfit = difference(self._reference, server.refresh())
        if unfit is not None:
            raise CapabilityError(f"it does not fit the other servers: {unfit}", server=server.url)
        if self.base is not None and self._plan.transport == "adapter":
            self._require(server, prover.check(server, server.info.model, self.base), "its base")
        held = self.held
        if held is None:
            return
        outcome = self._transport.attach(held.policy, held.snapshot, server)
        by_digest = self._config.verify != "canary" and self._transport.digests(server)
        if self.by_digest and not by_digest:
            raise CapabilityError("what it serves has no digest, by which the others are proven", server=server.url)
        self._require(server, prove(server, outcome, held, prover, by_digest=by_digest), str(held.policy))
        self.model_names[server.url] = outcome.model

    def _require(self, server: VLLMServer, proof: Proof, what: str) -> None:
        if not proof.passed:
            raise VerifyError(f"{what} is not what the trainer has ({proof.detail})", server=server.url)

"""Several servers as one: a version is loaded on all, proven on all, and committed; or it is rolled back everywhere.

A server that fails stops the sync, or is set aside (``on_server_failure``). One that was set aside, was restarted, or
joins in the middle of a run is brought to the committed version and proven before it gets requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from loraflow.adapter import AdapterSnapshot
from loraflow.config import SyncConfig
from loraflow.errors import LoraflowError, UnsettledError
from loraflow.fleet_proof import Held, prove, require_effect, require_match, slowest
from loraflow.forward import Forward, Wanted
from loraflow.membership import Verdict, decide
from loraflow.plan import Plan
from loraflow.policy import Policy
from loraflow.preflight import require_finite
from loraflow.records import Proof, SyncRecord
from loraflow.retirement import Retirement
from loraflow.roster import Roster
from loraflow.server import Completion, Unreachable, VLLMServer
from loraflow.spread import spread
from loraflow.store import AdapterStore, Recovered
from loraflow.transports.base import Delivered, Delivery, Transport
from loraflow.transports.filesystem import on_every_server
from loraflow.verify import Expected, Prover

__all__ = ["Fleet"]

_log = logging.getLogger(__name__)
_LOADED = Proof("unproven", passed=True)  # stands in until the proof was asked for


class Fleet:
    """The servers of one run; lives on rank 0.

    Args:
        servers: Clients, connected and checked.
        plan: What was chosen for them.
        transport: Its carrier, opened.
        store: The run's ledger of versions, and where adapters are published.
        config: Options.
        missing: Clients of servers that do not answer yet; they are taken in when they do.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        plan: Plan,
        transport: Transport,
        store: AdapterStore,
        config: SyncConfig,
        missing: Sequence[VLLMServer] = (),
    ) -> None:
        self.plan = plan
        self.transport = transport
        self.store = store
        self.config = config
        self._roster = Roster([*servers, *missing], plan, transport, config)
        self._moving = threading.Lock()
        self._checked_by_carrier: Policy | None = None
        self._inherited = False
        self._old = Retirement(transport, store.run_id, config.retained_versions)
        for server in missing:
            self._roster.set_aside(server.url, "it did not answer at the start")
        self._roster.by_digest = self.proves_by_digest

    @property
    def policy(self) -> Policy | None:
        """The version that requests use; None before the first commit."""
        held = self._roster.held
        return None if held is None else held.policy

    @property
    def model_names(self) -> Mapping[str, str]:
        """Value of ``model`` in requests, by server URL."""
        return self._roster.model_names

    @property
    def servers(self) -> tuple[VLLMServer, ...]:
        """Those that get requests: each has proven `policy`."""
        return self._roster.servers

    @property
    def aside(self) -> Mapping[str, str]:
        """Why servers get no requests now, by URL."""
        return self._roster.aside

    def know_base(self, base: Expected) -> None:
        """The trainer's forward without the adapter: the base of servers that return or join is compared with it."""
        self._roster.base = base

    def fingerprint(self, prover: Prover, base: Expected) -> tuple[float, float]:
        """Compare every server's base with the trainer's; what a version may be off by, and what can be seen (nats)."""
        self.know_base(base)
        for found in prover.fingerprint(self.servers, base):
            _log.info("base of %s: mean |Δlogp| %.2e against the trainer's", found.server, found.mean_abs_dlogp)
        return prover.atol, prover.visible

    @property
    def proves_by_digest(self) -> bool:
        """Whether every server can checksum what it serves, so that no canary is needed after each load."""
        return self.config.verify != "canary" and all(self.transport.digests(server) for server in self.servers)

    def adopt(self, found: Recovered) -> None:
        """Take over what an earlier process of this run left in the store and on the servers."""
        self._inherited = len(found.live) > len(found.burnt)
        self._old.adopt(found, self.servers)

    # ---------------------------------------------------------------- one version for all

    @contextmanager
    def announced(self, policy: Policy, prover: Prover, check: Callable[[], None]) -> Iterator[bool]:
        """Inside, the content of ``policy`` is gathered, and the servers are called for it already where the carrier
        can; `move` follows. An error inside takes the calls back.

        Gives whether ``check``, which raises where the content is not what it is taken for, is called by `move`, while
        the servers work; otherwise it is the caller's.
        """

        def checked(snapshot: AdapterSnapshot) -> None:
            check()
            require_finite(snapshot)

        called = False
        with self._moving:
            self.settle()
            if not self.aside and self.servers:
                try:
                    called = self.transport.announce(policy, self.servers, checked)
                except LoraflowError as error:
                    _log.info("%s is not announced: %s", policy, error)  # what is wrong, `move` meets and tells
        self._checked_by_carrier = policy if called and self.plan.transport == "adapter" else None
        try:
            yield self._checked_by_carrier is not None
        except BaseException:
            if called:
                with self._moving:
                    self._roll_back(policy, self.servers, prover)
            raise

    def move(
        self,
        policy: Policy,
        snapshot: AdapterSnapshot,
        expected: Wanted,
        prover: Prover,
        *,
        in_use: Collection[Policy] = (),
    ) -> tuple[SyncRecord, Exception | None]:
        """Bring every server to ``policy``, or leave all where they are.

        With ``on_server_failure="quarantine"``, servers that fail are set aside where at least one succeeds.

        Args:
            policy: The new version.
            snapshot: Its content.
            expected: The trainer's forward on the probe, or where it will be; None where this version needs no canary.
            prover: Compares.
            in_use: Versions that requests in flight use; they are not retired.

        Returns:
            The record, and the error of a sync that failed. Failing is an outcome here: the caller decides, on every
            rank, whether to raise.
        """
        record = SyncRecord(
            step=snapshot.step,
            policy=policy.name,
            version=policy.version,
            transport=self.plan.transport,
            carrier=self.plan.carrier,
            outcome="failed",
        )
        forward, known = (expected, None) if isinstance(expected, Forward) else (None, expected)
        version = Held(policy, snapshot, known)
        with self._moving:
            self.settle()
            self._roster.try_again(prover)
            error: Exception | None = self._roster.not_enough()
            if error is None:
                record, error = self._move(record, version, prover, in_use, forward)
            if error is not None:
                record = replace(record, error=f"{type(error).__name__}: {error}")
            return replace(record, aside=self.aside, joined=self._roster.take_joined()), error

    def _move(
        self,
        record: SyncRecord,
        version: Held,
        prover: Prover,
        in_use: Collection[Policy],
        forward: Forward | None,
    ) -> tuple[SyncRecord, Exception | None]:
        policy, servers, proven = version.policy, self.servers, dict[str, Verdict]()
        try:
            if policy != self._checked_by_carrier:
                require_finite(version.snapshot)
            delivery = self._deliver(policy, version.snapshot, servers)
            record = _with_delivery(record, delivery)
            aside = self._judge(policy, {url: Verdict(o.error, _LOADED) for url, o in delivery.servers.items()})
            record, proven = self._prove(record, delivery, version, prover, aside, forward)
            if forward is not None:  # what it failed with is no server's failing
                version = replace(version, expected=forward.result())
            aside = {**aside, **self._judge(policy, proven)}
            self._commit(version, delivery, aside)
        except Exception as failure:  # noqa: BLE001 - told in the outcome, see `move`
            self._roll_back(
                policy, servers, prover, [url for url, v in proven.items() if v.proof and not v.proof.passed]
            )
            stop = self._roster.not_enough(failure)
            return record, stop if isinstance(stop, UnsettledError) else failure
        except BaseException:  # Ctrl-C: the servers keep what they serve, and the interrupt travels on
            self._roll_back(policy, servers, prover)
            raise
        # Old versions are freed behind the training step: nothing waits for that but the next move.
        self._old.committed(policy, self.servers, in_use)
        return replace(record, outcome="committed"), None

    def try_out(
        self, policy: Policy, snapshot: AdapterSnapshot, base: Expected, wanted: Expected | None, prover: Prover
    ) -> None:
        """Serve a canary, look whether it does what it must, and take it away again.

        Args:
            policy: Name to burn for it.
            snapshot: An adapter with a certain effect.
            base: The trainer's forward without an adapter.
            wanted: The trainer's forward with the canary; None where that cannot be had.
            prover: Compares.

        Raises:
            VerifyError: It changes nothing, or something else than on the trainer.
            LoadError: A server refused it.
        """
        self.settle()
        servers = self.servers
        try:
            delivery = self._deliver(policy, snapshot, servers)
            for server in servers:
                outcome = delivery.servers[server.url]
                if outcome.error is not None:
                    raise outcome.error
                require_effect(server, prover.moves(server, outcome.model, base))
                if wanted is not None:
                    require_match(server, prover.check(server, outcome.model, wanted))
        finally:
            self._roll_back(policy, servers, prover)
        stop = self._roster.not_enough()
        if stop is not None:
            raise stop

    # ---------------------------------------------------------------- who takes part

    def ensure(self, prover: Prover) -> None:
        """Before requests: see that every server still serves the committed version, and mend what does not.

        A server that was restarted is brought to the version and proven. Where servers are gone, this waits for them
        up to ``start_timeout``: for all, or with ``quarantine`` for one. While a delivery runs behind it does nothing.

        Raises:
            LoraflowError: Too few came back; the last server's error.
        """
        if not self._moving.acquire(blocking=False):
            return
        try:
            self._roster.mend(prover)
        finally:
            self._moving.release()

    def join(self, server: VLLMServer, prover: Prover) -> None:
        """Take one more server in; see `Roster.join`."""
        with self._moving:
            self._roster.join(server, prover)

    def blame(self, server: VLLMServer, error: LoraflowError) -> None:
        """A request failed there; see `Roster.blame`."""
        self._roster.blame(server, error)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        names: Mapping[str, str] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Completions by the committed version, spread over the servers that have proven it; prompt-major.

        What fails on a server that is then set aside is asked of another one.

        Args:
            prompts: Token ids.
            n: Completions per prompt.
            names: Model to ask for, by server URL; the committed version's where not given.
            **sampling: See `VLLMServer.generate`.
        """
        names = dict(self.model_names if names is None else names)
        servers = [server for server in self.servers if server.url in names]
        if not servers:
            raise self._roster.not_enough() or LoraflowError("no server is left to ask")
        salt = {"cache_salt": str(self.policy)} if self.plan.transport == "merged" else {}

        def ask(server: VLLMServer, share: Sequence[Sequence[int]]) -> list[Completion]:
            return server.generate(share, model=names[server.url], n=n, **{**salt, **sampling})

        answers = spread(prompts, servers, ask, self.blame)
        return [replace(answer, prompt=index // n) for index, answer in enumerate(answers)]

    def settle(self) -> None:
        """Wait until the versions that the last move made old are freed."""
        self._old.settle()

    def give_way(self) -> bool:
        """After a start that failed: where the servers serve what an earlier process of this run left, this one's own
        version is freed, and theirs are what they serve; whether that is so."""
        if not self._inherited or self.plan.transport != "adapter":
            return False
        self.settle()
        if self._roster.held is not None:
            with suppress(LoraflowError):  # its proof failed, and what led here is told
                self.transport.retire(self._roster.held.policy, self.servers)
        return True

    def close(self, *, keep_serving: bool = False) -> None:
        """Free the servers of this run and close the store; every step is tried, the first error is raised.

        Args:
            keep_serving: Leave the servers with what they serve; only this side is closed.
        """
        errors: list[Exception] = []
        self._old.close()
        known = self._roster.known
        reachable = [*self.servers, *(known[url] for url in self.aside if known[url].health())]
        clients = [server.close for server in known.values()]
        all_freed = not keep_serving and len(reachable) == len(known)

        def clear() -> None:
            # A run id that was given may be continued: its newest version stays. A server that could not be freed may
            # still read any of them.
            if all_freed and not any(self._may_read(server) for server in known.values()):
                self.store.clear(keep=1 if self.config.run_id else 0)

        close = partial(self.transport.close, [] if keep_serving else reachable)
        steps: list[Callable[[], None]] = [close, clear, self.store.close, *clients]
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - raised below, once everything was tried
                errors.append(error)
        if errors:
            raise errors[0]

    def _may_read(self, server: VLLMServer) -> bool:
        """Whether ``server`` may still load a version of this run: it lists one, or does not say."""
        try:
            named = [Policy.parse(model.id) for model in server.models() if model.parent is not None]
        except Unreachable:
            return False  # its process is gone, and what it held
        except LoraflowError:
            return True
        return any(policy is not None and policy.run_id == self.store.run_id for policy in named)

    # ---------------------------------------------------------------- inside: a move

    def _deliver(self, policy: Policy, snapshot: AdapterSnapshot, servers: Sequence[VLLMServer]) -> Delivery:
        if self.plan.transport == "merged":
            self.store.reserve(policy)  # nothing is published under the name, which is used up all the same
        return self.transport.deliver(policy, snapshot, servers)

    def _judge(self, policy: Policy, verdicts: Mapping[str, Verdict]) -> Mapping[str, str]:
        """Which servers to set aside once the version is committed; raises where it must not be."""
        decision = decide(policy, verdicts, self.config.on_server_failure)
        if decision.error is not None:
            raise decision.error
        return decision.aside

    def _prove(
        self,
        record: SyncRecord,
        delivery: Delivery,
        version: Held,
        prover: Prover,
        aside: Collection[str],
        forward: Forward | None,
    ) -> tuple[SyncRecord, dict[str, Verdict]]:
        started = time.perf_counter()
        by_digest, awaited = self.proves_by_digest, None if forward is None else forward.timed

        def ask(server: VLLMServer) -> Delivered:
            outcome = delivery.servers[server.url]
            proof = prove(server, outcome, version, prover, by_digest=by_digest, awaited=awaited)
            return replace(outcome, proof=proof)

        asked = [self._roster.known[url] for url in delivery.servers if url not in aside]
        outcomes = on_every_server(asked, ask, delivery.policy.name)
        proofs = {url: outcome.proof for url, outcome in outcomes.items() if outcome.proof is not None}
        waited = {} if forward is None else {"forward_wait": forward.wait_ms}
        asking = (time.perf_counter() - started) * 1e3 - sum(waited.values())
        phases = {**record.phases_ms, "verify": asking, **waited}
        verdicts = {url: Verdict(outcome.error, outcome.proof) for url, outcome in outcomes.items()}
        return replace(record, proofs=proofs, phases_ms=phases), verdicts

    def _commit(self, version: Held, delivery: Delivery, aside: Mapping[str, str]) -> None:
        if self.plan.transport == "adapter":
            self.store.mark_committed(version.policy)
        for url, reason in aside.items():
            self._roster.set_aside(url, reason)
        self._roster.model_names = {url: outcome.model for url, outcome in delivery.servers.items()}
        self._roster.held = version

    def _roll_back(
        self, policy: Policy, servers: Sequence[VLLMServer], prover: Prover, suspects: Collection[str] = ()
    ) -> None:
        """Every server of ``servers`` serves what it served before, or is set aside; see `Roster.doubt`."""
        self._old.untidy()
        try:
            left = self.transport.withdraw(policy, servers)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not hide what led here
            # A name that was not taken back is asked for by nobody; merged weights have none.
            _log.exception("%s could not be withdrawn everywhere; its name is burnt", policy)
            left = dict.fromkeys((s.url for s in servers), error) if self.plan.transport == "merged" else {}
        except BaseException:
            for server in servers if self.plan.transport == "merged" else ():
                self._roster.set_aside(server.url, f"taking {policy} back was broken off")
            raise
        self._roster.doubt(left, suspects, prover)


def _with_delivery(record: SyncRecord, delivery: Delivery) -> SyncRecord:
    return replace(
        record,
        bytes=delivery.bytes,
        digest=delivery.digest,
        extra=delivery.extra,
        phases_ms={**delivery.phases_ms, **slowest(delivery.servers)},
        servers={url: outcome.phases_ms for url, outcome in delivery.servers.items()},
    )

"""`SyncManager`: when, what, how, and the record of it.

Every rank of the trainer makes one and calls `start`, `sync` and `close` in the same order; rank 0 alone talks to the
servers, and its failures are raised on every rank.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from loraflow.adapter import AdapterSnapshot, AdapterSpec
from loraflow.behind import Behind
from loraflow.canary import find_canary
from loraflow.config import SyncConfig
from loraflow.connect import Agreed, connect
from loraflow.correction import Correction, CorrectionOptions, correct, drift
from loraflow.errors import LoraflowError, ModelChangedError, StaleError, UnsettledError
from loraflow.fleet import Fleet
from loraflow.forward import Wanted, deliver_with, forward_for, unless_failed
from loraflow.gate import Gate
from loraflow.gathering import Gathering
from loraflow.plan import Plan
from loraflow.policy import Policy
from loraflow.ranks import Ranks
from loraflow.records import RecordFile, Rollouts, SyncRecord
from loraflow.schedule import make_schedule
from loraflow.server import Completion, VLLMServer
from loraflow.verify import Expected, Prover

__all__ = ["SyncManager"]

_log = logging.getLogger(__name__)

_RECORDS = 10_000

Outcome = tuple[SyncRecord, Exception | None]


class SyncManager:
    """Keeps vLLM servers on the trainer's policy.

    Args:
        model: The trainer's PEFT model, wrapped as it is trained.
        servers: Base URLs of the servers, or clients of them.
        config: All options; or give options of `SyncConfig` as keywords.
        **options: See `SyncConfig`.

    Attributes:
        config: The options.
        policy: The version that requests use: on every server, and proven. None before `start`.
        records: One per attempted sync, on every rank; the newest 10,000 (``record_file`` keeps all).
        counters: ``syncs``, ``failures``, and ``unproven`` syncs so far.
    """

    def __init__(
        self,
        model: nn.Module,
        servers: str | VLLMServer | Sequence[str | VLLMServer],
        config: SyncConfig | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise TypeError("give either a SyncConfig or its options, not both")
        self.model = model
        self.config = config or SyncConfig(**options)
        longest = max(self.config.start_timeout, self.config.load_timeout, self.config.vllm_server_timeout)
        self.ranks = Ranks(self.config.collective_timeout, self.config.collective_timeout + longest)
        self.policy: Policy | None = None
        self.records: list[SyncRecord] = []
        self.counters: Counter[str] = Counter(syncs=0, failures=0, unproven=0)
        self._given = [servers] if isinstance(servers, (str, VLLMServer)) else list(servers)
        self._schedule = make_schedule(self.config)
        self._correction = CorrectionOptions.from_config(self.config)
        self._file = self.ranks.together(self._record_file) if self.config.record_file else None
        self._fleet: Fleet | None = None  # rank 0 only
        self._agreed: Agreed | None = None
        self._spec: AdapterSpec | None = None
        self._prover: Prover | None = None
        self._names: dict[str, str] = {}  # what requests are asked under now, by server URL; on rank 0
        self._next_version = 0
        self._attempted = 0
        self._without_canary = 0  # versions since the last one that a canary proved
        self._has_canary = False  # the version under way
        self._spent: list[int] = []  # versions that made nothing older, see `behind`
        self._last_step: int | None = None  # of the last delivery that was not seen to fail
        self._served_step: int | None = None
        self._closed = False
        self._gate = Gate(self.config.load_timeout + self.config.collective_timeout)
        self._behind: Behind[Outcome] = Behind(
            self.config.load_timeout + self.config.collective_timeout + self.config.request_timeout
        )
        self._sync_hooks: list[Callable[[SyncRecord], None]] = []
        self._rollout_hooks: list[Callable[[Rollouts], None]] = []

    # ---------------------------------------------------------------- life

    def start(self, step: int = 0) -> Plan:
        """Reach the servers, compare the base, choose the transport, deliver the model as it is, and prove it.

        Afterwards the first rollout is the trainer's policy, also after a resume from a checkpoint. Where the adapter
        does nothing yet (B is zero), a canary shows that one that does something would be seen.

        Where it fails, adapters that an earlier process of this run left on the servers stay there.

        Args:
            step: Optimizer step of the model as it is now.

        Raises:
            CapabilityError: A server cannot do what is needed.
            VerifyError: A server serves another base, or an adapter has no effect there.
            SyncTimeout: A server was not up within ``start_timeout``.
        """
        if self._agreed is not None or self._closed:
            raise LoraflowError(f"the manager was {'closed' if self._closed else 'started'} already")
        spec = self._spec = self.ranks.together(lambda: AdapterSpec.from_model(self.model))

        def reach() -> Agreed:
            self._fleet, agreed = connect(self.model, spec, self._given, self.config)
            return agreed

        self._agreed = self.ranks.on_main(reach)
        self._next_version = self._agreed.next_version
        try:
            prover = self._prover = Prover(self.model, self.config, self.ranks, head_adapted="lm_head" in spec.features)
            prover.choose_probe(self._fleet.servers[0] if self._fleet else None)
            base = self.ranks.together(lambda: prover.expect(adapter=False))
            prover.atol, prover.visible = self.ranks.on_main(
                lambda: self._fleet.fingerprint(prover, base) if self._fleet else (0.0, 0.0)
            )
            expected = self.ranks.together(prover.expect)
            self._sync(step, expected, began=time.perf_counter())
            if not prover.proves_itself(expected, base):
                self._try_canary(prover, base)
        except BaseException:
            self._close_after_error(started=False)
            raise
        return self._agreed.plan

    def close(self, *, keep_serving: bool = False) -> None:
        """Finish what runs behind, free the servers of this run, and close every connection and file.

        Args:
            keep_serving: Leave the servers with what they serve; a later run takes them over.
        """
        self._closed = True
        untaken: Outcome | None = None
        try:
            try:
                untaken = self._behind.close()
            finally:
                fleet, self._fleet = self._fleet, None  # what runs behind needs it until then
                if fleet is not None:
                    fleet.close(keep_serving=keep_serving)
        finally:
            if untaken is not None:
                record, error = untaken
                if error is not None:
                    _log.error("the last delivery failed: %s", error)
                self._note(record, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._close_after_error()

    # ---------------------------------------------------------------- syncing

    def due(self, step: int) -> bool:
        """Whether `sync` should be called at optimizer step ``step``; the same answer on every rank."""
        return self._schedule.due(step, self._last_step)

    def sync(self, step: int) -> SyncRecord | None:
        """Bring the model as it is now to every server, prove it, and switch requests to it.

        Collective: every rank calls it.

        Args:
            step: Optimizer step of the model as it is now.

        Returns:
            The record; None where ``overlap`` lets the delivery run behind (`wait` or `catch_up` then gives it).

        Raises:
            LoraflowError: It failed, and ``on_failure="raise"``; the servers serve what they served before.
            UnsettledError: It failed, whatever ``on_failure`` says: a server without which nothing goes on serves
                nobody knows what. No request goes there.
            StaleError: It failed, and rollouts would be more than ``max_staleness`` versions behind.
        """
        if self._closed:
            raise LoraflowError("the manager was closed", hint="make another SyncManager for another run")
        self.wait()
        wanted = not self._known().by_digest and self._without_canary + 1 >= self.config.verify_interval
        began, prover = time.perf_counter(), self._prover
        expected = forward_for(prover, self.plan) if wanted and prover is not None else None
        return self._sync(step, expected, began=began, behind=self.config.overlap)

    def wait(self) -> SyncRecord | None:
        """Wait for a delivery that runs behind (``overlap``), and raise what it raised. Collective, as `sync` is."""
        if not self.config.overlap:
            return None
        outcome = self.ranks.on_main(self._behind.take)
        return None if outcome is None else self._conclude(*outcome)

    def catch_up(self) -> SyncRecord | None:
        """`wait`, where a delivery that runs behind is over already: the next rollout is by its policy. Collective."""
        if not self.config.overlap:
            return None
        outcome = self.ranks.on_main(lambda: self._behind.take() if self._behind.over else None)
        return None if outcome is None else self._conclude(*outcome)

    @property
    def policy_name(self) -> str:
        """Value of ``model`` in requests for the current policy; on rank 0."""
        return self.model_name(next(iter(self.servers)).url if self.servers else "")

    def model_name(self, url: str) -> str:
        """Value of ``model`` in requests to one server; on rank 0.

        A delivery that runs behind changes it when it is taken in (`sync`, `wait`, `catch_up`), never in the middle of
        a rollout.
        """
        if url not in self._names:
            if self._names:
                raise LoraflowError("no server is left that requests may go to", hint="ready() waits for one")
            raise LoraflowError("no policy was delivered", hint="call start() first; on rank 0")
        return self._names[url]

    @property
    def plan(self) -> Plan:
        """What `start` chose, and why."""
        return self._known().plan

    @property
    def run_id(self) -> str:
        """The run's id, given or made up."""
        return self._known().run_id

    @property
    def servers(self) -> tuple[VLLMServer, ...]:
        """Those that requests may go to, on rank 0; empty on other ranks."""
        found = self._fleet.servers if self._fleet else ()
        return tuple(server for server in found if server.url in self._names)

    @property
    def newest_version(self) -> int:
        """The newest version that a sync was attempted for; staleness is counted from it."""
        return self._attempted

    @property
    def staleness(self) -> int:
        """Versions that the served policy is behind the newest attempted one."""
        return 0 if self.policy is None else int(self.behind(torch.tensor(self.policy.version)))

    def behind(self, versions: Tensor) -> Tensor:
        """How many attempted syncs each of ``versions`` is behind the newest one; of their shape, integers.

        Numbers of versions are spent by canaries as well, and where the model was changed (`Gathering.announced`),
        which makes nothing older. A negative version, one that is not known, is behind by more than all that were
        attempted.
        """
        spent = torch.zeros_like(versions)
        for number in self._spent:
            if number < self._attempted:
                spent += ((versions >= 0) & (versions < number)).to(versions.dtype)
        return self._attempted - versions - spent

    # ---------------------------------------------------------------- rollouts

    def ready(self) -> None:
        """Before a rollout: bring servers that were restarted back to the policy, and prove them. Collective.

        Raises:
            LoraflowError: Too few servers came back within ``start_timeout``.
        """
        self.ranks.on_main(self._ensure)

    def blame(self, server: VLLMServer, error: LoraflowError) -> None:
        """A request failed on ``server``: raise ``error``, or set it aside (``on_server_failure``); on rank 0."""
        if self._fleet is None:
            raise error
        self._fleet.blame(server, error)

    @contextmanager
    def rollout(self) -> Iterator[Policy]:
        """The policy to generate with; inside, its version is not retired (rule 7), nor merged weights changed."""
        with self._gate.rollout(self._current) as policy:
            yield policy

    def generate(self, prompts: Sequence[Sequence[int]], *, n: int = 1, **sampling: Any) -> list[Completion]:
        """Completions by the current policy, spread over the servers, prompt-major; on rank 0.

        Args:
            prompts: Token ids of each prompt.
            n: Completions per prompt.
            **sampling: See `VLLMServer.generate`: ``max_tokens``, ``temperature``, ``seed``, ….
        """
        if self._fleet is None:
            raise LoraflowError("no policy was delivered", hint="call start() first; on rank 0")
        with self.rollout():
            if self.plan.transport == "merged":  # a server that was restarted serves its base under the same name
                self._ensure()
            return self._fleet.generate(prompts, n=n, names=self._names, **sampling)

    def on_sync(self, hook: Callable[[SyncRecord], None]) -> None:
        """Call ``hook`` with every record, on every rank."""
        self._sync_hooks.append(hook)

    def on_rollouts(self, hook: Callable[[Rollouts], None]) -> None:
        """Call ``hook`` with every batch of rollouts that an integration generated, on the rank that holds it."""
        self._rollout_hooks.append(hook)

    def rollouts_done(self, rollouts: Rollouts) -> None:
        """Tell the hooks of `on_rollouts`; integrations call it after each generation."""
        for hook in self._rollout_hooks:
            hook(rollouts)

    def correction(
        self,
        trainer_logps: Tensor,
        rollout_logps: Tensor,
        mask: Tensor,
        *,
        advantages: Tensor | None = None,
        versions: Tensor | None = None,
    ) -> Correction:
        """Importance weights and masks for rollouts of possibly older versions, as the config asks for.

        Args:
            trainer_logps: Log-probs under the trainer's current weights, (B, T).
            rollout_logps: Log-probs that the server returned, (B, T).
            mask: 1 for completion tokens, (B, T).
            advantages: (B,), for off-policy sequence masking.
            versions: Policy version of each sample (B,) or token (B, T); older than ``max_staleness`` is masked.
        """
        current = None if versions is None else self._attempted
        if versions is not None:
            versions = self._attempted - self.behind(versions)
        return correct(
            trainer_logps,
            rollout_logps,
            mask,
            options=self._correction,
            advantages=advantages,
            versions=versions,
            current_version=current,
        )

    def observe(self, correction: Correction) -> None:
        """Feed the adaptive interval with the drift that a correction measured, per token of all ranks. Collective."""
        if self.config.vllm_sync_interval == "adaptive":
            scored = float(correction.diagnostics.scored_tokens)
            tokens = self.ranks.mean(scored)
            total = self.ranks.mean(scored * drift(correction).kl if scored else 0.0)
            self._schedule.observe(total / tokens if tokens else math.inf)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last sync and of the run, for the trainer's log."""
        last = self.records[-1].metrics() if self.records else {}
        totals = {f"loraflow/{name}": float(value) for name, value in self.counters.items()}
        return {**last, **totals, "loraflow/staleness": float(self.staleness)}

    # ---------------------------------------------------------------- inside

    def _close_after_error(self, *, started: bool = True) -> None:
        """The error that led here is the one to raise: what closing meets besides is often its consequence.

        Where ``started`` is False, versions that an earlier process of this run left are served as before.
        """
        keep = False
        try:
            try:
                keep = not started and self._fleet is not None and self._fleet.give_way()
            finally:
                self.close(keep_serving=keep)
        except Exception:  # noqa: BLE001 - whatever it is, it comes second
            _log.exception("closing after an error failed too")

    def _record_file(self) -> RecordFile | None:
        wanted = self.config.record_file if self.ranks.is_main else None
        return RecordFile(wanted) if wanted else None

    def _ensure(self) -> None:
        fleet, prover = self._fleet, self._prover
        if fleet is not None and prover is not None:
            fleet.ensure(prover)
            if not self._behind.pending:
                self._names = dict(fleet.model_names)

    def _current(self) -> Policy:
        if self.policy is None:
            raise LoraflowError("no policy was delivered", hint="call start() first")
        return self.policy

    def _known(self) -> Agreed:
        if self._agreed is None:
            raise LoraflowError("the manager was not started", hint="call start() first")
        return self._agreed

    def _new_policy(self) -> Policy:
        policy = Policy(self._known().run_id, self._next_version)
        self._next_version += 1
        return policy

    def _sync(
        self, step: int, expected: Wanted, *, began: float, behind: bool = False, careful: bool = False
    ) -> SyncRecord | None:
        forward_ms = (time.perf_counter() - began) * 1e3
        policy = self._new_policy()
        self._attempted, self._has_canary = policy.version, expected is not None
        try:
            if self._known().plan.transport == "merged" and not behind:
                self.ranks.together(self._gate.close)  # where one rank refuses, the others open theirs again
            snapshot = self._gathered(policy, step, announced=not behind and not careful)
            captured_ms = (time.perf_counter() - began) * 1e3

            def move() -> Outcome:
                assert self._fleet is not None and self._prover is not None  # noqa: S101, PT018 - rank 0, started
                in_use = self._gate.in_use()
                deliver = partial(self._fleet.move, policy, snapshot, expected, self._prover, in_use=in_use)
                record, error = deliver_with(expected, snapshot, deliver)
                total = (time.perf_counter() - began) * 1e3
                phases = {"forward": forward_ms, "snapshot": captured_ms - forward_ms, **record.phases_ms}
                stall = captured_ms if behind else total
                return replace(record, phases_ms=phases, total_ms=total, stall_ms=stall), error

            if behind:
                self._last_step = step
                if self.ranks.is_main:
                    self._behind.begin(move)
                return None
            record, error = self.ranks.on_main(move)
            if isinstance(error, ModelChangedError):
                raise error
        except ModelChangedError as error:
            _log.info("%s was withdrawn, and the adapter is gathered anew: %s", policy, error)
            self._spent.append(policy.version)
            return self._sync(step, expected, began=began, careful=True)
        else:
            return unless_failed(expected, self._conclude(record, error))
        finally:
            if not behind:
                self._gate.open()

    def _gathered(self, policy: Policy, step: int, *, announced: bool) -> AdapterSnapshot:
        gathering = Gathering(self.model, self._spec, self._known().dtype)
        if announced and self.ranks.world_size == 1 and self._fleet is not None and self._prover is not None:
            return gathering.announced(self._fleet, policy, self._prover, step)
        return gathering.together(self.ranks, step)

    def _conclude(self, record: SyncRecord, error: Exception | None) -> SyncRecord:
        """Take an outcome in, on every rank: switch the policy, or decide what a failure means (rule 11)."""
        if error is None:
            with self._gate.lock:
                self.policy = Policy(self._known().run_id, record.version)
                self._names = dict(self._fleet.model_names) if self._fleet else {}
            self._served_step = record.step
            self._without_canary = 0 if self._has_canary else self._without_canary + 1
            self._schedule.synced()
        self._last_step = self._served_step
        self._gate.open()
        try:
            record = self.ranks.together(lambda: self._note(record, error))
        except Exception as telling:
            if error is not None:  # a hook or a full disk must not hide why the sync failed
                raise error from telling
            raise
        if error is None:
            return record
        if self.config.on_failure == "raise" or self.policy is None or isinstance(error, UnsettledError):
            raise error
        if self.staleness > self.config.max_staleness:
            raise StaleError(
                f"{self.staleness} syncs in a row failed; rollouts may be {self.config.max_staleness} versions behind",
                hint="mend the cause below, or raise max_staleness",
            ) from error
        _log.error("sync at step %d failed; requests stay on %s: %s", record.step, self.policy, error)
        return record

    def _note(self, record: SyncRecord, error: Exception | None) -> SyncRecord:
        """Count an outcome, keep its record, and tell the hooks."""
        self.counters["syncs" if error is None else "failures"] += 1
        self.counters["unproven"] += error is None and not record.proven
        record = replace(record, staleness=self.staleness)
        self.records.append(record)
        del self.records[:-_RECORDS]
        if self._file is not None:
            self._file.append(record)
        for hook in self._sync_hooks:
            hook(record)
        return record

    def _try_canary(self, prover: Prover, base: Expected) -> None:
        """Serve an adapter whose effect stands clear of the noise, compare, and take it away."""
        policy = self._new_policy()
        self._spent.append(policy.version)
        dtype = self._known().dtype
        canary, expected = self.ranks.together(lambda: find_canary(self.model, self._spec, dtype, prover, base))
        self.ranks.on_main(lambda: self._fleet.try_out(policy, canary, base, expected, prover) if self._fleet else None)

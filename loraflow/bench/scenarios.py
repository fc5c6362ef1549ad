"""What is timed: one way of syncing after the other, in blocks, round after round, every sample kept."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from loraflow.bench.presets import draw_policy
from loraflow.errors import LoraflowError
from loraflow.manager import SyncManager
from loraflow.records import SyncRecord
from loraflow.server import VLLMServer
from loraflow.server_info import ServerInfo

__all__ = ["Failure", "LoraflowWay", "PluginBlind", "Sample", "Timed", "Way", "measure"]

_NO_MORE_CANARIES = 1_000_000_000  # syncs between canaries, where the carrier itself proves each version


@dataclass(frozen=True)
class Timed:
    """One sync.

    Attributes:
        total_ms: From the call until the server serves it, proof included where there is one.
        stall_ms: What of it the trainer waited for.
        bytes: Payload.
        phases_ms: Milliseconds per phase.
        proven: Whether it was proven.
        proof: How: ``digest``, ``canary`` or nothing.
    """

    total_ms: float
    stall_ms: float
    bytes: int
    phases_ms: Mapping[str, float]
    proven: bool
    proof: str = ""


@dataclass(frozen=True)
class Sample:
    """One sync of one way, as the report keeps it.

    Attributes:
        way: Name of the way.
        round: Round that it was measured in.
        warmup: Among the first of its block; kept, and left out of the summary.
        timed: The sync.
    """

    way: str
    round: int
    warmup: bool
    timed: Timed


@dataclass(frozen=True)
class Failure:
    """A way or section that failed.

    Attributes:
        what: Which.
        error: The error, in one line.
        traceback: Where.
        log: The end of the server's log.
    """

    what: str
    error: str
    traceback: str
    log: str = ""

    @classmethod
    def of(cls, what: str, error: BaseException, log: str = "") -> Failure:
        """From an exception."""
        lines = "".join(traceback.format_exception(error))
        return cls(what, f"{type(error).__name__}: {error}"[:2000], lines[-6000:], log[-6000:])


class Way(Protocol):
    """One way of bringing a policy to a server.

    Attributes:
        name: As the report calls it.
    """

    name: str

    def open(self) -> None:
        """Get ready; not timed."""
        ...

    def sync(self, step: int) -> Timed:
        """One sync."""
        ...

    def close(self) -> None:
        """Leave trainer and server as they were; not timed."""
        ...


class PluginBlind(VLLMServer):
    """A client that does not see loraflow's plugin: to it, the server is a stock one."""

    def refresh(self) -> ServerInfo:
        """Ask again what a stock server could do."""
        from dataclasses import replace

        self._info = replace(super().refresh(), plugin=None)
        return self._info


@dataclass
class LoraflowWay:
    """loraflow through its `SyncManager`, as a trainer uses it.

    Attributes:
        name: As the report calls it.
        model: The trainer's PEFT model.
        url: The server.
        carrier: See `SyncConfig.carrier`.
        root: Store, and folder that the server may load from.
        overlap: ``sync`` returns once the snapshot is taken.
        stock_server: Do not use the plugin: vLLM's own routes, proof by canary.
        options: More of `SyncConfig`.
        manager: While open.
    """

    name: str
    model: nn.Module
    url: str
    carrier: str
    root: Path
    overlap: bool = False
    stock_server: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    manager: SyncManager | None = None

    def open(self) -> None:
        """Start a manager: fingerprint of the base, first delivery, canary."""
        # A fold proves the bytes and the products of each version itself; a canary beside it would time the trainer.
        options = {"verify_interval": _NO_MORE_CANARIES} if self.carrier == "fold" else {}
        server = PluginBlind(self.url) if self.stock_server else VLLMServer(self.url)
        self.manager = SyncManager(
            self.model,
            server,
            adapter_root=str(self.root),
            carrier=self.carrier,
            overlap=self.overlap,
            grace_period=0.0,
            **{**options, **self.options},
        )
        self.manager.start()

    def sync(self, step: int) -> Timed:
        """One sync; with overlap the stall is the call, the total ends with the delivery."""
        manager = self.started
        began = time.perf_counter()
        record = manager.sync(step)
        returned = (time.perf_counter() - began) * 1e3
        if record is None:
            record = manager.wait()
        if record is None or record.outcome != "committed":
            raise LoraflowError(f"{self.name}: the sync was not committed")
        return timed_of(record, stall_ms=returned)

    def close(self) -> None:
        """Close the manager."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()

    @property
    def started(self) -> SyncManager:
        """The manager; raises before `open`."""
        if self.manager is None:
            raise LoraflowError(f"{self.name} is not open")
        return self.manager


def timed_of(record: SyncRecord, *, stall_ms: float) -> Timed:
    """A record as a sample."""
    kinds = sorted({proof.kind for proof in record.proofs.values()})
    return Timed(record.total_ms, stall_ms, record.bytes, dict(record.phases_ms), record.proven, "+".join(kinds))


def measure(
    ways: Sequence[Way],
    model: nn.Module,
    *,
    rounds: int,
    block: int,
    pause: float,
    samples: list[Sample],
    warmups: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Failure]:
    """Measure ``ways`` in turn, ``rounds`` times over, ``warmups`` and ``block`` syncs each time.

    Blocks, because two ways that hold slots or base weights of one server at once would measure each other. Before
    each sync the policy is drawn anew; after it there is a ``pause``, where a trainer would make its step.

    Args:
        ways: What to measure.
        model: The trainer's model.
        rounds: Turns.
        block: Syncs in a turn, beside the warm-ups.
        pause: Seconds between syncs.
        samples: Gets every sample, as it is taken: what is there survives an interruption.
        warmups: The first syncs of a turn, which take memory that the later ones take again.
        tell: Gets a line at each block.

    Returns:
        What failed; a way that failed is left out of later rounds.
    """
    failures: list[Failure] = []
    broken: set[str] = set()
    seed = 1
    for number in range(rounds):
        for way in ways:
            if way.name in broken:
                continue
            try:
                way.open()
                try:
                    for index in range(warmups + block):
                        draw_policy(model, seed)
                        samples.append(Sample(way.name, number, index < warmups, way.sync(seed)))
                        seed += 1
                        time.sleep(pause)
                finally:
                    way.close()
            except Exception as error:  # noqa: BLE001 - told in the report; the other ways go on
                broken.add(way.name)
                failures.append(Failure.of(way.name, error))
                tell(f"round {number + 1}/{rounds} {way.name}: FAILED {failures[-1].error[:300]}")
                continue
            last = [s.timed.total_ms for s in samples if s.way == way.name and not s.warmup][-block:]
            tell(f"round {number + 1}/{rounds} {way.name}: {', '.join(f'{ms:.1f}' for ms in last)} ms")
    return failures

"""The trainer of the chaos test: it draws a policy, syncs it, generates, and begins again until it is told to stop.

    python -m tests.helpers.chaos_trainer FOLDER

It may be killed at any moment and started again with the same folder, which holds its options (``options.json``) and
takes what it says (``journal.jsonl``), and the weights of every version before it is delivered (``truth/NAME.pt``).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loraflow.errors import LoraflowError
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from loraflow.store import AdapterStore, Recovered
from tests.helpers.tiny import PROMPT, peft_model, randomize

PROMPTS = [PROMPT, PROMPT[:5]]


class Journal:
    """Lines of JSON, each whole or not there; times are of the clock that all processes share and that never jumps."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **fields})
        self._file.write(line.encode() + b"\n")


class Witness(SyncManager):
    """Keeps the weights of every version before anything is done with its name."""

    def __init__(self, folder: Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._truth = folder

    def _new_policy(self) -> Policy:
        policy = super()._new_policy()
        values = {name: value.detach() for name, value in self.model.named_parameters() if "lora_" in name}
        draft = self._truth / f"draft-{policy.name}"
        torch.save(values, draft)
        draft.rename(self._truth / f"{policy.name}.pt")
        return policy


def jumping_clock(offset: Path) -> Callable[[], float]:
    """A wall clock that is off by what the file says."""
    real = time.time

    def now() -> float:
        try:
            return real() + float(offset.read_text())
        except (OSError, ValueError):
            return real()

    return now


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    options = json.loads((folder / "options.json").read_text())
    journal = Journal(folder / "journal.jsonl")
    life = int((folder / "life").read_text())
    journal("alive", life=life)
    time.time = jumping_clock(folder / "clock")
    recover = AdapterStore.recover

    def noted(store: AdapterStore) -> Recovered:
        found = recover(store)
        lost = [str(policy) for policy in found.lost]
        journal(
            "recovered",
            committed=str(found.committed),
            lost=lost,
            before=options["carriers"][(life - 1) % len(options["carriers"])],
        )
        return found

    AdapterStore.recover = noted  # type: ignore[method-assign]
    policy = peft_model(options["model"])
    step = life * 100_000
    while not (folder / "stop").exists():
        manager = Witness(
            folder / "truth",
            policy,
            options["servers"],
            carrier=options["carriers"][life % len(options["carriers"])],
            **options["sync"],
        )
        try:
            randomize(policy, seed=step)
            manager.start(step)
        except LoraflowError as error:
            journal("no start", error=repr(error))
            time.sleep(0.5)
            continue
        journal("started", servers=len(manager.servers))
        try:
            step = train(manager, policy, step, journal, folder / "stop")
        finally:
            closed(manager, journal)
    journal("ended", threads=[thread.name for thread in threading.enumerate() if "loraflow" in thread.name])


def train(manager: SyncManager, policy: Any, step: int, journal: Journal, stop: Path) -> int:
    """Sync and generate until the file ``stop`` is there; every error of loraflow's is an outcome here."""
    while not stop.exists():
        step += 1
        randomize(policy, seed=step)
        try:
            record = manager.sync(step)
        except LoraflowError as error:
            journal("sync raised", error=repr(error))
        else:
            assert record is not None
            facts = record.to_dict()
            journal(
                "sync", **{name: facts[name] for name in ("policy", "outcome", "proven", "error", "aside", "joined")}
            )
        try:
            manager.ready()
            answers = manager.generate(PROMPTS, max_tokens=4, temperature=1.0, seed=step)
        except LoraflowError as error:
            journal("no rollout", error=repr(error))
            continue
        journal("answers", answers=[[a.model, PROMPTS[a.prompt], list(a.token_ids), list(a.logprobs)] for a in answers])
        time.sleep(0.05)
    return step


def closed(manager: SyncManager, journal: Journal) -> None:
    try:
        manager.close()
    except LoraflowError as error:
        journal("close raised", error=repr(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

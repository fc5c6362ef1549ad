"""When a trainer's policy travels, whatever order trainers call things in; and what is freed when."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from loraflow.config import SyncConfig
from loraflow.errors import LoadError
from loraflow.integrations import trl_sync
from loraflow.integrations.trl_sync import TrainerSync
from loraflow.policy import Policy
from loraflow.ranks import Ranks
from loraflow.records import Rollouts, SyncRecord
from loraflow.schedule import make_schedule


class Manager:
    """Syncs by noting the step; a version each."""

    made: list[Manager] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, model: Any, servers: list[str], config: SyncConfig) -> None:
        self.model, self.servers, self.config = model, servers, config
        self.ranks = Ranks()
        self.policy: Policy | None = None
        self.synced: list[int] = []
        self.failing: Exception | None = None
        self.closed = 0
        self.waited: list[int | None] = []
        self.pending: int | None = None
        self.arrived = False
        self._hooks: list[Any] = []
        self._rollout_hooks: list[Any] = []
        self._schedule = make_schedule(config)
        self.made.append(self)

    def on_sync(self, hook: Any) -> None:
        self._hooks.append(hook)

    def on_rollouts(self, hook: Any) -> None:
        self._rollout_hooks.append(hook)

    def rollouts_done(self, rollouts: Rollouts) -> None:
        for hook in self._rollout_hooks:
            hook(rollouts)

    def start(self, step: int) -> None:
        self.sync(step)

    def due(self, step: int) -> bool:
        begun = [*self.synced, *([] if self.pending is None else [self.pending])]
        return self._schedule.due(step, begun[-1] if begun else None)

    def behind(self, versions: Any) -> Any:
        return len(self.synced) - 1 - versions

    def sync(self, step: int) -> None:
        if self.config.overlap and self.policy is not None:
            self.pending = step
        else:
            self._deliver(step)

    def _deliver(self, step: int) -> None:
        version = len(self.synced)
        error = self.failing
        if error is None:
            self.synced.append(step)
            self.policy = Policy("run", version)
        elif self.config.on_failure == "raise":
            raise error
        record = SyncRecord(step, f"run-v{version}", version, "adapter", "filesystem", "committed", error=error and "x")
        for hook in self._hooks:
            hook(record)

    def wait(self) -> None:
        pending, self.pending = self.pending, None
        self.waited.append(pending)
        if pending is not None:
            self._deliver(pending)

    def catch_up(self) -> None:
        if self.pending is not None and self.arrived:
            pending, self.pending = self.pending, None
            self._deliver(pending)

    def ready(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1
        if self.pending is not None:  # as the real one does: what runs behind is recorded
            self.wait()


class Trainer:
    def __init__(self, **metrics: Any) -> None:
        self.model = SimpleNamespace(training=True)
        self.model_wrapped = self.model
        self.state = SimpleNamespace(global_step=0)
        self.callbacks: list[Any] = []
        self.logged: list[dict[str, float]] = []
        self.failure: Exception | None = None
        self.__dict__.update(metrics)

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def train(self) -> str:
        if self.failure is not None:
            raise self.failure
        return "trained"

    def log(self, logs: dict[str, float]) -> None:
        self.logged.append(dict(logs))


@pytest.fixture(autouse=True)
def managers(monkeypatch: pytest.MonkeyPatch) -> list[Manager]:
    monkeypatch.setattr(trl_sync, "SyncManager", Manager)
    monkeypatch.setattr(Manager, "made", [])
    return Manager.made


def tables() -> Any:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


def made(**options: Any) -> tuple[Any, TrainerSync]:
    trainer: Any = Trainer(_metrics=tables())
    sync = TrainerSync(trainer, SyncConfig(**options), ["http://a"])
    sync.take_hold()
    return trainer, sync


def at(trainer: Any, sync: TrainerSync, step: int, *, training: bool = True) -> None:
    trainer.state.global_step, trainer.model.training = step, training
    sync.up_to_date()


def test_the_interval_counts_from_the_last_sync() -> None:
    trainer, sync = made(vllm_sync_interval=3)
    for step in (0, 0, 2, 3, 3, 5, 7, 9, 10):
        at(trainer, sync, step)
    assert sync.manager.synced == [0, 3, 7, 10]  # type: ignore[union-attr]
    assert sync.policy_step == 10


def test_evaluation_measures_the_weights_as_they_are_and_once() -> None:
    trainer, sync = made(vllm_sync_interval=4)
    at(trainer, sync, 0)
    for _ in range(3):
        at(trainer, sync, 2, training=False)
    at(trainer, sync, 5)
    assert sync.manager.synced == [0, 2]  # type: ignore[union-attr]
    at(trainer, sync, 6)
    assert sync.manager.synced == [0, 2, 6]  # type: ignore[union-attr]


def test_a_failure_that_is_kept_is_tried_again_at_the_next_step_only() -> None:
    trainer, sync = made(on_failure="keep_last")
    at(trainer, sync, 0)
    sync.manager.failing = LoadError("full")  # type: ignore[union-attr]
    for _ in range(3):
        at(trainer, sync, 1)
    assert [(record.step, record.error is None) for record in sync.records] == [(0, True), (1, False)]
    assert trainer._metrics["train"]["loraflow/failures"] == [0.0, 1.0]
    sync.manager.failing = None  # type: ignore[union-attr]
    at(trainer, sync, 2)
    assert sync.policy_step == 2


def test_a_failure_that_is_raised_is_tried_again_at_the_same_step() -> None:
    trainer, sync = made()
    at(trainer, sync, 0)
    sync.manager.failing = LoadError("full")  # type: ignore[union-attr]
    with pytest.raises(LoadError):
        at(trainer, sync, 1)
    sync.manager.failing = None  # type: ignore[union-attr]
    at(trainer, sync, 1)
    assert sync.manager.synced == [0, 1]  # type: ignore[union-attr]


def test_training_that_begins_again_syncs_whatever_the_step() -> None:
    trainer, sync = made(vllm_sync_interval=100)
    at(trainer, sync, 8)
    sync.training_begins()  # a checkpoint of step 4 was loaded
    assert trainer._last_loaded_step == -1
    at(trainer, sync, 4)
    assert sync.manager.synced == [8, 4]  # type: ignore[union-attr]


def test_a_checkpoint_that_could_not_be_delivered_is_tried_again_at_the_next_step() -> None:
    trainer, sync = made(vllm_sync_interval=100, on_failure="keep_last")
    at(trainer, sync, 8)
    sync.training_begins()
    sync.manager.failing = LoadError("full")  # type: ignore[union-attr]
    for _ in range(3):
        at(trainer, sync, 4)
    assert [record.step for record in sync.records] == [8, 4], "once a step"
    sync.manager.failing = None  # type: ignore[union-attr]
    for step in (5, 5, 6, 7):
        at(trainer, sync, step)
    assert sync.manager.synced == [8, 5]  # type: ignore[union-attr]


def test_training_that_begins_again_at_the_step_of_the_last_try_syncs() -> None:
    trainer, sync = made(vllm_sync_interval=100)
    at(trainer, sync, 4)
    sync.training_begins()
    at(trainer, sync, 4)
    assert sync.manager.synced == [4, 4]  # type: ignore[union-attr]


def test_no_rollout_after_a_checkpoint_is_of_the_weights_before_it() -> None:
    trainer, sync = made(overlap=True)
    at(trainer, sync, 0, training=False)
    sync.training_begins()
    at(trainer, sync, 4)
    assert sync.policy_step == 4, "delivered, and not only on its way"
    at(trainer, sync, 5)
    assert sync.policy_step == 4, "from then on deliveries run behind again"


def test_between_two_syncs_rollouts_are_by_what_has_arrived_since(managers: list[Manager]) -> None:
    trainer, sync = made(overlap=True, vllm_sync_interval=4)
    at(trainer, sync, 0)
    at(trainer, sync, 4)
    managers[0].arrived = True
    at(trainer, sync, 4)
    assert sync.policy_step == 0, "all generations of a step are by one policy"
    managers[0].arrived = False
    at(trainer, sync, 5)
    assert sync.policy_step == 0, "it is not waited for"
    managers[0].arrived = True
    at(trainer, sync, 6)
    assert sync.policy_step == 4
    assert managers[0].waited == []


def test_all_generations_of_a_step_are_by_one_policy_also_between_syncs(managers: list[Manager]) -> None:
    trainer, sync = made(overlap=True, vllm_sync_interval=4)
    at(trainer, sync, 0)
    at(trainer, sync, 4)
    at(trainer, sync, 5)
    managers[0].arrived = True  # while the first turn of a conversation with tools is generated
    at(trainer, sync, 5)
    assert sync.policy_step == 0
    at(trainer, sync, 5, training=False)
    assert sync.policy_step == 5, "evaluation measures the weights as they are"
    at(trainer, sync, 6)
    assert managers[0].synced == [0, 4, 5]


def test_a_trainer_that_generates_on_its_own_asks_for_a_sync_after_the_servers_were_freed() -> None:
    trainer, sync = made()
    at(trainer, sync, 3)
    trainer._last_loaded_step = 3  # TRL's: with a rollout_func nothing else asks
    sync.training_ends()
    assert trainer._last_loaded_step == -1


@pytest.mark.parametrize("failing", [None, LoadError("full")])
def test_what_runs_behind_when_training_ends_is_taken_in(failing: LoadError | None, managers: list[Manager]) -> None:
    trainer, sync = made(overlap=True)
    at(trainer, sync, 0)
    at(trainer, sync, 1)
    managers[0].failing = failing
    trainer.callbacks[0].on_train_end()
    assert managers[0].waited == [1]
    assert managers[0].closed == 1
    assert sync.manager is None
    if failing is None:
        assert [record.step for record in sync.records] == [0, 1]


def test_the_thread_that_trains_is_the_one_where_the_training_begins() -> None:
    trainer, sync = made()
    assert sync.thread is threading.current_thread()
    elsewhere = threading.Thread(target=trainer.callbacks[0].on_train_begin)
    elsewhere.start()
    elsewhere.join()
    assert sync.thread is elsewhere


def test_a_model_that_was_wrapped_anew_gets_a_manager_of_its_own(managers: list[Manager]) -> None:
    trainer, sync = made()
    at(trainer, sync, 0, training=False)
    trainer.model_wrapped = SimpleNamespace()
    sync.training_begins()
    at(trainer, sync, 0)
    assert [manager.closed for manager in managers] == [1, 0]
    assert managers[1].model is trainer.model_wrapped


def test_the_servers_are_freed_at_the_end_after_an_error_and_with_the_trainer(managers: list[Manager]) -> None:
    trainer, sync = made()
    at(trainer, sync, 0)
    trainer.callbacks[0].on_train_end()
    assert managers[0].closed == 1
    assert sync.manager is None

    at(trainer, sync, 0)
    trainer.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert managers[1].closed == 1

    trainer.failure = None
    assert trainer.train() == "trained"
    at(trainer, sync, 0)
    del trainer
    gc.collect()
    assert [manager.closed for manager in managers] == [1, 1, 1]


def test_a_hook_that_fails_at_the_end_hides_no_error(managers: list[Manager]) -> None:
    trainer, sync = made(overlap=True)
    at(trainer, sync, 0)
    at(trainer, sync, 1)
    sync.on_sync(lambda _: (_ for _ in ()).throw(ValueError("a hook")))
    trainer.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert managers[0].closed == 1


def test_the_last_delivery_of_a_trainer_that_is_gone_is_recorded(managers: list[Manager]) -> None:
    trainer, sync = made(overlap=True)
    at(trainer, sync, 0)
    at(trainer, sync, 1)
    del trainer
    gc.collect()
    assert managers[0].closed == 1
    assert [record.step for record in sync.records] == [0, 1]


def test_a_generation_is_logged_and_told_with_the_version_that_gave_it() -> None:
    trainer, sync = made(vllm_sync_interval=100)
    heard: list[Rollouts] = []
    sync.on_rollouts(heard.append)
    for step in (0, 3):
        sync.training_begins()
        at(trainer, sync, step)
    trainer.state.global_step = 5
    completions = [[2], [3, 4]]
    told = sync.tell(sync.manager, 0, [[1], [1]], completions, [[-0.5], [-0.1, -0.2]])  # type: ignore[arg-type]
    completions[0] = [2, 8, 9]  # TRL's loop of tool calls puts the whole conversation there
    sync.tell(sync.manager, 1, [], [], None)  # type: ignore[arg-type] - a rank without samples
    assert heard == [told]
    assert told.completion_ids == [[2], [3, 4]]
    assert (told.versions, told.newest_version, told.staleness) == ([0, 0], 1, (1, 1))
    table = trainer._metrics["train"]
    assert table["loraflow/rollout_version"] == [0.0, 1.0]
    assert table["loraflow/staleness_mean"] == table["loraflow/staleness_max"] == [1.0, 0.0]
    assert table["loraflow/lag_steps"] == [5.0, 2.0], "since the step of that version"


def test_numbers_reach_the_log_of_a_trainer_without_a_table() -> None:
    trainer: Any = Trainer()
    sync = TrainerSync(trainer, SyncConfig(), ["http://a"])
    sync.take_hold()
    sync.log({"loraflow/x": 1.0})
    sync.log({"loraflow/x": 3.0})
    trainer.log({"loss": 0.5})
    trainer.log({"loss": 0.4})
    assert trainer.logged == [{"loss": 0.5, "loraflow/x": 2.0}, {"loss": 0.4}]


def test_evaluation_has_a_table_of_its_own() -> None:
    trainer, sync = made()
    trainer.model.training = False
    sync.log({"loraflow/x": 1.0})
    assert trainer._metrics["eval"] == {"loraflow/x": [1.0]}
    assert trainer._metrics["train"] == {}


def test_hooks_hear_of_every_run_whenever_they_were_given(managers: list[Manager]) -> None:
    trainer, sync = made()
    records: list[SyncRecord] = []
    rollouts: list[Rollouts] = []
    sync.on_sync(records.append)  # before there is a manager
    sync.on_rollouts(rollouts.append)
    at(trainer, sync, 0)
    sync.close()
    at(trainer, sync, 1)  # the next run
    for manager in managers:
        manager.rollouts_done(Rollouts([], [], None, [], 0))
    assert [record.step for record in records] == [0, 1]
    assert len(rollouts) == 2

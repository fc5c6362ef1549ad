"""Options from TRL's arguments, what each trainer gets, and what is refused with the option to set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError, ConfigError

pytest.importorskip("trl")

from loraflow.integrations.trl_support import (
    Support,
    check_combination,
    config_from_args,
    same_server,
    servers_from_args,
    support_of,
)

RATIO = Support(corrected="ratio", old_logps=True)
ADVANTAGES = Support(corrected="advantages")
NOTHING = Support()


def args(**options: Any) -> Any:
    return SimpleNamespace(**options)


def trainer(kind: str = "GRPOTrainer", **options: Any) -> Any:
    return type(kind, (), {})() if not options else type(kind, (), {"args": args(**options)})()


GRPO_ARGS = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": None,
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_server_timeout": 77.0,
    "off_policy_mask_threshold": 0.3,
    "loss_type": "dapo",
}


def test_trl_s_own_arguments_are_taken_none_included() -> None:
    config = config_from_args(args(**GRPO_ARGS), None, {"vllm_sync_interval": 3})
    assert config.vllm_importance_sampling_mode == "token_truncate"
    assert config.vllm_importance_sampling_clip_max is None, "None says: no bound"
    assert config.vllm_importance_sampling_clip_min == 0.5
    assert config.vllm_server_timeout == 77.0
    assert config.vllm_sync_interval == 3
    assert config.off_policy_mask_threshold is None, "TRL's loss masks by itself"


@pytest.mark.parametrize("as_config", [True, False])
def test_what_the_user_sets_for_loraflow_wins(as_config: bool) -> None:
    given = {"vllm_importance_sampling_mode": "geometric_mask", "vllm_server_timeout": 5.0}
    config = config_from_args(
        args(**GRPO_ARGS), SyncConfig(**given) if as_config else None, {} if as_config else dict(given)
    )
    assert config.vllm_importance_sampling_mode == "geometric_mask"
    assert config.vllm_server_timeout == 5.0
    assert config.vllm_importance_sampling_clip_min == 0.5, "and what they did not set still comes from TRL"


def test_a_config_and_options_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="not both"):
        config_from_args(args(), SyncConfig(), {"overlap": True})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"vllm_server_base_url": "http://10.0.0.1:9"}, "http://10.0.0.1:9"),
        ({"vllm_server_host": "0.0.0.0", "vllm_server_port": 8123}, "http://127.0.0.1:8123"),
        ({"vllm_server_base_url": None, "vllm_server_host": "gpu7", "vllm_server_port": 80}, "http://gpu7:80"),
        ({}, "http://127.0.0.1:8000"),
    ],
)
def test_the_server_of_trl_s_arguments(given: dict[str, Any], expected: str) -> None:
    assert servers_from_args(args(**given)) == [expected]


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        (["GRPOTrainer"], "ratio"),
        (["GMPOTrainer", "GRPOTrainer"], "advantages"),
        (["MyTrainer", "RLOOTrainer"], "advantages"),
        (["ServerDistillationTrainer", "DistillationTrainer"], None),
    ],
)
def test_a_subclass_is_served_as_its_nearest_known_parent(parents: list[str], expected: str | None) -> None:
    cls: type = object
    for name in reversed(parents):
        cls = type(name, (cls,), {})
    assert support_of(cls()).corrected == expected


@pytest.mark.parametrize("name", ["AsyncGRPOTrainer", "AsyncDistillationTrainer"])
def test_async_trainers_are_told_that_they_sync_themselves(name: str) -> None:
    with pytest.raises(CapabilityError, match="syncs adapters itself") as refused:
        support_of(trainer(name))
    assert "overlap=True" in str(refused.value)


def test_a_trainer_without_generation_is_pointed_to_the_manager() -> None:
    with pytest.raises(CapabilityError, match="SyncManager"):
        support_of(trainer("DPOTrainer"))


@pytest.mark.parametrize(
    "options",
    [{"vllm_sync_interval": 2}, {"vllm_sync_interval": "adaptive"}, {"overlap": True}, {"on_failure": "keep_last"}],
)
def test_off_policy_data_needs_a_correction_in_force(options: dict[str, Any]) -> None:
    config = SyncConfig(**options)
    check_combination(trainer(vllm_importance_sampling_correction=True), config, RATIO)
    check_combination(trainer("RLOOTrainer", loss_type=None), config, ADVANTAGES)
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction=True in the training arguments"):
        check_combination(trainer(vllm_importance_sampling_correction=False), config, RATIO)
    off = SyncConfig(**options, vllm_importance_sampling_correction=False)
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction=True in loraflow's options"):
        check_combination(trainer("RLOOTrainer", loss_type=None), off, ADVANTAGES)
    with pytest.raises(ConfigError, match="has no correction for that"):
        check_combination(trainer("DistillationTrainer", loss_type=None), config, NOTHING)


def test_an_overlap_that_would_mask_everything_is_refused() -> None:
    grpo = trainer(**GRPO_ARGS)
    with pytest.raises(ConfigError, match="max_staleness=0 would mask them all"):
        check_combination(grpo, SyncConfig(overlap=True, max_staleness=0), RATIO)


def test_on_policy_needs_none() -> None:
    config = SyncConfig(vllm_importance_sampling_correction=False)
    kept = SyncConfig(on_failure="keep_last", max_staleness=0)  # the first failure raises
    check_combination(trainer("DistillationTrainer", loss_type=None), kept, NOTHING)
    for kind, support in (("GRPOTrainer", RATIO), ("RLOOTrainer", ADVANTAGES), ("DistillationTrainer", NOTHING)):
        check_combination(trainer(kind, vllm_importance_sampling_correction=False), config, support)


def test_a_correction_that_the_training_arguments_switch_off_is_not_ignored_in_silence() -> None:
    off = trainer(vllm_importance_sampling_correction=False)
    config = config_from_args(off.args, None, {"vllm_importance_sampling_correction": True})
    with pytest.raises(ConfigError, match="True in loraflow's options and False in the training arguments"):
        check_combination(off, config, RATIO)
    check_combination(off, config_from_args(off.args, None, {}), RATIO)


def test_a_mask_that_the_training_arguments_leave_without_log_probs_is_not_ignored_in_silence() -> None:
    off = trainer(vllm_importance_sampling_correction=False, off_policy_mask_threshold=None)
    config = config_from_args(off.args, None, {"off_policy_mask_threshold": 0.3})
    with pytest.raises(ConfigError, match="off_policy_mask_threshold compares log-probs"):
        check_combination(off, config, RATIO)
    check_combination(trainer(**GRPO_ARGS), config, RATIO)


def test_options_of_a_correction_that_a_trainer_lacks_are_not_ignored_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    distillation = trainer("DistillationTrainer", loss_type=None)
    check_combination(distillation, SyncConfig(), NOTHING)
    assert not caplog.records
    check_combination(distillation, SyncConfig(vllm_importance_sampling_mode="token_mask"), NOTHING)
    assert "vllm_importance_sampling_mode change nothing" in caplog.text


def test_bounds_that_are_impossible_are_refused_before_anything_is_started() -> None:
    bounds = {"vllm_importance_sampling_clip_min": 2.0, "vllm_importance_sampling_clip_max": 2.0}
    empty = SyncConfig().model_copy(update=bounds)  # a copy is not validated
    with pytest.raises(ConfigError, match="clip bounds"):
        check_combination(trainer(**GRPO_ARGS), empty, RATIO)


def test_levels_that_a_loss_cannot_take() -> None:
    token = SyncConfig(vllm_importance_sampling_mode="token_mask")
    with pytest.raises(ConfigError, match="one ratio per sequence"):
        check_combination(trainer("RLOOTrainer", loss_type=None), token, ADVANTAGES)
    vespo = trainer(vllm_importance_sampling_correction=True, loss_type="vespo")
    check_combination(vespo, token, RATIO)
    with pytest.raises(ConfigError, match="VESPO"):
        check_combination(vespo, SyncConfig(), RATIO)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8000/", True),
        ("http://0.0.0.0:8000", "http://localhost:8000", True),
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000", True),
        ("http://10.0.0.5:8000", "http://10.0.0.6:8000", False),
        ("http://localhost:8000", "http://localhost:8001", False),
    ],
)
def test_urls_of_one_server(one: str, other: str, same: bool) -> None:
    assert same_server(one, other) == same

"""A scored batch under correction, without a server: stale samples get nothing, others their weight."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from loraflow.config import SyncConfig
from loraflow.correction import CorrectionOptions, correct
from loraflow.errors import LoraflowError
from loraflow.integrations.trl_backend import sampled_logprobs
from loraflow.integrations.trl_batch import VERSIONS, batch_versions, correct_batches, pooled
from loraflow.integrations.trl_support import Support
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from loraflow.ranks import Ranks
from loraflow.records import Rollouts

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
ROLLOUT = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0], [-3.0, 0.0, 0.0], [-1.0, -2.0, -3.0]])
TRAINER = ROLLOUT + torch.tensor([[0.1, 0.2, 9.0], [0.0, 0.0, 0.0], [2.0, 9.0, 9.0], [-0.5, 0.1, 0.1]])
RATIO = torch.tensor([0.3, 0.0, 2.0, -0.3]).exp()  # by hand; the third is above the bound of 3
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5])


class Manager:
    """What `correct_batches` asks of a manager."""

    def __init__(self, *, served: int = 4, newest: int = 4, **options: Any) -> None:
        self.config = SyncConfig(**options)
        self.policy = Policy("run", served)
        self.newest_version = newest
        self.ranks = Ranks()
        self.observed: list[Any] = []

    def correction(self, trainer_logps: Any, rollout_logps: Any, mask: Any, *, advantages: Any, versions: Any) -> Any:
        options = CorrectionOptions.from_config(self.config)
        return correct(
            trainer_logps,
            rollout_logps,
            mask,
            options=options,
            advantages=advantages,
            versions=versions,
            current_version=self.newest_version,
        )

    def behind(self, versions: Any) -> Any:
        return self.newest_version - versions

    def observe(self, found: Any) -> None:
        self.observed.append(found)


def rollouts(version: int = 4) -> Rollouts:
    logprobs = [row[: int(mask.sum())].tolist() for row, mask in zip(ROLLOUT, MASK, strict=True)]
    return Rollouts([[1]] * 4, [[2] * len(row) for row in logprobs], logprobs, [version] * 4, 4)


def scored(manager: Manager, support: Support, *, turns: list[Rollouts], training: bool = True, **trainer: Any) -> Any:
    batch = {"completion_ids": MASK.clone(), "completion_mask": MASK, "advantages": ADVANTAGES.clone()}
    if support.old_logps and trainer.get("vllm_importance_sampling_correction", True):
        batch |= {"old_per_token_logps": TRAINER, "sampling_per_token_logps": ROLLOUT}
        batch["importance_sampling_ratio"] = torch.full((4, 1), 99.0)
    logged: dict[str, float] = {}
    fake = SimpleNamespace(
        _generate_and_score_completions=lambda _: (
            fake._get_per_token_logps_and_entropies(),
            fake._get_per_token_logps_and_entropies("reference"),
            batch,
        )[2],
        _get_per_token_logps_and_entropies=lambda which="policy": (TRAINER if which == "policy" else TRAINER * 7, None),
        model=SimpleNamespace(training=training),
        **trainer,
    )
    sync = SimpleNamespace(log=logged.update, trainer=fake)
    generation: Any = SimpleNamespace(manager=manager, sync=sync, batch=lambda: nullcontext(turns))
    correct_batches(fake, generation, support)
    return fake._generate_and_score_completions([]), logged


def test_a_loss_with_a_ratio_gets_ours_in_its_place() -> None:
    manager = Manager()
    batch, logged = scored(manager, Support(corrected="ratio", old_logps=True), turns=[rollouts()])
    expected = torch.where(RATIO > 3.0, 0.0, RATIO)
    torch.testing.assert_close(batch["importance_sampling_ratio"], expected.unsqueeze(-1))
    assert torch.equal(batch["advantages"], ADVANTAGES)
    assert batch[VERSIONS].tolist() == [4] * 4
    assert batch[VERSIONS].dtype == torch.int64
    assert logged["loraflow/correction/masked_fraction"] == pytest.approx(1 / 9)
    assert len(manager.observed) == 1


def test_a_loss_without_one_gets_weighed_advantages() -> None:
    manager = Manager()
    batch, logged = scored(manager, Support(corrected="advantages"), turns=[rollouts()])
    torch.testing.assert_close(batch["advantages"], ADVANTAGES * torch.where(RATIO > 3.0, 0.0, RATIO))
    assert "importance_sampling_ratio" not in batch
    assert logged["loraflow/correction/logp_difference_max"] == pytest.approx(2.0)


@pytest.mark.parametrize(("version", "weight"), [(4, 1.0), (3, 1.0), (2, 0.0), (-1, 0.0)])
def test_too_old_samples_count_for_nothing(version: int, weight: float) -> None:
    for support, key in ((Support(corrected="ratio", old_logps=True), "importance_sampling_ratio"),):
        batch, logged = scored(Manager(served=version), support, turns=[rollouts(version)])
        expected = torch.where(RATIO > 3.0, 0.0, RATIO) * weight
        torch.testing.assert_close(batch[key].squeeze(-1), expected)
        assert logged["loraflow/correction/stale_fraction"] == 1.0 - weight
    batch, _ = scored(Manager(served=version), Support(corrected="advantages"), turns=[rollouts(version)])
    torch.testing.assert_close(batch["advantages"], ADVANTAGES * torch.where(RATIO > 3.0, 0.0, RATIO) * weight)


def test_too_old_samples_count_for_nothing_even_with_the_correction_off() -> None:
    support = Support(corrected="ratio", old_logps=True)
    for version, weight in ((3, 1.0), (2, 0.0)):
        batch, _ = scored(Manager(), support, turns=[rollouts(version)], vllm_importance_sampling_correction=False)
        assert torch.equal(batch["advantages"], ADVANTAGES * weight)
        assert "importance_sampling_ratio" not in batch


def test_evaluation_does_not_feed_the_adaptive_interval() -> None:
    manager = Manager()
    scored(manager, Support(corrected="advantages"), turns=[rollouts()], training=False)
    assert manager.observed == []


def test_a_batch_without_its_log_probs_is_refused() -> None:
    bare = Rollouts([[1]] * 4, [[2]] * 4, None, [4] * 4, 4)
    with pytest.raises(LoraflowError, match="without the log-probs"):
        scored(Manager(), Support(corrected="advantages"), turns=[bare])


def test_the_tap_on_the_forward_is_taken_away_again() -> None:
    manager = Manager()
    fake_before = scored(manager, Support(corrected="advantages"), turns=[rollouts()])
    assert fake_before is not None
    trainer = type("T", (), {"_get_per_token_logps_and_entropies": lambda self: (TRAINER, None)})()
    trainer._generate_and_score_completions = lambda _: (_ for _ in ()).throw(ValueError("scoring failed"))
    generation: Any = SimpleNamespace(manager=manager, batch=lambda: nullcontext([]))
    correct_batches(trainer, generation, Support(corrected="advantages"))
    with pytest.raises(ValueError, match="scoring failed"):
        trainer._generate_and_score_completions([])
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


def test_of_several_turns_the_oldest_policy_counts() -> None:
    manager: Any = Manager(served=4)
    assert batch_versions(2, [rollouts(4), rollouts(2)], manager).tolist() == [2, 2]
    assert batch_versions(3, [], manager).tolist() == [4, 4, 4]


def test_numbers_of_ranks_are_pooled_by_their_kind() -> None:
    class TwoRanks(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, {"kl": 0.3, "d_max": 5.0, "w_min": 0.1}]

    assert pooled({"kl": 0.1, "d_max": 2.0, "w_min": 0.4}, TwoRanks()) == pytest.approx(
        {"kl": 0.2, "d_max": 5.0, "w_min": 0.1}
    )


def test_the_sampled_token_is_found_among_the_likeliest() -> None:
    logprobs = [[[-0.1, -2.0, -3.0], [-0.5, None]]]
    found = sampled_logprobs([[7, 9]], logprobs, [[[3, 7, 1], [4, 9]]])
    assert found[0][0] == -2.0
    assert torch.tensor(found[0][1]).isnan()


def test_a_number_that_a_canary_spent_makes_no_sample_older() -> None:
    manager = SyncManager(torch.nn.Linear(1, 1), "http://127.0.0.1:9", max_staleness=1)
    manager._spent, manager._attempted = [1], 2  # version 0, the canary, and the first sync after it
    versions = torch.tensor([-1, 0, 2])
    assert manager.behind(versions).tolist() == [3, 1, 0]
    found = manager.correction(torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(3, 2), versions=versions)
    assert found.keep.any(dim=1).tolist() == [False, True, True]
    manager._attempted = 3
    assert manager.behind(versions).tolist() == [4, 2, 1]
    manager._spent = []
    assert manager.behind(versions).tolist() == [4, 3, 1]

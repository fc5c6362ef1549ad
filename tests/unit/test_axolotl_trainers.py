"""What is changed in a trainer object: sync points, the bridge to TRL, and the weights of a scored batch."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.config import SyncConfig
from loraflow.correction import Correction
from loraflow.errors import CapabilityError
from loraflow.integrations.axolotl_bridge import bridge
from loraflow.integrations.axolotl_trainers import VERSIONS, _marking, _scoring, _scoring_parts
from loraflow.manager import SyncManager
from loraflow.policy import Policy

# ---------------------------------------------------------------- weights


def generation_of(versions: list[int], *, last: int, newest: int) -> Any:
    logged: dict[str, float] = {}
    manager = SimpleNamespace(newest_version=newest, observe=lambda _: None)
    manager._attempted, manager._spent = newest, [number for number in range(newest) if number not in versions]
    manager.behind = lambda versions: SyncManager.behind(manager, versions)  # type: ignore[arg-type]
    sync = SimpleNamespace(
        manager=manager,
        records=[SimpleNamespace(version=version) for version in versions],
        log=logged.update,
        trainer=SimpleNamespace(model=SimpleNamespace(training=True)),
    )
    return SimpleNamespace(sync=sync, last_version=last, logged=logged)


def batch_of(difference: list[list[float]]) -> dict[str, Any]:
    gap = torch.tensor(difference)
    return {
        "completion_ids": torch.zeros(gap.shape, dtype=torch.int64),
        "completion_mask": torch.ones(gap.shape),
        "old_per_token_logps": gap - 1.0,
        "sampling_per_token_logps": torch.full(gap.shape, -1.0),
        "importance_sampling_ratio": torch.full(gap.shape, 99.0),
    }


def config(**options: Any) -> SyncConfig:
    return SyncConfig(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=2.0, **options)


def test_a_masked_token_weighs_nothing() -> None:
    found = _scoring(generation_of([0], last=0, newest=0), config())(batch_of([[0.0, 0.5, 1.0]]))
    expected = torch.tensor([[1.0, torch.tensor(0.5).exp(), 0.0]])  # e > 2: Axolotl's own gives it 1/2
    torch.testing.assert_close(found["importance_sampling_ratio"], expected)


def test_the_lower_bound_is_the_one_that_was_asked_for() -> None:
    low = _scoring(generation_of([0], last=0, newest=0), config(vllm_importance_sampling_clip_min=0.5))
    none = _scoring(generation_of([0], last=0, newest=0), config())
    assert low(batch_of([[-2.0]]))["importance_sampling_ratio"].item() == 0.0
    assert none(batch_of([[-2.0]]))["importance_sampling_ratio"].item() == pytest.approx(0.1353, abs=1e-4)


def test_nan_is_no_evidence_of_being_on_policy() -> None:
    batch = batch_of([[0.0, 0.0]])
    batch["sampling_per_token_logps"][0, 1] = torch.nan
    found = _scoring(generation_of([0], last=0, newest=0), config())(batch)
    assert found["importance_sampling_ratio"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(("version", "weight"), [(2, 1.0), (0, 1.0), (-1, 0.0)])
def test_rollouts_made_ahead_carry_their_version(version: int, weight: float) -> None:
    generation = generation_of([0, 2], last=version, newest=2)
    batch = _marking(generation)(batch_of([[0.0], [0.0]]))
    assert batch[VERSIONS].tolist() == [version, version]
    generation.last_version = 2  # of the thread that scores
    found = _scoring(generation, config(max_staleness=1))(batch)
    assert VERSIONS not in found
    assert found["importance_sampling_ratio"].flatten().tolist() == [weight, weight]


def test_what_a_rollout_func_got_in_other_threads_is_of_the_policy_of_the_moment() -> None:
    """Or on rank 0, for the others: nothing was generated in the thread that scores."""
    generation = generation_of([0, 2, 3], last=-1, newest=3)
    generation.sync.manager.policy = Policy("run", 3)
    found = _scoring(generation, config(max_staleness=0))(batch_of([[0.0]]))
    assert found["importance_sampling_ratio"].item() == 1.0


def test_older_than_allowed_is_masked() -> None:
    found = _scoring(generation_of([0, 2, 3], last=0, newest=3), config(max_staleness=1))(batch_of([[0.0]]))
    assert found["importance_sampling_ratio"].item() == 0.0


def test_a_canary_s_number_makes_nothing_older() -> None:
    found = _scoring(generation_of([0, 2], last=0, newest=2), config(max_staleness=1))(batch_of([[0.0]]))
    assert found["importance_sampling_ratio"].item() == 1.0


def test_a_second_run_of_the_same_trainer_counts_its_own_syncs_alone() -> None:
    """Its versions begin at 0 again, where the first run had a canary between two of the same numbers."""
    generation = generation_of([0, 1], last=0, newest=1)
    earlier = [SimpleNamespace(version=version) for version in (0, 2, 3)]
    generation.sync.records = [*earlier, *generation.sync.records]
    found = _scoring(generation, config(max_staleness=1))(batch_of([[0.0]]))
    assert found["importance_sampling_ratio"].item() == 1.0


def test_without_a_correction_in_force_nothing_is_weighed() -> None:
    batch = batch_of([[0.0]])
    del batch["importance_sampling_ratio"]
    found = _scoring(generation_of([0], last=0, newest=0), config())(batch)
    assert "importance_sampling_ratio" not in found


def test_parts_that_are_used_twice_are_weighed_once() -> None:
    part, other = batch_of([[0.5]]), batch_of([[1.0]])
    generation = generation_of([0], last=0, newest=0)
    part[VERSIONS] = other[VERSIONS] = torch.tensor([0])
    observed: list[Correction] = []
    generation.sync.manager.observe = observed.append
    parts = _scoring_parts(generation, config())([part, other, part, other])
    [whole] = observed  # the drift is that of all parts, and not of the last
    assert whole.diagnostics.scored_tokens == 2
    assert whole.diagnostics.logp_difference_mean == pytest.approx(0.75)
    assert VERSIONS not in part
    assert VERSIONS not in other
    assert part["importance_sampling_ratio"].item() == pytest.approx(1.6487, abs=1e-4)
    assert parts[0] is parts[2] is part
    assert other["importance_sampling_ratio"].item() == 0.0


# ---------------------------------------------------------------- bridge


class OldStyle:
    """As Axolotl's async trainer: an override without TRL's newer arguments, and a caller of TRL's older result."""

    _tokenizer = SimpleNamespace(pad_token_id=7, eos_token_id=8)

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, *, image_sizes: Any = None) -> tuple[Any, Any]:
        return ids, None

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return prompts, [[1, 2], [3]], None, ["a", "b"], [[-1.0] * 2, [-1.0]], {}, None, []

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:  # TRL's own code
        assert len(self._generate(inputs)) == 8
        return self._get_per_token_logps_and_entropies("model", "ids", image_sizes=None, num_tiles=None)

    def _generate_only(self, inputs: list[Any]) -> Any:  # Axolotl's
        logps, entropies = self._get_per_token_logps_and_entropies("model", "ids")
        assert (logps, entropies) == ("ids", None)
        return self._generate(inputs)


def test_each_side_is_called_as_it_expects() -> None:
    trainer: Any = OldStyle()
    with pytest.raises(TypeError, match="num_tiles"):
        trainer._generate_and_score_completions([])
    bridge(trainer)
    assert trainer._generate_and_score_completions(["p"]) == ("ids", None, None)
    prompts, ids, mask, completions, tokens, logprobs, extra = trainer._generate_only(["p"])
    assert (prompts, ids, mask, completions) == (["p"], [[1, 2], [3]], None, ["a", "b"])
    assert (tokens, logprobs, extra) == (3, [[-1.0] * 2, [-1.0]], {})
    assert (trainer.pad_token_id, trainer.eos_token_id) == (7, 8)


class Slow(OldStyle):
    """Stays inside of `_generate_only` until it may go on."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.results = 0

    def _generate_only(self, inputs: list[Any]) -> Any:
        self.inside.set()
        assert self.go_on.wait(10)
        self.results = len(self._generate(inputs))
        return None


def test_the_bridge_tells_threads_apart() -> None:
    trainer: Any = Slow()
    bridge(trainer)
    thread = threading.Thread(target=trainer._generate_only, args=(["p"],))
    thread.start()
    assert trainer.inside.wait(10)
    assert trainer._generate_and_score_completions(["p"]) == ("ids", None, None)  # while the other thread is inside
    trainer.go_on.set()
    thread.join()
    assert trainer.results == 7


def test_an_argument_that_would_be_lost_is_refused() -> None:
    trainer: Any = OldStyle()
    trainer._generate_and_score_completions = lambda _: trainer._get_per_token_logps_and_entropies(
        "model", "ids", num_tiles=[2]
    )
    bridge(trainer)
    with pytest.raises(CapabilityError, match="does not take num_tiles"):
        trainer._generate_and_score_completions([])

"""`loraflow.correction` against a float64 reference, and its properties."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from loraflow.config import SyncConfig
from loraflow.correction import CorrectionOptions, correct, drift, off_policy_mask
from loraflow.diagnostics import STALENESS_BINS
from loraflow.errors import ConfigError

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")
OPEN = CorrectionOptions(level="token", mode="mask", clip_min=None, clip_max=None)


# --- the reference: float64, one token at a time, written from the formulas in docs/correction.md


def reference(trainer, rollout, mask, options, advantages=None, versions=None, current=None):
    rows, columns = mask.shape
    low, high = options.clip_min, options.clip_max
    weights = np.ones((rows, columns))
    reasons = {name: np.zeros((rows, columns), bool) for name in ("bounds", "nonfinite", "opsm", "stale", "clipped")}
    differences = []
    for b in range(rows):
        real = [t for t in range(columns) if mask[b, t]]
        d = {t: float(trainer[b, t]) - float(rollout[b, t]) for t in real}
        bad = {t for t in real if not math.isfinite(d[t])}
        differences += [d[t] for t in real if t not in bad]
        good_sum = math.fsum(d[t] for t in real if t not in bad)
        for t in real:
            if options.level == "token":
                log_ratio, spoilt = (0.0 if t in bad else d[t]), t in bad
            else:
                log_ratio, spoilt = good_sum / (len(real) if options.level == "geometric" else 1), bool(bad)
            ratio = math.exp(log_ratio)
            is_low, is_high = low is not None and ratio < low, high is not None and ratio > high
            if options.mode == "mask":
                reasons["bounds"][b, t] = is_low or is_high
            else:
                ratio = low if is_low else high if is_high else ratio
                reasons["clipped"][b, t] = is_low or is_high
            weights[b, t] = ratio
            reasons["nonfinite"][b, t] = spoilt
            if options.off_policy_mask_threshold is not None:
                gap = -good_sum / len(real)
                reasons["opsm"][b, t] = advantages[b] < 0 and gap > options.off_policy_mask_threshold
            if versions is not None:
                old = [not 0 <= current - versions[b, u] <= options.max_staleness for u in real]
                reasons["stale"][b, t] = old[real.index(t)] if options.level == "token" else any(old)
    dropped = reasons["bounds"] | reasons["nonfinite"] | reasons["opsm"] | reasons["stale"]
    reasons["clipped"] &= ~dropped
    weights[dropped & mask] = 0.0
    units = [weights[b, t] for b, t in np.argwhere(mask)]
    if options.level != "token":
        units = [weights[b, np.flatnonzero(mask[b])[0]] for b in range(rows) if mask[b].any()]
    total = max(int(mask.sum()), 1)
    n = max(len(differences), 1)
    squares = sum(w * w for w in units)
    values = {
        "logp_difference_mean": sum(map(abs, differences)) / n,
        "logp_difference_max": max(map(abs, differences), default=0.0),
        "kl": sum(math.exp(d) - 1 - d for d in differences) / n,
        "ess": sum(units) ** 2 / (squares * len(units)) if squares else 0.0,
        "weight_min": min(units, default=0.0),
        "weight_mean": sum(units) / max(len(units), 1),
        "weight_max": max(units, default=0.0),
        "clipped_fraction": (reasons["clipped"] & mask).sum() / total,
        "masked_fraction": (dropped & mask).sum() / total,
        "bounds_masked_fraction": (reasons["bounds"] & mask).sum() / total,
        "nonfinite_fraction": (reasons["nonfinite"] & mask).sum() / total,
        "off_policy_masked_fraction": (reasons["opsm"] & mask).sum() / total,
        "scored_tokens": float(len(differences)),
    }
    if versions is not None:
        ages = [current - int(versions[b, t]) for b, t in np.argwhere(mask) if 0 <= versions[b, t] <= current]
        values["stale_fraction"] = (reasons["stale"] & mask).sum() / total
        values["staleness_mean"] = sum(ages) / max(len(ages), 1)
        values["staleness_max"] = max(ages, default=0)
        for bin_ in range(STALENESS_BINS):
            name = f"{bin_}+" if bin_ == STALENESS_BINS - 1 else f"{bin_}"
            values[f"staleness_histogram/{name}"] = sum(min(age, STALENESS_BINS - 1) == bin_ for age in ages)
    return weights, mask & ~dropped, values


def batch(seed, rows=6, columns=9, spread=0.4, bad=0.0):
    """Random log-probs; masks with holes (as tool masks have), one full row and one empty one."""
    rng = np.random.default_rng(seed)
    trainer = -rng.exponential(1.5, (rows, columns)).astype(np.float32)
    rollout = (trainer + spread * rng.standard_normal((rows, columns))).astype(np.float32)
    mask = rng.random((rows, columns)) < 0.7
    mask[0], mask[-1] = True, False
    poison = rng.choice([np.nan, np.inf, -np.inf], (rows, columns)).astype(np.float32)
    rollout = np.where(rng.random((rows, columns)) < bad, poison, rollout)
    trainer = np.where(rng.random((rows, columns)) < bad / 2, poison, trainer)
    return trainer, rollout, mask, rng.standard_normal(rows).astype(np.float32), rng


def tensors(*arrays):
    return tuple(torch.from_numpy(np.array(a)) for a in arrays)


# --- numbers


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bounds", [(None, 3.0), (0.5, 2.0), (0.8, None)])
@pytest.mark.parametrize("bad", [0.0, 0.06])
def test_equals_the_reference(level, mode, bounds, bad):
    for seed in range(8):
        trainer, rollout, mask, advantages, rng = batch(seed, bad=bad)
        versions = rng.integers(-1, 13, mask.shape)
        if seed % 2:
            versions[:] = rng.integers(-1, 13, (mask.shape[0], 1))
        options = CorrectionOptions(
            level, mode, *bounds, off_policy_mask_threshold=0.05 if seed % 3 else None, max_staleness=9
        )
        expected, keep, values = reference(trainer, rollout, mask, options, advantages, versions, 11)
        given_versions = versions[:, 0] if seed % 2 else versions
        t, r, m, a, v = tensors(trainer, rollout, mask, advantages, given_versions)
        result = correct(t, r, m, options=options, advantages=a, versions=v, current_version=11)

        assert result.weights.shape == (mask.shape if level == "token" else (mask.shape[0], 1))
        got = result.weights.expand(mask.shape).numpy()
        np.testing.assert_allclose(got[mask], expected[mask], rtol=2e-6, atol=1e-7)
        np.testing.assert_array_equal(result.keep.numpy(), keep)
        found = result.diagnostics.to_dict()
        assert found.keys() == values.keys()
        for name, value in values.items():
            assert found[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def test_a_batch_worked_by_hand():
    trainer = torch.tensor([[math.log(0.4), math.log(0.3), 0.0], [math.log(0.1), math.log(0.5), math.log(0.8)]])
    rollout = torch.tensor([[math.log(0.2), math.log(0.2), 9.9], [math.log(0.4), math.log(0.5), math.log(0.4)]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])

    def weights(level, mode, low, high):
        return correct(trainer, rollout, mask, options=CorrectionOptions(level, mode, low, high)).weights.tolist()

    assert weights("token", "truncate", 0.5, 1.8)[0] == pytest.approx([1.8, 1.5, 1.0])
    assert weights("token", "truncate", 0.5, 1.8)[1] == pytest.approx([0.5, 1.0, 1.8])
    assert weights("token", "mask", 0.5, 1.8)[0] == pytest.approx([0.0, 1.5, 1.0])
    assert weights("token", "mask", 0.5, 1.8)[1] == pytest.approx([0.0, 1.0, 0.0])
    assert weights("sequence", "mask", None, 3.1) == [[pytest.approx(3.0)], [pytest.approx(0.5)]]
    assert weights("sequence", "mask", 0.6, 2.9) == [[0.0], [0.0]]
    assert weights("geometric", "mask", 0.6, 2.9) == [[pytest.approx(3**0.5)], [pytest.approx(0.5 ** (1 / 3))]]


def test_half_precision_is_computed_in_float32():
    trainer, rollout, mask, *_ = batch(3)
    for dtype in (torch.bfloat16, torch.float16):
        t, r, m = tensors(trainer, rollout, mask)
        half = correct(t.to(dtype), r.to(dtype), m, options=CorrectionOptions())
        same = correct(t.to(dtype).float(), r.to(dtype).float(), m, options=CorrectionOptions())
        assert half.weights.dtype == torch.float32
        assert torch.equal(half.weights, same.weights)
        assert half.metrics() == same.metrics()


def test_disabled_weighs_by_one_and_still_masks():
    trainer, rollout, mask, *_ = batch(4)
    rollout[0, 0] = np.nan
    t, r, m = tensors(trainer, rollout, mask)
    options = CorrectionOptions("token", "mask", None, 1.01, enabled=False)
    result = correct(t, r, m, options=options)
    expected = torch.ones(m.shape)
    expected[0, 0] = 0
    assert torch.equal(result.weights, expected)
    assert result.diagnostics.kl > 0


# --- properties


def options_strategy():
    return st.builds(
        CorrectionOptions,
        level=st.sampled_from(LEVELS),
        mode=st.sampled_from(MODES),
        clip_min=st.one_of(st.none(), st.floats(0, 0.9)),
        clip_max=st.floats(1.1, 10),
        off_policy_mask_threshold=st.one_of(st.none(), st.floats(0.001, 1)),
    )


@settings(max_examples=60, deadline=None)
@given(options=options_strategy(), seed=st.integers(0, 2**32 - 1))
def test_on_policy_gives_exactly_ones(options, seed):
    trainer, _, mask, advantages, _ = batch(seed)
    t, m, a = tensors(trainer, mask, advantages)
    result = correct(t, t.clone(), m, options=options, advantages=a, versions=torch.full((6,), 4), current_version=4)
    assert torch.equal(result.weights, torch.ones_like(result.weights))
    assert torch.equal(result.keep, m)
    metrics = result.metrics("")
    assert metrics["ess"] == 1.0
    assert metrics["weight_min"] == metrics["weight_max"] == 1.0
    assert metrics["kl"] == metrics["logp_difference_max"] == metrics["masked_fraction"] == 0.0


@settings(max_examples=60, deadline=None)
@given(
    options=options_strategy(),
    seed=st.integers(0, 2**32 - 1),
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0]),
)
def test_padding_never_matters(options, seed, junk):
    trainer, rollout, mask, advantages, rng = batch(seed, bad=0.02)
    versions = rng.integers(0, 4, mask.shape)
    t, r, m, a, v = tensors(trainer, rollout, mask, advantages, versions)
    clean = correct(t, r, m, options=options, advantages=a, versions=v, current_version=3)
    dirty = correct(
        torch.where(m, t, torch.tensor(junk)),
        torch.where(m, r, torch.tensor(-junk)),
        m,
        options=options,
        advantages=a,
        versions=torch.where(m, v, -7),
        current_version=3,
    )
    assert torch.equal(clean.weights, dirty.weights)
    assert torch.equal(clean.keep, dirty.keep)
    assert clean.metrics() == dirty.metrics()


@settings(max_examples=60, deadline=None)
@given(
    options=options_strategy(),
    seed=st.integers(0, 2**32 - 1),
    poison=st.sampled_from([math.nan, math.inf, -math.inf]),
    side=st.sampled_from(["trainer", "rollout", "both"]),
)
def test_nan_and_infinity_never_become_weight(options, seed, poison, side):
    trainer, rollout, mask, advantages, _ = batch(seed)
    t, r, m, a = tensors(trainer, rollout, mask, advantages)
    if side != "rollout":
        t[0, 2] = poison
    if side != "trainer":
        r[0, 2] = poison
    result = correct(t, r, m, options=options, advantages=a)
    spoilt = result.weights.expand(m.shape)[0, 2:3] if options.level == "token" else result.weights[0]
    assert torch.count_nonzero(spoilt) == 0
    assert not result.keep[0, 2]
    assert torch.isfinite(result.weights).all()
    metrics = result.metrics("")
    lost = 1 if options.level == "token" else int(m[0].sum())
    assert metrics["nonfinite_fraction"] == pytest.approx(lost / int(m.sum()))
    assert metrics["scored_tokens"] == int(m.sum()) - 1
    assert all(math.isfinite(value) for value in metrics.values())


@settings(max_examples=40, deadline=None)
@given(options=options_strategy(), seed=st.integers(0, 2**32 - 1))
def test_permuting_samples_permutes_weights(options, seed):
    trainer, rollout, mask, advantages, rng = batch(seed, bad=0.02)
    versions = rng.integers(0, 4, mask.shape[0])
    order = rng.permutation(mask.shape[0])
    inputs = (trainer, rollout, mask, advantages, versions)
    t, r, m, a, v = tensors(*inputs)
    tp, rp, mp, ap, vp = tensors(*(x[order] for x in inputs))
    one = correct(t, r, m, options=options, advantages=a, versions=v, current_version=3)
    two = correct(tp, rp, mp, options=options, advantages=ap, versions=vp, current_version=3)
    assert torch.equal(one.weights[torch.from_numpy(order)], two.weights)
    assert torch.equal(one.keep[torch.from_numpy(order)], two.keep)
    assert two.metrics() == pytest.approx(one.metrics(), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(options=options_strategy(), seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 200))
def test_bounds_hold_and_ess_is_a_fraction(options, seed, spread):
    trainer, rollout, mask, advantages, _ = batch(seed, spread=spread)
    t, r, m, a = tensors(trainer, rollout, mask, advantages)
    result = correct(t, r, m, options=options, advantages=a)
    kept = result.weights.expand(m.shape)[result.keep]
    low, high = options.bounds
    # Bounds are float32 where the weights are: 0.1 is not 0.1 there.
    assert (kept >= torch.tensor(low, dtype=torch.float32)).all()
    assert (kept <= torch.tensor(high, dtype=torch.float32)).all()
    ess = result.metrics("")["ess"]
    assert 0 <= ess <= 1
    assert (ess > 0) == bool((kept > 0).any())


def test_an_overflowing_ratio_is_masked_where_no_bound_catches_it():
    trainer, rollout, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-200.0, -1.0]]), torch.ones(1, 2)
    open_ended = correct(trainer, rollout, mask, options=OPEN)
    assert open_ended.weights.tolist() == [[0.0, 1.0]]
    assert open_ended.metrics("")["bounds_masked_fraction"] == 0.5
    truncated = correct(trainer, rollout, mask, options=CorrectionOptions("token", "truncate", None, 3.0))
    assert truncated.weights.tolist() == [[3.0, 1.0]]


def test_ess_of_huge_weights_does_not_overflow():
    difference = torch.tensor([[80.0, 80.0, 80.0, 0.0]])
    result = correct(difference, torch.zeros(1, 4), torch.ones(1, 4), options=OPEN)
    assert result.metrics("")["ess"] == pytest.approx(0.75)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4), (0, 0)])
def test_a_batch_without_tokens_is_safe(level, shape):
    nan = torch.full(shape, math.nan)
    result = correct(
        nan,
        nan,
        torch.zeros(shape),
        options=CorrectionOptions(level, "mask", 0.5, 2.0, off_policy_mask_threshold=0.1),
        advantages=-torch.ones(shape[0]),
        versions=torch.zeros(shape[0], dtype=torch.long),
        current_version=0,
    )
    assert not result.keep.any()
    assert torch.equal(result.weights, torch.ones_like(result.weights))
    assert set(result.metrics().values()) == {0.0}


def test_weights_carry_no_gradient():
    trainer = torch.randn(2, 3, requires_grad=True)
    result = correct(trainer, torch.randn(2, 3), torch.ones(2, 3), options=OPEN)
    assert not result.weights.requires_grad
    assert not result.diagnostics.kl.requires_grad
    (trainer * result.weights).sum().backward()
    assert torch.equal(trainer.grad, result.weights)


# --- off-policy sequence masking and staleness


def test_opsm_drops_negative_samples_that_drifted_only():
    rollout = torch.full((4, 3), -1.0)
    trainer = torch.tensor([[-1.2] * 3, [-1.2] * 3, [-1.05] * 3, [-0.5] * 3])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    options = replace(OPEN, off_policy_mask_threshold=0.1)
    mask = torch.ones(4, 3)
    assert off_policy_mask(trainer, rollout, mask, advantages, 0.1).tolist() == [[False], [True], [True], [True]]
    for given_advantages in (advantages, advantages[:, None], advantages[:, None].expand(4, 3)):
        result = correct(trainer, rollout, mask, options=options, advantages=given_advantages)
        assert result.keep.all(dim=1).tolist() == [False, True, True, True]
        assert result.metrics("")["off_policy_masked_fraction"] == 0.25


def test_opsm_by_token_advantages_masks_tokens_of_a_sequence():
    options = CorrectionOptions("sequence", "mask", None, None, off_policy_mask_threshold=0.1)
    trainer, rollout = torch.full((1, 3), -1.5), torch.full((1, 3), -1.0)
    result = correct(trainer, rollout, torch.ones(1, 3), options=options, advantages=torch.tensor([[1.0, -1.0, 0.0]]))
    assert result.keep.tolist() == [[True, False, True]]
    assert result.weights[0].tolist() == pytest.approx([math.exp(-1.5), 0.0, math.exp(-1.5)])


def test_stale_samples_are_masked_and_counted():
    logps, mask = torch.zeros(5, 2), torch.ones(5, 2)
    versions = torch.tensor([20, 19, 18, 2, 21])  # now, one behind, two behind, very old, from the future
    options = replace(OPEN, max_staleness=1)
    result = correct(logps, logps, mask, options=options, versions=versions, current_version=20)
    assert result.weights[:, 0].tolist() == [1, 1, 0, 0, 0]
    metrics = result.metrics("")
    assert metrics["stale_fraction"] == pytest.approx(0.6)
    assert metrics["staleness_mean"] == pytest.approx((0 + 1 + 2 + 18) / 4)
    assert metrics["staleness_max"] == 18
    histogram = [metrics[f"staleness_histogram/{i}"] for i in range(8)] + [metrics["staleness_histogram/8+"]]
    assert histogram == [2, 2, 2, 0, 0, 0, 0, 0, 2]
    as_tensor = correct(logps, logps, mask, options=options, versions=versions, current_version=torch.tensor(20))
    assert as_tensor.metrics("") == metrics


def test_a_stale_token_costs_its_sequence_where_sequences_are_weighed():
    logps, mask = torch.zeros(2, 3), torch.ones(2, 3)
    versions = torch.tensor([[3, 4, 5], [5, 5, 5]])

    def keep(level):
        options = CorrectionOptions(level, "mask", max_staleness=1)
        return correct(logps, logps, mask, options=options, versions=versions, current_version=5).keep.tolist()

    assert keep("token") == [[False, True, True], [True] * 3]
    assert keep("sequence") == keep("geometric") == [[False] * 3, [True] * 3]


# --- drift


def test_drift_is_the_k3_kl_and_the_ess():
    trainer, rollout = torch.tensor([[0.0, -1.0]]), torch.tensor([[-0.5, -0.5]])
    kl, ess = drift(correct(trainer, rollout, torch.ones(1, 2), options=OPEN))
    assert kl == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 2, rel=1e-6)
    w = math.exp(0.5), math.exp(-0.5)
    assert ess == pytest.approx(sum(w) ** 2 / (2 * (w[0] ** 2 + w[1] ** 2)), rel=1e-6)


def test_drift_is_infinite_where_nothing_could_be_scored():
    nan = torch.full((1, 2), math.nan)
    assert drift(correct(nan, nan, torch.ones(1, 2), options=OPEN)) == (math.inf, 0.0)


def test_kl_estimate_approaches_the_true_kl():
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(32, generator=generator).log_softmax(-1)
    trainer = (rollout + 0.3 * torch.randn(32, generator=generator)).log_softmax(-1)
    tokens = torch.multinomial(rollout.exp(), 400_000, replacement=True, generator=generator).view(100, -1)
    found = drift(correct(trainer[tokens], rollout[tokens], torch.ones(tokens.shape), options=OPEN)).kl
    assert found == pytest.approx(float((rollout.exp() * (rollout - trainer)).sum()), rel=0.02)


# --- the hot path stays on the device


class _NoHostCopy(TorchDispatchMode):
    """Refuses whatever would wait for the device, or has a shape that depends on values."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(self.forbidden), name
        if name in {"index", "index_put", "index_put_"}:
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "boolean index"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_copied_to_the_host(level, mode, device):
    trainer, rollout, mask, advantages, _ = batch(0)
    t, r, m, a, v = (x.to(device) for x in tensors(trainer, rollout, mask, advantages, np.zeros(6, int)))
    options = CorrectionOptions(level, mode, 0.5, 2.0, off_policy_mask_threshold=0.1)
    with _NoHostCopy():
        result = correct(t, r, m, options=options, advantages=a, versions=v, current_version=1)
    assert result.weights.device.type == device
    values = [x for x in vars(result.diagnostics).values() if x.dim() == 0]
    assert len(values) == 16
    assert all(x.device.type == device for x in values)


def test_metrics_are_one_transfer():
    class Count(TorchDispatchMode):
        moved = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.moved += func.overloadpacket.__name__ == "_local_scalar_dense"
            return func(*args, **(kwargs or {}))

    trainer, rollout, mask, *_ = batch(0)
    t, r, m = tensors(trainer, rollout, mask)
    result = correct(t, r, m, options=OPEN, versions=torch.zeros(6, dtype=torch.long), current_version=0)
    with Count() as counter:
        metrics = result.metrics("p/")
    assert counter.moved == 0  # tolist() of one 1-D tensor, no .item()
    assert all(name.startswith("p/") for name in metrics)
    assert len(metrics) == 16 + STALENESS_BINS


# --- options


def test_options_come_from_the_config():
    assert CorrectionOptions.from_config(SyncConfig()) == CorrectionOptions("sequence", "mask", None, 3.0)
    config = SyncConfig(
        vllm_importance_sampling_correction=False,
        vllm_importance_sampling_mode="geometric_truncate",
        vllm_importance_sampling_clip_min=0.5,
        vllm_importance_sampling_clip_max=2.0,
        off_policy_mask_threshold=0.2,
        max_staleness=5,
    )
    assert CorrectionOptions.from_config(config) == CorrectionOptions("geometric", "truncate", 0.5, 2.0, 0.2, 5, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": "word"},
        {"mode": "clip"},
        {"clip_min": 3.0},
        {"clip_min": -0.1},
        {"clip_max": math.nan},
        {"mode": "truncate", "clip_max": None},
        {"max_staleness": -1},
        {"off_policy_mask_threshold": math.nan},
        {"off_policy_mask_threshold": -0.1},
    ],
)
def test_impossible_options_are_refused(wrong):
    with pytest.raises(ConfigError):
        CorrectionOptions(**wrong)


def test_bounds_are_not_asked_for_where_nothing_is_weighed():
    off = CorrectionOptions(mode="truncate", clip_max=None, enabled=False)
    x = torch.tensor([[5.0, -5.0]])
    assert correct(x, torch.zeros(1, 2), torch.ones(1, 2), options=off).weights.tolist() == [[1.0]]


def test_inputs_that_do_not_fit_are_refused():
    x, options = torch.zeros(2, 3), CorrectionOptions()
    for trainer, rollout, mask in [(x, x[:, :2], x), (x, x, x[0]), (x[0], x[0], x[0])]:
        with pytest.raises(ConfigError, match="one shape"):
            correct(trainer, rollout, mask, options=options)
    with pytest.raises(ConfigError, match="versions"):
        correct(x, x, x, options=options, versions=torch.zeros(3), current_version=1)
    with pytest.raises(ConfigError, match="current_version"):
        correct(x, x, x, options=options, versions=torch.zeros(2))
    with pytest.raises(ConfigError, match="one newest version"):
        correct(x, x, x, options=options, versions=torch.zeros(2, 1), current_version=torch.zeros(2))
    with pytest.raises(ConfigError, match="advantages"):
        correct(x, x, x, options=replace(options, off_policy_mask_threshold=0.1))


def test_results_are_frozen():
    result = correct(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), options=OPEN)
    with pytest.raises(FrozenInstanceError):
        result.weights = None

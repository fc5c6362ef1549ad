"""`loraflow.correction` against the code of the installed TRL (and Axolotl, where it is installed).

The statements that compute the ratio stand in the middle of a method of 500 lines. They are cut out of the installed
source, by what they assign, and executed as they are: TRL's own code, without a trainer around it.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loraflow.correction import CorrectionOptions, correct, off_policy_mask

BOUNDS = [(None, 3.0), (0.5, 2.0), (0.9, 1.1)]
TRL_MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def source(package: str, path: str) -> ast.Module:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))


def run(node: ast.stmt | list[ast.stmt], names: dict) -> dict:
    body = node if isinstance(node, list) else [node]
    scope = {"torch": torch, "math": math, **names}
    exec(compile(ast.Module(body=body, type_ignores=[]), "<installed source>", "exec"), scope)
    return scope


def block_assigning(tree: ast.AST, name: str) -> ast.If:
    """The smallest ``if`` that computes ``name`` from the log-ratio, bounds included."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and any(isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name for n in ast.walk(node))
        and "torch.exp(logps_diff)" in ast.unparse(node)
    ]
    return min(found, key=lambda node: len(ast.unparse(node)))


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list = []
    return node


@pytest.fixture(scope="module")
def grpo() -> ast.Module:
    return source("trl", "trainer/grpo_trainer.py")


def batch(seed: int, spread: float = 0.5):
    generator = torch.Generator().manual_seed(seed)
    trainer = -torch.rand(7, 12, generator=generator) * 4
    rollout = trainer + spread * torch.randn(7, 12, generator=generator)
    lengths = torch.tensor([12, 1, 5, 0, 8, 12, 3])
    completion = (torch.arange(12) < lengths[:, None]).int()
    tool = (torch.rand(7, 12, generator=generator) < 0.8).int()
    advantages = torch.randn(7, generator=generator)
    return trainer, rollout, completion, tool, advantages


def trl_ratio(tree, trainer, rollout, completion, tool, mode, low, high):
    trainer_stub = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    names = {
        "self": trainer_stub,
        "old_per_token_logps": trainer,
        "sampling_per_token_logps": rollout,
        "completion_mask": completion,
        "tool_mask": tool,
    }
    return run(block_assigning(tree, "vllm_importance_sampling_ratio"), names)["vllm_importance_sampling_ratio"]


def ours(trainer, rollout, mask, mode, low, high):
    level, kind = mode.split("_")
    return correct(trainer, rollout, mask, options=CorrectionOptions(level, kind, low, high))


@pytest.mark.parametrize("mode", TRL_MODES)
@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("with_tools", [False, True])
def test_weights_equal_trl(grpo, mode, low, high, with_tools):
    for seed in range(10):
        for spread in (0.05, 0.5, 5.0):
            trainer, rollout, completion, tool, _ = batch(seed, spread)
            mask = completion * tool if with_tools else completion
            theirs = trl_ratio(grpo, trainer, rollout, completion, tool if with_tools else None, mode, low, high)
            weights = ours(trainer, rollout, mask, mode, low, high).weights
            torch.testing.assert_close(weights, theirs, rtol=1e-6, atol=1e-6)


def test_the_loss_of_a_batch_equals_trl(grpo):
    """Padding included: TRL multiplies the whole (B, T) loss before it masks."""
    trainer, rollout, completion, _, advantages = batch(1)
    for mode in TRL_MODES:
        theirs = trl_ratio(grpo, trainer, rollout, completion, None, mode, 0.5, 2.0)
        loss = -advantages[:, None] * trainer
        mine = ours(trainer, rollout, completion, mode, 0.5, 2.0).weights
        torch.testing.assert_close(
            (loss * mine * completion).sum(), (loss * theirs * completion).sum(), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("with_nan", [False, True])
def test_off_policy_mask_equals_trl(grpo, threshold, with_nan):
    node = function(grpo, "get_off_policy_mask")
    if with_nan and "nan_to_num" not in ast.unparse(node):
        pytest.skip("this TRL lets NaN through")
    theirs = run(node, {})["get_off_policy_mask"]
    dropped = 0
    for seed in range(10):
        trainer, rollout, completion, tool, advantages = batch(seed)
        if with_nan:
            rollout[0, 3] = math.nan
        for given in (advantages[:, None], advantages[:, None] * torch.linspace(-1, 1, 12)):
            expected = theirs(given, trainer, rollout, completion * tool, threshold)
            got = off_policy_mask(trainer, rollout, completion * tool, given, threshold)
            assert torch.equal(got, expected.bool())
            dropped += int((~got).sum())
    assert dropped > 0


def test_logged_differences_equal_trl(grpo):
    """TRL's ``sampling/…`` metrics and ours of the same name."""
    trainer, rollout, completion, *_ = batch(2)
    rollout[0, 1] = math.nan
    mask = completion.bool()
    delta = (trainer - rollout).abs()[mask]
    delta = delta[~delta.isnan()]
    metrics = ours(trainer, rollout, completion, "token_truncate", None, 3.0).metrics("")
    assert metrics["logp_difference_mean"] == pytest.approx(float(delta.mean()), rel=1e-6)
    assert metrics["logp_difference_max"] == pytest.approx(float(delta.max()), rel=1e-6)
    clean = batch(2)[1]
    ratio = trl_ratio(grpo, trainer, clean, completion, None, "token_truncate", None, 3.0)[mask]
    metrics = ours(trainer, clean, completion, "token_truncate", None, 3.0).metrics("")
    for name in ("min", "mean", "max"):
        assert metrics[f"weight_{name}"] == pytest.approx(float(getattr(ratio, name)()), rel=1e-6)


@pytest.mark.parametrize("mode", TRL_MODES)
def test_nan_is_where_we_differ_on_purpose(grpo, mode):
    trainer, rollout, completion, *_ = batch(3, spread=0.0)
    rollout[0, 2] = math.nan
    if "nan_to_num" not in ast.unparse(block_assigning(grpo, "vllm_importance_sampling_ratio")):
        pytest.skip("this TRL lets NaN through")
    theirs = trl_ratio(grpo, trainer, rollout, completion, None, mode, None, 3.0)
    result = ours(trainer, rollout, completion, mode, None, 3.0)
    column = 2 if mode.startswith("token") else 0
    assert theirs[0, column] == 1.0  # TRL: unknown is taken as on-policy
    assert result.weights[0, column] == 0.0
    assert not result.keep[0, 2]
    assert result.metrics("")["nonfinite_fraction"] > 0


# --- Axolotl 0.19: the async trainer's mask mode clamps after it masked, so that what it masked weighs 1 / cap


def axolotl_mask(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """Axolotl 0.19's two statements, as its source has them."""
    return ratio.masked_fill(ratio > cap, value=0.0).clamp(min=1.0 / cap)


def test_what_is_masked_weighs_nothing_unlike_in_axolotl():
    trainer = torch.tensor([[math.log(10.0), 0.0, math.log(0.01)]])
    rollout, mask = torch.zeros(1, 3), torch.ones(1, 3)
    assert axolotl_mask(trainer.exp(), 3.0).tolist() == [pytest.approx([1 / 3, 1.0, 1 / 3])]
    result = ours(trainer, rollout, mask, "token_mask", 1 / 3, 3.0)
    assert result.weights.tolist() == [[0.0, 1.0, 0.0]]
    sequence = ours(trainer[:, :1], rollout[:, :1], mask[:, :1], "sequence_mask", None, 3.0)
    assert sequence.weights.tolist() == [[0.0]]


def test_axolotls_own_code_has_the_defect():
    """Executed only where Axolotl is installed: shows that the quotation above is the real code."""
    tree = source("axolotl", "core/trainers/grpo/async_trainer.py")
    block = max(
        (
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.If)
            and "data['importance_sampling_ratio'] = is_ratio" in [ast.unparse(s) for s in n.body]
        ),
        key=lambda node: len(ast.unparse(node)),
    )
    trainer = torch.tensor([[math.log(10.0), 0.0, math.log(0.01)]])
    data = {"sampling_per_token_logps": torch.zeros(1, 3)}
    stub = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_cap=3.0,
    )
    names = {"self": stub, "data": data, "old_per_token_logps": trainer, "completion_mask": torch.ones(1, 3)}
    run(block, names)
    torch.testing.assert_close(data["importance_sampling_ratio"], axolotl_mask(trainer.exp(), 3.0))

"""Grouped folds against one recipe after the other: Triton's kernels, run by its interpreter on the CPU.

The interpreter multiplies no bfloat16; `tests/gpu` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_ranks

pytest.importorskip("triton")

SHARES = 2


def _recipes(dtype: torch.dtype) -> list[Any]:
    """Rectangles with whole tiles and without, rows on a 16-byte boundary and off it, a transposed view, any rank."""
    from loraflow_server.fold_rules import Recipe

    torch.manual_seed(0)
    found = []
    for rows, cols, rank, turned in (
        (96, 136, 32, False),
        (70, 200, 8, False),
        (33, 50, 4, False),
        (128, 64, 40, True),
    ):
        room = torch.randn(cols, rows).to(dtype).T if turned else torch.randn(rows + 5, cols).to(dtype)[:rows]
        left = torch.randn(rank, rows).to(dtype).T if turned else torch.randn(rows, rank).to(dtype)
        right = torch.randn(cols, rank).to(dtype).T if turned else torch.randn(rank, cols).to(dtype)
        found.append(Recipe(room, torch.randn(rows, cols).to(dtype) * 0.1, 0.37, left, right))
    return found


def _signs() -> torch.Tensor:
    return torch.randint(0, 2, (200,)).mul(2).sub(1).double()


def look(dtype: torch.dtype) -> dict[str, Any]:
    from loraflow_server.grouped import Grouped

    recipes = _recipes(dtype)
    grouped = Grouped(recipes, SHARES)
    grouped.write()
    signs = _signs()
    found: dict[str, Any] = {
        "served": [recipe.view.clone() for recipe in recipes],
        "wanted": [recipe.exact().to(dtype) for recipe in recipes],
        "errors": [float(grouped.error(share, signs)) for share in range(SHARES)],
        "plain": [max(float(recipe.error(signs)) for recipe in recipes[share::SHARES]) for share in range(SHARES)],
    }
    recipes[1].view[3, 7] += 1
    found["one value wrong"] = [float(grouped.error(share, signs)) for share in range(SHARES)]
    recipes[1].view[3, 7] = float("nan")
    found["one value NaN"] = float(grouped.error(1, signs))
    grouped.write()
    found["folded again"] = torch.equal(recipes[1].view, found["served"][1])
    return found


@pytest.fixture(scope="module", params=["float32", "float16"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("grouped")
    dtype = getattr(torch, request.param)
    outcome = run_ranks(look, dtype, folder=folder, world_size=1, env={"TRITON_INTERPRET": "1"})[0]
    if outcome.error is not None:
        raise outcome.error
    result: dict[str, Any] = outcome.result
    return result


def test_every_weight_is_base_and_product_rounded_once(found: dict[str, Any]) -> None:
    for served, wanted in zip(found["served"], found["wanted"], strict=True):
        eps = torch.finfo(served.dtype).eps
        order = 32 if served.dtype == torch.float32 else 4  # float32 adds up in another order
        torch.testing.assert_close(served, wanted, rtol=eps, atol=order * eps)


def test_the_proof_is_that_of_each_recipe(found: dict[str, Any]) -> None:
    assert found["errors"] == pytest.approx(found["plain"], rel=1e-2)
    assert max(found["errors"]) < 1


def test_one_wrong_value_fails_its_share_alone(found: dict[str, Any]) -> None:
    right, wrong = found["one value wrong"]
    assert right == pytest.approx(found["errors"][0])
    assert wrong > 1
    assert not found["one value NaN"] <= 1
    assert found["folded again"]

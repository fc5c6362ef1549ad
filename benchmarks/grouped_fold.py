"""A fold of all weights in one launch and in one for each, and their proofs: right, and how fast. Needs a GPU.

python benchmarks/grouped_fold.py --out results
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from loraflow.bench.presets import Preset, preset_of
from loraflow.bench.report import environment
from loraflow_server import grouped
from loraflow_server.fold_rules import Recipe

TILES = [((64, 64), 4), ((64, 128), 4), ((32, 128), 4), ((128, 64), 4), ((128, 128), 8), ((64, 256), 8)]
BLOCKS = [(16, 512), (32, 256), (16, 256)]
SHARES = 8


def recipes_of(preset: Preset, rank: int) -> tuple[torch.Tensor, list[Recipe]]:
    """What is served, and a recipe for each linear layer; random, in bfloat16."""
    shapes = [shape for _ in range(preset.layers) for shape in preset.projections]
    served = torch.randn(sum(a * b for a, b in shapes), device="cuda", dtype=torch.bfloat16)
    pristine, found, at = served.clone(), [], 0
    for rows, cols in shapes:
        view, base = (flat[at : at + rows * cols].view(rows, cols) for flat in (served, pristine))
        left, right = (torch.randn(*s, device="cuda").mul(0.05).bfloat16() for s in ((rows, rank), (rank, cols)))
        found.append(Recipe(view, base, 1.7, left, right))
        at += rows * cols
    return served, found


def timed(work: Callable[[], Any], times: int = 8) -> dict[str, float]:
    """Milliseconds that the host takes to launch, and until the GPU is done; the mean."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return {"launch_ms": (launched - began) / times * 1e3, "gpu_ms": (time.perf_counter() - began) / times * 1e3}


@torch.no_grad()
def measure(preset: Preset, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    served, recipes = recipes_of(preset, rank)
    views, bases = [recipe.view for recipe in recipes], [recipe.base for recipe in recipes]
    signs = torch.randint(0, 2, (max(preset.hidden, preset.intermediate),)).mul(2).sub(1).double().cuda()

    def one_by_one() -> None:
        torch._foreach_copy_(views, bases)
        for recipe in recipes:
            recipe.add_product()

    results: dict[str, Any] = {
        "copy of the base": timed(lambda: torch._foreach_copy_(views, bases)),
        "a launch for each": timed(one_by_one),
        "its proof, a share": timed(lambda: torch.stack([recipe.error(signs) for recipe in recipes[1::SHARES]]).max()),
    }
    one_by_one()
    wanted = served.clone()
    for tile, warps in TILES:
        grouped._TILE, grouped._WARPS = tile, warps
        made = grouped.Grouped(recipes, SHARES)
        served.zero_()
        made.write()
        results[f"one launch, tiles of {tile}, {warps} warps"] = {
            **timed(made.write),
            "largest difference": float((served.float() - wanted.float()).abs().max()),
            "values that differ": float((served != wanted).float().mean()),
            "error": max(float(made.error(share, signs)) for share in range(SHARES)),
        }
    for rows, wide in BLOCKS:
        grouped._ROWS, grouped._WIDE = rows, wide
        made = grouped.Grouped(recipes, SHARES)
        results[f"its proof, blocks of {(rows, wide)}"] = timed(lambda made=made: made.error(1, signs))  # type: ignore[misc]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    parser.add_argument("--preset", default="1.5b")
    options = parser.parse_args()
    preset = preset_of(options.preset)
    results = measure(preset, preset.rank)
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": "grouped fold", "preset": preset.name, "environment": asdict(environment())}
    path = options.out / "grouped-fold.json"
    path.write_text(json.dumps(content | {"results": results}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""Axolotl in its own environment, as a user runs it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
_STEP = re.compile(r"\{'loss': .*?\}")


def axolotl_python() -> Path:
    """The interpreter of Axolotl's environment; skips the test where there is none."""
    python = Path(os.environ.get("LORAFLOW_AXOLOTL_PYTHON", ROOT / ".venv-axolotl" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"{python} is not there: `make venv-axolotl` makes Axolotl's environment")
    return python


@dataclass(frozen=True)
class Run:
    """One ``axolotl train``."""

    returncode: int
    log: str
    records: list[dict[str, Any]]
    completions: list[str]

    @property
    def steps(self) -> list[dict[str, float]]:
        """What the trainer logged, one mapping per optimizer step."""
        return [
            {name: float(value) for name, value in ast.literal_eval(found).items()} for found in _STEP.findall(self.log)
        ]


def train(cfg: Mapping[str, Any], work: Path, *, timeout: float = 540) -> Run:
    """Write ``cfg`` and its dataset to ``work`` and run ``axolotl train`` there."""
    work.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tests" / "helpers" / "axolotl_rewards.py", work)
    rows = [
        {"prompt": f"the {color} {animal} sat on"}
        for color in ["red", "blue", "green", "big"]
        for animal in ["cat", "dog", "bird"]
    ]
    (work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "config.yaml").write_text(yaml.safe_dump(dict(cfg), sort_keys=False))
    done = subprocess.run(
        [axolotl_python(), "-m", "axolotl.cli.main", "train", "config.yaml", "--launcher", "python"],
        cwd=work,
        env=environment(work),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    (work / "train.log").write_text(done.stdout)
    return Run(done.returncode, done.stdout, _lines(work / "records.jsonl"), _lines(work / "completions.jsonl"))


def environment(work: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(work),
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "LORAFLOW_TEST_COMPLETIONS": str(work / "completions.jsonl"),
    }


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

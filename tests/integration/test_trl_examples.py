"""The examples run as they stand, on a tiny model with few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(command: list[str], folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    env |= {"MASTER_PORT": "18449", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def options(server: RunningServer, steps: int) -> list[str]:
    root = str(server.adapter_root)
    return ["--model", str(server.model), "--server", server.url, "--adapter-root", root, "--steps", str(steps)]


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("rloo.py", 2, "mean weight"),
        ("online_dpo.py", 2, "proven: True"),
        ("own_loop.py", 3, "step 2: reward"),
        ("adaptive_interval.py", 1, "interval 4, uncorrected: reward"),
    ],
)
def test_example(lora_server: RunningServer, tmp_path: Path, name: str, steps: int, expected: str) -> None:
    assert expected in run([sys.executable, str(EXAMPLES / name), *options(lora_server, steps)], tmp_path)


def test_the_interval_study_needs_no_server(tmp_path: Path) -> None:
    given = ["--steps", "6", "--seeds", "2", "--out", str(tmp_path)]
    told = run([sys.executable, str(EXAMPLES / "interval_study.py"), *given], tmp_path)
    assert "adaptive: reward over the run" in told
    assert "interval 1: reward over the run" in told
    assert "syncs 6.0 ± 0.0" in told.splitlines()[0]
    assert (tmp_path / "interval_study.png").stat().st_size > 0


def test_grpo_with_two_processes(lora_server: RunningServer, tmp_path: Path) -> None:
    given = options(lora_server, 3)
    model, url, rest = given[1], given[3], given[4:]
    told = run(["bash", str(EXAMPLES / "multi_process.sh"), model, url, *rest], tmp_path)
    assert told.count("reward 0.") == 1, "one process reports"
    assert "✓" in told
    assert "step 2: " in told

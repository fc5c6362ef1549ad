"""Servers are served at the same time: eight of them cost about what one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.integration


def test_eight_servers_cost_about_what_one_does(tmp_path: Path) -> None:
    """Eight one after another would take eight times as long; a machine that does other things is given room."""
    out = tmp_path / "fanout.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "fanout.py"), "--counts", "1", "8", "--out", str(out)]
    command += ["--syncs", "4", "--rounds", "2", "--load-ms", "150", "--verify-ms", "50"]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    report = json.loads(out.read_text())
    assert report["syncs_per_count"] == 8
    assert report["median_ms"]["1"] > 200  # the simulated work was waited for
    assert report["ratio_to_one"]["8"] < 2.0

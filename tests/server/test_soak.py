"""Many syncs against one real server: neither side grows, and the store stays small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.vllm_process import RunningServer

ROOT = Path(__file__).resolve().parents[2]
CARRIERS = ("filesystem", "direct")

pytestmark = pytest.mark.server


def soak(server: RunningServer, out: Path, *, syncs: int, every: int, carrier: str) -> dict[str, Any]:
    """One run of ``benchmarks/soak.py`` against ``server``, in a process of its own: memory there is the trainer's."""
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--out", str(out), "--carrier", carrier]
    command += ["--server", server.url, "--leader", str(server.process.pid), "--model", str(server.model)]
    command += ["--store", str(server.adapter_root), "--syncs", str(syncs), "--every", str(every)]
    subprocess.run(command, check=True, timeout=3000, cwd=ROOT)
    [run] = json.loads(out.read_text())["runs"]
    assert run["syncs"] == syncs
    return run


def assert_counts_are_flat(run: dict[str, Any], retained: int = 3) -> None:
    first, last = run["samples"][len(run["samples"]) // 2], run["samples"][-1]
    for name in first:
        if name.endswith(("_descriptors", "_threads")) or name.startswith("shm_"):
            assert last[name] <= first[name] + 2, f"{name}: {first[name]} grew to {last[name]}"
    per_version = 3  # config, weights, manifest
    assert last["store_files"] <= (retained + 2) * per_version + 4
    assert run["after_close"]["shm_files"] <= first["shm_files"]


@pytest.mark.parametrize("carrier", [pytest.param("filesystem", marks=pytest.mark.slow), "direct"])
def test_120_syncs_leave_counts_as_they_are(lora_server: RunningServer, tmp_path: Path, carrier: str) -> None:
    run = soak(lora_server, tmp_path / "soak.json", syncs=120, every=10, carrier=carrier)
    assert_counts_are_flat(run)
    for name in ("trainer_uss", "api_uss", "engine_uss"):
        assert run["growth_per_sync"][name] < 200_000, "hundreds of KB a sync: a version or an answer is kept"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_2000_syncs_leave_memory_flat(lora_server: RunningServer, tmp_path: Path, carrier: str) -> None:
    run = soak(lora_server, tmp_path / "soak.json", syncs=2000, every=50, carrier=carrier)
    assert_counts_are_flat(run)
    for name in ("trainer_uss", "api_uss", "engine_uss"):
        assert run["growth_per_sync"][name] < 10_000
    assert run["sync_ms_last_tenth"] < 1.5 * run["sync_ms_median"]

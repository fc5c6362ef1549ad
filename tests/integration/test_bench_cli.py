"""`loraflow bench` on a real vLLM: every carrier runs, and the JSON has what the tables show."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import fields

import pytest

from loraflow.bench.report import Report
from tests.helpers.vllm_process import CPU_ENV

pytestmark = pytest.mark.integration

WAYS = ["direct", "direct-overlap", "filesystem", "filesystem-stock", "stock-adapter"]


def bench(*args, env):
    return subprocess.run(
        [sys.executable, "-m", "loraflow", "bench", "--json", *args],
        capture_output=True,
        text=True,
        timeout=540,
        env=env,
    )


@pytest.fixture
def env():
    import os

    return {**os.environ, **CPU_ENV}


def test_the_tiny_preset_runs_and_its_json_has_every_field(tmp_path, env):
    done = bench("--preset", "tiny", "--repeats", "2", "--out", str(tmp_path), env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(done.stdout)
    assert content == json.loads((tmp_path / "report.json").read_text())
    assert {f.name for f in fields(Report)} <= content.keys()
    assert content["failures"] == []
    assert [item["way"] for item in content["summary"]][: len(WAYS)] == WAYS
    for item in content["summary"]:
        mine = [s["timed"] for s in content["samples"] if s["way"] == item["way"] and not s["warmup"]]
        assert item["p50_ms"] == statistics.median(t["total_ms"] for t in mine)
        assert item["proven"] == (not item["way"].startswith("stock"))
    by_way = {item["way"]: item for item in content["summary"]}
    assert by_way["direct"]["proof"] == "digest"
    assert by_way["filesystem-stock"]["proof"] == "canary"
    assert by_way["direct"]["bytes"] == content["payload"]["adapter_bytes"]
    assert {rate["arm"] for rate in content["generation"]} == {
        "base, LoRA server", "slot", "slot, a sync each second", "two versions at once, no syncs",
    }  # fmt: skip
    assert all(rate["tokens"] > 0 and rate["failed"] == 0 for rate in content["generation"])
    assert all(rate["syncs"] > 0 for rate in content["generation"] if "sync each second" in rate["arm"])
    ratio = next(item for item in content["comparisons"] if item["above"] == "slot, a sync each second")
    assert (ratio["below"], ratio["pairs"]) == ("slot", 2)
    assert {"fold", "gloo", "stock-merged", "stock-inplace", "break-even"} <= content["skipped"].keys()
    for path in content["files"]:
        assert tmp_path.joinpath(path.rsplit("/", 1)[1]).stat().st_size > 0


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--preset", "3b"), 1, "no preset"),
        (("--transports", "pigeon"), 1, "pigeon"),
        (("--repeats", "0"), 2, "repeats"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(args, code, words, tmp_path, env):
    done = bench(*args, "--out", str(tmp_path), env=env)
    assert done.returncode == code
    assert words in json.loads(done.stdout)["error"]["message"]

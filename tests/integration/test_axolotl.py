"""`axolotl train` from its own environment, against a real vLLM: the guide's example, then the async trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.helpers.axolotl_configs import GUIDE, SMALL, merged, own, trl
from tests.helpers.axolotl_run import Run, axolotl_python, train
from tests.helpers.vllm_process import RunningServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

LOADS = re.compile(r"^loraflow_loads_total\{[^}]*\} (\S+)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _axolotl() -> None:
    axolotl_python()  # before a server is started for nothing


def loads(server: RunningServer) -> float:
    """Adapters that the server has loaded since it was started."""
    text = requests.get(f"{server.url}/loraflow/v1/metrics", timeout=30).text
    return sum(float(value) for value in LOADS.findall(text))


def status(server: RunningServer) -> Any:
    return requests.get(f"{server.url}/loraflow/v1/status", timeout=30).json()


def config(server: RunningServer, rows: str, *patches: dict[str, Any]) -> dict[str, Any]:
    """The guide's example on this server, with a tiny model and dataset."""
    host, port = server.url.removeprefix("http://").split(":")
    return merged(
        GUIDE,
        SMALL,
        {
            "base_model": str(server.model),
            "lora_r": 8,
            "lora_alpha": 16,
            "datasets": [{"path": "prompts.jsonl", "ds_type": "json", "split": "train", "type": rows}],
            "dataset_prepared_path": "prepared",
            "output_dir": "out",
            "loraflow": {"adapter_root": str(server.adapter_root), "record_file": "records.jsonl", "start_timeout": 60},
        },
        trl(vllm_server_host=host, vllm_server_port=int(port), vllm_server_timeout=240),
        *patches,
    )


def base_gap(run: Run) -> float:
    """Mean |Δlogp| between the two bases, as it was measured and logged at start."""
    found = re.search(r"\[axolotl\.loraflow\] base of http\S+: mean \|Δlogp\| (\S+) against", run.log)
    assert found is not None, run.log[-5000:]
    return float(found[1])


def check_syncs(run: Run, steps: list[int]) -> None:
    assert run.returncode == 0, run.log[-5000:]
    assert [record["step"] for record in run.records] == steps
    for record in run.records:
        assert (record["transport"], record["outcome"], record["proven"]) == ("adapter", "committed", True)
        assert f"step {record['step']}: {record['policy']} committed by adapter/" in run.log
        [proof] = record["proofs"].values()
        assert proof["kind"] == "digest"
    assert len({record["digest"] for record in run.records}) == len(steps)  # the adapter did change
    assert run.log.count("✓ digest") == len(steps)


def test_guides_example_then_a_second_run(lora_server: RunningServer, tmp_path: Path) -> None:
    before = loads(lora_server)
    first = train(config(lora_server, "axolotl_rewards.prompt", {"max_steps": 6}), tmp_path / "first")
    check_syncs(first, [0, 5])
    assert loads(lora_server) - before == len(first.records) + 1  # and the canary of the start, whose B is not zero
    assert not status(lora_server)["weights_touched"]  # nothing was merged
    assert status(lora_server)["adapters"] == []  # the run has freed the server
    assert len(first.steps) == 6
    # On the policy that was just synced, the two sides agree on the log-prob of every sampled token.
    assert first.steps[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert first.steps[0]["loraflow/correction/weight_mean"] == pytest.approx(1.0, abs=1e-3)
    # Steps later, on the old policy, they do not; the correction sees it.
    gap = "sampling/sampling_logp_difference/mean"
    assert first.steps[4][gap] > 10 * first.steps[0][gap]
    assert base_gap(first) < 1e-4

    regex = "[a-z]{2,6}"  # of several lengths, so that rewards differ
    ahead = trl(
        use_data_producer=True,
        async_prefetch=True,
        vllm_sync_interval=2,
        vllm_guided_decoding_regex=regex,
        vllm_importance_sampling_mode="token_mask",
        generation_kwargs={"seed": 7},
    )
    before = loads(lora_server)
    second = train(config(lora_server, "axolotl_rewards.conversation", ahead, {"max_steps": 5}), tmp_path / "second")
    check_syncs(second, [0, 2, 4])  # at the interval, and each once
    assert loads(lora_server) - before == len(second.records) + 1
    assert second.completions
    assert all(re.fullmatch(regex, text) for text in second.completions)
    # A rollout that was made ahead is as many versions old as syncs lay between: at step 2 it is of step 1's policy.
    assert [step["loraflow/correction/staleness_max"] for step in second.steps] == [0, 0, 1, 0, 1]


def test_qlora_trains_and_its_base_has_a_limit_of_its_own(lora_server: RunningServer, tmp_path: Path) -> None:
    """A random tiny base loses 0.4 nats to four bits: within QLoRA's own limit of 0.5, refused under one of 0.1."""
    quantised = {"adapter": "qlora", "load_in_4bit": True}
    patch = trl(vllm_sync_interval=1)
    run = train(config(lora_server, "axolotl_rewards.prompt", quantised, patch, {"max_steps": 3}), tmp_path / "trains")
    check_syncs(run, [0, 1, 2])
    gap = base_gap(run)
    assert 0.1 < gap < 0.5
    # What the trainer sees of its rollouts is the same gap, not that of an adapter that did not arrive.
    assert all(step["sampling/sampling_logp_difference/mean"] < 2 * gap for step in run.steps)

    strict = own(base_atol=0.1)
    run = train(config(lora_server, "axolotl_rewards.prompt", quantised, strict, {"max_steps": 1}), tmp_path / "strict")
    assert run.returncode != 0
    found = re.search(r"the server's base model is not the trainer's.* expected ≤ 0.1, found (\S+)", run.log)
    assert found is not None, run.log[-5000:]
    assert float(found[1]) == pytest.approx(gap, abs=1e-3)
    assert "base_atol widens the limit (a quantised trainer needs it)" in run.log
    assert status(lora_server)["adapters"] == []


def test_without_lora_sync_merged_weights_are_served(fold_server: RunningServer, tmp_path: Path) -> None:
    patch = trl(vllm_lora_sync=False, vllm_sync_interval=2)
    run = train(config(fold_server, "axolotl_rewards.prompt", {"max_steps": 3}, patch), tmp_path)
    assert run.returncode == 0, run.log[-5000:]
    assert [(record["step"], record["transport"]) for record in run.records] == [(0, "merged"), (2, "merged")]
    assert all(record["proven"] for record in run.records)
    assert run.steps[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert run.steps[2]["sampling/sampling_logp_difference/max"] < 1e-4  # synced again before this step

"""What loraflow reads from an Axolotl config, and what it refuses; the same is asked of Axolotl's own validation in
tests/integration/test_axolotl_validation.py."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import yaml

from loraflow.config import SyncConfig
from loraflow.errors import ConfigError
from loraflow.integrations.axolotl_config import prefetch_depth, resolve, server_urls, sync_config
from loraflow.integrations.axolotl_rules import refusals
from loraflow.launch_axolotl import serve_options
from tests.helpers.axolotl_configs import GUIDE, KNOWN_TRL_KEYS, REFUSED, merged, own, trl

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "axolotl"


def test_the_guides_example_is_taken_as_it_stands() -> None:
    assert refusals(GUIDE, KNOWN_TRL_KEYS) == []
    config = sync_config(resolve(GUIDE))
    assert config == SyncConfig(
        vllm_lora_sync=True, vllm_sync_interval=5, vllm_server_timeout=300, off_policy_mask_threshold=0.5
    )
    assert config.wanted_transport == "auto"  # the adapter first


def test_the_example_in_the_repository() -> None:
    example = yaml.safe_load((EXAMPLE / "grpo_lora_sync.yaml").read_text())
    used = set(example["trl"])
    assert refusals(example, KNOWN_TRL_KEYS) == [], used - KNOWN_TRL_KEYS
    options = serve_options(example)
    assert (options.max_lora_rank, options.max_staleness) == (example["lora_r"], example["loraflow"]["max_staleness"])
    rewards = runpy.run_path(str(EXAMPLE / "rewards.py"))
    row = json.loads((EXAMPLE / "questions.jsonl").read_text().splitlines()[0])
    transform, _ = rewards["question"](None)
    wanted = transform(row)["answer"]
    texts = [str(wanted), f"It is {wanted}.", f"It is {wanted}, or {wanted + 1}.", "no idea"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert rewards["right_answer"](chats, [wanted] * 4) == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    patch, message = REFUSED[name]
    found = refusals(merged(GUIDE, patch), KNOWN_TRL_KEYS)
    assert len(found) == 1, found  # this one, and nothing of what is right
    assert message in found[0]


def test_every_problem_is_named_at_once() -> None:
    found = refusals(merged(GUIDE, trl(vllm_mode="colocate"), {"adapter": ...}), KNOWN_TRL_KEYS)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("patch", "urls"),
    [
        ({}, ["http://127.0.0.1:8000"]),  # 0.0.0.0 is an address to listen on, not one to call
        (trl(vllm_server_host=..., vllm_server_port=...), ["http://127.0.0.1:8000"]),
        (trl(vllm_server_host="10.0.0.7", vllm_server_port=9000), ["http://10.0.0.7:9000"]),
        (trl(vllm_server_base_url="https://gpu-box/vllm/"), ["https://gpu-box/vllm"]),
        (own(servers=["http://a:1", "http://b:2/"]), ["http://a:1", "http://b:2"]),
        (own(servers="http://a:1"), ["http://a:1"]),
        (trl(vllm_server_host="::"), ["http://127.0.0.1:8000"]),
        (trl(vllm_server_host="fd00::7", vllm_server_port=9000), ["http://[fd00::7]:9000"]),
        (
            trl(vllm_server_host="a", vllm_server_port=1) | own(servers=["http://a:1", "http://b:2"]),
            ["http://a:1", "http://b:2"],
        ),
    ],
)
def test_servers(patch: dict[str, object], urls: list[str]) -> None:
    assert server_urls(merged(GUIDE, patch)) == urls
    assert resolve(merged(GUIDE, patch))["servers"] == urls


def test_no_lora_sync_means_merged_and_no_word_means_the_best() -> None:
    assert sync_config(resolve(merged(GUIDE, trl(vllm_lora_sync=False)))).wanted_transport == "merged"
    assert sync_config(resolve(merged(GUIDE, trl(vllm_lora_sync=...)))).wanted_transport == "auto"


def test_qlora_is_served_as_an_adapter_on_the_servers_own_base() -> None:
    qlora = merged(GUIDE, {"adapter": "qlora", "load_in_4bit": True}, own(base_atol=0.8))
    assert refusals(qlora, KNOWN_TRL_KEYS) == []
    assert (sync_config(resolve(qlora)).wanted_transport, sync_config(resolve(qlora)).base_atol) == ("auto", 0.8)
    options = serve_options(qlora)
    assert options.max_lora_rank == GUIDE["lora_r"]
    assert not any("quantization" in word for word in options.extra)  # in its own precision
    lossy = merged(qlora, trl(vllm_lora_sync=False), own(dequantize_base=True))
    assert refusals(lossy, KNOWN_TRL_KEYS) == []  # allowed where it is asked for


def test_own_section_has_every_option() -> None:
    options = {
        "vllm_sync_interval": "adaptive",
        "drift_budget": 0.02,
        "vllm_importance_sampling_mode": "geometric_mask",
    }
    config = sync_config(resolve(merged(GUIDE, trl(vllm_sync_interval=...), own(**options))))
    assert config.model_dump(include=set(options)) == options


def test_cap_is_the_upper_bound() -> None:
    config = sync_config(resolve(merged(GUIDE, trl(vllm_importance_sampling_cap=2.0))))
    assert config.vllm_importance_sampling_clip_max == 2.0


def test_the_async_trainers_own_defaults() -> None:
    plain = sync_config(resolve(GUIDE))
    assert (plain.vllm_importance_sampling_mode, plain.max_staleness) == ("sequence_mask", 1)
    producer = merged(GUIDE, trl(use_data_producer=True))
    assert sync_config(resolve(producer)).vllm_importance_sampling_mode == "token_truncate"
    ahead = merged(producer, trl(async_prefetch=True, prefetch_depth=3))
    assert prefetch_depth(ahead) == 3
    assert sync_config(resolve(ahead)).max_staleness == 3  # nothing that was prefetched is masked
    behind = merged(ahead, own(overlap=True))
    assert sync_config(resolve(behind)).max_staleness == 4  # nor what was, while a version was on its way
    assert refusals(behind, KNOWN_TRL_KEYS) == []
    assert sync_config(resolve(merged(ahead, own(max_staleness=5)))).max_staleness == 5


def test_values_are_of_their_own_types_however_they_were_written() -> None:
    quoted = merged(GUIDE, trl(vllm_lora_sync="false", vllm_sync_interval="2"), own(max_staleness="3"))
    found = resolve(quoted)
    assert (found["vllm_lora_sync"], found["vllm_sync_interval"], found["max_staleness"]) == (False, 2, 3)


def test_what_only_some_ways_can_serve_is_left_to_the_plan() -> None:
    for keys in ({"peft_use_dora": True}, {"lora_modules_to_save": ["lm_head"]}):
        assert refusals(merged(GUIDE, keys), KNOWN_TRL_KEYS) == []  # folded on the server
    rows = {"peft_trainable_token_indices": [1, 2]}
    assert refusals(merged(GUIDE, rows, trl(vllm_lora_sync=...)), KNOWN_TRL_KEYS) == []  # broadcast
    plain = {"peft_init_lora_weights": "gaussian", "peft": {"loftq_config": None}, "lora_rank_pattern": {"q_proj": 64}}
    assert refusals(merged(GUIDE, plain), KNOWN_TRL_KEYS) == []


def test_resolving_twice_changes_nothing() -> None:
    once = {**GUIDE, "loraflow": resolve(merged(GUIDE, trl(vllm_server_base_url="http://a:1")))}
    # Axolotl has dropped the key that it does not know, and filled in its defaults, when it validates again.
    assert resolve(once) == once["loraflow"]


def test_sections_must_be_sections() -> None:
    with pytest.raises(ConfigError, match="trl: must be a section of keys and values, not 'grpo'"):
        resolve({**GUIDE, "trl": "grpo"})

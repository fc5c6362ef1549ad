from __future__ import annotations

import pytest

from loraflow.config import SyncConfig
from loraflow.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vllm_sync_intervall": 3}, "did you mean 'vllm_sync_interval'"),
        ({"sync_interval": 3}, "vllm_sync_interval"),
        ({"vllm_sync_interval": 0}, "at least 1"),
        ({"vllm_sync_interval": "often"}, "vllm_sync_interval"),
        ({"transport": "lora"}, "transport"),
        ({"transport": "adapter", "carrier": "nccl"}, "moves merged weights"),
        ({"transport": "merged", "carrier": "direct"}, "fills LoRA slots"),
        ({"vllm_lora_sync": False, "transport": "adapter"}, "vllm_lora_sync=false"),
        ({"vllm_lora_sync": True, "transport": "merged"}, "vllm_lora_sync=true"),
        ({"direct_way": "broadcast"}, "carrier='direct'"),
        ({"direct_way": "upload", "carrier": "filesystem"}, "carrier='direct'"),
        ({"direct_way": "pigeon", "carrier": "direct"}, "direct_way"),
        ({"run_id": "../up"}, "run_id"),
        ({"run_id": "a\nb"}, "run_id"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"min_sync_interval": 5, "max_sync_interval": 2}, "min_sync_interval"),
        ({"vllm_importance_sampling_clip_min": 4.0}, "clip_min must be below"),
        ({"vllm_importance_sampling_clip_min": 3.0}, "clip_min must be below"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"verify": "off"}, "verify"),
        ({"max_staleness": True}, "max_staleness: is no flag"),
        ({"vllm_sync_interval": True}, "vllm_sync_interval: is no flag"),
        ({"request_timeout": True}, "request_timeout: is no flag"),
        ({"logprob_atol": float("inf")}, "logprob_atol"),
        ({"base_atol": float("nan")}, "base_atol"),
        ({"start_timeout": float("inf")}, "start_timeout"),
        ({"adapter_root": ""}, "adapter_root: names no folder"),
        ({"record_file": " "}, "record_file: names no folder"),
        ({"adapter_root": "file://runs"}, "adapter_root: must name a folder of this host"),
        ({"server_adapter_root": "adapters"}, "server_adapter_root: must be an absolute path"),
        ({"server_adapter_root": "~/adapters"}, "server_adapter_root: must be an absolute path"),
    ],
)
def test_bad_options_say_what_is_right(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=None) as caught:
        SyncConfig(**options)
    assert said in str(caught.value)


def test_a_file_url_is_its_folder() -> None:
    config = SyncConfig(adapter_root="file:///mnt/runs", server_adapter_root="file:///srv/runs")
    assert (config.adapter_root, config.server_adapter_root) == ("/mnt/runs", "/srv/runs")


def test_a_tilde_is_the_home_folder_for_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML and Python expand none, and a folder called ~ is what nobody means."""
    monkeypatch.setenv("HOME", "/home/me")
    config = SyncConfig(
        adapter_root="~/runs",
        record_file="~/syncs.jsonl",
        cost_file="~/bench.json",
        rollout_streams=8,
        rollout_tokens=9,
    )
    assert config.adapter_root == "/home/me/runs"
    assert (config.record_file, config.cost_file) == ("/home/me/syncs.jsonl", "/home/me/bench.json")
    assert SyncConfig(adapter_root="s3://bucket/~/runs").adapter_root == "s3://bucket/~/runs"


def test_several_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        SyncConfig(transprot="adapter", vllm_sync_interval=0)
    assert "transport" in str(caught.value)
    assert "at least 1" in str(caught.value)


@pytest.mark.parametrize("options", [None, [], "a", {True: 1}, {3: 1}], ids=str)
def test_yaml_that_is_no_section(options: object) -> None:
    with pytest.raises(ConfigError):
        SyncConfig.from_dict(options)  # type: ignore[arg-type]


def test_axolotls_flag() -> None:
    assert SyncConfig(vllm_lora_sync=True).wanted_transport == "auto"
    assert SyncConfig(vllm_lora_sync=False).wanted_transport == "merged"
    assert SyncConfig().wanted_transport == "auto"


def test_retention_follows_staleness() -> None:
    assert SyncConfig(max_staleness=3).retained_versions == 5


def test_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        SyncConfig().transport = "merged"

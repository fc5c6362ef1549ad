"""Axolotl's own validation, with and without the plugin line."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from loraflow.integrations.axolotl_config import resolve
from tests.helpers.axolotl_configs import GUIDE, REFUSED, SMALL, merged, own, trl
from tests.helpers.axolotl_run import ROOT, axolotl_python, environment

pytestmark = pytest.mark.integration

BASE = merged(
    GUIDE, SMALL, {"datasets": [{"path": "prompts.jsonl", "ds_type": "json", "type": "axolotl_rewards.prompt"}]}
)
WITHOUT = {key: value for key, value in BASE.items() if key != "plugins"}
UNBOUNDED = own(vllm_importance_sampling_clip_max=None, vllm_importance_sampling_clip_min=0.5)

Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    configs = {
        "without": WITHOUT,  # first: nothing of loraflow is imported yet
        "guide": BASE,
        "retained": WITHOUT | {"plugins": ["axolotl.integrations.base.BasePlugin"], "trl": {"num_generations": 4}},
        "base-url": merged(BASE, trl(vllm_server_base_url="http://gpu-box:8000")),
        "example": yaml.safe_load((ROOT / "examples" / "axolotl" / "grpo_lora_sync.yaml").read_text()),
        "unbounded": merged(BASE, UNBOUNDED),
        **{name: merged(BASE, patch) for name, (patch, _) in REFUSED.items()},
    }
    done = subprocess.run(
        [axolotl_python(), "-P", ROOT / "tests" / "helpers" / "axolotl_validate.py"],
        input=json.dumps(configs),
        env=environment(tmp_path_factory.mktemp("validate")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: Answers = json.loads(done.stdout.rsplit("\n===\n", 1)[1])
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_axolotl_refuses_it_with_our_reason(answers: Answers, name: str) -> None:
    error = answers[name].get("error", "accepted")
    assert "loraflow refuses this config" in error
    assert REFUSED[name][1] in error


def test_the_guides_example_passes(answers: Answers) -> None:
    config = answers["guide"]["config"]
    assert config["loraflow"] == resolve(BASE)
    assert config["trl"]["vllm_sync_interval"] == 5


def test_the_example_in_the_repository_passes(answers: Answers) -> None:
    assert "config" in answers["example"], answers["example"]


def test_a_key_that_axolotl_drops_is_kept(answers: Answers) -> None:
    config = answers["base-url"]["config"]
    assert "vllm_server_base_url" not in config["trl"]
    assert config["loraflow"]["servers"] == ["http://gpu-box:8000"]


def test_a_null_survives_axolotls_dump(answers: Answers) -> None:
    assert answers["unbounded"]["config"]["loraflow"].items() >= UNBOUNDED["loraflow"].items()


def test_a_later_config_of_the_same_process_is_left_alone(answers: Answers) -> None:
    assert "config" in answers["retained"], answers["retained"]
    assert "loraflow" not in answers["retained"]["config"]


def test_without_the_plugin_line_nothing_changes(answers: Answers) -> None:
    found = answers["without"]
    assert found["imported"] == []
    with_plugin = {
        key: value for key, value in answers["guide"]["config"].items() if key not in {"plugins", "loraflow"}
    }
    assert found["config"] == with_plugin

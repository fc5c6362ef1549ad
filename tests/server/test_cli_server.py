"""`push`, `status`, `plan` and `doctor` against a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from loraflow.cli import app
from loraflow.server import VLLMServer
from tests.helpers.tiny import PROMPT, make_tiny_model, peft_logprobs, peft_model
from tests.helpers.vllm_process import RunningServer

runner = CliRunner()


def run(*args: str) -> tuple[int, Any]:
    result = runner.invoke(app, [args[0], "--json", *args[1:]])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def saved(tiny_model: Path, tmp_path: Path) -> tuple[Path, Any]:
    """An adapter as PEFT itself writes it, and the model that it came from."""
    model = peft_model(tiny_model)
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", model


def test_push_status_and_push_again(lora_server: RunningServer, saved: tuple[Path, Any]) -> None:
    folder, model = saved
    root = ("--adapter-root", str(lora_server.adapter_root))
    code, answer = run("push", str(folder), "--server", lora_server.url, "--run-id", "pushed", *root)
    assert code == 0
    assert answer["verified"] is True
    assert answer["servers"] == [lora_server.url]
    assert answer["policy"] == f"pushed-v{answer['version']}"
    with VLLMServer(lora_server.url) as server:
        served = torch.tensor(server.prompt_logprobs(PROMPT, model=answer["policy"]))
        assert (served - peft_logprobs(model, PROMPT)).abs().max() < 1e-4

        code, state = run("status", "--server", lora_server.url)
        assert code == 0
        assert (state["policy"], state["version"], state["run"]) == (answer["policy"], answer["version"], "pushed")

        code, again = run("push", str(folder), "--server", lora_server.url, "--run-id", "pushed", *root)
        assert code == 0
        assert again["version"] > answer["version"]
        for policy in [m.id for m in server.models() if m.parent is not None]:
            server.unload_adapter(policy)


def test_push_merged_and_the_next_run_takes_over(lora_server: RunningServer, saved: tuple[Path, Any]) -> None:
    folder, model = saved
    root = ("--adapter-root", str(lora_server.adapter_root))
    with VLLMServer(lora_server.url) as server:
        base = server.prompt_logprobs(PROMPT, model=server.info.model)
        code, answer = run("push", str(folder), "--server", lora_server.url, "--transport", "merged", *root)
        assert code == 0
        assert answer["transport"] == "merged"
        merged = torch.tensor(server.prompt_logprobs(PROMPT, model=server.info.model, cache_salt="m"))
        assert (merged - peft_logprobs(model, PROMPT)).abs().max() < 1e-4

        code, answer = run("push", str(folder), "--server", lora_server.url, "--transport", "adapter", *root)
        assert code == 0, answer
        served = torch.tensor(server.prompt_logprobs(PROMPT, model=answer["policy"], cache_salt="a"))
        assert (served - peft_logprobs(model, PROMPT)).abs().max() < 1e-4  # not W + 2Δ
        assert server.prompt_logprobs(PROMPT, model=server.info.model, cache_salt="b") == base
        server.unload_adapter(answer["policy"])


def damage(folder: Path, out: Path, how: str) -> Path:
    out.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    a = next(name for name in tensors if "layers.0.self_attn.q_proj.lora_A" in name)
    b = a.replace("lora_A", "lora_B")
    if how == "wrapper":
        tensors = {name.replace("model.layers", "model._orig_mod.layers"): t for name, t in tensors.items()}
    elif how == "half pair":
        del tensors[b]
    elif how == "narrow":
        tensors[a] = tensors[a][:, :64].contiguous()
    elif how == "rank":
        config["r"] = 16
    elif how == "nan":
        tensors[b][0, 0] = float("nan")
    elif how == "layer beyond":
        tensors[a.replace("layers.0", "layers.9")] = tensors[a].clone()
        tensors[b.replace("layers.0", "layers.9")] = tensors[b].clone()
    elif how == "base_layer":
        tensors = {name.replace(".lora_A", ".base_layer.lora_A"): t for name, t in tensors.items()}
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out / "adapter_model.safetensors")
    if how == "truncated":
        file = out / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    return out


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("wrapper", "unknown_module"),
        ("half pair", "missing_pair"),
        ("narrow", "bad_shape"),
        ("rank", "rank_mismatch"),
        ("nan", "not_finite"),
        ("layer beyond", "unknown_module"),
        ("base_layer", "unknown_module"),
        ("truncated", "truncated_file"),
    ],
)
def test_push_refuses_what_stock_vllm_would_serve_wrongly(
    lora_server: RunningServer, saved: tuple[Path, Any], tmp_path: Path, how: str, code: str
) -> None:
    broken = damage(saved[0], tmp_path / "broken", how)
    with VLLMServer(lora_server.url) as server:
        before = server.models()
        root = ("--adapter-root", str(lora_server.adapter_root))
        exit_code, answer = run("push", str(broken), "--server", lora_server.url, "--transport", "adapter", *root)
        assert exit_code == 1
        assert code in {problem["code"] for problem in answer["error"]["problems"]}
        exit_code, answer = run("plan", "--adapter", str(broken), "--server", f"{lora_server.url}/v1", *root)
        assert exit_code == 1
        assert code in {problem["code"] for problem in answer["error"]["problems"]}
        assert server.models() == before


def test_push_on_another_base(lora_server: RunningServer, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=5)
    peft_model(other).save_pretrained(tmp_path / "saved")
    root = ("--adapter-root", str(lora_server.adapter_root))
    code, answer = run("push", str(tmp_path / "saved"), "--server", lora_server.url, *root)
    assert code == 1
    assert answer["error"]["type"] == "VerifyError"
    assert "base" in answer["error"]["message"]


def test_a_push_that_fails_takes_nothing_away(
    lora_server: RunningServer, saved: tuple[Path, Any], tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=5)
    peft_model(other).save_pretrained(tmp_path / "of another base")
    root = ("--run-id", "kept", "--adapter-root", str(lora_server.adapter_root))
    with VLLMServer(lora_server.url) as server:
        code, answer = run("push", str(saved[0]), "--server", lora_server.url, *root)
        assert code == 0
        before = server.models()
        code, refused = run("push", str(tmp_path / "of another base"), "--server", lora_server.url, *root)
        assert (code, refused["error"]["type"]) == (1, "VerifyError")
        assert server.models() == before
        server.unload_adapter(answer["policy"])


def test_plan_and_doctor(lora_server: RunningServer, saved: tuple[Path, Any]) -> None:
    code, answer = run("plan", "--server", lora_server.url, "--adapter", str(saved[0]))
    assert code == 0
    assert (answer["transport"], answer["carrier"]) == ("adapter", "direct")
    assert answer["estimated_ms"] > 0
    assert {item["carrier"] for item in answer["ruled_out"]} == {"filesystem", "fold", "ipc", "nccl", "gloo"}
    code, answer = run("doctor", "--server", lora_server.url)
    assert code == 0
    assert answer["servers"][lora_server.url]["plugin"]["worker_extension"] is True

"""Axolotl's own trainer code against `loraflow serve`: its three routes, on a real vLLM."""

from __future__ import annotations

import secrets

import pytest
import requests
import torch

from loraflow.adapter import take_snapshot, write_adapter
from loraflow.server import HTTPFailure, VLLMServer
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.server


def test_what_axolotls_trainer_posts_is_served_and_cleared(lora_server: RunningServer) -> None:
    url = lora_server.url
    assert requests.get(f"{url}/health/", timeout=10).json() == {"status": "ok"}
    run = lora_server.adapter_root / f"lora_sync_{secrets.token_hex(4)}"
    names = []
    with VLLMServer(url) as server:
        for number in (1, 2):
            model = peft_model(lora_server.model, seed=number)
            (run / f"v{number}").mkdir(parents=True)
            write_adapter(take_snapshot(model), run / f"v{number}")
            body = {"lora_name": "active_lora", "lora_int_id": number, "lora_path": str(run / f"v{number}")}
            # As Axolotl's trainer does: vLLM's own route first, in place, then this one.
            first = requests.post(f"{url}/v1/load_lora_adapter", json=body | {"load_inplace": True}, timeout=30)
            assert first.status_code == 400, first.text
            answer = requests.post(f"{url}/set_lora_adapter/", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            names.append(answer.json()["model"])
            served = torch.tensor(server.prompt_logprobs(PROMPT, model=names[-1]))
            assert (served - peft_logprobs(model, PROMPT)).abs().max() < 1e-4
        assert {model.id for model in server.models()} & set(names) == {names[1]}
        assert requests.post(f"{url}/clear_lora_adapter/", timeout=30).json() == {"status": "ok"}
        with pytest.raises(HTTPFailure, match="404"):
            server.prompt_logprobs(PROMPT, model=names[1])
    outside = requests.post(f"{url}/set_lora_adapter/", json=body | {"lora_path": "/etc"}, timeout=30)
    assert (outside.status_code, outside.json()["error"]["code"]) == (403, "outside_roots")

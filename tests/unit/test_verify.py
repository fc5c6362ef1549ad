"""The trainer's side of a proof: its forward is that of evaluation, and leaves the model as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from loraflow.completion import Completion
from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError
from loraflow.ranks import Ranks
from loraflow.server import VLLMServer
from loraflow.server_info import ServerInfo
from loraflow.verify import Prover
from tests.helpers.tiny import PROMPT, peft_model


class Linear4bit(nn.Linear):
    """As bitsandbytes' layer on a CPU: the first forward in evaluation mode makes it unfit for training."""

    packed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.packed |= not self.training
        return super().forward(x)


Linear4bit.__module__ = "bitsandbytes.nn.modules"


def test_a_proofs_forward_does_not_repack_quantised_weights(tiny_model: Path) -> None:
    model = peft_model(tiny_model, target_modules=["q_proj"], lora_dropout=0.5).train()
    quantised = []
    for layer in model.get_base_model().model.layers:
        old = layer.mlp.down_proj
        new = Linear4bit(old.in_features, old.out_features, bias=False)
        new.load_state_dict(old.state_dict())
        layer.mlp.down_proj = new
        quantised.append(new)
    prover = Prover(model, SyncConfig(adapter_root="unused"), Ranks(1, 1))
    prover.tokens = PROMPT
    first, second = prover.expect(), prover.expect()
    assert torch.equal(first.logprobs, second.logprobs)  # no dropout: it is the forward of evaluation
    assert not any(layer.packed for layer in quantised)
    assert all(module.training for module in model.modules())


def test_a_server_without_room_for_a_probe_is_told_what_to_do(tiny_model: Path) -> None:
    server = VLLMServer("http://127.0.0.1:9")
    server._info = ServerInfo(server.url, "0.32.0", "base", "/m", max_model_len=6)
    prover = Prover(peft_model(tiny_model), SyncConfig(adapter_root="unused"), Ranks(1, 1))
    with pytest.raises(CapabilityError, match=r"max_model_len=6 has no room.*larger --max-model-len"):
        prover.choose_probe(server)


class HeadServer(VLLMServer):
    """Answers each prompt with one token, and its log-prob of a table of its own."""

    def __init__(self, table: dict[tuple[int, ...], torch.Tensor], token: int) -> None:
        super().__init__("http://127.0.0.1:9")
        self.table, self.token = table, token

    def generate(self, prompts: list[list[int]], *, model: str, **_: object) -> list[Completion]:  # type: ignore[override]
        found = [float(self.table[tuple(prompt)][self.token]) for prompt in prompts]
        return [Completion(model, n, (self.token,), (logprob,), "length") for n, logprob in enumerate(found)]


@pytest.mark.parametrize("waits", [False, True])
def test_an_adapted_head_is_proven_by_generated_tokens(tiny_model: Path, waits: bool) -> None:
    model = peft_model(tiny_model, target_modules=["q_proj", "lm_head"])
    prover = Prover(model, SyncConfig(adapter_root="unused"), Ranks(1, 1), head_adapted=True)
    prover.tokens = PROMPT
    expected = prover.expect()
    with torch.no_grad():
        rows = model.eval()(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    right = HeadServer({tuple(PROMPT[: n + 1]): rows[n] for n in range(len(PROMPT))}, token=7)
    late = HeadServer({tuple(PROMPT[: n + 1]): rows[n - 1] for n in range(len(PROMPT))}, token=7)
    given = (lambda: expected) if waits else expected
    proof = prover.check(right, "run.v1", given)
    assert proof.passed
    assert proof.mean_abs_dlogp is not None
    assert proof.mean_abs_dlogp < 1e-5
    assert not prover.check(late, "run.v1", given).passed

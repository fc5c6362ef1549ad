"""loraflow's adapter sync against TRL's own weights path: the same training, token for token.

TRL's path is its own in every part but the link: it sends over NCCL, which needs a GPU, and here the same buckets go
over gloo (`GlooLink`). What is merged, under which names, in which order, when, and when the adapter is unmerged is
TRL 1.16's `VLLMGeneration.sync_weights` and `VLLMClient.update_named_params`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from loraflow.integrations.trl import LoraSyncCallback
from loraflow.transports.groups import GlooGroup
from loraflow.transports.wire import Bucket
from tests.helpers.trl import NotesBatches, arguments, lora, low_tokens, prompts
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration

BUCKET = 256 << 20
CLOSE = 1e-4  # nats


class Trainer(NotesBatches, GRPOTrainer):  # type: ignore[misc]
    pass


class GlooLink:
    """The trainer's end, in the place of vLLM's NCCL endpoint and producer."""

    def __init__(self, client: VLLMClient) -> None:
        self._group = GlooGroup("127.0.0.1", 0, 1 + client.get_world_size(), 60.0)
        there = self._group.handshake()
        self.info = {
            "master_address": there["address"],
            "master_port": there["port"],
            "rank_offset": 1,
            "world_size": 1 + client.get_world_size(),
            "packed_buffer_size_bytes": BUCKET,
            "timeout": 60.0,
        }
        self.sent: list[str] = []

    def join(self) -> None:
        self._group.join()

    def send(self, *, iterator: Iterator[tuple[str, Tensor]], **_: Any) -> None:
        """All tensors in one bucket: the tiny model is far smaller than one."""
        parts = []
        for name, tensor in iterator:
            self.sent.append(name)
            parts.append(tensor.detach().reshape(-1).contiguous().view(torch.uint8).clone())
        bucket = torch.cat(parts)
        pending = self._group.send(bucket, Bucket((), bucket.numel()))
        while not pending.done():
            time.sleep(0.001)

    def close(self) -> None:
        self._group.close()


@pytest.fixture
def gloo_link(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GlooLink]]:
    links: list[GlooLink] = []

    def init_communicator(self: VLLMClient, device: Any = 0) -> None:
        link = GlooLink(self)
        links.append(link)
        with vllm_client.ThreadPoolExecutor(1) as pool:
            body = {"init_info": link.info}
            told = pool.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json=body)
            link.join()
            told.result()

    monkeypatch.setattr(VLLMClient, "init_communicator", init_communicator)

    def send(**given: Any) -> None:
        links[-1].send(**given)

    def post(self: VLLMClient, url: str, **given: Any) -> Any:
        if url.endswith("/update_weights"):
            given["json"]["update_info"]["update"] = 1  # under which the engine reports to the trainer's store
        return plain_post(self, url, **given)

    plain_post = VLLMClient._post
    monkeypatch.setattr(VLLMClient, "_post", post)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", send)
    yield links
    for link in links:
        link.close()


def train(server: RunningServer, out: Path, callbacks: list[Any]) -> Any:
    options = arguments(server, out, max_steps=4, generation_kwargs={"seed": 11})
    trainer = Trainer(
        model=str(server.model),
        reward_funcs=low_tokens,
        args=GRPOConfig(**options),
        train_dataset=prompts(),
        peft_config=lora(),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def test_the_same_training_as_with_the_weights_of_trl(
    lora_server: RunningServer, tmp_path: Path, gloo_link: list[GlooLink]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(lora_server.model)
    try:
        stock = train(lora_server, tmp_path / "stock", [])
        client = stock.vllm_generation.vllm_client
        assert client.model == str(lora_server.model), "TRL asks for the base, whose weights it has replaced"
    finally:
        VLLMClient(lora_server.url).update_model_params(base)  # put the server's own weights back
    assert len(gloo_link[0].sent) == 5 * len(list(base.named_parameters())), "four syncs of everything, and this one"

    callback = LoraSyncCallback(adapter_root=str(lora_server.adapter_root))
    ours = train(lora_server, tmp_path / "ours", [callback])
    assert [record.transport for record in callback.records] == ["adapter"] * 4
    assert len(stock.raw) == len(ours.raw) == 4
    for theirs, batch in zip(stock.raw, ours.raw, strict=True):
        assert batch["step"] == theirs["step"]
        assert torch.equal(batch["completion_ids"], theirs["completion_ids"]), f"step {batch['step']}"
        difference = (batch["sampling_per_token_logps"] - theirs["sampling_per_token_logps"]) * batch["completion_mask"]
        assert float(difference.abs().max()) < CLOSE
    moved = (ours.raw[-1]["old_per_token_logps"] - ours.raw[0]["old_per_token_logps"]).abs().max()
    assert float(moved) > 100 * CLOSE, "the weights did change in between"

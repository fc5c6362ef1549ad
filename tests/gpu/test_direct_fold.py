"""Direct and fold where they are meant for: trainer and server on one GPU, CUDA graphs on, bfloat16."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSpec, take_snapshot
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy, new_run_id
from loraflow.server import VLLMServer
from loraflow.store import AdapterStore
from loraflow.transports import blocks
from loraflow.transports.base import Delivered
from loraflow.transports.direct import DirectTransport
from loraflow.transports.fold import FoldTransport
from loraflow.transports.fold_modules import base_weight_of
from tests.conftest import ServerPark
from tests.helpers.tiny import PROMPT, make_tiny_model, peft_model
from tests.helpers.vllm_process import RunningServer, vllm_server

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARGS = ("--max-model-len", "256", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--max-num-seqs", "16")
ARGS += ("--kv-cache-memory-bytes", str(1 << 30))  # what else runs on the GPU is not in the way
NOISE = 0.25  # bfloat16 differs from float32 by up to 0.08 (nats) on the same weights; two versions differ by 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=256, dtype=torch.bfloat16)


@pytest.fixture
def slots(server_park: ServerPark, base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    return server_park.get("gpu_slots", lambda: vllm_server(base, tmp_path_factory.mktemp("slots"), args=ARGS))


@pytest.fixture
def plain(server_park: ServerPark, base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    work = tmp_path_factory.mktemp("plain")
    return server_park.get("gpu_plain", lambda: vllm_server(base, work, args=ARGS, max_lora_rank=None))


def store_of(server: RunningServer) -> AdapterStore:
    return AdapterStore(str(server.adapter_root), new_run_id(), retain=2, grace_period=0.0)


def off(server: VLLMServer, name: str, model: Any) -> float:
    served = torch.tensor(server.prompt_logprobs(PROMPT, model=name, cache_salt=secrets.token_hex(4)))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT], device=model.device)).logits.float()
    mine = logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(PROMPT[1:], device=model.device)[:, None])[:, 0]
    return float((served - mine.cpu()).abs().max())


def redraw(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def require_proven(outcome: Delivered) -> None:
    assert outcome.error is None
    assert outcome.proof is not None
    assert outcome.proof.passed, outcome.proof.detail


@pytest.mark.parametrize("way", ["ipc", "shm"])
@pytest.mark.parametrize("rank", [16, 8])
def test_direct(slots: RunningServer, base: Path, monkeypatch: pytest.MonkeyPatch, way: str, rank: int) -> None:
    if way == "shm":
        monkeypatch.setattr(blocks, "gpu_block", lambda nbytes, device: None)
    server = VLLMServer(slots.url)
    model = peft_model(base, r=rank, dtype=torch.bfloat16).cuda()
    with store_of(slots) as store:
        transport = DirectTransport(store, AdapterSpec.from_model(model), device="cuda")
        transport.open([server])
        assert transport._ways.block.source()["kind"] == {"ipc": "cuda_ipc", "shm": "shm"}[way]
        for version in range(6):
            redraw(model, version)
            policy = Policy(store.run_id, version)
            outcome = transport.deliver(policy, take_snapshot(model), [server]).servers[server.url]
            require_proven(outcome)
            assert off(server, policy.name, model) < NOISE
        transport.wait_published()
        redraw(model, 1)
        assert off(server, f"{store.run_id}-v1", model) < NOISE  # evicted meanwhile
        transport.close([server])


def test_direct_while_requests_run(slots: RunningServer, base: Path) -> None:
    """Slots are filled and checksummed between steps that nobody holds up; one that is evicted for it among them."""
    server, over = VLLMServer(slots.url), threading.Event()
    model = peft_model(base, r=16, dtype=torch.bfloat16).cuda()
    served = [server.info.model]

    def generate() -> int:
        with VLLMServer(slots.url) as own:
            done = 0
            while not over.is_set():
                done += len(own.generate([PROMPT[:8]], model=served[-1], max_tokens=64, temperature=1.0)[0].token_ids)
        return done

    with store_of(slots) as store, ThreadPoolExecutor(8) as pool:
        transport = DirectTransport(store, AdapterSpec.from_model(model), device="cuda")
        transport.open([server])
        streams = [pool.submit(generate) for _ in range(8)]
        try:
            for version in range(12):
                redraw(model, version)
                policy = Policy(store.run_id, version)
                outcome = transport.deliver(policy, take_snapshot(model), [server]).servers[server.url]
                require_proven(outcome)
                assert PluginClient(server.request).status()["in_flight"] > 0
                assert off(server, policy.name, model) < NOISE
                served.append(policy.name)
        finally:
            over.set()
        assert all(stream.result() > 0 for stream in streams)
        transport.close([server])


@pytest.mark.parametrize("way", ["ipc", "shm"])
def test_fold(plain: RunningServer, base: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "shm":
        monkeypatch.setattr(blocks, "gpu_block", lambda nbytes, device: None)
    server = VLLMServer(plain.url)
    client = PluginClient(server.request)
    model = peft_model(base, r=16, dtype=torch.bfloat16).cuda()
    start = client.base()["fingerprint"]
    with store_of(plain) as store:
        transport = FoldTransport(store, AdapterSpec.from_model(model), base_weight_of(model), device="cuda")
        transport.open([server])
        assert next(iter(transport._layouts.values())).copy == "device"
        for version in range(4):
            redraw(model, version)
            outcome = transport.deliver(Policy(store.run_id, version), take_snapshot(model), [server]).servers[
                server.url
            ]
            assert outcome.error is None, outcome.error
            assert off(server, server.info.model, model) < NOISE
        transport.close([server])
    assert client.base()["fingerprint"] == start


def test_fold_from_a_copy_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic where the GPU has no room for the copy, against the one where it has."""
    from loraflow_server.fold import Fold, FoldModule

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(512, 256, device="cuda").bfloat16(), requires_grad=False)

        def load_weights(self, weights: Any) -> None:
            for _, weight in weights:
                self.weight.data.copy_(weight)

    modules, shapes = [FoldModule("w", (512, 256), 0, 1, 0.7, transposed=False)], [(8, 256), (512, 8)]
    payload = torch.randn(sum(rows * cols for rows, cols in shapes), device="cuda").bfloat16().view(torch.uint8)
    model = Model()
    kept = model.weight.clone()
    results = []
    for free in (1 << 40, 0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1 << 40))
        fold = Fold(model, modules, shapes)
        assert fold.copy_place == ("device" if free else "host")
        fold.begin("v0", payload)
        assert fold.finish(whole=True)["error"] <= 1
        results.append(model.weight.clone())
        fold.restore()
        torch.cuda.synchronize()
        assert torch.equal(model.weight, kept)
    # One launch for all, or one each, sum in other orders: the last bit of bfloat16 may differ.
    torch.testing.assert_close(results[0], results[1], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_launch_for_all_weights_does_what_one_for_each_does(dtype: torch.dtype) -> None:
    from loraflow_server.fold_rules import Recipe
    from loraflow_server.grouped import Grouped

    torch.manual_seed(0)
    recipes = []
    for rows, cols, rank, turned in (
        (512, 1536, 32, False),
        (70, 200, 8, False),
        (33, 50, 4, False),
        (128, 64, 40, True),
    ):
        room = torch.randn(cols, rows).to("cuda", dtype).T if turned else torch.randn(rows, cols).to("cuda", dtype)
        left, right = torch.randn(rows, rank).to("cuda", dtype), torch.randn(rank, cols).to("cuda", dtype)
        recipes.append(Recipe(room, torch.randn(rows, cols).to("cuda", dtype), 0.37, left, right))
    grouped = Grouped(recipes, 2)
    grouped.write()
    signs = torch.randint(0, 2, (1536,)).mul(2).sub(1).double().cuda()
    eps = torch.finfo(dtype).eps
    for recipe in recipes:
        torch.testing.assert_close(recipe.view, recipe.exact().to(dtype), rtol=eps, atol=32 * eps)
    for share in range(2):
        plain = max(float(recipe.error(signs)) for recipe in recipes[share::2])
        assert float(grouped.error(share, signs)) == pytest.approx(plain, rel=0.05)
        assert plain < 1
    recipes[1].view[3, 7] = float("nan")
    assert not float(grouped.error(1, signs)) <= 1

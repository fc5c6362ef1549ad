"""The server plugin on a real vLLM: loading, names, the slot layout, the digest."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from prometheus_client.parser import text_string_to_metric_families

from loraflow.adapter import AdapterSnapshot, take_snapshot, write_adapter
from loraflow.digest import Agreements, prove_digest
from loraflow.layout import lora_shapes
from loraflow.plugin_client import PluginClient
from loraflow.policy import Policy
from loraflow.server import HTTPFailure, VLLMServer
from tests.conftest import ServerPark
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer, vllm_server

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parents[2]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def publish(server: RunningServer, snapshot: AdapterSnapshot) -> tuple[Policy, Path]:
    policy = Policy("t" + secrets.token_hex(6), 0)
    folder = server.adapter_root / policy.name
    folder.mkdir(parents=True)
    write_adapter(snapshot, folder)
    return policy, folder


@pytest.fixture
def server(lora_server: RunningServer) -> Iterator[VLLMServer]:
    """A client of the shared server; what a test loaded there is unloaded behind it."""
    server = VLLMServer(lora_server.url)
    before = {m.id for m in server.models()}
    yield server
    for left in {m.id for m in server.models()} - before:
        server.unload_adapter(left)


@pytest.fixture
def client(server: VLLMServer) -> PluginClient:
    return PluginClient(server.request)


def served(server: VLLMServer, name: str) -> torch.Tensor:
    return torch.tensor(server.prompt_logprobs(PROMPT, model=name, cache_salt=secrets.token_hex(4)))


def refused(call: Any, status: int, word: str) -> None:
    with pytest.raises(HTTPFailure) as caught:
        call()
    assert caught.value.status == status, caught.value
    assert word in caught.value.reason


def test_status_tells_what_a_trainer_plans_with(lora_server: RunningServer, client: PluginClient) -> None:
    status = client.status()
    assert status["worker_extension"] is True
    assert {"adapters", "layout", "verify", "digest", "direct", "base"} <= set(status["capabilities"])
    assert "fold" not in status["capabilities"]  # on a CPU the weights of a LoRA server are repacked
    assert status["roots"] == [str(lora_server.adapter_root.resolve())]
    config = status["vllm_config"]
    assert config["model_config"]["dtype"] == "float32"
    assert config["model_config"]["hf_config"]["architectures"] == ["Qwen2ForCausalLM"]
    assert config["lora_config"]["max_lora_rank"] == 16
    assert client.status()["instance"] == status["instance"]


@pytest.mark.parametrize("targets", [*[[name] for name in PROJECTIONS], ["q_proj", "v_proj"], PROJECTIONS])
def test_each_projection_is_served_and_proven(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path, targets: list[str]
) -> None:
    model = peft_model(tiny_model, seed=5, target_modules=targets, r=4, std=0.2)
    snapshot = take_snapshot(model)
    policy, folder = publish(lora_server, snapshot)
    loaded = client.load(policy.name, path=str(folder))
    assert (loaded.name, loaded.path) == (policy.name, str(folder.resolve()))
    proof = prove_digest(server, policy, snapshot)
    assert (proof.kind, proof.passed, proof.detail) == ("digest", True, "")
    assert (served(server, policy.name) - peft_logprobs(model, PROMPT)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 1, "lora_alpha": 3},
        {"r": 16, "lora_alpha": 16},
        {"r": 8, "use_rslora": True},
        {"r": 8, "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 16}, "alpha_pattern": {"o_proj": 5}},
    ],
    ids=["rank1", "full_rank", "rslora", "patterns"],
)
def test_ranks_and_scalings_are_proven(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path, lora: dict[str, Any]
) -> None:
    model = peft_model(tiny_model, seed=6, std=0.1, **lora)
    snapshot = take_snapshot(model)
    policy, folder = publish(lora_server, snapshot)
    client.load(policy.name, path=str(folder))
    assert prove_digest(server, policy, snapshot).passed
    assert (served(server, policy.name) - peft_logprobs(model, PROMPT)).abs().max() < 1e-4


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path
) -> None:
    for round_, lora in enumerate([{"r": 16}] * 4 + [{"r": 2, "target_modules": ["k_proj"]}] * 4):
        snapshot = take_snapshot(peft_model(tiny_model, seed=round_, **lora))
        policy, folder = publish(lora_server, snapshot)
        client.load(policy.name, path=str(folder))
        assert prove_digest(server, policy, snapshot).passed


def test_another_version_is_no_proof(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path
) -> None:
    model = peft_model(tiny_model, seed=7, r=4)
    snapshot = take_snapshot(model)
    policy, folder = publish(lora_server, snapshot)
    client.load(policy.name, path=str(folder))
    changed = take_snapshot(model)
    name = sorted(changed.tensors)[9]
    changed.tensors[name].view(torch.int32)[1, 1] ^= 1
    proof = prove_digest(server, policy, changed)
    assert not proof.passed
    assert name in proof.detail
    assert proof.detail.count("base_model") == 1  # and nothing else
    randomize(model, seed=8)
    assert "more" in prove_digest(server, policy, take_snapshot(model)).detail


def test_a_name_means_one_content_for_ever(lora_server: RunningServer, client: PluginClient, tiny_model: Path) -> None:
    snapshot = take_snapshot(peft_model(tiny_model, r=2))
    (policy, folder), (_, other) = publish(lora_server, snapshot), publish(lora_server, snapshot)
    first = client.load(policy.name, path=str(folder))
    again = client.load(policy.name, path=str(folder))
    assert again.lora_int_id == first.lora_int_id
    refused(lambda: client.load(policy.name, path=str(other)), 409, "in use")
    assert client.unload(policy.name) == 0
    refused(lambda: client.load(policy.name, path=str(folder)), 409, "used before")
    refused(lambda: client.unload(policy.name), 404, "is loaded")
    refused(lambda: client.load(client.status()["vllm_config"]["model_config"]["model"], path=str(folder)), 400, "name")


def test_what_becomes_of_the_files_does_not_change_what_is_served(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path
) -> None:
    """Proven once, an adapter stays what it is: also where its slot is taken away and filled again."""
    model = peft_model(tiny_model, seed=3, std=0.2)
    (policy, folder), expected = publish(lora_server, take_snapshot(model)), peft_logprobs(model, PROMPT)
    client.load(policy.name, path=str(folder))
    assert prove_digest(server, policy, take_snapshot(model)).passed
    file = folder / "adapter_model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as damaged:  # the same inode: memory that is mapped from it changes
        damaged.seek(size // 2)
        damaged.write(b"\x7f" * 4096)
    for seed in range(3):  # three slots
        other, there = publish(lora_server, take_snapshot(peft_model(tiny_model, seed=seed, r=2)))
        client.load(other.name, path=str(there))
        served(server, other.name)
        client.unload(other.name)
    torch.testing.assert_close(served(server, policy.name), expected, rtol=0, atol=1e-4)
    with file.open("r+b") as cut:  # a page that is mapped beyond the end kills its process
        cut.truncate(size // 4)
    assert prove_digest(server, policy, take_snapshot(model)).passed
    torch.testing.assert_close(served(server, policy.name), expected, rtol=0, atol=1e-4)


def test_a_refused_folder_does_not_use_the_name_up(
    lora_server: RunningServer, client: PluginClient, tiny_model: Path
) -> None:
    policy, folder = publish(lora_server, take_snapshot(peft_model(tiny_model, r=2)))
    refused(lambda: client.load(policy.name, path=str(folder) + "-later"), 404, "no folder")
    assert client.load(policy.name, path=str(folder)).name == policy.name


def test_what_the_engine_refuses_burns_the_name(
    lora_server: RunningServer, client: PluginClient, tiny_model: Path
) -> None:
    policy, folder = publish(lora_server, take_snapshot(peft_model(tiny_model, r=24)))
    refused(lambda: client.load(policy.name, path=str(folder)), 400, "rank")
    refused(lambda: client.load(policy.name, path=str(folder)), 409, "burnt")
    assert policy.name not in {item["name"] for item in client.status()["adapters"]}


def test_links_are_resolved_before_they_are_judged(
    lora_server: RunningServer, client: PluginClient, tiny_model: Path, tmp_path: Path
) -> None:
    policy, folder = publish(lora_server, take_snapshot(peft_model(tiny_model, r=2)))
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    refused(lambda: client.load(policy.name, path=str(folder)), 403, "none of the folders")
    folder.unlink()
    inside = folder.with_name(folder.name + "-real")
    outside.rename(inside)
    folder.symlink_to(inside)
    assert client.load(policy.name, path=str(folder)).path == str(inside.resolve())


def test_a_layout_that_would_leave_tensors_out_is_refused(server: VLLMServer, client: PluginClient) -> None:
    good = "base_model.model.model.layers.0.self_attn.q_proj"
    for prefix in (good.replace("layers.0", "layers.9"), good.replace("model.model.model", "model.model.other.model")):
        shapes = {f"{prefix}.lora_A.weight": (2, 128), f"{prefix}.lora_B.weight": (128, 2)}
        refused(lambda shapes=shapes: client.layout(shapes), 400, "would lie in no LoRA slot")
    refused(lambda: client.layout({f"{good}.lora_A.weight": (2, 128)}), 400, "only one of")
    refused(lambda: client.layout({f"{good}.lora_magnitude_vector": (1, 128)}), 400, "does not serve")
    wide = {f"{good}.lora_A.weight": (32, 128), f"{good}.lora_B.weight": (128, 32)}
    refused(lambda: client.layout(wide), 400, "qkv_proj")


def test_an_unknown_layout_is_agreed_again(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path
) -> None:
    snapshots = [
        take_snapshot(peft_model(tiny_model, r=2, target_modules=[name])) for name in PROJECTIONS
    ]  # more layouts than a worker keeps
    agreements = [Agreements(snapshot.spec) for snapshot in snapshots]
    for snapshot, agreement in zip(snapshots, agreements, strict=True):
        agreement.agree(server)
        policy, folder = publish(lora_server, snapshot)
        client.load(policy.name, path=str(folder))
        assert agreement.prove(server, policy.name, snapshot).passed
    policy, folder = publish(lora_server, snapshots[0])
    client.load(policy.name, path=str(folder))
    assert agreements[0].prove(server, policy.name, snapshots[0]).passed


def test_verify_brings_an_evicted_adapter_back(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path
) -> None:
    model = peft_model(tiny_model, r=2)
    versions = []
    for seed in range(4):  # three slots
        randomize(model, seed=seed)
        snapshot = take_snapshot(model)
        policy, folder = publish(lora_server, snapshot)
        client.load(policy.name, path=str(folder))
        versions.append((policy, snapshot))
    assert all(prove_digest(server, policy, snapshot).passed for policy, snapshot in versions)


def test_base_fingerprint_is_stable_and_adapters_do_not_change_it(client: PluginClient) -> None:
    first, second = client.base(), client.base()
    assert first["pristine"]
    assert first["fingerprint"] == second["fingerprint"]
    assert first["tensors"] > 20


def test_a_failed_update_is_forgiven_once_the_base_is_proven(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path
) -> None:
    with pytest.raises(HTTPFailure):
        server.request("POST", "/update_weights", json={"update_info": {"names": ["no"]}})
    assert client.status()["weights_touched"]
    policy, folder = publish(lora_server, take_snapshot(peft_model(tiny_model, r=2)))
    client.load(policy.name, path=str(folder))
    assert not client.status()["weights_touched"]


def test_loads_at_the_same_time(
    lora_server: RunningServer, server: VLLMServer, client: PluginClient, tiny_model: Path
) -> None:
    snapshot = take_snapshot(peft_model(tiny_model, r=2))
    folders = [publish(lora_server, snapshot) for _ in range(6)]
    errors: list[Exception] = []

    def load(policy: Policy, folder: Path) -> None:
        try:
            client.load(policy.name, path=str(folder))
            assert prove_digest(server, policy, snapshot).passed
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=item) for item in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []


def test_metrics_are_what_prometheus_reads(lora_server: RunningServer, client: PluginClient, tiny_model: Path) -> None:
    def read() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        answer = requests.get(f"{lora_server.url}/loraflow/v1/metrics", timeout=30)
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(answer.text))
        assert all(family.name.startswith("loraflow_") and family.documentation for family in families)
        assert {family.type for family in families} <= {"counter", "gauge"}
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    before = read()
    policy, folder = publish(lora_server, take_snapshot(peft_model(tiny_model, r=2)))
    client.load(policy.name, path=str(folder))
    refused(lambda: client.load(policy.name, path=str(folder) + "-other"), 404, "no folder")
    during = read()
    client.unload(policy.name)
    after = read()

    def grown(then: dict[Any, float], now: dict[Any, float], name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return now[key] - then.get(key, 0.0)

    assert grown(before, during, "loraflow_loads_total", carrier="filesystem") == 1
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert grown(before, during, "loraflow_payload_bytes_total", carrier="filesystem") == size
    assert grown(before, during, "loraflow_refusals_total", code="not_found") == 1
    assert grown(before, during, "loraflow_requests_total", route="POST /adapters") == 2
    assert grown(before, during, "loraflow_request_seconds_total", route="POST /adapters") > 0
    assert grown(before, during, "loraflow_adapters_loaded") == 1
    assert grown(during, after, "loraflow_adapters_loaded") == -1
    assert grown(during, after, "loraflow_unloads_total") == 1
    assert grown(during, after, "loraflow_names_used") == 0  # for ever


# ---------------------------------------------------------------- a damaged slot


@pytest.fixture
def corrupting(server_park: ServerPark, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    extra = ("--worker-extension-cls", "tests.helpers.corrupt.CorruptingWorker")
    work, env = tmp_path_factory.mktemp("corrupt"), {"PYTHONPATH": str(ROOT)}
    return server_park.get("corrupt", lambda: vllm_server(tiny_model, work, extra=extra, env=env))


def test_a_single_flipped_bit_in_a_slot_is_named(corrupting: RunningServer, tiny_model: Path) -> None:
    server = VLLMServer(corrupting.url)
    client = PluginClient(server.request)
    snapshot = take_snapshot(peft_model(tiny_model, r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    policy, folder = publish(corrupting, snapshot)
    int_id = client.load(policy.name, path=str(folder)).lora_int_id
    layer = "model.layers.2."

    def flip(*where: Any) -> None:
        body = {"method": "loraflow_flip", "args": [int_id, *where]}
        assert server.request("POST", "/collective_rpc", json=body)["results"] == ["True"]

    cases = [
        (("self_attn.qkv_proj", "b", 2, 63, 3, 0), "self_attn.v_proj.lora_B"),  # the lowest bit of the last element
        (("self_attn.qkv_proj", "a", 0, 0, 0, 31), "self_attn.q_proj.lora_A"),  # a sign
        (("mlp.down_proj", "a", 0, 3, 255, 22), "mlp.down_proj.lora_A"),
        (("self_attn.qkv_proj", "b", 1, 5, 0, 10), "not zero outside"),  # k_proj is not adapted
        (("self_attn.qkv_proj", "a", 0, 4, 0, 0), "not zero outside"),  # above the rank; a denormal number
        (("mlp.gate_up_proj", "b", 1, 0, 0, 30), "not zero outside"),  # a layer without any adapter
    ]
    for (module, *where), named in cases:
        assert prove_digest(server, policy, snapshot).passed
        flip(layer + module, *where)
        proof = prove_digest(server, policy, snapshot)
        assert not proof.passed
        assert named in proof.detail
        flip(layer + module, *where)


def test_the_layout_covers_every_tensor_once(corrupting: RunningServer, tiny_model: Path) -> None:
    client = PluginClient(VLLMServer(corrupting.url).request)
    shapes = lora_shapes(take_snapshot(peft_model(tiny_model, r=3)).spec)
    layout = client.layout(shapes)
    assert list(layout.tensors) == sorted(shapes)
    [rank] = layout.ranks
    assert sorted(rect.tensor for rect in rank) == list(range(len(shapes)))
    assert all(rect.size == rows * cols for rect in rank for rows, cols in [list(layout.tensors.values())[rect.tensor]])

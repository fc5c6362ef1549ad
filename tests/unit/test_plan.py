"""`make_plan` over the product of adapter features, server capabilities and configs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSpec
from loraflow.config import SyncConfig
from loraflow.connect import gpu_sharing
from loraflow.costs import Costs
from loraflow.errors import CapabilityError, ConfigError
from loraflow.plan import Plan, TrainerInfo, make_plan
from loraflow.server_info import LoraInfo, PluginInfo, ServerInfo

URL = "http://127.0.0.1:8000"
LORA = LoraInfo(16, 3, 5, None, "bfloat16", runtime_loading=True)
PLUGIN = PluginInfo("0.1", True, frozenset({"adapters", "digest", "direct"}), ("/dev/shm",), {})
FOLD_PLUGIN = PluginInfo("0.1", True, frozenset({"fold"}), ("/dev/shm",), {})
STOCK = ServerInfo(
    URL,
    "0.32.0",
    "m",
    "/m",
    dtype="bfloat16",
    lora=LORA,
    lora_known=True,
    logprobs_mode="processed_logprobs",
    dev_mode=True,
)
LOCAL = TrainerInfo(local_servers=frozenset({URL}))
PAIR = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (8, 128),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (128, 8),
}


def spec(*features: str, rank: int = 8) -> AdapterSpec:
    return AdapterSpec({"r": rank}, PAIR, frozenset(features), rank, {})


NO_LORA = replace(STOCK, lora=None)
BROADCAST = replace(STOCK, weight_transfer="gloo")
NO_LORA_BROADCAST = replace(NO_LORA, weight_transfer="gloo")
WITH_PLUGIN = replace(STOCK, plugin=PLUGIN, weight_transfer="gloo")
FOLDING = replace(NO_LORA, plugin=FOLD_PLUGIN, weight_transfer="gloo")
SMALL = replace(BROADCAST, lora=replace(LORA, max_rank=4 + 4 - 1))
OLD = replace(BROADCAST, vllm_version="0.27.1")
OLD_PLAIN = replace(NO_LORA_BROADCAST, vllm_version="0.27.1")
ATTENTION_ONLY = replace(BROADCAST, lora=replace(LORA, target_modules=("k_proj", "v_proj")))
UPLOADS = replace(STOCK, plugin=replace(PLUGIN, capabilities=PLUGIN.capabilities | {"upload"}))
QUANTISED = replace(NO_LORA_BROADCAST, quantization="awq")

SLOT_BLOCKERS = ("dora", "modules_to_save", "bias", "lora_bias", "layer_replication", "init_changes_base", "variant")
MERGE_BLOCKERS = ("alora", "layer_replication", "variant")


@pytest.mark.parametrize(
    ("server", "features", "options", "expected"),
    [
        (STOCK, (), {}, ("adapter", "filesystem")),
        (WITH_PLUGIN, (), {}, ("adapter", "direct")),
        (WITH_PLUGIN, (), {"carrier": "filesystem"}, ("adapter", "filesystem")),
        (WITH_PLUGIN, (), {"transport": "merged"}, ("merged", "gloo")),
        (WITH_PLUGIN, (), {"vllm_lora_sync": False}, ("merged", "gloo")),
        (WITH_PLUGIN, (), {"vllm_lora_sync": True}, ("adapter", "direct")),
        (BROADCAST, ("dora",), {}, ("merged", "gloo")),
        (BROADCAST, ("rslora", "rank_pattern"), {}, ("adapter", "filesystem")),
        (OLD_PLAIN, ("rank_pattern",), {}, ("merged", "gloo")),
        (OLD_PLAIN, ("alpha_pattern",), {}, ("merged", "gloo")),
        (replace(OLD, vllm_version="0.28.0"), ("rank_pattern",), {}, ("merged", "gloo")),
        (OLD, ("rslora",), {}, ("adapter", "filesystem")),
        (NO_LORA_BROADCAST, (), {}, ("merged", "gloo")),
        (FOLDING, (), {}, ("merged", "fold")),
        (FOLDING, (), {"carrier": "gloo"}, ("merged", "gloo")),
        (FOLDING, ("dora",), {}, ("merged", "fold")),
        (FOLDING, ("modules_to_save", "bias"), {}, ("merged", "fold")),
        (FOLDING, ("trainable_tokens",), {}, ("merged", "gloo")),
        (FOLDING, ("tied_target",), {}, ("merged", "gloo")),
        (FOLDING, ("rslora", "rank_pattern"), {}, ("merged", "fold")),
        (FOLDING, (), {"vllm_lora_sync": False}, ("merged", "fold")),
        (BROADCAST, (), {"vllm_lora_sync": True}, ("adapter", "filesystem")),  # auto, the adapter first
        (BROADCAST, ("dora",), {"vllm_lora_sync": True}, ("merged", "gloo")),
        (FOLDING, ("dora",), {"vllm_lora_sync": True}, ("merged", "fold")),
        (FOLDING, ("conv1d",), {}, ("merged", "fold")),
        (SMALL, (), {}, ("merged", "gloo")),
        (ATTENTION_ONLY, (), {}, ("merged", "gloo")),
    ],
)
def test_choice(
    server: ServerInfo, features: tuple[str, ...], options: dict[str, object], expected: tuple[str, str]
) -> None:
    plan = make_plan(spec(*features), [server], SyncConfig(**options), LOCAL)
    assert (plan.transport, plan.carrier) == expected
    assert plan.reasons[0]


@pytest.mark.parametrize(
    ("server", "features", "options", "said"),
    [
        (NO_LORA, (), {}, "without LoRA"),
        (STOCK, ("dora",), {}, "DoRA"),
        (BROADCAST, ("dora",), {"transport": "adapter"}, "DoRA"),
        (SMALL, (), {"transport": "adapter"}, "--max-lora-rank 7"),
        (ATTENTION_ONLY, (), {"transport": "adapter"}, "--lora-target-modules leaves out q_proj"),
        (OLD, ("rank_pattern",), {"transport": "adapter"}, "ignores rank_pattern"),
        (OLD, ("rank_pattern",), {}, "loads no merged weights with --enable-lora"),
        (QUANTISED, (), {}, "quantised"),
        (replace(BROADCAST, dev_mode=False, lora=None), (), {}, "VLLM_SERVER_DEV_MODE=1"),
        (STOCK, (), {"carrier": "direct"}, "loraflow's server plugin"),
        (BROADCAST, (), {"carrier": "nccl"}, "not 'nccl'"),
        (BROADCAST, ("alora",), {}, "cannot be merged"),
        (replace(STOCK, lora=replace(LORA, runtime_loading=False)), (), {}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (STOCK, (), {"adapter_root": "s3://bucket/runs"}, "without loraflow's plugin"),
        (FOLDING, (), {"overlap": True}, "merged weights would change under them"),
    ],
)
def test_refusals_say_why(server: ServerInfo, features: tuple[str, ...], options: dict[str, object], said: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        make_plan(spec(*features), [server], SyncConfig(**options), LOCAL)
    assert said in str(caught.value)


def test_a_digest_that_is_asked_for_is_not_replaced_by_a_canary() -> None:
    wanted = SyncConfig(verify="digest")
    assert make_plan(spec(), [WITH_PLUGIN], wanted, LOCAL).carrier == "direct"
    assert make_plan(spec(), [FOLDING], wanted, LOCAL).carrier == "fold"
    for server in (STOCK, NO_LORA_BROADCAST):
        with pytest.raises(
            CapabilityError, match=r"verify='digest' is asked for, and .* needs loraflow's server plugin"
        ):
            make_plan(spec(), [server], wanted, LOCAL)
        make_plan(spec(), [server], SyncConfig(verify="auto"), LOCAL)


@pytest.mark.parametrize("way", ["filesystem", "direct"])
def test_a_folder_may_be_given_as_a_file_url(way: str) -> None:
    config = SyncConfig(adapter_root="file:///mnt/runs", carrier=way)  # type: ignore[arg-type]
    server = STOCK if way == "filesystem" else UPLOADS
    trainer = LOCAL if way == "filesystem" else TrainerInfo()  # on another host
    assert make_plan(spec(), [server], config, trainer).carrier == way


def test_one_server_that_cannot_rules_a_way_out_for_all() -> None:
    other = replace(NO_LORA_BROADCAST, url="http://127.0.0.1:8001")
    plan = make_plan(spec(), [BROADCAST, other], SyncConfig(), LOCAL)
    assert (plan.transport, plan.carrier) == ("merged", "gloo")
    assert any("8001" in item.reason for item in plan.ruled_out if item.carrier == "filesystem")


def test_direct_needs_one_host() -> None:
    plan = make_plan(spec(), [WITH_PLUGIN], SyncConfig(), TrainerInfo())
    assert plan.carrier == "filesystem"
    assert any("one host" in item.reason for item in plan.ruled_out if item.carrier == "direct")


def test_sharded_and_quantised_trainers_do_not_broadcast() -> None:
    for trainer, said in ((TrainerInfo(sharded=True), "sharded"), (TrainerInfo(quantized=True), "dequantize_base")):
        with pytest.raises(CapabilityError, match=said):
            make_plan(spec(), [NO_LORA_BROADCAST], SyncConfig(), trainer)
    allowed = SyncConfig(dequantize_base=True)
    assert make_plan(spec(), [NO_LORA_BROADCAST], allowed, TrainerInfo(quantized=True)).carrier == "gloo"


SERVERS = (STOCK, NO_LORA, BROADCAST, NO_LORA_BROADCAST, WITH_PLUGIN, FOLDING, SMALL, OLD, ATTENTION_ONLY, QUANTISED)
FEATURES = ((), ("rslora",), ("rank_pattern",), ("alora",), *((f,) for f in SLOT_BLOCKERS))
OPTIONS = ({}, {"transport": "adapter"}, {"transport": "merged"}, {"vllm_lora_sync": False}, {"vllm_lora_sync": True})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_plan_keeps_the_rules(options: dict[str, object]) -> None:
    """Whatever is put together: a plan that serves what cannot be served, or goes against the config, is never made."""
    config = SyncConfig(**options)
    made = 0
    for server, features in itertools.product(SERVERS, FEATURES):
        try:
            plan = make_plan(spec(*features), [server], config, LOCAL)
        except CapabilityError as error:
            assert all(  # noqa: PT017 - a refusal is one of the outcomes
                way in str(error) for way in ("adapter/direct", "adapter/filesystem", "merged/fold", "merged/gloo")
            )
            continue
        made += 1
        assert config.wanted_transport in {"auto", plan.transport}
        if plan.transport == "adapter":
            assert server.lora is not None
            assert server.lora.max_rank >= 8
            assert server is not ATTENTION_ONLY
            assert not set(features) & set(SLOT_BLOCKERS)
            assert not (server is OLD and "rank_pattern" in features)
        else:
            assert not set(features) & set(MERGE_BLOCKERS)
            assert server.quantization is None
            assert plan.carrier == "fold" or server.weight_transfer == plan.carrier
        assert {item.carrier for item in plan.ruled_out} | {plan.carrier} == {
            "direct",
            "filesystem",
            "fold",
            "ipc",
            "nccl",
            "gloo",
        }
    assert made > 0


def test_warnings() -> None:
    raw = replace(STOCK, logprobs_mode="raw_logprobs")
    assert any("temperature" in w for w in make_plan(spec(), [raw], SyncConfig(), LOCAL).warnings)
    few = replace(STOCK, lora=replace(LORA, max_loras=1))
    assert any("slots" in w for w in make_plan(spec(), [few], SyncConfig(), LOCAL).warnings)
    (folded,) = make_plan(spec(), [FOLDING], SyncConfig(), LOCAL).warnings
    assert folded == "bfloat16 rounds small updates away when merged: nothing measures how much of them"
    (sent,) = make_plan(spec(), [NO_LORA_BROADCAST], SyncConfig(), LOCAL).warnings
    assert sent == "bfloat16 rounds small updates away when merged: the record carries the rounding error"
    exact = replace(FOLDING, dtype="float32")
    assert make_plan(spec(), [exact], SyncConfig(), LOCAL).warnings == ()


def test_payload() -> None:
    slot = make_plan(spec(), [STOCK], SyncConfig(), LOCAL)
    assert slot.payload_bytes == 2 * (8 * 128 + 128 * 8)
    merged = make_plan(spec(), [NO_LORA_BROADCAST], SyncConfig(), LOCAL)
    assert merged.payload_bytes == 2 * 128 * 128


# ---------------------------------------------------------------- measured costs, and refusals at the door


BOTH = replace(WITH_PLUGIN, plugin=replace(PLUGIN, capabilities=frozenset({"adapters", "digest", "direct", "fold"})))


def report(folder: Path, **content: object) -> str:
    summary = [{"way": way, "p50_ms": ms} for way, ms in (("direct", 10.0), ("fold", 40.0), ("filesystem", 90.0))]
    rates = [("slot", 64, 8000.0), ("base, LoRA server", 64, 12000.0), ("folded", 64, 18000.0), ("slot", 256, 20000.0)]
    generation = [{"arm": arm, "streams": streams, "tokens_per_second": rate} for arm, streams, rate in rates]
    path = folder / "bench.json"
    path.write_text(json.dumps({"summary": summary, "generation": generation, **content}))
    return str(path)


def planned(folder: Path, tokens: int, streams: int = 64, **options: object) -> Plan:
    path = report(folder)
    config = SyncConfig(cost_file=path, rollout_streams=streams, rollout_tokens=tokens, **options)
    return make_plan(spec(), [BOTH], config, LOCAL, costs=Costs.from_file(path))


def test_measured_costs_choose_by_the_rollouts_length(tmp_path: Path) -> None:
    # 64 streams: 8 ms a token from slots, 5.33 ms folded, and a fold costs 30 ms more: even at 11.25 tokens.
    short, long = planned(tmp_path, 11), planned(tmp_path, 12)
    assert (short.carrier, long.carrier) == ("direct", "fold")
    assert "64 × 12 tokens, measured: fold 104 ms, direct 106 ms, filesystem 186 ms" in long.reasons[-1]
    assert "slower: 106 ms" in next(item.reason for item in long.ruled_out if item.carrier == "direct")
    # What was asked for stays so, and what was not measured does not win by that.
    assert planned(tmp_path, 1000, transport="adapter").carrier == "direct"
    assert planned(tmp_path, 1000, carrier="filesystem").carrier == "filesystem"
    assert make_plan(spec(), [BOTH], SyncConfig(), LOCAL).carrier == "direct"


def test_a_carrier_that_a_server_refused_is_not_planned_again() -> None:
    plan = make_plan(spec(), [FOLDING], SyncConfig(), LOCAL, refused={"fold": "too little memory"})
    assert (plan.transport, plan.carrier) == ("merged", "gloo")
    assert next(item.reason for item in plan.ruled_out if item.carrier == "fold") == "too little memory"


def test_cost_files_are_read_or_refused(tmp_path: Path) -> None:
    costs = Costs.from_file(report(tmp_path))
    assert costs.rates["slot", 64] == 8000.0
    several = report(tmp_path, reports=[json.loads(Path(report(tmp_path)).read_text())])
    assert Costs.from_file(several) == costs
    for text in ("", "[]", "{}", '{"summary": [], "generation": []}', '{"summary": [{"way": 1}], "generation": []}'):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        with pytest.raises(ConfigError, match="cost_file"):
            Costs.from_file(bad)
    good = json.loads(Path(report(tmp_path)).read_text())
    for number in (0, -1, float("nan"), float("inf")):
        rates = [{**rate, "tokens_per_second": number} for rate in good["generation"]]
        bad.write_text(json.dumps({**good, "generation": rates}))
        with pytest.raises(ConfigError, match="not above zero"):
            Costs.from_file(bad)
    with pytest.raises(ConfigError, match="no report"):
        Costs.from_file(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="rollout_tokens"):
        SyncConfig(cost_file="x.json", rollout_streams=4)


CUDA = TrainerInfo(device="cuda", local_servers=frozenset({URL}))


@pytest.mark.parametrize(
    ("backend", "shares", "carrier", "refusal"),
    [
        ("ipc", {URL: True}, "ipc", None),
        ("ipc", {}, "ipc", None),  # on this host, and started for it
        ("ipc", {URL: False}, None, "one GPU"),
        ("nccl", {URL: False}, "nccl", None),
        ("nccl", {}, "nccl", None),
        ("nccl", {URL: True}, None, "NCCL refuses two ranks on one GPU"),
    ],
)
def test_broadcasts_between_gpus(
    backend: str, shares: dict[str, bool], carrier: str | None, refusal: str | None
) -> None:
    """Two processes that are shown one GPU each (``CUDA_VISIBLE_DEVICES``) need not share it."""
    server, trainer = replace(NO_LORA, weight_transfer=backend), replace(CUDA, shares_gpu=shares)
    if refusal is None:
        assert make_plan(spec(), [server], SyncConfig(), trainer).carrier == carrier
    else:
        with pytest.raises(CapabilityError, match=refusal):
            make_plan(spec(), [server], SyncConfig(), trainer)


MAPS = replace(FOLDING, plugin=replace(FOLD_PLUGIN, capabilities=frozenset({"mapped"})), weight_transfer="ipc")


def test_merged_weights_without_a_gpu_in_shared_memory() -> None:
    plan = make_plan(spec("dora"), [MAPS], SyncConfig(), LOCAL)
    assert (plan.carrier, "memory that trainer and server share" in str(plan)) == ("ipc", True)
    for server, options, trainer, refusal in (
        (MAPS, {}, TrainerInfo(), "one host"),
        (MAPS, {"verify": "canary"}, LOCAL, "digest alone"),
        (replace(MAPS, plugin=None), {}, LOCAL, "'mapped'"),
    ):
        with pytest.raises(CapabilityError, match=refusal):
            make_plan(spec("dora"), [server], SyncConfig(**options), trainer)


@pytest.mark.parametrize(
    ("way", "local", "capabilities", "said"),
    [
        ("auto", True, (), "the adapter goes from shared memory"),
        ("shared", True, (), "the adapter goes from shared memory"),
        ("auto", False, ("upload", "group"), "by broadcast or over HTTP, whichever is faster"),
        ("upload", True, ("upload",), "over HTTP to every server"),
        ("broadcast", True, ("upload", "group"), "by broadcast to every server"),
    ],
)
def test_how_payloads_travel_is_told(way: str, local: bool, capabilities: tuple[str, ...], said: str) -> None:
    server = replace(WITH_PLUGIN, plugin=replace(PLUGIN, capabilities=PLUGIN.capabilities | set(capabilities)))
    trainer = LOCAL if local else TrainerInfo()
    plan = make_plan(spec(), [server], SyncConfig(carrier="direct", direct_way=way), trainer)
    assert any(said in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("way", "local", "capabilities", "refusal"),
    [
        ("shared", False, ("upload", "group"), "another host"),
        ("auto", False, (), "takes no uploads"),
        ("upload", True, (), "takes no uploads"),
        ("broadcast", True, ("upload",), "no broadcast groups"),
    ],
)
def test_a_way_that_cannot_be_is_refused(way: str, local: bool, capabilities: tuple[str, ...], refusal: str) -> None:
    server = replace(WITH_PLUGIN, plugin=replace(PLUGIN, capabilities=PLUGIN.capabilities | set(capabilities)))
    with pytest.raises(CapabilityError, match=refusal):
        make_plan(spec(), [server], SyncConfig(carrier="direct", direct_way=way), LOCAL if local else TrainerInfo())


class _Server:
    def __init__(self, url: str, gpus: list[str] | None) -> None:
        status = {} if gpus is None else {"gpus": gpus}
        self.url = url
        self.info = replace(STOCK, plugin=None if gpus is None else replace(PLUGIN, status=status))


def test_gpus_are_told_apart_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    same, other, stock, far = "http://localhost:1", "http://localhost:2", "http://localhost:3", "http://10.0.0.9:4"
    servers: Any = [_Server(same, ["a", "b"]), _Server(other, ["b"]), _Server(stock, None), _Server(far, None)]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    known = {same: True, other: False, far: False}
    gpu = torch.device("cuda:0")
    assert gpu_sharing(servers, gpu) == {**known, stock: True}  # the host has no second one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_sharing(servers, gpu) == known
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert gpu_sharing(servers, gpu) == known
    assert gpu_sharing(servers, torch.device("cpu")) == dict.fromkeys([same, other, stock, far], False)

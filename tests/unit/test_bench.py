"""The benchmark's arithmetic, against the right value computed another way; no server."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import fields, is_dataclass, replace
from typing import get_type_hints

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from loraflow.bench.compare import (
    SYNCING,
    UNTOUCHED,
    break_even,
    break_evens,
    comparisons,
    mean_rate,
    pauses,
)
from loraflow.bench.generation import Rate, generation_tokens, lost_seconds
from loraflow.bench.links import ALL_WEIGHTS, Floor, Links, floor_of, measure_links
from loraflow.bench.plot import plot_report
from loraflow.bench.presets import PRESETS, Preset, draw_policy, load_trainer, make_model, nudge_policy, preset_of
from loraflow.bench.report import Report, environment
from loraflow.bench.run import plan_ways
from loraflow.bench.scenarios import Failure, Sample, Timed, measure
from loraflow.bench.stock import stock_weights
from loraflow.bench.summary import Payload, Summary, quantile, summarise
from loraflow.costs import BASE, FOLDED, SLOT
from loraflow.errors import ConfigError

LINKS = Links(memcpy=10.0, socket=2.0, file_write=4.0, d2h=50.0, h2d=40.0, d2d=1000.0, peer=200.0, round_trip_ms=0.5)
CPU_LINKS = Links(memcpy=10.0, socket=2.0, file_write=4.0, round_trip_ms=0.5)


def timed(ms: float, **phases: float) -> Timed:
    return Timed(total_ms=ms, stall_ms=ms / 2, bytes=1_000_000, phases_ms=phases, proven=True, proof="digest")


def samples(way: str, *ms: float) -> list[Sample]:
    return [Sample(way, 0, index == 0, timed(value, load=value / 4)) for index, value in enumerate(ms)]


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("name", "tensors", "adapter_mb", "folded_gb", "model_gb"),
    [("1.5b", 392, 73.9, 2.62, 3.09), ("7b", 392, 161.5, 13.05, 15.23)],
)
def test_sizes_are_those_that_were_measured_before(name, tensors, adapter_mb, folded_gb, model_gb):
    payload = Payload.of(preset_of(name), 32)
    assert payload.adapter_tensors == tensors
    assert payload.adapter_bytes / 1e6 == pytest.approx(adapter_mb, abs=0.05)
    assert payload.folded_bytes / 1e9 == pytest.approx(folded_gb, abs=0.006)
    assert payload.model_bytes / 1e9 == pytest.approx(model_gb, abs=0.006)


def test_sizes_are_those_of_the_model_that_is_made(tmp_path):
    preset = preset_of("tiny")
    folder = make_model(preset, tmp_path)
    model = load_trainer(folder, preset, 8, "cpu")
    lora = [p for n, p in model.named_parameters() if ".lora_" in n]
    adapted = [p for n, p in model.named_parameters() if n.endswith(".base_layer.weight")]
    payload = Payload.of(preset, 8)
    assert payload.adapter_tensors == len(lora)
    assert payload.adapter_bytes == sum(p.nbytes for p in lora)
    assert payload.folded_bytes == sum(p.nbytes for p in adapted)
    assert payload.model_bytes == sum(p.nbytes for n, p in model.named_parameters() if ".lora_" not in n)


def test_a_drawn_model_is_loaded_with_the_weights_it_was_saved_with(tmp_path, monkeypatch):
    small = Preset("small", 64, 2, 128, 4, 2, 512, tied=True, dtype="bfloat16", rank=4)
    monkeypatch.setitem(PRESETS, "small", small)
    folder = make_model(small, tmp_path / "a")
    again = make_model(small, tmp_path / "b")
    one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    other = AutoModelForCausalLM.from_pretrained(again, dtype=torch.bfloat16)
    assert sum(p.numel() for p in one.parameters()) == small.parameters()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert next(one.parameters()).float().std() > 0.01
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 512
    assert isinstance(tokenizer.decode([5, 300, 511]), str)


def test_a_complete_folder_is_kept_and_another_shape_is_not_taken_for_it(tmp_path):
    folder = make_model(preset_of("tiny"), tmp_path)
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    make_model(preset_of("tiny"), tmp_path)
    assert weights.stat().st_mtime_ns == before


def test_the_large_shapes_are_qwen2_ones():
    config = AutoConfig.for_model(
        "qwen2", hidden_size=896, num_hidden_layers=24, intermediate_size=4864, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert preset_of("0.5b").parameters() == sum(p.numel() for p in model.parameters())


def test_drawing_a_policy_changes_the_adapter_alone_and_repeats(tmp_path):
    preset = preset_of("tiny")
    model = load_trainer(make_model(preset, tmp_path), preset, 8, "cpu")
    before = {n: p.clone() for n, p in model.named_parameters()}
    draw_policy(model, 3)
    first = {n: p.clone() for n, p in model.named_parameters()}
    draw_policy(model, 4)
    draw_policy(model, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, first[name])
        assert torch.equal(parameter, before[name]) == (".lora_" not in name)
    assert min(p.abs().max() for n, p in model.named_parameters() if ".lora_B." in n) > 0


def test_the_stock_broadcast_sends_the_checkpoint_s_names(tmp_path):
    preset = preset_of("tiny")
    folder = make_model(preset, tmp_path)
    model = load_trainer(folder, preset, 8, "cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sent = dict(stock_weights(model))
    assert sent.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(sent[name], weight) for name, weight in plain.named_parameters())


# ---------------------------------------------------------------- summary


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_quantile_is_numpy_s(q, count):
    values = np.random.default_rng(count).normal(size=count).tolist()
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)))


def test_the_summary_leaves_the_warmup_out_and_compares_with_the_stock_adapter():
    payload = Payload.of(preset_of("tiny"), 8)
    found = summarise(
        [*samples("direct", 900, 4, 5, 9), *samples("stock-adapter", 900, 100, 120, 110)], CPU_LINKS, payload
    )
    direct, stock = found
    assert (direct.way, direct.samples, direct.p50_ms, direct.min_ms) == ("direct", 3, 5, 4)
    assert direct.p90_ms == pytest.approx(float(np.quantile([4, 5, 9], 0.9)))
    assert direct.stall_p50_ms == 2.5
    assert direct.phases_p50_ms == {"load": 1.25}
    assert direct.gb_per_s == pytest.approx(1_000_000 / 5e-3 / 1e9)
    assert direct.times_faster == pytest.approx(110 / 5)
    assert stock.times_faster == 1
    assert direct.floor is not None
    assert direct.floor_fraction == pytest.approx(direct.floor.ms / 5)


def test_without_the_stock_adapter_nothing_is_called_faster_and_one_unproven_sync_shows():
    found = samples("fold", 1, 2, 3)
    found[-1] = replace(found[-1], timed=replace(found[-1].timed, proven=False))
    [fold] = summarise(found, CPU_LINKS, Payload.of(preset_of("tiny"), 8))
    assert fold.times_faster is None
    assert not fold.proven


@pytest.mark.parametrize(
    ("way", "links", "same_gpu", "ms"),
    [
        ("direct", LINKS, True, 0.5 + 100 / 1000),  # 100 MB, GB/s are MB/ms
        ("direct-overlap", LINKS, True, 0.5 + 100 / 1000),
        ("direct", LINKS, False, 0.5 + 100 / 50 + 100 / 40),
        ("direct", CPU_LINKS, True, 0.5 + 200 / 10),
        ("filesystem", LINKS, True, 0.5 + 100 / 4 + 100 / 50 + 100 / 40),
        ("stock-adapter", CPU_LINKS, True, 0.5 + 100 / 4 + 200 / 10),
        ("fold", LINKS, True, 0.5 + 100 / 1000 + 2000 / 1000),
        ("ipc", LINKS, True, 0.5 + 100 / 1000),
        ("stock-merged-nccl", LINKS, False, 0.5 + 100 / 200),
        ("gloo", CPU_LINKS, True, 0.5 + 100 / 2),
        ("upload", CPU_LINKS, True, 0.5 + 100 / 2),
        ("upload", LINKS, False, 0.5 + 100 / 2 + 100 / 50 + 100 / 40),
        ("direct-group", LINKS, False, 0.5 + 100 / 200),
        ("direct-group", LINKS, True, 0.5 + 100 / 2 + 100 / 50 + 100 / 40),
        ("direct-group", CPU_LINKS, True, 0.5 + 100 / 2),
    ],
)
def test_floors(way, links, same_gpu, ms):
    floor = floor_of(way, links, 100_000_000, folded=2_000_000_000, same_gpu=same_gpu)
    assert floor is not None
    assert floor.ms == pytest.approx(ms)
    assert "100.0 MB" in floor.formula or "200.0 MB" in floor.formula


def test_no_floor_where_a_link_was_not_measured():
    assert floor_of("nccl", CPU_LINKS, 1) is None
    assert floor_of("direct, while generating", LINKS, 1) is None
    assert floor_of("gloo" + ALL_WEIGHTS, LINKS, 7_000_000) == floor_of("gloo", LINKS, 7_000_000)


def test_links_are_measured():
    found = measure_links(torch.device("cpu"), nbytes=1 << 20)
    assert min(found.memcpy, found.socket, found.file_write) > 0
    assert found.d2h is found.peer is None


# ---------------------------------------------------------------- generation


def test_the_counter_is_summed_over_engines():
    text = (
        "# HELP vllm:generation_tokens_total x\n# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="m"} 1200.0\n'
        'vllm:generation_tokens_total{engine="1",model_name="m"} 3.4e+03\n'
        'vllm:generation_tokens_created{engine="0"} 1.7e+09\nvllm:prompt_tokens_total{engine="0"} 9.0\n'
    )
    assert generation_tokens(text) == 4600


def test_at_the_break_even_both_ways_take_the_same_time():
    found = break_even(
        adapter_ms=6, merged_ms=210, adapter_rate=20_000, merged_rate=32_000, streams=256, adapter="a", merged="m"
    )
    assert found.tokens is not None
    total = [sync / 1e3 + 256 * found.tokens / rate for sync, rate in ((6, 20_000), (210, 32_000))]
    assert total[0] == pytest.approx(total[1])
    assert found.sentence.startswith("m is better from")


@pytest.mark.parametrize(
    ("adapter_ms", "merged_ms", "adapter_rate", "merged_rate", "tokens", "better"),
    [(10, 9, 100, 120, 0.0, "m"), (10, 20, 120, 100, None, "a")],
)
def test_one_way_may_always_be_better(adapter_ms, merged_ms, adapter_rate, merged_rate, tokens, better):
    found = break_even(
        adapter_ms=adapter_ms, merged_ms=merged_ms, adapter_rate=adapter_rate, merged_rate=merged_rate, streams=4,
        adapter="a", merged="m",
    )  # fmt: skip
    assert found.tokens == tokens
    assert found.sentence.startswith(f"{better} is better at any length")


def test_a_cheaper_merged_sync_with_slower_generation_is_better_for_short_rollouts():
    found = break_even(
        adapter_ms=20, merged_ms=10, adapter_rate=120, merged_rate=100, streams=1, adapter="a", merged="m"
    )
    assert found.tokens is not None
    assert found.tokens > 0
    assert found.sentence.startswith("a is better from")


def test_the_break_even_takes_the_mean_of_the_windows():
    rates = [
        Rate(SLOT, 8, 100, 1.0), Rate(SLOT, 8, 300, 1.0), Rate(FOLDED, 8, 400, 1.0),
        Rate(f"{SLOT}, {SYNCING}", 8, 196, 1.0, syncs=4), Rate(SLOT, 16, 7, 1.0),
    ]  # fmt: skip
    assert mean_rate(rates, SLOT, 8) == 200
    summary = summarise(
        [*samples("direct", 9, 5), *samples("fold", 9, 15)], CPU_LINKS, Payload.of(preset_of("tiny"), 8)
    )
    [even] = break_evens(summary, rates)
    assert even.tokens == pytest.approx(10 / (8 * (1 / 200 - 1 / 400) * 1e3))


def arrivals(*, pause_at: float, pause: float, step: float, ends: float) -> list[float]:
    """When tokens come, each ``step`` seconds but for one pause."""
    times = [0.0]
    while times[-1] < ends:
        times.append(times[-1] + step + (pause if times[-1] < pause_at <= times[-1] + step else 0.0))
    return times


@pytest.mark.parametrize("pause", [0.0, 0.012, 0.1])
@pytest.mark.parametrize("step", [0.002, 0.007])
def test_a_pause_of_generation_is_found_as_long_as_it_was(pause, step):
    seen = [arrivals(pause_at=0.5, pause=pause, step=step, ends=1.2), [0.4, 0.41, 0.42]]  # the second is too short
    found = lost_seconds(0.495, seen)
    assert found == pytest.approx(pause, abs=0.1 * step)


def test_what_a_host_loses_before_and_after_alike_is_no_pause():
    slow = [at * 1.7 for at in arrivals(pause_at=9, pause=0, step=0.005, ends=1)]
    assert lost_seconds(0.6, [slow]) == pytest.approx(0.0, abs=1e-6)


def test_nothing_is_said_where_no_request_was_under_way_all_the_time():
    assert lost_seconds(0.5, []) is None
    assert lost_seconds(0.9, [arrivals(pause_at=9, pause=0, step=0.01, ends=1)]) is None  # ends inside
    assert lost_seconds(0.0, [arrivals(pause_at=9, pause=0, step=0.01, ends=0.3)]) is None  # too little beside it


def test_pauses_are_told_for_arms_beside_syncs_alone():
    syncing = f"{SLOT}, {SYNCING}"
    rates = [
        Rate(syncing, 8, 1, 1.0, syncs=2, lost_ms=(10.0, 14.0)), Rate(syncing, 8, 1, 1.0, syncs=2, lost_ms=(12.0,)),
        Rate(SLOT, 8, 1, 1.0, lost_ms=(-1.0, 1.0, 0.0)), Rate(SLOT, 16, 1, 1.0, lost_ms=(5.0, 5.0, 5.0)),
        Rate(BASE, 8, 1, 1.0, lost_ms=(1.0,)),
    ]  # fmt: skip
    found = {(pause.arm, pause.streams): pause for pause in pauses(rates)}
    assert found.keys() == {(syncing, 8), (SLOT, 8)}
    assert found[syncing, 8].ms == 12.0
    assert found[syncing, 8].syncs == 3
    assert 10.0 <= found[syncing, 8].low < 12.0 < found[syncing, 8].high <= 14.0
    assert found[SLOT, 8].ms == 0.0


def test_a_nudged_policy_is_another_one_and_comes_back():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    draw_policy(model, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nudge_policy(model, 2)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".lora_B." in name}
    nudge_policy(model, 3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])


# ---------------------------------------------------------------- measuring


class FakeWay:
    def __init__(self, name, log, fail_at=None):
        self.name, self.log, self.fail_at = name, log, fail_at

    def open(self):
        self.log.append((self.name, "open"))

    def sync(self, step):
        if step == self.fail_at:
            raise RuntimeError("boom")
        self.log.append((self.name, step))
        return timed(float(step))

    def close(self):
        self.log.append((self.name, "close"))


def test_ways_take_turns_and_every_sample_is_kept():
    log, kept, seen = [], [], []
    model = torch.nn.Linear(1, 1)
    failures = measure(
        [FakeWay("a", log), FakeWay("b", log)], model, rounds=2, block=1, pause=0.0, samples=kept, tell=seen.append
    )
    assert failures == []
    turn = lambda name, *steps: [(name, "open"), *((name, step) for step in steps), (name, "close")]  # noqa: E731
    assert log == turn("a", 1, 2) + turn("b", 3, 4) + turn("a", 5, 6) + turn("b", 7, 8)
    assert [(s.way, s.round, s.warmup) for s in kept] == [
        ("a", 0, True), ("a", 0, False), ("b", 0, True), ("b", 0, False),
        ("a", 1, True), ("a", 1, False), ("b", 1, True), ("b", 1, False),
    ]  # fmt: skip
    assert len(seen) == 4


def test_the_first_syncs_of_a_turn_are_warm_ups():
    kept = []
    measure([FakeWay("a", [])], torch.nn.Linear(1, 1), rounds=2, block=2, warmups=3, pause=0.0, samples=kept)
    assert [s.warmup for s in kept] == [True, True, True, False, False] * 2


def test_a_way_that_fails_is_closed_told_and_left_out_while_the_others_go_on():
    log, kept = [], []
    failures = measure(
        [FakeWay("a", log, fail_at=2), FakeWay("b", log)],
        torch.nn.Linear(1, 1),
        rounds=2,
        block=1,
        pause=0.0,
        samples=kept,
    )
    [failure] = failures
    assert failure.what == "a"
    assert failure.error == "RuntimeError: boom"
    assert "in sync" in failure.traceback
    assert log.count(("a", "open")) == log.count(("a", "close")) == 1
    assert [s.way for s in kept].count("b") == 4


def test_an_interruption_keeps_what_was_taken():
    class Stop(BaseException):
        pass

    class Interrupted(FakeWay):
        def sync(self, step):
            if step == 3:
                raise Stop
            return super().sync(step)

    log, kept = [], []
    with pytest.raises(Stop):
        measure([Interrupted("a", log)], torch.nn.Linear(1, 1), rounds=1, block=5, pause=0.0, samples=kept)
    assert len(kept) == 2
    assert log[-1] == ("a", "close")


# ---------------------------------------------------------------- which ways


def test_all_that_fit_and_the_reasons_of_those_that_do_not():
    planned, skipped = plan_ways(None, backend="ipc", given_server=False)
    assert planned == {
        "lora": ["direct", "direct-overlap", "filesystem", "filesystem-stock", "stock-adapter"],
        "stock": [],
        "plain": ["fold", "ipc", "stock-merged-ipc"],
    }
    assert skipped.keys() == {"stock-inplace"}
    planned, skipped = plan_ways(None, backend="gloo", given_server=False)
    assert planned["plain"] == []
    assert skipped.keys() == {"fold", "gloo", "stock-merged", "stock-inplace"}
    planned, skipped = plan_ways(None, backend="ipc", given_server=True)
    assert planned["plain"] == []
    assert "given server" in skipped["fold"]


def test_what_is_asked_for_is_measured_or_said_to_be_impossible_here():
    asked = ["fold", "stock-merged", "direct", "nccl", "stock-inplace"]
    planned, skipped = plan_ways(asked, backend="gloo", given_server=False)
    assert planned == {"lora": ["direct"], "stock": ["stock-inplace"], "plain": ["fold"]}
    assert "CPU" in skipped["stock-merged"]
    assert "gloo" in skipped["nccl"]
    assert plan_ways(["stock-merged"], backend="nccl", given_server=False)[0]["plain"] == ["stock-merged-nccl"]
    asked = ["direct-group", "upload", "direct"]
    found = plan_ways(asked, backend="gloo", given_server=False)[0]["lora"]
    assert found == ["direct", "upload", "direct-group"]
    with pytest.raises(ConfigError, match="pigeon"):
        plan_ways(["pigeon"], backend="gloo", given_server=False)


def test_a_comparison_pairs_windows_that_are_near_in_time():
    """A host that slows down to a tenth in between: what is near in time differs by its arm alone."""
    speeds = [1000, 1000, 1000, 100, 100, 100]
    rates = [
        Rate(arm, 8, int(speed * share), 1.0, began=10.0 * turn + shift)
        for turn, speed in enumerate(speeds)
        for arm, share, shift in ((SLOT, 1.0, 0.0), (f"{SLOT}, {SYNCING}", 0.95, 5.0))
    ]
    rates += [Rate(SLOT, 8, 9_000, 1.0, began=-100.0), Rate(FOLDED, 16, 5, 1.0)]  # far from all others; other streams
    [found] = comparisons(rates)
    assert (found.above, found.below, found.streams, found.pairs) == (f"{SLOT}, {SYNCING}", SLOT, 8, 6)
    assert found.ratio == pytest.approx(0.95)
    assert found.low == pytest.approx(0.95)
    assert found.high == pytest.approx(0.95)
    assert "6 pairs" in str(found)


def test_few_windows_say_not_how_sure():
    [found] = comparisons([Rate(SLOT, 8, 100, 1.0), Rate(SLOT, 8, 300, 1.0), Rate(FOLDED, 8, 400, 1.0)])
    assert (found.pairs, found.ratio, found.low, found.high) == (1, 4.0, None, None)
    assert "too few" in str(found)


def test_an_interval_holds_what_scatters():
    draw = random.Random(1)
    rates = [
        Rate(arm, 8, int(10_000 * share * draw.uniform(0.8, 1.2)), 1.0, began=2.0 * turn + shift)
        for turn in range(40)
        for arm, share, shift in ((UNTOUCHED, 1.0, 0), (FOLDED, 0.9, 1))
    ]
    [found] = comparisons(rates)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.9 < found.high
    assert found.high - found.low < 0.2


# ---------------------------------------------------------------- the report


def a_report() -> Report:
    payload = Payload.of(preset_of("tiny"), 8)
    kept = [*samples("direct", 9, 4, 6, 5), *samples("stock-adapter", 9, 50, 60)]
    rates = (Rate(SLOT, 8, 100, 2.0), Rate(FOLDED, 8, 300, 2.0, syncs=1))
    return Report(
        name="bench",
        environment=environment(),
        settings={"rounds": 1},
        payload=payload,
        links=CPU_LINKS,
        samples=tuple(kept),
        summary=summarise(kept, CPU_LINKS, payload),
        generation=rates,
        comparisons=comparisons(rates),
        break_even=(
            break_even(adapter_ms=1, merged_ms=2, adapter_rate=50, merged_rate=150, streams=8, adapter="a", merged="m"),
        ),
        failures=(Failure.of("fold", ValueError("no")),),
        skipped={"gloo": "asked not to"},
    )


def assert_complete(kind, content):
    """Every field of a dataclass, and of those inside of it, is there."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        assert field.name in content
        if is_dataclass(hints[field.name]):
            assert_complete(hints[field.name], content[field.name])


def test_the_json_has_every_field_and_its_numbers_follow_from_the_samples():
    content = json.loads(json.dumps(a_report().to_dict()))
    assert_complete(Report, content)
    for item in content["summary"]:
        assert_complete(Summary, item)
        mine = [s["timed"]["total_ms"] for s in content["samples"] if s["way"] == item["way"] and not s["warmup"]]
        assert item["p50_ms"] == statistics.median(mine)
        assert item["samples"] == len(mine)
        assert_complete(Floor, item["floor"])
    for sample in content["samples"]:
        assert_complete(Sample, sample)
    for rate in content["generation"]:
        assert_complete(Rate, rate)
    assert [rate["tokens_per_second"] for rate in content["generation"]] == [50.0, 150.0]
    assert content["environment"]["packages"]["torch"] == torch.__version__
    assert content["failures"][0]["error"] == "ValueError: no"


def test_plots(tmp_path):
    written = plot_report(a_report(), tmp_path / "report")
    assert [path.name for path in written] == ["report.png", "report.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in written[1].read_text()

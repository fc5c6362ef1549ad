"""Commit on all, or on none, or on those that remain: every combination of what servers can do with a version."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from loraflow.errors import CommitError, LoadError, VerifyError
from loraflow.membership import Aside, Verdict, decide, difference
from loraflow.policy import Policy
from loraflow.records import Proof
from loraflow.server_info import LoraInfo, PluginInfo, ServerInfo

POLICY = Policy("run", 3)
GOOD = Verdict(proof=Proof("digest", passed=True))
UNPROVEN = Verdict(proof=Proof("unproven", passed=True))
REFUTED = Verdict(proof=Proof("canary", passed=False, detail="mean 0.3"))
FAILED = Verdict(error=LoadError("no such folder"))
UNASKED = Verdict()
KINDS = {"good": GOOD, "unproven": UNPROVEN, "refuted": REFUTED, "failed": FAILED, "unasked": UNASKED}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fail_moves_all_or_none(count: int) -> None:
    for kinds in itertools.product(KINDS, repeat=count):
        verdicts = {f"s{i}": KINDS[kind] for i, kind in enumerate(kinds)}
        decision = decide(POLICY, verdicts, "fail")
        assert decision.aside == {}
        if set(kinds) <= {"good", "unproven"}:
            assert (decision.serving, decision.error) == (tuple(verdicts), None)
        else:
            assert decision.serving == ()
            assert decision.error is not None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_quarantine_moves_those_that_proved_it_and_never_fewer_than_one(count: int) -> None:
    for kinds in itertools.product(KINDS, repeat=count):
        verdicts = {f"s{i}": KINDS[kind] for i, kind in enumerate(kinds)}
        able = tuple(url for url, kind in zip(verdicts, kinds, strict=True) if kind in {"good", "unproven"})
        decision = decide(POLICY, verdicts, "quarantine")
        assert decision.serving == able
        assert set(decision.aside) == (set(verdicts) - set(able) if able else set())
        assert (decision.error is None) == bool(able)


def test_what_is_reported() -> None:
    assert decide(POLICY, {"s0": FAILED}, "fail").error is FAILED.error
    refuted = decide(POLICY, {"s0": REFUTED, "s1": GOOD}, "fail").error
    assert isinstance(refuted, VerifyError)
    assert (refuted.server, "mean 0.3" in str(refuted)) == ("s0", True)
    mixed = decide(POLICY, {"s0": REFUTED, "s1": FAILED, "s2": GOOD}, "fail").error
    assert isinstance(mixed, CommitError)
    assert "2 of 3" in str(mixed)
    assert "no such folder" in str(mixed)
    assert "mean 0.3" in str(mixed)


def test_tries_are_spaced_out_up_to_a_minute() -> None:
    aside = Aside.now("gone", 100.0)
    waits = []
    now = 100.0
    for _ in range(10):
        assert not aside.due(aside.next_try - 0.01)
        waits.append(aside.next_try - now)
        now = aside.next_try
        assert aside.due(now)
        aside = aside.failed_again("still gone", now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert (aside.reason, aside.since, aside.tries) == ("still gone", 100.0, 10)


LORA = LoraInfo(16, 4, 8, None, "float32", runtime_loading=True)
INFO = ServerInfo(
    "http://a",
    "0.32.0",
    "m",
    "/models/m",
    architecture="Qwen2ForCausalLM",
    vocab_size=384,
    dtype="float32",
    lora=LORA,
    lora_known=True,
    logprobs_mode="processed_logprobs",
    plugin=PluginInfo("0.1", worker_extension=True, capabilities=frozenset({"digest"}), roots=(), status={}),
)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"url": "http://b", "instance": "x", "model_root": "/elsewhere/m", "vllm_version": "0.32.1"}, None),
        ({"architecture": "LlamaForCausalLM"}, "architecture"),
        ({"vocab_size": 500}, "vocab_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"quantization": "fp8"}, "quantization"),
        ({"weight_transfer": "gloo"}, "weight_transfer"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode"),
        ({"lora": None}, "without LoRA"),
        ({"lora": None, "lora_known": False, "dtype": None}, None),
        ({"lora": replace(LORA, max_rank=8)}, "max-lora-rank is 8"),
        ({"lora": replace(LORA, max_rank=32)}, None),
        ({"plugin": None}, "digest"),
    ],
)
def test_a_server_that_returns_must_fit(changes: dict, word: str | None) -> None:
    found = difference(INFO, replace(INFO, **changes))
    assert (found is None) == (word is None), found
    assert word is None or (found is not None and word in found)

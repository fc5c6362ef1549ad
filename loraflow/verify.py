"""Proof of delivery: what a server serves, compared with what the trainer computes (rule 4).

A probe is a fixed sequence of tokens, sampled once from the served base so that its tokens are likely ones. Three
questions are put with it:

- *fingerprint*, at start: is the server's base the trainer's? The trainer's forward runs with the adapter off.
- *canary*, at start: an adapter with a random, non-zero B must change what the server serves, and change it as it
  changes the trainer's; an adapter that loads and does nothing is seen here.
- *check*, after a load: are the served log-probs those of the trainer's forward?

What counts as equal comes from the noise floor: the fingerprint measures the gap between two implementations of one
model in the dtypes at hand.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loraflow.adapter import AdapterSnapshot
from loraflow.capture import SnapshotPlan, find_peft_model
from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError, VerifyError
from loraflow.ranks import Ranks
from loraflow.records import Proof
from loraflow.server import VLLMServer

__all__ = ["Expected", "Fingerprint", "Prover"]

# Mean |Δlogp| that two correct implementations may differ by, before anything is measured (nats).
_FLOOR = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.01}
# The same for the base fingerprint, where another model must be told apart from noise: another model is off by 0.2
# nats or more on tokens that the served one sampled itself.
_BASE_FLOOR = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
_QUANTISED_BASE_FLOOR = 0.5
_NOISE_MARGIN = 4.0  # a version may be off by so many times the noise that the fingerprint saw
_EFFECT_MARGIN = 5.0  # the canary must move log-probs by so many times what a version may be off by
_HEAD_POSITIONS = 8
_SHORTEST = 4  # tokens of a probe that are sampled, at least


@dataclass(frozen=True)
class Fingerprint:
    """The base on one server against the trainer's: mean and max |Δlogp| in nats, and what was allowed."""

    server: str
    mean_abs_dlogp: float
    max_abs_dlogp: float
    atol: float


@dataclass(frozen=True)
class Expected:
    """What the trainer's forward gives on the probe.

    Attributes:
        logprobs: Of ``tokens[1:]``, shape (T - 1,), float32, on the CPU.
        head: Log-softmax at the last `_HEAD_POSITIONS` positions, shape (P, vocabulary), where completions are
            compared instead of prompt log-probs; else None.
    """

    logprobs: torch.Tensor
    head: torch.Tensor | None = None


class Prover:
    """Asks the three questions for one model and its servers.

    Args:
        model: The trainer's PEFT model, wrapped as it is trained.
        config: Thresholds and sizes.
        ranks: The trainer's processes; every rank makes a `Prover` and calls its collective methods.
        head_adapted: The adapter targets ``lm_head``: vLLM's prompt log-probs leave its LoRA out (vllm#51594), so the
            log-probs of generated tokens are compared.
    """

    def __init__(self, model: nn.Module, config: SyncConfig, ranks: Ranks, *, head_adapted: bool = False) -> None:
        self.model = model
        self.config = config
        self.ranks = ranks
        self.head_adapted = head_adapted
        self.tokens: list[int] = []
        self.atol = config.logprob_atol or _FLOOR["bfloat16"]
        self.visible = _EFFECT_MARGIN * _FLOOR["bfloat16"]
        self._served_base: dict[str, torch.Tensor] = {}

    # ---------------------------------------------------------------- collective: every rank enters

    def choose_probe(self, server: VLLMServer | None) -> None:
        """Sample the probe from the served base (rank 0 gives the server), and tell every rank."""

        def sample() -> list[int]:
            assert server is not None  # noqa: S101 - rank 0 has one
            vocab = self._vocab_size()
            seedling = [(7919 * i + 11) % min(vocab, 1000) for i in range(4)]
            room = (server.info.max_model_len or 1 << 20) - len(seedling) - 1
            if room < _SHORTEST:
                raise CapabilityError(
                    f"a server of max_model_len={server.info.max_model_len} has no room for a probe of "
                    f"{len(seedling) + _SHORTEST} tokens",
                    server=server.url,
                    hint="start it with a larger --max-model-len",
                )
            wanted = min(self.config.verify_tokens - len(seedling), room)
            banned = {str(token): -100 for token in self._placeholder_tokens()}
            more: dict[str, Any] = {"logit_bias": banned} if banned else {}
            [completion] = server.generate(
                [seedling],
                model=server.info.model,
                max_tokens=wanted,
                temperature=1.0,
                seed=0,
                ignore_eos=True,
                cache_salt=_salt(),
                **more,
            )
            return [*seedling, *completion.token_ids]

        self.tokens = self.ranks.on_main(sample)

    def expect(self, *, adapter: bool = True, override: Mapping[str, torch.Tensor] | None = None) -> Expected:
        """The trainer's own log-probs on the probe. Collective on sharded models.

        Args:
            adapter: False switches the adapter off (the base).
            override: Values, by parameter name, to use instead of the model's; the model itself is not written.
        """
        ids = torch.tensor([self.tokens], device=next(self.model.parameters()).device)
        context = nullcontext() if adapter else _adapter_off(self.model)
        with torch.no_grad(), _evaluating(self.model), context:
            if override is None:
                logits = self.model(input_ids=ids, use_cache=False).logits
            else:
                logits = torch.func.functional_call(
                    self.model, dict(override), args=(), kwargs={"input_ids": ids, "use_cache": False}
                ).logits
            table = logits[0, :-1].float().log_softmax(-1)
            picked = table.gather(-1, ids[0, 1:, None])[:, 0].cpu()
            head = table[-_HEAD_POSITIONS:].cpu() if self.head_adapted else None
        if not bool(torch.isfinite(picked).all()):
            raise VerifyError(
                "the trainer's own forward gives log-probs that are not finite",
                hint="the policy has diverged (NaN or inf in its weights): resume from an earlier checkpoint",
            )
        return Expected(picked, head)

    def canary_override(self, snapshot: AdapterSnapshot) -> dict[str, torch.Tensor]:
        """``snapshot``'s values by parameter name of the live model, for `expect`; raises where it is sharded."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        plan = SnapshotPlan.of(self.model)
        return {
            names[id(entry.parameter())]: snapshot.tensors[entry.name].to(
                device=entry.parameter().device, dtype=entry.parameter().dtype
            )
            for entry in plan.entries
        }

    # ---------------------------------------------------------------- rank 0

    def fingerprint(self, servers: Sequence[VLLMServer], base: Expected) -> list[Fingerprint]:
        """Compare every server's base with the trainer's, and set what a version may be off by.

        Raises:
            VerifyError: A server serves another base model.
        """
        prints = []
        for server in servers:
            served = torch.tensor(server.prompt_logprobs(self.tokens, model=server.info.model, cache_salt=_salt()))
            self._served_base[server.url] = served
            gap = (served - base.logprobs).abs()
            found = Fingerprint(server.url, float(gap.mean()), float(gap.max()), self._base_atol(server))
            if not found.mean_abs_dlogp <= found.atol:
                raise VerifyError(
                    "the server's base model is not the trainer's: mean |Δlogp| on the probe",
                    server=server.url,
                    expected=f"≤ {found.atol:.3g}",
                    found=f"{found.mean_abs_dlogp:.3g}",
                    hint=(
                        f"it serves {server.info.model_root!r}: the same checkpoint, unmerged and unchanged? "
                        "base_atol widens the limit (a quantised trainer needs it)"
                    ),
                )
            prints.append(found)
        noise = max(p.mean_abs_dlogp for p in prints)
        floor = max(_floor(_FLOOR, server.info.dtype, self._trainer_dtype()) for server in servers)
        self.atol = self.config.logprob_atol or max(floor, _NOISE_MARGIN * noise)
        self.visible = _EFFECT_MARGIN * floor
        return prints

    def check(self, server: VLLMServer, model: str, expected: Expected | Callable[[], Expected]) -> Proof:
        """Ask ``server`` for the probe under the name ``model``, and compare; never raises for a mismatch.

        Args:
            server: Where.
            model: What to ask for.
            expected: The trainer's forward, or what waits for it: called once the server has answered.
        """
        compare = self._head_gap(server, model) if self.head_adapted else self._gap(server, model)
        gap = compare(expected() if callable(expected) else expected)
        mean, largest = float(gap.mean()), float(gap.max())
        passed = mean <= self.atol  # False for NaN
        detail = "" if passed else f"mean |Δlogp| {mean:.3g} on the probe is above {self.atol:.3g}"
        return Proof("canary", passed, mean, largest, self.atol, detail)

    def effect(self, expected: Expected, base: Expected) -> float:
        """Mean |Δlogp| that an adapter makes on the probe, nats; from ``visible`` on a server's answer must show it."""
        return float((expected.logprobs - base.logprobs).abs().mean())

    def proves_itself(self, expected: Expected, base: Expected) -> bool:
        """Whether a version's own effect stands so clear of the noise that its check needs no canary beside it."""
        return self.effect(expected, base) >= _EFFECT_MARGIN * self.atol

    def moves(self, server: VLLMServer, model: str, base: Expected) -> Proof:
        """Whether ``model`` is served otherwise than the base on the same server; never raises for a mismatch.

        Server against server: a quantised trainer is far from both, and says nothing about that.
        """
        if base.head is not None or server.url not in self._served_base:
            against_base = self.check(server, model, base)
            return replace(against_base, passed=not against_base.passed)
        served = torch.tensor(server.prompt_logprobs(self.tokens, model=model, cache_salt=_salt()))
        gap = (served - self._served_base[server.url]).abs()
        mean, wanted = float(gap.mean()), self.visible / 2
        return Proof("canary", mean >= wanted, mean, float(gap.max()), wanted)

    # ---------------------------------------------------------------- inside

    def _gap(self, server: VLLMServer, model: str) -> Callable[[Expected], torch.Tensor]:
        served = torch.tensor(server.prompt_logprobs(self.tokens, model=model, cache_salt=_salt()))
        return lambda expected: (served - expected.logprobs).abs()

    def _head_gap(self, server: VLLMServer, model: str) -> Callable[[Expected], torch.Tensor]:
        count = min(_HEAD_POSITIONS, len(self.tokens) - 1)
        prompts = [self.tokens[: len(self.tokens) - count + i] for i in range(count)]
        answers = server.generate(prompts, model=model, max_tokens=1, temperature=1.0, seed=0, cache_salt=_salt())

        def gap(expected: Expected) -> torch.Tensor:
            table = expected.head
            assert table is not None  # noqa: S101 - `expect` makes it for such an adapter
            return torch.tensor([abs(a.logprobs[0] - float(table[a.prompt, a.token_ids[0]])) for a in answers])

        return gap

    def _base_atol(self, server: VLLMServer) -> float:
        if self.config.base_atol is not None:
            return self.config.base_atol
        if server.info.quantization or getattr(find_peft_model(self.model).get_base_model(), "is_quantized", False):
            return _QUANTISED_BASE_FLOOR
        return _floor(_BASE_FLOOR, server.info.dtype, self._trainer_dtype())

    def _trainer_dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def _vocab_size(self) -> int:
        config = find_peft_model(self.model).get_base_model().config
        return int(config.get_text_config().vocab_size)

    def _placeholder_tokens(self) -> list[int]:
        config: Any = find_peft_model(self.model).get_base_model().config
        names = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "vision_end_token_id")
        return [token for name in names if isinstance(token := getattr(config, name, None), int)]


def _floor(table: Mapping[str, float], *dtypes: str | None) -> float:
    return max(table.get(dtype or "bfloat16", table["bfloat16"]) for dtype in dtypes)


def _salt() -> str:
    return secrets.token_hex(8)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is as it was, one by one.

    Layers of bitsandbytes stay as they are: in evaluation mode on a CPU they repack their 4-bit weights for inference,
    and cannot be trained through any more.
    """
    training = [m for m in model.modules() if m.training and not type(m).__module__.startswith("bitsandbytes.")]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _adapter_off(model: nn.Module) -> Iterator[None]:
    """The adapter off inside. PEFT sets ``requires_grad`` when it switches back on; it is put back as it was."""
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with find_peft_model(model).disable_adapter():
            yield
    finally:
        for parameter, wanted in grads:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)

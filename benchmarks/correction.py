"""What the off-policy correction costs, beside the part of a training step that no trainer can do without.

    python benchmarks/correction.py [--device cpu|cuda] [--batch 64] [--tokens 4096] [--out report.json]

The target is 1 % of a training step at (64, 4096). A training step is judged from below: the reference is nothing
but the forward and backward pass of one LM head over the same tokens, the log-probs of the sampled ones included
(hidden 1536, vocabulary 151,936, as in a 1.5 B Qwen2.5; bfloat16 on CUDA, float32 on a CPU). A real step adds every
layer of the model, the optimizer and the generation, so a share of the reference below 1 % holds for any real step.
On a CPU, where the whole reference would take an hour, it is timed on ``--reference-tokens`` tokens and scaled: its
work is linear in the tokens.

On CUDA the timed calls run under ``torch.cuda.set_sync_debug_mode("error")``: a copy to the host would raise.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loraflow.correction import CorrectionOptions, correct

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, VOCABULARY = 1536, 151_936


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample_ms(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        samples.append(1e3 * (time.perf_counter() - start))
    return samples


def summary(samples: list[float]) -> dict[str, object]:
    ordered = sorted(samples)
    return {"p50": statistics.median(ordered), "p90": ordered[int(0.9 * (len(ordered) - 1))], "samples": samples}


def reference_ms(tokens: int, device: torch.device, repeats: int) -> list[float]:
    """Forward and backward of the LM head and the log-probs, in chunks of 1,024 tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = (0.02 * torch.randn(VOCABULARY, HIDDEN, device=device)).to(dtype).requires_grad_()
    hidden = torch.randn(min(tokens, 1024), HIDDEN, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCABULARY, (hidden.shape[0],), device=device)

    def step() -> None:
        for _ in range(max(tokens // hidden.shape[0], 1)):
            torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels).backward()

    step()
    return sample_ms(step, device, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--reference-tokens", type=int, help="default: all on CUDA, 1024 on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    shape = (args.batch, args.tokens)
    total = args.batch * args.tokens

    timed_tokens = args.reference_tokens or (total if device.type == "cuda" else 1024)
    scale = total / timed_tokens
    reference = [ms * scale for ms in reference_ms(timed_tokens, device, 3)]
    reference_p50 = statistics.median(reference)

    torch.manual_seed(0)
    trainer = -torch.rand(shape, device=device) * 3
    rollout = trainer + 0.05 * torch.randn(shape, device=device)
    lengths = torch.randint(args.tokens // 4, args.tokens + 1, (args.batch, 1), device=device)
    mask = torch.arange(args.tokens, device=device) < lengths
    advantages = torch.randn(args.batch, device=device)
    versions = torch.randint(5, (args.batch,), device=device)

    rows = []
    for level, mode in product(("token", "sequence", "geometric"), ("truncate", "mask")):
        options = CorrectionOptions(level, mode, 0.5, 2.0, off_policy_mask_threshold=0.1, max_staleness=4)  # type: ignore[arg-type]

        def call(options: CorrectionOptions = options) -> object:
            return correct(
                trainer, rollout, mask, options=options, advantages=advantages, versions=versions, current_version=4
            )

        call()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        found = call()
        correction = sample_ms(call, device, args.repeats)
        metrics = sample_ms(found.metrics, device, args.repeats)  # type: ignore[attr-defined]
        share = statistics.median(correction) / reference_p50
        rows.append(
            {
                "options": asdict(options),
                "correct_ms": summary(correction),
                "metrics_ms": summary(metrics),
                "share_of_reference": share,
            }
        )
        print(
            f"{level + '_' + mode:20} correct {statistics.median(correction):8.2f} ms   "
            f"metrics {statistics.median(metrics):6.2f} ms   {100 * share:7.4f} % of the reference"
        )
    print(f"reference: {reference_p50:.0f} ms for {total} tokens (timed on {timed_tokens}, times {scale:g})")

    report = {
        "benchmark": "correction",
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "shape": shape,
        "reference": {
            "what": f"forward and backward of one LM head, {HIDDEN} x {VOCABULARY}",
            "timed_tokens": timed_tokens,
            "scaled_by": scale,
            "ms": summary(reference),
        },
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

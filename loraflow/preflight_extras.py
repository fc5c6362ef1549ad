"""The part of preflight that looks at what stands beside the low-rank matrices: DoRA's magnitudes, biases, whole
modules, token rows. What the configuration announces is there, and what is there was announced.

PEFT makes up what a file lacks from the base, and leaves out what the configuration does not name, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loraflow.problems import Problem

if TYPE_CHECKING:
    from loraflow.basemodel import BaseShapes
    from loraflow.names import TensorName

__all__ = ["check_extras", "some"]


def check_extras(
    config: Mapping[str, Any],
    tensors: Sequence[TensorName],
    shapes: Mapping[str, tuple[int, ...]],
    base: BaseShapes,
) -> list[Problem]:
    """Compare the tensors beside the low-rank matrices with the configuration.

    Args:
        config: A checked ``adapter_config.json``.
        tensors: Those that the base has a place for.
        shapes: Their shapes by name, in the same order.
        base: The base model.
    """
    adapted = {t.module for t in tensors if t.is_lora}
    linear = {m for m in adapted if base.kinds.get(m) != "embedding"}
    return [
        *_announced(config, "use_dora", "DoRA's magnitudes", adapted, _modules_with(tensors, "lora_magnitude_vector")),
        *_announced(config, "lora_bias", "biases of B", linear, _modules_with(tensors, "lora_bias")),
        *_check_biases(config, tensors, adapted, base),
        *_check_saved(config, tensors, base),
        *_check_tokens(config, tensors, shapes, base),
    ]


def _modules_with(tensors: Sequence[TensorName], kind: str) -> set[str]:
    return {t.module for t in tensors if t.kind == kind}


def _announced(config: Mapping[str, Any], option: str, what: str, wanted: set[str], have: set[str]) -> list[Problem]:
    """Every module of ``wanted`` has its tensor where ``option`` is set, and none has one where it is not."""
    if not config.get(option):
        return [Problem("bad_config", f"the file holds {what}, but {option} is not set")] if have else []
    missing = sorted(wanted - have)
    return [Problem("incomplete", f"{option}, but no {what} for {some(missing)}")] if missing else []


def _check_biases(
    config: Mapping[str, Any], tensors: Sequence[TensorName], adapted: set[str], base: BaseShapes
) -> list[Problem]:
    option = config.get("bias", "none")
    if option == "none":
        return []
    saved = {t.module for t in tensors if t.leaf == "bias" and t.kind in {"full", "base_bias"}}
    owners = {name.rpartition(".")[0] for name in base.parameters if name.endswith(".bias")}
    missing = sorted((owners if option == "all" else owners & adapted) - saved)
    return [Problem("incomplete", f"bias is {option!r}, but none for {some(missing)}")] if missing else []


def _check_saved(config: Mapping[str, Any], tensors: Sequence[TensorName], base: BaseShapes) -> list[Problem]:
    problems = []
    saved = {f"{t.module}.{t.leaf}" for t in tensors if t.kind == "full"}
    for module in config.get("modules_to_save") or ():
        pattern = re.compile(rf"(^|.*\.){re.escape(module)}\.")
        absent = [p for p in base.parameters if pattern.match(p) and p not in saved]
        if absent:
            problems.append(Problem("incomplete", f"modules_to_save has {module}, but {some(absent)} is not there"))
    return problems


def _check_tokens(
    config: Mapping[str, Any],
    tensors: Sequence[TensorName],
    shapes: Mapping[str, tuple[int, ...]],
    base: BaseShapes,
) -> list[Problem]:
    """As many rows as tokens, each of a token that there is."""
    option = config.get("trainable_token_indices")
    if not option:
        return []
    deltas = {t.module: (name, shapes[name]) for name, t in zip(shapes, tensors, strict=True) if _is_rows(t)}
    by_module = option if isinstance(option, dict) else dict.fromkeys(deltas, option)
    problems = []
    if not deltas:
        problems.append(Problem("incomplete", "trainable_token_indices, but no rows of tokens"))
    for key, tokens in by_module.items():
        for module, (name, shape) in deltas.items():
            if module != key and not module.endswith(f".{key}"):
                continue
            vocabulary = base.modules[module][1]
            if shape[:1] != (len(tokens),):
                problems.append(Problem("bad_shape", f"{shape[0]} rows for {len(tokens)} tokens", name))
            if tokens and max(tokens) >= vocabulary:
                problems.append(Problem("bad_config", f"token {max(tokens)} of {vocabulary} in {module}", name))
    return problems


def _is_rows(tensor: TensorName) -> bool:
    return tensor.kind == "trainable_tokens"


def some(names: Sequence[str]) -> str:
    """The first few of ``names``."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")

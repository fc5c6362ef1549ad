"""The part of preflight that compares names, shapes and ranks with the base model: pure functions on shapes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from peft.tuners.tuners_utils import check_target_module_exists

from loraflow.names import PEFT_PREFIX, TensorName, parse, strip_wrappers
from loraflow.peft_config import rank_of
from loraflow.preflight_extras import check_extras, some
from loraflow.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from loraflow.basemodel import BaseShapes

__all__ = ["check_shapes"]

_LAYER = re.compile(r"(?P<stack>.*?)\.(?P<index>\d+)\.")


def check_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], base: BaseShapes) -> list[Problem]:
    """Every tensor against the base: full name, partner, shape, rank; then whether all targets are there.

    Args:
        config: A checked ``adapter_config.json``.
        shapes: Tensor name -> shape.
        base: The base model.
    """
    problems: list[Problem] = []
    known: dict[str, TensorName] = {}
    wrapped = _wrapped_parameters(config, base)
    for name, shape in shapes.items():
        parts = parse(name)
        if 0 in shape:
            problems.append(Problem("empty_tensor", f"shape {shape} holds nothing: an ungathered shard", name))
        elif parts is not None and parts.module in wrapped and parts.kind in {"lora_A", "lora_B"}:
            known[name] = parts
            problems += _check_wrapped(name, parts, shape, config, wrapped[parts.module], base)
        elif parts is None or not _is_known(parts, config, base):
            problems.append(Problem("unknown_module", _explain_unknown(name, parts, base), name))
        else:
            known[name] = parts
            problem = _check_tensor(name, parts, shape, config, base)
            if problem is not None:
                problems.append(problem)
    problems += _check_pairs(shapes)
    problems += _check_targets(config, known.values(), base, set(wrapped))
    problems += check_extras(config, list(known.values()), {name: shapes[name] for name in known}, base)
    if not shapes:
        problems.append(Problem("incomplete", "the file holds no tensors"))
    problems += _other_base(known, problems, base)
    return problems


def _is_known(parts: TensorName, config: Mapping[str, Any], base: BaseShapes) -> bool:
    """Whether the base has the place where this tensor goes, and the configuration puts a tensor there."""
    if parts.is_lora or parts.kind in {"lora_magnitude_vector", "lora_bias"}:
        embedding = base.kinds.get(parts.module) == "embedding"
        return parts.module in base.modules and embedding == (
            parts.kind.startswith("lora_embedding") or (embedding and parts.kind == "lora_magnitude_vector")
        )
    if parts.kind == "base_weight":
        return parts.module in {base.output_embedding} | {n for n, k in base.kinds.items() if k == "embedding"}
    if parts.kind == "trainable_tokens":
        return base.kinds.get(parts.module) == "embedding" and bool(config.get("trainable_token_indices"))
    parameter = f"{parts.module}.{parts.leaf}"
    if parameter not in base.parameters:
        return False
    if parts.leaf == "bias" and config.get("bias", "none") != "none":
        return True
    return _is_saved(parts.module, config) or (
        parts.module == base.output_embedding
        and _ties(config, base)
        and any(_is_saved(name, config) for name, kind in base.kinds.items() if kind == "embedding")
    )


def _is_saved(module: str, config: Mapping[str, Any]) -> bool:
    """Whether ``modules_to_save`` names ``module``, or one around it, by PEFT's own matching."""
    return any(re.match(rf"(^|.*\.){re.escape(m)}($|\..*)", module) for m in config.get("modules_to_save") or ())


def _ties(config: Mapping[str, Any], base: BaseShapes) -> bool:
    """Whether PEFT gives the head what it gives the embedding."""
    return base.tied and bool(config.get("ensure_weight_tying"))


def _check_tensor(
    name: str, parts: TensorName, shape: tuple[int, ...], config: Mapping[str, Any], base: BaseShapes
) -> Problem | None:
    if parts.kind in {"full", "base_bias", "base_weight"}:
        expected = base.parameters.get(f"{parts.module}.{parts.leaf}")
        return None if shape == expected else _bad_shape(name, shape, expected)
    out, inner = base.modules[parts.module]
    if parts.kind == "trainable_tokens":
        return None if len(shape) == 2 and shape[1] == out else _bad_shape(name, shape, ("tokens", out))
    if parts.kind in {"lora_magnitude_vector", "lora_bias"}:
        wide = base.kinds[parts.module] == "conv" and parts.kind == "lora_magnitude_vector"
        return None if shape == (out,) or (wide and shape[:2] == (1, out)) else _bad_shape(name, shape, (out,))
    rank = rank_of(config, parts.module)
    first = parts.kind.endswith("_A")
    width, found_width, found_rank = (inner, shape[1:2], shape[:1]) if first else (out, shape[:1], shape[1:2])
    dimensions = shape[2:] == () or base.kinds[parts.module] == "conv"
    if len(shape) < 2 or found_width != (width,) or not dimensions:
        return _bad_shape(name, shape, (rank, inner) if first else (out, rank))
    if found_rank != (rank,):
        return Problem("rank_mismatch", f"rank {found_rank[0]} in the file, {rank} in adapter_config.json", name)
    return None


def _bad_shape(name: str, shape: tuple[int, ...], expected: tuple[Any, ...] | None) -> Problem:
    return Problem("bad_shape", f"shape {shape}, the base model needs {expected}", name)


def _wrapped_parameters(config: Mapping[str, Any], base: BaseShapes) -> dict[str, str]:
    """Module in the file -> the parameter that ``target_parameters`` adapts there, by PEFT's own matching.

    Several parameters of one module are wrapped one in the other, the first of them innermost.
    """
    keys = config.get("target_parameters") or ()
    by_owner: dict[str, list[str]] = {}
    for name in base.parameters:
        if any(name == key or name.endswith(f".{key}") for key in keys):
            by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        owner + ".base_layer" * (len(parameters) - 1 - i): parameter
        for owner, parameters in by_owner.items()
        for i, parameter in enumerate(parameters)
    }


def _check_wrapped(
    name: str,
    parts: TensorName,
    shape: tuple[int, ...],
    config: Mapping[str, Any],
    parameter: str,
    base: BaseShapes,
) -> list[Problem]:
    """``target_parameters``: A is (experts·r, in), B is (out, r·experts); which side is which differs by model."""
    whole = base.parameters[parameter]
    rank = rank_of(config, parameter) * (whole[0] if len(whole) == 3 else 1)
    width, found = (shape[1:2], shape[:1]) if parts.kind == "lora_A" else (shape[:1], shape[1:2])
    if len(shape) != 2 or width[0] not in whole[-2:]:
        return [_bad_shape(name, shape, (rank, whole[-1]) if parts.kind == "lora_A" else (whole[-2], rank))]
    if found != (rank,):
        return [Problem("rank_mismatch", f"rank {found[0]} in the file, {rank} in adapter_config.json", name)]
    return []


def _check_pairs(shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    problems = []
    for name in shapes:
        partner = (
            re.sub(r"\.(lora|lora_embedding)_A(\.weight)?$", r".\1_B\2", name)
            if re.search(r"_A(\.weight)?$", name)
            else re.sub(r"\.(lora|lora_embedding)_B(\.weight)?$", r".\1_A\2", name)
        )
        if partner != name and partner not in shapes:
            problems.append(Problem("missing_pair", f"its partner {partner} is not there", name))
    return problems


def _check_targets(
    config: Mapping[str, Any], tensors: Iterable[TensorName], base: BaseShapes, wrapped: set[str]
) -> list[Problem]:
    """Modules that the configuration targets but the file lacks, and the reverse.

    PEFT would make up the first (random A, zero B) and ignore the second, which vLLM would serve.
    """
    have = {t.module for t in tensors if t.is_lora}
    problems = []
    if not config.get("layer_replication"):
        wanted = _targets(config, base) | wrapped
        missing = sorted(wanted - have)
        if missing:
            problems.append(Problem("incomplete", f"{len(missing)} targeted modules have no tensors: {some(missing)}"))
        extra = sorted(m for m in have - wanted if m in base.modules)
        if extra:
            message = f"{len(extra)} modules have tensors, but target_modules leaves them out: {some(extra)}"
            problems.append(Problem("bad_config", message))
    return problems


def _targets(config: Mapping[str, Any], base: BaseShapes) -> set[str]:
    """The modules that PEFT would give an adapter, by PEFT's own matching."""
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return {n for n, k in base.kinds.items() if k in {"linear", "conv1d"} and n != base.output_embedding}
    keys = ("exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "target_parameters")
    matching = SimpleNamespace(target_modules=targets, **{key: config.get(key) for key in keys})
    found = ((name, check_target_module_exists(matching, name)) for name in base.modules)
    wanted = {name for name, match in found if match}
    if _ties(config, base) and base.output_embedding and any(base.kinds[name] == "embedding" for name in wanted):
        wanted.add(base.output_embedding)
    return wanted


def _other_base(known: Mapping[str, TensorName], problems: list[Problem], base: BaseShapes) -> list[Problem]:
    """Most tensors of the wrong width are not damage: the adapter is another model's."""
    wrong = sum(problem.code == "bad_shape" for problem in problems)
    if not known or wrong < 2 or wrong * 2 < len(known):
        return []
    message = f"{wrong} of {len(known)} tensors do not fit {base.architecture}: the adapter is of another base model"
    return [Problem("base_mismatch", message)]


def _explain_unknown(name: str, parts: TensorName | None, base: BaseShapes) -> str:
    """Why the base has no place for ``name``, and the name that it may have meant."""
    cleaned = strip_wrappers(name)
    if cleaned != name:
        return f"a wrapper's segment is left in the name; without it: {cleaned}"
    if ".base_layer.lora_" in name:
        return f"the wrapped layer's own name is left in; without it: {name.replace('.base_layer.lora_', '.lora_')}"
    unnamed = re.sub(r"\.(?:(lora_[AB])\.[^.]+(\.weight)|(lora_embedding_[AB])\.[^.]+)$", r".\1\3\2", name)
    if unnamed != name:
        return f"the adapter's own name is left in; without it: {unnamed}"
    if parts is None:
        begins = name.startswith(PEFT_PREFIX)
        return "no tensor has such a name" if begins else f"the name does not begin with {PEFT_PREFIX}"
    module = parts.module
    if module in base.modules:
        return (
            f"{module} is of kind {base.kinds[module]}; {parts.kind} has no place there, or the config does not say so"
        )
    layer = _LAYER.match(module)
    if layer is not None:
        stack = layer["stack"] + "."
        layers = {m[len(stack) :].split(".")[0] for m in base.modules if m.startswith(stack)}
        if layers and layer["index"] not in layers:
            return f"{base.architecture} has {len(layers)} layers in {layer['stack']}, no layer {layer['index']}"
    alike = [m for m in base.modules if _tail(m) == _tail(module)]
    hint = f"; alike: {alike[0]}" if alike else ""
    return f"{base.architecture} has no module {module}{hint}"


def _tail(module: str) -> str:
    """The name from the layer's number on, or its last part."""
    match = re.search(r"\d+\..*$", module)
    return match.group() if match else module.rpartition(".")[2]

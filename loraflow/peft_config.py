"""PEFT's LoRA configuration as data: its JSON form, its features, and the ranks and scalings that it means."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from peft import LoraConfig

from loraflow.names import WRAPPER_SEGMENTS, parse, strip_wrappers
from loraflow.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peft import PeftModel

__all__ = [
    "beside_language_model",
    "check_config",
    "config_features",
    "is_multimodal",
    "is_tied",
    "largest_rank",
    "live_config",
    "rank_of",
    "scaling_of",
    "shape_features",
]

_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Values of ``init_lora_weights`` that only set the first A and B; others (PiSSA, OLoRA, CorDA, LoftQ) change the base
when PEFT makes or loads the adapter. Read in PEFT 0.21 and vLLM 0.32."""

_PLAIN_WHEN_LOADED = frozenset({"lora_ga"})
"""Those that change the base of the model that the adapter is made for, and leave alone the one it is loaded on."""

_HEADS = frozenset({"lm_head", "embed_out"})
_EMBEDDINGS = frozenset({"embed_tokens", "embed_in", "wte", "word_embeddings"})

_LANGUAGE = re.compile(
    r"(^|\.)(language_model|text_model|lm_head)(\.|$)|^(thinker\.)?model\.(layers|embed_tokens)(\.|$)"
)
"""Modules of a multimodal model that make up its language model; the rest is towers and connectors."""

_VARIANTS = ("use_qalora", "use_bdlora", "velora_config", "monteclora_config", "arrow_config", "kasa_config")
"""Options whose forward is not ``W + s·B·A``."""

_LARGEST = 2**127  # a factor that float32 holds
_KNOWN_FLAGS = frozenset({"use_rslora", "use_dora", "use_qalora", "use_bdlora"})


def check_config(config: Mapping[str, Any]) -> list[Problem]:
    """`bad_config` for each value that PEFT or a server would misread."""
    kind = config.get("peft_type")
    problems = [] if kind == "LORA" else [f"peft_type is {kind!r}, expected 'LORA'"]
    for key, (accepts, expected) in _VALUES.items():
        if not accepts(config.get(key)):
            problems.append(f"{key} is {config.get(key)!r}, expected {expected}")
    if config.get("target_modules") is None and not config.get("target_parameters"):
        problems.append("target_modules is not there")
    if "bias" in config and config["bias"] is None:
        problems.append("bias is None, expected 'none', 'all' or 'lora_only'")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key)
        bad = [p for p in patterns if not _is_regex(p)] if isinstance(patterns, dict) else []
        problems += [f"{key} has {pattern!r}, which is not a regular expression" for pattern in bad]
    targets = config.get("target_modules")
    if isinstance(targets, str) and not _is_regex(targets):
        problems.append(f"target_modules is {targets!r}, which is not a regular expression")
    return [Problem("bad_config", message) for message in problems or _refused_by_peft(config)]


def _refused_by_peft(config: Mapping[str, Any]) -> list[str]:
    """What PEFT itself says of a configuration that it does not take: options that exclude each other, and the like."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)} - {"peft_type", "runtime_config"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LoraConfig(**{name: value for name, value in config.items() if name in fields})
    except ImportError:
        return []  # a package that only training needs
    except (TypeError, ValueError) as error:
        return [f"PEFT refuses it: {error}"]
    return []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < abs(value) < _LARGEST


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, str) and v for v in value))


def _is_names_or_pattern(value: Any) -> bool:
    return _is_names(value) or (isinstance(value, str) and value != "")


def _is_rows(value: Any) -> bool:
    listed = value.values() if isinstance(value, dict) else [value]
    return value is None or all(
        isinstance(rows, list)
        and all(isinstance(row, int) and not isinstance(row, bool) and row >= 0 for row in rows)
        and len(set(rows)) == len(rows)
        for rows in listed
    )


def _is_layers(value: Any) -> bool:
    layers = value if isinstance(value, list) else [value]
    return value is None or all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in layers)


def _is_patterns(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, dict) and all(accepts(v) for v in value.values()))


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_count, "a positive whole number"),
    "lora_alpha": (_is_factor, "a finite number other than 0"),
    "target_modules": (_is_names_or_pattern, "a list of names or a pattern"),
    "exclude_modules": (_is_names_or_pattern, "a list of names or a pattern"),
    "modules_to_save": (_is_names, "a list of names"),
    "target_parameters": (_is_names, "a list of names"),
    "layers_to_transform": (_is_layers, "layer numbers"),
    "layers_pattern": (_is_names_or_pattern, "a list of names or a name"),
    "rank_pattern": (_is_patterns(_is_count), "patterns with positive whole numbers"),
    "alpha_pattern": (_is_patterns(_is_factor), "patterns with finite numbers other than 0"),
    "trainable_token_indices": (_is_rows, "token numbers, each once, or lists of them by module"),
    "bias": (lambda value: value in (None, "none", "all", "lora_only"), "'none', 'all' or 'lora_only'"),
    "init_lora_weights": (lambda value: value is None or isinstance(value, bool | str), "a flag or a name"),
    "base_model_name_or_path": (lambda value: value is None or isinstance(value, str), "a name or a path"),
    "use_rslora": (_is_flag, "true or false"),
    "use_dora": (_is_flag, "true or false"),
    "lora_bias": (_is_flag, "true or false"),
    "fan_in_fan_out": (_is_flag, "true or false"),
}
"""Options whose values are checked: a test for each, and what it expects."""


def config_features(config: Mapping[str, Any], *, live: bool = False) -> set[str]:
    """The features (see `AdapterSpec`) that a configuration asks for; ``live``: of a model, not of files."""
    init = config.get("init_lora_weights", True)
    plain = _PLAIN_INITS if live else _PLAIN_INITS | _PLAIN_WHEN_LOADED
    asked = {
        "dora": config.get("use_dora"),
        "bias": config.get("bias", "none") not in (None, "none"),
        "modules_to_save": config.get("modules_to_save"),
        "rslora": config.get("use_rslora"),
        "rank_pattern": config.get("rank_pattern"),
        "alpha_pattern": config.get("alpha_pattern"),
        "target_parameters": config.get("target_parameters"),
        "lora_bias": config.get("lora_bias"),
        "alora": config.get("alora_invocation_tokens"),
        "layer_replication": config.get("layer_replication"),
        "trainable_tokens": config.get("trainable_token_indices"),
        "conv1d": config.get("fan_in_fan_out"),
        "init_changes_base": isinstance(init, str) and init.lower() not in plain,
        "variant": any(config.get(option) for option in (*_VARIANTS, *_unknown_flags(config))),
    }
    return {feature for feature, wanted in asked.items() if wanted}


def _unknown_flags(config: Mapping[str, Any]) -> list[str]:
    """Names like that of ``use_dora`` that are none of those known: what a newer PEFT calls its variants of LoRA."""
    return [option for option in config if option.startswith("use_") and option not in _KNOWN_FLAGS]


def largest_rank(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The largest rank of the matrices in ``shapes``, or that ``config`` names."""
    pattern = config.get("rank_pattern")
    named = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    stacked = bool(config.get("target_parameters"))  # there A holds the rows of all experts
    found = [s[0] for n, s in shapes.items() if n.endswith((".lora_A.weight", ".lora_embedding_A")) and len(s) > 1]
    return max([rank for rank in named if isinstance(rank, int)] + ([] if stacked else found), default=0)


def shape_features(shapes: Mapping[str, tuple[int, ...]], base_config: Mapping[str, Any]) -> set[str]:
    """The features that the tensors themselves show: convolutions, embeddings, the head, towers, tied targets."""
    found: set[str] = set()
    shared = False
    for name, shape in shapes.items():
        if (parts := parse(name)) is None:
            continue
        if parts.is_lora and len(shape) > 2:
            found.add("conv")
        end = parts.module.rpartition(".")[2]
        if parts.kind.startswith("lora_embedding"):
            found.add("lora_embedding")
        if parts.is_lora and end in _HEADS:
            found.add("lm_head")
        shared |= end in _HEADS | _EMBEDDINGS and (parts.is_lora or (parts.kind, parts.leaf) == ("full", "weight"))
    if is_multimodal(base_config) and beside_language_model(shapes):
        found.add("tower")
    return found | {"tied_target"} if shared and is_tied(base_config) else found


def is_multimodal(base_config: Mapping[str, Any]) -> bool:
    """Whether the base wraps a language model together with towers for images, video or sound."""
    return any(isinstance(base_config.get(key), dict) for key in ("text_config", "thinker_config"))


def beside_language_model(shapes: Mapping[str, Any]) -> list[str]:
    """Adapted modules of a multimodal model that belong to a tower or connector, sorted.

    Args:
        shapes: Tensor name -> anything.
    """
    modules = {parts.module for parts in map(parse, shapes) if parts is not None and parts.is_lora}
    return sorted(module for module in modules if not _LANGUAGE.search(module))


def is_tied(base_config: Mapping[str, Any]) -> bool:
    """Whether the base's input and output embedding are one tensor; where its config is silent, its class says so."""
    for config in (base_config, base_config.get("text_config")):
        said = config.get("tie_word_embeddings") if isinstance(config, dict) else None
        if said is not None:
            return bool(said)
    return _tied_by_default(str(base_config.get("model_type")))


@cache
def _tied_by_default(model_type: str) -> bool:
    """What a config of ``model_type`` means that leaves it out, as saved ones do with their class's default."""
    from transformers import CONFIG_MAPPING

    try:
        return bool(CONFIG_MAPPING[model_type]().tie_word_embeddings)
    except Exception:  # noqa: BLE001 - a class that is not known, or cannot be made of its defaults
        return False


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """The rank that PEFT gives ``module``: the first key of ``rank_pattern`` that matches, else ``r``."""
    return int(_pattern(config.get("rank_pattern"), module, config["r"]))


def scaling_of(config: Mapping[str, Any], module: str) -> float:
    """alpha/r, or alpha/√r with rsLoRA (arXiv 2312.03732), with both patterns resolved for ``module``."""
    rank = rank_of(config, module)
    alpha = float(_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's ``get_pattern_key``: a key is a regular expression for the end of the name, from a dot on."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def live_config(
    model: PeftModel, adapter: str, shapes: Mapping[str, tuple[int, ...]], scalings: Mapping[str, float]
) -> dict[str, Any]:
    """What ``save_pretrained`` would write to ``adapter_config.json``, in JSON types, free of wrapper segments.

    Where an option names a wrapper (a layer was compiled before PEFT saw it), it is replaced by what PEFT made of it:
    the list of the modules that carry the adapter, and their ranks and alphas by full name.

    Args:
        model: The live model.
        adapter: Its active adapter.
        shapes: Tensor name -> shape.
        scalings: Module -> scaling.
    """
    peft_config = model.peft_config[adapter]
    config: dict[str, Any] = {key: _jsonable(value) for key, value in peft_config.to_dict().items()}
    base = model.get_base_model()
    config["inference_mode"] = True
    config["base_model_name_or_path"] = peft_config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    if peft_config.task_type is None:
        base_class = getattr(base, "_orig_mod", base).__class__
        config["auto_mapping"] = {"base_model_class": base_class.__name__, "parent_library": base_class.__module__}

    parsed = {name: parts for name in shapes if (parts := parse(name)) is not None and parts.is_lora}
    if _names_wrapper(config.get("target_modules")):
        config["target_modules"] = sorted({parts.module for parts in parsed.values()})
    if _names_wrapper([*(config.get("rank_pattern") or ()), *(config.get("alpha_pattern") or ())]):
        ranks = {parts.module: shapes[name][0] for name, parts in parsed.items() if parts.kind.endswith("_A")}
        roots = {module: math.sqrt(rank) if config.get("use_rslora") else rank for module, rank in ranks.items()}
        alphas = {module: _whole(scaling * roots[module]) for module, scaling in scalings.items()}
        config["rank_pattern"] = {module: rank for module, rank in ranks.items() if rank != config["r"]}
        config["alpha_pattern"] = {module: alpha for module, alpha in alphas.items() if alpha != config["lora_alpha"]}
    for option in ("modules_to_save", "target_parameters", "exclude_modules"):
        if isinstance(config.get(option), list):
            config[option] = [strip_wrappers(name) for name in config[option]]
    return config


def _names_wrapper(names: str | list[str] | None) -> bool:
    return any(
        segment in name for segment in WRAPPER_SEGMENTS for name in ([names] if isinstance(names, str) else names or ())
    )


def _whole(number: float) -> float:
    """``number``, as a whole one where rounding alone made it another."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-9) else number


def _jsonable(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(_jsonable(v) for v in value)
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable(dataclasses.asdict(value))
    return value

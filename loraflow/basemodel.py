"""`BaseShapes`: the modules of a base model, their shapes and kinds, without loading a weight."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from loraflow.adapter_files import CONFIG_FILE
from loraflow.capture import find_peft_model
from loraflow.errors import AdapterError
from loraflow.peft_config import is_tied
from loraflow.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["BaseShapes", "architecture_class"]


@dataclass(frozen=True)
class BaseShapes:
    """What an adapter is checked against. Names are those of the plain transformers model.

    Attributes:
        modules: Module name -> (out, in), of every module that LoRA can target. An embedding is
            (embedding width, vocabulary), a convolution (out channels, in channels).
        kinds: Module name -> ``linear``, ``embedding``, ``conv1d`` (GPT-2's transposed linear) or ``conv``.
        parameters: Parameter name -> shape, of every parameter.
        config: Content of the model's ``config.json``.
        architecture: Class of the model, e.g. ``Qwen2ForCausalLM``.
        output_embedding: Name of the module that makes the logits, where there is one.
    """

    modules: Mapping[str, tuple[int, int]]
    kinds: Mapping[str, str]
    parameters: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    architecture: str
    output_embedding: str | None

    @property
    def tied(self) -> bool:
        """Whether input and output embedding are one tensor."""
        return is_tied(self.config)

    @classmethod
    def from_folder(cls, path: str | Path) -> BaseShapes:
        """The shapes of a saved model (or of one on the hub): its config is read, no weight is.

        Raises:
            AdapterError: There is no config, or transformers has no such architecture.
        """
        from transformers import AutoConfig

        if (Path(path) / CONFIG_FILE).is_file() and not (Path(path) / "config.json").is_file():
            problem = Problem("missing_file", "it is the folder of an adapter, and not that of its base model")
            raise AdapterError(f"cannot read the base model {path}", [problem])
        if not (str(path) and Path(path).exists()) and not _is_hub_name(str(path)):
            problem = Problem("missing_file", "there is no such folder, and it is no name on the hub")
            raise AdapterError(f"cannot read the base model {path}", [problem])
        try:
            config = AutoConfig.from_pretrained(str(path))
        except Exception as error:  # whatever a damaged or unknown config.json leads to inside of transformers
            why = str(error).strip().splitlines() or [type(error).__name__]
            problem = Problem("missing_file", f"no usable config.json: {why[0]}")
            raise AdapterError(f"cannot read the base model {path}", [problem]) from error
        return cls.from_config(config)

    @classmethod
    def from_model(cls, model: nn.Module) -> BaseShapes:
        """The shapes of a live PEFT model's base, whatever wraps, shards or quantises it."""
        from transformers import PreTrainedModel

        base = find_peft_model(model).get_base_model()
        base = getattr(base, "_orig_mod", base)
        plain = [c for c in type(base).__mro__ if issubclass(c, PreTrainedModel) and not issubclass(c, FSDPModule)]
        if not plain:
            raise AdapterError(f"the base model is a {type(base).__name__}, expected a model of transformers")
        return cls.from_config(base.config, plain[0])

    @classmethod
    def from_config(cls, config: Any, model_class: Any = None) -> BaseShapes:
        """The shapes of the model that ``config`` (a ``PretrainedConfig``) describes, built on the meta device.

        Args:
            config: The model's configuration; not changed.
            model_class: Class to build; the one that ``config.architectures`` names where not given.

        Raises:
            AdapterError: transformers has no class for it, or cannot build one of these sizes.
        """
        config = copy.deepcopy(config)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        model_class = model_class or architecture_class(config)
        build = getattr(model_class, "_from_config", None) or model_class.from_config
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                model = build(config)
        except Exception as error:  # sizes that do not go together, options of another version, …
            problem = Problem("base_mismatch", f"{type(error).__name__}: {error}")
            raise AdapterError("transformers cannot build the base model from its config.json", [problem]) from error
        modules: dict[str, tuple[int, int]] = {}
        kinds: dict[str, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            kind = _kind(module)
            if kind is not None:
                kinds[name], modules[name] = kind[0], kind[1:]
        head = model.get_output_embeddings()
        return cls(
            modules=modules,
            kinds=kinds,
            parameters={n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)},
            config=config.to_dict(),
            architecture=type(model).__name__,
            output_embedding=next((n for n, m in model.named_modules() if m is head), None) if head else None,
        )


def architecture_class(config: Any) -> Any:
    """The class of the model that ``config`` (a ``PretrainedConfig``) describes, or transformers' automatic one for it.

    Raises:
        AdapterError: transformers has no class for it.
    """
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise AdapterError(
        f"transformers {transformers.__version__} has no architecture {config.architectures or config.model_type}",
        [Problem("base_mismatch", "the base model's architecture is not known")],
        hint="upgrade transformers, or pass the live model instead",
    )


def _is_hub_name(name: str) -> bool:
    """Whether ``name`` could be that of a model on the hub: ``NAME`` or ``OWNER/NAME``."""
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name, re.ASCII) is not None


def _kind(module: nn.Module) -> tuple[str, int, int] | None:
    """Kind, out and in of a module that LoRA can target."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return "conv1d", int(module.nf), int(module.nx)
    if isinstance(module, torch.nn.Linear):
        return "linear", module.out_features, module.in_features
    if isinstance(module, torch.nn.Embedding):
        return "embedding", module.embedding_dim, module.num_embeddings
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return "conv", module.out_channels, module.in_channels
    return None

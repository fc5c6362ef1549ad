"""Model shapes of the benchmark, their random weights or the user's own, and the trainer over them.

Weights are made once and written as a model folder that trainer and server both load: a dummy load would give the two
different weights, and then nothing could be proven.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from loraflow.adapter import AdapterSpec
from loraflow.errors import ConfigError

__all__ = [
    "PRESETS",
    "Preset",
    "draw_policy",
    "load_trainer",
    "make_model",
    "nudge_policy",
    "preset_of",
    "preset_of_folders",
]

_FOLDER_RANK = 32
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Preset:
    """One shape of the Qwen2 family, or a model and adapter of the user's.

    Attributes:
        name: ``tiny``, ``0.5b``, ``1.5b`` or ``7b``; all but the first are Qwen2.5's. A model's folder's own.
        hidden: Width.
        layers: Blocks.
        intermediate: Width of the MLP.
        heads: Query heads.
        kv_heads: Key and value heads.
        vocabulary: Tokens.
        tied: Whether the head is the embedding.
        dtype: Of the base on both sides.
        rank: LoRA rank where none is asked for.
        folder: The user's model; its numbers then come from there, and it may be of any family.
        adapter: The user's adapter, whose shape is trained.
    """

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    dtype: str
    rank: int
    folder: Path | None = None
    adapter: Path | None = None

    @classmethod
    def from_folder(cls, folder: Path, *, rank: int, dtype: str, adapter: Path | None = None) -> Self:
        """The shape of a local model.

        Raises:
            ConfigError: There is no ``config.json``, or it names no sizes.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} is no model folder: {error}", hint="a folder with config.json") from error
        text = config.get("text_config") or config
        try:
            return cls(
                name=folder.resolve().name,
                hidden=int(text["hidden_size"]),
                layers=int(text["num_hidden_layers"]),
                intermediate=int(text.get("intermediate_size") or 4 * text["hidden_size"]),
                heads=int(text["num_attention_heads"]),
                kv_heads=int(text.get("num_key_value_heads") or text["num_attention_heads"]),
                vocabulary=int(text["vocab_size"]),
                tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
                dtype=dtype,
                rank=rank,
                folder=folder,
                adapter=adapter,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}/config.json does not give the model's sizes: {error}") from error

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch names it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of the seven linear layers of one block."""
        kv = self.kv_heads * (self.hidden // self.heads)
        wide, narrow = self.intermediate, self.hidden
        return (
            (narrow, narrow), (kv, narrow), (kv, narrow), (narrow, narrow),
            (wide, narrow), (wide, narrow), (narrow, wide),
        )  # fmt: skip

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of a LoRA of ``rank`` on all linear layers."""
        return self.layers * sum(rank * (out + into) for out, into in self.projections)

    def folded_parameters(self) -> int:
        """Parameters of the weights that such a LoRA changes."""
        return self.layers * sum(out * into for out, into in self.projections)

    def parameters(self) -> int:
        """Parameters of the whole model."""
        kv = self.kv_heads * (self.hidden // self.heads)
        per_layer = sum(out * into for out, into in self.projections) + self.hidden + 2 * kv + 2 * self.hidden
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.layers * per_layer + self.hidden


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("tiny", 128, 4, 256, 4, 2, 384, tied=False, dtype="float32", rank=8),
        Preset("0.5b", 896, 24, 4864, 14, 2, 151_936, tied=True, dtype="bfloat16", rank=32),
        Preset("1.5b", 1536, 28, 8960, 12, 2, 151_936, tied=True, dtype="bfloat16", rank=32),
        Preset("7b", 3584, 28, 18_944, 28, 4, 152_064, tied=False, dtype="bfloat16", rank=32),
    )
}


def preset_of(name: str) -> Preset:
    """The preset of that name; raises `ConfigError` where there is none."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}", hint=f"one of {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_of_folders(model: Path | None, adapter: Path | None, *, rank: int | None, dtype: str) -> Preset:
    """The preset of a local model, or of a saved adapter and its base.

    Args:
        model: Model folder; the adapter's base where not given.
        adapter: Folder of a PEFT LoRA adapter.
        rank: LoRA rank without an adapter.
        dtype: Of the base on both sides.

    Raises:
        ConfigError: The base is not on this machine, or a rank is given beside an adapter.
    """
    if adapter is None:
        if model is None:
            raise ConfigError("neither a model nor an adapter was given")
        return Preset.from_folder(model, rank=rank or _FOLDER_RANK, dtype=dtype)
    if rank is not None:
        raise ConfigError("the adapter has its own rank", hint="leave --rank out, or --adapter")
    spec = AdapterSpec.from_folder(adapter)
    base = model or Path(str(spec.config.get("base_model_name_or_path") or ""))
    if not (base / "config.json").is_file():
        raise ConfigError(f"the adapter's base {str(base)!r} is no folder of this machine", hint="give it with --model")
    return Preset.from_folder(base, rank=spec.max_rank, dtype=dtype, adapter=adapter)


def make_model(preset: Preset, folder: Path, device: str | torch.device = "cpu") -> Path:
    """Draw the weights on ``device`` and save them with a tokenizer; a folder that is complete is kept.

    The same preset on the same kind of device gives the same weights. A model of the user's is taken as it is.
    """
    if preset.folder is not None:
        return preset.folder
    done = folder / "complete.json"
    if done.exists() and json.loads(done.read_text())["preset"] == preset.name:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if preset.name == "tiny":
        from loraflow.demo.tiny import make_tiny_model

        make_tiny_model(folder)
    else:
        _save_tokenizer(folder, preset.vocabulary)
        model = _draw(preset, torch.device(device))
        model.save_pretrained(folder)
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    done.write_text(json.dumps({"preset": preset.name}))
    return folder


def _draw(preset: Preset, device: torch.device) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=preset.vocabulary,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=preset.tied,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(preset.torch_dtype)
    try:
        torch.manual_seed(0)
        with device:
            return Qwen2ForCausalLM(config).to(preset.torch_dtype)
    finally:
        torch.set_default_dtype(before)


def _save_tokenizer(folder: Path, vocabulary: int) -> None:
    """A byte-level BPE without merges that knows every id of the model: rollouts of random weights use them all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{number}" for number in range(len(tokens), vocabulary)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def load_trainer(folder: Path, preset: Preset, rank: int, device: str | torch.device) -> nn.Module:
    """The PEFT model that a trainer would hold: the user's adapter or LoRA on all linear layers, PEFT's own dtype."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    where = torch.device(device)
    placed: dict[str, Any] = {}
    if where.type == "cuda":
        torch.cuda.set_device(where)  # vLLM's senders take the current device
        placed["device_map"] = {"": where}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=preset.torch_dtype, **placed)
    model: nn.Module
    if preset.adapter is not None:
        model = PeftModel.from_pretrained(base, str(preset.adapter), is_trainable=True)
    else:
        targets = {"target_modules": "all-linear", "lora_dropout": 0.0}
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, **targets))
    draw_policy(model, 0)
    return model.eval()


@torch.no_grad()
def nudge_policy(model: nn.Module, step: int) -> None:
    """Scale every B by 1.01, and back at the next odd ``step``: another policy in one launch.

    A trainer that shares the servers' GPU takes none of their time to speak of.
    """
    found = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name]
    torch._foreach_mul_([parameter.data for parameter in found], 1.01 if step % 2 == 0 else 1 / 1.01)


@torch.no_grad()
def draw_policy(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Draw the adapter anew, in place: A from N(0, 1/in), B from N(0, ``std``²)."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        elif ".lora_B." in name:
            parameter.normal_(0.0, std, generator=generator)
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""A tiny vision-language model with its processor, made locally; pictures, and what is said about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from trl.generation.vllm_client import to_openai_messages

from loraflow.demo.tiny import make_tiny_tokenizer
from loraflow.server import VLLMServer
from tests.helpers.tiny import randomize

LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Target of an adapter on the language model alone."""

BOTH = ["q_proj", "v_proj", "gate_proj", "down_proj", "qkv"]
"""Names of projections as people list them: some of them are the vision tower's too."""

_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_vlm_config(token_ids: dict[str, int] | None = None, *, hidden_size: int = 128, layers: int = 2) -> Any:
    """Qwen2.5-VL of about 1 M parameters; ``token_ids`` are those of the special tokens."""
    from transformers import Qwen2_5_VLConfig

    ids = token_ids or {name: 328 + i for i, name in enumerate(_SPECIAL)}
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config={
            "vocab_size": 384,
            "hidden_size": hidden_size,
            "intermediate_size": 256,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": hidden_size,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
    )


def make_tiny_vlm(folder: str | Path, *, seed: int = 0) -> Path:
    """A random Qwen2.5-VL, float32, with tokenizer and processor, saved as a model folder."""
    from transformers import (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer(folder, vocab_size=380)
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(_SPECIAL), strict=True))
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size),
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(tiny_vlm_config(ids))
        torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    _never_says(model, list(ids.values()))
    model.to(torch.float32).save_pretrained(folder)
    return folder


def _never_says(model: Any, tokens: list[int]) -> None:
    """Make ``tokens`` unlikely, as they are for a trained model: a placeholder in a completion has no picture to it.

    The residual stream gets a constant in dimension 0, which no layer changes, and their head rows read nothing else.
    """
    language = model.model.language_model
    merger = model.model.visual.merger.mlp[2]
    with torch.no_grad():
        language.embed_tokens.weight[:, 0] = 0.1
        merger.weight[0], merger.bias[0] = 0.0, 0.1
        for layer in language.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[tokens] = 0.0
        model.lm_head.weight[tokens, 0] = -10.0


def picture(seed: int) -> Image.Image:
    """Coloured noise, 28 to 84 pixels wide: 2, 4 or 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (56, 28 * (1 + seed % 3), 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def vlm_policy(folder: str | Path, *, seed: int = 0, std: float = 0.05, target_modules: Any = LANGUAGE) -> Any:
    """A PEFT model over the tiny model with a random, non-zero B, float32."""
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=target_modules))
    randomize(model, seed=seed, std=std)
    return model.eval()


@dataclass(frozen=True)
class Said:
    """A completion of a prompt with pictures, and its log-probs, shape (T,)."""

    token_ids: list[int]
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Asked:
    """A question with pictures, as a trainer has it.

    Attributes:
        inputs: What the processor makes of it, each with a batch of one.
        images: Its pictures.
    """

    inputs: Any
    images: tuple[Image.Image, ...]

    @classmethod
    def about(cls, processor: Any, text: str, *images: Image.Image) -> Asked:
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        inputs = processor.apply_chat_template(
            conversation=[[{"role": "user", "content": parts}]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return cls(inputs, images)

    def served(self, server: VLLMServer, model: str, image_token: int, **sampling: Any) -> Said:
        """What ``server`` says under the name ``model``; the pictures go through its own preprocessing."""
        ids = self.inputs["input_ids"][0].tolist()
        features = None
        if self.images:
            parts = [{"type": "image", "image": image} for image in self.images]
            body = {"model": model, "messages": to_openai_messages([{"role": "user", "content": parts}])}
            features = server.request("POST", "/v1/chat/completions/render", json={**body, "max_tokens": 1})["features"]
            features["mm_placeholders"] = {"image": _runs(ids, image_token)}
        params = {"max_tokens": 8, "temperature": 1.0, "seed": 1, "logprobs": 0, "output_kind": 2, **sampling}
        body = {"model": model, "token_ids": ids, "features": features, "sampling_params": params}
        answer = server.request("POST", "/inference/v1/generate", json=body)
        assert answer["model"] == model
        [choice] = answer["choices"]
        return Said(choice["token_ids"], torch.tensor([e["logprob"] for e in choice["logprobs"]["content"]]))

    @torch.no_grad()
    def own(self, policy: Any, completion: Sequence[int]) -> torch.Tensor:
        """The log-probs of ``completion`` by ``policy``'s own forward, shape (T,)."""
        more = torch.tensor([list(completion)])
        ids = torch.cat([self.inputs["input_ids"], more], 1)
        kinds = torch.cat([self.inputs["mm_token_type_ids"], torch.zeros_like(more)], 1)
        pixels = {name: self.inputs[name] for name in ("pixel_values", "image_grid_thw") if name in self.inputs}
        logits = policy(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0].log_softmax(-1)
        return logits[-len(completion) - 1 : -1].gather(-1, more[0][:, None])[:, 0]


def _runs(ids: Sequence[int], token: int) -> list[dict[str, int]]:
    """Where ``token`` stands: first place and length of each run."""
    runs: list[dict[str, int]] = []
    for place, one in enumerate(ids):
        if one == token and runs and runs[-1]["offset"] + runs[-1]["length"] == place:
            runs[-1]["length"] += 1
        elif one == token:
            runs.append({"offset": place, "length": 1})
    return runs

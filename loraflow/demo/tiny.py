"""A tiny random model and tokenizer, made in a second and without a download: for the demo and the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["CHAT_TEMPLATE", "make_tiny_model", "make_tiny_tokenizer"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXT = "the a cat dog bird sat ran flew on in over mat tree hill red blue green big small one two three"


def make_tiny_tokenizer(folder: str | Path, *, vocab_size: int = 384) -> Any:
    """A byte-level BPE of ``vocab_size`` tokens (256 bytes, 3 specials, merges of made-up text), saved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    generator = torch.Generator().manual_seed(0)
    words = _TEXT.split()
    picks = torch.randint(len(words), (400, 8), generator=generator).tolist()
    tokenizer.train_from_iterator((" ".join(words[i] for i in row) for row in picks), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0], chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return fast


def make_tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 4,
    intermediate_size: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = 384,
    tie_word_embeddings: bool = False,
    head_std: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A random Qwen2 of about 1 M parameters with its tokenizer, saved to ``folder`` as a model folder.

    The head is drawn with ``head_std`` (Qwen2's own 0.02 spreads the logits by 0.2 only, and such a model hardly
    learns). The same arguments give the same weights, bit for bit.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer(folder, vocab_size=vocab_size)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        if not tie_word_embeddings:
            torch.nn.init.normal_(model.lm_head.weight, std=head_std)
    model.to(dtype).save_pretrained(folder)
    return folder

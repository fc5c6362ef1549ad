"""Rows without images beside rows with some: what TRL 1.16 says about them in a way that transformers 5 understands.

TRL marks a row without images by ``None``, and gives a micro batch without any image empty tensors of pixels. Image
processors of transformers 5 take no ``None``, and vision towers no empty tensors; an empty list, and no pixels at all,
mean the same to both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import Trainer

__all__ = ["accept_rows_without_images"]

_OF_IMAGES = frozenset(
    {"pixel_values", "image_grid_thw", "image_sizes", "image_position_ids", "pixel_attention_mask", "spatial_shapes"}
)
"""Inputs of a model that hold nothing where there is no image."""


def accept_rows_without_images(trainer: Trainer) -> None:
    """Let ``trainer``, where it trains a vision-language model, mix rows with and without images."""
    if not getattr(trainer, "_is_vlm", False):
        return
    if hasattr(trainer, "_generate_and_score_completions"):
        trainer._generate_and_score_completions = _with_lists(trainer._generate_and_score_completions)
    if hasattr(trainer, "_tokenize_prompts"):
        trainer._tokenize_prompts = _without_none(trainer._tokenize_prompts)
    trainer.model.register_forward_pre_hook(_without_empty_pixels, with_kwargs=True)


def _with_lists(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A column ``image`` that may be empty, as the column ``images`` of lists as well."""

    @functools.wraps(inner)
    def scored(inputs: Sequence[dict[str, Any]]) -> Any:
        if "image" in inputs[0] and "images" not in inputs[0]:
            inputs = [{**row, "images": [] if row["image"] is None else [row["image"]]} for row in inputs]
        return inner(inputs)

    return scored


def _without_none(inner: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    @functools.wraps(inner)
    def tokenized(prompts: list[Any]) -> Any:
        prompt_ids, images, fields = inner(prompts)
        return prompt_ids, None if images is None else [row or [] for row in images], fields

    return tokenized


def _without_empty_pixels(
    module: nn.Module,  # noqa: ARG001 - the signature of a hook
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pixels = kwargs.get("pixel_values")
    if pixels is None or pixels.numel() > 0:
        return args, kwargs
    return args, {name: value for name, value in kwargs.items() if name not in _OF_IMAGES}

"""The served base weights: their fingerprint."""

from __future__ import annotations

from typing import Any

from loraflow_server.checksum import byte_checksum

__all__ = ["base_checksums"]


def base_checksums(model: Any) -> dict[str, int]:
    """Checksum of every parameter and buffer of the served model by name, LoRA slots left out.

    LoRA wrappers keep their slots as plain attributes, so they are no parameters; their ``base_layer`` segment is
    left out of the names, which are then the same with and without ``--enable-lora``.
    """
    found: dict[str, int] = {}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            found[name.replace(".base_layer.", ".")] = byte_checksum(tensor)
    return found

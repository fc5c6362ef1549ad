"""What a merged broadcast needs of its servers; checked before anything is connected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraflow.errors import CapabilityError
from loraflow.server import VLLMServer
from loraflow.transports.wire import Bucket

__all__ = ["check_alignment", "check_server", "common_dtype"]


def common_dtype(servers: Sequence[VLLMServer]) -> torch.dtype:
    """The dtype that all servers serve; `CapabilityError` where they differ, or do not say."""
    names = {server.info.dtype for server in servers}
    if len(names) > 1:
        raise CapabilityError(
            "one merge cannot serve servers of different dtypes", expected="one dtype", found=sorted(map(str, names))
        )
    name = names.pop() if names else None
    dtype = getattr(torch, name or "", None)
    if not isinstance(dtype, torch.dtype):
        raise CapabilityError(
            "the server does not say in which dtype it serves", found=name, hint="start it in dev mode"
        )
    return dtype


def check_server(server: VLLMServer, carrier: str) -> None:
    """Raise `CapabilityError` where ``server`` cannot take weights over ``carrier``."""
    info = server.info
    flag = f'--weight-transfer-config \'{{"backend": "{carrier}"}}\''
    if "update_weights" not in info.weight_routes:
        raise CapabilityError(
            "the server has no weight-transfer routes",
            server=server.url,
            hint="start it with VLLM_SERVER_DEV_MODE=1, or with `loraflow serve MODEL`",
        )
    if info.weight_transfer != carrier:
        raise CapabilityError(
            "the server takes no weights over this carrier",
            server=server.url,
            expected=carrier,
            found=info.weight_transfer,
            hint=f"start it with {flag}"
            + (" and loraflow's plugin (pip install loraflow beside vLLM)" if carrier == "gloo" else ""),
        )
    if not info.takes_checkpoints:
        raise CapabilityError(
            "vLLM before 0.28 cannot load weights by their checkpoint names with LoRA enabled",
            server=server.url,
            expected="0.28 or later, or a server without --enable-lora",
            found=info.vllm_version,
        )


def check_alignment(buckets: Sequence[Bucket]) -> None:
    """Raise `CapabilityError` where vLLM's receivers could not view a tensor in its place: they need it aligned."""
    for bucket in buckets:
        for slot in bucket.slots:
            if slot.start % slot.tensor.dtype.itemsize:
                raise CapabilityError(
                    f"{slot.tensor.name} ({slot.tensor.dtype_name}) would lie unaligned in its bucket, "
                    "behind tensors of another dtype",
                    hint="load the trainer's base in the dtype that the server serves",
                )

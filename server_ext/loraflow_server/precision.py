"""Matrix products in true float32, whatever the process allows for its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["true_float32"]

_backends: Any = torch.backends  # its stubs leave some out
_EXACT = ("ieee", "none", False)


@contextmanager
def true_float32() -> Iterator[None]:
    """Neither TF32 nor bfloat16 inside of a float32 product, on GPUs and CPUs; afterwards all is as it was.

    From torch 2.9 on each backend has a setting of its own, ``fp32_precision``, which is the one that kernels read.
    The older ``allow_tf32`` may not even be asked for where only the new one was used, as transformers does for
    ``tf32=True``: torch raises.
    """
    new = hasattr(_backends.cuda.matmul, "fp32_precision")
    backends = (_backends.cuda.matmul, _backends.mkldnn.matmul) if new else (_backends.cuda.matmul,)
    name, exact = ("fp32_precision", "ieee") if new else ("allow_tf32", False)
    kept = [(backend, value) for backend in backends if (value := getattr(backend, name)) not in _EXACT]
    for backend, _ in kept:
        setattr(backend, name, exact)
    try:
        yield
    finally:
        for backend, value in kept:
            setattr(backend, name, value)

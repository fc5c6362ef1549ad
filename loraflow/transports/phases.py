"""`in_phase`: one phase of a merged update, timed, and named in whatever fails in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from loraflow.errors import CapabilityError, LoadError, LoraflowError, SyncTimeout

__all__ = ["in_phase"]


@contextmanager
def in_phase(phase: str, spent: dict[str, float], url: str) -> Iterator[None]:
    """Time a phase, and name it in whatever fails in it.

    Args:
        phase: Its name.
        spent: Milliseconds by phase; those of this one are added.
        url: The server's.
    """
    begin = time.perf_counter()
    try:
        yield
    except (CapabilityError, SyncTimeout) as error:
        error.message = f"merged update, phase {phase!r}: {error.message}"
        raise
    except LoraflowError as error:
        hint = error.hint or _hint(str(error))
        raise LoadError(f"merged update, phase {phase!r}: {error.message}", server=url, hint=hint) from error
    except RuntimeError as error:  # what torch raises for gloo and NCCL
        kind = SyncTimeout if "timed out" in str(error).lower() else LoadError
        raise kind(f"merged update, phase {phase!r}: {error}", server=url, hint=_hint(str(error))) from error
    finally:
        spent[phase] = spent.get(phase, 0.0) + (time.perf_counter() - begin) * 1e3


def _hint(text: str) -> str | None:
    lowered = text.lower()
    if "duplicate gpu" in lowered:
        return "trainer and server share a GPU: use carrier='ipc', and start the server with that backend"
    if "vllm_allow_insecure_serialization" in lowered:
        return "ipc handles travel pickled: start the server with VLLM_ALLOW_INSECURE_SERIALIZATION=1"
    if "in use" in lowered:
        return "set group_port to a free port, or leave it out"
    return None

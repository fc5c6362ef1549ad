"""`CheckedStore`: NCCL's unique id comes pickled from the trainer's store, and a pickle could run anything here."""

from __future__ import annotations

import io
import pickle
from typing import Any

from loraflow_server.errors import PluginError

__all__ = ["CheckedStore"]

_ALLOWED = {
    ("_ctypes", "_unpickle"),  # makes one of the other, from bytes
    ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"),
}


class _OnlyIds(pickle.Unpickler):
    """Makes unique ids, and refuses to make anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The two that an id is made of."""
        if (module, name) not in _ALLOWED:
            raise PluginError("join_failed", f"the trainer sent {module}.{name}, not an NCCL id", status=502)
        return super().find_class(module, name)


class CheckedStore:
    """A store of torch's whose values are given out only where they are pickled unique ids.

    Args:
        store: It.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """Wait for a value.

        Raises:
            PluginError: ``join_failed``: it is something else.
        """
        value: bytes = self._store.get(key)
        try:
            _OnlyIds(io.BytesIO(value)).load()
        except PluginError:
            raise
        except Exception as error:  # whatever broken bytes make of an unpickler
            raise PluginError("join_failed", "the trainer sent no NCCL id", status=502) from error
        return value

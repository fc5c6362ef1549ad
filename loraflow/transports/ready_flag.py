"""`ReadyFlag`: calls that leave before their payload is there, so that their way to the workers takes no time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loraflow.server import VLLMServer
from loraflow.transports.blocks import SharedBlock

__all__ = ["ReadyFlag", "settle_device", "waits_for_payloads"]

_WORD = 8


def waits_for_payloads(server: VLLMServer) -> bool:
    """Whether the workers of ``server`` know such flags; others would read what is in the block now."""
    return server.info.plugin is not None and "announced" in server.info.plugin.capabilities


def settle_device(device: torch.device) -> None:
    """Wait until the training step before is done: its last kernels must not keep servers waiting for a payload."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class ReadyFlag:
    """A small block of shared memory in which the workers of servers on this host see that a payload is there.

    int64 words: the serial of the newest version whose payload is there (negative: which will not come), then numbers
    that go with it.

    Args:
        numbers: How many numbers go with each payload.

    Raises:
        CapabilityError: There is no shared memory.
    """

    def __init__(self, numbers: int = 0) -> None:
        self._block = SharedBlock(_WORD * (1 + numbers), torch.device("cpu"))
        self._words = self._block.view.view(torch.int64)
        self._words.zero_()
        self._serial = 0

    def announced(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """``source`` as the place of a payload that is still to come, the next version's."""
        self._serial += 1
        flag = {"name": self._block.name, "serial": self._serial, "numbers": self._words.numel() - 1}
        return {**source, "flag": flag}

    def payload_is_there(self, numbers: Sequence[int] = ()) -> None:
        """What was announced last may be read; ``numbers`` go with it."""
        if numbers:
            self._words[1:] = torch.tensor(numbers, dtype=torch.int64)
        self._words[0] = self._serial

    def call_off(self) -> None:
        """What was announced last will not come."""
        self._words[0] = -self._serial

    def close(self) -> None:
        """Free it; a worker that waits gives up."""
        self.call_off()
        self._block.close()

"""Taking over a server that another run left with merged weights: the base first, then whatever this run brings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError
from loraflow.http_errors import understood
from loraflow.server import VLLMServer
from loraflow.transports.broadcast import BroadcastTransport
from loraflow.transports.link import PRISTINE

__all__ = ["restore_base"]

_log = logging.getLogger(__name__)
_Backend = Literal["nccl", "ipc", "gloo"]


def restore_base(model: nn.Module, servers: Sequence[VLLMServer], config: SyncConfig) -> list[VLLMServer]:
    """Send the trainer's frozen base to every server that was left merged (rule 8); those servers.

    An adapter over merged weights would be served as W + 2Δ. What a server was left with is what its weight version
    says; a base that is wrong without saying so is seen by the fingerprint.

    Raises:
        CapabilityError: One was left merged and cannot be reached by a broadcast from here.
        LoadError: The broadcast failed.
    """
    left = [server for server in servers if _weight_version(server) != PRISTINE]
    for backend in sorted({str(server.info.weight_transfer) for server in left}):
        group = [server for server in left if str(server.info.weight_transfer) == backend]
        if backend not in get_args(_Backend):
            raise CapabilityError(
                "another run left merged weights, and no weight transfer can bring the base back",
                server=", ".join(server.url for server in group),
                hint="restart the server; `loraflow serve` starts one that can be taken over",
            )
        _log.warning("%s: left merged by another run; its base is restored", ", ".join(s.url for s in group))
        transport = BroadcastTransport(model, config, backend)  # type: ignore[arg-type]  # looked at just above
        try:
            transport.open(group)
        finally:
            transport.close(group)
    return left


def _weight_version(server: VLLMServer) -> str:
    if "weight_info" not in server.info.weight_routes:
        return PRISTINE
    answer = server.request("GET", "/weight_info", retry=True)
    with understood("the version of its weights", server.url):
        return str(answer.get("weight_version", PRISTINE))

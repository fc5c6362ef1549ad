"""The trainer's end of each carrier of merged weights, and what `ipc` shares with servers of this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError
from loraflow.launch import free_port
from loraflow.merge import WireTensor
from loraflow.server import VLLMServer
from loraflow.transports.groups import GlooGroup, Group, IpcGroup, NcclGroup, address_towards, require_own
from loraflow.transports.mapped import MappedGroup, TrainerBuffers

if TYPE_CHECKING:
    from loraflow.transports.link import Link

__all__ = ["make_group", "shared_memory"]


def make_group(
    link: Link,
    carrier: str,
    world_size: int,
    config: SyncConfig,
    port: int,
    device: torch.device,
    mapped: TrainerBuffers | None,
) -> Group:
    """The trainer's end towards one server.

    Args:
        link: The server's.
        carrier: ``nccl``, ``ipc`` or ``gloo``.
        world_size: Trainer and workers.
        config: Options.
        port: Where to listen; 0 takes a free one.
        device: The trainer's.
        mapped: Memory that the server's workers may map.

    Raises:
        CapabilityError: The carrier takes what is missing here.
        ConfigError: This host does not have the address that is asked for.
    """
    server, timeout = link.server, config.collective_timeout
    if carrier == "ipc":
        loaded = None if device.type == "cpu" else IpcGroup(link.post_update, link.announce, device)
        if mapped is not None and _maps(server):
            return MappedGroup(server, mapped, world_size, timeout, loaded)
        if loaded is None:
            raise _needs_gpu(server)
        return loaded
    address = require_own(config.group_host) if config.group_host else address_towards(server.url)
    if carrier == "gloo":
        return GlooGroup(address, port, world_size, timeout)
    return NcclGroup(address, port or free_port(""), world_size, timeout, device)


def shared_memory(
    servers: Sequence[VLLMServer], tensors: Sequence[WireTensor], config: SyncConfig, device: torch.device
) -> TrainerBuffers | None:
    """Where ``tensors`` are merged that workers of this host are to read there.

    Returns:
        None where no server's workers can, or memory of this GPU cannot be shared; vLLM loads the weights then.

    Raises:
        CapabilityError: There is no GPU, and so no other way.
    """
    able = [server for server in servers if _maps(server)]
    if device.type == "cpu":
        for server in servers:
            if server not in able or config.verify == "canary":
                raise _needs_gpu(server)
    if not able:
        return None
    sizes = [tensor.nbytes for tensor in tensors]
    # Whichever of them an update sends: see `plan_buckets`, capped.
    return TrainerBuffers.for_updates(min(sum(sizes), max(config.bucket_bytes, *sizes)), device)


def _maps(server: VLLMServer) -> bool:
    """Whether its workers can map memory of this host."""
    return server.info.plugin is not None and "mapped" in server.info.plugin.capabilities


def _needs_gpu(server: VLLMServer) -> CapabilityError:
    return CapabilityError(
        "without a GPU, ipc takes workers that map the trainer's memory, write what lies there, and prove it by digest",
        server=server.url,
        expected="a base model on cuda:N, or loraflow's plugin with 'mapped' on the server, and verify != 'canary'",
        hint="start the server with LORAFLOW_FOLD=1, or with the gloo backend for carrier='gloo'",
    )

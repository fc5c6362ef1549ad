"""Reaching the servers at start: wait, ask what they can do, choose the plan, open the store and the carrier."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlparse

import torch
from torch import nn

from loraflow.adapter import AdapterSpec
from loraflow.capture import find_peft_model
from loraflow.config import SyncConfig
from loraflow.costs import Costs
from loraflow.errors import CapabilityError, ConfigError, SyncTimeout
from loraflow.fleet import Fleet
from loraflow.plan import Plan, TrainerInfo, make_plan
from loraflow.policy import new_run_id
from loraflow.server import BadAnswer, Unreachable, VLLMServer
from loraflow.store import AdapterStore
from loraflow.takeover import restore_base
from loraflow.transports.base import Transport
from loraflow.transports.filesystem import FilesystemTransport

__all__ = ["Agreed", "clients", "connect", "gpu_sharing", "is_local", "is_sharded", "trainer_info", "wait_for"]

_log = logging.getLogger(__name__)
_BROADCASTS = ("nccl", "ipc", "gloo")


@dataclass(frozen=True)
class Agreed:
    """What every rank must know of the connection that rank 0 made.

    Attributes:
        plan: The plan.
        run_id: The run.
        next_version: First version to use.
        dtype: dtype of snapshots.
        by_digest: Versions are proven by digest, so that no forward is needed for each.
    """

    plan: Plan
    run_id: str
    next_version: int
    dtype: torch.dtype
    by_digest: bool


def clients(given: Sequence[str | VLLMServer], config: SyncConfig) -> list[VLLMServer]:
    """Clients of the servers, with the config's timeouts; URLs are made absolute and may not repeat."""
    made = [
        server
        if isinstance(server, VLLMServer)
        else VLLMServer(
            server,
            request_timeout=config.request_timeout,
            load_timeout=config.load_timeout,
            generate_timeout=config.vllm_server_timeout,
            api_key_env=config.api_key_env,
            token_env=config.server_token_env,
        )
        for server in given
    ]
    urls = [server.url.lower().replace("://localhost", "://127.0.0.1") for server in made]
    if not urls:
        raise ConfigError("no server was given", hint="pass the base URL of a vLLM server, e.g. http://127.0.0.1:8000")
    if len(set(urls)) != len(urls):
        raise ConfigError(f"a server was given twice: {', '.join(urls)}")
    return made


def wait_for(servers: Sequence[VLLMServer], timeout: float, *, all_of_them: bool = True) -> list[VLLMServer]:
    """Wait until every server answers.

    Args:
        servers: Clients.
        timeout: Seconds.
        all_of_them: False: then one that answers is enough.

    Returns:
        Those that do not answer, where one was enough.

    Raises:
        SyncTimeout: Too few answer; the others are named.
    """
    deadline = time.monotonic() + timeout
    waiting = list(servers)
    while True:
        waiting = [server for server in waiting if not server.health()]
        if not waiting:
            return []
        if time.monotonic() >= deadline:
            if len(waiting) < len(servers) and not all_of_them:
                return waiting
            raise SyncTimeout(
                f"no answer in {timeout:g} s ({waiting[0].ailment() or 'it answers now'})",
                server=", ".join(server.url for server in waiting),
                hint="start it with `loraflow serve MODEL`, or correct the URL; start_timeout sets the limit",
            )
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def connect(
    model: nn.Module, spec: AdapterSpec, given: Sequence[str | VLLMServer], config: SyncConfig
) -> tuple[Fleet, Agreed]:
    """Reach the servers and open everything that a run needs; on rank 0.

    Raises:
        SyncTimeout: A server is not up.
        CapabilityError: The servers differ, or cannot serve this adapter in any way.
        PublishError: The store cannot be opened.
    """
    everyone = clients(given, config)
    with ExitStack() as opened:  # closed again where something fails
        for server in everyone:
            opened.callback(server.close)
        missing = wait_for(everyone, config.start_timeout, all_of_them=config.on_server_failure == "fail")
        missing += _silent([server for server in everyone if server not in missing], config)
        servers = [server for server in everyone if server not in missing]
        _require_apart(servers)
        dtype = _snapshot_dtype(config, servers)
        run_id = config.run_id or new_run_id()
        store = AdapterStore(
            config.adapter_root,
            run_id,
            retain=config.retained_versions,
            grace_period=config.grace_period,
            min_free_bytes=config.min_free_bytes,
        )
        opened.callback(store.close)
        found = store.recover()
        plan, transport = _open_best(model, spec, servers, store, config)
        opened.callback(transport.close, [])
        if plan.carrier in _BROADCASTS and config.adapter_dtype == "auto":
            dtype = torch.float32  # merged in float32 here, and rounded once: not before
        for warning in plan.warnings:
            _log.warning("%s", warning)
        fleet = Fleet(servers, plan, transport, store, config, missing)
        fleet.adopt(found)
        agreed = Agreed(plan, run_id, store.next_version(), dtype, fleet.proves_by_digest)
        opened.pop_all()
    return fleet, agreed


def _require_apart(servers: Sequence[VLLMServer]) -> None:
    """Raise `ConfigError` where two URLs lead to one server: it would be sent every version twice at the same time."""
    seen: dict[str, str] = {}
    for server in servers:
        instance = server.info.instance if server.info.plugin else ""  # vLLM's own has too few digits to tell
        if instance and seen.setdefault(instance, server.url) != server.url:
            raise ConfigError(f"{seen[instance]} and {server.url} are one server", hint="give each server once")


def _silent(servers: Sequence[VLLMServer], config: SyncConfig) -> list[VLLMServer]:
    """Ask ``servers`` what they can do; those that do not say, where one that does is enough."""
    silent: list[VLLMServer] = []
    for server in servers:
        try:
            server.refresh()
        except (BadAnswer, SyncTimeout, Unreachable):
            silent.append(server)
            if config.on_server_failure == "fail" or len(silent) == len(servers):
                raise
    return silent


def _open_best(
    model: nn.Module, spec: AdapterSpec, servers: Sequence[VLLMServer], store: AdapterStore, config: SyncConfig
) -> tuple[Plan, Transport]:
    """Plan and open; where a server refuses a carrier only when it is opened, the next best is taken."""
    trainer, refused = trainer_info(model, servers), dict[str, str]()
    costs = None if config.cost_file is None else Costs.from_file(config.cost_file)
    infos = [server.info for server in servers]
    while True:
        plan = make_plan(spec, infos, config, trainer, costs=costs, refused=refused)
        transport = open_transport(plan, model, spec, store, config, servers)
        try:
            if plan.carrier not in _BROADCASTS:  # those restore a base themselves
                restore_base(model, servers, config)
            transport.open(servers)
            if config.verify == "digest":
                _require_digests(transport, servers)
        except CapabilityError as error:
            if config.carrier != "auto":
                raise
            refused[plan.carrier] = str(error)
            _log.warning("%s cannot be used, another way is taken: %s", plan.carrier, error)
        else:
            _log.info("%s", "; ".join((str(plan), *plan.reasons[1:])))
            return plan, transport


def _require_digests(transport: Transport, servers: Sequence[VLLMServer]) -> None:
    """Raise `CapabilityError`, and leave the servers, where one of them cannot prove a version by a digest."""
    unproven = [server.url for server in servers if not transport.digests(server)]
    if unproven:
        transport.close(servers)
        raise CapabilityError(
            f"verify='digest' is asked for, and {transport.name} is proven by log-probs there",
            server=", ".join(unproven),
            hint="set verify='auto'; its log has the reason",
        )


def open_transport(
    plan: Plan,
    model: nn.Module,
    spec: AdapterSpec,
    store: AdapterStore,
    config: SyncConfig,
    servers: Sequence[VLLMServer] = (),
) -> Transport:
    """The carrier that ``plan`` names."""
    device = next(model.parameters()).device
    if plan.carrier == "filesystem":
        return FilesystemTransport(store, server_root=config.server_adapter_root, spec=spec, device=device)
    if plan.carrier == "direct":
        from loraflow.transports.direct import DirectTransport
        from loraflow.transports.group_way import GroupOptions

        return DirectTransport(
            store,
            spec,
            server_root=config.server_adapter_root,
            device=device,
            far=[server.url for server in servers if not is_local(server.url)],
            way=config.direct_way,
            groups=GroupOptions(config.group_host, config.group_port, config.collective_timeout),
        )
    if plan.carrier == "fold":
        from loraflow.transports.fold import FoldTransport
        from loraflow.transports.fold_modules import base_weight_of, conv1d_modules

        return FoldTransport(
            store,
            spec,
            base_weight_of(model),
            conv1d=conv1d_modules(model),
            server_root=config.server_adapter_root,
            device=device,
        )
    from loraflow.transports.broadcast import BroadcastTransport

    return BroadcastTransport(model, config, plan.carrier)


def trainer_info(model: nn.Module, servers: Sequence[VLLMServer]) -> TrainerInfo:
    """What the plan must know of this process."""
    device = next(model.parameters()).device
    base = find_peft_model(model).get_base_model()
    return TrainerInfo(
        device=device.type,
        sharded=is_sharded(model),
        quantized=bool(getattr(base, "is_quantized", False)),
        has_vllm=importlib.util.find_spec("vllm") is not None,
        local_servers=frozenset(server.url for server in servers if is_local(server.url)),
        shares_gpu=gpu_sharing(servers, device),
    )


def gpu_sharing(servers: Sequence[VLLMServer], device: torch.device) -> dict[str, bool]:
    """Whether each server runs on the GPU ``device``, by URL, where that is known.

    loraflow's plugin names the GPUs of its workers. Of another server on this host it is known only where the host has
    one GPU: processes that are each shown a GPU of their own (``CUDA_VISIBLE_DEVICES``) look alike from here.
    """
    if device.type != "cuda":
        return {server.url: False for server in servers}
    mine = str(torch.cuda.get_device_properties(device).uuid)
    one_gpu = torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    found: dict[str, bool] = {}
    for server in servers:
        gpus = server.info.plugin.status.get("gpus") if server.info.plugin else None
        if gpus:
            found[server.url] = mine in gpus
        elif not is_local(server.url):
            found[server.url] = False
        elif one_gpu:
            found[server.url] = True
    return found


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters lie in pieces on several ranks (FSDP1, FSDP2, ZeRO-3)."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def is_local(url: str) -> bool:
    """Whether ``url`` names this host."""
    host = urlparse(url).hostname or ""
    return host in {"localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}  # noqa: S104 - compared


def _snapshot_dtype(config: SyncConfig, servers: Sequence[VLLMServer]) -> torch.dtype:
    if config.adapter_dtype != "auto":
        return _dtype(config.adapter_dtype)
    served = {server.info.lora.dtype if server.info.lora else server.info.dtype for server in servers}
    if len(served) > 1:
        raise CapabilityError(
            f"the servers serve different dtypes ({', '.join(sorted(map(str, served)))})",
            hint="start them alike, or set adapter_dtype",
        )
    name = served.pop()
    return torch.float32 if name is None else _dtype(name)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CapabilityError(
            f"the server serves dtype {name!r}, which is not one of torch's", hint="set adapter_dtype"
        )
    return dtype

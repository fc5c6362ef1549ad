"""``loraflow plan``: which transport would be used, why, and what each way would cost."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from loraflow.adapter import AdapterSpec
from loraflow.basemodel import BaseShapes
from loraflow.commands.output import Output
from loraflow.commands.push import find_base, require_readable
from loraflow.config import SyncConfig
from loraflow.connect import clients, gpu_sharing, is_local, wait_for
from loraflow.costs import Costs, estimate_ms
from loraflow.errors import AdapterError, LoraflowError
from loraflow.plan import Plan, TrainerInfo, make_plan
from loraflow.preflight import check_folder
from loraflow.server import VLLMServer

__all__ = ["show_plan"]


def show_plan(output: Output, urls: Sequence[str], adapter: Path | None, config: SyncConfig) -> Plan:
    """Ask the servers, choose, and print the choice with every way that was not taken.

    Raises:
        AdapterError: The adapter is damaged, or of another base than the servers'.
        CapabilityError: No way is left.
        Unreachable: A server does not answer.
    """
    if adapter is not None:
        require_readable(adapter)
    servers = clients(urls, config)
    wait_for(servers, min(10.0, config.start_timeout))
    infos = [server.refresh() for server in servers]
    spec = AdapterSpec.build({}, {}, {}) if adapter is None else _checked(output, adapter, servers)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    trainer = TrainerInfo(
        device=device.type,
        has_vllm=importlib.util.find_spec("vllm") is not None,
        local_servers=frozenset(server.url for server in servers if is_local(server.url)),
        shares_gpu=gpu_sharing(servers, device),
    )
    costs = None if config.cost_file is None else Costs.from_file(config.cost_file)
    plan = make_plan(spec, infos, config, trainer, costs=costs)
    estimate = None if adapter is None else estimate_ms(plan.carrier, plan.payload_bytes)
    output.document({**plan.to_dict(), "estimated_ms": estimate})
    output.say(str(plan), style="green")
    rows: list[tuple[object, ...]] = [("→", plan.transport, plan.carrier, "; ".join(plan.reasons))]
    rows += [("", item.transport, item.carrier, item.reason) for item in plan.ruled_out]
    output.table("the ways there are", ("", "transport", "carrier", "why, or why not"), rows)
    if estimate is not None:
        output.say(f"payload {plan.payload_bytes / 1e6:.1f} MB to each server, about {estimate:.0f} ms")
    for warning in plan.warnings:
        output.say(f"note: {warning}", style="yellow")
    return plan


def _checked(output: Output, adapter: Path, servers: Sequence[VLLMServer]) -> AdapterSpec:
    """The spec of ``adapter``, compared with the base where that is to be had here."""
    try:
        base = find_base(adapter, servers, None)
    except LoraflowError:
        output.say("note: the base model is not here, so the adapter was not compared with it", style="yellow")
        return AdapterSpec.from_folder(adapter)
    checked = check_folder(adapter, BaseShapes.from_folder(base), tower=True)
    if checked.transport is None:
        raise AdapterError(f"{adapter} cannot be served", checked.problems)
    return AdapterSpec.from_folder(adapter, base)

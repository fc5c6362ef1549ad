"""`FoldDesk`: fold as the API server sees it: one run at a time, between steps, and proven or taken back.

Weights change between two steps, and the prefix cache of the old weights is gone before the next one; requests in
flight keep their place, and are computed again from their prompts with the new weights. One engine does that in its own
loop, in one call (`loraflow_server.core`); several are paused meanwhile, so that all of them serve the same version.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from loraflow_server import checks
from loraflow_server.engine import Engine, answers_of, require_fresh
from loraflow_server.errors import PluginError
from loraflow_server.ids import content_id
from loraflow_server.settings import Settings
from loraflow_server.weights import BaseWeights

__all__ = ["FoldDesk"]

logger = logging.getLogger("vllm.loraflow")

_MOST = float(torch.finfo(torch.float32).max)
LEASE_SECONDS = 120.0
"""A run that folded nothing for so long may be taken over by another."""


@dataclass
class _Lease:
    run_id: str
    layout_id: str
    used: float
    policy: str | None = None
    digest: str | None = None
    before: tuple[str | None, str | None] = (None, None)  # what `undo` goes back to
    kept: bool = True  # the workers have that: ranks that took a proven fold back have let go of it

    @property
    def idle(self) -> float:
        return time.monotonic() - self.used


class FoldDesk:
    """The state of fold on this server.

    Args:
        engine: The engines.
        weights: Watches over the base weights.
        settings: What the operator decided.
    """

    def __init__(self, engine: Engine, weights: BaseWeights, settings: Settings) -> None:
        self._engine = engine
        self._weights = weights
        self._settings = settings
        self._lease: _Lease | None = None

    def describe(self) -> dict[str, Any] | None:
        """For the status; None where nothing is agreed."""
        lease = self._lease
        if lease is None:
            return None
        return {
            "run_id": lease.run_id,
            "policy": lease.policy,
            "digest": lease.digest,
            "layout_id": lease.layout_id,
            "idle_s": round(lease.idle, 1),
        }

    def need_idle(self) -> None:
        """Refuse another kind of update while a run folds.

        Raises:
            PluginError: ``leased`` (423).
        """
        if self._lease is not None:
            raise PluginError(
                "leased", f"run {self._lease.run_id!r} folds into these weights: reset them first", status=423
            )

    async def layout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take the lease, find and copy the weights that the adapter targets: ``{"run_id", "tensors", "modules"}``.

        The weights are pristine afterwards, whatever another run or layout had folded into them.
        """
        run_id = checks.check_name(body.get("run_id"))
        tensors = checks.check_adapter(body.get("tensors"), self._settings.limits)
        modules = _modules(body.get("modules"), tensors)
        self._may_take(run_id)
        self._engine.need_no_adapters()
        layout_id = content_id([tensors, modules])
        await self._engine.need_awake()
        async with self._engine.paused():
            if self._lease is not None and (self._lease.run_id, self._lease.layout_id) != (run_id, layout_id):
                await self._engine.workers("loraflow_fold_reset")
                await self._engine.fresh_caches()
                self._lease = None
            if self._lease is None:
                await self._weights.need_pristine()
            try:
                engines = await self._engine.workers("loraflow_fold_layout", layout_id, modules, list(tensors.values()))
            except PluginError:
                if self._lease is None:  # ranks that could would keep their copies, and nobody would use them
                    with suppress(PluginError):  # the reason is the first one
                        await self._engine.workers("loraflow_fold_reset")
                raise
        ranks = [_rank(rank) for rank in engines[0]]
        missing = _not_covered(modules, ranks)
        differ = any([_rank(rank) for rank in other] != ranks for other in engines[1:])
        if missing or differ:
            await self._engine.workers("loraflow_fold_reset")
            self._lease = None
        if missing:
            raise PluginError(
                "not_served",
                f"{len(missing)} weights are served in part or not at all, the first: {missing[0]}",
                status=409,
            )
        if differ:
            raise PluginError("engines_differ", "the data-parallel engines serve different weights", status=500)
        if self._lease is None:
            self._lease = _Lease(run_id, layout_id, time.monotonic())
        self._lease.used = time.monotonic()
        return {
            "layout_id": layout_id,
            "dtype": ranks[0]["dtype"],
            "ranks": ranks,
            "engines": len(engines),
            "copy": engines[0][0]["copy"],
            "copy_bytes": sum(rank["copy_bytes"] for rank in engines[0]),
        }

    async def fold(
        self, body: Mapping[str, Any], source_of: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Fold a version: ``{"run_id", "policy", "layout_id", "source", "expected"?, "check"?}``."""
        run_id, policy = checks.check_name(body.get("run_id")), checks.check_name(body.get("policy"))
        lease = self._held(run_id, body.get("layout_id"))
        if policy in {lease.policy, lease.before[0]}:  # taking it back would take back the one that is served
            raise PluginError("name_used", f"{policy!r} is folded, or was before: a name is used once", status=409)
        expected = body.get("expected")
        if expected is not None and not (isinstance(expected, list) and all(map(_is_checksum, expected))):
            raise PluginError("bad_request", "expected is a list of checksums")
        source = await source_of(body)
        start = time.perf_counter()
        self._engine.need_no_adapters()  # the base may have been pristine since the layout was agreed
        await self._engine.need_awake()  # before the base counts as updated
        async with AsyncExitStack() as update:
            await update.enter_async_context(self._weights.updating())
            noted = time.perf_counter()
            await update.enter_async_context(self._engine.paused(needed=self._engine.several))
            paused = time.perf_counter()
            kept = lease.policy, lease.digest, lease.before
            # Where an engine does not answer, or nothing could be put back, what is served stays unknown.
            lease.policy, lease.digest, lease.before = None, None, kept[:2]
            engines = await self._engine.utility(
                "loraflow_fold", lease.layout_id, policy, source, expected, bool(body.get("check"))
            )
            folded = time.perf_counter()
            try:
                ranks = self._proven(engines)
            except PluginError as failure:
                if len(engines) > 1:  # an engine takes its own fold back; all engines or none
                    try:
                        await self._engine.workers("loraflow_fold_undo", lease.layout_id, policy)
                    except PluginError as error:
                        raise _undo_failed(error.message) from error
                if failure.code != "undo_failed":
                    lease.policy, lease.digest, lease.before = kept
                    lease.kept = lease.kept and not any("finish" in engine["phases_ms"] for engine in engines)
                raise
        lease.policy, lease.kept, lease.used = policy, True, time.monotonic()
        lease.digest = content_id(ranks[0]["sums"])
        end = time.perf_counter()
        logger.info("loraflow: folded %s in %.1f ms", policy, (end - start) * 1e3)
        inner = {key: max(engine["phases_ms"].get(key, 0.0) for engine in engines) for key in engines[0]["phases_ms"]}
        return {
            "policy": policy,
            "digest": lease.digest,
            "sums": ranks[0]["sums"],
            "error": max(rank["error"] for rank in ranks),
            "checked": min(rank["checked"] for rank in ranks),
            "prefix_cache_reset": True,
            "phases_ms": {
                "fingerprint": round((noted - start) * 1e3, 3),
                "pause": round((paused - noted) * 1e3, 3),
                "fold": round((folded - paused) * 1e3, 3),
                **inner,
                "resume": round((end - folded) * 1e3, 3),
            },
        }

    async def undo(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Serve again what was served before a version: ``{"run_id", "policy", "layout_id"}``.

        Raises:
            PluginError: ``not_kept`` (409): a later fold was taken back, and what was before went with it.
        """
        run_id, policy = checks.check_name(body.get("run_id")), checks.check_name(body.get("policy"))
        lease = self._held(run_id, body.get("layout_id"))
        if policy == lease.policy:
            if not lease.kept:
                raise PluginError(
                    "not_kept", f"{policy!r} cannot be taken back any more: a fold after it failed", status=409
                )
            await self._engine.need_awake()
        async with self._engine.paused():
            engines = await self._engine.workers("loraflow_fold_undo", lease.layout_id, policy)
            undone = any(rank["undone"] for ranks in engines for rank in ranks)
            if undone:  # whatever becomes of the caches
                (lease.policy, lease.digest), lease.before = lease.before, (None, None)
            await self._engine.fresh_caches()
        return {"policy": lease.policy, "undone": undone}

    async def reset(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return to the pristine base, prove it, and give the lease back: ``{"run_id"}``."""
        self._may_take(checks.check_name(body.get("run_id")))
        if self._lease is not None:
            await self._engine.need_awake()
            async with self._engine.paused():
                await self._engine.workers("loraflow_fold_reset")
                await self._engine.fresh_caches()
            self._lease = None
        found = await self._weights.compare()
        if not found["pristine"]:
            raise PluginError(
                "not_pristine",
                "the base is not what it was at the start: restart the server",
                status=409,
                details={"changed": found["changed"]},
            )
        logger.info("loraflow: the base weights are pristine")
        return found

    # ---------------------------------------------------------------- inside

    def _may_take(self, run_id: str) -> None:
        lease = self._lease
        if lease is not None and lease.run_id != run_id and lease.idle < LEASE_SECONDS:
            raise PluginError(
                "leased",
                f"run {lease.run_id!r} folds into this server, {lease.idle:.0f} s ago the last time: end it, or wait "
                f"until it has been idle for {LEASE_SECONDS:.0f} s",
                status=423,
                details={"run_id": lease.run_id, "idle_s": round(lease.idle, 1)},
            )

    def _held(self, run_id: str, layout_id: object) -> _Lease:
        lease = self._lease
        if lease is None or lease.layout_id != layout_id:
            raise PluginError("unknown_layout", "this layout was not agreed with this server", status=409)
        if lease.run_id != run_id:
            raise PluginError("leased", f"run {lease.run_id!r} folds into this server now", status=423)
        return lease

    @staticmethod
    def _proven(engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the ranks of all engines answered; the first error is raised."""
        ranks: list[dict[str, Any]] = []
        broken = next((engine["undo_error"] for engine in engines if engine["undo_error"] is not None), None)
        if broken is not None:
            raise _undo_failed(broken)
        for number, engine in enumerate(engines):
            ranks += answers_of(engine["ranks"], number)
            require_fresh(engine["cache_error"])
        return ranks


def _undo_failed(reason: str) -> PluginError:
    return PluginError(
        "undo_failed",
        f"the fold failed, and what was served before could not be put back ({reason}): restart the server",
        status=500,
    )


def _is_checksum(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 64


def _rank(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in ("dtype", "rects", "base_sums")}


def _modules(given: object, tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The modules of a request, checked, with the indices of their tensors; see `FoldModule`."""
    if not isinstance(given, list) or not given or len(given) > len(tensors):
        raise PluginError("bad_request", "modules is a list of the adapted modules")
    order = {name: index for index, name in enumerate(tensors)}
    modules = []
    for item in given:
        if not isinstance(item, dict):
            raise PluginError("bad_request", "a module is an object")
        weight = checks.check_tensor_name(item.get("weight"))
        used = {key: item[key] for key in ("a", "b", "magnitude", "value") if item.get(key) is not None}
        scaling, flags = item.get("scaling", 1.0), {key: item.get(key, False) for key in ("transposed", "adds")}
        if (
            not all(isinstance(name, str) and name in order for name in used.values())
            or used.keys() not in ({"a", "b"}, {"a", "b", "magnitude"}, {"value"})
            or type(scaling) not in (int, float)
            or not abs(scaling) <= _MOST
            or not all(type(flag) is bool for flag in flags.values())
        ):
            raise PluginError(
                "bad_request", f"{weight}: a and b (and magnitude), or value, name tensors; scaling is a number"
            )
        shapes = {key: tensors[name] for key, name in used.items()}
        shape = _shape(weight, shapes, flat=item.get("flat") is True, turned=flags["transposed"])
        indices = {key: order[name] for key, name in used.items()}
        modules.append({"weight": weight, "shape": shape, "scaling": float(scaling), **indices, **flags})
    return modules


def _shape(weight: str, used: Mapping[str, list[int]], *, flat: bool, turned: bool) -> list[int]:
    """Shape of the weight, from those of the tensors that change it."""
    if "value" in used:
        rows, cols = used["value"]
        return [rows] if flat and cols == 1 else [rows, cols]
    (rank, width), (height, other) = used["a"], used["b"]
    if rank != other:
        raise PluginError("bad_request", f"{weight}: A has rank {rank}, B {other}")
    if "magnitude" in used and used["magnitude"][0] * used["magnitude"][1] != height:
        raise PluginError("bad_request", f"{weight}: {used['magnitude']} magnitudes for {height} rows of B")
    return [width, height] if turned else [height, width]


def _not_covered(modules: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[str]:
    area = dict.fromkeys(range(len(modules)), 0)
    for module, _, _, rows, cols, _ in {tuple(rect) for rank in ranks for rect in rank["rects"]}:
        area[module] += rows * cols
    return [item["weight"] for i, item in enumerate(modules) if area[i] < math.prod(item["shape"])]

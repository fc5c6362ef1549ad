"""`BaseWeights`: whether the served base weights are what they were when the server started (rule 8)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.ids import content_id

__all__ = ["BaseWeights", "fingerprint_of"]

logger = logging.getLogger("vllm.loraflow")


def fingerprint_of(ranks: list[dict[str, int]]) -> str:
    """One hex number for the checksums of all ranks of an engine."""
    canonical = json.dumps([sorted(rank.items()) for rank in ranks], separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


class BaseWeights:
    """Watches over the base weights.

    The checksums of the pristine base are taken right before the first update; an adapter-only server never pays for
    them.

    Attributes:
        touched: An update of the weights was begun, and the base was not proven pristine since.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pristine: list[list[dict[str, int]]] | None = None
        self._noting = asyncio.Lock()
        self._updates, self._under_way = 0, 0
        self.touched = False

    def describe(self) -> dict[str, Any]:
        """For the status."""
        return {
            "weights_touched": self.touched,
            "base_fingerprint": self.pristine_fingerprint,
        }

    async def _served(self) -> list[list[dict[str, int]]]:
        if await self._engine.asleep():
            raise PluginError("asleep", "the server sleeps: wake it up before its weights are compared", status=409)
        engines = await self._engine.workers("loraflow_base")
        return [[rank["tensors"] for rank in ranks] for ranks in engines]

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Note the pristine checksums, once, and that the weights change inside.

        Of a server that sleeps nothing is known then: its base counts as unproven until it is restarted.
        """
        async with self._noting:  # one that comes second would note what the first one's update has made of them
            unknown = self._pristine is None and self._engine.has_extension and not self.touched
            if unknown and not await self._engine.asleep():
                self._pristine = await self._served()
            self._updates += 1
            self._under_way += 1
            self.touched = True
        try:
            yield
        finally:
            self._under_way -= 1

    @property
    def pristine_fingerprint(self) -> str | None:
        """Fingerprint of the base before the first update; None where none was begun."""
        return None if self._pristine is None else fingerprint_of(self._pristine[0])

    async def compare(self) -> dict[str, Any]:
        """Checksum the base as served now; if it is the pristine one, it counts as untouched again.

        Not where an update is under way, or was begun meanwhile: what was read is not what is served by now.
        """
        quiet, begun = not self._under_way, self._updates
        served = await self._served()
        if self._pristine is None and not self.touched:
            self._pristine = served
        pristine = self._pristine is not None and served == self._pristine
        if pristine and quiet and begun == self._updates:
            self.touched = False
        reference = self._pristine or served
        changed = sorted(
            {
                name
                for ranks, wanted in zip(served, reference, strict=True)
                for rank, expected in zip(ranks, wanted, strict=True)
                for name in rank
                if rank[name] != expected.get(name)
            }
        )
        return {
            "fingerprint": fingerprint_of(served[0]),
            "pristine_fingerprint": self.pristine_fingerprint,
            "pristine": pristine,
            "engines_agree": all(ranks == served[0] for ranks in served),
            "changed": changed[:100],
            "tensors": sum(len(rank) for rank in served[0]),
        }

    async def layout(self, tensors: Mapping[str, list[int]]) -> dict[str, Any]:
        """Agree on where checkpoint weights are served, to checksum them there after an update."""
        layout_id = content_id(tensors)
        await self._engine.need_awake()
        async with self._engine.paused():
            engines = await self._engine.workers("loraflow_weights_layout", layout_id, tensors)
        ranks = [{key: rank[key] for key in ("rects", "dtypes")} for rank in engines[0]]
        if any([{key: rank[key] for key in ("rects", "dtypes")} for rank in other] != ranks for other in engines[1:]):
            raise PluginError("engines_differ", "the data-parallel engines serve different weights", status=500)
        return {"layout_id": layout_id, "ranks": ranks, "engines": len(engines)}

    async def sums(self, layout_id: str) -> dict[str, Any]:
        """Checksum of each piece of a layout as served now: by engine, rank, and piece; and the weights' name."""
        await self._engine.need_awake()
        engines, version = await asyncio.gather(
            self._engine.workers("loraflow_weights_sums", layout_id), self._engine.weight_version()
        )
        return _sums_answer(engines, version)

    async def map(self, where: Mapping[str, Any]) -> dict[str, Any]:
        """Have the workers map a trainer's buffers (`loraflow_server.mapped.Where`); the token that each finds there.

        Raises:
            PluginError: ``no_block`` (409): one does not reach them; none has them then.
        """
        try:
            engines = await self._engine.workers("loraflow_map", dict(where))
        except PluginError:
            await self.unmap(str(where["flags"]))
            raise
        return {"heads": [[rank["head"] for rank in ranks] for ranks in engines]}

    async def unmap(self, name: str | None) -> dict[str, Any]:
        """Have the workers let go of the buffers ``name``, or of any (None)."""
        engines = await self._engine.workers("loraflow_unmap", name)
        return {"unmapped": any(rank["unmapped"] for ranks in engines for rank in ranks)}

    async def receive(self, incoming: Mapping[str, Any], label: str, timeout: float) -> dict[str, Any]:
        """Have the workers write what a trainer sends straight to where it is served; then as `sums`."""
        limit = timeout * (len(incoming["buckets"]) + 1)
        await self._engine.need_awake()  # before the base counts as updated
        async with self.updating():
            engines, version = await self._engine.receive(label, incoming, timeout, limit)
        return _sums_answer(engines, version)

    async def need_pristine(self) -> None:
        """Refuse to put an adapter over an updated base (it would serve W + 2Δ).

        Raises:
            PluginError: ``base_not_pristine`` (409).
        """
        if not self.touched:
            return
        if not self._engine.has_extension or not (await self.compare())["pristine"] or self.touched:
            raise PluginError(
                "base_not_pristine",
                "the base weights were updated and are not proven pristine: restore them, or restart the server, "
                "before an adapter is loaded",
                status=409,
            )


def _sums_answer(engines: list[list[dict[str, Any]]], version: str | None) -> dict[str, Any]:
    return {
        "engines": [[rank["sums"] for rank in ranks] for ranks in engines],
        "weight_version": version,
        "phases_ms": {"worker": max(rank["ms"] for ranks in engines for rank in ranks)},
    }

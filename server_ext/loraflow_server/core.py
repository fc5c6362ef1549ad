"""What runs in the engine's own loop, between two steps: several calls of the workers as one.

`install` adds utilities to vLLM's ``EngineCore``, `fold` as ``loraflow_fold``. A utility is answered between steps, and
calls of the workers come behind the steps that are under way: so weights change between two steps without a pause of
the scheduler, and no step runs before all ranks have proven the fold, or have taken it back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

__all__ = ["asleep", "fold", "fresh_caches", "hold", "install", "receive", "release"]

logger = logging.getLogger("vllm.loraflow")


def install() -> None:
    """Give vLLM's engine the utilities; may be called more than once."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.loraflow_fold = fold
    EngineCore.loraflow_fresh_caches = fresh_caches
    EngineCore.loraflow_asleep = asleep
    EngineCore.loraflow_hold = hold
    EngineCore.loraflow_release = release
    EngineCore.loraflow_receive = receive


def fold(
    self: Any, layout_id: str, policy: str, source: dict[str, Any], expected: list[int] | None, whole: bool
) -> dict[str, Any]:
    """Fold a payload on every rank, and forget the prefixes of the old weights; all of it, or nothing.

    The prefix cache is emptied while the workers' devices compute. Requests in flight are computed again from their
    prompts with the new weights.

    Args:
        self: vLLM's ``EngineCore``.
        layout_id: See `loraflow_server.fold_worker.FoldWorker.loraflow_fold`.
        policy: Name of the version.
        source: Where its payload is.
        expected: Checksums of the payload's tensors.
        whole: Prove every product.

    Returns:
        ``ranks``: each worker's answer; ``cache_error``: why the prefix cache could not be emptied, or None;
        ``undo_error``: why what was served before could not be put back, or None; ``phases_ms``.
    """
    phases: dict[str, float] = {}
    last = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        phases[phase] = round((now - last) * 1e3, 3)
        last = now

    if getattr(self.model_executor, "is_sleeping", False):
        error = {"code": "asleep", "message": "the server sleeps: wake it up before the sync", "status": 409}
        return {"ranks": [{"error": error}], "cache_error": None, "undo_error": None, "phases_ms": phases}
    ranks = self.collective_rpc("loraflow_fold", None, (layout_id, policy, source, expected), None)
    lap("launch")
    cache_error = undo_error = None
    if all("ok" in rank for rank in ranks):
        cache_error = fresh_caches(self)
        lap("reset_cache")
        ranks = self.collective_rpc("loraflow_fold_finish", None, (layout_id, whole), None)
        lap("finish")
    if cache_error is not None or any("error" in rank for rank in ranks):
        undone = self.collective_rpc("loraflow_fold_undo", None, (layout_id, policy), None)
        undo_error = next((rank["error"]["message"] for rank in undone if "error" in rank), None)
        lap("undo")
    return {"ranks": ranks, "cache_error": cache_error, "undo_error": undo_error, "phases_ms": phases}


def receive(self: Any, label: str, incoming: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Receive weights on every rank while no step runs; where all of them have all of it, name the weights ``label``.

    Returns:
        ``ranks``: each worker's answer; ``version``: the weights' name then.
    """
    error = None
    if asleep(self):
        error = {"code": "asleep", "message": "the server sleeps: wake it up before the sync", "status": 409}
    elif not self.is_scheduler_paused():
        error = {"code": "not_held", "message": "hold requests before weights are sent", "status": 409}
    if error is not None:
        return {"ranks": [{"error": error}], "version": str(self.get_weight_version())}
    ranks = self.collective_rpc("loraflow_receive", None, (incoming, timeout), None)
    if all("ok" in rank for rank in ranks):
        self.set_weight_version(label)
    return {"ranks": ranks, "version": str(self.get_weight_version())}


def asleep(self: Any) -> bool:
    """Whether the weights are not in memory now (vLLM's own ``is_sleeping`` takes a pause, or a cache that sleeps, for
    sleep too)."""
    return "weights" in getattr(self.model_executor, "sleeping_tags", ())


def fresh_caches(self: Any) -> str | None:
    """Forget what was computed with the old weights: prefixes, here and where a KV connector keeps them, and encoded
    images; why it could not be, or None.

    Requests in flight are computed again from their prompts.
    """
    scheduler = getattr(self, "scheduler", None)
    offloaded = getattr(scheduler, "connector", None) is not None  # asked without one, older vLLM says that it failed
    try:
        with _only_cached_blocks(scheduler):
            emptied = self.reset_prefix_cache(True, offloaded)
        if not emptied:
            return "some blocks are still in use" + (", or the KV connector's cache stays" if offloaded else "")
    except RuntimeError as error:
        return str(error)
    if self.vllm_config.model_config.is_multimodal_model:
        self.reset_encoder_cache()
    return None


def hold(self: Any, label: str) -> Any:
    """Name the weights ``label``, and let no step run from now on; requests keep their place.

    Returns:
        ``was``: the weights' name before; ``paused_here``: False where the engine was paused already. A future of it
        while a step is under way.
    """
    answer = {"was": str(self.get_weight_version()), "paused_here": not self.is_scheduler_paused()}
    self.set_weight_version(label)
    pausing = self.pause_scheduler("keep", False) if answer["paused_here"] else None
    if pausing is None:
        return answer
    held: Future[dict[str, Any]] = Future()

    def pass_on(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            held.set_result(answer)
        else:
            held.set_exception(error)

    pausing.add_done_callback(pass_on)
    return held


def release(self: Any) -> str | None:
    """Forget what was computed with the old weights, and let steps run again; why the first could not be, or None.

    Nothing runs then.
    """
    error = fresh_caches(self)
    if error is None:
        self.resume_scheduler()
    return error


@contextmanager
def _only_cached_blocks(scheduler: Any) -> Iterator[None]:
    """Inside, emptying the prefix cache takes the hashes off the blocks that have one.

    vLLM walks over all blocks of the GPU, milliseconds for some hundred thousand; those with a hash are in its table.
    """
    pool: Any = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    table = getattr(getattr(pool, "cached_block_hash_to_block", None), "_cache", None)
    if not isinstance(table, dict) or not isinstance(getattr(pool, "blocks", None), list):
        yield  # another vLLM's
        return

    def reset() -> bool:
        if getattr(pool, "_reuse_watchers", ()):
            return bool(type(pool).reset_prefix_cache(pool))
        found = pool.cached_block_hash_to_block._cache.values()
        cached = [block for held in found for block in (held.values() if isinstance(held, dict) else (held,))]
        every, pool.blocks = pool.blocks, cached
        try:
            return bool(type(pool).reset_prefix_cache(pool))
        finally:
            pool.blocks = every

    pool.reset_prefix_cache = reset
    try:
        yield
    finally:
        del pool.reset_prefix_cache

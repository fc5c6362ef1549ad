"""Emptying vLLM's prefix cache by the blocks that are in it, in place of all blocks of the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.core.block_pool import BlockPool

from loraflow_server import core

BLOCKS = 64


class Walked(list[Any]):
    """Counts how often it is walked over."""

    walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()


@pytest.fixture
def engine() -> Any:
    """vLLM's own pool of blocks, in what stands for its engine."""
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
    pool.blocks = Walked(pool.blocks)
    manager = SimpleNamespace(block_pool=pool)
    return SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_manager=manager),
        reset_prefix_cache=lambda *_: pool.reset_prefix_cache(),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False)),
        pool=pool,
    )


def cache(pool: Any, hashes: Iterable[bytes]) -> list[Any]:
    """Fill a block for each of ``hashes``, and free it: it stays in the cache."""
    taken = pool.get_new_blocks(len(list(hashes)))
    for block, found in zip(taken, hashes, strict=True):
        pool._insert_block_hash(found, block, num_tokens=16)
    pool.free_blocks(taken)
    return list(taken)


HASHES = [b"one-0000", b"two-0000", b"two-0000", b"three-0000"]  # two blocks of one content


def test_no_block_keeps_a_hash_and_no_other_is_touched(engine: Any) -> None:
    pool = engine.pool
    every, taken = pool.blocks, cache(pool, HASHES)
    assert {block.block_hash for block in taken} == set(HASHES)
    every.walks = 0
    assert core.fresh_caches(engine) is None
    assert pool.blocks is every
    assert every.walks == 0
    assert not any(block.block_hash for block in every)
    assert all(pool.cached_block_hash_to_block.get_one_block(key) is None for key in HASHES)
    again = cache(pool, HASHES)  # the pool goes on as after vLLM's own reset
    assert {block.block_hash for block in again} == set(HASHES)
    assert "reset_prefix_cache" not in vars(pool)


def test_blocks_in_use_are_told(engine: Any) -> None:
    pool = engine.pool
    cache(pool, HASHES)
    held = pool.get_new_blocks(1)
    assert core.fresh_caches(engine) == "some blocks are still in use"
    assert pool.cached_block_hash_to_block.get_one_block(HASHES[0]) is not None
    pool.free_blocks(held)
    assert core.fresh_caches(engine) is None


def test_another_vllm_resets_as_it_does(engine: Any) -> None:
    pool = engine.pool
    cache(pool, HASHES)
    pool.cached_block_hash_to_block = SimpleNamespace()  # no table that we know
    pool.blocks.walks = 0
    assert core.fresh_caches(engine) is None
    assert pool.blocks.walks == 1
    assert not any(block.block_hash for block in pool.blocks)


@pytest.mark.parametrize("empties", [True, None, False])
def test_prefixes_that_a_connector_keeps_are_forgotten_too(engine: Any, *, empties: bool | None) -> None:
    """vLLM's own scheduler, with CPU offloading or the like: blocks come back by their hash, whatever the weights."""
    from vllm.v1.core.sched.scheduler import Scheduler

    asked: list[bool | None] = []

    def reset_cache() -> bool | None:
        asked.append(empties)
        return empties  # None: one that keeps nothing

    scheduler = Scheduler.__new__(Scheduler)
    scheduler.__dict__ |= {
        "connector": SimpleNamespace(reset_cache=reset_cache),
        "kv_cache_manager": SimpleNamespace(block_pool=engine.pool, reset_prefix_cache=engine.pool.reset_prefix_cache),
        "running": [],
        "prev_step_scheduled_req_ids": set(),
        "aux_output_connector": None,
        "log_stats": False,
    }
    engine.scheduler, engine.reset_prefix_cache = scheduler, scheduler.reset_prefix_cache
    cache(engine.pool, HASHES)
    found = core.fresh_caches(engine)
    assert asked == [empties]
    assert (found is None) is (empties is not False)

"""Versions fetched from an object store: what arrives is what was published, and what is loaded is never evicted."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save

from loraflow.policy import Policy
from loraflow.store import AdapterStore
from loraflow_server import cache as cache_module
from loraflow_server.cache import StoreCache, allowed_url
from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError
from loraflow_server.service import Service
from loraflow_server.settings import Settings

SIZE = 5000


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterStore]:
    monkeypatch.setattr(cache_module.time, "sleep", lambda seconds: None)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    with AdapterStore("memory://bucket/runs", "run", retain=1, grace_period=0.0) as opened:
        yield opened
    fs.store.clear()


def publish(store: AdapterStore, version: int, size: int = SIZE) -> tuple[str, str]:
    """URL and name of a version with a file of ``size`` bytes."""
    policy = Policy("run", version)
    files = {"adapter_config.json": [b"{}"], "adapter_model.safetensors": [bytes([version]) * size]}
    return store.publish(policy, files, digest="00").path, policy.name


def failure(call: Any) -> PluginError:
    with pytest.raises(PluginError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("chunk", [16 << 20, 999])
def test_the_files_are_those_published(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(cache_module, "_CHUNK", chunk)
    url, name = publish(store, 3)
    folder, phases = StoreCache(tmp_path, 1 << 20).fetch(url, name)
    assert (folder / "adapter_model.safetensors").read_bytes() == bytes([3]) * SIZE
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert set(phases) == {"manifest", "fetch"}
    assert not list(tmp_path.glob("*.part"))


def test_a_version_is_fetched_once(store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, name = publish(store, 0)
    cache = StoreCache(tmp_path, 1 << 20)
    first, _ = cache.fetch(url, name)
    monkeypatch.setattr(cache_module, "_fetch_into", None)  # would raise if it were called
    assert cache.fetch(url, name)[0] == first
    assert StoreCache(tmp_path, 1 << 20).fetch(url, name)[0] == first  # another server of this host


def test_damage_is_found(store: AdapterStore, tmp_path: Path) -> None:
    url, name = publish(store, 1)
    fs = fsspec.filesystem("memory")
    path = "/bucket/runs/run/v1/adapter_model.safetensors"
    good = fs.cat_file(path)
    cache = StoreCache(tmp_path, 1 << 20)
    for bad in (good[:-1] + b"\xff", good[:-1], b"", bytes(len(good))):
        fs.pipe_file(path, bad)
        assert failure(lambda: cache.fetch(url, name)).code in {"damaged", "store_failed"}
        assert [item for item in tmp_path.iterdir() if item.suffix != ".lock"] == []
    fs.pipe_file(path, good)
    assert cache.fetch(url, name)[0].is_dir()


def test_what_is_not_there_or_another_version(store: AdapterStore, tmp_path: Path) -> None:
    url, name = publish(store, 1)
    other, _ = publish(store, 2)
    cache = StoreCache(tmp_path, 1 << 20)
    assert failure(lambda: cache.fetch(url + "9", name)).status == 404
    assert failure(lambda: cache.fetch(other, name)).code == "wrong_version"
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/bucket/runs/run/v2/manifest.json", fs.cat_file("/bucket/runs/run/v1/manifest.json"))
    assert failure(lambda: cache.fetch(other, name)).code == "damaged"  # another version's manifest in front of it
    fs.pipe_file("/bucket/runs/run/v1/manifest.json", b"{}")
    assert failure(lambda: cache.fetch(url, name)).code == "damaged"


def test_the_cache_stays_within_its_size_and_keeps_what_is_held(store: AdapterStore, tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, 3 * (SIZE + 2) + 100)
    folders = []
    for version in range(3):
        folders.append(cache.fetch(*publish(store, version))[0])
        cache.release({folders[-1]} if version != 1 else set())
    for version in (3, 4):
        folders.append(cache.fetch(*publish(store, version))[0])
        cache.release({folders[-1]})
        assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) <= 3 * (SIZE + 2) + 100
    assert [folder.is_dir() for folder in folders] == [False, True, False, True, True]
    assert cache.held() == {folders[1]}


def test_another_process_keeps_its_entries(store: AdapterStore, tmp_path: Path) -> None:
    room = SIZE + 100
    mine, theirs = StoreCache(tmp_path, room), StoreCache(tmp_path, room)
    folder, _ = theirs.fetch(*publish(store, 0))
    url, name = publish(store, 1)
    assert failure(lambda: mine.fetch(url, name)).code == "cache_full"
    assert folder.is_dir()
    theirs.close()
    assert mine.fetch(url, name)[0].is_dir()
    assert not folder.exists()


def test_locks_go_with_their_entries(store: AdapterStore, tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, 3 * (SIZE + 2) + 100)
    for version in range(12):
        cache.release({cache.fetch(*publish(store, version))[0]})
    assert len(list(tmp_path.glob("*.lock"))) == len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3
    assert cache.nbytes() == 3 * (SIZE + 2)


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_fetches_is_not(
    store: AdapterStore, tmp_path: Path
) -> None:
    dead, alive = tmp_path / ("0" * 32), tmp_path / ("1" * 32)
    for entry in (dead, alive):
        entry.with_suffix(".123.part").mkdir()
        (entry.with_suffix(".123.part") / "adapter_model.safetensors").write_bytes(b"half")
    with alive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        StoreCache(tmp_path, 1 << 20).fetch(*publish(store, 0))
        assert not dead.with_suffix(".123.part").exists()
        assert not dead.with_suffix(".lock").exists()
        assert alive.with_suffix(".123.part").exists()
        assert alive.with_suffix(".lock").exists()


def test_a_lock_that_was_removed_is_not_believed(store: AdapterStore, tmp_path: Path) -> None:
    """Between opening a lock and holding it, another process evicts the entry, and the lock with it."""
    url, name = publish(store, 0)
    StoreCache(tmp_path, 1 << 20).fetch(url, name)
    [lock] = tmp_path.glob("*.lock")
    real, times = cache_module._open_lock, []

    def late(entry: Path) -> int:
        descriptor = real(entry)
        if not times:
            lock.unlink()
        times.append(entry)
        return descriptor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "_open_lock", late)
        cache = StoreCache(tmp_path, 1 << 20)
        folder, _ = cache.fetch(url, name)
    assert len(times) == 2
    assert os.fstat(cache._held[folder]).st_ino == lock.stat().st_ino


def test_a_version_larger_than_the_cache(store: AdapterStore, tmp_path: Path) -> None:
    url, name = publish(store, 0)
    assert failure(lambda: StoreCache(tmp_path, SIZE - 1).fetch(url, name)).code == "too_large"


def test_many_at_the_same_time(store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [publish(store, version) for version in range(4)]
    fetched: list[str] = []
    real = cache_module._fetch_into

    def counting(fs: Any, key: str, manifest: Any, entry: Path) -> None:
        fetched.append(key)
        real(fs, key, manifest, entry)

    monkeypatch.setattr(cache_module, "_fetch_into", counting)
    errors: list[Exception] = []

    def work() -> None:
        try:
            cache = StoreCache(tmp_path, 1 << 20)
            for version, (url, name) in enumerate(versions):
                folder, _ = cache.fetch(url, name)
                assert (folder / "adapter_model.safetensors").read_bytes() == bytes([version]) * SIZE
            cache.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(fetched) == 4


def test_allowed_urls() -> None:
    stores = ("s3://bucket/runs", "memory://x")
    assert allowed_url("s3://bucket/runs/a/v1/", stores) == "s3://bucket/runs/a/v1"
    assert failure(lambda: allowed_url("s3://bucket/runs2/v1", stores)).status == 403
    assert failure(lambda: allowed_url("s3://bucket/runs/a/../../b", stores)).status == 403


def test_a_full_disk_is_an_answer_and_leaves_nothing(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, name = publish(store, 3)
    cache = StoreCache(tmp_path, 1 << 20)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_module.os, "posix_fallocate", full)
        found = failure(lambda: cache.fetch(url, name))
    assert (found.code, found.status) == ("cache_failed", 507)
    assert "No space left" in found.message
    assert not list(tmp_path.glob("*.part"))
    assert cache.held() == frozenset()
    assert cache.fetch(url, name)[0].is_dir()


class Models:
    """vLLM's registry of names."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.lora_resolver_lock: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        ids = itertools.count(1)
        self.lora_id_counter = SimpleNamespace(inc=lambda _: next(ids))

    def is_base_model(self, name: str) -> bool:
        return name == "base"


def test_a_version_that_is_being_loaded_is_held_whatever_is_unloaded_beside_it(
    store: AdapterStore, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    weights = save({"base_model.model.a.lora_A.weight": torch.zeros(1, 1)})
    urls = []
    for version in (0, 1):
        files = {"adapter_config.json": [b"{}"], "adapter_model.safetensors": [weights]}
        urls.append(store.publish(Policy("run", version), files, digest="00").path)

    async def story() -> None:
        reading, loaded = asyncio.Event(), asyncio.Event()
        loaded.set()

        async def add_lora(request: Any) -> bool:
            reading.set()
            await loaded.wait()
            return True

        config = SimpleNamespace(
            lora_config=True, model_config=SimpleNamespace(), parallel_config=SimpleNamespace(worker_extension_cls="")
        )
        client = SimpleNamespace(
            add_lora=add_lora, vllm_config=config, output_processor=SimpleNamespace(request_states={})
        )
        settings = Settings(stores=(urls[0].rpartition("/")[0],), cache_dir=tmp_path / "cache")
        service = Service(Engine(client, Models()), settings, "0")
        await service.load({"name": "run-v0", "url": urls[0]})
        loaded.clear()
        reading.clear()
        loading = asyncio.create_task(service.load({"name": "run-v1", "url": urls[1]}))
        await reading.wait()
        await service.unload("run-v0")
        loaded.set()
        folder = Path((await loading)["path"])
        assert service.cache is not None
        assert folder in service.cache.held()
        assert not StoreCache(tmp_path / "cache", 1 << 20)._evict(folder)  # another server of this host
        assert (folder / "adapter_model.safetensors").is_file()
        await service.unload("run-v1")
        assert service.cache.held() == frozenset()

    asyncio.run(story())

"""Seeded faults: writers killed at random moments, versions corrupted at random places."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from loraflow import store_guard
from loraflow.errors import PublishError
from loraflow.policy import Policy
from loraflow.store import AdapterStore

WRITER = """
import sys
from loraflow.policy import Policy
from loraflow.store import AdapterStore

store = AdapterStore(sys.argv[1], "run", retain=2, grace_period=0)
found = store.recover()
for policy in found.live:
    if policy != found.committed:
        store.retire(policy)
print("up", flush=True)
for version in range(store.next_version(), 10**6):
    policy, seed = Policy("run", version), bytes([version % 251])
    files = {"adapter_model.safetensors": [seed * 300_000], "adapter_config.json": [seed * 10]}
    store.publish(policy, files, digest="")
    print(f"published {version}", flush=True)
    if version % 5 == 3:
        store.mark_burnt(policy)
        store.retire(policy)
    else:
        store.mark_committed(policy)
        print(f"committed {version}", flush=True)
    if version >= 2:
        store.retire(Policy("run", version - 2))
    store.collect()
"""


def policy(version: int) -> Policy:
    return Policy("run", version)


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_that_is_killed_at_any_moment_loses_and_reuses_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    published: list[int] = []
    committed = -1
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(chance.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        for line in process.stdout.read().splitlines():
            word, number = line.split()
            if word == "published":
                published.append(int(number))
            else:
                committed = int(number)
        process.stdout.close()
        process.wait()
        assert published == sorted(set(published))  # no name twice

        with AdapterStore(str(tmp_path), "run", retain=2, grace_period=0) as store:
            found = store.recover()
            newest = -1 if found.committed is None else found.committed.version
            assert found.lost == ()
            assert newest >= committed  # it may have died between a commit and its line
            assert newest <= max(published, default=-1)
            assert store.next_version() > max(published, default=-1)
            for live in found.live:
                fill = bytes([live.version % 251])
                assert store.read(live) == {
                    "adapter_model.safetensors": fill * 300_000,
                    "adapter_config.json": fill * 10,
                }
            folders = {path.name for path in (tmp_path / "run").iterdir()} - {"ledger.json", "writer.lock"}
            assert folders == {f"v{v}" for v in store._ledger.versions}
            for live in found.live:
                if live != found.committed:
                    store.retire(live)
            store.collect()
            assert len(store._ledger.versions) <= 2
            if found.committed is not None:
                store.verify(found.committed)


# --- 1,000 single corruptions of published versions


def adapter_files() -> dict[str, list[bytes]]:
    numbers = np.random.default_rng(0)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": numbers.normal(
            size=(8, 32) if side == "A" else (32, 8)
        ).astype(np.float32)
        for layer in range(2)
        for side in "AB"
    }
    return {
        "adapter_model.safetensors": [save(tensors)],
        "adapter_config.json": [json.dumps({"r": 8, "lora_alpha": 16, "peft_type": "LORA"}).encode()],
    }


def flip_a_bit(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def append(folder: Path, chance: random.Random) -> None:
    with chance.choice(sorted(folder.iterdir())).open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 9)))


def swap_with_another_version(folder: Path, chance: random.Random) -> None:
    name = chance.choice(["adapter_model.safetensors", "manifest.json", "adapter_config.json"])
    shutil.copy(folder.parent / "v1" / name, folder / name)


def swap_two_files(folder: Path, chance: random.Random) -> None:
    one, other = chance.sample(sorted(folder.iterdir()), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def edit_the_config(folder: Path, chance: random.Random) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_bytes())
    config[chance.choice(sorted(config))] = chance.randrange(100)
    path.write_text(json.dumps(config))


def rename_a_tensor(folder: Path, chance: random.Random) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load(path.read_bytes())
    name = chance.choice(sorted(tensors))
    tensors[name.replace("q_proj", "k_proj")] = tensors.pop(name)
    path.write_bytes(save(tensors))


def edit_the_manifest(folder: Path, chance: random.Random) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    field = chance.choice(["digest", "created", "version", "files"])
    manifest[field] = {"digest": "00", "created": "now", "version": 7, "files": manifest["files"][:1]}[field]
    path.write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))


def remove_a_file(folder: Path, chance: random.Random) -> None:
    chance.choice(sorted(folder.iterdir())).unlink()


def add_a_file(folder: Path, chance: random.Random) -> None:
    (folder / chance.choice(["adapter_model.bin", "new_embeddings.safetensors", ".hidden"])).write_bytes(b"x")


FAULTS: list[Callable[[Path, random.Random], None]] = [
    flip_a_bit,
    truncate,
    append,
    swap_with_another_version,
    swap_two_files,
    edit_the_config,
    rename_a_tensor,
    edit_the_manifest,
    remove_a_file,
    add_a_file,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_hundred_corruptions_of_a_kind_are_all_noticed(
    tmp_path: Path, fault: Callable[[Path, random.Random], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_guard, "VISIBILITY_SECONDS", 0.01)
    chance = random.Random(fault.__name__)
    with AdapterStore(str(tmp_path), "run", retain=1, grace_period=0) as store:
        files = adapter_files()
        store.publish(policy(0), files, digest="aa")
        other = {**files, "adapter_config.json": [b'{"r": 16}'], "adapter_model.safetensors": [save({})]}
        store.publish(policy(1), other, digest="bb")
        folder, clean = tmp_path / "run/v0", tmp_path / "clean"
        shutil.copytree(folder, clean)
        missed = []
        for attempt in range(100):
            fault(folder, chance)
            if contents(folder) == contents(clean):
                continue  # an edit may write what was there
            try:
                store.verify(policy(0))
            except PublishError:
                pass
            else:
                missed.append(attempt)
            shutil.rmtree(folder)
            shutil.copytree(clean, folder)
            store.verify(policy(0))  # and no false alarm
        assert missed == []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}

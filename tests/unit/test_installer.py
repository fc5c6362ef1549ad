"""What loraflow puts into a slot is, bit for bit, what vLLM's own loader puts there; without an engine."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraflow.adapter import AdapterSpec, take_snapshot, write_adapter
from loraflow.digest import SlotDigest
from loraflow.layout import Rect, ServingCopy, SlotLayout, lora_shapes
from loraflow_server import direct
from loraflow_server.slots import SlotReading
from tests.helpers.lora_worker import LoraHost, lora_host
from tests.helpers.tiny import peft_model, randomize

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

_ids = iter(range(1, 10_000))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def host(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LoraHost]:
    with lora_host(tiny_model, dtype=request.param) as made:
        yield made


class Trainer:
    """An adapter, its payloads and its folders."""

    def __init__(self, host: LoraHost, tiny: Path, work: Path, **lora: Any) -> None:
        self.dtype = host.config.lora_config.lora_dtype
        self.model = peft_model(tiny, std=0.2, **lora)
        self.spec = AdapterSpec.from_model(self.model)
        self.copy = ServingCopy(self.spec, self.dtype)
        self.work = work
        self.host = host
        shapes = lora_shapes(self.spec)
        self.layout_id = f"layout-{next(_ids)}"
        answer = host.worker.loraflow_layout(self.layout_id, {name: list(shape) for name, shape in shapes.items()})
        rects = tuple(Rect.from_list(item) for item in answer["ok"]["rects"])
        self.digest = SlotDigest(SlotLayout(self.layout_id, self.dtype, shapes, (rects,), 1), self.copy)

    def version(self, seed: int) -> tuple[Path, list[int]]:
        """Draw it anew: its folder, and the checksums that must be served."""
        randomize(self.model, seed=seed, std=0.2)
        snapshot = take_snapshot(self.model, dtype=self.dtype)
        folder = self.work / f"v{seed}"
        folder.mkdir()
        write_adapter(snapshot, folder, fsync=False)
        return folder, list(self.digest.expected(snapshot)[0])

    def direct(self, int_id: int, *, wait: bool = True) -> dict[str, Any]:
        """Install what the copy holds."""
        payload = self.copy.flat.view(torch.uint8)
        self.host.worker.loraflow_payloads().bytes_of = lambda _: payload
        return self.host.worker.loraflow_direct(int_id, self.layout_id, wait, {"kind": "shm"})

    def folder(self, int_id: int, folder: Path) -> dict[str, Any]:
        return self.host.worker.loraflow_direct(int_id, self.layout_id, True, {"kind": "folder", "path": str(folder)})


LORAS = [
    {"r": 8, "lora_alpha": 24},
    {"r": 16, "use_rslora": True},
    {"r": 4, "target_modules": ["v_proj", "gate_proj", "down_proj"]},
    {"r": 8, "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
]


@pytest.mark.parametrize("lora", LORAS, ids=["plain", "rslora", "some", "patterns"])
def test_bits_are_those_of_vllm_s_loader(
    host: LoraHost, tiny_model: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    trainer = Trainer(host, tiny_model, tmp_path, **lora)
    for seed in range(5):  # more than are kept: memory of older ones is filled again
        folder, sums = trainer.version(seed)
        wanted = host.load(folder, next(_ids))
        for answer, int_id in (
            (trainer.direct(one := next(_ids)), one),
            (trainer.folder(two := next(_ids), folder), two),
        ):
            assert "ok" in answer, answer
            assert answer["ok"]["sums"] == sums
            assert answer["ok"]["dirty"] == []
            found = host.slots_of(int_id)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def test_a_slot_that_was_taken_away_is_filled_with_the_right_version(
    host: LoraHost, tiny_model: Path, tmp_path: Path
) -> None:
    trainer = Trainer(host, tiny_model, tmp_path, r=8)
    wanted: dict[int, list[torch.Tensor]] = {}
    for seed in range(6):
        trainer.version(seed)
        int_id = next(_ids)
        assert "ok" in trainer.direct(int_id)
        wanted[int_id] = host.slots_of(int_id)
    for int_id in [int_id for int_id in wanted if int_id in host.manager.list_adapters()] * 2:
        found = host.slots_of(int_id)  # two slots for three registered: some are given back
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted[int_id], strict=True))
    assert len(host.manager.list_adapters()) == host.manager.capacity


def test_memory_is_used_again_and_no_more_than_needed_is_held(host: LoraHost, tiny_model: Path, tmp_path: Path) -> None:
    trainer, other = Trainer(host, tiny_model, tmp_path, r=8), Trainer(host, tiny_model, tmp_path, r=2)
    installer, capacity = host.worker.loraflow_installer(), host.manager.capacity
    trainer.version(0)
    ids = [next(_ids) for _ in range(2 * capacity)]
    places = []
    for int_id in ids:
        trainer.direct(int_id)
        places.append(host.manager.list_adapters()[int_id].loras)
    assert len({id(place) for place in places}) == capacity
    assert len(installer._kept) == capacity
    for int_id in ids[capacity:]:
        assert host.worker.loraflow_drop(int_id)["ok"]["dropped"]
    assert not host.worker.loraflow_drop(ids[-1])["ok"]["dropped"]
    assert len(installer._kept) == 1  # for the next
    other.version(1)
    other.direct(next(_ids))  # of another shape: nothing of the first is held back
    assert len(installer._kept) == 1
    gc.collect()


def test_a_version_that_others_push_out_before_it_is_published_is_read_once_it_is(
    host: LoraHost, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests may ask for it from its proof on; a step in which a load fails is the end of vLLM's engine."""
    from vllm.lora.request import LoRARequest

    trainer, int_id = Trainer(host, tiny_model, tmp_path, r=8), next(_ids)
    folder, sums = trainer.version(0)
    assert trainer.direct(int_id)["ok"]["sums"] == sums
    wanted = host.slots_of(int_id)
    for _ in range(host.manager.capacity):  # requests for so many others, in the steps that follow
        host.load(folder, next(_ids))
    assert int_id not in host.manager.list_adapters()
    place = tmp_path / "published-behind"
    behind = threading.Timer(0.3, lambda: folder.rename(place))
    behind.start()
    host.loras.add_adapter(LoRARequest("run-v0", int_id, str(place)))
    behind.join()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(host.slots_of(int_id), wanted, strict=True))
    monkeypatch.setattr(direct, "PUBLISHED_SECONDS", 1.0)
    for _ in range(host.manager.capacity):
        host.load(place, next(_ids))
    began = time.monotonic()
    for request in (
        LoRARequest("run-v0", int_id, str(tmp_path / "never")),
        LoRARequest("another", next(_ids), str(tmp_path / "never")),  # no version of ours: nobody writes it behind
    ):
        with pytest.raises(Exception, match="never"):
            host.loras.add_adapter(request)
    assert 1.0 <= time.monotonic() - began < 2.0


def test_what_does_not_fit_leaves_nothing(host: LoraHost, tiny_model: Path, tmp_path: Path) -> None:
    trainer = Trainer(host, tiny_model, tmp_path, r=8)
    folder, _ = trainer.version(0)
    int_id = next(_ids)
    trainer.direct(int_id)
    before = host.slots_of(int_id)
    assert trainer.direct(int_id)["error"]["code"] == "id_taken"
    payload = trainer.copy.flat.view(torch.uint8)
    for short in (payload[:-4], payload[:-1]):
        host.worker.loraflow_payloads().bytes_of = lambda _, short=short: short
        answer = host.worker.loraflow_direct(next(_ids), trainer.layout_id, True, {"kind": "shm"})
        assert answer["error"]["code"] == "bad_source"
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert trainer.folder(next(_ids), folder)["error"]["code"] == "bad_file"
    file.write_bytes(whole.replace(b"layers.0.", b"layers.9.", 1))
    assert trainer.folder(next(_ids), folder)["error"]["code"] == "bad_file"
    file.write_bytes(whole)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    assert trainer.folder(next(_ids), folder)["error"]["code"] == "load_failed"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(host.slots_of(int_id), before, strict=True))


def test_another_writer_s_file_is_brought_into_order(host: LoraHost, tiny_model: Path, tmp_path: Path) -> None:
    trainer = Trainer(host, tiny_model, tmp_path, r=8)
    _, sums = trainer.version(0)
    trainer.model.save_pretrained(tmp_path / "peft")  # float32, in an order of its own
    answer = trainer.folder(next(_ids), tmp_path / "peft")
    assert answer["ok"]["sums"] == sums


def test_names_are_found_under_the_mapper_of_older_vllm(
    host: LoraHost, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.27 and 0.28 call it otherwise; asked for whole names, it stacks q, k and v into one module."""
    now = host.manager.model.hf_to_vllm_mapper
    assert now._map_name("layers.0.self_attn.q_proj.weight") != "layers.0.self_attn.q_proj.weight"
    older = SimpleNamespace(_map_name=now._map_name, get_unstacked_mapper=now.get_rename_mapper)
    monkeypatch.setattr(host.manager.model, "hf_to_vllm_mapper", older, raising=False)
    trainer = Trainer(host, tiny_model, tmp_path, r=8)
    _, sums = trainer.version(0)
    assert trainer.direct(next(_ids))["ok"]["sums"] == sums


class Experts:
    """What vLLM's ``FusedMoEWithLoRA`` keeps: buffers by expert, and lists of views into them."""

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        self.w13_lora_a_stacked = tuple(torch.zeros(slots, 2, 4, 8, dtype=dtype) for _ in range(2))
        self.w2_lora_b_stacked = (torch.zeros(slots, 2, 8, 4, dtype=dtype),)
        self.adapter_enabled = torch.zeros(slots + 1, dtype=torch.int)
        self.lora_a_stacked = [buffer[slot][0] for slot in range(slots) for buffer in self.w13_lora_a_stacked]
        self.lora_b_stacked = [self.w2_lora_b_stacked[0][slot][0] for slot in range(slots)]

    def held(self, slot: int) -> list[torch.Tensor]:
        return [buffer[slot] for buffer in (*self.w13_lora_a_stacked, *self.w2_lora_b_stacked)]


def test_nothing_of_the_adapter_before_is_left_in_layers_that_this_one_leaves_alone(
    host: LoraHost, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = Experts(len(host.manager.lora_index_to_id), host.config.lora_config.lora_dtype)
    monkeypatch.setitem(host.manager.modules, "model.layers.0.mlp.experts", experts)
    trainer = Trainer(host, tiny_model, tmp_path, r=8)
    _, wanted = trainer.version(seed=1)
    for slot in range(len(host.manager.lora_index_to_id)):
        for buffer in experts.held(slot):
            buffer.fill_(1)  # another trainer's adapter was there
    int_id = next(_ids)
    answer = trainer.direct(int_id)["ok"]
    slot = host.manager.lora_index_to_id.index(int_id)
    assert not any(buffer.any() for buffer in experts.held(slot))
    assert (answer["sums"], answer["dirty"]) == (wanted, [])
    experts.held(slot)[-1][1, 2, 3] = float("nan")
    layout = host.worker.loraflow_known_layout(trainer.layout_id)
    assert SlotReading(host.manager, layout, slot).result()[1] == ["model.layers.0.mlp.experts"]

"""Peak extra memory of a merged sync: two buckets and one layer, counted tensor by tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from loraflow.adapter import take_snapshot
from loraflow.merge import MergeSource
from loraflow.transports.pipeline import send
from loraflow.transports.wire import plan_buckets, with_siblings

BUCKET = 1 << 20


class Meter(TorchDispatchMode):
    """Bytes of the storages made inside of it, alive now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        mine = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), mine)
        return out

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage.data_ptr()
        if key == 0 or key in self._seen or key in inputs:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def freed() -> None:
            self._seen.discard(key)
            self.alive -= size

        weakref.finalize(storage, freed)


class Silent:
    """A link to nobody that takes every bucket, one call later than it is sent."""

    def __init__(self) -> None:
        self.buckets = 0
        self.group = self
        self.buffers = 2
        self.device = torch.device("cpu")
        self.server = self
        self.url = "http://nobody"

    def send(self, buffer: torch.Tensor, bucket: Any) -> Silent:
        self.buckets += 1
        return self

    def wait(self, pending: Any) -> None:
        pass


def test_two_buckets_and_one_layer() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        tie_word_embeddings=False,
    )
    base = AutoModelForCausalLM.from_config(config).bfloat16()
    layer = sum(p.numel() * p.element_size() for p in base.model.layers[0].parameters())
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    snapshot = take_snapshot(model, dtype=torch.float32)
    source = MergeSource(model, dtype=torch.bfloat16)
    names = with_siblings(source.changed, source.weights)
    tensors = source.announce(names)
    buckets = plan_buckets(tensors, BUCKET)
    link: Any = Silent()

    with Meter() as meter:
        send([link], buckets, source.merged(snapshot, names), {})

    assert link.buckets == len(buckets) > 4
    assert sum(t.nbytes for t in tensors) > 4 * layer
    assert 2 * max(b.nbytes for b in buckets) < meter.peak <= 2 * max(b.nbytes for b in buckets) + layer

"""`GlooWeightTransferEngine`: vLLM's packed broadcast of checkpoint weights, over gloo instead of NCCL.

Works where there is no GPU: on CPU servers, and so in tests of the whole path. The life cycle (layer-wise reload) and
the packing are those of vLLM's own ``nccl`` engine; every wait has the trainer's timeout.

Nothing here raises once a server runs: with tensor parallelism vLLM's executor stops reading at the first worker's
error, takes the others' answers for those of the next calls, and never answers right again (0.32). And with data
parallelism it reports the first engine's answer alone. So each worker tells the trainer itself, through the store, what
became of each phase: ``ok``, or the reason.

Server: ``--weight-transfer-config '{"backend": "gloo"}'``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from loraflow_server.addresses import address_towards

_c10d: Any = torch.distributed  # bindings that its stubs leave out

logger = logging.getLogger("vllm.loraflow")

__all__ = ["GlooInitInfo", "GlooUpdateInfo", "GlooWeightTransferEngine"]


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How to join the trainer's group.

    Attributes:
        master_address: Host of the trainer's store, as this worker reaches it.
        master_port: Its port.
        rank_offset: Rank of the first worker in the group; the trainer is rank 0.
        world_size: Trainer and workers of all engines.
        packed_buffer_size_bytes: A bucket is closed by the tensor that takes it past this size.
        timeout: Seconds for joining, and for one collective.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed_buffer_size_bytes: int
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What the next buckets hold: one entry per tensor, in the order in which they are packed.

    Attributes:
        update: The trainer's number of this update; the workers answer under it.
        names: Checkpoint names.
        dtype_names: As in ``torch``.
        shapes: Whole shapes.
    """

    update: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"names, dtype_names and shapes differ in length: {len(self.names)}, {len(self.dtype_names)}, "
                f"{len(self.shapes)}"
            )


@dataclass(frozen=True)
class _Slot:
    """One tensor's place in a bucket, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]
    """The worker's side of a gloo broadcast group.

    Attributes:
        process_group: The group; None where none was joined.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group: Any = None
        self._store: Any = None
        self._rank = 0
        self._update = 0
        self._bucket_bytes = 0
        self._failure = ""

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group; waits until every worker has joined, or for the timeout."""
        self.shutdown()
        self._attempt("join", lambda: self._join(init_info))

    def start_weight_update(self) -> None:
        """Prepare every layer for new checkpoint weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._failure = ""
        self._attempt("start", lambda: initialize_layerwise_reload(self.model))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load; then tell the trainer."""
        self._update = int(update_info.get("update", 0))
        self._attempt("receive", lambda: self.receive_weights(self.parse_update_info(update_info)))
        self._tell("received")

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive bucket by bucket; each is loaded before the next one is asked for.

        After an error in loading, the rest is received all the same: the trainer and the other workers count on it.
        """
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            for slots in _buckets(update_info, self._bucket_bytes):
                last = slots[-1]
                bucket = torch.empty(last.start + last.size, dtype=torch.uint8)
                self.process_group.broadcast(bucket, 0).wait()
                if not self._failure:
                    weights = [(slot.name, _unpack(bucket, slot).to(self.device)) for slot in slots]
                    self._attempt("load", partial(self.model.load_weights, weights))

    def finish_weight_update(self) -> None:
        """Put every layer back in service, those without new weights as they were; then tell the trainer."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._attempt("finish", lambda: finalize_layerwise_reload(self.model, self.model_config))
        self._tell("finished")

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Asked for by vLLM's base class before 0.28; loraflow sends from its own side."""
        raise NotImplementedError("weights for this engine are sent by loraflow.SyncManager")

    def shutdown(self) -> None:
        """Leave the group."""
        self.process_group = None
        self._store = None

    def _join(self, info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        self._rank = info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit = timedelta(seconds=info.timeout)
        host, port = info.master_address, info.master_port
        store = _c10d.TCPStore(host, port, None, is_master=False, timeout=limit, wait_for_workers=False)
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
        group = _c10d.ProcessGroupGloo(_c10d.PrefixStore("loraflow", store), self._rank, info.world_size, options)
        self.process_group, self._store, self._bucket_bytes = group, store, info.packed_buffer_size_bytes

    def _attempt(self, phase: str, work: Callable[[], object]) -> None:
        """Run ``work``; an error is kept for `_tell`, and the first one of an update is the one told."""
        try:
            work()
        except Exception as error:
            logger.exception("gloo weight transfer: %s failed", phase)
            self._failure = self._failure or f"{phase}: {type(error).__name__}: {error}"

    def _tell(self, phase: str) -> None:
        if self._store is None:
            return
        try:
            self._store.set(f"{phase}/{self._update}/{self._rank}", self._failure or "ok")
        except RuntimeError:
            logger.warning("gloo weight transfer: the trainer is gone")
            self.shutdown()


def _unpack(bucket: torch.Tensor, slot: _Slot) -> torch.Tensor:
    part = bucket[slot.start : slot.start + slot.size]
    if slot.start % slot.dtype.itemsize:
        part = part.clone()  # a view in another dtype must be aligned to it
    return part.view(slot.dtype).view(slot.shape)


def _buckets(info: GlooUpdateInfo, bucket_bytes: int) -> Iterator[list[_Slot]]:
    """The same cut as the trainer's: a bucket is closed by the tensor that takes it past ``bucket_bytes``."""
    slots: list[_Slot] = []
    filled = 0
    for name, dtype_name, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        slots.append(_Slot(name, dtype, tuple(shape), filled, size))
        filled += size
        if filled > bucket_bytes:
            yield slots
            slots, filled = [], 0
    if slots:
        yield slots

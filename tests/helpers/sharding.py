"""The tiny policy in pieces on several ranks, by FSDP1, FSDP2 or DeepSpeed's ZeRO-3, and what of it is gathered."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers.processes import ROOT
from tests.helpers.tiny import peft_model


class Sharded(ABC):
    """One rank's part of the policy.

    Attributes:
        model: As it is trained, and as `SyncManager` gets it.
        numel: Elements of all parameters, whole.
        lora_numel: Those of the adapter.
    """

    def __init__(self, folder: str) -> None:
        self.model: Any = peft_model(folder, seed=3)
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        self.numel = sum(sizes.values())
        self.lora_numel = sum(size for name, size in sizes.items() if "lora_" in name)

    def train(self, ids: torch.Tensor) -> None:
        """One optimizer step on ``ids`` (B, T)."""
        self.model.train()
        self._optimizer.zero_grad()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()

    def _optimize(self) -> None:
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.SGD(trainable, lr=0.5)

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Inside, the elements of each gather are listed."""
        owner, name, size = self._gathers()
        inner = getattr(owner, name)
        found: list[int] = []

        def noting(subject: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(size(subject))
            return inner(subject, *args, **kwargs)

        with patch.object(owner, name, noting):
            yield found

    @abstractmethod
    def _gathers(self) -> tuple[type, str, Callable[[Any], int]]:
        """The method that every gather passes through, and how many elements it gathers for its object."""


class _FSDP2(Sharded):
    def __init__(self, folder: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(folder)
        mesh = init_device_mesh("cpu", (2,))
        for layer in self.model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._optimize()

    def _gathers(self) -> tuple[type, str, Callable[[Any], int]]:
        from torch.distributed.tensor import DTensor

        return DTensor, "full_tensor", lambda tensor: tensor.numel()


class _FSDP1(Sharded):
    def __init__(self, folder: str) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

        super().__init__(folder)

        def is_lora(module: torch.nn.Module) -> bool:  # units of their own, as PEFT's guide has it
            return not list(module.children()) and any(p.requires_grad for p in module.parameters())

        self.model = FullyShardedDataParallel(
            self.model,
            auto_wrap_policy=lambda *args, **kwargs: lambda_auto_wrap_policy(*args, **kwargs, lambda_fn=is_lora),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        self._optimize()

    def _gathers(self) -> tuple[type, str, Callable[[Any], int]]:
        from torch.distributed.fsdp._flat_param import FlatParamHandle

        return FlatParamHandle, "_all_gather_flat_param", lambda h: h.flat_param._unpadded_unsharded_size.numel()


class _Zero3(Sharded):
    def __init__(self, folder: str) -> None:
        import deepspeed
        from deepspeed import ops

        # Its collectives over shared memory would be compiled first, for minutes; gloo's do.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super().__init__(folder)
        self._optimize()
        self.model, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=self._optimizer,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "zero_allow_untested_optimizer": True,  # torch's: DeepSpeed's own would be compiled
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            },
        )

    def train(self, ids: torch.Tensor) -> None:
        self.model.train()
        self.model.backward(self.model(input_ids=ids, labels=ids).loss)
        self.model.step()

    def _gathers(self) -> tuple[type, str, Callable[[Any], int]]:
        import deepspeed

        return deepspeed.zero.GatheredParameters, "__enter__", lambda g: sum(p.ds_numel for p in g.params)


def shard(how: str, folder: str) -> Sharded:
    """The tiny policy of ``folder``, on this rank of two."""
    return {"fsdp1": _FSDP1, "fsdp2": _FSDP2, "zero3": _Zero3}[how](folder)


def deepspeed_env() -> dict[str, str]:
    """Environment in which DeepSpeed can be imported, and runs on the CPU; skips the test where it is not installed."""
    site = Path(os.environ.get("LORAFLOW_DEEPSPEED_SITE", ROOT / ".venv-deepspeed"))
    if not (site / "deepspeed").is_dir():
        pytest.skip(f"DeepSpeed is not in {site}: `make venv-deepspeed` installs it there")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]), "DS_ACCELERATOR": "cpu"}

"""Entry point ``vllm.general_plugins``: runs in every process of vLLM."""

from __future__ import annotations

import logging
import os
from typing import Any

__all__ = ["register"]

logger = logging.getLogger("vllm.loraflow")


def register() -> None:
    """Make the ``gloo`` weight-transfer backend known to vLLM, give its engine the utility that folds, and keep CPU
    weights plain for fold where that is asked.

    May be called more than once. vLLM checks ``--weight-transfer-config`` against its registry, and imports the engine
    only where it is asked for.
    """
    if os.environ.get("LORAFLOW_FOLD") == "1":
        _keep_cpu_weights_plain()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from loraflow_server import core

    core.install()
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "loraflow_server.gloo_engine", "GlooWeightTransferEngine")


def _keep_cpu_weights_plain() -> None:
    """On a CPU, compute with the weights themselves instead of a repacked copy that nobody can write to.

    vLLM repacks them for oneDNN or AMX while it loads the model, and drops the originals.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM's signature
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    logger.info("loraflow: CPU weights stay plain, for fold")

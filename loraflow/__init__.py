"""loraflow: LoRA-first weight sync for reinforcement learning with vLLM.

The trainer's side of the public API is all here; TRL and Axolotl have theirs in `loraflow.integrations`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraflow.adapter import AdapterSnapshot, AdapterSpec, read_adapter, take_snapshot, write_adapter
    from loraflow.config import SyncConfig
    from loraflow.correction import Correction, CorrectionOptions, correct
    from loraflow.errors import (
        AdapterError,
        CapabilityError,
        CommitError,
        ConfigError,
        LoadError,
        LoraflowError,
        PublishError,
        StaleError,
        SyncTimeout,
        UnsettledError,
        VerifyError,
    )
    from loraflow.manager import SyncManager
    from loraflow.plan import Plan, TrainerInfo, make_plan
    from loraflow.policy import Policy
    from loraflow.problems import Problem
    from loraflow.records import Proof, Rollouts, SyncRecord
    from loraflow.server import Completion, VLLMServer
    from loraflow.server_info import ServerInfo
    from loraflow.store import AdapterStore

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "AdapterSnapshot",
    "AdapterSpec",
    "AdapterStore",
    "CapabilityError",
    "CommitError",
    "Completion",
    "ConfigError",
    "Correction",
    "CorrectionOptions",
    "LoadError",
    "LoraflowError",
    "Plan",
    "Policy",
    "Problem",
    "Proof",
    "PublishError",
    "Rollouts",
    "ServerInfo",
    "StaleError",
    "SyncConfig",
    "SyncManager",
    "SyncRecord",
    "SyncTimeout",
    "TrainerInfo",
    "UnsettledError",
    "VLLMServer",
    "VerifyError",
    "__version__",
    "correct",
    "make_plan",
    "read_adapter",
    "take_snapshot",
    "write_adapter",
]

# Names are looked up when they are first used: `import loraflow`, the command line and the plugin inside of vLLM do not
# wait for torch and PEFT.
_WHERE = {
    "AdapterError": "loraflow.errors",
    "AdapterSnapshot": "loraflow.adapter",
    "AdapterSpec": "loraflow.adapter",
    "AdapterStore": "loraflow.store",
    "CapabilityError": "loraflow.errors",
    "CommitError": "loraflow.errors",
    "Completion": "loraflow.server",
    "ConfigError": "loraflow.errors",
    "Correction": "loraflow.correction",
    "CorrectionOptions": "loraflow.correction",
    "LoadError": "loraflow.errors",
    "LoraflowError": "loraflow.errors",
    "Plan": "loraflow.plan",
    "Policy": "loraflow.policy",
    "Problem": "loraflow.problems",
    "Proof": "loraflow.records",
    "PublishError": "loraflow.errors",
    "Rollouts": "loraflow.records",
    "ServerInfo": "loraflow.server_info",
    "StaleError": "loraflow.errors",
    "SyncConfig": "loraflow.config",
    "SyncManager": "loraflow.manager",
    "SyncRecord": "loraflow.records",
    "SyncTimeout": "loraflow.errors",
    "TrainerInfo": "loraflow.plan",
    "UnsettledError": "loraflow.errors",
    "VLLMServer": "loraflow.server",
    "VerifyError": "loraflow.errors",
    "correct": "loraflow.correction",
    "make_plan": "loraflow.plan",
    "read_adapter": "loraflow.adapter",
    "take_snapshot": "loraflow.adapter",
    "write_adapter": "loraflow.adapter",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'loraflow' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

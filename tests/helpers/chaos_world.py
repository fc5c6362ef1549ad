"""What the chaos test acts on: real servers behind proxies, a trainer in its own process, a store on a small disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from loraflow.launch import ServeOptions, ServerProcess, free_port, serve_command
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.vllm_process import CPU_ARGS, CPU_ENV

ROOT = Path(__file__).resolve().parents[2]
RUN_ID = "chaos"
DISK_BYTES = 24 << 20
START_SECONDS = 420.0
MAX_STALENESS = 3

SYNC = {
    "run_id": RUN_ID,
    "on_server_failure": "quarantine",
    "on_failure": "keep_last",
    "max_staleness": MAX_STALENESS,
    "grace_period": 0.5,
    "min_free_bytes": 1 << 20,
    "request_timeout": 10.0,
    "load_timeout": 15.0,
    "vllm_server_timeout": 20.0,
    "start_timeout": 20.0,
}


@dataclass
class Node:
    """One server, the proxy that the trainer reaches it by, and whether it is expected to answer."""

    process: ServerProcess
    proxy: FaultProxy
    starts: int = 1
    down: bool = False
    booting: threading.Thread | None = None

    @property
    def group(self) -> int:
        return self.process.pid


@dataclass
class World:
    """Everything there is; a context manager that leaves nothing behind.

    Args:
        model: The model folder.
        work: An empty folder.
        count: Servers.
        carriers: Carriers of the trainer's lives, in turn.
        seed: For the proxies.
    """

    model: Path
    work: Path
    count: int
    carriers: Sequence[str]
    seed: int
    nodes: list[Node] = field(default_factory=list)
    trainer: subprocess.Popen[bytes] | None = None
    lives: int = 0
    small_disk: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def disk(self) -> Path:
        return self.work / "disk"

    @property
    def store(self) -> Path:
        return self.disk / "store"

    @property
    def run_folder(self) -> Path:
        return self.store / RUN_ID

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        self.disk.mkdir()
        (self.work / "truth").mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(self.disk)],
            check=False,
            capture_output=True,
        )
        self.small_disk = mounted.returncode == 0
        if self.small_disk:
            self._stack.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        self.store.mkdir()
        for index in range(self.count):
            process = self._server(index, free_port())
            self._stack.callback(process.stop)
            process.start()
            port = int(process.url.rsplit(":", 1)[1])
            proxy = self._stack.enter_context(FaultProxy(port, seed=self.seed + index))
            self.nodes.append(Node(process, proxy))
        self._stack.callback(self._end_boots)
        for node in self.nodes:
            node.process.wait_ready(START_SECONDS)
        options = {
            "model": str(self.model),
            "servers": [node.proxy.url for node in self.nodes],
            "carriers": list(self.carriers),
            "sync": {**SYNC, "adapter_root": str(self.store)},
        }
        (self.work / "options.json").write_text(json.dumps(options))
        self._stack.callback(self.kill_trainer)

    def _server(self, index: int, port: int) -> ServerProcess:
        options = ServeOptions(
            model=str(self.model),
            max_lora_rank=16,
            max_staleness=MAX_STALENESS,  # an engine does not survive that a version read back is damaged
            adapter_root=str(self.store),
            port=port,
            extra=CPU_ARGS,
        )
        return ServerProcess(serve_command(options), log=self.work / f"server{index}.log", env=CPU_ENV)

    # ---------------------------------------------------------------- servers

    def kill_server(self, node: Node) -> None:
        """End it without warning, and start it again behind everything else."""
        node.down = True
        os.killpg(node.group, signal.SIGKILL)
        node.process.stop()
        node.booting = threading.Thread(target=self._boot, args=(node,))
        node.booting.start()

    def _boot(self, node: Node) -> None:
        node.process.start()
        node.starts += 1
        node.process.wait_ready(START_SECONDS)
        node.down = False

    def _end_boots(self) -> None:
        for node in self.nodes:
            if node.booting is not None:
                node.booting.join(START_SECONDS)

    def signal_server(self, node: Node, number: signal.Signals) -> None:
        os.killpg(node.group, number)

    # ---------------------------------------------------------------- trainer

    def start_trainer(self) -> None:
        (self.work / "life").write_text(str(self.lives))
        self.lives += 1
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.helpers.chaos_trainer", str(self.work)]
        with (self.work / "trainer.log").open("ab") as log:
            self.trainer = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def kill_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.kill()
            self.trainer.wait()

    def end_trainer(self, timeout: float) -> int:
        """Ask it to end; its exit code."""
        assert self.trainer is not None
        (self.work / "stop").touch()
        return self.trainer.wait(timeout)

    # ---------------------------------------------------------------- store

    def committed_folder(self) -> Path | None:
        """The newest version's folder."""
        found = [path for path in self.run_folder.glob("v*") if (path / "manifest.json").exists()]
        return max(found, key=lambda path: int(path.name[1:]), default=None)

    def fill_disk(self) -> Path:
        """Leave not a byte; the file to remove."""
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 65536)
            except OSError:
                pass
        return filler

    def hide_store(self) -> None:
        self.store.rename(self.disk / "away")

    def show_store(self) -> None:
        if self.store.exists():  # a trainer that began meanwhile made one
            shutil.rmtree(self.store)
        (self.disk / "away").rename(self.store)


def journal(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a journal from byte ``start`` on, and where the next ones begin."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


def wait_for_life(world: World, deadline: float) -> bool:
    """Whether the trainer is still running, and time is left."""
    assert world.trainer is not None
    return world.trainer.poll() is None and time.monotonic() < deadline

"""Runs one function in several processes that form a gloo group (one alone forms none), and brings the results home."""

from __future__ import annotations

import inspect
import os
import pickle
import runpy
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import pathlib, sys; from tests.helpers.processes import start; start(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Outcome:
    """What one rank did: its result, or the error that ended it, and how long it took."""

    result: Any
    error: BaseException | None
    seconds: float


def run_ranks(
    work: Callable[..., Any],
    *args: Any,
    folder: Path,
    world_size: int = 2,
    timeout: float = 240.0,
    group_timeout: float = 600.0,
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run ``work(*args)``, a function of a module, in ``world_size`` processes; a rank that hangs fails the test.

    Args:
        work: The same on every rank.
        *args: Its arguments, picklable.
        folder: For logs and results.
        world_size: Processes.
        timeout: Seconds for everything.
        group_timeout: Seconds of a collective of the trainer's own group.
        env: More environment variables.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.pkl").write_bytes(pickle.dumps((inspect.getfile(work), work.__name__, args, group_timeout)))
    processes = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server_ext")]),
            **(env or {}),
        }
        command = [sys.executable, "-c", _START, str(folder), str(rank)]
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as hang:
        raise AssertionError(f"a rank hangs; logs:\n{_logs(folder, world_size)}") from hang
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for rank in range(world_size):
        path = folder / f"rank{rank}.pkl"
        assert path.exists(), f"rank {rank} ended without a result; logs:\n{_logs(folder, world_size)}"
        found.append(pickle.loads(path.read_bytes()))
    return found


def error_of(work: Callable[[], Any]) -> tuple[str, str]:
    """Kind and words of the error that ``work`` must raise."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def _logs(folder: Path, world_size: int) -> str:
    return "\n".join((folder / f"rank{rank}.log").read_text(errors="replace")[-3000:] for rank in range(world_size))


def start(where: str, rank: int) -> None:
    """What each process runs: the task in folder `where`."""
    import torch.distributed as dist

    folder = Path(where)
    path, name, args, group_timeout = pickle.loads((folder / "task.pkl").read_bytes())
    work = runpy.run_path(path)[name]
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo", timeout=timedelta(seconds=group_timeout))
    began = time.monotonic()
    try:
        outcome = Outcome(work(*args), None, time.monotonic() - began)
    except BaseException as error:
        traceback.print_exc()
        outcome = Outcome(None, error, time.monotonic() - began)
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(outcome))
    os._exit(0)  # no farewell among ranks: one of them may be gone

"""What the links of this machine can do, measured in the run that uses them, and the floor that follows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import requests
import torch

__all__ = ["ALL_WEIGHTS", "Floor", "Links", "floor_of", "measure_links", "round_trip_ms"]

ALL_WEIGHTS = ", all weights"
"""Behind the name of a merged carrier: not only those that changed."""

_REPEATS = 7
_Leg = tuple[str, float | None, int]  # what it crosses, GB/s, bytes
_SHM = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory


@dataclass(frozen=True)
class Links:
    """Bandwidths in GB/s (1e9 bytes, counted once however often they are read and written) and round trips in ms.

    Attributes:
        memcpy: Copy in host memory.
        socket: Loopback TCP.
        file_write: Writing a new file of shared memory.
        d2h: GPU to pinned host memory; None without a GPU.
        h2d: Pinned host memory to GPU.
        d2d: Copy within the GPU.
        peer: GPU to another GPU; None where there is one only.
        round_trip_ms: One HTTP call to the server that does nothing.
    """

    memcpy: float
    socket: float
    file_write: float
    d2h: float | None = None
    h2d: float | None = None
    d2d: float | None = None
    peer: float | None = None
    round_trip_ms: float = 0.0


@dataclass(frozen=True)
class Floor:
    """The least that a way can take: its bytes over its links, and one call.

    Attributes:
        ms: Milliseconds.
        formula: How it came about, in words.
    """

    ms: float
    formula: str


def measure_links(
    device: torch.device, *, url: str | None = None, peer: int | None = None, nbytes: int = 64 << 20
) -> Links:
    """Measure with blocks of ``nbytes``; the median of some repeats.

    Args:
        device: The trainer's.
        url: Server to measure the round trip to.
        peer: Index of the server's GPU, where it is another one.
        nbytes: Size of a block.
    """
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    found: dict[str, float | None] = {
        "memcpy": _rate(nbytes, lambda: target.copy_(source)),
        "socket": _socket_rate(nbytes),
        "file_write": _rate(nbytes, lambda: _write(source)),
    }
    if device.type == "cuda":
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        here, there = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        found["d2h"] = _gpu_rate(nbytes, device, lambda: pinned.copy_(here, non_blocking=True))
        found["h2d"] = _gpu_rate(nbytes, device, lambda: here.copy_(pinned, non_blocking=True))
        found["d2d"] = _gpu_rate(nbytes, device, lambda: there.copy_(here))
        if peer is not None and peer != device.index and peer < torch.cuda.device_count():
            far = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{peer}")
            found["peer"] = _gpu_rate(nbytes, device, lambda: far.copy_(here, non_blocking=True))
    return Links(**found, round_trip_ms=round_trip_ms(url) if url else 0.0)  # type: ignore[arg-type]


def floor_of(way: str, links: Links, payload: int, *, folded: int = 0, same_gpu: bool = True) -> Floor | None:
    """The floor of a way of sending ``payload`` bytes; None for a way that is not known.

    Args:
        way: ``direct``, ``upload``, ``direct-group``, ``filesystem``, ``fold``, ``ipc``, ``nccl``, ``gloo`` (with
            `ALL_WEIGHTS` behind it, where they are sent whole) or a stock way.
        links: Measured.
        payload: Bytes that travel.
        folded: Bytes of weights that the server writes itself (fold).
        same_gpu: Trainer and server share a GPU.
    """
    carrier = _CARRIER_OF.get(way, way.removesuffix(ALL_WEIGHTS))
    legs: list[_Leg]
    gpu = links.d2d is not None
    over_host: list[_Leg] = [("GPU to host", links.d2h, payload), ("host to GPU", links.h2d, payload)]
    twice: list[_Leg] = [("host copy", links.memcpy, 2 * payload)]
    shared: list[_Leg] = ([("within the GPU", links.d2d, payload)] if same_gpu else over_host) if gpu else twice
    if carrier == "direct":
        legs = shared
    elif carrier == "fold":
        written: _Leg = (
            ("folded weights within the GPU", links.d2d, folded) if gpu else ("host copy", links.memcpy, folded)
        )
        legs = [*shared, written]
    elif carrier == "filesystem":
        legs = [("file", links.file_write, payload), *(over_host if gpu else twice)]
    elif carrier == "ipc":
        legs = [("within the GPU", links.d2d, payload)]
    elif carrier == "nccl" or (carrier == "direct-group" and gpu and not same_gpu):
        legs = [("GPU to GPU", links.peer, payload)]
    elif carrier in {"upload", "direct-group"}:
        legs = [("loopback socket", links.socket, payload), *(over_host if gpu else [])]
    elif carrier == "gloo":
        legs = [("loopback socket", links.socket, payload)]
    else:
        return None
    if any(rate is None for _, rate, _ in legs):
        return None
    ms = links.round_trip_ms + sum(nbytes / (rate or 1.0) / 1e6 for _, rate, nbytes in legs)
    words = " + ".join(f"{nbytes / 1e6:.1f} MB {name} at {rate:.1f} GB/s" for name, rate, nbytes in legs)
    return Floor(ms, f"{words} + one call of {links.round_trip_ms:.2f} ms")


_CARRIER_OF = {
    "direct-overlap": "direct",
    "filesystem-stock": "filesystem",
    "stock-adapter": "filesystem",
    "stock-inplace": "filesystem",
    "stock-merged-ipc": "ipc",
    "stock-merged-nccl": "nccl",
}


def round_trip_ms(url: str, repeats: int = 20) -> float:
    """Median milliseconds of ``GET /health`` over a kept connection."""
    times = []
    with requests.Session() as session:
        session.trust_env = False
        for _ in range(repeats):
            began = time.perf_counter()
            session.get(f"{url}/health", timeout=30).raise_for_status()
            times.append((time.perf_counter() - began) * 1e3)
    return median(times)


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return nbytes / median(times) / 1e9


def _gpu_rate(nbytes: int, device: torch.device, work: Callable[[], object]) -> float:
    def timed() -> None:
        work()
        torch.cuda.synchronize(device)

    return _rate(nbytes, timed)


def _write(source: torch.Tensor) -> None:
    path = (_SHM if _SHM.is_dir() else Path.cwd()) / f"loraflow-bench-{threading.get_ident()}"
    try:
        with path.open("wb", buffering=0) as file:
            file.write(source.numpy().data)
    finally:
        path.unlink(missing_ok=True)


def _socket_rate(nbytes: int) -> float:
    """Bytes through a loopback connection, both ends in this process."""
    payload = bytes(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    buffer = bytearray(1 << 20)
    with sender, receiver:

        def through() -> None:
            thread = threading.Thread(target=sender.sendall, args=(payload,))
            thread.start()
            left = nbytes
            while left:
                left -= receiver.recv_into(buffer, min(len(buffer), left))
            thread.join()

        return _rate(nbytes, through)

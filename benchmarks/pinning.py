"""Processors of their own for each process of a measurement, so that none of them moves beside another.

Of a host's cores engines get a quarter, API servers a quarter, trainer and requests what is left. Servers share: one is
measured at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["pin"]

_FEWEST = 8


def pin(servers: Iterable[int]) -> dict[str, list[int]]:
    """Pin this process, these API servers and what they have started; the processors of each.

    Args:
        servers: Process ids of API servers; what they have started are engines.
    """
    cpus = _by_core()
    if len(cpus) < _FEWEST:
        return {}
    quarter = len(cpus) // 4
    engine, front, rest = cpus[:quarter], cpus[quarter : 2 * quarter], cpus[2 * quarter :]
    for server in servers:
        _place(server, front)
        for child in psutil.Process(server).children(recursive=True):
            _place(child.pid, engine)
    _place(os.getpid(), rest)
    return {"engines": engine, "API servers": front, "trainer and requests": rest}


def _by_core() -> list[int]:
    """Processors that this process may use, those of one core beside each other."""
    usable, found = os.sched_getaffinity(0), list[int]()
    for cpu in sorted(usable):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        with suppress(OSError):
            found += [other for other in _numbers(siblings.read_text()) if other in usable and other not in found]
        found += [] if cpu in found else [cpu]
    return found


def _numbers(listed: str) -> list[int]:
    """``0-1,8`` as numbers."""
    found = list[int]()
    for part in listed.strip().split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def _place(process: int, cpus: list[int]) -> None:
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)

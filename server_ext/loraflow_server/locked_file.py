"""Files in shared memory that say by a lock that their process lives: trainers remove those that nobody locks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["create_locked"]


def create_locked(path: Path) -> int:
    """Create a file of this user, locked before it has its name; its descriptor, which holds the lock."""
    hidden = path.with_name("." + path.name)
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    hidden.rename(path)
    return descriptor

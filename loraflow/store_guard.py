"""What stands between the store and a file system that fails or lags: clear errors, and patience that ends."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from loraflow.errors import PublishError

__all__ = ["DAMAGED", "SPACE", "explained", "patiently"]

VISIBILITY_SECONDS = 2.0
"""How long a reader waits for a file that must be there and is not shown yet (NFS, object stores)."""

DAMAGED = "the store was written to by something else, or its disk fails: publish a new version"
SPACE = "free some space, set adapter_root to a larger file system, or lower max_staleness (fewer versions are kept)"
_HINTS = {
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EROFS: "it is mounted read-only: set adapter_root to a place that this process may write to",
    errno.EACCES: "this process may not write there: check owner and mode, or set adapter_root to another place",
    errno.EPERM: "this process may not write there: check owner and mode, or set adapter_root to another place",
}


@contextmanager
def explained(action: str) -> Iterator[None]:
    """Turn an `OSError` of the store into a `PublishError` that says what to do."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check that the store is reachable, and its credentials")
        raise PublishError(f"cannot {action}: {error}", hint=hint) from error


def _not_there_yet(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.errno == errno.ESTALE)


def patiently(read: Callable[[], bytes]) -> bytes:
    """Read what must be there and may not be visible yet."""
    waiting = Retrying(
        retry=retry_if_exception(_not_there_yet),
        stop=stop_after_delay(VISIBILITY_SECONDS),
        wait=wait_exponential(multiplier=0.01, max=0.25),
        reraise=True,
    )
    return waiting(read)

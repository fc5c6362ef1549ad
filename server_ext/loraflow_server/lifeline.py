"""A file that is there for as long as somebody waits for a call: how workers, who hear of nothing else while they wait
for a broadcast, see that its trainer has gone."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from loraflow_server.blocks import SHM_DIR
from loraflow_server.errors import PluginError
from loraflow_server.locked_file import create_locked

__all__ = ["Lifeline", "still_wanted"]

_LOOK_SECONDS = 0.1


class Lifeline:
    """The API server's end.

    Args:
        folder: Where files are made; workers of this host look there.
    """

    def __init__(self, folder: Path = SHM_DIR) -> None:
        self._folder = folder
        self._held: tuple[Path, int] | None = None

    @asynccontextmanager
    async def held(self, gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
        """The path of a file that is there until the end, until the caller has ``gone``, or until `cut`."""
        path = self._folder / f"loraflow-call-{secrets.token_hex(8)}"
        self._held = path, create_locked(path)
        watch = asyncio.create_task(self._watch(gone))
        try:
            yield str(path)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            self.cut()

    def cut(self) -> bool:
        """Remove the file; False where there is none."""
        held, self._held = self._held, None
        if held is None:
            return False
        held[0].unlink(missing_ok=True)
        os.close(held[1])
        return True

    async def _watch(self, gone: Callable[[], Awaitable[bool]]) -> None:
        while not await gone():
            await asyncio.sleep(_LOOK_SECONDS)
        self.cut()


def still_wanted(path: str | None) -> Callable[[], None]:
    """A worker's end: what raises ``called_off`` once the file is gone. Never, where it was not seen to begin with
    (another host)."""
    file = None if path is None else Path(path)
    if file is None or not file.exists():
        return lambda: None

    def look() -> None:
        if not file.exists():
            raise PluginError("called_off", "the trainer has gone, or wants the broadcast no more", status=409)

    return look

"""Payloads that come over HTTP, from a trainer on another host: into shared memory, from which the workers read them.

One block, kept and filled again, since a trainer sends the same size for every version. What is announced is checked
before anything is allocated; what arrives is checked before anything is installed.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import hmac
import logging
import mmap
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request

from loraflow_server.blocks import SHM_DIR
from loraflow_server.errors import PluginError

__all__ = ["Inbox"]

logger = logging.getLogger("vllm.loraflow")

_UPLOAD_SECONDS = 120.0
_DIGEST = 64  # hex characters of a blake3


class Inbox:
    """The block of one API server.

    Args:
        folder: Where blocks are made; that which the workers look in.
    """

    def __init__(self, folder: Path = SHM_DIR) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._descriptor = -1
        self._memory: mmap.mmap | None = None
        self._busy = asyncio.Lock()
        atexit.register(self.close)  # a server that is killed leaves an orphan, see `_block`

    @asynccontextmanager
    async def received(self, request: Request, nbytes: int, digest: str) -> AsyncIterator[dict[str, Any]]:
        """The payload of a request, as a source for the workers; nobody else's comes while the caller is inside.

        Args:
            request: Its body is the payload, and its ``Content-Length`` says so.
            nbytes: Bytes that the payload must have.
            digest: Its blake3 (hex).

        Raises:
            PluginError: ``bad_source``: another length, or another content. ``truncated``: it ended before.
                ``no_memory`` (507). ``upload_timeout`` (408).
        """
        length = request.headers.get("content-length", "")
        if request.headers.get("content-type", "") != "application/octet-stream":
            raise PluginError("bad_request", "send the payload as application/octet-stream", status=415)
        if not length.isascii() or not length.isdigit():
            raise PluginError("bad_request", "a payload needs a Content-Length", status=411)
        if int(length) != nbytes:
            status = 413 if int(length) > nbytes else 400
            raise PluginError("bad_source", f"the payload has {length} bytes, not {nbytes}", status=status)
        if len(digest) != _DIGEST:
            raise PluginError("bad_request", f"blake3 is a string of {_DIGEST} hex digits")
        async with self._busy:
            try:
                async with asyncio.timeout(_UPLOAD_SECONDS):
                    found = await self._fill(request, nbytes)
            except TimeoutError as error:
                raise PluginError("upload_timeout", f"not there after {_UPLOAD_SECONDS:.0f} s", status=408) from error
            if not hmac.compare_digest(found.encode(), digest.lower().encode()):
                raise PluginError("bad_source", f"the payload's blake3 is {found}, not the one announced")
            assert self._path is not None  # noqa: S101 - filled
            yield {"kind": "shm", "name": self._path.name, "nbytes": nbytes}

    def close(self) -> None:
        """Free the block; workers that have it mapped keep their mapping."""
        path, self._path, self._memory = self._path, None, None
        if path is not None:
            path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    async def _fill(self, request: Request, nbytes: int) -> str:
        """Write the body to the block; its blake3."""
        from blake3 import blake3

        memory, at, hasher = self._block(nbytes), 0, blake3()
        try:
            async for chunk in request.stream():
                if at + len(chunk) > nbytes:
                    raise PluginError("bad_source", f"more than the announced {nbytes} bytes", status=413)
                memory[at : at + len(chunk)] = chunk
                hasher.update(chunk)
                at += len(chunk)
        except ClientDisconnect as error:
            raise PluginError("truncated", f"the payload ended after {at} of {nbytes} bytes") from error
        if at != nbytes:
            raise PluginError("truncated", f"the payload ended after {at} of {nbytes} bytes")
        return hasher.hexdigest()

    def _block(self, nbytes: int) -> mmap.mmap:
        if self._memory is not None and len(self._memory) == nbytes:
            return self._memory
        self.close()
        path = self._folder / f"loraflow-inbox-{secrets.token_hex(8)}"
        hidden = path.with_name("." + path.name)
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Locked before it has its name: a block that nobody locks is an orphan, and removed by the next trainer.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(descriptor, 0, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
            hidden.rename(path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            os.close(descriptor)
            raise PluginError(
                "no_memory", f"no shared memory for {nbytes} bytes: {error.strerror}", status=507
            ) from error
        self._path, self._descriptor, self._memory = path, descriptor, memory
        return memory

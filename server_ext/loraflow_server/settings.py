"""`Settings`: what the operator of a server decides, read once from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Limits", "Settings"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds that are checked before anything is allocated.

    Attributes:
        body: Bytes of one request body.
        header: Bytes of the JSON header of a safetensors file.
        config: Bytes of an ``adapter_config.json``.
        tensors: Tensors of one adapter.
        payload: Bytes of one adapter file, or of one direct payload.
    """

    body: int = 16 * _MIB
    header: int = 8 * _MIB
    config: int = 1 * _MIB
    tensors: int = 1 << 16
    payload: int = 32 << 30


@dataclass(frozen=True)
class Settings:
    """The plugin's settings.

    Attributes:
        roots: Folders that adapters may be loaded from, links resolved (``LORAFLOW_ADAPTER_ROOTS``, separated by the
            system's path separator). None: no path is allowed.
        token: Bearer token that every call must carry (``LORAFLOW_TOKEN``). Without one, only this host may call.
        stores: URL prefixes that adapters may be fetched from (``LORAFLOW_STORE_ROOTS``, separated by commas or
            spaces). None: no URL is allowed.
        cache_dir: Folder for what was fetched (``LORAFLOW_CACHE_DIR``; ``loraflow-cache`` in the first root where
            not given).
        cache_bytes: Bytes that the cache may hold (``LORAFLOW_CACHE_BYTES``; 16 GiB where not given).
        limits: Bounds.
    """

    roots: tuple[Path, ...] = ()
    token: str | None = None
    stores: tuple[str, ...] = ()
    cache_dir: Path | None = None
    cache_bytes: int = 16 << 30
    limits: Limits = Limits()

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read ``env`` (the process's environment where not given).

        Raises:
            ValueError: A relative root, a store that is no URL, a cache size that is no positive number, or a token
                that no header can carry.
        """
        source = os.environ if env is None else env
        roots = []
        for text in source.get("LORAFLOW_ADAPTER_ROOTS", "").split(os.pathsep):
            if not text:
                continue
            if "://" in text or not Path(text).is_absolute():
                raise ValueError(f"LORAFLOW_ADAPTER_ROOTS: {text!r} is not an absolute path")
            roots.append(Path(text).resolve())
        cache = source.get("LORAFLOW_CACHE_DIR")
        cache_dir = Path(cache).resolve() if cache else (roots[0] / "loraflow-cache" if roots else None)
        size = source.get("LORAFLOW_CACHE_BYTES") or str(cls.cache_bytes)
        if not re.fullmatch(r"\s*[1-9][0-9]*\s*", size):
            raise ValueError(f"LORAFLOW_CACHE_BYTES: {size!r} is not a number of bytes")
        stores = tuple(item.rstrip("/") for item in re.split(r"[,\s]+", source.get("LORAFLOW_STORE_ROOTS", "")) if item)
        for store in stores:
            if not re.match(r"[a-z][a-z0-9+.-]*://[^/]", store):
                raise ValueError(f"LORAFLOW_STORE_ROOTS: {store!r} is not a URL such as s3://bucket/runs")
        return cls(
            roots=tuple(roots),
            token=_token(source.get("LORAFLOW_TOKEN", "")),
            stores=stores,
            cache_dir=cache_dir,
            cache_bytes=int(size),
        )


def _token(text: str) -> str | None:
    """The token without the blanks around it; one that is blank, or cannot be sent, must not open the routes."""
    token = text.strip()
    if (text and not token) or not (token.isascii() and token.isprintable()):
        raise ValueError("LORAFLOW_TOKEN is not made of printable ASCII characters")
    return token or None

"""Ids made from content: equal content, equal id, on every server and after every restart."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["content_id"]


def content_id(value: Any) -> str:
    """32 hex digits for any JSON value."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

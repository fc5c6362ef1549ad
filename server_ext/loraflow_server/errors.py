"""`PluginError`: a refusal with a stable code, which travels from a worker to the HTTP client unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PluginError"]


class PluginError(Exception):
    """A request was refused or failed.

    Args:
        code: Stable word for programs, e.g. ``name_taken``.
        message: What was expected, what was found, what to do; for people.
        status: HTTP status to answer with: 4xx where the caller can do something about it, 5xx otherwise.
        details: More fields of the JSON body's ``error`` object (JSON types).
    """

    def __init__(self, code: str, message: str, *, status: int = 400, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.details: dict[str, Any] = dict(details or {})

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as workers return it and as `from_dict` reads it."""
        return {"code": self.code, "message": self.message, "status": self.status, **self.details}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> PluginError:
        """The inverse of `to_dict`."""
        details = {key: value for key, value in body.items() if key not in {"code", "message", "status"}}
        return cls(str(body["code"]), str(body["message"]), status=int(body["status"]), details=details)

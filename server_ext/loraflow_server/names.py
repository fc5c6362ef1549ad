"""`Names`: a name means one content for ever (rule 1)."""

from __future__ import annotations

from loraflow_server.engine import Engine
from loraflow_server.errors import PluginError

__all__ = ["Names"]


class Names:
    """The adapter names that this server has ever taken.

    Args:
        engine: Knows those that requests may use now.

    Attributes:
        used: What became of each: ``loaded``, ``unloaded`` or ``burnt``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.used: dict[str, str] = {}

    def check_free(self, name: str) -> None:
        """Refuse a name that means, or meant, something else."""
        if self._engine.is_base(name) or name in self._engine.loaded():
            raise PluginError("name_taken", f"the name {name!r} is in use for something else", status=409)
        if name in self.used:
            raise PluginError(
                "name_used",
                f"the name {name!r} was used before ({self.used[name]}): a name is used once",
                status=409,
            )

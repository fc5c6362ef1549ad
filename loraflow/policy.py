"""`Policy`: the name of one version of one run. A name means one content for ever (rule 1)."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass

__all__ = ["Policy", "new_run_id"]

_NAME = re.compile(r"(?P<run_id>[A-Za-z0-9][A-Za-z0-9_.-]{0,63})-v(?P<version>0|[1-9][0-9]{0,8})")


def new_run_id() -> str:
    """A run id that no other run has: UTC start time and 32 random bits."""
    return time.strftime("%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(4)


@dataclass(frozen=True, order=True)
class Policy:
    """Version ``version`` (0, 1, 2, …; one per attempted sync) of run ``run_id``."""

    run_id: str
    version: int

    @property
    def name(self) -> str:
        """The name that requests use: ``{run_id}-v{version}``."""
        return f"{self.run_id}-v{self.version}"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Policy | None:
        """The policy that ``name`` means, or None for any other model name."""
        match = _NAME.fullmatch(name)
        return cls(match["run_id"], int(match["version"])) if match else None

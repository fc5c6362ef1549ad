"""What opens a server: checked once, before anything is asked, and never shown."""

from __future__ import annotations

import os

from loraflow.errors import ConfigError

__all__ = ["secret"]


def secret(given: str | None, variable: str) -> str | None:
    """A bearer token, given or from the environment; None where there is none. Blanks around it are not part of it.

    Raises:
        ConfigError: It cannot be sent in a header. It is not shown.
    """
    found = (os.environ.get(variable, "") if given is None else given).strip()
    if not (found.isascii() and found.isprintable()):
        raise ConfigError(
            f"the bearer token ({variable}) has characters that no header may carry",
            hint="printable ASCII: letters, digits and signs",
        )
    return found or None

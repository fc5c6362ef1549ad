"""Every error that loraflow raises, one tree.

```
LoraflowError
├── ConfigError        an option is unknown, out of bounds, or impossible beside another
├── CapabilityError    a server cannot do what the plan needs
├── AdapterError       preflight refused an adapter (carries the list of problems)
├── PublishError       a version could not be written to, or read from, the store
├── LoadError          a server refused or failed to load a version
├── VerifyError        a server serves something else than what was delivered
├── CommitError        not all servers could be moved; all stay on the last version
│   └── UnsettledError it is not known what a server serves now; no request goes there until it is proven again
├── SyncTimeout        a wait passed its limit
└── StaleError         rollouts would be further behind than max_staleness allows
```

A message says what was expected, what was found, on which server, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraflow.problems import Problem

__all__ = [
    "AdapterError",
    "CapabilityError",
    "CommitError",
    "ConfigError",
    "LoadError",
    "LoraflowError",
    "PublishError",
    "StaleError",
    "SyncTimeout",
    "UnsettledError",
    "VerifyError",
]


class LoraflowError(Exception):
    """Base of all loraflow errors.

    Args:
        message: What happened, in one or two sentences.
        server: URL of the server concerned, if one is.
        expected: What should have been so.
        found: What was so instead.
        hint: What the reader can do about it.
    """

    def __init__(
        self,
        message: str,
        *,
        server: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.server = server
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message if self.server is None else f"{self.server}: {self.message}"]
        if self.expected is not None or self.found is not None:
            parts.append(f"expected {self.expected}, found {self.found}")
        if self.hint:
            parts.append(self.hint)
        return " — ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (all ranks or none): keep every field when pickled.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[LoraflowError], state: dict[str, object]) -> LoraflowError:
    error = cls.__new__(cls)
    Exception.__init__(error, state.get("message", ""))
    error.__dict__.update(state)
    return error


class ConfigError(LoraflowError, ValueError):
    """An option is unknown, out of bounds, or impossible beside another."""


class CapabilityError(LoraflowError):
    """A server cannot do what the plan needs."""


class AdapterError(LoraflowError):
    """Preflight refused an adapter.

    Args:
        problems: What was found; ``problems[i].code`` is a stable word.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = (), *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems: tuple[Problem, ...] = tuple(problems)

    def __str__(self) -> str:
        shown = "; ".join(str(p) for p in self.problems[:5])
        more = f" (and {len(self.problems) - 5} more)" if len(self.problems) > 5 else ""
        return super().__str__() + (f": {shown}{more}" if shown else "")


class ModelChangedError(AdapterError):
    """The model is not the one that its adapter was gathered from by an earlier plan: gather it by a new one."""


class PublishError(LoraflowError):
    """A version could not be written to, or read back from, the store."""


class LoadError(LoraflowError):
    """A server refused or failed to load a version."""


class VerifyError(LoraflowError):
    """A server serves something else than what was delivered."""


class CommitError(LoraflowError):
    """Not all servers could be moved to a version; all stay on the last proven one."""


class UnsettledError(CommitError):
    """A version failed, and could not be taken back from a server that answers: what it serves now is not known.

    No request goes there until it is proven again. Raised whatever ``on_failure`` says, where nothing else is left to
    ask, or where ``on_server_failure="fail"`` wants all servers.
    """


class SyncTimeout(LoraflowError, TimeoutError):
    """A wait passed its limit."""


class StaleError(LoraflowError):
    """Rollouts would be further behind the trainer than ``max_staleness`` allows."""

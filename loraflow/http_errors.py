"""What went wrong on the way to a server and back, in words that say what to do."""

from __future__ import annotations

import json as jsonlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import requests

from loraflow.errors import LoraflowError, SyncTimeout

__all__ = [
    "BadAnswer",
    "HTTPFailure",
    "Unreachable",
    "cause_of",
    "elsewhere",
    "hidden_error",
    "load_hint",
    "no_answer",
    "once_visible",
    "reason_in",
    "reason_of",
    "refused",
    "too_late",
    "understood",
]


T = TypeVar("T")

VISIBLE_SECONDS = 3.0
"""How long a server may need to see a folder that lies in the store (NFS, object stores)."""
_LOOK_SECONDS = 0.1


class Unreachable(LoraflowError):
    """No answer: nothing listens, or the connection broke."""


class BadAnswer(LoraflowError):
    """The status is a success, and the body is not what was asked for: half of it, or of something else."""


class HTTPFailure(LoraflowError):
    """The server answered with an error.

    Attributes:
        status: HTTP status; where an error came with a success, the one that its body gives, or 500.
        reason: The reason that the body gives.
    """

    def __init__(self, message: str, *, status: int, reason: str, server: str, hint: str | None = None) -> None:
        super().__init__(message, server=server, hint=hint)
        self.status = status
        self.reason = reason


@contextmanager
def understood(what: str, server: str | None = None) -> Iterator[None]:
    """Reading an answer: whatever it lacks becomes a `BadAnswer` that names ``what`` was read."""
    try:
        yield
    except LoraflowError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadAnswer(
            f"{what} has another form than expected ({type(error).__name__}: {error})",
            server=server,
            hint="does vLLM answer there, and nothing in between that changes what it says?",
        ) from error


def hidden_error(body: Any) -> tuple[int, str] | None:
    """Status and reason of an error that came with a success; None where ``body`` is none."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, str) and error:
        return requests.codes.server_error, error[:1000]
    if not isinstance(error, Mapping):
        return None
    code = error.get("code")
    status = code if isinstance(code, int) and code >= requests.codes.bad else requests.codes.server_error
    return status, str(error.get("message") or error)[:1000]


def too_late(what: str, server: str, limit: float) -> SyncTimeout:
    """No whole answer to the call ``what`` within ``limit`` seconds."""
    return SyncTimeout(
        f"{what} gave no answer in {limit:g} s",
        server=server,
        hint="is it overloaded, or stopped? request_timeout, load_timeout, vllm_server_timeout set the limits",
    )


def no_answer(what: str, server: str, cause: str) -> Unreachable:
    """The call ``what`` reached nobody, or its connection broke."""
    hint = "is the server running there? `loraflow serve MODEL` starts one"
    return Unreachable(f"{what}: {cause}", server=server, hint=hint)


def refused(what: str, server: str, answered: int, status: int, reason: str) -> HTTPFailure:
    """The call ``what`` was answered with an error."""
    return HTTPFailure(f"{what} answered {answered}: {reason}", status=status, reason=reason, server=server)


def once_visible(path: str, load: Callable[[], T]) -> T:
    """What ``load`` gives; repeated for `VISIBLE_SECONDS` where a server does not see the folder ``path`` yet."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            return load()
        except HTTPFailure as error:
            if not _is_not_there_yet(error, path) or time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_SECONDS)


def _is_not_there_yet(error: HTTPFailure, path: str) -> bool:
    """Whether a load was refused because the folder ``path`` is not there, or not all of it."""
    if error.status != requests.codes.not_found:
        return False
    reason = error.reason.lower()
    return path in error.reason or any(word in reason for word in ("(yet)", "no adapter found", "missing from the"))


def load_hint(error: HTTPFailure, path: str) -> str:
    """What to do about a load that the server refused; ``path`` is the folder that it was asked for."""
    text = error.reason.lower()
    if error.status == requests.codes.not_found and ("no adapter found" in text or path in error.reason):
        return "does the server see this folder? set server_adapter_root where it is mounted elsewhere"
    if error.status == requests.codes.not_found:
        return (
            "the server has no route to load adapters: start it with `loraflow serve MODEL`, or with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        )
    if "max_lora_rank" in text:
        return "start the server with a larger --max-lora-rank"
    if "already" in text:
        return "names are used once: use a new run_id"
    return "the server's log has the traceback"


def elsewhere(location: str | None) -> str:
    """The reason for a redirection, which is not followed: tokens would go there, and a POST would become a GET."""
    return f"it redirects to {location or 'nowhere'}: give the URL of the server itself"


def reason_of(response: requests.Response) -> str:
    """The reason that the body of an error answer gives."""
    if response.status_code < requests.codes.bad:
        return elsewhere(response.headers.get("Location"))
    try:
        body = response.json()
    except ValueError:
        return _words(response.text)[:500] or response.reason
    return reason_in(body)


def _words(text: str) -> str:
    """``text`` in one line; of a web page, such as a proxy's, its title."""
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    return " ".join((f"a web page, {title[1]}" if title else text).split())


def reason_in(body: Any) -> str:
    """The same, of a body that is parsed already; or text, which is the reason itself."""
    if isinstance(body, str):
        return _words(body)[:500] or "no reason given"
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        if isinstance(inner, Mapping):
            found = inner.get("message") or inner.get("detail")
            if found:
                return str(found)[:1000]
        detail = body.get("detail") or body.get("message")
        if detail:
            return str(detail)[:1000]
    return jsonlib.dumps(body)[:500]


def cause_of(error: OSError) -> str:
    """A broken connection in a few words."""
    text = str(error)
    for known in (
        "Connection refused",
        "Connection reset",
        "Name or service not known",
        "Connection aborted",
        "No route",
    ):
        if known in text:
            return known.lower()
    return f"{type(error).__name__}: {text[:200]}"

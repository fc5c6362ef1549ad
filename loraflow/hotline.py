"""`Hotline`: calls whose every tenth of a millisecond counts, in two halves: send, and take the answer.

Between the two the caller works while the server does. One kept connection over plain HTTP; nothing is retried, and the
limit is on the whole call, as with `loraflow.http_session.BoundedSession`.
"""

from __future__ import annotations

import http.client
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from json import loads
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import requests
from typing_extensions import override

from loraflow.http_errors import elsewhere, hidden_error, no_answer, reason_in, refused, too_late

__all__ = ["Body", "Hotline"]

Body: TypeAlias = Sequence[bytes | memoryview]
"""A request's body in parts, sent one after the other, uncopied."""

_FRESH_SECONDS = 2.0
"""A connection that lay idle for longer is not trusted: uvicorn closes them after 5 s, and a call that is sent at that
moment may or may not have been heard."""


class _Bounded(socket.socket):
    """A socket whose every wait ends at one deadline."""

    deadline = 0.0

    @classmethod
    def connected(cls, host: str, port: int, deadline: float) -> Self:
        """Connect, small packets sent at once."""
        plain = socket.create_connection((host, port), timeout=max(1e-3, deadline - time.monotonic()))
        made = cls(plain.family, plain.type, plain.proto, fileno=plain.detach())
        made.deadline = deadline
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def quiet(self) -> bool:
        """Whether nothing came since the last answer: the end of the connection would be seen."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return not poll.poll(0)

    @override
    def recv_into(self, *args: Any, **options: Any) -> int:
        self._limit()
        return super().recv_into(*args, **options)

    @override
    def sendall(self, *args: Any, **options: Any) -> None:
        self._limit()  # the limit of sendall is on the whole of it
        super().sendall(*args, **options)

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)


class _Connection(http.client.HTTPConnection):
    """Kept open between calls; ``used`` is when the last one ended."""

    used = 0.0


class Hotline:
    """Calls to one server; usable from several threads, each call on a connection of its own.

    Args:
        url: Base URL, ``http://…``.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._url = url
        self._host, self._port = parts.hostname or "", parts.port or http.client.HTTP_PORT
        self._prefix = parts.path.rstrip("/")
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close, self._idle)

    @staticmethod
    def serves(url: str) -> bool:
        """Whether ``url`` is plain HTTP."""
        return urlsplit(url).scheme == "http"

    def begin(self, path: str, body: Body, headers: Mapping[str, str], timeout: float) -> Callable[[], Any]:
        """Send a POST; what is returned waits for the answer and gives its parsed JSON, or its text. To be called once.

        Args:
            path: From the slash on.
            body: The body.
            headers: All but its length.
            timeout: Seconds for the whole call, the answer included.

        Raises:
            SyncTimeout: Not within ``timeout``; here, or when the answer is taken. So are the others.
            Unreachable: Nothing listens, or the connection broke.
            HTTPFailure: The answer is an error.
        """
        what = f"POST {path}"
        try:
            connection = self._connection(time.monotonic() + timeout)
            self._send(connection, path, body, headers)
        except TimeoutError as error:
            raise too_late(what, self._url, timeout) from error
        except OSError as error:
            raise no_answer(what, self._url, str(error)) from error

        def take() -> Any:
            try:
                status, text, location = self._take(connection)
            except TimeoutError as error:
                raise too_late(what, self._url, timeout) from error
            except (OSError, http.client.HTTPException) as error:
                raise no_answer(what, self._url, f"{type(error).__name__}: {error}") from error
            try:
                answer = loads(text)
            except ValueError:
                answer = text
            found = (status, reason_in(answer)) if status >= requests.codes.bad else hidden_error(answer)
            if requests.codes.multiple_choices <= status < requests.codes.bad:
                found = status, elsewhere(location)
            if found is not None:
                raise refused(what, self._url, status, *found)
            return answer

        return take

    def close(self) -> None:
        """Close what is kept."""
        _close(self._idle)

    def _send(self, connection: _Connection, path: str, body: Body, headers: Mapping[str, str]) -> None:
        try:
            connection.putrequest("POST", self._prefix + path, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(sum(memoryview(part).nbytes for part in body)))
            small = body[0] if len(body) == 1 and isinstance(body[0], bytes) else None
            connection.endheaders(small)  # in one packet with the headers
            for part in body if small is None else ():
                connection.send(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that refuses a body may answer before it has read all of it, and hang up
        except BaseException:
            connection.close()
            raise

    def _take(self, connection: _Connection) -> tuple[int, str, str | None]:
        try:
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except BaseException:
            connection.close()
            raise
        if response.will_close or response.status >= requests.codes.bad:
            connection.close()  # after an error of a route uvicorn may drop the connection without a word
        else:
            connection.used = time.monotonic()
            self._idle.append(connection)
        return response.status, text, response.getheader("Location")

    def _connection(self, deadline: float) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            fresh = time.monotonic() - connection.used < _FRESH_SECONDS
            if fresh and isinstance(connection.sock, _Bounded) and connection.sock.quiet():
                connection.sock.deadline = deadline
                return connection
            connection.close()
        connection = _Connection(self._host, self._port)
        connection.sock = _Bounded.connected(self._host, self._port, deadline)
        return connection


def _close(idle: list[_Connection]) -> None:
    while idle:
        idle.pop().close()

"""A `requests` session whose limit is on the whole call.

The timeout of requests starts anew with every byte: a server that dribbles, or a link that does, holds a caller for
ever. Here one thread shuts the socket of a call whose time is up.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from typing_extensions import override
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

__all__ = ["BoundedSession"]

_POOL = 64  # connections kept open: generation fans out wider than requests' default of 10
_IDLE = 5.0  # seconds after which the thread of a session without calls ends
_thread = threading.local()  # `.call`: the call that this thread is in


@dataclass(eq=False)
class _Call:
    """One call under way: when it must be over, and the socket that it waits on once there is one."""

    deadline: float
    socket: socket.socket | None = None
    expired: bool = False


def _note(sock: socket.socket | None) -> None:
    call = getattr(_thread, "call", None)
    if isinstance(call, _Call):
        call.socket = sock


class _Watched(HTTPConnection):
    @override
    def connect(self) -> None:
        super().connect()
        _note(self.sock)

    @override
    def request(self, *args: Any, **options: Any) -> None:
        _note(self.sock)  # kept open since an earlier call
        super().request(*args, **options)


class _WatchedTLS(HTTPSConnection):
    @override
    def connect(self) -> None:
        super().connect()
        _note(self.sock)

    @override
    def request(self, *args: Any, **options: Any) -> None:
        _note(self.sock)
        super().request(*args, **options)


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Watched


class _PoolTLS(HTTPSConnectionPool):
    ConnectionCls = _WatchedTLS


class _Adapter(HTTPAdapter):
    @override
    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _PoolTLS}


class BoundedSession:
    """Pooled connections, used by any number of threads; `close` ends its thread and closes them."""

    def __init__(self) -> None:
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy between trainer and server would see every rollout
        self._session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True
        adapter = _Adapter(pool_maxsize=_POOL)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        self._calls: set[_Call] = set()
        self._changed = threading.Condition()
        self._watcher: threading.Thread | None = None
        self._next = float("inf")  # when the watcher looks again

    def request(self, method: str, url: str, *, timeout: float, **options: Any) -> requests.Response:
        """One call, its body read, within ``timeout`` seconds. Redirections are answers, and not followed.

        Raises:
            requests.Timeout: It took longer, however busily.
            requests.RequestException: It failed otherwise.
        """
        with self._watching(timeout) as call:
            failure: requests.RequestException | None = None
            try:
                response = self._session.request(method, url, timeout=timeout, allow_redirects=False, **options)
            except requests.RequestException as error:
                failure = error
        if call.expired:  # also where it seems to have worked: headers that end early are taken for whole ones
            raise requests.Timeout(f"no whole answer in {timeout:g} s") from failure
        if failure is not None:
            raise failure
        return response

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        with self._changed:
            watcher, self._watcher = self._watcher, None
            self._changed.notify_all()
        if watcher is not None:
            watcher.join()
        self._session.close()

    @contextmanager
    def _watching(self, seconds: float) -> Iterator[_Call]:
        call = _thread.call = _Call(time.monotonic() + seconds)
        with self._changed:
            self._calls.add(call)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="loraflow-deadlines", daemon=True)
                self._watcher.start()
            elif call.deadline < self._next:
                self._changed.notify_all()
        try:
            yield call
        finally:
            _thread.call = None
            with self._changed:
                self._calls.discard(call)

    def _watch(self) -> None:
        with self._changed:
            while self._watcher is threading.current_thread():
                now = time.monotonic()
                for call in [call for call in self._calls if call.deadline <= now]:
                    call.expired = True
                    self._calls.discard(call)
                    if call.socket is not None:
                        with suppress(OSError):  # closed meanwhile
                            call.socket.shutdown(socket.SHUT_RDWR)
                self._next = min((call.deadline for call in self._calls), default=float("inf"))
                if self._calls:
                    self._changed.wait(min(self._next - now, _IDLE))  # what it waited for may be over long before
                elif not self._changed.wait(_IDLE) and not self._calls:
                    self._watcher = None  # the next call has a new one

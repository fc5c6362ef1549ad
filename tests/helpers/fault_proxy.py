"""A TCP proxy that spoils what passes through it, on demand."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Literal, Self, get_args

Fault = Literal["none", "reset", "cut", "dribble", "late", "hole"]
"""What happens to every connection:

- ``none``: nothing.
- ``reset``: it is reset (RST), also in the middle of an answer.
- ``cut``: it is closed (FIN) at a random byte of the answers.
- ``dribble``: answers arrive a few bytes at a time.
- ``late``: answers arrive seconds later.
- ``hole``: it is accepted, and nothing ever comes back.
"""
FAULTS: tuple[Fault, ...] = get_args(Fault)[1:]

DRIBBLE_BYTES, DRIBBLE_SECONDS = 16, 0.1
LATE_SECONDS = 3.0


class FaultProxy:
    """Another address of the server at ``target``; a context manager.

    Attributes:
        fault: What happens now; it may be set at any time.
        struck: How many connections a fault was seen by.
    """

    def __init__(self, target: int, *, seed: int = 0) -> None:
        self.target = target
        self.fault: Fault = "none"
        self.struck = 0
        self._chance = random.Random(seed)
        self._open = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            thread.start()
            self._threads = [old for old in self._threads if old.is_alive()] + [thread]

    def _serve(self, client: socket.socket) -> None:
        if self.fault == "reset":
            self.struck += 1
            _reset(client)
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
        except OSError:
            client.close()
            return
        with client, server, selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            with suppress(OSError):
                self._pump(client, server, ready)

    def _pump(self, client: socket.socket, server: socket.socket, ready: selectors.BaseSelector) -> None:
        cut_at = self._chance.randrange(1, 4000)
        passed, struck = 0, False
        while self._open:
            events = ready.select(0.05)
            fault = self.fault
            if fault != "none" and not struck:
                struck = True
                self.struck += 1
            if fault == "reset":
                _reset(client)
                return
            for key, _ in events:
                source, sink = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                if fault == "hole":
                    time.sleep(0.05)  # nothing is read: the peer's buffers fill
                    continue
                data = source.recv(1 << 16)
                if not data:
                    return
                if source is client or fault == "none":
                    sink.sendall(data)
                    continue
                if fault == "late":
                    time.sleep(LATE_SECONDS)
                if fault == "cut" and passed + len(data) >= cut_at:
                    sink.sendall(data[: max(0, cut_at - passed)])
                    return
                passed += len(data)
                if fault == "dribble":
                    self._dribble(sink, data)
                else:
                    sink.sendall(data)

    def _dribble(self, sink: socket.socket, data: bytes) -> None:
        for start in range(0, len(data), DRIBBLE_BYTES):
            if self.fault != "dribble" or not self._open:  # healed: the rest at once
                sink.sendall(data[start:])
                return
            sink.sendall(data[start : start + DRIBBLE_BYTES])
            time.sleep(DRIBBLE_SECONDS)


def _reset(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()

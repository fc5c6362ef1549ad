"""Addresses of this machine."""

from __future__ import annotations

import socket

__all__ = ["address_towards"]


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to ``host``: what gloo must bind for the trainer to reach it."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # datagrams: nothing is sent
        found: str = probe.getsockname()[0]
    return found

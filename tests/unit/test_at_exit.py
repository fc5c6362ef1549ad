"""A trainer that is there until the process ends frees its servers then: when no thread pool takes work any more."""

from __future__ import annotations

import subprocess
import sys

AT_EXIT = """
import atexit
from types import SimpleNamespace
from loraflow.transports.background import each
from loraflow.transports.filesystem import on_every_server

servers = [SimpleNamespace(url=f"http://{name}") for name in "ab"]
links = [SimpleNamespace(server=server) for server in servers]
atexit.register(lambda: each(links, lambda link: print("restored", link.server.url)))
atexit.register(lambda: on_every_server(servers, lambda server: print("freed", server.url), "policy"))
"""


def test_every_server_is_freed_at_exit() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False, timeout=120)
    wanted = ["freed http://a", "freed http://b", "restored http://a", "restored http://b"]
    assert done.stdout.splitlines() == wanted, done.stderr

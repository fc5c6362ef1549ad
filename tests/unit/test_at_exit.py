"""A trainer that is there until the process ends frees its servers then: when no thread pool takes work any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

AT_EXIT = """
import atexit
from types import SimpleNamespace
from loraflow.transports.background import each
from loraflow.transports.filesystem import on_every_server

def free(server):
    print("freed", server.url)

servers = [SimpleNamespace(url=f"http://{name}") for name in "ab"]
links = [SimpleNamespace(server=server) for server in servers]
"""


@pytest.mark.parametrize(
    "free", ["on_every_server(servers, free, 'policy')", "each(links, lambda link: free(link.server))"]
)
def test_several_servers_are_freed_at_exit(free: str) -> None:
    script = f"{AT_EXIT}\natexit.register(lambda: {free})\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split("\n")[:-1] == ["freed http://a", "freed http://b"], done.stderr

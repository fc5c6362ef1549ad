"""One version's way into the LoRA slots of all servers: sent to all, checksummed here meanwhile, proven on each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import requests

from loraflow.adapter import AdapterSnapshot
from loraflow.digest import Agreements, SlotDigest
from loraflow.errors import LoadError
from loraflow.http_errors import HTTPFailure, load_hint, once_visible
from loraflow.plugin_client import PluginClient, ServedDigest, begin_direct, begin_upload
from loraflow.policy import Policy
from loraflow.server import Unreachable, VLLMServer
from loraflow.transports.base import Delivered

if TYPE_CHECKING:
    from loraflow.transports.filesystem import FilesystemTransport

__all__ = ["Installation", "Payload"]

_log = logging.getLogger(__name__)
_UPLOADS = 32  # at once


@dataclass(frozen=True)
class Payload:
    """A version's bytes, for servers on this host and for others.

    Attributes:
        source: Where servers on this host read it; None where there is none.
        host: The bytes, for servers on other hosts; None where there is none.
        blake3: Of ``host`` (hex).
        uploads: URLs of the servers on other hosts.
    """

    source: Mapping[str, Any] | None
    host: memoryview | None
    blake3: str
    uploads: frozenset[str]


@dataclass(frozen=True)
class _Sent:
    """A call under way."""

    server: VLLMServer
    digest: SlotDigest
    began: float
    take: Callable[[], ServedDigest]


class Installation:
    """One version.

    Args:
        agreements: The layouts agreed with the servers.
        files: Knows what the servers list.
        policy: The version.
        path: Its folder as the servers see it.
        snapshot: Its content.
        payload: The same as served; the agreements' copy holds it too.
    """

    def __init__(
        self,
        agreements: Agreements,
        files: FilesystemTransport,
        policy: Policy,
        path: str,
        snapshot: AdapterSnapshot,
        payload: Payload,
    ) -> None:
        self._agreements = agreements
        self._files = files
        self._policy = policy
        self._path = path
        self._snapshot = snapshot
        self._payload = payload

    def on(self, servers: Sequence[VLLMServer]) -> dict[str, Delivered]:
        """Install on all ``servers``; a failure becomes that server's outcome."""
        far = [server for server in servers if server.url in self._payload.uploads]
        near = [server for server in servers if server.url not in self._payload.uploads]
        if not far:
            return self._on_near(near)
        with ThreadPoolExecutor(min(_UPLOADS, len(far)), "loraflow-upload") as pool:
            uploads = [pool.submit(self._whole, server) for server in far]
            found = self._on_near(near)
            found |= {server.url: upload.result() for server, upload in zip(far, uploads, strict=True)}
        return {server.url: found[server.url] for server in servers}

    def _on_near(self, servers: Sequence[VLLMServer]) -> dict[str, Delivered]:
        """No threads: the calls are sent one after the other, which takes nothing, and all are worked on then."""
        calls: dict[str, _Sent | Delivered] = {}
        for server in servers:
            try:
                calls[server.url] = self._send(server)
            except Exception as error:  # noqa: BLE001 - told in the outcome; the manager decides for all servers
                calls[server.url] = Delivered(self._policy.name, error=error)
        self._agreements.begin([call.digest for call in calls.values() if isinstance(call, _Sent)], self._snapshot)
        return {url: call if isinstance(call, Delivered) else self._taken(call) for url, call in calls.items()}

    def _whole(self, server: VLLMServer) -> Delivered:
        try:
            return self._taken(self._send(server))
        except Exception as error:  # noqa: BLE001 - as above
            return Delivered(self._policy.name, error=error)

    def _taken(self, sent: _Sent) -> Delivered:
        try:
            return self._receive(sent)
        except HTTPFailure as error:
            what = f"loading adapter {self._policy.name!r} from {self._path} failed: {error.reason}"
            failure = LoadError(what, server=sent.server.url, hint=load_hint(error, self._path))
            failure.__cause__ = error
            return Delivered(self._policy.name, error=failure)
        except Exception as error:  # noqa: BLE001 - as above
            return Delivered(self._policy.name, error=error)

    def _send(self, server: VLLMServer) -> _Sent:
        digest = self._agreements.agree(server)
        return _Sent(server, digest, time.perf_counter(), self._call(server, digest))

    def _call(self, server: VLLMServer, digest: SlotDigest) -> Callable[[], ServedDigest]:
        payload, layout_id = self._payload, digest.layout.layout_id
        if server.url in payload.uploads:
            assert payload.host is not None  # noqa: S101 - made for them
            return begin_upload(
                server,
                self._policy.name,
                path=self._path,
                layout_id=layout_id,
                payload=payload.host,
                blake3=payload.blake3,
            )
        assert payload.source is not None  # noqa: S101 - made for them
        return begin_direct(server, self._policy.name, path=self._path, layout_id=layout_id, source=payload.source)

    def _ask(self, server: VLLMServer, digest: SlotDigest) -> ServedDigest:
        return self._call(server, digest)()

    def _receive(self, sent: _Sent) -> Delivered:
        server, digest, policy = sent.server, sent.digest, self._policy
        try:
            served = sent.take()
        except Unreachable:
            if not self._files.holds(policy, server):
                raise
            _log.warning("%s: the answer to %s was lost, and it is there", server.url, policy)
            client = PluginClient(server.request)
            served = client.verify(policy.name, digest.layout.layout_id, timeout=server.load_timeout)
        except HTTPFailure as error:
            if error.status not in {requests.codes.conflict, requests.codes.not_found}:
                raise
            if error.status == requests.codes.conflict:
                digest = self._agreements.agree(server, again=True)  # restarted since: it knows no layout
            served = once_visible(self._path, partial(self._ask, server, digest))
        arrived = time.perf_counter()
        self._files.note(policy, server, served.path)
        proof = digest.compare(self._agreements.expected(digest, self._snapshot), served)
        phases = {
            "load": (arrived - sent.began) * 1e3,
            "call": served.call_ms,
            "worker": served.worker_ms,
            "compare": (time.perf_counter() - arrived) * 1e3,
        }
        return Delivered(policy.name, phases, proof=proof)

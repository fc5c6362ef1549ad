"""One version's way into the LoRA slots of all servers: sent to all, checksummed here meanwhile, proven on each.

The calls may leave before the payload is there (`Installation.send`): their way to the workers then takes no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import requests

from loraflow.adapter import AdapterSnapshot
from loraflow.digest import Agreements, SlotDigest
from loraflow.errors import LoadError, LoraflowError
from loraflow.http_errors import HTTPFailure, load_hint, once_visible
from loraflow.plugin_answers import ServedDigest
from loraflow.plugin_client import PluginClient, begin_direct, begin_upload
from loraflow.policy import Policy
from loraflow.server import Unreachable, VLLMServer
from loraflow.transports.base import Delivered
from loraflow.transports.group_way import Call

if TYPE_CHECKING:
    from loraflow.transports.filesystem import FilesystemTransport

__all__ = ["Installation", "Payload"]

_log = logging.getLogger(__name__)
_UPLOADS = 32  # at once


@dataclass(frozen=True)
class Payload:
    """A version's bytes, for servers on this host and for others.

    Attributes:
        source: Where servers on this host read it now; None where there is none.
        host: The bytes, for servers on other hosts; None where there is none.
        blake3: Of ``host`` (hex).
        uploads: URLs of the servers that get them over HTTP.
        broadcasts: By URL, of the servers that get them over a group: calls one, sends to it, and gives what waits for
            its answer (`loraflow.transports.group_way.GroupWay.begin`).
    """

    source: Mapping[str, Any] | None
    host: memoryview | None
    blake3: str
    uploads: frozenset[str]
    broadcasts: Mapping[str, Callable[[Call[ServedDigest]], Callable[[], ServedDigest]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sent:
    """A call under way."""

    server: VLLMServer
    digest: SlotDigest
    take: Callable[[], ServedDigest]


class Installation:
    """One version.

    Args:
        agreements: The layouts agreed with the servers.
        files: Knows what the servers list.
        policy: The version.
        path: Its folder as the servers see it.

    Attributes:
        policy: The version.
    """

    def __init__(
        self,
        agreements: Agreements,
        files: FilesystemTransport,
        policy: Policy,
        path: str,
    ) -> None:
        self.policy = policy
        self._agreements = agreements
        self._files = files
        self._path = path
        self._calls: dict[str, _Sent | Delivered] = {}

    def send(
        self,
        servers: Sequence[VLLMServer],
        begin: Callable[[VLLMServer, Call[ServedDigest]], Callable[[], ServedDigest]],
    ) -> None:
        """Call ``servers`` for a payload that is still to come; a failure becomes that server's outcome.

        No threads: the calls are sent one after the other, which takes nothing, and all are worked on then.

        Args:
            servers: Which.
            begin: Calls one, and gives what waits for its answer (`loraflow.transports.ways.Ways.begin`).
        """
        for server in servers:
            self._call(server, lambda server, digest: begin(server, partial(self._begin, server, digest)))

    def on(
        self,
        servers: Sequence[VLLMServer],
        snapshot: AdapterSnapshot,
        payload: Payload,
        *,
        began: float | None = None,
    ) -> dict[str, Delivered]:
        """Install on all ``servers``; a failure becomes that server's outcome.

        Args:
            servers: Those that were called (`send`) already, and others.
            snapshot: The version's content.
            payload: The same as served; the agreements' copy holds it too.
            began: When it was there, on the performance counter; now where not given.
        """
        began = time.perf_counter() if began is None else began
        far = [server for server in servers if server.url in payload.uploads]
        near = [server for server in servers if server.url not in payload.uploads]
        if not far:
            return self._on_called(near, snapshot, payload, began)
        with ThreadPoolExecutor(min(_UPLOADS, len(far)), "loraflow-upload") as pool:
            uploads = [pool.submit(self._upload, server, snapshot, payload) for server in far]
            found = self._on_called(near, snapshot, payload, began)
            found |= {server.url: upload.result() for server, upload in zip(far, uploads, strict=True)}
        return {server.url: found[server.url] for server in servers}

    def _call(self, server: VLLMServer, begin: Callable[[VLLMServer, SlotDigest], Callable[[], ServedDigest]]) -> None:
        try:
            digest = self._agreements.agree(server)
            self._calls[server.url] = _Sent(server, digest, begin(server, digest))
        except Exception as error:  # noqa: BLE001 - told in the outcome; the manager decides for all servers
            self._calls[server.url] = Delivered(self.policy.name, error=error)

    def call_off(self) -> None:
        """Wait for the answers of all that was sent, whatever they are: the payload will not come."""
        for call in self._calls.values():
            if isinstance(call, _Sent):
                try:
                    call.take()
                except LoraflowError as error:
                    _log.debug("%s: %s was called off: %s", call.server.url, self.policy, error)
        self._calls.clear()

    def _on_called(
        self, servers: Sequence[VLLMServer], snapshot: AdapterSnapshot, payload: Payload, began: float
    ) -> dict[str, Delivered]:
        for server in servers:
            if server.url not in self._calls:
                self._call(server, partial(self._begin_with, payload))
        calls = [self._calls[server.url] for server in servers]
        self._agreements.begin([call.digest for call in calls if isinstance(call, _Sent)], snapshot)
        return {
            server.url: self._taken(call, snapshot, payload, began) if isinstance(call, _Sent) else call
            for server, call in zip(servers, calls, strict=True)
        }

    def _upload(self, server: VLLMServer, snapshot: AdapterSnapshot, payload: Payload) -> Delivered:
        began = time.perf_counter()
        try:
            digest = self._agreements.agree(server)
            sent = _Sent(server, digest, self._begin_with(payload, server, digest))
            return self._taken(sent, snapshot, payload, began)
        except Exception as error:  # noqa: BLE001 - as above
            return Delivered(self.policy.name, error=error)

    def _taken(self, sent: _Sent, snapshot: AdapterSnapshot, payload: Payload, began: float) -> Delivered:
        try:
            return self._receive(sent, snapshot, payload, began)
        except HTTPFailure as error:
            what = f"loading adapter {self.policy.name!r} from {self._path} failed: {error.reason}"
            failure = LoadError(what, server=sent.server.url, hint=load_hint(error, self._path))
            failure.__cause__ = error
            return Delivered(self.policy.name, error=failure)
        except Exception as error:  # noqa: BLE001 - as above
            return Delivered(self.policy.name, error=error)

    def _begin(
        self, server: VLLMServer, digest: SlotDigest, source: Mapping[str, Any], timeout: float | None = None
    ) -> Callable[[], ServedDigest]:
        layout_id = digest.layout.layout_id
        return begin_direct(
            server, self.policy.name, path=self._path, layout_id=layout_id, source=source, timeout=timeout
        )

    def _begin_with(self, payload: Payload, server: VLLMServer, digest: SlotDigest) -> Callable[[], ServedDigest]:
        """The call for a payload that is there."""
        if server.url in payload.broadcasts:
            return payload.broadcasts[server.url](partial(self._begin, server, digest))
        if server.url in payload.uploads:
            assert payload.host is not None  # noqa: S101 - made for them
            return begin_upload(
                server,
                self.policy.name,
                path=self._path,
                layout_id=digest.layout.layout_id,
                payload=payload.host,
                blake3=payload.blake3,
            )
        assert payload.source is not None  # noqa: S101 - made for them
        return self._begin(server, digest, payload.source)

    def _ask(self, server: VLLMServer, digest: SlotDigest, payload: Payload) -> ServedDigest:
        return self._begin_with(payload, server, digest)()

    def _receive(self, sent: _Sent, snapshot: AdapterSnapshot, payload: Payload, began: float) -> Delivered:
        server, digest, policy = sent.server, sent.digest, self.policy
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
                # It was restarted and knows no layout; or what was announced came late.
                digest = self._agreements.agree(server, again=True)
            served = once_visible(self._path, partial(self._ask, server, digest, payload))
        arrived = time.perf_counter()
        self._files.note(policy, server, served.path)
        proof = digest.compare(self._agreements.expected(digest, snapshot), served)
        phases = {
            "load": (arrived - began) * 1e3,
            "call": served.call_ms,
            "worker": served.worker_ms,
            "compare": (time.perf_counter() - arrived) * 1e3,
        }
        return Delivered(policy.name, phases, proof=proof)

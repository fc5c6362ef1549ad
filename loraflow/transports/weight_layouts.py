"""`WeightLayouts`: where each server of a merged broadcast serves weights, as agreed with it, and their digest.

A server is asked once for the weights that updates touch, and once for all weights, where those travel: a base that
another run left is sent whole. Where it cannot say, vLLM loads what arrives, and log-probs must prove it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import requests
import torch

from loraflow.errors import CapabilityError, LoadError
from loraflow.merge import WireTensor
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.transports.weight_digest import WeightDigest, WeightLayout

__all__ = ["WeightLayouts"]

_log = logging.getLogger(__name__)
_NO_PLACES = {requests.codes.bad_request, requests.codes.conflict}


@dataclass
class _Agreed:
    """With one server; ``whole`` once it was asked about all weights."""

    names: frozenset[str]
    touched: WeightLayout | None
    whole: tuple[WeightLayout | None] | None = None


class WeightLayouts:
    """What servers said of their places.

    Args:
        announce: Describes weights, given their checkpoint names.
        device: Where buckets lie.
        asked: Whether servers are asked at all.
        required: Whether a server that cannot say is refused: it has no way of its own to load what it is sent.
    """

    def __init__(
        self,
        announce: Callable[[Iterable[str]], Sequence[WireTensor]],
        device: torch.device,
        *,
        asked: bool,
        required: bool,
    ) -> None:
        self._announce = announce
        self._device = device
        self._asked = asked
        self._required = required
        self._agreed: dict[str, _Agreed] = {}
        self._digest: tuple[list[WeightLayout], WeightDigest] | None = None

    def agree(self, server: VLLMServer, touched: Sequence[str]) -> None:
        """Ask where it serves what updates touch; what it said before is forgotten.

        Args:
            server: The server.
            touched: Checkpoint names; updates of anything else are of all weights.

        Raises:
            CapabilityError: It cannot say, and that is required.
            HTTPFailure: It failed.
        """
        self._agreed[server.url] = _Agreed(frozenset(touched), self._ask(server, touched))

    def agree_again(self, server: VLLMServer) -> None:
        """What is connected anew may have been restarted, and knows nothing of its layouts then.

        Raises:
            LoadError: It serves weights elsewhere now.
        """
        agreed = self._agreed.get(server.url)
        for layout in () if agreed is None else (agreed.touched, *(agreed.whole or ())):
            if layout is not None and self._ask(server, layout.names) != layout:
                raise LoadError("the server serves its weights in other places than at the start", server=server.url)

    def digests(self, server: VLLMServer, names: Collection[str] | None = None) -> bool:
        """Whether updates of ``names`` are proven by digest, each of them; by default of what updates touch."""
        agreed = self._agreed.get(server.url)
        if agreed is None:
            return False
        if names is None or agreed.names == set(names):
            return agreed.touched is not None
        return agreed.whole is not None and agreed.whole[0] is not None

    def of(self, servers: Sequence[VLLMServer], names: Sequence[str]) -> dict[str, WeightLayout]:
        """Where they serve ``names``, by URL; of those that cannot say it of all weights, what updates touch."""
        found: dict[str, WeightLayout | None] = {}
        for server in servers:
            agreed = self._agreed[server.url]
            found[server.url] = agreed.touched
            if agreed.names != set(names):
                if agreed.whole is None:
                    agreed.whole = (self._ask(server, names),)
                found[server.url] = agreed.whole[0] or agreed.touched
        return {url: layout for url, layout in found.items() if layout is not None}

    def digest(self, layouts: Iterable[WeightLayout]) -> WeightDigest | None:
        """The digest of one update: the last one's, where the same servers are updated; None without a layout."""
        wanted = list(layouts)
        if not wanted:
            return None
        if self._digest is None or list(map(id, self._digest[0])) != list(map(id, wanted)):
            self._digest = wanted, WeightDigest(wanted, self._device)
        self._digest[1].restart()
        return self._digest[1]

    def forget(self) -> None:
        """Let go of what was agreed on, and of the digest's memory."""
        self._agreed.clear()
        self._digest = None

    def _ask(self, server: VLLMServer, names: Sequence[str]) -> WeightLayout | None:
        plugin = server.info.plugin
        if not self._asked or plugin is None or "weights" not in plugin.capabilities:
            return None
        try:
            return WeightLayout.agree(server, self._announce(names))
        except (CapabilityError, HTTPFailure, LoadError) as error:
            if isinstance(error, HTTPFailure) and error.status not in _NO_PLACES:
                raise
            if self._required:
                raise CapabilityError(
                    f"without a GPU, ipc takes weights that the server can write to: {error}",
                    server=server.url,
                    hint="start it with LORAFLOW_FOLD=1, or with the gloo backend",
                ) from error
            _log.info("%s: merged weights are proven by log-probs: %s", server.url, error)
            return None

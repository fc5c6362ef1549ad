"""Merged broadcast: the base with the adapter inside, through vLLM's weight-transfer routes."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from loraflow.adapter import AdapterSnapshot
from loraflow.config import SyncConfig
from loraflow.errors import ConfigError, LoadError, LoraflowError, VerifyError
from loraflow.merge import MergeSource, WireTensor
from loraflow.policy import Policy
from loraflow.records import Proof
from loraflow.server import VLLMServer
from loraflow.transports.background import Task, each
from loraflow.transports.base import Delivered, Delivery, NotAnnounced
from loraflow.transports.carriers import make_group, shared_memory
from loraflow.transports.groups import Group
from loraflow.transports.link import PRISTINE, Link
from loraflow.transports.mapped import TrainerBuffers
from loraflow.transports.merging import Merging
from loraflow.transports.pipeline import buckets_of, send
from loraflow.transports.requirements import check_alignment, check_server, common_dtype
from loraflow.transports.weight_digest import WeightLayout
from loraflow.transports.weight_layouts import WeightLayouts
from loraflow.transports.wire import plan_buckets, touched_tensors, with_siblings

__all__ = ["BroadcastTransport"]

_log = logging.getLogger(__name__)
_MEASURED = 8  # the rounding error is measured on every so manieth weight, in each sync on others
_LAST_PORT = 65535

Carrier = Literal["nccl", "ipc", "gloo"]


@dataclass(frozen=True)
class _Served:
    """What one server's weights hold: a version, or (None) the pristine base."""

    policy: Policy | None = None
    snapshot: AdapterSnapshot | None = None

    @property
    def version(self) -> str:
        return PRISTINE if self.policy is None else self.policy.name


@dataclass
class _State:
    """What the transport knows of one server; ``before`` is what `withdraw` goes back to."""

    link: Link
    now: _Served = _Served()
    before: _Served = _Served()
    baseline: dict[str, str] | None = None


class BroadcastTransport(NotAnnounced):
    """The ``nccl``, ``ipc`` and ``gloo`` carriers.

    Only what the adapter can change is sent, with what the server keeps in the same layer; merged in the trainer's
    process from its frozen base and the snapshot, never from the live adapter. Every update is proven by digest, before
    requests are let in again, where the server can checksum its weights (`WeightDigest`).

    Attributes:
        touched_tensors: Checkpoint names of the weights that a delivery overwrites, in the order of travel.
        rounding_error: Rounding of the last merge relative to its update (see `MergeSource.rounding_error`).

    Args:
        model: The trainer's model.
        config: Options.
        carrier: ``nccl``, ``ipc`` or ``gloo``.
    """

    kind: Literal["merged"] = "merged"

    def __init__(self, model: nn.Module, config: SyncConfig, carrier: Carrier) -> None:
        self.name: str = carrier
        self.touched_tensors: tuple[str, ...] = ()
        self.rounding_error = 0.0
        self._model = model
        self._config = config
        self._source: MergeSource | None = None
        self._merging: Merging  # since `open`
        self._states: dict[str, _State] = {}
        self._layouts = WeightLayouts(
            lambda names: self._opened().announce(names),
            self._device,
            asked=config.verify != "canary",
            required=self._only_straight,
        )
        self._mapped: TrainerBuffers | None = None
        self._places: dict[str, int] = {}  # each server's, from the first port on; kept when it is connected anew

    # ---------------------------------------------------------------- the protocol

    def open(self, servers: Sequence[VLLMServer]) -> None:
        """Connect to every server, and bring each to the pristine base where another run left it otherwise.

        Raises:
            AdapterError: The adapter cannot be merged.
            CapabilityError: A server lacks the routes or the backend, or the trainer's base is sharded.
            LoadError: A server cannot be connected or restored; the phase is named.
        """
        for server in servers:
            check_server(server, self.name)
        self._source = MergeSource(
            self._model,
            dtype=common_dtype(servers),
            dequantize_base=self._config.dequantize_base,
            measure_every=_MEASURED,
        )
        self._merging = Merging(
            self._source, self._device, bucket_bytes=self._config.bucket_bytes, capped=self.name == "ipc"
        )
        self.touched_tensors = with_siblings(self._source.changed, self._source.weights)
        if self.name != "gloo":
            check_alignment(plan_buckets(self._source.announce(self._source.weights), self._config.bucket_bytes))
        self._states = {server.url: _State(self._link(server)) for server in servers}
        if self.name == "ipc" and (self._only_straight or self._config.verify != "canary"):
            tensors = self._source.announce(self._source.weights)  # all of them: a base that was left is sent whole
            self._mapped = shared_memory(servers, tensors, self._config, self._device)
        try:
            self._connect(servers)
        except BaseException:
            self._free()
            raise

    def _connect(self, servers: Sequence[VLLMServer]) -> None:
        self._raise_first(each(self._links(servers), Link.connect))
        for server in servers:
            self._layouts.agree(server, self.touched_tensors)
        left = [link for link in self._links(servers) if link.take_over()]
        if left:
            self._raise_first(self._update(left, _Served(), self._opened().weights)[0])
        if self._config.verify != "canary":
            for state in self._states.values():
                state.baseline = state.link.checksums()

    def deliver(self, policy: Policy, snapshot: AdapterSnapshot, servers: Sequence[VLLMServer]) -> Delivery:
        """Merge once, and send to all servers at the same time. See `Transport.deliver`.

        A server that fails is brought back to what it served before; where that fails too it stays paused, and says so.
        """
        source = self._opened()
        served = _Served(policy, snapshot)
        errors, phases = self._update(self._links(servers), served, self.touched_tensors)
        self.rounding_error = source.rounding_error
        for state in (self._states[server.url] for server in servers if server.url not in errors):
            state.before, state.now = state.now, served
        outcomes = {}
        for server in servers:
            state = self._states[server.url]
            error = errors.get(server.url)
            if error is not None:
                error = self._repair(state, error)
            elif state.before.policy is None:  # the first has left alone what it was to leave alone
                error = self._unlike_start(server)
            proof = Proof("digest", passed=True) if self._layouts.digests(server) and error is None else None
            outcomes[server.url] = Delivered(server.info.model, dict(state.link.phases_ms), error, proof)
        size = sum(tensor.nbytes for tensor in source.announce(self.touched_tensors))
        return Delivery(policy, size, snapshot.digest, phases, outcomes, {"rounding_error": self.rounding_error})

    def withdraw(self, policy: Policy, servers: Sequence[VLLMServer]) -> Mapping[str, Exception]:
        """Send what was served before ``policy`` again, to every server that has it, or half of something."""
        back: dict[str, tuple[_Served, list[Link]]] = {}
        for state in (self._states[server.url] for server in servers):
            if state.now.policy == policy:
                state.now, state.link.unsettled = state.before, True
            if state.link.unsettled:
                back.setdefault(state.now.version, (state.now, []))[1].append(state.link)
        errors: dict[str, Exception] = {}
        for served, links in back.values():
            errors |= self._update(links, served, self.touched_tensors, repair=False)[0]
        for link in back[PRISTINE][1] if PRISTINE in back else ():  # the first may have changed more than it was to
            error = errors.get(link.server.url) or self._unlike_start(link.server, everything=True)
            errors |= {} if error is None else {link.server.url: error}
        return errors

    def retire(self, policy: Policy, servers: Sequence[VLLMServer]) -> None:
        """Nothing to free: the next version has overwritten it."""

    def holds(self, policy: Policy, server: VLLMServer) -> bool:
        """Whether the server's weights carry the version's name; after a restart they do not."""
        return self._states[server.url].link.version() == policy.name

    def digests(self, server: VLLMServer, *, whole: bool = False) -> bool:
        """Whether the server and this carrier agreed on where its weights are. See `Transport.digests`.

        Args:
            server: The server.
            whole: Not of what updates touch, but of all weights, as they were sent (`restore`).
        """
        return self._layouts.digests(server, self._opened().weights if whole else None)

    def attach(self, policy: Policy, snapshot: AdapterSnapshot, server: VLLMServer) -> Delivered:
        """Connect anew, and send the version to this server alone. See `Transport.attach`."""
        known = self._states.pop(server.url, None)
        if known is not None:
            known.link.close_group()
        check_server(server, self.name)
        state = self._states[server.url] = _State(self._link(server))
        state.link.unsettled = True  # until it has the version, whatever it has now
        self._raise_first(each([state.link], Link.connect))
        self._layouts.agree(server, self.touched_tensors)
        served = _Served(policy, snapshot)
        # Weights that are not the checkpoint's are another run's, or half of an update: then all of them travel.
        left = state.link.take_over()
        names = tuple(self._opened().weights) if left else self.touched_tensors
        self._raise_first(self._update([state.link], served, names)[0])
        state.now = state.before = served
        if left and self.digests(server) and not self.digests(server, whole=True):
            _log.warning(
                "%s: its weights were changed, and only those that this run changes are proven now", server.url
            )
        proof = Proof("digest", passed=True) if self._layouts.digests(server) else None
        return Delivered(server.info.model, dict(state.link.phases_ms), proof=proof)

    def restore(self, servers: Sequence[VLLMServer], *, whole: bool = False) -> None:
        """Bring servers to the pristine base.

        Args:
            servers: Which.
            whole: Send every weight, not only those that this run has touched (after a deep sleep dropped them).
        """
        names = self._opened().weights if whole else self.touched_tensors
        self._raise_first(self._update(self._links(servers), _Served(), names)[0])
        for server in servers:
            state = self._states[server.url]
            state.now = state.before = _Served()

    def close(self, servers: Sequence[VLLMServer]) -> None:
        """Restore the pristine base wherever this run touched it, prove it by checksum, and leave.

        Servers that are not given keep what they serve.

        Raises:
            VerifyError: A restored server's weights are not bit for bit those of the start.
        """
        mine = [server for server in servers if server.url in self._states]
        try:
            touched = [s for s in mine if self._states[s.url].now.policy or self._states[s.url].link.unsettled]
            if touched:
                self.restore(touched)
            self.prove_untouched(touched, everything=True)
        finally:
            errors = each(self._links(mine), Link.disconnect)
            self._free()
            self._states.clear()
            self._layouts.forget()
        self._raise_first(errors)

    def prove_untouched(self, servers: Sequence[VLLMServer], *, everything: bool = False) -> None:
        """Compare the servers' checksums with those taken at `open`, where they have them.

        Args:
            servers: Which.
            everything: The touched weights too must be as they were (after `restore`).

        Raises:
            VerifyError: Some weight differs that must not.
        """
        touched = () if everything else self.touched_tensors
        for server in servers:
            baseline = self._states[server.url].baseline
            if baseline is None:
                continue
            found = self._states[server.url].link.checksums() or {}
            ours = touched_tensors(baseline, touched)
            wrong = sorted(
                k for k in baseline.keys() | found.keys() if k not in ours and baseline.get(k) != found.get(k)
            )
            if wrong:
                raise VerifyError(
                    f"{len(wrong)} weights are not what they were at the start: {', '.join(wrong[:3])}",
                    server=server.url,
                    hint="does something else write to this server's weights? restart it to load the checkpoint again",
                )

    # ---------------------------------------------------------------- sending

    def _update(
        self, links: Sequence[Link], served: _Served, names: Iterable[str], *, repair: bool = True
    ) -> tuple[dict[str, Exception], dict[str, float]]:
        """Bring ``links`` to ``served``; errors by URL, and milliseconds per shared phase.

        What fails on this side (the merge itself) leaves no server behind: each is brought back, then it is raised; an
        interrupt (Ctrl-C) at once.
        """
        self._opened()
        names = tuple(names)
        merge = self._merging.begin(served.snapshot, names)
        layouts = self._layouts.of([link.server for link in links], names)
        digest = self._layouts.digest(layouts.values())
        errors: dict[str, Exception] = {}
        buckets = buckets_of(merge.tensors, self._config.bucket_bytes, capped=self.name == "ipc")
        straight = _straight(links, layouts, merge.tensors)
        if self._mapped is not None and len(straight) < len(links):
            straight = {}  # one buffer after another is handed to vLLM

        def begin(link: Link) -> None:
            url = link.server.url
            link.begin(served.version, buckets, straight.get(url), lambda: self._layouts.agree_again(link.server))

        begins = Task(lambda: each(links, begin), name="begin")
        try:
            phases = send(
                links,
                buckets,
                merge.stream,
                errors,
                seen=None if digest is None else digest.see_all,
                grouped=merge.grouped,
                buffers=self._mapped.views if self._mapped is not None and straight else None,
                begun=lambda: begins.result(threading.TIMEOUT_MAX),  # every call of it has its limit
            )
            if digest is not None:
                digest.settle()  # while the servers load the last bucket
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold sends under way, and so the group's sockets open
            unbegun = _begun(begins)
            live = [link for link in links if link.server.url not in unbegun]
            for link in live:
                link.abandon()
            for link in live if repair and isinstance(error, Exception) else ():
                self._repair(self._states[link.server.url], LoadError("the merge failed", server=link.server.url))
            raise
        live = [link for link in links if link.server.url not in errors]

        def finish(link: Link) -> None:
            layout = layouts.get(link.server.url)
            proof = partial(digest.require, link.server, layout) if digest is not None and layout is not None else None
            link.finish(served.version, proof)

        errors |= each(live, finish)
        for link in links:
            if link.server.url in errors:
                link.abandon()
        return errors, phases

    def _unlike_start(self, server: VLLMServer, *, everything: bool = False) -> Exception | None:
        """What `prove_untouched` raises for a server; None where it is as it was, or nothing is known to compare."""
        try:
            self.prove_untouched([server], everything=everything)
        except LoraflowError as error:
            return error
        return None

    def _repair(self, state: _State, error: Exception) -> Exception:
        """Bring a server that failed back to what it served; ``error``, with what came of it."""
        if not state.link.unsettled:
            return error
        if state.link.out_of_step and isinstance(error, LoraflowError):
            error.hint = "with tensor parallelism vLLM's executor is out of step after a worker's error: restart it"
            return error
        try:
            again, _ = self._update([state.link], state.now, self.touched_tensors, repair=False)
            failed = again.get(state.link.server.url)
        except Exception as merging:  # noqa: BLE001 - whatever made the merge fail may still be there
            failed = merging
        if failed is None or not isinstance(error, LoraflowError):
            return error
        error.hint = (
            f"{error.hint + '; ' if error.hint else ''}it could not be brought back to {state.now.version} either "
            f"({failed}): it stays paused; restart it, or withdraw once it answers"
        )
        return error

    # ---------------------------------------------------------------- small things

    def _opened(self) -> MergeSource:
        if self._source is None:
            raise LoadError("the transport is not open")
        return self._source

    @property
    def _device(self) -> torch.device:
        """Where buckets lie."""
        return torch.device("cpu") if self.name == "gloo" else self._base_device

    @property
    def _base_device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def _only_straight(self) -> bool:
        """Whether no server has a way of its own to load what it is sent: vLLM's takes a GPU."""
        return self.name == "ipc" and self._device.type != "cuda"

    def _free(self) -> None:
        """Free the memory that servers have mapped, once they are told to let go of it, or are gone."""
        for state in self._states.values():
            state.link.close_group()
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()

    def _links(self, servers: Sequence[VLLMServer]) -> list[Link]:
        return [self._states[server.url].link for server in servers]

    def _link(self, server: VLLMServer) -> Link:
        config = self._config
        index = self._places.setdefault(server.url, len(self._places))
        if config.group_port and config.group_port + index > _LAST_PORT:
            raise ConfigError(f"group_port={config.group_port} leaves no port for {server.url}: each server needs one")

        def make(link: Link, world_size: int) -> Group:
            port = config.group_port + index if config.group_port else 0
            return make_group(link, self.name, world_size, config, port, self._base_device, self._mapped)

        return Link(server, self.name, make, bucket_bytes=config.bucket_bytes, timeout=config.collective_timeout)

    @staticmethod
    def _raise_first(errors: Mapping[str, Exception]) -> None:
        for error in errors.values():
            raise error


def _straight(
    links: Sequence[Link], layouts: Mapping[str, WeightLayout], tensors: Sequence[WireTensor]
) -> dict[str, str]:
    """The layout's handle by URL, for servers that can write these very weights to where they are served."""
    names = {tensor.name for tensor in tensors}
    able = [link.server.url for link in links if link.writes_straight and link.server.url in layouts]
    return {url: layouts[url].layout_id for url in able if names == set(layouts[url].names)}


def _begun(begins: Task[dict[str, Exception]]) -> Mapping[str, Exception]:
    """Wait until servers have been told what comes, or could not be; errors by URL."""
    try:
        return begins.result(threading.TIMEOUT_MAX)
    except Exception:  # noqa: BLE001 - it is what is being handled
        return {}

"""`Link`: one server's part in a merged update, from the handshake to the read-back, and the way out of a failure.

The order of an update: mark the version as partial → pause (requests wait) → unload adapters (rule 8) → start →
announce and receive → finish with the version → prove it and read it back → reset the prefix cache → resume. Where
loraflow's plugin can, the first two are one call, the last two another, and all between them a third: its workers
write what they receive straight to where it is served (`loraflow_server.receive`), and checksum it. A server that fails
stays paused, since its layers may lack weights, until `Link.connect` and a whole update have put it right.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from loraflow.errors import LoadError, LoraflowError, SyncTimeout
from loraflow.http_errors import understood
from loraflow.plugin_answers import ServedSums
from loraflow.plugin_client import PluginClient
from loraflow.server import HTTPFailure, VLLMServer
from loraflow.transports.background import Awaited, Task, wait_until
from loraflow.transports.groups import Group, Pending
from loraflow.transports.mapped import MappedGroup
from loraflow.transports.phases import in_phase
from loraflow.transports.wire import Bucket, init_info, start_body, update_info

__all__ = ["PRISTINE", "Link"]

PRISTINE = "default"
"""vLLM's name for the weights that it started with; set again once they are restored."""

_PARTIAL = ".partial"
_ASLEEP = re.compile(r'engine_sleep_state\{[^}]*sleep_state="(weights_offloaded|discard_all)"[^}]*\} 1')
_ONE_CALL = {"Connection": "close"}  # after an error in these routes uvicorn drops the connection without a word
_QUICK = frozenset({"/start_weight_update", "/finish_weight_update"})  # requests wait; `Hotline` knows of that, too
_REASON = 2.0  # seconds that a server has to say why it dropped the connection


class Link:
    """The connection to one server.

    Attributes:
        server: The server.
        group: The broadcast group; None while not connected.
        phases_ms: Milliseconds per phase of the last update.
        broken: Whether the last update failed, so that the server's weights are not to be trusted.
        unsettled: Whether an update was begun and has not ended: the server may be paused, and serve anything.

    Args:
        server: The server.
        carrier: ``nccl``, ``ipc`` or ``gloo``.
        make_group: Opens the trainer's end, given the group's world size.
        bucket_bytes: See `loraflow.transports.wire.plan_buckets`.
        timeout: Seconds for one collective, for the handshake, and for the server to finish after the last bucket.
    """

    def __init__(
        self,
        server: VLLMServer,
        carrier: str,
        make_group: Callable[[Link, int], Group],
        *,
        bucket_bytes: int,
        timeout: float,
    ) -> None:
        self.server = server
        self.group: Group | None = None
        self.phases_ms: dict[str, float] = {}
        self.broken = False
        self.unsettled = False
        self._carrier = carrier
        self._make_group = make_group
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._update: Task[Any] | None = None
        self._paused_here = False
        self._labelled = PRISTINE
        self._straight = False  # the last update went past vLLM's own loading
        self._maps = False  # its workers have mapped the buckets' memory

    # ---------------------------------------------------------------- connecting

    def connect(self) -> Group:
        """Make a fresh group, whatever an earlier one (of this run or another) left behind.

        Raises:
            LoadError: The server cannot join; the message names the phase.
            SyncTimeout: Not within the timeout.
        """
        self.close_group()
        with self._in_phase("connect"):
            self._discard_update()
            self._post("/shutdown_weight_transfer_engine", optional=True)
            answer = self.server.request("GET", "/get_world_size", retry=True)
            with understood("how many workers it has", self.server.url):
                world = 1 + int(answer["world_size"])
            self.group = group = self._make_group(self, world)
            body = init_info(
                self._carrier,
                self.server.info.version,
                **{"address": "", "port": 0, **group.handshake()},
                world_size=world,
                bucket_bytes=self._bucket_bytes,
                timeout=self._timeout,
            )
            path = "/init_weight_transfer_engine"
            call = Task(lambda: self._post(path, {"init_info": body}, timeout=self._timeout + 5), name="init")
            join = Task(group.join, name="join")
            ended = wait_until(
                lambda: call.failed() or join.failed() or (call.done() and join.done()),
                time.monotonic() + self._timeout,
            )
            if not ended:
                raise SyncTimeout(
                    f"the broadcast group was not complete within {self._timeout:g} s",
                    server=self.server.url,
                    expected=f"{world - 1} workers at {body.get('master_address')}:{body.get('master_port')}",
                    hint="can the server reach this host there? group_host and group_port set the address",
                )
            (call if call.failed() else join).result(0)
            call.result(0)
            self._maps = isinstance(group, MappedGroup) and group.reached
        return group

    def close_group(self) -> None:
        """Leave the group on this side."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def disconnect(self) -> None:
        """Leave the group on both sides."""
        if not self.broken:  # workers refuse to leave while an update is open
            self._post("/shutdown_weight_transfer_engine", optional=True)
        if self.group is not None:
            self.group.leave()
        self.close_group()

    def _discard_update(self) -> None:
        """End an update that somebody left open, and drop what its layers have received of it.

        vLLM keeps a failed update's tensors with their layers and would count them towards the next one; an update
        without tensors makes it let go of them. Only done where something is left: it touches every layer.
        """
        if self.broken and self._straight:
            return  # nothing is kept on the way
        found = self.version()
        if not self.broken and (found == self._labelled or not found.endswith(_PARTIAL)):
            return
        if self._update_is_open():
            self._post("/finish_weight_update", {}, refused=True)
        self._post("/start_weight_update", start_body(self.server.info.version))
        self._post("/finish_weight_update", {})

    def _update_is_open(self) -> bool:
        """Whether the workers are between start and finish; vLLM refuses either call in the other state.

        With loraflow's worker extension they say so. Without it: a refusal does no harm where there is one worker, and
        with several (whose refusals vLLM's executor does not survive) the mark of a started update must do.
        """
        plugin = self.server.info.plugin
        if plugin is None or not plugin.worker_extension:
            return True
        answer = self.server.request(
            "POST", "/collective_rpc", json={"method": "loraflow_state"}, timeout=self._timeout
        )
        with understood("what its workers do", self.server.url):
            return any(found.get("ok", {}).get("updating", False) for found in answer["results"])

    @property
    def out_of_step(self) -> bool:
        """Whether a worker's error has left the server unable to answer.

        vLLM's executor with several workers is, after any error of one; loraflow's own gloo engine and worker never
        raise there.
        """
        raises = self._carrier != "gloo" and not self._straight
        return self.broken and raises and (self.server.info.tensor_parallel or 1) > 1

    @property
    def writes_straight(self) -> bool:
        """Whether the server can write what it receives to where it is served, once that is agreed on."""
        return self._maps if self._carrier == "ipc" else self._can("receive")

    # ---------------------------------------------------------------- one update

    def begin(
        self,
        version: str,
        buckets: Sequence[Bucket],
        layout_id: str | None = None,
        connected: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare the server, and announce the tensors of ``buckets`` where the carrier announces once.

        Args:
            version: The version that they are of.
            buckets: What will be sent.
            layout_id: Where the server serves them, for it to write them there; None where vLLM is to load them.
            connected: Called where the group had to be made anew.
        """
        self.phases_ms = {}
        self._update = None
        self.unsettled = True  # until requests are let in again
        with self._in_phase("pause"):
            adapters = self._hold(version + _PARTIAL)
        with self._in_phase("unload"):
            if adapters is None:
                adapters = [model.id for model in self.server.models() if model.parent is not None]
            for name in adapters:
                self.server.unload_adapter(name)
        if self.group is None:
            group = self.connect()
            connected()
        else:
            group = self.group
        self.broken = True  # until `finish` has succeeded
        self._straight = layout_id is not None
        if not self._straight:
            with self._in_phase("start"):
                self._post("/start_weight_update", start_body(self.server.info.version))
        self._started = time.perf_counter()
        tensors = [slot.tensor for bucket in buckets for slot in bucket.slots]
        limit = self._timeout * (2 + len(buckets))
        if layout_id is not None:
            receive = partial(
                PluginClient(self.server.request).weights_receive,
                layout_id,
                [tensor.name for tensor in tensors],
                [tensor.dtype_name for tensor in tensors],
                [len(bucket.slots) for bucket in buckets],
                **group.stamp_straight(),
                label=_until_resumed(version),
                bucket_timeout=self._timeout,
                timeout=limit,
            )
            self._update = Task(receive, name="receive")
            return
        stamp = group.stamp()
        if self._carrier != "ipc":
            body = update_info(self._carrier, self.server.info.version, tensors, bucket_bytes=self._bucket_bytes)
            body |= stamp
            self._update = Task(
                lambda: self._post("/update_weights", {"update_info": body}, timeout=limit), name="update"
            )

    def announce(self, bucket: Bucket) -> dict[str, Any]:
        """Body of ``/update_weights`` for one bucket (ipc)."""
        tensors = [slot.tensor for slot in bucket.slots]
        return update_info(self._carrier, self.server.info.version, tensors, bucket_bytes=self._bucket_bytes)

    def post_update(self, body: dict[str, Any]) -> Pending:
        """Send one bucket's body (ipc)."""
        path = "/update_weights"
        return Awaited(Task(lambda: self._post(path, {"update_info": body}, timeout=self._timeout), name="update"))

    def send(self, buffer: Tensor, bucket: Bucket) -> Pending:
        """Start to send one bucket."""
        if self.group is None:
            raise LoadError("no broadcast group", server=self.server.url)
        with self._in_phase("broadcast"):
            return self.group.send(buffer, bucket)

    def wait(self, pending: Pending) -> None:
        """Wait for a bucket, or for the server's call to fail beside it, or for the timeout."""
        update = self._update
        with self._in_phase("broadcast"):
            deadline = time.monotonic() + self._timeout
            try:
                ended = wait_until(lambda: (update is not None and update.failed()) or pending.done(), deadline)
            except RuntimeError:
                if update is None or not wait_until(update.failed, time.monotonic() + _REASON):
                    raise
                ended = True  # the connection broke because the server gave up: its answer says why
            if update is not None and update.failed():
                update.result(0)
            if not ended:
                raise SyncTimeout(f"a bucket was not taken within {self._timeout:g} s", server=self.server.url)

    def finish(self, version: str, prove: Callable[[ServedSums | None], str | None] | None = None) -> None:
        """End the update as ``version``, and let requests in again.

        Args:
            version: Label of the weights from now on.
            prove: Raises where the server holds something else; asked before requests are let in. It is given what
                the server said that it holds, where it has, and gives the label that it found, where it was told.
        """
        label = _until_resumed(version)
        with self._in_phase("broadcast"):
            served = self._taken()
        self.phases_ms["update"] = (time.perf_counter() - self._started) * 1e3
        if not self._straight:
            with self._in_phase("finish"):
                self._post("/finish_weight_update", {"weight_version": label})
                if self.group is not None:
                    self.group.confirm("finished", self._timeout)
        self._labelled = label
        with self._in_phase("digest" if prove is not None else "finish"):
            self._require_label(label, None if prove is None else prove(served))
        if not (self._by_plugin and self._paused_here):  # the plugin's resume empties the caches itself
            with self._in_phase("cache"):
                self.server.reset_prefix_cache()
        self.broken = False
        with self._in_phase("resume"):
            self._resume()
            if label != version:
                self._label(version)
        self.unsettled = False

    def _taken(self) -> ServedSums | None:
        """Wait until the server has taken the last bucket; what it holds then, where it says so."""
        answer = None
        if self._update is not None:
            try:
                answer = self._update.result(self._timeout)
            except TimeoutError as error:
                raise SyncTimeout(
                    f"the server did not load the last bucket within {self._timeout:g} s", server=self.server.url
                ) from error
        if self.group is not None and not self._straight:
            self.group.confirm("received", self._timeout)
        return answer if isinstance(answer, ServedSums) else None

    def abandon(self) -> None:
        """Give up on the update under way; the server stays paused, and the group is dropped."""
        update, self._update = self._update, None
        self.close_group()
        if self._straight and update is not None and not update.done():
            with suppress(LoraflowError):  # a server that is gone waits for nothing
                PluginClient(self.server.request).call_off(timeout=_REASON)

    # ---------------------------------------------------------------- the server's state

    def version(self) -> str:
        """The weight version that the server reports; what this link last set, where the server has no such route."""
        if "weight_info" not in self.server.info.weight_routes:
            return self._labelled
        answer = self.server.request("GET", "/weight_info", retry=True)
        with understood("the version of its weights", self.server.url):
            return str(answer["weight_version"])

    def take_over(self) -> bool:
        """Whether another run left the weights changed; its pause is then ended by the next `finish`."""
        left = self.version() != PRISTINE
        if left and self._is_paused():
            self._paused_here = True
        return left

    def checksums(self) -> dict[str, str] | None:
        """SHA-256 per served tensor and rank; None where the server has no such route."""
        if "weight_checker" not in self.server.info.weight_routes:
            return None
        answer = self.server.request("POST", "/weight_checker", json={"action": "checksum"}, timeout=self._timeout)
        with understood("the checksums of its weights", self.server.url):
            return dict(answer["checksums"])

    def _require_label(self, label: str, found: str | None) -> None:
        """Raise where the weights are labelled otherwise; read back where nobody has (``found``)."""
        found = self.version() if found is None else found
        if found != label:
            raise LoadError(
                "the weight version reads back differently", server=self.server.url, expected=label, found=found
            )

    def _label(self, version: str) -> None:
        self._labelled = version
        self._post("/update_weight_version", {"new_version": version}, optional=True)

    @property
    def _by_plugin(self) -> bool:
        """Whether loraflow's plugin pauses and resumes: vLLM's own route sleeps 20 ms, and empties the caches twice."""
        return self._can("pause")

    def _can(self, capability: str) -> bool:
        """Whether loraflow's plugin is there, and says so of itself."""
        plugin = self.server.info.plugin
        return plugin is not None and capability in plugin.capabilities

    @property
    def _plugin(self) -> PluginClient:
        return PluginClient(partial(self.server.request, kept=True))

    def _resume(self) -> None:
        if self._paused_here and self._by_plugin:
            self._plugin.resume()
        elif self._paused_here:
            self._post("/resume")
        self._paused_here = False

    def _hold(self, label: str) -> Sequence[str] | None:
        """Label the weights, first of all: whoever finds them later knows what to expect; and hold requests.

        Where somebody else, we do not know who, has paused the server, it stays so afterwards. Weights that are
        offloaded or dropped cannot be written: nothing is changed then, nor the weights' label.

        Returns:
            The names of adapters that requests may use; None where they must be asked for.
        """
        mine, adapters = self._paused_here, None
        if self._can("hold"):  # all of it in one call
            self._labelled, self._paused_here = label, True  # an answer that is lost leaves it so
            held = self._plugin.hold(label, timeout=self._timeout)
            was, paused, adapters = held.was, held.paused_here, held.adapters
        else:
            was = self.version()
            self._label(label)
            self._paused_here = True
            paused = self._ask_to_pause()
        self._paused_here = paused or mine
        if not self._paused_here and self._is_asleep():
            self._label(was)
            self.unsettled = self.broken
            raise LoadError("the server sleeps", server=self.server.url, hint="POST /wake_up before the sync")
        return adapters

    def _ask_to_pause(self) -> bool:
        """Whether this has paused the server; False where it was paused already."""
        if self._by_plugin:
            return self._plugin.pause()
        if self._is_paused():
            return False
        self.server.request("POST", "/pause", params={"mode": "keep"})
        return True

    def _is_paused(self) -> bool:
        answer = self.server.request("GET", "/is_paused", retry=True)
        with understood("whether it is paused", self.server.url):
            return bool(answer["is_paused"])

    def _is_asleep(self) -> bool:
        """Whether weights are offloaded or dropped; `/is_sleeping` says yes to a mere pause, too."""
        return _ASLEEP.search(str(self.server.request("GET", "/metrics", retry=True))) is not None

    # ---------------------------------------------------------------- plumbing

    def _post(
        self,
        path: str,
        body: Any = None,
        *,
        timeout: float | None = None,
        optional: bool = False,
        refused: bool = False,
    ) -> Any:
        """One call. ``optional``: a server without the route will do; ``refused``: so will one that says no."""
        how: dict[str, Any] = {"kept": True} if path in _QUICK else {"headers": _ONE_CALL}
        try:
            return self.server.request("POST", path, json=body, timeout=timeout or self._timeout, **how)
        except HTTPFailure as error:
            missing = error.status in {404, 405}
            if (optional and missing) or (refused and not missing):
                return None
            raise

    def _in_phase(self, phase: str) -> AbstractContextManager[None]:
        return in_phase(phase, self.phases_ms, self.server.url)


def _until_resumed(version: str) -> str:
    """What weights are labelled until requests are let in: a death before that must show in the label of the base."""
    return version if version != PRISTINE else version + _PARTIAL

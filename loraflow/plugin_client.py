"""`PluginClient`: typed calls of the server plugin's routes, over any function that makes a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode

from loraflow.http_errors import understood
from loraflow.layout import SlotLayout
from loraflow.plugin_answers import FoldLayout, Held, LoadedAdapter, ServedDigest, ServedSums

if TYPE_CHECKING:
    from loraflow.server import VLLMServer

__all__ = [
    "PluginClient",
    "Request",
    "begin_direct",
    "begin_fold",
    "begin_probe",
    "begin_upload",
    "begin_upload_probe",
]

_ROOT = "/loraflow/v1"
_understood = understood("the answer of loraflow's plugin")


class Request(Protocol):
    """One HTTP call; the parsed JSON body or the text, or a `LoraflowError`. `VLLMServer.request` is one."""

    def __call__(
        self, method: str, path: str, *, json: Any = None, timeout: float | None = None, retry: bool = False
    ) -> Any:
        """Make the call."""
        ...


class PluginClient:
    """The plugin of one server.

    Args:
        request: Makes one call; it adds the bearer token, and raises for any status but 2xx.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    @_understood
    def status(self) -> dict[str, Any]:
        """What the server is and what it serves."""
        answer: dict[str, Any] = self._request("GET", f"{_ROOT}/status", retry=True)
        return answer

    @_understood
    def load(
        self, name: str, *, path: str | None = None, url: str | None = None, timeout: float | None = None
    ) -> LoadedAdapter:
        """Load an adapter from a folder of the server, or from a store that the server fetches from.

        A repeated call with the same name and content is answered like the first.
        """
        source = {"path": path} if url is None else {"url": url}
        body = {"name": name, **source}
        answer = self._request("POST", f"{_ROOT}/adapters", json=body, timeout=timeout, retry=True)
        return LoadedAdapter(
            str(answer["name"]), str(answer["path"]), int(answer["lora_int_id"]), dict(answer["phases_ms"])
        )

    @_understood
    def unload(self, name: str) -> int:
        """Refuse new requests for ``name``; how many requests still use it."""
        return int(self._request("DELETE", f"{_ROOT}/adapters/{quote(name, safe='')}")["in_flight"])

    @_understood
    def layout(self, tensors: Mapping[str, tuple[int, int]], *, timeout: float | None = None) -> SlotLayout:
        """Where an adapter with these tensors (name to shape, see `lora_shapes`) lies in the server's slots."""
        body = {"tensors": {name: list(shape) for name, shape in sorted(tensors.items())}}
        return SlotLayout.from_json(self._request("POST", f"{_ROOT}/layout", json=body, timeout=timeout, retry=True))

    @_understood
    def verify(self, name: str, layout_id: str, *, timeout: float | None = None) -> ServedDigest:
        """Checksums of what is served under ``name``."""
        body = {"name": name, "layout_id": layout_id}
        return ServedDigest.from_json(self._request("POST", f"{_ROOT}/verify", json=body, timeout=timeout, retry=True))

    @_understood
    def probe(self, source: Mapping[str, Any], *, timeout: float | None = None) -> tuple[tuple[str, ...], ...]:
        """First 16 bytes (hex) of a direct payload as every worker sees them, by engine and rank."""
        answer = self._request("POST", f"{_ROOT}/direct/probe", json={"source": dict(source)}, timeout=timeout)
        return _heads(answer)

    @_understood
    def join_group(self, how: Mapping[str, Any], *, timeout: float | None = None) -> str:
        """Have every worker join a broadcast group of ours; its name in sources.

        Args:
            how: ``{"backend", "address", "port", "world_size", "timeout"}``.
            timeout: Seconds.
        """
        return str(self._request("POST", f"{_ROOT}/group/join", json=dict(how), timeout=timeout)["group"])

    def leave_group(self, group: str, *, timeout: float | None = None) -> None:
        """Have every worker leave it."""
        self._request("POST", f"{_ROOT}/group/leave", json={"group": group}, timeout=timeout)

    @_understood
    def sees(self, path: str) -> bool:
        """Whether the server sees the file ``path``, which lies under its roots."""
        return bool(self._request("POST", f"{_ROOT}/direct/sees", json={"path": path})["sees"])

    @_understood
    def direct(
        self, name: str, *, path: str, layout_id: str, source: Mapping[str, Any], timeout: float | None = None
    ) -> ServedDigest:
        """Install a payload as the adapter ``name``; what lies in its slot then. See `begin_direct`."""
        body = {"name": name, "path": path, "layout_id": layout_id, "source": dict(source)}
        return ServedDigest.from_json(self._request("POST", f"{_ROOT}/direct", json=body, timeout=timeout))

    @_understood
    def fold_layout(
        self,
        run_id: str,
        tensors: Mapping[str, tuple[int, int]],
        modules: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
    ) -> FoldLayout:
        """Take the lease on the base weights, and have the targeted ones found and copied.

        Args:
            run_id: The run that folds.
            tensors: The adapter's matrices, name to shape.
            modules: For each adapted module ``{"weight", "a", "b", "scaling", "transposed"}``.
            timeout: Seconds.
        """
        body = {
            "run_id": run_id,
            "tensors": {name: list(shape) for name, shape in sorted(tensors.items())},
            "modules": [dict(module) for module in modules],
        }
        return FoldLayout.from_json(self._request("POST", f"{_ROOT}/fold/layout", json=body, timeout=timeout))

    @_understood
    def fold_undo(self, run_id: str, policy: str, layout_id: str, *, timeout: float | None = None) -> str | None:
        """Serve again what was served before ``policy``; what is folded then (None: the pristine base)."""
        body = {"run_id": run_id, "policy": policy, "layout_id": layout_id}
        found = self._request("POST", f"{_ROOT}/fold/undo", json=body, timeout=timeout)["policy"]
        return None if found is None else str(found)

    @_understood
    def reset(self, run_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return to the pristine base, proven by checksum, and give the lease back."""
        answer: dict[str, Any] = self._request("POST", f"{_ROOT}/reset", json={"run_id": run_id}, timeout=timeout)
        return answer

    @_understood
    def weights_layout(self, tensors: Mapping[str, Sequence[int]], *, timeout: float | None = None) -> dict[str, Any]:
        """Where checkpoint weights (name to shape) are served; see `loraflow.transports.weight_digest`."""
        body = {"tensors": {name: list(shape) for name, shape in sorted(tensors.items())}}
        answer: dict[str, Any] = self._request("POST", f"{_ROOT}/weights/layout", json=body, timeout=timeout)
        return answer

    @_understood
    def weights_sums(self, layout_id: str, *, timeout: float | None = None) -> ServedSums:
        """Checksum of each piece of them as served now."""
        body = {"layout_id": layout_id}
        return ServedSums.from_json(
            self._request("POST", f"{_ROOT}/weights/sums", json=body, timeout=timeout, retry=True)
        )

    @_understood
    def weights_map(self, where: Mapping[str, Any], *, timeout: float | None = None) -> tuple[tuple[str, ...], ...]:
        """Have the workers map buffers of this process; the token (hex) that each finds there, by engine and rank.

        Args:
            where: ``{"source", "buffers", "stride", "flags", "workers"}``, see `loraflow_server.mapped.Where`.
            timeout: Seconds.
        """
        return _heads(self._request("POST", f"{_ROOT}/weights/map", json=dict(where), timeout=timeout))

    def weights_unmap(self, name: str | None = None, *, timeout: float | None = None) -> None:
        """Have the workers let go of the buffers whose flags are called ``name``, or of any."""
        body = {} if name is None else {"name": name}
        self._request("POST", f"{_ROOT}/weights/unmap", json=body, timeout=timeout)

    @_understood
    def weights_receive(
        self,
        layout_id: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        buckets: Sequence[int],
        *,
        mapped: Mapping[str, Any] | None = None,
        label: str,
        bucket_timeout: float,
        timeout: float | None = None,
    ) -> ServedSums:
        """Have the workers, which are in a group with this process, write what it broadcasts to where it is served.

        Or what lies in memory that they have mapped.

        Args:
            layout_id: As of `weights_layout`, for these weights or more.
            names: Checkpoint names, in the order of travel.
            dtypes: Of each, e.g. ``bfloat16``.
            buckets: How many of them each bucket holds.
            mapped: ``{"name", "first"}`` where they are not broadcast, see `loraflow_server.receive.Incoming`.
            label: The name of the weights afterwards.
            bucket_timeout: Seconds that a worker waits for one bucket.
            timeout: Seconds for the call.
        """
        body = {
            "layout_id": layout_id,
            "names": list(names),
            "dtypes": list(dtypes),
            "buckets": list(buckets),
            "label": label,
            "timeout": bucket_timeout,
            **({} if mapped is None else {"mapped": dict(mapped)}),
        }
        return ServedSums.from_json(self._request("POST", f"{_ROOT}/weights/receive", json=body, timeout=timeout))

    def call_off(self, *, timeout: float | None = None) -> None:
        """Have the workers give up on the broadcast that they wait for (`weights_receive`), and on its group."""
        self._request("POST", f"{_ROOT}/weights/call_off", timeout=timeout)

    @_understood
    def hold(self, label: str, *, timeout: float | None = None) -> Held:
        """Name the weights ``label``, then let no step run until `resume`."""
        answer = self._request("POST", f"{_ROOT}/hold", json={"label": label}, timeout=timeout)
        return Held(str(answer["was"]), bool(answer["paused_here"]), tuple(map(str, answer["adapters"])))

    @_understood
    def pause(self) -> bool:
        """Let no step run until `resume`; False where somebody else has paused the server."""
        return bool(self._request("POST", f"{_ROOT}/pause")["paused_here"])

    def resume(self) -> None:
        """Empty the caches of the old weights, and let steps run again."""
        self._request("POST", f"{_ROOT}/resume")

    def base(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Fingerprint of the base weights as served now, and whether it is that of the start."""
        answer: dict[str, Any] = self._request("GET", f"{_ROOT}/base", timeout=timeout, retry=True)
        return answer

    @_understood
    def metrics(self) -> str:
        """The plugin's counters in Prometheus' text form."""
        return str(self._request("GET", f"{_ROOT}/metrics", retry=True))


def begin_direct(
    server: VLLMServer,
    name: str,
    *,
    path: str,
    layout_id: str,
    source: Mapping[str, Any],
    timeout: float | None = None,
) -> Callable[[], ServedDigest]:
    """Have a server install a payload as the adapter ``name``; what is returned waits for what lies in its slot then.

    Args:
        server: The server.
        name: A new name.
        path: Folder that the version is published in, behind this call.
        layout_id: Agreed for this adapter.
        source: Where the payload is, see `loraflow_server.payload.check_source`.
        timeout: Seconds; the server's ``load_timeout`` where not given.
    """
    body = {"name": name, "path": path, "layout_id": layout_id, "source": dict(source)}
    take = server.begin(f"{_ROOT}/direct", json=body, timeout=timeout or server.load_timeout)
    return _understood(lambda: ServedDigest.from_json(take()))


def begin_probe(
    server: VLLMServer, source: Mapping[str, Any], timeout: float
) -> Callable[[], tuple[tuple[str, ...], ...]]:
    """`PluginClient.probe` in two halves."""
    take = server.begin(f"{_ROOT}/direct/probe", json={"source": dict(source)}, timeout=timeout)
    return _understood(lambda: _heads(take()))


def begin_fold(server: VLLMServer, body: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Have a server fold a version; what is returned waits for the proof.

    Args:
        server: The server.
        body: See `loraflow_server.fold_desk.FoldDesk.fold`.
    """
    take = server.begin(f"{_ROOT}/fold", json=dict(body), timeout=server.load_timeout)
    return _understood(lambda: dict(take()))


def begin_upload(
    server: VLLMServer, name: str, *, path: str, layout_id: str, payload: memoryview, blake3: str
) -> Callable[[], ServedDigest]:
    """The same, with the payload in the call.

    Args:
        server: The server.
        name: A new name.
        path: Folder that the version is published in, behind this call.
        layout_id: Agreed for this adapter.
        payload: Its bytes.
        blake3: Their blake3 (hex).
    """
    query = urlencode({"name": name, "path": path, "layout_id": layout_id, "blake3": blake3})
    take = server.begin(f"{_ROOT}/direct/upload?{query}", body=[payload], timeout=server.load_timeout)
    return _understood(lambda: ServedDigest.from_json(take()))


def begin_upload_probe(
    server: VLLMServer, *, layout_id: str, payload: memoryview, blake3: str
) -> Callable[[], tuple[tuple[str, ...], ...]]:
    """The same with nothing installed: `PluginClient.probe` of what was uploaded."""
    query = urlencode({"layout_id": layout_id, "blake3": blake3})
    take = server.begin(f"{_ROOT}/direct/upload/probe?{query}", body=[payload], timeout=server.load_timeout)
    return _understood(lambda: _heads(take()))


def _heads(answer: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(str(head) for head in ranks) for ranks in answer["heads"])

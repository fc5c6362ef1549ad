"""One benchmark run: its folders, its trainer, and the servers that it starts and always stops."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from loraflow.bench.links import Links, measure_links
from loraflow.bench.presets import Preset, load_trainer, make_model
from loraflow.bench.report import Report, environment
from loraflow.bench.scenarios import Failure, LoraflowWay, Sample, Way, measure
from loraflow.bench.servers import ServerSpec, make_server
from loraflow.bench.stock import StockAdapter, StockMerged
from loraflow.bench.summary import Payload, summarise
from loraflow.config import default_adapter_root
from loraflow.errors import ConfigError
from loraflow.launch import ServerProcess

__all__ = ["Session", "Settings"]

_START_TIMEOUT = 420.0


@dataclass(frozen=True)
class Settings:
    """How a run measures.

    Attributes:
        preset: Shape.
        rank: LoRA rank.
        device: The trainer's: ``cpu`` or ``cuda:N``.
        work: Folder for models and logs.
        server_gpus: Indices of the servers' GPUs.
        rounds: Turns of each way.
        block: Syncs in a turn.
        warmups: Syncs before them, which count for nothing.
        pause: Seconds between syncs.
        utilization: Share of a GPU that each server may take.
        kv_cache_bytes: See `ServerSpec`.
        eager: No CUDA graphs.
        port: First of the ports for servers; free ones where None.
        server_rank: Largest rank that servers take; ``rank`` where None.
    """

    preset: Preset
    rank: int
    device: torch.device
    work: Path
    server_gpus: tuple[int, ...] = (0,)
    rounds: int = 3
    block: int = 5
    warmups: int = 1
    pause: float = 0.4
    utilization: float = 0.3
    kv_cache_bytes: int | None = None
    eager: bool = False
    port: int | None = None
    server_rank: int | None = None

    @property
    def same_gpu(self) -> bool:
        """Whether trainer and servers share a GPU (or the CPU)."""
        return self.device.type == "cpu" or self.server_gpus == (self.device.index,)

    @property
    def backend(self) -> str:
        """Weight-transfer backend that fits."""
        if self.device.type == "cpu":
            return "gloo"
        return "ipc" if self.same_gpu else "nccl"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        own = {k: v for k, v in vars(self).items() if k not in {"preset", "work"}}
        return own | {"device": str(self.device), "preset": self.preset.name, "backend": self.backend}


@dataclass
class Session:
    """See the module.

    Attributes:
        settings: How.
        tell: Gets a line of progress.
        started: When, on the performance counter.
        partial: Samples of a measurement that is under way, or was interrupted.
        given: URL of a server of the user's that serves every kind; none is started then.
    """

    settings: Settings
    tell: Callable[[str], None] = print
    started: float = field(default_factory=time.perf_counter)
    partial: list[Sample] = field(default_factory=list)
    given: str | None = None
    _servers: dict[str, ServerProcess] = field(default_factory=dict)
    _model: nn.Module | None = None
    _root: Path = field(init=False)

    def __post_init__(self) -> None:
        if self.settings.device.type == "cpu":
            torch.set_num_threads(1)  # as the server: threads that wait for a core would be what is measured
        self._root = Path(default_adapter_root()) / f"bench-{time.time_ns():x}"

    @property
    def folder(self) -> Path:
        """The model folder, made when it is asked for first."""
        settings = self.settings
        return make_model(settings.preset, settings.work / f"model-{settings.preset.name}", settings.device)

    @property
    def model(self) -> nn.Module:
        """The trainer's PEFT model."""
        if self._model is None:
            began = time.perf_counter()
            self._model = load_trainer(self.folder, self.settings.preset, self.settings.rank, self.settings.device)
            self.tell(f"trainer of {self.settings.preset.name} ready after {time.perf_counter() - began:.0f} s")
        return self._model

    def release_model(self) -> None:
        """Let go of the trainer's model; it is loaded again when it is asked for."""
        self._model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def at_rank(self, rank: int) -> None:
        """Go on with an adapter of another rank, on the same servers."""
        self.settings = replace(self.settings, rank=rank)
        self._model = None

    @property
    def root(self) -> Path:
        """Store, and folder that servers may load from."""
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root

    # ---------------------------------------------------------------- servers

    def server(self, kind: str, *, tensor_parallel: int = 1) -> str:
        """URL of a server of this run, started when it is asked for first.

        Args:
            kind: ``lora``, ``plain`` (no slots) or ``stock`` (slots, and nothing of loraflow's).
            tensor_parallel: GPUs.
        """
        if self.given is not None:
            return self.given
        key = f"{kind}-tp{tensor_parallel}"
        running = self._servers.get(key)
        if running is None or running.returncode is not None:
            if self.settings.device.type == "cpu":
                self.stop_servers()  # two at once would measure each other
            self._servers[key] = running = self._start(kind, tensor_parallel)
        return running.url

    def start_servers(self, kinds: Sequence[str]) -> None:
        """Start servers of these kinds at the same time, on GPUs; they need ``kv_cache_bytes`` for it."""
        with ThreadPoolExecutor(len(kinds)) as pool:
            list(pool.map(self.server, kinds))

    def process(self, kind: str, *, tensor_parallel: int = 1) -> ServerProcess:
        """Its process."""
        self.server(kind, tensor_parallel=tensor_parallel)
        return self._servers[f"{kind}-tp{tensor_parallel}"]

    def _start(self, kind: str, tensor_parallel: int) -> ServerProcess:
        settings = self.settings
        cuda = settings.device.type == "cuda"
        gpus = settings.server_gpus
        if cuda and tensor_parallel > 1:
            gpus = tuple(range(tensor_parallel))
        spec = ServerSpec(
            folder=self.folder,
            preset=settings.preset,
            rank=None if kind == "plain" else settings.server_rank or settings.rank,
            device=settings.device.type,
            work=settings.work,
            root=self.root,
            backend=settings.backend,
            utilization=settings.utilization,
            kv_cache_bytes=settings.kv_cache_bytes,
            visible=",".join(map(str, gpus)) if cuda else None,
            tensor_parallel=tensor_parallel,
            eager=settings.eager,
            stock=kind == "stock",
            port=None if settings.port is None else settings.port + len(self._servers),
        )
        began = time.perf_counter()
        process = make_server(spec)
        self.tell(f"starting vLLM ({kind}): {process.command}")
        process.start()
        try:
            process.wait_ready(_START_TIMEOUT)
        except BaseException:
            process.stop()
            raise
        self.tell(f"vLLM ({kind}) is up at {process.url} after {time.perf_counter() - began:.0f} s")
        return process

    def stop_servers(self) -> None:
        """Stop every server."""
        for process in self._servers.values():
            process.stop()
        self._servers.clear()

    def log_tails(self) -> str:
        """The ends of the servers' logs."""
        return "\n".join(f"== {name}\n{process.tail(40)}" for name, process in self._servers.items())

    # ---------------------------------------------------------------- ways

    def way(self, name: str, url: str) -> Way:
        """A way by its name, to one server.

        Raises:
            ConfigError: There is none of that name.
        """
        model, root = self.model, self.root
        options: dict[str, Any] = {"base_atol": 0.2} if self.settings.device.type == "cuda" else {}
        if name in {"direct", "filesystem", "fold", "gloo", "ipc", "nccl"}:
            return LoraflowWay(name, model, url, name, root, options=options)
        if name == "direct-overlap":
            return LoraflowWay(name, model, url, "direct", root, overlap=True, options=options)
        if name in {"upload", "direct-group"}:  # as to another host
            over = "upload" if name == "upload" else "broadcast"
            return LoraflowWay(name, model, url, "direct", root, options={**options, "direct_way": over})
        if name == "filesystem-stock":
            return LoraflowWay(name, model, url, "filesystem", root, stock_server=True, options=options)
        if name in {"stock-adapter", "stock-inplace"}:
            return StockAdapter(model, url, root, inplace=name == "stock-inplace")
        if name == "stock-merged-ipc":
            return StockMerged(model, url, "ipc")
        if name == "stock-merged-nccl":
            return StockMerged(model, url, "nccl")
        raise ConfigError(f"no way of syncing is called {name!r}")

    def measure(self, names: Sequence[str], url: str) -> tuple[list[Sample], list[Failure]]:
        """Measure ways against one server; see `loraflow.bench.scenarios.measure`."""
        settings = self.settings
        ways = [self.way(name, url) for name in names]
        samples: list[Sample] = []
        self.partial = samples
        failures = measure(
            ways,
            self.model,
            rounds=settings.rounds,
            block=settings.block,
            pause=settings.pause,
            warmups=settings.warmups,
            samples=samples,
            tell=self.tell,
        )
        self.partial = []
        return samples, [replace(failure, log=self.log_tails()[-6000:]) for failure in failures]

    def links(self, url: str | None) -> Links:
        """Bandwidths, now."""
        settings = self.settings
        peer = None if settings.same_gpu else settings.server_gpus[0]
        return measure_links(settings.device, url=url, peer=peer)

    def report(self, name: str, url: str | None, samples: Sequence[Sample], **more: Any) -> Report:
        """A report of what was measured, with the links measured now."""
        preset, links = self.settings.preset, self.links(url)
        payload = Payload.of(preset, self.settings.rank) if preset.folder is None else self._payload()
        return Report(
            name=name,
            environment=environment(),
            settings=self.settings.to_dict(),
            payload=payload,
            links=links,
            samples=tuple(samples),
            summary=summarise(samples, links, payload, same_gpu=self.settings.same_gpu),
            seconds=time.perf_counter() - self.started,
            **more,
        )

    def _payload(self) -> Payload:
        return Payload.of_model(self.settings.preset, self.model)

    # ---------------------------------------------------------------- end

    def close(self) -> None:
        """Stop the servers, and let go of the trainer and the store."""
        self.stop_servers()
        self.release_model()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

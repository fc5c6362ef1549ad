"""`ColocateGeneration`: TRL's colocated engine (``vllm_mode="colocate"``), kept on the policy by loraflow.

TRL builds vLLM inside of the trainer and generates as it always does there; the engine has LoRA slots, every generation
names the proven policy, and no weight is merged or pushed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from trl.generation import vllm_generation as trl_generation
from trl.generation.vllm_generation import VLLMGeneration

from loraflow.adapter import AdapterSpec
from loraflow.engine_server import EngineServer, engine_options, served_by
from loraflow.errors import ConfigError
from loraflow.integrations.trl_backend import LoraVLLMGeneration
from loraflow.integrations.trl_sync import TrainerSync
from loraflow.manager import SyncManager
from loraflow.sleep import base_parameters

__all__ = ["ColocateGeneration"]


class ColocateGeneration(LoraVLLMGeneration):
    """TRL's generation backend with its engine in this process.

    Attributes:
        server: The engine, as the manager sees it.
        answered: Completions by the policy that vLLM says gave them.
    """

    server: EngineServer
    answered: Counter[str]

    def _init_vllm(self) -> None:
        _refuse(self.sync, self.accelerator.num_processes)
        self.answered = Counter()
        # An engine has no base to merge into: what no LoRA slot can serve is refused when the run starts.
        config = self.sync.config = self.sync.config.model_copy(update={"transport": "adapter"})
        model = self.model
        options = engine_options(AdapterSpec.from_model(model).max_rank, config.retained_versions)

        def build(llm: Any) -> _PolicyEngine:
            self.server = EngineServer(
                llm, [config.adapter_root], sleep_level=config.sleep_level, base=lambda: base_parameters(model)
            )
            self.sync.engine = self.server
            return _PolicyEngine(self)

        with _built_with(options, build):
            VLLMGeneration._init_vllm(self)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, ...]:
        """As TRL's, on the proven policy; tells the hooks of ``manager.on_rollouts``."""
        manager = self._up_to_date()
        images = [row or None for row in images] if images and any(images) else None  # TRL takes the first of a list
        with manager.rollout() as policy:
            answer: tuple[Any, ...] = VLLMGeneration.generate(self, prompts, images, num_generations, profiler)
        self._note(manager, policy, *answer)
        return answer

    def _up_to_date(self) -> SyncManager:
        self.server.llm.wake_up(tags=["weights"])  # and with them lost adapters, which `ready` loads and proves again
        self._llm_weights_sleeping = False
        return super()._up_to_date()


class _PolicyEngine:
    """What TRL takes for vLLM's ``LLM``: it generates by the policy."""

    def __init__(self, generation: ColocateGeneration) -> None:
        self._generation = generation
        self._llm = generation.server.llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        server, name = self._generation.server, self._generation._require_manager().policy_name
        outputs = self._llm.generate(prompts, *args, lora_request=server.lora_request(name), **kwargs)
        server.check_answer({"model": served_by(outputs, name, base=False)}, name)
        self._generation.answered[name] += sum(len(output.outputs) for output in outputs)
        return outputs


@contextmanager
def _built_with(options: dict[str, Any], wrap: Any) -> Iterator[None]:
    """Inside, TRL's module builds its ``LLM`` with more options, and gets what ``wrap`` makes of it."""
    stock = trl_generation.LLM
    trl_generation.LLM = lambda *args, **kwargs: wrap(stock(*args, **kwargs, **options))
    try:
        yield
    finally:
        trl_generation.LLM = stock


def _refuse(sync: TrainerSync, processes: int) -> None:
    config = sync.config
    if processes > 1:
        raise ConfigError(
            f"vllm_mode='colocate' with {processes} processes has an engine in each, and rank 0 cannot prove those of "
            "the others",
            hint='use vllm_mode="server": one or several servers, on the same GPUs if need be',
        )
    if config.overlap:
        raise ConfigError(
            "overlap=True delivers behind the training step, and an engine in the trainer's process is for one thread",
            hint="set overlap=False",
        )
    if config.wanted_transport == "merged" or config.carrier not in {"auto", "filesystem", "direct"}:
        raise ConfigError(
            "a colocated engine serves adapters only",
            hint="leave transport and carrier as they are, or use TRL's own sync without loraflow",
        )
    if config.direct_way in {"upload", "broadcast"}:
        raise ConfigError(
            f"direct_way={config.direct_way!r} is for servers, and the engine is in the trainer's process",
            hint="leave direct_way as it is",
        )
    if "://" in config.adapter_root:
        raise ConfigError(
            "a colocated engine reads adapters from a folder", found=config.adapter_root, hint="leave adapter_root away"
        )

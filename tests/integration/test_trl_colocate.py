"""vLLM inside of the trainer's process: the same manager, the same proofs; asleep between generations as on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers.processes import error_of, run_ranks
from tests.helpers.vllm_process import CPU_ENV

pytestmark = pytest.mark.integration

ON_POLICY = 1e-4  # nats
OFF_POLICY = 1e-3
ENV = {**CPU_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16}


def engine_class() -> type:
    """vLLM's ``LLM``, whose sleep leaves what a GPU's leaves: a CPU's worker ignores it.

    Level 2 drops the weights; LoRA slots are lost at either (vllm#48337, verl#3461).
    """
    from vllm import LLM

    class Engine(LLM):  # type: ignore[misc]
        def __init__(self, *args: Any, enable_sleep_mode: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, **ENGINE})  # the flag alone is refused on a CPU

        def sleep(self, level: int = 1) -> None:
            super().sleep(level=level)
            self.collective_rpc(lose, args=(level,))

    return Engine


def lose(worker: Any, level: int) -> None:
    with torch.no_grad():
        for parameter in worker.model_runner.get_model().parameters() if level == 2 else ():
            parameter.fill_(float("nan"))
        for module in worker.loraflow_manager().modules.values():
            for slots in (*module.lora_a_stacked, *module.lora_b_stacked):
                slots.fill_(float("nan"))


# ------------------------------------------------------------------ run in a process of its own


def own_loop(model: str, root: str) -> dict[str, Any]:
    from loraflow import SyncManager
    from loraflow.engine_server import EngineServer, engine_options
    from loraflow.sleep import base_parameters
    from loraflow_server.direct import Installer
    from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize

    policy = peft_model(model, seed=3)
    llm = engine_class()(model=model, **engine_options(8, 3))
    server = EngineServer(llm, [root], sleep_level=2, base=lambda: base_parameters(policy))

    def gap(manager: SyncManager) -> float:
        served = torch.tensor(server.prompt_logprobs(PROMPT, model=manager.policy_name))
        return float((served - peft_logprobs(policy, PROMPT)).abs().max())

    found: dict[str, Any] = {"gaps": [], "records": [], "left": [], "after_sleep": []}
    for carrier in ("direct", "filesystem"):
        with SyncManager(policy, server, adapter_root=root, carrier=carrier) as manager:
            manager.start()
            for step in (1, 2, 3, 4):
                randomize(policy, seed=step)
                manager.sync(step)
                found["gaps"].append(gap(manager))
            found["records"] += [(r.carrier, r.proofs[server.url].kind, r.proven) for r in manager.records]
            server.llm.sleep()
            server.llm.wake_up(tags=["weights"])
            names = [served.id for served in server.models()]
            manager.ready()
            found["after_sleep"].append((names == [model], gap(manager)))
            answers = manager.generate([PROMPT, PROMPT[:5]], n=2, max_tokens=4, logit_bias={"17": -100}, seed=1)
            found["answers"] = [(a.model == manager.policy_name, a.prompt, len(a.token_ids)) for a in answers]
        found["left"].append([served.id for served in server.models()])
    found["wakes"] = server.llm.wakes

    # What a proof is for: a slot that holds something else, and a base that came back otherwise.
    with SyncManager(policy, server, adapter_root=root, carrier="filesystem") as manager:
        manager.start()
        held = manager.policy
        randomize(policy, seed=9)
        install = Installer.install

        def damaged(installer: Any, *args: Any) -> int:
            slot = install(installer, *args)
            llm.collective_rpc(lose, args=(1,))
            return slot

        with patch.object(Installer, "install", damaged):
            found["damaged"] = (*error_of(lambda: manager.sync(1)), manager.policy == held)
    server.llm._base = lambda: ((name, value * 1.5) for name, value in base_parameters(policy))
    server.llm.sleep()
    found["another_base"] = error_of(lambda: server.llm.wake_up(tags=["weights"]))
    return found


def grpo(model: str, root: str, out: str, sleep_level: int) -> dict[str, Any]:
    """TRL's GRPOTrainer with its colocated engine asleep between generations; every second step is synced."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from loraflow.integrations.trl import LoraSyncCallback
    from loraflow.integrations.trl_batch import VERSIONS
    from tests.helpers.trl import NotesBatches, arguments, lora, low_tokens, prompts
    from tests.helpers.vllm_process import RunningServer

    class Trainer(NotesBatches, GRPOTrainer):  # type: ignore[misc]
        pass

    vllm_generation.LLM = engine_class()
    callback = LoraSyncCallback(adapter_root=root, vllm_sync_interval=2, sleep_level=sleep_level)
    options = arguments(
        RunningServer("", Path(model), Path(root), None),  # type: ignore[arg-type]
        Path(out),
        vllm_mode="colocate",
        vllm_server_base_url=None,
        vllm_enable_sleep_mode=True,
        max_steps=4,
    )
    trainer = Trainer(
        model=model,
        reward_funcs=low_tokens,
        args=GRPOConfig(**options),
        train_dataset=prompts(),
        peft_config=lora(),
        callbacks=[callback],
    )
    trainer.train()
    return {
        "records": [(record.step, record.version, record.carrier, record.proven) for record in callback.records],
        "gaps": [
            float(((b["old_per_token_logps"] - b["sampling_per_token_logps"]) * b["completion_mask"]).abs().max())
            for b in trainer.raw
        ],
        "versions": [set(batch[VERSIONS].tolist()) for batch in trainer.seen],
        "answered": {int(name.rsplit("-v", 1)[1]): n for name, n in callback.generation.answered.items()},
        "wakes": callback.generation.server.llm.wakes,
        "staleness": [e["loraflow/staleness_max"] for e in trainer.state.log_history if "loraflow/bytes" in e],
    }


# ------------------------------------------------------------------ what it must have done


def test_an_engine_of_this_process_is_proven_as_a_server_is(tiny_model: Path, tmp_path: Path) -> None:
    [outcome] = run_ranks(
        own_loop, str(tiny_model), str(tmp_path / "adapters"), folder=tmp_path, world_size=1, timeout=500, env=ENV
    )
    found = outcome.result
    assert max(found["gaps"]) < ON_POLICY
    assert found["records"] == [("direct", "digest", True)] * 5 + [("filesystem", "digest", True)] * 5
    assert found["left"] == [[str(tiny_model)]] * 2, "a run leaves nothing loaded"
    for lost, gap in found["after_sleep"]:
        assert lost, "what slept holds no adapter until it is loaded and proven again"
        assert gap < ON_POLICY
    assert found["wakes"] == 2
    assert found["answers"] == [(True, 0, 4)] * 2 + [(True, 1, 4)] * 2
    kind, words, kept = found["damaged"]
    assert kind == "UnsettledError", "all slots were emptied, that of the version in force too"
    assert "something else is served" in words
    assert kept, "a failed sync leaves the policy"
    kind, words = found["another_base"]
    assert kind == "VerifyError"
    assert "base weights are not what they were before sleep level 2" in words


@pytest.mark.parametrize("sleep_level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_grpo_with_trl_s_colocated_engine(sleep_level: int, tiny_model: Path, tmp_path: Path) -> None:
    [outcome] = run_ranks(
        grpo,
        str(tiny_model),
        str(tmp_path / "adapters"),
        str(tmp_path / "out"),
        sleep_level,
        folder=tmp_path / "run",
        world_size=1,
        timeout=500,
        env=ENV,
    )
    found = outcome.result
    assert [(step, proven) for step, _, _, proven in found["records"]] == [(0, True), (2, True)]
    first, second = (version for _, version, _, _ in found["records"])
    assert found["versions"] == [{first}, {first}, {second}, {second}]
    assert found["answered"] == {first: 16, second: 16}
    fresh, stale, again, old = found["gaps"]
    assert max(fresh, again) < ON_POLICY
    assert min(stale, old) > OFF_POLICY
    assert found["wakes"] == 4, "once for each generation, its base proven each time"

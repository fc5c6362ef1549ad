"""Every other trainer of TRL that generates on a vLLM server, two steps each, by both ways in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM

from loraflow.integrations.trl import LoraSyncCallback, attach
from tests.helpers.trl import Witness, arguments, lora, low_tokens, prompts
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration

ON_POLICY = 1e-4  # nats between the server's and the trainer's log-probs of one float32 policy
Options = dict[str, Any]


def gmpo(server: RunningServer, options: Options, **given: Any) -> Any:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    return GMPOTrainer(reward_funcs=low_tokens, args=GMPOConfig(**options), train_dataset=prompts(), **given)


def sdft(server: RunningServer, options: Options, **given: Any) -> Any:
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    data = prompts().map(lambda row: {"privileged_context": f"{row['prompt']} mat"})
    return SDFTTrainer(args=SDFTConfig(**options), train_dataset=data, **given)


def sdpo(server: RunningServer, options: Options, **given: Any) -> Any:
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    data = prompts().map(lambda row: {"privileged_context": f"{row['prompt']} mat"})
    return SDPOTrainer(reward_funcs=low_tokens, args=SDPOConfig(**options), train_dataset=data, **given)


def server_distillation(server: RunningServer, options: Options, **given: Any) -> Any:
    """The teacher is the base, on the student's own server: its name goes on to mean the base."""
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    del options["num_generations"]
    args = ServerDistillationConfig(**options, teacher_model_server_url=server.url)
    return ServerDistillationTrainer(args=args, train_dataset=prompts(), **given)


def conversations() -> Dataset:
    rows = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "the cat sat"}]
        for text in prompts()["prompt"]
    ]
    return Dataset.from_dict({"messages": rows})


def gold(server: RunningServer, options: Options, **given: Any) -> Any:
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    args = GOLDConfig(**options, lmbda=1.0, max_length=128, use_uld_loss=False)
    teacher = AutoModelForCausalLM.from_pretrained(server.model)
    return GOLDTrainer(teacher_model=teacher, args=args, train_dataset=conversations(), **given)


def iw_opd(server: RunningServer, options: Options, **given: Any) -> Any:
    """Its teacher server is asked for by the name of the model there, not for the policy."""
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    extra = {"distillation_objective": "iw_opd", "beta": 1.0, "loss_top_k": 1, "lmbda": 1.0, "max_length": 128}
    args = IWOPDConfig(**options, **extra, use_teacher_server=True, teacher_model_server_url=server.url)
    return IWOPDTrainer(args=args, train_dataset=conversations(), **given)


@pytest.mark.parametrize("at_construction", [True, False], ids=["callback", "attach"])
@pytest.mark.parametrize("make", [gmpo, sdft, sdpo, server_distillation, gold, iw_opd])
def test_two_steps_on_the_policy_of_each(
    lora_server: RunningServer, tmp_path: Path, make: Callable[..., Any], at_construction: bool
) -> None:
    root = str(lora_server.adapter_root)
    callback = LoraSyncCallback(adapter_root=root)
    trainer = make(
        lora_server,
        arguments(lora_server, tmp_path, max_steps=2, use_vllm=at_construction, temperature=1.0, top_p=1.0, top_k=0),
        model=str(lora_server.model),
        peft_config=lora(),
        callbacks=[callback] if at_construction else [],
    )
    sync = callback if at_construction else attach(trainer, adapter_root=root)
    trainer.vllm_generation.logprobs = 0  # some ask for none; the witness wants them
    witness = Witness(trainer, sync)
    trainer.train()
    assert [record.step for record in sync.records] == [0, 1]
    assert all(record.proven for record in sync.records)
    assert trainer.vllm_generation.vllm_client.answered == {record.policy: 8 for record in sync.records}
    assert [batch.versions for batch in witness.rollouts] == [[record.version] * 8 for record in sync.records]
    assert max(witness.gaps()) < ON_POLICY
    if hasattr(trainer, "teacher_client") and trainer.teacher_client is not None:
        assert trainer.teacher_client.model == str(lora_server.model), "the teacher is the base"
    assert any("loraflow/sync_ms" in entry for entry in trainer.state.log_history)

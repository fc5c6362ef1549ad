"""Two trainer processes and one real vLLM: DDP under TRL, sharded policies in an own loop; all ranks or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import error_of, run_ranks
from tests.helpers.sharding import deepspeed_env
from tests.helpers.vllm_process import RunningServer

pytestmark = pytest.mark.integration

ON_POLICY = 1e-4  # nats


# ------------------------------------------------------------------ run on each rank


def grpo_under_ddp(url: str, model: str, root: str, out: str) -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    from loraflow.errors import LoadError
    from loraflow.integrations.trl import LoraSyncCallback
    from tests.helpers.trl import NotesBatches, arguments, lora, low_tokens, prompts

    class Trainer(NotesBatches, GRPOTrainer):  # type: ignore[misc]
        pass

    def build(callback: LoraSyncCallback, steps: int) -> Any:
        server = RunningServer(url, Path(model), Path(root), None)  # type: ignore[arg-type]
        options = arguments(server, Path(out), per_device_train_batch_size=4, max_steps=steps)
        return Trainer(
            model=model,
            reward_funcs=low_tokens,
            args=GRPOConfig(**options),
            train_dataset=prompts(),
            peft_config=lora(),
            callbacks=[callback],
        )

    callback = LoraSyncCallback(adapter_root=root, vllm_sync_interval=2)
    trainer = build(callback, 3)
    trainer.train()
    gaps = [
        float(((b["old_per_token_logps"] - b["sampling_per_token_logps"]) * b["completion_mask"]).abs().max())
        for b in trainer.raw
    ]
    client = getattr(callback.generation, "vllm_client", None)
    found: dict[str, Any] = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "records": [(record.step, record.policy, record.proven) for record in callback.records],
        "versions": [batch["loraflow_versions"].tolist() for batch in trainer.seen],
        "rows": [batch["completion_ids"].tolist() for batch in trainer.raw],
        "gaps": gaps,
        "answered": dict(client.answered) if client else {},
        "weights": float(sum(p.double().sum() for n, p in trainer.model.named_parameters() if "lora_" in n)),
        "kl": [e["loraflow/correction/kl"] for e in trainer.state.log_history if "loraflow/correction/kl" in e],
    }

    failing = LoraSyncCallback(adapter_root=root)
    second = build(failing, 3)

    def break_generation(*_: Any, **__: Any) -> Any:
        raise LoadError("the server answered 500", server=url)

    def up_to_date() -> Any:
        manager = inner()
        if second.state.global_step == 1 and manager.ranks.is_main:
            failing.generation.vllm_client.generate = break_generation
        return manager

    inner = failing.sync.up_to_date
    failing.sync.up_to_date = up_to_date
    found["generation_failed"] = error_of(second.train)
    return found


def own_loop(how: str, url: str, model: str, root: str) -> dict[str, Any]:
    """A loop without TRL whose policy is sharded by ``how``: fsdp1, fsdp2 or zero3."""
    from loraflow import SyncManager
    from loraflow.adapter import AdapterSpec
    from loraflow.capture import SnapshotPlan
    from loraflow.verify import Prover
    from tests.helpers.sharding import shard

    rank = int(os.environ["RANK"])
    policy = shard(how, model)
    manager = SyncManager(policy.model, url, adapter_root=root, collective_timeout=100.0)
    manager.start()
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(rank))

    def gap() -> float:
        """Largest |Δlogp| between what is served and the forward on all ranks."""
        prover = manager._prover
        expected = prover.expect()
        if not manager.ranks.is_main:
            return 0.0
        server = manager.servers[0]
        served = torch.tensor(server.prompt_logprobs(prover.tokens, model=manager.policy_name))
        return float((served - expected.logprobs).abs().max())

    before = gap()
    policy.train(ids)
    stale = gap()
    with policy.counted() as gathered:
        manager.sync(1)
    after = gap()

    def fails_on_rank_1(owner: Any, name: str, work: Callable[[], Any]) -> tuple[str, str]:
        """The outcome of ``work`` where rank 1 fails right after ``owner.name``, with its collectives done."""
        kept, whole = owner.__dict__[name], getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            whole(*args, **kwargs)
            raise MemoryError("no room for the buffer")

        if rank == 1:
            setattr(owner, name, failing)
        try:
            return error_of(work)
        finally:
            setattr(owner, name, kept)

    def begin() -> None:
        with SyncManager(policy.model, url, adapter_root=root, collective_timeout=100.0) as other:
            other.start()

    policy.train(ids)
    held = manager.policy
    result = {
        "gaps": (before, stale, after),
        "gathered": sum(gathered),
        "lora": policy.lora_numel,
        "everything": policy.numel,
        "failed": {
            "the adapter is read": fails_on_rank_1(AdapterSpec, "from_model", begin),
            "the trainer's forward": fails_on_rank_1(Prover, "expect", begin),
            "room for a snapshot": fails_on_rank_1(SnapshotPlan, "buffer", lambda: manager.sync(2)),
            "the gathers": fails_on_rank_1(SnapshotPlan, "copy_into", lambda: manager.sync(2)),
        },
        "kept": manager.policy == held,
    }
    manager.sync(3)
    result["gaps"] += (gap(),)
    result["records"] = [(record.step, record.error is None, record.proven) for record in manager.records]
    manager.close()
    absent = SyncManager(policy.model, "http://127.0.0.1:9", adapter_root=root, start_timeout=2.0)
    result["no_server"] = error_of(absent.start)
    return result


# ------------------------------------------------------------------ what they must have done


def test_grpo_on_two_ranks(lora_server: RunningServer, tmp_path: Path) -> None:
    outcomes = run_ranks(
        grpo_under_ddp,
        lora_server.url,
        str(lora_server.model),
        str(lora_server.adapter_root),
        str(tmp_path / "out"),
        folder=tmp_path / "ranks",
        timeout=500,
    )
    main, other = [outcome.result for outcome in outcomes]
    assert main["wrapped"] == other["wrapped"] == "DistributedDataParallel"
    assert main["records"] == other["records"]
    assert [(step, proven) for step, _, proven in main["records"]] == [(0, True), (2, True)]
    first, second = (int(name.rsplit("-v", 1)[1]) for _, name, _ in main["records"])
    for found in (main, other):
        assert found["versions"] == [[first] * 4, [first] * 4, [second] * 4]
        assert found["gaps"][0] < ON_POLICY
        assert found["gaps"][1] > 10 * ON_POLICY
        assert found["gaps"][2] < ON_POLICY
    assert main["rows"] != other["rows"], "each rank has its own share"
    assert main["answered"] == {main["records"][0][1]: 16, main["records"][1][1]: 8}
    assert main["weights"] == pytest.approx(other["weights"], rel=1e-6)
    assert main["kl"] == other["kl"], "diagnostics are those of all ranks"
    assert main["generation_failed"] == other["generation_failed"]
    assert main["generation_failed"] == ("LoadError", f"{lora_server.url}: the server answered 500")


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2", "zero3"])
def test_a_sharded_policy_gives_its_adapter_alone_and_fails_as_one(
    how: str, lora_server: RunningServer, tmp_path: Path
) -> None:
    outcomes = run_ranks(
        own_loop,
        how,
        lora_server.url,
        str(lora_server.model),
        str(lora_server.adapter_root),
        folder=tmp_path / "ranks",
        timeout=400,
        env=deepspeed_env() if how == "zero3" else None,
    )
    main, other = [outcome.result for outcome in outcomes]
    before, stale, after, last = main["gaps"]
    assert max(before, after, last) < ON_POLICY
    assert stale > 10 * ON_POLICY
    for found in (main, other):
        assert found["gathered"] == found["lora"] < found["everything"] / 4
        assert found["kept"], "a failed sync leaves the policy"
        assert found["records"] == [(0, True, True), (1, True, True), (3, True, True)]
    for phase, told in main["failed"].items():
        assert told == ("LoraflowError", "rank 1 failed: MemoryError: no room for the buffer"), phase
    for phase, told in other["failed"].items():
        assert told == ("MemoryError", "no room for the buffer"), phase
    assert main["no_server"] == other["no_server"]
    assert main["no_server"][0] == "SyncTimeout"

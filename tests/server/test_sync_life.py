"""The life of a run on a real server: syncs, failures that leave everything as it was, runs after runs."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraflow.config import SyncConfig
from loraflow.errors import (
    AdapterError,
    CapabilityError,
    LoadError,
    LoraflowError,
    PublishError,
    StaleError,
    SyncTimeout,
    VerifyError,
)
from loraflow.manager import SyncManager
from loraflow.policy import Policy
from loraflow.server import Completion, VLLMServer
from tests.helpers.tiny import PROMPT, make_tiny_model, peft_logprobs, peft_model, randomize
from tests.helpers.vllm_process import RunningServer


@pytest.fixture
def policy(tiny_model: Path) -> Any:
    return peft_model(tiny_model)


@pytest.fixture(params=["direct", "filesystem"])
def manager(request: pytest.FixtureRequest, lora_server: RunningServer, policy: Any) -> Iterator[SyncManager]:
    root = str(lora_server.adapter_root)
    with SyncManager(policy, lora_server.url, adapter_root=root, carrier=request.param) as manager:
        manager.start()
        yield manager


def greedy(manager: SyncManager) -> list[Completion]:
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:9]]
    answers = manager.servers[0].generate(prompts, model=manager.policy_name, max_tokens=16, temperature=0.0)
    return [Completion("", a.prompt, a.token_ids, a.logprobs, a.finish_reason) for a in answers]


def settle(manager: SyncManager) -> None:
    """Old versions are freed behind the step: wait for that."""
    manager._fleet.settle()  # type: ignore[union-attr]


def saved(policy: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.named_parameters() if "lora_" in name}


def restore(policy: Any, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if name in values:
                value.copy_(values[name])


def test_no_op_perturb_restore(manager: SyncManager, policy: Any) -> None:
    before = greedy(manager)
    manager.sync(1)
    assert greedy(manager) == before
    values = saved(policy)
    randomize(policy, seed=9, std=0.1)
    manager.sync(2)
    assert greedy(manager) != before
    served = torch.tensor(manager.servers[0].prompt_logprobs(PROMPT, model=manager.policy_name))
    assert (served - peft_logprobs(policy, PROMPT)).abs().max() < 1e-4
    restore(policy, values)
    manager.sync(3)
    assert greedy(manager) == before


def test_a_policy_that_the_trainer_does_not_have_is_not_delivered(manager: SyncManager, policy: Any) -> None:
    """A digest would prove each of these: one value that is NaN, an adapter that is merged, and one switched off."""
    before, served = greedy(manager), manager.policy_name
    values = saved(policy)
    with torch.no_grad():
        policy.get_base_model().model.layers[2].mlp.up_proj.lora_B["default"].weight[3, 1] = float("nan")
    # The one by digest, or the trainer's own forward where a canary is the proof.
    with pytest.raises((AdapterError, VerifyError), match="not finite"):
        manager.sync(1)
    restore(policy, values)
    policy.merge_adapter()
    with pytest.raises(AdapterError, match="merged"):
        manager.sync(2)
    policy.unmerge_adapter()
    with policy.disable_adapter(), pytest.raises(AdapterError, match="switched off"):
        manager.sync(3)
    assert (manager.policy_name, greedy(manager)) == (served, before)
    manager.sync(4)
    assert manager.policy_name != served
    assert greedy(manager) == before


def test_a_model_that_was_changed_is_gathered_anew(manager: SyncManager, policy: Any) -> None:
    """Tensors are gathered before the model is looked through, which happens while the server works."""
    before = manager.sync(1)
    assert before is not None
    table = policy.get_base_model().model.layers[0].mlp.up_proj.lora_B
    table["default"] = torch.nn.Linear(table["default"].in_features, table["default"].out_features, bias=False)
    randomize(policy, seed=11, std=0.1)
    record = manager.sync(2)
    assert record is not None
    assert record.proven
    assert int(manager.behind(torch.tensor(before.version))) == 1  # the attempt made nothing older
    served = torch.tensor(manager.servers[0].prompt_logprobs(PROMPT, model=manager.policy_name))
    assert (served - peft_logprobs(policy, PROMPT)).abs().max() < 1e-4
    settle(manager)
    listed = {model.id for model in manager.servers[0].models() if model.id.startswith(manager.run_id)}
    wanted = {seen.policy for seen in manager.records if seen.outcome == "committed"}
    assert listed <= wanted  # of the attempt in between nothing is left
    assert manager.sync(3) is not None


def test_equal_content_has_an_equal_digest(manager: SyncManager, policy: Any) -> None:
    first, second = manager.records[-1], manager.sync(1)
    assert second is not None
    assert second.digest == first.digest
    assert second.policy != first.policy
    randomize(policy, seed=3)
    third = manager.sync(2)
    assert third is not None
    assert third.digest != first.digest


def test_old_versions_are_retired_and_disk_is_bounded(manager: SyncManager, policy: Any) -> None:
    for step in range(1, 8):
        randomize(policy, seed=step)
        manager.sync(step)
    settle(manager)
    mine = [p for m in manager.servers[0].models() if (p := Policy.parse(m.id)) and p.run_id == manager.run_id]
    assert [p.version for p in sorted(mine)] == [manager.newest_version - i for i in (2, 1, 0)]


def test_a_version_in_use_is_not_retired(manager: SyncManager, policy: Any) -> None:
    with manager.rollout() as held:
        for step in range(1, 6):
            manager.sync(step)
        manager.servers[0].generate([PROMPT], model=held.name, max_tokens=2)
    manager.sync(6)
    settle(manager)
    assert held.name not in {m.id for m in manager.servers[0].models()}


def test_close_frees_the_server_and_a_second_run_takes_it(lora_server: RunningServer, policy: Any) -> None:
    runs = []
    root = str(lora_server.adapter_root)
    for _ in range(2):
        with SyncManager(policy, lora_server.url, adapter_root=root, carrier="filesystem") as manager:
            manager.start()
            runs.append(manager.run_id)
            server = manager.servers[0]
            assert manager.policy_name in {m.id for m in server.models()}
            folder = lora_server.adapter_root / manager.run_id
            assert list(folder.glob("v*"))
        assert not [m for m in server.models() if manager.run_id in m.id]
        assert not list(folder.glob("v*"))  # nothing is left behind, but for the names that were used
        assert (folder / "ledger.json").exists()
    assert runs[0] != runs[1]


def test_same_run_id_goes_on_above_what_was_used(lora_server: RunningServer, policy: Any) -> None:
    root = str(lora_server.adapter_root)
    versions = []
    for _ in range(2):
        with SyncManager(policy, lora_server.url, adapter_root=root, run_id="resumed") as manager:
            manager.start()
            manager.sync(5)
            versions.append(manager.newest_version)
    assert versions[1] > versions[0]


# ---------------------------------------------------------------- failures leave what was served


def failing(manager: SyncManager, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the load on the (real) server fail on its way: the request reaches it, the answer is lost."""
    transport = manager._fleet.transport  # type: ignore[union-attr]
    deliver = transport.deliver

    def lost(*args: Any, **kwargs: Any) -> Any:
        deliver(*args, **kwargs)
        raise error

    monkeypatch.setattr(transport, "deliver", lost)


def test_raise_is_the_default(manager: SyncManager, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, name = greedy(manager), manager.policy_name
    failing(manager, monkeypatch, LoadError("lost"))
    randomize(policy, seed=5)
    with pytest.raises(LoadError):
        manager.sync(1)
    assert manager.policy_name == name
    assert greedy(manager) == before
    monkeypatch.undo()
    record = manager.sync(1)
    assert record is not None
    assert record.version == manager.newest_version  # the burnt name is not used again
    assert record.version >= 2
    burnt = f"{manager.run_id}-v{record.version - 1}"
    assert burnt not in {m.id for m in manager.servers[0].models()}


def test_keep_last_counts_and_then_gives_up(
    lora_server: RunningServer, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(lora_server.adapter_root)
    config = SyncConfig(adapter_root=root, on_failure="keep_last", max_staleness=2)
    with SyncManager(policy, lora_server.url, config) as manager:
        manager.start()
        name = manager.policy_name
        failing(manager, monkeypatch, LoadError("lost"))
        for step in (1, 2):
            record = manager.sync(step)
            assert record is not None
            assert record.outcome == "failed"
            assert manager.policy_name == name
            assert manager.staleness == step
            assert manager.due(step + 1)
        with pytest.raises(StaleError, match="lost"):
            try:
                manager.sync(3)
            except StaleError as error:
                raise StaleError(str(error.__cause__)) from error
        assert manager.metrics()["loraflow/failures"] == 3


def test_another_base_of_the_same_shapes(lora_server: RunningServer, tmp_path: Path) -> None:
    other = peft_model(make_tiny_model(tmp_path / "other", seed=1))
    before = running_models(lora_server)
    manager = SyncManager(other, lora_server.url, adapter_root=str(lora_server.adapter_root))
    with pytest.raises(VerifyError, match="base model is not the trainer's"):
        manager.start()
    assert running_models(lora_server) == before


def test_rank_above_the_servers(lora_server: RunningServer, tiny_model: Path) -> None:
    big = peft_model(tiny_model, r=24)
    root = str(lora_server.adapter_root)
    with pytest.raises(CapabilityError, match="--max-lora-rank 16"):
        SyncManager(big, lora_server.url, adapter_root=root, transport="adapter").start()


def test_no_server(policy: Any, tmp_path: Path) -> None:
    with pytest.raises(SyncTimeout, match="loraflow serve"):
        SyncManager(policy, "http://127.0.0.1:9", adapter_root=str(tmp_path), start_timeout=0.5).start()


def test_a_name_that_is_taken(lora_server: RunningServer, policy: Any) -> None:
    root = str(lora_server.adapter_root)
    with SyncManager(policy, lora_server.url, adapter_root=root, carrier="filesystem") as first:
        first.start()
        path = next(m.root for m in first.servers[0].models() if m.id == first.policy_name)
        with pytest.raises(LoadError):
            first.servers[0].load_adapter(first.policy_name, path + "/../v999")
        assert greedy(first)


def test_an_adapter_folder_that_the_server_cannot_see(plain_server: RunningServer, policy: Any, tmp_path: Path) -> None:
    before = running_models(plain_server)
    config = SyncConfig(adapter_root=str(tmp_path), server_adapter_root="/not/mounted/there")
    with pytest.raises(LoadError, match="server_adapter_root"):
        SyncManager(policy, plain_server.url, config).start()
    assert running_models(plain_server) == before


def test_full_disk(lora_server: RunningServer, policy: Any) -> None:
    before = running_models(lora_server)
    small = lora_server.adapter_root / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(small)], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        manager = SyncManager(
            policy, lora_server.url, adapter_root=str(small), carrier="filesystem", min_free_bytes=0, max_staleness=0
        )
        with pytest.raises(PublishError, match="free"):
            manager.start()
            for step in range(1, 5):
                manager.sync(step)
        manager.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert running_models(lora_server) == before


def test_files_that_could_not_be_written_behind_a_delivery_are_written_when_the_store_is_back(
    lora_server: RunningServer, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(lora_server.adapter_root)
    with SyncManager(policy, lora_server.url, adapter_root=root, carrier="direct") as manager:
        manager.start()
        store = manager._fleet.store  # type: ignore[union-attr]
        manager._fleet.transport.wait_published()  # type: ignore[union-attr]
        write = store._backend.write

        def away(*args: Any) -> None:
            raise OSError(5, "the store is away")

        monkeypatch.setattr(store._backend, "write", away)
        randomize(policy, seed=1)
        first = manager.sync(1)
        assert first is not None
        for step in (2, 3):
            with pytest.raises(PublishError, match="the store is away"):
                manager.sync(step)
            assert manager.policy_name == first.policy
        monkeypatch.setattr(store._backend, "write", write)
        last = manager.sync(4)
        assert last is not None
        assert last.proven
        manager._fleet.transport.wait_published()  # type: ignore[union-attr]
        for record in (first, last):
            committed = Policy.parse(record.policy)
            assert committed is not None
            store.verify(committed)


def test_a_version_that_the_server_sees_late_is_waited_for(
    lora_server: RunningServer, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system: the trainer sees the folder, the server not yet."""
    root = lora_server.adapter_root
    with SyncManager(policy, lora_server.url, adapter_root=str(root), carrier="filesystem") as manager:
        manager.start()
        store = manager._fleet.store  # type: ignore[union-attr]
        publish = store.publish

        def late(policy: Policy, *args: Any, **options: Any) -> Any:
            published = publish(policy, *args, **options)
            away = Path(published.path).rename(root / f"away-{policy}")
            threading.Timer(0.7, lambda: away.rename(published.path)).start()
            return published

        monkeypatch.setattr(store, "publish", late)
        randomize(policy, seed=4)
        record = manager.sync(1)
        assert record is not None
        assert record.proven
        assert record.total_ms > 600
        served = torch.tensor(manager.servers[0].prompt_logprobs(PROMPT, model=manager.policy_name))
        assert (served - peft_logprobs(policy, PROMPT)).abs().max() < 1e-4


def test_root_that_cannot_be_written(lora_server: RunningServer, policy: Any) -> None:
    with pytest.raises(PublishError):
        SyncManager(policy, lora_server.url, adapter_root="/proc/loraflow").start()


def test_interrupt_in_the_middle(manager: SyncManager, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, name = greedy(manager), manager.policy_name
    failing(manager, monkeypatch, KeyboardInterrupt())  # type: ignore[arg-type]
    randomize(policy, seed=5)
    with pytest.raises(KeyboardInterrupt):
        manager.sync(1)
    assert manager.policy_name == name
    assert greedy(manager) == before


def running_models(server: RunningServer) -> set[str]:
    with VLLMServer(server.url) as client:
        return {m.id for m in client.models()}


# ---------------------------------------------------------------- many syncs under traffic


@pytest.mark.parametrize("carrier", ["filesystem", pytest.param("direct", marks=pytest.mark.slow)])
def test_200_syncs_under_four_streaming_clients(lora_server: RunningServer, policy: Any, carrier: str) -> None:
    """No error, and no request answered by another version than its name says: each answer's log-probs are compared
    with the PEFT forward of the version that the answer names."""
    root = str(lora_server.adapter_root)
    truth: dict[int, torch.Tensor] = {}
    wrong: list[str] = []
    asked = 0
    stop = threading.Event()
    with SyncManager(policy, lora_server.url, adapter_root=root, carrier=carrier, grace_period=0.0) as manager:
        manager.start()
        truth[0] = peft_logprobs(policy, PROMPT)
        server = manager.servers[0]

        def client() -> None:
            nonlocal asked
            while not stop.is_set():
                try:
                    with manager.rollout() as held:
                        got = torch.tensor(server.prompt_logprobs(PROMPT, model=held.name))
                    if (got - truth[held.version]).abs().max() > 1e-4:
                        wrong.append(f"{held} answered by another version")
                except Exception as error:  # the test's verdict
                    wrong.append(repr(error))
                asked += 1
                time.sleep(0.02)  # two cores: leave some to the trainer

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for step in range(1, 201):
                randomize(policy, seed=step)
                truth[manager._next_version] = peft_logprobs(policy, PROMPT)
                manager.sync(step)
                if wrong:
                    break
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        settle(manager)
        folders = [p for p in (lora_server.adapter_root / manager.run_id).iterdir() if p.name.startswith("v")]
        assert len(folders) <= manager.config.retained_versions + 1
    assert not wrong, wrong[:3]
    assert asked > 50
    assert len(manager.records) == 201
    assert all(record.proven for record in manager.records)


def test_a_failed_start_leaves_the_model_as_it_was(lora_server: RunningServer, tmp_path: Path) -> None:
    other = peft_model(make_tiny_model(tmp_path / "other", seed=1)).train()
    grads = {name: p.requires_grad for name, p in other.named_parameters()}
    values = {name: p.detach().clone() for name, p in other.named_parameters()}
    with pytest.raises(LoraflowError):
        SyncManager(other, lora_server.url, adapter_root=str(lora_server.adapter_root)).start()
    assert {name: p.requires_grad for name, p in other.named_parameters()} == grads
    assert all(torch.equal(p, values[name]) for name, p in other.named_parameters())
    assert all(module.training for module in other.modules())

"""Generation for Axolotl's trainers: the client's bodies and answers, ranks, threads, and versions."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from loraflow.errors import CapabilityError, LoraflowError
from loraflow.integrations.axolotl_generation import AxolotlGeneration, RolloutClient, describe
from loraflow.policy import Policy
from loraflow.ranks import Ranks
from loraflow.records import Proof, Rollouts, SyncRecord
from loraflow.server import Completion, Unreachable

RUN = "r1"


class Server:
    """Answers with tokens that tell prompt and turn; may be down."""

    def __init__(self, url: str, *, down: bool = False) -> None:
        self.url, self.down = url, down
        self.calls: list[dict[str, Any]] = []

    def generate(self, prompts: list[list[int]], *, model: str, n: int, **sampling: Any) -> list[Completion]:
        if self.down:
            raise Unreachable("no answer", server=self.url)
        self.calls.append({"prompts": prompts, "model": model, "n": n, **sampling})
        return [
            Completion(model, row, (*prompt, turn), (-0.5,) * len(prompt) + (math.nan,), "length")
            for row, prompt in enumerate(prompts)
            for turn in range(n)
        ]


class Manager:
    def __init__(self, *servers: Server, transport: str = "adapter", on_server_failure: str = "fail") -> None:
        self.servers = servers
        self.run_id = RUN
        self.policy = Policy(RUN, 3)
        self.newest_version = 4
        self.ranks = Ranks()
        self.plan = SimpleNamespace(transport=transport)
        self.config = SimpleNamespace(on_server_failure=on_server_failure)
        self.heard: list[Rollouts] = []
        self.inside = 0

    def behind(self, versions: Any) -> Any:
        return self.newest_version - versions

    def model_name(self, url: str) -> str:
        return self.policy.name if self.plan.transport == "adapter" else "base"

    @property
    def policy_name(self) -> str:
        return self.model_name("")

    @contextmanager
    def rollout(self) -> Iterator[Policy]:
        self.inside += 1
        yield self.policy
        self.inside -= 1

    def rollouts_done(self, rollouts: Rollouts) -> None:
        self.heard.append(rollouts)


class Sync:
    """In the place of `TrainerSync`."""

    def __init__(self, manager: Manager | None) -> None:
        self.manager: Any = manager
        self.servers = ("http://a",)
        self.records: list[SyncRecord] = []
        self.thread = threading.current_thread()
        self.asked = 0

    def up_to_date(self) -> Any:
        self.asked += 1
        return self.manager


class Tokenizer:
    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> list[int]:
        assert options.pop("tokenize") is True
        assert options.pop("return_dict") is False
        assert options == {"add_generation_prompt": True, "tools": None, "chat_template": None, "thinking": False}
        return [len(message["content"]) for message in conversation]

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[len(word) for word in one.split()] for one in text]}


def client_of(manager: Manager | None) -> RolloutClient:
    return RolloutClient(Sync(manager), Tokenizer())  # type: ignore[arg-type]


def test_answer_has_the_shape_of_trls_client() -> None:
    server = Server("http://a")
    answer = client_of(Manager(server)).generate([[5], [6, 7]], n=2, max_tokens=9, temperature=0.7, top_k=0)
    assert answer["prompt_ids"] == [[5], [6, 7]]  # one per prompt
    assert answer["completion_ids"] == [[5, 0], [5, 1], [6, 7, 0], [6, 7, 1]]  # n per prompt, prompt-major
    assert answer["logprob_token_ids"][0] == [[5], [0]]
    assert [len(row) for row in answer["logprobs"]] == [2, 2, 3, 3]
    assert answer["logprobs"][0][0] == [-0.5]
    assert math.isnan(answer["logprobs"][0][1][0])  # no evidence, and not probability 1
    [call] = server.calls
    assert (call["model"], call["n"], call["max_tokens"]) == (f"{RUN}-v3", 2, 9)
    assert (call["temperature"], call["top_k"]) == (0.7, 0)
    assert not {"cache_salt", "structured_outputs"} & set(call)


def test_regex_and_more_sampling_options_reach_the_server() -> None:
    server = Server("http://a")
    options = {"seed": 1, "temperature": 0.2, "stop_token_ids": [3]}
    client_of(Manager(server)).generate(
        [[5]], temperature=0.9, structured_outputs_regex="[a-z]+", generation_kwargs=options
    )
    assert server.calls[0].items() >= {**options, "structured_outputs": {"regex": "[a-z]+"}}.items()


def test_merged_weights_of_every_version_have_a_prefix_cache_of_their_own() -> None:
    server = Server("http://a")
    client = client_of(Manager(server, transport="merged"))
    client.generate([[5]])
    assert (server.calls[0]["model"], server.calls[0]["cache_salt"]) == ("base", f"{RUN}-v3")
    assert client.last_version == 3  # the base's name tells no version, the policy does


def test_chats_are_rendered_here() -> None:
    server = Server("http://a")
    chat = [[{"role": "user", "content": "four"}], [{"role": "user", "content": "five5"}]]
    answer = client_of(Manager(server)).chat(chat, n=1, chat_template_kwargs={"thinking": False}, logprobs=0)
    assert answer["prompt_ids"] == server.calls[0]["prompts"] == [[4], [5]]


def test_prompts_are_spread_and_stay_in_order() -> None:
    servers = Server("http://a"), Server("http://b")
    answer = client_of(Manager(*servers)).generate([[1], [2], [3]], n=2)
    assert answer["completion_ids"] == [[1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1]]
    assert sorted(len(server.calls[0]["prompts"]) for server in servers) == [1, 2]


def test_a_server_that_fails_ends_the_step_or_gives_its_share_away() -> None:
    down, up = Server("http://a", down=True), Server("http://b")
    with pytest.raises(Unreachable):
        client_of(Manager(down, up)).generate([[1], [2]])
    answer = client_of(Manager(down, up, on_server_failure="quarantine")).generate([[1], [2]])
    assert answer["completion_ids"] == [[1, 0], [2, 0]]


def test_what_is_not_supported_is_refused() -> None:
    client = client_of(Manager(Server("http://a")))
    with pytest.raises(CapabilityError, match="images are not supported"):
        client.generate([[1]], images=[[object()]])
    with pytest.raises(CapabilityError, match="logprobs=5"):
        client.generate([[1]], logprobs=5)
    with pytest.raises(LoraflowError, match="nothing was synced yet"):
        client_of(None).generate([[1]])


def test_prompts_of_text_are_tokenized_as_the_trainer_does() -> None:
    """Axolotl's background thread, on several processes, and a rollout_func may ask with text."""
    client = client_of(Manager(server := Server("http://a")))
    answer = client.generate(["the cat sat", "a bird"], n=1)
    assert answer["prompt_ids"] == server.calls[0]["prompts"] == [[3, 3, 3], [1, 4]]


def test_generation_kwargs_may_not_change_how_many_completions_a_prompt_has() -> None:
    client = client_of(Manager(Server("http://a")))
    assert len(client.generate([[1], [2]], n=2, generation_kwargs={"n": 2})["completion_ids"]) == 4
    with pytest.raises(LoraflowError, match="8 completions for 2 prompts with 2 each") as refused:
        client.generate([[1], [2]], n=2, generation_kwargs={"n": 4})
    assert "generation_kwargs must not change n" in str(refused.value)


# ---------------------------------------------------------------- TRL's backend


def generation_of(manager: Manager) -> tuple[AxolotlGeneration, Sync]:
    sync = Sync(manager)
    accelerator = SimpleNamespace(is_main_process=True, state=SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=None))
    generation = AxolotlGeneration(
        model=None, accelerator=accelerator, processing_class=Tokenizer(), max_completion_length=8, loraflow=sync
    )
    return generation, sync


def test_backend_asks_once_per_prompt_and_gives_one_row_per_sample() -> None:
    server = Server("http://a")
    generation, sync = generation_of(manager := Manager(server))
    assert sync.asked == 0  # building it asks for nothing
    prompts, ids, logprobs, tokens = generation.generate([[5], [5], [6], [6]], None, num_generations=2)
    assert sync.asked == 1
    assert server.calls[0]["prompts"] == [[5], [6]]
    assert (prompts, ids) == ([[5], [5], [6], [6]], [[5, 0], [5, 1], [6, 0], [6, 1]])
    assert [len(row) for row in logprobs] == [len(row) for row in tokens] == [2, 2, 2, 2]
    [heard] = manager.heard
    assert (heard.versions, heard.newest_version) == ([3] * 4, 4)


def test_a_background_thread_generates_and_never_syncs() -> None:
    generation, sync = generation_of(manager := Manager(Server("http://a")))
    seen: list[int] = []

    def ahead() -> None:
        generation.sync_weights()
        generation.generate([[5]], None, num_generations=1)
        seen.append(generation.last_version)

    thread = threading.Thread(target=ahead)
    thread.start()
    thread.join()
    assert sync.asked == 0
    assert seen == [3]
    assert generation.last_version == -1  # of this thread
    manager.policy = Policy(RUN, 5)
    generation.generate([[5]], None, num_generations=1)
    assert (sync.asked, generation.last_version) == (1, 5)
    assert manager.inside == 0


def test_a_training_in_a_thread_of_its_own_syncs_there() -> None:
    generation, sync = generation_of(Manager(Server("http://a")))
    sync.thread = threading.Thread(target=generation.sync_weights)  # as Ray trains
    sync.thread.start()
    sync.thread.join()
    assert sync.asked == 1
    generation.sync_weights()
    assert sync.asked == 1


def test_log_line() -> None:
    record = SyncRecord(
        step=4,
        policy="r-v2",
        version=2,
        transport="adapter",
        carrier="direct",
        outcome="committed",
        bytes=262144,
        total_ms=33.6,
        proofs={"http://a": Proof("digest", passed=True)},
    )
    assert describe(record) == "step 4: r-v2 committed by adapter/direct, 262144 bytes in 34 ms: http://a ✓ digest"

"""TRL's client on a fleet: every request names the policy, every answer is checked, what fails goes elsewhere."""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from loraflow.config import SyncConfig
from loraflow.errors import CapabilityError, LoraflowError, VerifyError
from loraflow.integrations.trl_backend import sampled_logprobs
from loraflow.integrations.trl_client import PolicyClient
from loraflow.integrations.trl_online_dpo import OnlineDPOClient
from loraflow.policy import Policy
from loraflow.server import HTTPFailure, VLLMServer


class Server:
    """Answers completions: token 7 for every prompt, under the name asked for."""

    generate_timeout = 1.0
    check_answer = VLLMServer.check_answer

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.failure: Exception | None = None
        self.answers_as: str | None = None

    def request(self, method: str, path: str, *, json: Any = None, timeout: float | None = None, **_: Any) -> Any:
        self.requests.append((path, json))
        if self.failure is not None:
            raise self.failure
        if path.endswith("/render"):
            return {"features": {"of": len(json["messages"][0]["content"])}}
        prompts = json["prompt"] if isinstance(json.get("prompt"), list) else [json.get("prompt")]
        choices = [
            {
                "prompt_token_ids": prompt,
                "token_ids": [7],
                "logprobs": {
                    "tokens": ["token_id:7"],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [{"token_id:7": -0.5}],
                },
            }
            for prompt in prompts
            for _ in range(json.get("n", 1))
        ]
        return {"model": self.answers_as or json["model"], "choices": choices}


class Manager:
    def __init__(self, *servers: Server, transport: str = "adapter") -> None:
        self.servers = servers
        self.policy = Policy("run", 3)
        self.plan = SimpleNamespace(transport=transport)
        self.blamed: list[str] = []
        self.inside = 0

    @property
    def policy_name(self) -> str:
        return self.model_name(self.servers[0].url)

    def model_name(self, url: str) -> str:
        return self.policy.name if self.plan.transport == "adapter" else f"base-of-{url}"

    def blame(self, server: Any, error: LoraflowError) -> None:
        self.blamed.append(server.url)

    @contextmanager
    def rollout(self) -> Any:
        self.inside += 1
        yield self.policy


def client(manager: Manager, cls: type[PolicyClient] = PolicyClient) -> Any:
    return cls(lambda: manager, [server.url for server in manager.servers], SyncConfig())  # type: ignore[arg-type, return-value]


def test_prompts_are_spread_and_come_back_in_order() -> None:
    manager = Manager(Server("http://a"), Server("http://b"))
    made = client(manager)
    answer = made.generate([[1], [2], [3]], n=2)
    assert answer["prompt_ids"] == [[1], [2], [3]]
    assert answer["completion_ids"] == [[7]] * 6
    asked = {server.url: [body["prompt"] for _, body in server.requests] for server in manager.servers}
    assert asked == {"http://a": [[[1], [2]]], "http://b": [[[3]]]}
    assert {body["model"] for server in manager.servers for _, body in server.requests} == {"run-v3"}
    assert made.answered == {"run-v3": 6}
    assert manager.inside == 1, "the version is not retired meanwhile"


def test_what_fails_on_one_server_is_asked_of_the_other() -> None:
    manager = Manager(Server("http://a"), Server("http://b"))
    manager.servers[0].failure = HTTPFailure("boom", status=500, reason="boom", server="http://a")
    answer = client(manager).generate([[1], [2], [3]])
    assert answer["prompt_ids"] == [[1], [2], [3]]
    assert manager.blamed == ["http://a"]


def test_a_single_request_is_repeated_too_and_servers_take_turns() -> None:
    manager = Manager(Server("http://a"), Server("http://b"))
    made = client(manager)
    for _ in range(2):
        made._post("http://a/v1/completions", json={"model": "x", "prompt": "text"})
    assert [len(server.requests) for server in manager.servers] == [1, 1]
    manager.servers[0].failure = HTTPFailure("boom", status=503, reason="boom", server="http://a")
    made._post("http://a/v1/completions", json={"model": "x", "prompt": "text"})
    assert manager.blamed == ["http://a"]


def test_an_answer_of_another_policy_is_refused() -> None:
    manager = Manager(Server("http://a"))
    manager.servers[0].answers_as = "run-v2"
    made = client(manager)
    with pytest.raises(VerifyError, match="another policy"):
        made.generate([[1]])
    assert not made.answered


def test_merged_versions_share_a_name_and_never_a_cache() -> None:
    manager = Manager(Server("http://a"), Server("http://b"), transport="merged")
    client(manager).generate([[1], [2]])
    for server in manager.servers:
        [(_, body)] = server.requests
        assert body["cache_salt"] == "run-v3"
        assert body["model"] == f"base-of-{server.url}"


def test_too_few_completions_are_no_answer() -> None:
    manager = Manager(Server("http://a"))
    whole = manager.servers[0].request
    manager.servers[0].request = lambda *a, **k: {**whole(*a, **k), "choices": []}  # type: ignore[method-assign]
    with pytest.raises(LoraflowError, match="0 completions for 1 prompts"):
        client(manager).generate([[1]])


def test_images_go_through_the_server_s_preprocessing_where_a_prompt_has_some() -> None:
    from PIL import Image

    manager = Manager(Server("http://a"))
    picture = Image.new("RGB", (2, 2))
    found = client(manager).image_features([[picture, picture], None, [picture]])
    assert found == [{"of": 2}, None, {"of": 1}]
    for status, reason in ((404, "Not Found"), (403, "disabled")):  # before vLLM 0.32, and from then on
        manager.servers[0].failure = HTTPFailure("nope", status=status, reason=reason, server="http://a")
        with pytest.raises(CapabilityError, match="--enable-scale-out"):
            client(manager).image_features([[picture]])


def test_images_that_fail_on_one_server_are_processed_by_the_other() -> None:
    from PIL import Image

    manager = Manager(Server("http://a"), Server("http://b"))
    reason = "The model `run-v3` does not exist."
    manager.servers[0].failure = HTTPFailure("gone", status=404, reason=reason, server="http://a")
    pictures: list[Any] = [[Image.new("RGB", (2, 2))]] * 2
    assert client(manager).image_features(pictures) == [{"of": 1}] * 2
    assert set(manager.blamed) == {"http://a"}


@pytest.mark.parametrize("token", [{"token_id": 5}, {"token": "token_id:5"}])
def test_log_probs_beside_images_are_read_from_old_and_new_servers(token: dict[str, Any]) -> None:
    manager = Manager(Server("http://a"), transport="merged")
    bodies: list[dict[str, Any]] = []

    def request(method: str, path: str, *, json: Any, **_: Any) -> Any:
        bodies.append(json)
        content = [{**token, "logprob": lp, "top_logprobs": [{**token, "logprob": lp}]} for lp in (-0.5, -9999.0)]
        return {"model": json["model"], "choices": [{"token_ids": [5, 5], "logprobs": {"content": content}}]}

    manager.servers[0].request = request  # type: ignore[method-assign]
    answer = client(manager).generate([[1, 2]], features=[{"of": 1}])
    assert answer["completion_ids"] == [[5, 5]]
    assert answer["logprobs"] == [[[-0.5], [None]]], "vLLM writes -9999 for NaN"
    assert answer["logprob_token_ids"] == [[[5], [5]]]
    assert [body["cache_salt"] for body in bodies] == ["run-v3"]


def test_a_log_prob_that_vllm_lacks_is_none_of_a_completion_either() -> None:
    """-9999 is what vLLM writes for -inf: taken for a number, a truncating correction gives it the largest weight."""
    manager = Manager(Server("http://a"))

    def request(method: str, path: str, *, json: Any, **_: Any) -> Any:
        tokens = ["token_id:5", "token_id:6"]
        tops = [{"token_id:5": -0.5, "token_id:8": -9999.0}, {"token_id:6": -9999.0, "token_id:7": -0.1}]
        logprobs = {"tokens": tokens, "token_logprobs": [-0.5, -9999.0], "top_logprobs": tops}
        choice = {"prompt_token_ids": [1, 2], "token_ids": [5, 6], "logprobs": logprobs}
        return {"model": json["model"], "choices": [choice]}

    manager.servers[0].request = request  # type: ignore[method-assign]
    answer = client(manager).generate([[1, 2]], logprobs=1)
    assert answer["logprobs"][0][0] == [-0.5, -9999.0], "another candidate may well be ruled out"
    [found] = sampled_logprobs(answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"])
    assert found[0] == -0.5
    assert math.isnan(found[1])


def test_online_dpo_s_failure_waits_until_every_rank_can_raise_it() -> None:
    manager = Manager(Server("http://a"))
    made = client(manager, OnlineDPOClient)
    assert made.generate([[1]], n=2)["completion_ids"] == [[7], [7]]
    made.raise_failure()
    manager.servers[0].failure = HTTPFailure("boom", status=400, reason="boom", server="http://a")
    assert made.generate([[1], [2]], n=2)["completion_ids"] == [[]] * 4
    with pytest.raises(HTTPFailure, match="boom"):
        made.raise_failure()
    made.raise_failure()

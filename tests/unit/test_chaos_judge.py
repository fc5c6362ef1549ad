"""The judge of the chaos test: it sees a wrong answer, a version that was never made, and one that was lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.chaos import Judge
from tests.helpers.chaos_world import RUN_ID, World
from tests.helpers.tiny import PROMPT, peft_logprobs, peft_model, randomize


@pytest.fixture
def judge(tiny_model: Path, tmp_path: Path) -> Judge:
    (tmp_path / "truth").mkdir()
    judge = Judge(World(tiny_model, tmp_path, 0, ("filesystem",), 0), peft_model(tiny_model))
    for version in range(3):
        randomize(judge.policy, seed=version)
        values = {name: value.detach() for name, value in judge.policy.named_parameters() if "lora_" in name}
        torch.save(values, tmp_path / "truth" / f"{RUN_ID}-v{version}.pt")
    return judge


def says(judge: Judge, *lines: dict[str, Any]) -> None:
    with (judge.world.work / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps({"at": 0.0, **line}) + "\n" for line in lines)
    judge.read_journal()


def sync(version: int, outcome: str = "committed") -> dict[str, Any]:
    return {"event": "sync", "policy": f"{RUN_ID}-v{version}", "outcome": outcome, "error": None, "aside": {}}


def recovered(version: int | None, *lost: str, before: str = "filesystem") -> dict[str, Any]:
    committed = "None" if version is None else f"{RUN_ID}-v{version}"
    return {"event": "recovered", "committed": committed, "lost": list(lost), "before": before}


def test_an_answer_of_another_version_is_wrong(judge: Judge, tiny_model: Path) -> None:
    model = peft_model(tiny_model)
    randomize(model, seed=1)
    right = peft_logprobs(model, PROMPT)[-4:].tolist()
    answer = {"event": "answers", "answers": [[f"{RUN_ID}-v1", PROMPT[:-4], PROMPT[-4:], right]]}
    says(judge, answer)
    assert (judge.answers, judge.wrong) == (1, [])
    answer["answers"][0][0] = f"{RUN_ID}-v2"
    says(judge, answer)
    answer["answers"][0][0] = f"{RUN_ID}-v7"
    says(judge, answer)
    assert len(judge.wrong) == 2
    assert "v2 is off by" in judge.wrong[0]
    assert "v7 was never made" in judge.wrong[1]


def test_not_a_number_is_wrong(judge: Judge) -> None:
    judge.compare(f"{RUN_ID}-v0", PROMPT, [float("nan")] * 4, "a server")
    assert len(judge.wrong) == 1


def test_a_name_that_is_committed_twice_is_wrong(judge: Judge) -> None:
    says(judge, sync(0), sync(2, "failed"), sync(1), sync(1))
    assert len(judge.wrong) == 1


@pytest.mark.parametrize(
    ("line", "lost", "unpublished"),
    [
        (recovered(2), 0, 0),
        (recovered(3), 0, 0),  # committed, and killed before it said so
        (recovered(1), 1, 0),
        (recovered(None), 1, 0),
        (recovered(2, "chaos-v1"), 1, 0),
        (recovered(1, before="direct"), 0, 1),  # its file was not written yet
        (recovered(0, before="direct"), 1, 0),
    ],
)
def test_what_was_committed_must_be_found_again(
    judge: Judge, line: dict[str, Any], lost: int, unpublished: int
) -> None:
    says(judge, sync(1), sync(2), line)
    assert (len(judge.lost), len(judge.unpublished)) == (lost, unpublished)

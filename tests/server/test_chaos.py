"""Bad luck of a week in minutes: real servers, a real trainer process, every kind of fault; nothing wrong is served.

`LORAFLOW_CHAOS_SECONDS` makes the long run longer; `python -m tests.helpers.chaos` writes a report.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerPark
from tests.helpers.chaos import run_chaos

pytestmark = pytest.mark.server


def assert_survived(report: dict[str, Any]) -> None:
    print(json.dumps({name: value for name, value in report.items() if name != "faults"}, indent=1))
    assert report["wrong_answers"] == 0, report["details"]["wrong"]
    assert report["versions_lost"] == 0, report["details"]["lost"]
    assert report["faults_survived"] == report["faults_injected"]
    assert report["trainer_exit_code"] == 0
    assert report["threads_left"] == []
    assert report["answers_checked"] > 50
    assert report["names_asked"] > report["faults_injected"]
    assert report["syncs_committed"] > report["faults_injected"]


def test_two_servers_and_a_trainer_under_random_faults(
    server_park: ServerPark, tiny_model: Path, tmp_path: Path
) -> None:
    server_park.stop()  # two cores: these two servers alone
    report = run_chaos(tiny_model, tmp_path, seconds=50.0, at_least=6, servers=2, seed=18, carriers=("filesystem",))
    assert_survived(report)
    assert report["faults_injected"] >= 6
    assert report["trainer_lives"] >= 2
    assert report["server_starts"] == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_three_servers_and_both_carriers(server_park: ServerPark, tiny_model: Path, tmp_path: Path, seed: int) -> None:
    server_park.stop()
    seconds = float(os.environ.get("LORAFLOW_CHAOS_SECONDS", "600"))
    report = run_chaos(tiny_model, tmp_path, seconds=seconds, servers=3, seed=seed, carriers=("filesystem", "direct"))
    assert_survived(report)
    assert set(report["by_kind"]) >= {"server_killed", "trainer_killed", "link_spoiled", "files_damaged"}

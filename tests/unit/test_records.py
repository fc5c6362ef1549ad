"""Records as JSON: every line can be read by any reader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from loraflow.records import Proof, RecordFile, SyncRecord


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    proof = Proof("canary", False, mean_abs_dlogp=math.nan, max_abs_dlogp=math.inf, atol=0.01, detail="no number")
    record = SyncRecord(
        3,
        "run-v3",
        3,
        "adapter",
        "filesystem",
        "failed",
        proofs={"http://a": proof},
        extra={"error": math.nan, "x": 1.5},
    )
    file = RecordFile(tmp_path / "new" / "syncs.jsonl")
    for _ in range(2):
        file.append(record)
    first, second = (json.loads(line, parse_constant=_refuse) for line in file.path.read_text().splitlines())
    assert first == second == record.to_dict()
    assert first["extra"] == {"error": None, "x": 1.5}
    assert first["proofs"]["http://a"] == {"kind": "canary", "passed": False, "atol": 0.01, "detail": "no number"}
    assert not first["proven"]


def test_a_line_that_was_cut_off_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    """A process killed, or a disk filled up, in the middle of a line; the run is resumed."""
    record = SyncRecord(4, "run-v4", 4, "adapter", "filesystem", "committed")
    file = RecordFile(tmp_path / "syncs.jsonl")
    file.append(record)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + whole[:40])
    for _ in range(2):
        RecordFile(file.path).append(record)
    lines = file.path.read_bytes().splitlines(keepends=True)
    assert lines == [whole, whole[:40] + b"\n", whole, whole]

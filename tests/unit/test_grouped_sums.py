"""Checksums of many tensors in one launch against those of each; Triton's interpreter on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_ranks

pytest.importorskip("triton")


def _tensors() -> list[torch.Tensor]:
    """Whole rows and parts of them, on a boundary and off it, with gaps, odd sizes, one byte too many for words."""
    torch.manual_seed(0)
    room = torch.randn(9000).bfloat16()
    return [
        torch.randn(1000, 333).bfloat16(),
        torch.randn(4096 * 5),
        torch.randn(7),
        torch.randn(256, 64).bfloat16().T,
        torch.randn(33, 5)[:, 1:3],
        room[2:4100],
        room[5001:5004],
        torch.randint(0, 256, (4101,), dtype=torch.uint8),
    ]


def look() -> dict[str, Any]:
    from loraflow_server import checksum
    from loraflow_server.checksum import StreamSums, byte_checksum
    from loraflow_server.grouped_sums import RowSums

    sums = RowSums(checksum._column_weights(torch.device("cpu")))
    launches: list[int] = []

    class Counted(RowSums):
        def launch(self, table: Any, out: torch.Tensor) -> None:
            launches.append(len(table.entries))
            super().launch(table, out)

    counted = Counted(checksum._column_weights(torch.device("cpu")))
    found: dict[str, Any] = {"tried out": checksum._tried_out(sums, torch.device("cpu"))}
    checksum._row_sums = lambda device: counted  # type: ignore[assignment]
    tensors = _tensors()
    stream = StreamSums([tensor.numel() * tensor.element_size() for tensor in tensors])
    found["taken"], found["wanted"] = [], []
    order = [3, 0, 4, 1, 7, 2, 5, 6]
    for again in range(3):
        stream.restart()
        if again == 2:  # as after an update that put the weights elsewhere
            tensors = [tensor.clone() for tensor in tensors]
            tensors[1][4095] += 1
        stream.take_all(order, [tensors[index] for index in order])
        found["taken"].append(stream.finish())
        found["wanted"].append([byte_checksum(tensor) for tensor in tensors])
    stream.restart()
    stream.take_all(order[:4], [tensors[index] for index in order[:4]])
    stream.take_all(order[4:], [tensors[index] for index in order[4:]])
    found["in parts"] = stream.finish()
    try:
        stream.take_all([0], [tensors[2]])
    except ValueError as error:
        found["refused"] = str(error)
    found["launches"] = launches

    class Wrong(RowSums):
        def launch(self, table: Any, out: torch.Tensor) -> None:
            super().launch(table, out)
            out[-1] += 1

    found["wrong"] = checksum._tried_out(Wrong(counted._columns), torch.device("cpu"))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("sums")
    outcome = run_ranks(look, folder=folder, world_size=1, env={"TRITON_INTERPRET": "1"})[0]
    if outcome.error is not None:
        raise outcome.error
    result: dict[str, Any] = outcome.result
    return result


def test_sums_are_those_of_each_tensor(found: dict[str, Any]) -> None:
    assert found["taken"] == found["wanted"]
    assert found["taken"][0] != found["taken"][2]
    assert found["in parts"] == found["taken"][2]


def test_what_has_no_gaps_takes_one_launch(found: dict[str, Any]) -> None:
    assert found["launches"][:2] == [4, 4], "two have gaps; three bytes and words off their boundary are summed apart"


def test_other_sizes_are_refused(found: dict[str, Any]) -> None:
    assert "bytes" in found["refused"]


def test_the_try_out_tells_right_from_wrong(found: dict[str, Any]) -> None:
    assert found["tried out"]
    assert not found["wrong"]

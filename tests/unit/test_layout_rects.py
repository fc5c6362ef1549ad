"""Reading a layout back from numbered elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraflow_server.rects import Rect, find_rects


def numbered(shapes: list[tuple[int, int]]) -> tuple[list[torch.Tensor], list[int]]:
    tensors, starts, start = [], [], 1
    for rows, cols in shapes:
        starts.append(start)
        tensors.append(torch.arange(start, start + rows * cols).view(rows, cols))
        start += rows * cols
    return tensors, starts


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, int], Rect, tuple[int, int, int, int]]:
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    row, col = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
    height, width = draw(st.integers(1, rows - row)), draw(st.integers(1, cols - col))
    margins = draw(st.tuples(*[st.integers(0, 3)] * 4))
    return (rows, cols), Rect(0, row, col, height, width, draw(st.booleans())), margins


@settings(max_examples=300, deadline=None)
@given(slices())
def test_any_slice_is_found_where_it_was_put(case: tuple[tuple[int, int], Rect, tuple[int, int, int, int]]) -> None:
    shape, rect, (above, left, below, right) = case
    [source], starts = numbered([shape])
    piece = rect.of(source)
    place = torch.zeros(above + piece.shape[0] + below, left + piece.shape[1] + right, dtype=torch.int64)
    place[above : above + piece.shape[0], left : left + piece.shape[1]] = piece
    rebuilt = torch.zeros_like(place)
    for found, row, col in find_rects(place, starts, [shape]):
        view = found.of(source)
        rebuilt[row : row + view.shape[0], col : col + view.shape[1]] = view
    assert torch.equal(rebuilt, place)


def test_shards_of_packed_projections() -> None:
    shapes = [(8, 6), (4, 6), (4, 6)]
    sources, starts = numbered(shapes)
    place = torch.cat([sources[0][4:], sources[1][2:], sources[2][2:]])
    assert find_rects(place, starts, shapes) == [
        (Rect(0, 4, 0, 4, 6), 0, 0),
        (Rect(1, 2, 0, 2, 6), 4, 0),
        (Rect(2, 2, 0, 2, 6), 6, 0),
    ]


def test_rows_apart_in_one_source_are_two_pieces() -> None:
    [source], starts = numbered([(9, 4)])
    found = find_rects(torch.cat([source[0:2], source[6:8]]), starts, [(9, 4)])
    assert found == [(Rect(0, 0, 0, 2, 4), 0, 0), (Rect(0, 6, 0, 2, 4), 2, 0)]


def test_nothing_written_is_no_piece() -> None:
    assert find_rects(torch.zeros(3, 4, dtype=torch.int64), [1], [(2, 2)]) == []


@pytest.mark.parametrize("change", ["hole", "swap", "repeat", "reverse"])
def test_what_is_not_a_rectangle_is_refused(change: str) -> None:
    [source], starts = numbered([(5, 5)])
    place = source.clone()
    if change == "hole":
        place[2, 2] = 0
    elif change == "swap":
        place[1, 1], place[1, 2] = source[1, 2], source[1, 1]
    elif change == "repeat":
        place[2:, 1:] = source[0, 1]
    else:
        place = source.flip(1)
    with pytest.raises(ValueError, match="the place is"):
        find_rects(place, starts, [(5, 5)])


def test_json_round_trip() -> None:
    rect = Rect(3, 1, 2, 4, 5, True)
    assert Rect.from_list(rect.to_list()) == rect
    assert rect.served_shape == (5, 4)

"""Layouts: the places of rows in padded and in packed batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import BadOption
from runner.training.packing import Layout

lengths = st.lists(st.integers(1, 20), max_size=30)
layouts: st.SearchStrategy[Layout] = st.one_of(
    lengths.map(Layout.padded),
    st.builds(lambda sizes, more: Layout.padded(sizes, length=max([1, *sizes]) + more), lengths, st.integers(0, 5)),
    st.builds(lambda sizes, more: Layout.packed(sizes, length=max([1, *sizes]) + more), lengths, st.integers(0, 30)),
)


def test_padded_rows_have_the_layout_made_by_hand() -> None:
    layout = Layout.padded([2, 3])
    assert layout.segment_ids().tolist() == [[1, 1, 0], [2, 2, 2]]
    assert layout.position_ids().tolist() == [[0, 1, 0], [0, 1, 2]]
    filled = layout.fill([np.array([7, 8]), np.array([4, 5, 6])], -1, np.int32)
    assert filled.tolist() == [[7, 8, -1], [4, 5, 6]]


def test_packed_rows_have_the_layout_made_by_hand() -> None:
    # In order of length: 5 opens a sequence, 3 fits into it, 3 opens another, and 2 and 1 fit into that one.
    layout = Layout.packed([3, 5, 2, 3, 1], length=8)
    assert layout.segment_ids().tolist() == [[2, 2, 2, 2, 2, 1, 1, 1], [4, 4, 4, 3, 3, 5, 0, 0]]
    assert layout.position_ids().tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 1, 0, 0, 1]]


def test_a_length_is_rounded_up_to_a_multiple() -> None:
    assert Layout.padded([9, 3], multiple_of=8).length == 16
    assert Layout.padded([8], multiple_of=8).length == 8
    assert Layout.padded([3], length=5, multiple_of=4).length == 8


def test_no_rows_make_no_sequences() -> None:
    for layout in (Layout.padded([]), Layout.padded([], length=4), Layout.packed([], length=4)):
        assert layout.segment_ids().shape == layout.position_ids().shape == (0, layout.length)
        assert layout.split(layout.segment_ids()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.packed([3], length=2), "a row of 3 ids does not fit into length=2: give at least length=3"),
        (lambda: Layout.padded([3], length=2), "a row of 3 ids does not fit into length=2: give at least length=3"),
        (lambda: Layout.packed([], length=0), "length=0: give a whole number of at least 1"),
        (lambda: Layout.padded([], length=-1), "length=-1: give"),
        (lambda: Layout.padded([], multiple_of=0), "multiple_of=0: give"),
        (lambda: Layout.padded([], length=True), "length=True: give"),
    ],
    ids=["packed", "padded", "zero", "negative", "multiple", "bool"],
)
def test_too_long_row_or_invalid_length_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        make()


@settings(deadline=None)
@given(layouts)
def test_every_position_of_every_row_has_a_place_of_its_own(layout: Layout) -> None:
    rows = [np.arange(length) + 100 * row for row, length in enumerate(layout.lengths)]
    filled = layout.fill(rows, -1, np.int64)
    assert [part.tolist() for part in layout.split(filled)] == [row.tolist() for row in rows]
    assert (filled != -1).sum() == sum(layout.lengths)
    assert ((filled == -1) == (layout.segment_ids() == 0)).all()


@settings(deadline=None)
@given(layouts)
def test_no_row_is_split_and_padding_is_on_the_right(layout: Layout) -> None:
    for start, length in zip(layout.starts, layout.lengths, strict=True):
        assert start // layout.length == (start + length - 1) // layout.length
    used = layout.segment_ids() > 0
    assert (np.diff(used.astype(int), axis=1) <= 0).all()


@settings(deadline=None)
@given(layouts)
def test_positions_begin_again_with_every_row_and_with_padding(layout: Layout) -> None:
    positions, segments = layout.position_ids(), layout.segment_ids()
    assert [part.tolist() for part in layout.split(positions)] == [list(range(n)) for n in layout.lengths]
    for line, owners in zip(positions, segments, strict=True):
        padding = line[owners == 0]
        assert padding.tolist() == list(range(len(padding)))


@settings(deadline=None)
@given(lengths, st.integers(20, 40))
def test_packing_wastes_less_than_half(sizes: list[int], length: int) -> None:
    layout = Layout.packed(sizes, length=length)
    # If two sequences were half empty, the rows of one would have been placed in the other.
    used = [(line > 0).sum() for line in layout.segment_ids()]
    assert sum(2 * each < length for each in used) <= 1
    assert layout.sequences <= len(sizes)


def test_values_may_have_further_dimensions() -> None:
    layout = Layout.packed([1, 2], length=3)
    masks = [np.array([[1, 2]]), np.array([[3, 4], [5, 6]])]
    filled = layout.fill(masks, 0, np.int32)
    assert filled.tolist() == [[[3, 4], [5, 6], [1, 2]]]
    assert [part.tolist() for part in layout.split(filled)] == [mask.tolist() for mask in masks]

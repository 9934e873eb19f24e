"""Right padding: it is recognized, or the error names the row and the fault."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import BadBatch, BadOption
from runner.generation import verify_right_padding
from tests.generation.batching import Kind, array

KINDS = st.sampled_from(["torch", "numpy"])
patient = settings(deadline=None)  # a slow machine fails no test
NAMES = st.sampled_from([("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths")])


@st.composite
def batches(draw: st.DrawFn, pad: int) -> tuple[list[list[int]], list[int]]:
    """Rows of one width that are right-padded, with their lengths. A sampled id may equal the padding."""
    width = draw(st.integers(0, 8))
    lengths = draw(st.lists(st.integers(0, width), max_size=6))
    ids = st.integers(0, 9)
    rows = [draw(st.lists(ids, min_size=n, max_size=n)) + [pad] * (width - n) for n in lengths]
    return rows, lengths


def written(rows: list[list[int]], lengths: list[int], kind: Kind, names: tuple[str, str]) -> dict[str, Any]:
    width = len(rows[0]) if rows else 0
    ids = np.array(rows, dtype=np.int64).reshape(len(rows), width)
    return {names[0]: array(ids, kind), names[1]: array(lengths, kind)}


@patient
@given(data=st.data(), pad=st.integers(-1, 12), kind=KINDS, names=NAMES)
def test_right_padded_batch_is_accepted(data: st.DataObject, pad: int, kind: Kind, names: tuple[str, str]) -> None:
    rows, lengths = data.draw(batches(pad))
    assert verify_right_padding(written(rows, lengths, kind, names), pad) == (True, None)


@patient
@given(data=st.data(), pad=st.integers(-1, 12), kind=KINDS, names=NAMES)
def test_wrong_padding_id_is_reported_with_its_row_and_position(
    data: st.DataObject, pad: int, kind: Kind, names: tuple[str, str]
) -> None:
    rows, lengths = data.draw(batches(pad).filter(lambda batch: any(n < len(r) for r, n in zip(*batch, strict=True))))
    row = data.draw(st.sampled_from([i for i, n in enumerate(lengths) if n < len(rows[i])]))
    position = data.draw(st.integers(lengths[row], len(rows[row]) - 1))
    rows[row][position] = wrong = data.draw(st.integers(-5, 20).filter(lambda value: value != pad))
    batch = written(rows, lengths, kind, names)
    ok, message = verify_right_padding(batch, pad, raise_error=False)
    assert not ok
    assert message is not None
    assert message.startswith(
        f"row {row}: {names[0]} holds {wrong} at position {position}, where the padding {pad} should be"
    )
    assert "further rows" not in message
    with pytest.raises(BadBatch, match=re.escape(message)):
        verify_right_padding(batch, pad)


@patient
@given(data=st.data(), kind=KINDS, names=NAMES)
def test_a_length_that_no_row_can_have_is_found_and_the_row_is_named(
    data: st.DataObject, kind: Kind, names: tuple[str, str]
) -> None:
    rows, lengths = data.draw(batches(0).filter(lambda batch: bool(batch[0])))
    row = data.draw(st.integers(0, len(rows) - 1))
    width = len(rows[row])
    lengths[row] = data.draw(st.integers(-9, -1) | st.integers(width + 1, width + 9))
    _, message = verify_right_padding(written(rows, lengths, kind, names), 0, raise_error=False)
    assert message == f"row {row}: {names[1]} is {lengths[row]}, but a row has {width} positions."


@pytest.mark.parametrize(
    ("ids", "lengths", "pad", "message"),
    [
        (
            [[5, 6, 7], [0, 5, 6]],
            [3, 2],
            0,
            "row 1: input_ids holds 6 at position 2, where the padding 0 should be: its length is 2. "
            "It seems to be padded on the left: put its ids first.",
        ),
        (
            [[5, 9, 9], [5, 6, 9]],
            [1, 2],
            0,
            "row 0: input_ids holds 9 at position 1, where the padding 0 should be: its length is 1. If 9 is your "
            "padding, set pad_value, or '_pad_token_id' of the configuration. "
            "The same fault is in further rows (1): 1.",
        ),
        (
            [[5, 6, 7, 0]],
            [1],
            0,
            "row 0: input_ids holds 6 at position 1, where the padding 0 should be: its length is 1.",
        ),
        (
            [[1, 1]] * 20,
            [1] * 20,
            0,
            "row 0: input_ids holds 1 at position 1, where the padding 0 should be: its length is 1. If 1 is your "
            "padding, set pad_value, or '_pad_token_id' of the configuration. "
            "The same fault is in further rows (19): 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ....",
        ),
    ],
    ids=["padded on the left", "another padding", "a length that is too short", "many rows"],
)
def test_message_names_the_likely_mistake(ids: list[list[int]], lengths: list[int], pad: int, message: str) -> None:
    batch = {"input_ids": array(ids), "input_lengths": array(lengths)}
    assert verify_right_padding(batch, pad, raise_error=False) == (False, message)


IDS = array([[1, 2]])
ONE = array([2])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([[1, 2]], "the batch is a list: give a dictionary"),
        ({}, "the batch has no keys: give input_ids and input_lengths or output_ids and unpadded_sequence_lengths"),
        ({"input_ids": IDS}, "the batch has input_ids: give input_ids and input_lengths or"),
        ({"input_ids": [[1, 2]], "input_lengths": ONE}, "input_ids is a list: give a torch tensor or a numpy array"),
        ({"input_ids": IDS, "input_lengths": [2]}, "input_lengths is a list"),
        ({"input_ids": array([1, 2]), "input_lengths": ONE}, r"input_ids has the shape \[2\]: give \[rows, length\]"),
        ({"input_ids": IDS, "input_lengths": array([2, 2])}, r"1 rows and input_lengths the shape \[2\]"),
        ({"input_ids": IDS, "input_lengths": array([[2]])}, r"1 rows and input_lengths the shape \[1, 1\]"),
        (
            {"input_ids": array([[1.0]], dtype="float32"), "input_lengths": ONE},
            "input_ids holds float32: give integers",
        ),
        ({"input_ids": array([[1]], "torch", "bfloat16"), "input_lengths": ONE}, "input_ids holds bfloat16"),
        ({"input_ids": array([[1]], dtype="bool"), "input_lengths": ONE}, "input_ids holds bool: give integers"),
    ],
    ids=str,
)
def test_malformed_batch_is_refused_with_its_key(batch: Any, message: str) -> None:
    with pytest.raises(BadBatch, match=message):
        verify_right_padding(batch)
    ok, said = verify_right_padding(batch, raise_error=False)
    assert not ok
    assert re.search(message, said or "")


@pytest.mark.parametrize("pad", [None, True, 0.0], ids=str)
def test_padding_value_that_is_not_an_id_is_refused(pad: Any) -> None:
    with pytest.raises(BadOption, match=f"pad_value={pad}: give the id that rows are padded with"):
        verify_right_padding({"input_ids": IDS, "input_lengths": ONE}, pad)


def test_a_batch_with_prompts_and_outputs_is_looked_at_twice() -> None:
    batch = {"input_ids": IDS, "input_lengths": ONE, "output_ids": IDS, "unpadded_sequence_lengths": array([1])}
    with pytest.raises(BadBatch, match="row 0: output_ids holds 2 at position 1"):
        verify_right_padding(batch)

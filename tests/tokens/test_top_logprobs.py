"""The most likely ids of some positions, in flat arrays."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from runner.tokens.log import Source, TokenLog
from runner.tokens.top_logprobs import TopLogprobs


def three() -> TopLogprobs:
    return TopLogprobs.of([{7: -2.0, 8: -1.0, 9: -3.0}, {1: -0.5, 2: -0.25, 3: -9.0}, {4: -1.0, 5: -2.0, 6: -3.0}], 2)


def test_rows_are_sorted_and_cut_to_the_most_likely_ids() -> None:
    top = three()
    assert len(top) == 3
    assert top.id_rows().tolist() == [[8, 7], [2, 1], [4, 5]]
    assert top.logprob_rows().tolist() == [[-1.0, -2.0], [-0.25, -0.5], [-1.0, -2.0]]
    assert top.id_rows().dtype == np.int32
    assert top.logprob_rows().dtype == np.float32


def test_a_part_is_a_copy() -> None:
    top = three()
    part = top.part(1, 3)
    part.ids[0] = 99
    assert part.id_rows().tolist() == [[99, 1], [4, 5]]
    assert top.id_rows().tolist() == three().id_rows().tolist()


def test_narrowing_keeps_the_likeliest_ids_of_each_position() -> None:
    assert three().narrowed(1).id_rows().tolist() == [[8], [2], [4]]


def test_no_positions_have_no_rows() -> None:
    assert TopLogprobs(3).id_rows().shape == (0, 3)


@pytest.mark.parametrize("sizes", [(3,), (1, 2), (1, 0, 1, 1)], ids=str)
def test_a_log_puts_those_of_a_turn_together_as_they_come(sizes: tuple[int, ...]) -> None:
    log, start = TokenLog(), 0
    log.append_prompt([1, 2], Source.PROMPT)
    for size in sizes:
        log.append_top(2, three().part(start, start + size))
        start += size
    assert log.top_logprobs == {2: three()}


def test_cut_log_drops_the_top_logprobs_after_the_cut() -> None:
    log = TokenLog(ids=array("i", range(10)))
    log.append_top(2, three())
    log.append_top(6, three())
    log.cut(6)
    assert list(log.top_logprobs) == [2]

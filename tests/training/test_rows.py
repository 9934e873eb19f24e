"""Rows: the segments of trajectories as arrays, from real runs and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from runner import Conversation, Trajectory
from runner.tokens.log import Source, TokenLog, VersionSpan
from runner.training.rows import NO_VERSION, TrainingRow, rows_of, version_table
from tests.histories import HIDDEN, template
from tests.playing import recording, talked, twice
from tests.training.making import made, pieces, prompt, retried, said

pytestmark = pytest.mark.anyio


def rows(trajectory: Trajectory) -> list[TrainingRow]:
    return rows_of(trajectory, version_table([trajectory]))


async def retrying(conversation: Conversation) -> None:
    """Generate a turn, ask more, and generate another turn, which is taken back and generated again."""
    await conversation.generate()
    conversation.add("And twice that?")
    await conversation.generate()
    conversation.replace(conversation.messages[:-1])
    await conversation.generate()


async def test_a_row_is_its_segment_bit_for_bit() -> None:
    trajectory = await talked(twice, recording(["21", "42"]))
    (row,) = rows(trajectory)
    log = trajectory.segments[0].log
    assert row.ids.tolist() == log.ids.tolist()
    assert row.ids.dtype == np.int32
    assert row.loss_mask.tolist() == [bool(each) for each in log.mask()]
    trained = [logprob for turn in trajectory.turns for logprob in turn.logprobs]
    assert row.logprobs[row.loss_mask].tolist() == trained
    assert not row.logprobs[~row.loss_mask].any()
    assert row.turns == tuple(trajectory.turns)


async def test_sampled_ids_are_trained_only_in_their_segment() -> None:
    trajectory = await talked(twice, recording(["yes", "no"], template=template(HIDDEN)))
    first, second = rows(trajectory)
    assert (first.segment, second.segment) == (0, 1)
    assert first.ids[first.loss_mask].tolist() == trajectory.turns[0].token_ids.tolist()
    assert second.ids[second.loss_mask].tolist() == trajectory.turns[1].token_ids.tolist()


async def test_a_retried_turn_is_not_trained() -> None:
    trajectory = await talked(retrying, recording(["21", "41", "42"]))
    first, wrong, right = trajectory.turns
    kept, again = rows(trajectory)
    assert wrong.retried
    assert kept.ids[kept.loss_mask].tolist() == first.token_ids.tolist()
    assert again.ids[again.loss_mask].tolist() == right.token_ids.tolist()
    assert not kept.logprobs[wrong.start :].any()
    assert set(kept.versions[wrong.start :]) == {NO_VERSION}


async def test_a_segment_in_which_nothing_is_trained_has_no_row() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.replace(conversation.messages[:-1])
        await conversation.generate()

    trajectory = await talked(talk, recording(["41", "42"]))
    assert len(trajectory.segments) == 2
    (row,) = rows(trajectory)
    assert row.segment == 1


async def test_missing_logprobs_are_nan() -> None:
    (row,) = rows(await talked(twice, recording(["21", "42"], logprobs=False)))
    assert np.isnan(row.logprobs[row.loss_mask]).all()
    assert not row.logprobs[~row.loss_mask].any()


def test_versions_index_a_table_in_order_of_first_ids() -> None:
    log = TokenLog()
    log.append_prompt([1, 2], Source.PROMPT)
    log.append_sampled([3, 4, 5], [-1.0, -1.0, -1.0])
    log.stamp([VersionSpan("old", 0, 2), VersionSpan("new", 2, 3)], 2)
    trajectory = made([prompt(1, 2), said(3, 4, 5, version="")])
    trajectory.segments[0].log = log
    table = version_table([trajectory, made([prompt(1), said(2, version="newer")])])
    assert table == {"old": 0, "new": 1, "newer": 2}
    assert rows_of(trajectory, table)[0].versions.tolist() == [-1, -1, 0, 0, 1]


def test_a_version_whose_ids_were_all_taken_back_is_in_no_table() -> None:
    trajectory = made([prompt(1), retried(2, version="8"), said(3, version="9")])
    assert version_table([trajectory]) == {"9": 0}
    assert rows(trajectory)[0].versions.tolist() == [-1, -1, 0]


def test_a_first_id_is_never_trained_since_nothing_predicts_it() -> None:
    (row,) = rows(made([said(5, 6)]))
    assert row.loss_mask.tolist() == [False, True]
    assert (row.logprobs[0], row.versions[0]) == (0, NO_VERSION)
    assert rows(made([said(5)])) == []


def test_an_empty_trajectory_has_no_rows() -> None:
    assert rows(made()) == []
    assert rows(made([])) == []


@settings(deadline=None)
@given(pieces())
def test_every_sampled_id_that_was_kept_is_trained_once(content: Any) -> None:
    # The prompt is first, so no first id is lost.
    trajectory = made(content, [prompt(1), said(2, 3), retried(4)])
    kept = [turn for turn in trajectory.turns if not turn.retried]
    trained = [token_id for row in rows(trajectory) for token_id in row.ids[row.loss_mask].tolist()]
    assert trained == [token_id for turn in kept for token_id in turn.token_ids]
    for row in rows(trajectory):
        assert ((row.versions == NO_VERSION) == ~row.loss_mask).all()

"""Selection for training: groups, failed episodes, bad input; from real runs and by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from runner import BadBatch, BadOption, Conversation, Group, Outcome, Run, RunFile, Task, Trajectory, reward
from runner.testing import ScriptedEngine
from runner.training.selection import NO_REWARD, NO_TURN, UNTRAINED, Selection, grouped
from tests import sweeps
from tests.playing import Plain, recording, tasks
from tests.training.making import group, groups, made, prompt, said


def one(id: str = "t0#0", **fields: Any) -> Trajectory:
    return made([prompt(1), said(2, 3)], id=id, **fields)


def test_trajectories_rewards_and_groups_keep_their_order() -> None:
    first = group(one("a#0", reward=0), one("a#1", reward=1))
    second = group(one("b#0", reward=0.5), one("b#1", reward=0.5), one("b#2", reward=0.5))
    chosen = Selection.of([second, first])
    assert chosen.trajectories == (*second.trajectories, *first.trajectories)
    assert chosen.rewards.tolist() == [0.5, 0.5, 0.5, 0, 1]
    assert chosen.group_of.tolist() == [0, 0, 0, 1, 1]
    group_fields = [(each.task.id, each.agent, each.scored, each.complete, each.flat) for each in chosen.groups]
    assert group_fields == [("b", "main", 3, True, True), ("a", "main", 2, True, False)]


def test_each_segment_is_a_row_of_its_trajectory_which_has_one_reward() -> None:
    chosen = Selection.of([group(made([prompt(1), said(2)], [prompt(3), said(4)]), one("t0#1", reward=0))])
    assert chosen.trajectory_of.tolist() == [0, 0, 1]
    assert chosen.rewards.tolist() == [1, 0]
    assert [(row.trajectory.id, row.segment) for row in chosen.rows] == [("t0#0", 0), ("t0#0", 1), ("t0#1", 0)]


def test_unusable_trajectories_are_absent_and_counted_by_reason() -> None:
    whole = group(
        one("t0#0", reward=0.5),
        one("t0#1", reward=None, outcome=Outcome.ENV_ERROR),
        one("t0#2", reward=None, outcome=Outcome.ENV_ERROR),
        one("t0#3", reward=None, outcome=Outcome.TOKEN_ERROR),
        one("t0#4", reward=None),
        made([prompt(1)], id="t0#5", reward=None),
        one("t0#6", trained=False),
    )
    chosen = Selection.of([whole])
    assert [trajectory.id for trajectory in chosen.trajectories] == ["t0#0"]
    assert chosen.absent == {"env_error": 2, "token_error": 1, NO_REWARD: 1, NO_TURN: 1, UNTRAINED: 1}
    assert chosen.absent[Outcome.ENV_ERROR] == 2
    assert chosen.groups[0].scored == 1


def test_a_reward_beside_a_failure_is_not_believed() -> None:
    failed = one(reward=0.0, outcome=Outcome.ENV_ERROR)
    assert Selection.of([failed]).absent == {"env_error": 1}


def test_untrained_scored_trajectory_is_compared_without_a_row() -> None:
    silent = made([prompt(1), said()], id="t0#1", reward=0)
    chosen = Selection.of([group(one(), silent)])
    assert chosen.trajectories[1] is silent
    assert chosen.trajectory_of.tolist() == [0]
    assert not chosen.groups[0].flat


def test_incomplete_group_is_refused_unless_partial() -> None:
    cut = group(one("t7#0"), one("t7#1", reward=None, outcome=Outcome.CANCELLED), complete=False)
    with pytest.raises(BadBatch, match=r"task 't7', agent 'main', is not complete: it has 1 scored .* partial=True"):
        Selection.of([cut])
    chosen = Selection.of([cut], partial=True)
    assert [each.complete for each in chosen.groups] == [False]
    assert chosen.absent == {"cancelled": 1}


def test_flat_groups_are_left_out_on_request_but_listed() -> None:
    flat = group(one("a#0", reward=0.1), one("a#1", reward=0.1))
    spread = group(one("b#0", reward=0), one("b#1", reward=1))
    single = group(one("c#0"), one("c#1", reward=None, outcome=Outcome.ENV_ERROR))
    failed = group(one("d#0", reward=None, outcome=Outcome.ENV_ERROR))
    kept = Selection.of([flat, spread, single, failed])
    assert [each.flat for each in kept.groups] == [True, False, True, True]
    assert len(kept.trajectories) == 5
    dropped = Selection.of([flat, spread, single, failed], drop_flat=True)
    assert dropped.groups == kept.groups
    assert dropped.trajectories == tuple(spread.trajectories)
    assert dropped.group_of.tolist() == [1, 1]
    assert dropped.rewards.tolist() == [0, 1]
    assert [row.trajectory.id for row in dropped.rows] == ["b#0", "b#1"]
    assert dropped.absent == {"env_error": 2}


def test_a_trajectory_by_itself_is_a_group_of_its_own() -> None:
    chosen = Selection.of([one("t0#0"), one("t0#1", reward=0)])
    assert chosen.group_of.tolist() == [0, 1]
    assert [(each.scored, each.complete, each.flat) for each in chosen.groups] == [(1, True, True)] * 2


def test_versions_are_those_of_what_is_trained() -> None:
    first, second = made([prompt(1), said(2, version="9")]), made([prompt(1), said(3, version="7")], reward=None)
    third = made([prompt(1), said(4, version="8")])
    chosen = Selection.of([first, second, third])
    assert chosen.versions == ("9", "8")
    assert [row.versions.tolist() for row in chosen.rows] == [[-1, 0], [-1, 1]]


SAME = one()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Selection.of([]), BadBatch, "no groups or trajectories were given. An iterator is empty"),
        (lambda: Selection.of(group(one())), BadBatch, r"a batch cannot be made from Group.*run.groups\(\)"),  # type: ignore[arg-type]  # as a user may
        (lambda: Selection.of([["x"]]), BadBatch, r"\['x'\] is neither a group nor a trajectory"),  # type: ignore[list-item]  # likewise
        (lambda: Selection.of([SAME, SAME]), BadBatch, "episode 't0#0' of agent 'main' was given twice"),
        (lambda: Selection.of([group(SAME), SAME]), BadBatch, "given twice"),
        (lambda: Selection.of([one(reward=float("nan"))]), BadBatch, "'t0#0' of agent 'main' has the reward nan"),
        (lambda: Selection.of([one(reward=1e39)]), BadBatch, r"reward 1e\+39"),
        (
            lambda: Selection.of([one()], drop_flat=True),
            BadBatch,
            r"was given without its group.*grouped\(trajectories",
        ),
        (lambda: Selection.of([one()], vocabulary=0), BadOption, "vocabulary=0: give the number of ids"),
        (lambda: Selection.of([one()], vocabulary=True), BadOption, "vocabulary=True: give"),
    ],
    ids=["empty", "one group", "no group", "twice", "twice in a group", "nan", "too large", "flat", "zero", "bool"],
)
def test_invalid_selection_argument_is_refused_with_the_reason(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("id", [300, -1], ids=["past the end", "negative"])
def test_batch_of_another_tokenizer_names_the_first_bad_id(id: int) -> None:
    foreign = made([prompt(1), said(299)], [prompt(5, id), said(6)], id="t3#1")
    with pytest.raises(
        BadBatch, match=rf"'t3#1' of agent 'main', segment 1, position 1: id {id} is not one of the 300"
    ):
        Selection.of([one(), foreign], vocabulary=300)
    assert Selection.of([one()], vocabulary=4).rows


def test_trajectories_are_put_together_by_task_visit_and_agent() -> None:
    again = one("a#0", visit=1)
    loose = [one("a#1"), one("b#0"), again, one("a#0")]
    made_groups = grouped(loose, group_size=2)
    assert [[t.id for t in each.trajectories] for each in made_groups] == [["a#0", "a#1"], ["b#0"], ["a#0"]]
    assert [each.complete for each in made_groups] == [True, False, False]


@settings(max_examples=sweeps.times(50, 20))
@given(groups())
def test_nothing_is_lost_and_nothing_absent_is_compared(source: list[Group]) -> None:
    chosen = Selection.of(source)
    given_ones = [t for each in source for t in each.trajectories]
    assert len(chosen.trajectories) + sum(chosen.absent.values()) == len(given_ones)
    assert all(t.reward is not None and t.outcome.scored and t.turns for t in chosen.trajectories)
    assert np.bincount(chosen.group_of, minlength=len(source)).tolist() == [each.scored for each in chosen.groups]
    trained = sum(int(row.loss_mask.sum()) for row in chosen.rows)
    assert trained == sum(turn.end - turn.start for t in chosen.trajectories for turn in t.turns if not turn.retried)


# --- real runs


class Duel(Plain):
    """Environment with two trained agents. The odd episodes of the second task fail."""

    def tasks(self) -> list[Task]:
        return tasks(2)

    async def rollout(self, conversation: Conversation) -> None:
        other = self.episode.conversation("black", prompt="You are black.", train=True)
        while len(conversation.turns) < 2:
            other.add((await conversation.generate()).text)
            if self.task.id == "t1" and self.episode.index % 2:
                raise RuntimeError("the board fell over")
            conversation.add((await other.generate()).text)

    @reward
    def correct(self) -> dict[str, float]:
        return {"main": 1.0 * self.episode.index, "black": -1.0 * self.episode.index}


DUELLING = {"main": lambda turn: "e4", "black": lambda turn: "e5"}


@pytest.mark.anyio
async def test_groups_of_a_run_with_two_trained_agents_and_failed_episodes() -> None:
    async with Run(Duel, recording(DUELLING), group_size=3, breaker=1) as run:
        source = [each async for each in run.groups()]
    chosen = Selection.of(sorted(source, key=lambda each: (each.task.id, each.agent)))
    group_fields = [(each.task.id, each.agent, each.scored, each.complete) for each in chosen.groups]
    assert group_fields == [
        ("t0", "black", 3, True),
        ("t0", "main", 3, True),
        ("t1", "black", 2, True),
        ("t1", "main", 2, True),
    ]
    assert chosen.absent == {"env_error": 1}  # its opponent had taken no turn
    assert chosen.rewards.tolist() == [0, -1, -2, 0, 1, 2, 0, -2, 0, 2]
    assert {row.trajectory.agent for row in chosen.rows} == {"main", "black"}


@pytest.mark.anyio
async def test_groups_of_a_run_left_early_are_accepted_as_partial_only() -> None:
    async with Run(Duel, recording(DUELLING), tasks=tasks(1), group_size=3) as run:
        (first, *_) = [await anext(run)]
    (cut,) = grouped([first], group_size=3)
    with pytest.raises(BadBatch, match="not complete"):
        Selection.of([cut])
    assert len(Selection.of([cut], partial=True).rows) == 1


@pytest.mark.anyio
async def test_an_agent_that_is_not_trained_is_absent() -> None:
    elsewhere = ScriptedEngine("from elsewhere")
    async with Run(Plain, recording("never"), engines={"main": elsewhere}) as run:
        source = [each async for each in run.groups()]
    assert Selection.of(source).absent == {UNTRAINED: 1}


@pytest.mark.anyio
async def test_run_file_and_run_select_the_same_trajectories(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with Run(Duel, recording(DUELLING), group_size=3, breaker=1, file=file) as run:
        played = Selection.of([each async for each in run.groups()])
    with RunFile(file) as run_file:
        read = Selection.of(grouped(run_file.trajectories(), group_size=run_file.header.group_size))
    assert read.absent == played.absent
    assert sorted(map(fields_of, read.rows)) == sorted(map(fields_of, played.rows))
    by_name = [{(t.id, t.agent): t.reward for t in chosen.trajectories} for chosen in (read, played)]
    assert by_name[0] == by_name[1]


def fields_of(row: Any) -> tuple[Any, ...]:
    arrays = (row.ids, row.loss_mask, row.logprobs, row.versions)
    return (row.trajectory.id, row.trajectory.agent, row.segment, *(tuple(array.tolist()) for array in arrays))

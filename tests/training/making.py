"""Trajectories built by hand, and strategies for any trajectories, for tests of training batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from runner import Group, Outcome, Sampling, Segment, Task, Trajectory, Turn
from runner.tokens.log import Source, TokenLog, VersionSpan

__all__ = ["Piece", "group", "groups", "made", "pieces", "prompt", "retried", "said"]

Piece = tuple[Source, Sequence[int], Sequence[float], str]
"""Source of ids, the ids, their log-probabilities, and the weight version."""


def prompt(*ids: int) -> Piece:
    return Source.PROMPT, ids, (), ""


def said(*ids: int, version: str = "0", logprobs: Sequence[float] | None = None) -> Piece:
    return Source.SAMPLED, ids, logprobs or [-float(token_id) / 8 for token_id in ids], version


def retried(*ids: int, version: str = "0") -> Piece:
    return Source.RETRIED, ids, [-1.0] * len(ids), version


def made(
    *segments: Sequence[Piece],
    id: str = "t0#0",
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    sampling: Sampling | None = Sampling.defaults(),  # noqa: B008  # frozen
    **fields: Any,
) -> Trajectory:
    """Return a trajectory of these segments, in which each sampled piece is a turn."""
    task = Task(id=id.split("#")[0])
    trajectory = Trajectory(id=id, task=task, index=int(id.split("#")[1]), agent="main", seed=0, **fields)
    trajectory.reward, trajectory.outcome = reward, outcome
    for number, content in enumerate(segments):
        log = TokenLog()
        trajectory.segments.append(Segment(log=log))
        for source, ids, logprobs, version in content:
            if source is Source.PROMPT:
                log.append_prompt(ids, source)
                continue
            start = len(log)
            log.append_sampled(ids, logprobs)
            log.stamp([VersionSpan(version, 0, len(ids))], start)
            if source is Source.RETRIED:
                log.take_back(start)
            number_of_turn = len(trajectory.turns)
            turn = Turn("main", number_of_turn, log, start, len(log), segment=number, sampling=sampling)
            trajectory.turns.append(turn)
    return trajectory


def group(*trajectories: Trajectory, complete: bool = True) -> Group:
    return Group(trajectories[0].task, "main", trajectories, random.Random(0), complete)


_IDS = st.lists(st.integers(0, 300), min_size=1, max_size=9)


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Generate one segment: a prompt, and then turns and bridges. Some turns are taken back."""
    content = [prompt(*draw(_IDS))]
    for ids in draw(st.lists(_IDS, max_size=4)):
        version = draw(st.sampled_from(["0", "1", "two"]))
        kind = draw(st.sampled_from(["said", "said", "retried", "bridge"]))
        if kind == "bridge":
            content.append(prompt(*ids))
        else:
            content.append((said if kind == "said" else retried)(*ids, version=version))
    return content


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Generate complete groups of any trajectories, including failed ones and ones without a turn."""
    outcomes = st.sampled_from([Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.ENV_ERROR])
    rewards = st.sampled_from([0.0, 0.25, 1.0, -3.5])
    all_groups = []
    for task in range(draw(st.integers(1, 4))):
        members = []
        for index in range(draw(st.integers(1, 4))):
            segments = draw(st.lists(pieces(), min_size=1, max_size=3))
            outcome = draw(outcomes)
            reward = draw(rewards | st.none()) if outcome.scored else None
            members.append(made(*segments, id=f"t{task}#{index}", reward=reward, outcome=outcome))
        all_groups.append(group(*members))
    return all_groups

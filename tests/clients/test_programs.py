"""Unmodified agent programs as environments: each plays an episode with tools, and every id is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.playing import assert_appends, assert_good, in_order, play_program, respelling
from tests.clients.programs import PROGRAMS, Program

pytestmark = pytest.mark.anyio


def programs() -> list[Any]:
    return [pytest.param(each, id=name, marks=pytest.mark.client(each.client)) for name, each in PROGRAMS.items()]


@pytest.mark.parametrize("program", programs())
async def test_a_program_plays_an_episode_and_every_id_is_exact(
    program: Program, tmp_path: Path, demo_model_folder: Path
) -> None:
    engine = respelling(in_order(*program.says()), demo_model_folder)
    played = await play_program(program.argv, engine, tmp_path)
    await assert_good(played, engine, demo_model_folder)
    assert played.verdicts == [*program.verdicts]
    assert {request.form for request in played.requests} == {program.form}
    assert played.tolerated() == program.tolerated
    # Requests beside the task are recorded but not trained, and their agent is never `main`.
    assert [thread.trained for thread in played.threads].count(False) == program.asides
    assert len(played.trajectories) == 1
    assert played.main.turns[0].reasoning.strip() == "Where am I?"
    assert [len(turn.tool_calls) for turn in played.main.turns][:2] == [2, 1]
    assert_appends(played.main)

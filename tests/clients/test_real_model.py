"""Programs with requests small enough for the demo model, on the real engine."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread
import pytest

from runner import Limits, Outcome, Sampling
from runner.engines.vllm.engine import VllmEngine
from runner.testing import assert_exact
from tests.clients.playing import assert_appends, assert_trained_once, play_program
from tests.clients.programs import PROGRAMS
from tests.verifying import verify

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mini-swe-agent", marks=pytest.mark.client("mini-swe-agent")),
        pytest.param("pi", marks=pytest.mark.client("pi")),
    ],
)
async def test_a_program_plays_with_a_real_model_and_every_id_is_exact(
    name: str, tmp_path: Path, engine: VllmEngine
) -> None:
    # A model of this size calls no tool by itself. The constraint leaves it a choice of commands and words.
    calls = r'[A-Z][a-z ]{0,20}\[bash\(command="(ls|pwd|echo [a-z]{1,9})"\)\]'
    played = await play_program(
        PROGRAMS[name].argv,
        engine,
        tmp_path,
        sampling=Sampling(max_tokens=64, regex=calls),
        limits=Limits(turns=3),
        seed=1,
    )
    (trajectory,) = played.trajectories
    assert (trajectory.outcome, trajectory.error) == (Outcome.TURN_LIMIT, ""), played.in_words()
    assert [len(turn.tool_calls) for turn in trajectory.turns] == [1, 1, 1], played.in_words()
    assert played.verdicts[:3] == ["new", "append", "append"]
    assert_exact(trajectory, engine)
    assert_trained_once(trajectory)
    assert_appends(trajectory)
    result = await anyio.to_thread.run_sync(verify, played.file)
    assert result.exit_code == 0, result.output

"""Loops that use OpenAI's and Anthropic's libraries play an episode; environment variables contain the URL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.testing import Reply, call
from tests.clients.playing import PROMPT, assert_appends, assert_good, in_order, play_program, respelling
from tests.clients.programs import SCRIPTS

pytestmark = [pytest.mark.anyio, pytest.mark.sample_cases(5), pytest.mark.slow, pytest.mark.asyncio_alone]


@pytest.mark.parametrize(
    ("form", "streams"), [("chat", "whole"), ("chat", "stream"), ("responses", "stream"), ("messages", "stream")]
)
async def test_library_of_a_provider_plays_an_exact_episode(
    form: str, streams: str, tmp_path: Path, demo_model_folder: Path
) -> None:
    says = in_order(
        Reply(
            "<think>Where am I? </think>Let me look.",
            calls=[call("bash", command="pwd"), call("bash", command="ls")],
        ),
        Reply("Now I write.", calls=[call("bash", command="echo hello > hello.txt")]),
        "It holds hello.",
    )
    engine = respelling(says, demo_model_folder)
    argv = [sys.executable, str(SCRIPTS / "sdk.py"), form, streams, PROMPT]
    played = await play_program(lambda _: argv, engine, tmp_path)
    await assert_good(played, engine, demo_model_folder)
    assert played.finished is not None
    assert played.finished.stdout == "It holds hello.\n"
    assert played.verdicts == ["new", "append", "append"]
    assert played.tolerated() <= {"extra_keys"}, played.in_words()
    assert played.main.turns[0].reasoning.strip() == "Where am I?"
    assert_appends(played.main)

"""smolagents' agent that calls tools by Python code: it offers no tools, and rewrites its history in other words."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.engines.scripted.script import ModelCall
from tests.clients.installing import CLIENTS
from tests.clients.playing import PROMPT, assert_good, play_program, respelling
from tests.clients.programs import SCRIPTS

pytestmark = [pytest.mark.anyio, pytest.mark.client("smolagents")]

CODE = [
    "Thought: I look.\n<code>\nprint(bash('pwd'), bash('ls'))\n</code>",
    "Thought: I write.\n<code>\nprint(bash('echo hello > hello.txt'))\n</code>",
    "Thought: it is done.\n<code>\nfinal_answer('It holds hello.')\n</code>",
]


async def test_an_agent_that_writes_code_is_trained_where_that_is_asked_for(
    tmp_path: Path, demo_model_folder: Path
) -> None:
    def says(asked: ModelCall) -> str:
        return CODE[min(asked.turn, 2)]

    engine = respelling(says, demo_model_folder)
    argv = [CLIENTS["smolagents"].program("python"), str(SCRIPTS / "smolagents_code.py"), PROMPT]
    played = await play_program(lambda _: argv, engine, tmp_path, serve={"train": True})
    await assert_good(played, engine, demo_model_folder)
    assert played.verdicts == ["new", "retold", "retold"]

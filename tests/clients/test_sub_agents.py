"""Sub-agents of real programs, in parallel from the same prompt: each turn is in a thread of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import ToolCall
from runner.engines.scripted.script import Answer, ModelCall
from runner.testing import Latency, Reply, call
from tests.clients.playing import PROMPT, ProgramEpisode, assert_appends, assert_good, play_program, respelling
from tests.clients.programs import PROGRAMS, Program

pytestmark = pytest.mark.anyio

ERRAND = "Look which files there are, and tell me."

SENDS: dict[str, Callable[[], ToolCall]] = {
    "claude": lambda: call(
        "Agent", description="Look", prompt=ERRAND, subagent_type="general-purpose", run_in_background=False
    ),
    "codex": lambda: call("multi_agent_v1__spawn_agent", message=ERRAND),
    "opencode": lambda: call("task", description="Look", prompt=ERRAND, subagent_type="general"),
    "qwen": lambda: call("agent", description="Look", prompt=ERRAND, subagent_type="general-purpose"),
}
"""For each program, the call that starts a sub-agent."""


def param(name: str) -> Any:
    return pytest.param(name, id=name, marks=pytest.mark.client(PROGRAMS[name].client))


def saying(program: Program, send: Callable[[], ToolCall]) -> Callable[[ModelCall], Answer]:
    first: dict[str, int] = {}

    def says(asked: ModelCall) -> Answer:
        if "<tools>" not in asked.prompt:
            return "A short title"
        said = asked.prompt.count("<|im_start|>assistant")
        turn = said - first.setdefault(asked.agent, said)
        if PROMPT not in asked.prompt:
            return Reply("I look.", calls=[program.shell("ls")]) if turn == 0 else "There are none."
        sent = re.findall(r"agent_id\W+([0-9a-f-]{36})", asked.prompt)
        waits = [Reply("I wait.", calls=[call("multi_agent_v1__wait_agent", targets=sent)])] if sent else []
        writes = Reply("Now I write.", calls=[program.shell("echo hello > hello.txt")])
        main: list[Answer] = [Reply("I send two.", calls=[send(), send()]), *waits, writes]
        return main[turn] if turn < len(main) else "It holds hello."

    return says


async def play(name: str, tmp_path: Path, model: Path) -> ProgramEpisode:
    program = PROGRAMS[name]
    engine = respelling(saying(program, SENDS[name]), model, tick=0.002, latency=Latency(first=20))
    played = await play_program(program.argv, engine, tmp_path)
    await assert_good(played, engine, model)
    said = [turn.text for turn in played.main.turns if turn.text != "I wait."]
    assert said == ["I send two.", "Now I write.", "It holds hello."]
    assert played.verdicts == ["new", *["append"] * (len(played.main.turns) - 1)]
    for each in played.trajectories:
        assert_appends(each)
    return played


@pytest.mark.parametrize("name", [param("claude"), param("codex"), param("opencode")])
async def test_equal_sub_agents_have_a_thread_each(name: str, tmp_path: Path, demo_model_folder: Path) -> None:
    played = await play(name, tmp_path, demo_model_folder)
    others = [each for each in played.trajectories if each.agent != "main"]
    assert [[request.verdict for request in each.requests] for each in others] == [["new", "append"]] * 2
    first, second = ([*each.turns[0].prompt_ids] for each in others)
    assert first == second, "both sub-agents have the same prompt"


@pytest.mark.parametrize("name", [param("qwen")])
async def test_unnamed_equal_sub_agents_share_a_thread_without_duplicates(
    name: str, tmp_path: Path, demo_model_folder: Path
) -> None:
    played = await play(name, tmp_path, demo_model_folder)
    (others,) = (each for each in played.trajectories if each.agent != "main")
    assert [turn.text for turn in others.turns] == ["I look.", "There are none."] * 2
    assert [request.verdict for request in others.requests] == ["new", "append", "again", "append"]
    assert [request.parent_turn for request in others.requests] == [None, 0, None, 2]

"""Whole episodes with tools on published templates: two rounds, parallel calls, a malformed call, thoughts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import Run, ScriptedEngine
from runner.testing import Reply, assert_exact, call
from tests.parsing.families import TEMPLATES, Family, Library, assert_played, family, played
from tests.parsing.many_tools import MANY_TOOLS, ManyTools
from tests.verifying import verify

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", TEMPLATES)
async def test_two_rounds_with_parallel_calls_a_malformed_one_and_thoughts(name: str, tmp_path: Path) -> None:
    of = family(name)
    said = played(of.form, *of.stop_ids)
    path = tmp_path / "run.db"
    async with Run(Library, of.scripted(said.replies), file=path) as run:
        (trajectory,) = [each async for each in run]
    assert_played(trajectory, said, of.form)
    result = verify(path)
    assert result.exit_code == 0, result.output


MANY = ("Qwen3", "Qwen3-Coder", "Llama 3.1", "Gemma 4", "Olmo 3", "DeepSeek V3.2", "Kimi K2", "Command A", "gpt-oss")


def calling_many(of: Family) -> ScriptedEngine:
    """Calls tools whose names begin other tools' names, then answers."""
    assert of.form.calls is not None
    stop, call_stop = of.stop_ids
    close = of.form.reasoning.close if of.form.reasoning and of.form.reasoning.opened_by_prompt else ""
    numbers = (7, 77, 177) if of.form.calls.between else (7,)
    calls = tuple(call(f"look_up_{number}", query=f"number {number}", kind="old") for number in numbers)
    last = call("look_up_199", query="the last", limit=1, exact=False)
    return of.scripted(
        [
            Reply(close, calls=calls, stop=call_stop),
            Reply(close, calls=(last,), stop=call_stop),
            Reply(f"{close}Done.", stop=stop),
        ]
    )


@pytest.mark.parametrize("name", MANY)
async def test_an_episode_with_two_hundred_tools(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    async with Run(ManyTools, calling_many(family(name)), file=path) as run:
        (trajectory,) = [each async for each in run]
    assert trajectory.reward == 1, trajectory.error
    assert_exact(trajectory)
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results[0] == "7: 3 old things about number 7"
    assert results[-1] == "199: 1 new things about the last"
    assert {each.error for turn in trajectory.turns for each in turn.tool_calls} == {None}
    result = verify(path)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", MANY)
async def test_the_grammar_of_two_hundred_required_tools_is_built_once(name: str) -> None:
    class Requiring(ManyTools):
        async def rollout(self, conversation: Any) -> None:
            for _ in range(2):
                turn = await conversation.generate(tool_choice="required")
                conversation.add(*await conversation.call_tools(turn))

    of = family(name)
    grammars = []
    for _ in range(2):
        async with Run(Requiring, calling_many(of), group_size=2) as run:
            async for trajectory in run:
                assert trajectory.outcome.scored, trajectory.error
                grammars += [turn.constraint.value for turn in trajectory.turns if turn.constraint is not None]
    assert len(grammars) == 8
    # One object: no turn of any episode of any run made another one.
    assert all(grammar is grammars[0] for grammar in grammars)
    assert all(tool.name in grammars[0] for tool in MANY_TOOLS)

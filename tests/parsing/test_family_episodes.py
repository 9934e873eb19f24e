"""Episodes with tools on published templates: two rounds, parallel calls, a malformed call, reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import Run, Sampling, ScriptedEngine
from runner.testing import Reply, assert_exact, call
from tests import sweeps
from tests.parsing.families import TEMPLATES, Family, Library, assert_played, family, played
from tests.parsing.many_tools import MANY_TOOLS, ManyTools, arguments_of
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.sample_cases(5), pytest.mark.slow]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_two_rounds_with_calls_of_every_kind_are_verified(name: str, tmp_path: Path) -> None:
    of = family(name)
    said = played(of.form, *of.stop_ids)
    path = tmp_path / "run.db"
    async with Run(Library, of.scripted(said.replies), file=path) as run:
        (trajectory,) = [each async for each in run]
    assert_played(trajectory, said, of.form)
    result = verify(path)
    assert result.exit_code == 0, result.output


MANY = ("Qwen3", "Qwen3-Coder", "Llama 3.1", "Gemma 4", "Olmo 3", "DeepSeek V3.2", "Kimi K2", "Command A", "gpt-oss")


def calling_many(of: Family) -> tuple[list[int], ScriptedEngine]:
    """Return replies that call tools whose names are prefixes of others and then answer, and these tools' numbers."""
    assert of.form.calls is not None
    stop, call_stop = of.stop_ids
    close = of.form.reasoning.close if of.form.reasoning and of.form.reasoning.opened_by_prompt else ""
    first = (1, 17, 177) if of.form.calls.between else (17,)
    calls = [
        Reply(close, calls=tuple(call(f"act_{number}", **arguments_of(number)) for number in turn), stop=call_stop)
        for turn in (first, (199,))
    ]
    answer = Reply(f"{close}{of.form.content.open}Done.", stop=stop)
    return [*first, 199], of.scripted([*calls, answer])


@pytest.mark.parametrize("name", sweeps.part(MANY, 3))
async def test_episode_with_two_hundred_tools_calls_the_right_ones(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    numbers, engine = calling_many(family(name))
    async with Run(ManyTools, engine, file=path, sampling=Sampling(max_tokens=4096)) as run:
        (trajectory,) = [each async for each in run]
    assert trajectory.reward == 1, trajectory.error
    assert_exact(trajectory)
    calls = [each for turn in trajectory.turns for each in turn.tool_calls]
    assert [(each.name, each.arguments, each.error) for each in calls] == [
        (f"act_{number}", arguments_of(number), None) for number in numbers
    ]
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert [int(str(result).partition(" did ")[0]) for result in results] == numbers
    result = verify(path)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", sweeps.part(MANY, 3))
async def test_the_grammar_of_two_hundred_required_tools_is_built_once(name: str) -> None:
    class Requiring(ManyTools):
        async def rollout(self, conversation: Any) -> None:
            for _ in range(2):
                turn = await conversation.generate(tool_choice="required")
                conversation.add(*await conversation.call_tools(turn))

    of = family(name)
    grammars = []
    for _ in range(2):
        async with Run(Requiring, calling_many(of)[1], group_size=2, sampling=Sampling(max_tokens=4096)) as run:
            async for trajectory in run:
                assert trajectory.outcome.scored, trajectory.error
                grammars += [turn.constraint.value for turn in trajectory.turns if turn.constraint is not None]
    assert len(grammars) == 8
    # They are one object, so no turn of any episode built another grammar.
    assert all(grammar is grammars[0] for grammar in grammars)
    assert all(tool.name in grammars[0] for tool in MANY_TOOLS)

"""Whole episodes with tools on the published templates of many families: rounds, parallel calls, a malformed one, thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner import Environment, Run, Task, Trajectory, reward, tool
from runner.parsing.learnt import learnt_turn
from runner.parsing.turn_format import TurnFormat
from runner.testing import Reply, ScriptedEngine, assert_exact, call
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.conformance.corpus import control_tokens
from tests.tokens.families import FAMILIES, call_stop, model
from tests.verifying import verify

pytestmark = pytest.mark.anyio

HARD = 'a "quoted" word,\nit\'s <b>bold</b> & {braces} \\'
PLAYED = sorted(name for name in FAMILIES if name not in ("gpt-oss",))


class Library(Environment):
    """Asks for two rounds of look-ups."""

    def tasks(self) -> list[Task]:
        return [Task("Where is it?")]

    @tool
    def look_up(self, query: str, limit: int = 3) -> str:
        """Look something up.

        Args:
            query: what to look for.
            limit: how much at most.
        """
        return f"{limit} things about {query!r}"

    @tool
    def refresh(self, hard: bool = False) -> str:
        """Read everything again.

        Args:
            hard: whether really everything.
        """
        return f"refreshed {hard}"

    @reward
    def done(self) -> bool:
        return self.episode.text == "Done."


@dataclass(frozen=True)
class Script:
    """What the model says, and what must have been read of it."""

    replies: list[Reply]
    read: list[tuple[str, list[tuple[str, Mapping[str, Any]]]]]


def script(form: TurnFormat) -> Script:
    assert form.calls is not None
    thought = ""
    if form.reasoning is not None:
        thought = f"{'' if form.reasoning.opened_by_prompt else form.reasoning.open}Hm.{form.reasoning.close}"
    first, second = ("look_up", {"query": HARD, "limit": 2}), ("refresh", {"hard": True})
    both = [first, second] if form.calls.between is not None else [second]
    begun = (form.calls.trigger or f"{form.calls.begin}look_up") + "("
    turns: list[tuple[str, list[tuple[str, Any]]]] = [("", [first]), ("", both), ("", [])]
    replies = [Reply(thought, calls=tuple(call(name, **arguments) for name, arguments in turn[1])) for turn in turns[:2]]
    replies += [Reply(f"{thought}{begun}"), Reply(f"{thought}Done.")]
    return Script(replies, turns)


@pytest.mark.parametrize("name", PLAYED)
async def test_two_rounds_with_parallel_a_malformed_call_and_thoughts(name: str, tmp_path: Path) -> None:
    family, made = FAMILIES[name], model(name)
    names = dict.fromkeys((*control_tokens(made.template.text), *family.further, *family.stops))
    tokenizer = ByteTokenizer(list(names))
    stops = tuple(tokenizer.encode(stop)[0] for stop in family.stops)
    form = learnt_turn(made.renderer).format
    said = script(form)
    engine = ScriptedEngine(said.replies, template=made.template, tokenizer=tokenizer, stop_ids=stops)
    path = tmp_path / "run.db"
    async with Run(Library, engine, file=path) as run:
        (trajectory,) = [each async for each in run]
    check(trajectory, said, form)
    result = verify(path)
    assert result.exit_code == 0, result.output


def check(trajectory: Trajectory, said: Script, form: TurnFormat) -> None:
    assert trajectory.outcome.scored, trajectory.error
    assert trajectory.reward == 1
    assert_exact(trajectory)
    turns = trajectory.turns
    for turn, (_, calls) in zip(turns[:2], said.read, strict=False):
        assert [(each.name, each.arguments) for each in turn.tool_calls] == calls
        assert all(each.error is None for each in turn.tool_calls)
    (malformed,) = turns[2].tool_calls
    assert malformed.error is not None
    assert [turn.reasoning for turn in turns] == ["Hm." if form.reasoning else ""] * 4

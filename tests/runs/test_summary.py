"""The summary of a run, and its display."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner import Concurrency, Conversation, Run, RunFile, reward, run, tool
from runner.cli.display import live_view
from runner.cli.report import summary_table
from runner.runs.live_stats import StatsReader, in_words
from runner.runs.summary import Summary
from runner.testing import ScriptedEngine
from tests.playing import Plain, recording, tasks


class Duel(Plain):
    """Environment with two trained agents, each with its own reward."""

    async def rollout(self, conversation: Conversation) -> None:
        black = self.episode.conversation("black", prompt="You are black.", train=True)
        await conversation.generate()
        await black.generate()
        await self.episode.conversation("crowd", prompt="Look!").generate()

    @reward
    def correct(self) -> dict[str, float]:
        return {"main": 1.0, "black": -0.5}


class Judged(Plain):
    @reward
    def correct(self) -> bool:
        raise ConnectionError("503")


def printed(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()


def test_unscored_runs_never_show_a_reward_of_zero(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    summary = run(Judged, ScriptedEngine("Yes"), tasks=tasks(3), breaker=1, file=file, quiet=True)
    assert f"{summary.outcomes} {summary.reward.mean}" == "Counter({<Outcome.ENV_ERROR: 'env_error'>: 3}) nan"
    with RunFile(file) as stored:
        kept = stored.summary()
    for document in (summary.as_dict(), kept):
        assert json.loads(json.dumps(document, allow_nan=False))["reward"]["mean"] is None
        assert re.search(r"^reward +no episode scored", printed(summary_table(document)), re.MULTILINE)


@pytest.mark.anyio
async def test_trained_agents_keep_separate_means_after_resuming(tmp_path: Path) -> None:
    for _ in range(2):  # in the second run, everything is in the file
        async with Run(Duel, recording(lambda turn: "e4"), tasks=tasks(3), file=tmp_path / "run.db") as duels:
            async for _trajectory in duels:
                pass
        summary = duels.summary
        assert {agent: (mean.mean, mean.count) for agent, mean in summary.agents.items()} == {
            "main": (1.0, 3),
            "black": (-0.5, 3),
        }
        assert (summary.episodes, summary.turns, summary.reward.mean) == (3, 9, 1.0)
        table = printed(summary_table(summary.as_dict()))
        assert re.search(
            r"^reward of main +1\.000.*\n  correct +1\.000.*\nreward of black +-0\.500", table, re.MULTILINE
        )
        stats = StatsReader().read(duels)
        assert "mean reward of main 1.000" in list(in_words(stats))
        assert "reward of main 1.000" in printed(live_view(stats, "duel", width=80, height=20))


@pytest.mark.anyio
async def test_no_time_is_left_once_all_episodes_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.runs.live_stats.TIME_LEFT_INTERVAL_SECONDS", 0.0)
    reader, left = StatsReader(), []
    async with Run(Plain, ScriptedEngine("Yes"), tasks=tasks(12), concurrency=Concurrency(episodes=2)) as run:
        left += [reader.read(run, total=12).left async for _ in run]
        assert any(left), "the entry was an estimate before"
        assert reader.read(run, total=12).left is None


def test_single_trained_agent_is_shown_without_its_name() -> None:
    summary = run(Plain, ScriptedEngine("Yes"), quiet=True)
    assert list(summary.agents) == ["main"]
    assert re.search(r"^reward +1\.000", printed(summary_table(summary.as_dict())), re.MULTILINE)
    assert "no episode scored" in printed(summary_table(Summary().as_dict()))


@pytest.mark.anyio
async def test_replacing_the_prompt_before_the_first_turn_never_forks() -> None:
    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            conversation.replace("Something else?", tools=[])
            await conversation.generate()
            conversation.replace("Once more?")
            await conversation.generate()

    async with Run(Foreign, recording(lambda turn: "Yes")) as foreign:
        (trajectory,) = [t async for t in foreign]
    assert [segment.cause for segment in trajectory.segments] == ["start", "environment"]
    first, second = (turn.junction for turn in trajectory.turns)
    assert (first, second is not None) == (None, True)
    assert sum(foreign.summary.junctions.values()) == foreign.summary.junction_causes["environment"] == 1


class Adding(Plain):
    @tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b


def test_many_unreadable_calls_suggest_another_template() -> None:
    replies = ["[add(a=1, b=", "[add(a=1, ", "[add(a=1, b=2)]", "[add(", "Done."]
    summary = run(Adding, ScriptedEngine(replies))
    assert (summary.calls, summary.malformed_calls) == (4, 3)
    assert "4, 3 of them could not be read" in printed(summary_table(summary.as_dict()))
    assert "(--template)" in printed(summary_table(summary.as_dict()))
    few = run(Adding, ScriptedEngine(["[add(a=1, b=", "[add(a=1, b=2)]", "Done."]))
    assert "2, 1 of them could not be read" in printed(summary_table(few.as_dict()))
    assert "(--template)" not in printed(summary_table(few.as_dict()))

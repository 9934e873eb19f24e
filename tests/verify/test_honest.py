"""An unchanged file passes `verify` after any kind of run: no stage reports a false error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from runner import Conversation, Group, Limits, Outcome, Run, RunFile, Sampling, group_reward, metric, reward
from runner.options import Concurrency
from runner.testing import Fault, Reply, ScriptedEngine, call
from tests.playing import Plain, tasks
from tests.verifying import verdict

pytestmark = pytest.mark.anyio


ONE = Concurrency(episodes=1)


class Busy(Plain):
    """Environment with episodes of several kinds, by the number of the task. Episodes in `broken` fail."""

    broken: frozenset[str] = frozenset()

    async def rollout(self, conversation: Conversation) -> None:
        rival = self.episode.conversation("rival", prompt="You are the rival.", train=True)
        conversation.replace("Replaced before the first turn.")
        await conversation.generate()
        if self.task.id == "t0":
            conversation.replace("Another past.")
        conversation.add("Continue.")
        if self.episode.id in self.broken:
            raise ValueError("broken")
        await conversation.generate(sampling=Sampling(max_tokens=2))
        if self.task.id != "t1":
            await rival.generate()
        await self.episode.conversation("critic", prompt="Well?").generate()
        conversation.add("No turn follows this.")

    @reward
    def correct(self) -> Any:
        return None if self.task.id == "t2" else 1 / 3

    @reward(weight=0.7)
    def brief(self) -> float:
        return 0.1

    @metric
    def length(self) -> float:
        return len(self.episode.text)


class Compared(Busy):
    @group_reward(weight=0.2)
    def rank(self, group: Group) -> list[float]:
        return [trajectory.index / 3 for trajectory in group.trajectories]


class Mended(Busy):
    broken = frozenset({"t0#0", "t3#1"})


def engine(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda turn: "Yes, it is so.", **settings)


async def honest(file: Path) -> dict[str, Any]:
    report = await anyio.to_thread.run_sync(verdict, file)
    assert (report["verified"], report["difference"], report["error"]) == (True, None, None)
    assert report["trajectories"] > 0
    return report


async def played(run: Run) -> list[str]:
    async with run:
        return [trajectory.id async for trajectory in run]


async def whole(file: Path) -> None:
    await played(Run(Busy, engine(), tasks=tasks(4), group_size=2, file=file))


async def compared(file: Path) -> None:
    await played(Run(Compared, engine(), tasks=tasks(4), group_size=3, file=file))


async def weighed_anew(file: Path) -> None:
    await played(Run(Compared, engine(), tasks=tasks(4), weights={"brief": 0.0, "rank": -2.5}, file=file))


async def half_a_group(file: Path) -> None:
    await played(Run(Compared, engine(), tasks=tasks(3), group_size=3, indices=[1], file=file))
    await honest(file)
    await played(Run(Compared, engine(), tasks=tasks(3), group_size=3, file=file))


async def left_early(file: Path) -> None:
    async with Run(Compared, engine(), tasks=tasks(8), group_size=2, file=file) as run:
        async for _trajectory in run:
            break
    await honest(file)
    async with Run(Compared, engine(), tasks=tasks(8), group_size=2, file=file) as run:
        run.drain()
    await honest(file)
    await played(Run(Compared, engine(), tasks=tasks(8), group_size=2, file=file))


async def cut_in_a_turn(file: Path) -> None:
    silent = engine(faults=lambda ask: Fault.stall(at=2) if ask.episode == "t1#0" else None)
    async with Run(Busy, silent, tasks=tasks(2), file=file) as run:
        async for _trajectory in run:
            await anyio.wait_all_tasks_blocked()
            run.cancel()
    with RunFile(file) as stored:
        assert Outcome.CANCELLED in stored.outcomes()
    await honest(file)
    await played(Run(Busy, engine(), tasks=tasks(2), file=file))


async def failing_engine(file: Path) -> None:
    flaky = engine(faults={n: Fault.error(at=n % 3) for n in range(0, 30, 3)})
    await played(Run(Compared, flaky, tasks=tasks(4), group_size=2, file=file, breaker=1, retries=1))
    await honest(file)
    await played(Run(Compared, engine(), tasks=tasks(4), group_size=2, file=file))


async def played_again(file: Path) -> None:
    Mended.broken = frozenset({"t0#0", "t3#1"})
    options: dict[str, Any] = {"tasks": tasks(4), "group_size": 2, "file": file}
    await played(Run(Mended, engine(), **options))
    await honest(file)
    Mended.broken = frozenset({"t3#1"})
    async with Run(Mended, engine(), retry_failed=True, **options) as run:
        run.drain()
    await honest(file)
    for again in (True, False):
        await played(Run(Mended, engine(), retry_failed=again, **options))
        await honest(file)


async def too_old(file: Path) -> None:
    class Updated(Busy):
        left = 3

        async def rollout(self, conversation: Conversation) -> None:
            await super().rollout(conversation)
            if Updated.left:
                Updated.left -= 1
                await scripted.update_weights(None)

    scripted = engine()
    await played(Run(Updated, scripted, tasks=tasks(3), max_version_lag=0, file=file))
    with RunFile(file) as stored:
        assert list(stored.rows(superseded=True))


async def limited(file: Path) -> None:
    for name, limits in (("turns", Limits(turns=1)), ("tokens", Limits(tokens=5)), ("context", Limits(context=80))):
        part = file.with_name(f"{name}.db")
        run = Run(Busy, engine(), tasks=tasks(3), limits=limits, file=part, breaker=1)
        await played(run)
        assert run.summary.outcomes[Outcome(f"{name.removesuffix('s')}_limit")]
        await honest(part)
    file.with_name("turns.db").rename(file)


async def nobody_speaks(file: Path) -> None:
    class Broken(Busy):
        def setup(self) -> None:
            raise ValueError("broken")

    await played(Run(Broken, engine(), tasks=tasks(2), group_size=2, file=file, breaker=1))


async def without_logprobs(file: Path) -> None:
    await played(Run(Busy, engine(logprobs=False), tasks=tasks(2), file=file))


async def elsewhere(file: Path) -> None:
    calls = ScriptedEngine([Reply("Yes", finish="length"), "Well"], logprobs=False)
    await played(Run(Busy, engine(), engines={"critic": calls}, tasks=tasks(1), file=file))


async def with_tools(file: Path) -> None:
    from envs.calculator import Calculator

    said: list[Any] = [call("multiply", a=6, b=7), "It is 42"]
    await played(Run(Calculator(questions=3), ScriptedEngine(said * 3), concurrency=ONE, file=file))


RUNS: list[Callable[[Path], Awaitable[None]]] = [
    whole,
    compared,
    weighed_anew,
    half_a_group,
    left_early,
    cut_in_a_turn,
    failing_engine,
    played_again,
    too_old,
    limited,
    nobody_speaks,
    without_logprobs,
    elsewhere,
    with_tools,
]


@pytest.mark.sample_cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
async def test_untouched_file_has_no_findings(run: Any, tmp_path: Path) -> None:
    await run(tmp_path / "run.db")
    await honest(tmp_path / "run.db")

"""Engines of other agents on a fleet: the processes that enter them, and a run's data on engines elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import BadModel, BadOption, ChatEngine, Outcome, Run, RunFile
from runner.runs.live_stats import StatsReader
from runner.testing import ScriptedEngine, VirtualClock
from tests.cluster.playing import Dice, Judged, compared, dice_engine, fleet, played
from tests.playing import until

pytestmark = pytest.mark.anyio

ENTERED: list[int] = []
"""Identities of the judge objects that were entered."""


@pytest.fixture(autouse=True)
def _none_entered() -> None:
    ENTERED.clear()


class Judge(ScriptedEngine):
    async def __aenter__(self) -> Any:
        ENTERED.append(id(self))
        return await super().__aenter__()


class Unread(Judge):
    async def __aenter__(self) -> Any:
        raise BadModel("There is no model folder '/models/judge'.")


class Slow(Judge):
    async def __aenter__(self) -> Any:
        await anyio.sleep(100)
        return await super().__aenter__()


async def test_workers_enter_other_agents_engines_and_the_driver_does_not() -> None:
    judge = Judge("Fine.")
    async with fleet(3) as (engine, _):
        got = await played(Judged, engine, engines={"judge": judge, "jury": judge})
    assert {each.outcome for each in got} == {Outcome.COMPLETED}
    assert len(ENTERED) == 3
    assert id(judge) not in ENTERED
    assert not judge.running


async def test_header_is_the_same_for_engines_on_workers(tmp_path: Path) -> None:
    def engines() -> Any:
        api = ChatEngine("a-model", base_url="http://127.0.0.1:1/v1", api_key="none")
        return {"judge": dice_engine(template="hermes", context=600), "jury": api}

    alone = compared(await played(Judged, dice_engine(), engines=engines(), file=tmp_path / "alone.db"))
    async with fleet(2) as (engine, _):
        on_two = await played(Judged, engine, engines=engines(), file=tmp_path / "two.db")
    assert compared(on_two) == alone
    with RunFile(tmp_path / "alone.db") as one, RunFile(tmp_path / "two.db") as two:
        assert two.header.engines == one.header.engines


async def test_figures_are_read_while_workers_have_other_engines() -> None:
    async with fleet(2) as (engine, _), Run(Judged, engine, engines={"judge": Judge("Fine.")}) as run:
        async for _ in run:
            pass
        assert StatsReader().read(run).done == 8


@pytest.mark.parametrize("workers", [None, 2])
async def test_agent_that_no_episode_opened_is_reported(workers: int | None) -> None:
    engines = {"judge": Judge("Fine."), "jury": Judge("Fine.")}

    async def play(engine: Any) -> list[str]:
        async with Run(Judged, engine, engines=engines) as run:
            async for _ in run:
                pass
        return list(run.summary.faults)

    if workers is None:
        faults = await play(dice_engine())
    else:
        async with fleet(workers) as (engine, _):
            faults = await play(engine)
    assert faults == ["engines: agent 'jury' never had a turn"]


async def test_failed_start_on_a_worker_ends_the_start_and_names_it() -> None:
    async with fleet(2) as (engine, _):
        with pytest.raises(BadModel, match=r"^There is no model folder '/models/judge'\. \(worker \d on [^ ]+\)$"):
            await played(Judged, engine, engines={"judge": Unread("Fine.")})


async def test_workers_leave_other_engines_after_a_run_or_a_failed_start(tmp_path: Path) -> None:
    def fails(_: Any) -> Path:
        raise BadOption("no name for this run")

    async with fleet(2) as (engine, launcher), engine:
        await played(Judged, engine, engines={"judge": Judge("Fine.")})
        with pytest.raises(BadOption, match="no name"):
            await played(Judged, engine, engines={"judge": Judge("Fine.")}, file=fails)
        await until(lambda: not any(worker.worker._runs for worker in launcher.alive))
        assert len(await played(Dice, engine)) == 8, "the workers play the next run"
    assert len(ENTERED) == 4


def test_worker_that_dies_while_other_engines_start_is_replaced() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:

            async def kill() -> None:
                await anyio.sleep(50)
                launcher.workers[0].kill()

            launcher.group.start_soon(kill)
            got = await played(Judged, engine, engines={"judge": Slow("Fine.")})
            assert {each.outcome for each in got} == {Outcome.COMPLETED}
            assert engine.driver.lost_count == 1
            assert anyio.current_time() < 250

    VirtualClock().run(run)

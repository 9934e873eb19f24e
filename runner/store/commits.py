"""The writer's thread: packs what waits, commits it in one transaction, and wakes all who wait with one call."""

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
from runner.errors import StorageFailed
from runner.store.batch import Batch, Packer
from runner.store.claims import UNSUCCEEDED
from runner.store.columns import encode_text
from runner.store.database import storage_failed, transaction
from runner.store.json_values import encode_json
from runner.trajectory import Trajectory

__all__ = ["Commit", "CommitThread", "episode_commit", "finish_commit", "reward_commit"]

GROUP_TOKENS: Final = 4_000_000
"""Token ids that one transaction takes at most, so that memory does not follow a burst."""

GATHER_SECONDS: Final = 0.005
"""From the beginning of one transaction to that of the next at least, so that episodes which end one by one on a busy
loop still share transactions; one that ends alone is committed at once."""


class Commit:
    """Something to be committed, and how that ended.

    Args:
        pack: adds its statements to a batch; called in the writer's thread.
        tokens: the number of token ids that it holds, by which transactions are kept small.
    """

    def __init__(self, pack: Callable[[Batch, Packer], None], *, tokens: int = 0) -> None:
        self.pack = pack
        self.tokens = tokens
        self.done = anyio.Event()
        """Set on the event loop when it is committed, or has failed."""
        self.error: StorageFailed | None = None
        """Why it is not in the file; None where it is."""


def episode_commit(trajectories: Sequence[Trajectory], *, retry: bool) -> Commit:
    """The trajectories of one episode, an attempt that is superseded or one that supersedes those before."""

    def pack(batch: Batch, packer: Packer) -> None:
        for trajectory in trajectories:
            packer.add(batch, trajectory, superseded=retry)
        first = trajectories[0]  # all agents of an episode share what is asked of it here
        task = encode_text(first.task.id), first.visit
        if first.attempt:
            batch.update(_SUPERSEDE, *task, first.index, first.attempt)
        # In a run that began with this file no group is scored before its last episode. A resumed run adds episodes to
        # groups that were, and to runs that were complete.
        if packer.resumed:
            batch.update("UPDATE tasks SET group_scored = 0 WHERE id = ? AND visit = ? AND group_scored", *task)
            batch.update("UPDATE run SET complete = 0, summary = NULL WHERE complete")

    return Commit(pack, tokens=sum(len(segment.log) for each in trajectories for segment in each.segments))


_SUPERSEDE: Final = """
    UPDATE episodes SET superseded = 1
    WHERE task_id = ? AND visit = ? AND group_index = ? AND attempt < ? AND NOT superseded
"""


def reward_commit(trajectories: Sequence[Trajectory]) -> Commit:
    """The rewards of one task's trajectories, after those of its group are known."""

    def pack(batch: Batch, packer: Packer) -> None:
        for each in trajectories:
            rewards, task = (each.reward, encode_json(each.rewards)), (encode_text(each.task.id), each.visit)
            batch.update(_REWARD, *rewards, *task, each.index, encode_text(each.agent), each.attempt)
        for id, visit in {(encode_text(each.task.id), each.visit) for each in trajectories}:
            batch.update("UPDATE tasks SET group_scored = 1 WHERE id = ? AND visit = ?", id, visit)

    return Commit(pack)


_REWARD: Final = """
    UPDATE episodes SET reward = ?, rewards = ?
    WHERE task_id = ? AND visit = ? AND group_index = ? AND agent = ? AND attempt = ?
"""


def finish_commit(summary: Mapping[str, Any], *, complete: bool) -> Commit:
    """The end of a run, and whether anything is left of it to play."""
    return Commit(lambda batch, packer: batch.update(_FINISH, encode_json(summary), int(complete)))


# What is to be played again, and was not since its task was not given, is left to do.
_FINISH: Final = f"UPDATE run SET summary = ?, complete = ? AND NOT EXISTS ({UNSUCCEEDED})"


class CommitThread:
    """Takes commits from the event loop, groups those that wait, and says when they are on disk.

    One transaction for all that waits costs little more than for one, and the loop is woken once for all of them.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, next_key: int, launch: int, resumed: bool
    ) -> None:
        self.transactions = 0
        """The number of transactions that were committed."""
        self.wake_ups = 0
        """How often the event loop was called."""
        self._connection = connection
        self._path = path
        self._packer = Packer(next_key=next_key, launch=launch, resumed=resumed)
        self._queue: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        # A daemon: where the loop died without closing the writer, it must not keep the process.
        self._thread = threading.Thread(target=self._work, name="deltarunner run file", daemon=True)
        self._on_loop: Callable[[Callable[[], object]], object]

    def start(self) -> None:
        """Begin; called on the event loop that is to be told."""
        self._on_loop = soon_on_this_loop()
        self._thread.start()

    def send(self, commit: Commit) -> None:
        """Hand over a commit; called on the event loop, and waits for nothing."""
        self._queue.put(commit)

    def close(self) -> None:
        """Commit what waits, and end."""
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
        while tokens < GROUP_TOKENS:
            try:
                commit = self._queue.get(block=not group)  # the first is waited for, the others are there or not
            except queue.Empty:
                break
            if commit is None:
                return group, False
            group.append(commit)
            tokens += commit.tokens
        return group, True

    def _commit(self, group: list[Commit]) -> None:
        batch = Batch()
        packed = [commit for commit in group if self._pack(commit, batch)]
        if not packed:
            return
        try:
            with transaction(self._connection):
                batch.write(self._connection)
            self.transactions += 1
        except sqlite3.OperationalError as error:
            self._failed(packed, error)  # a full disk or a lock, which is nobody's own: alone each would fail too
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            self._failed(packed, error)
            # Something in one of them cannot be stored; the others have nothing to do with it.
            if len(packed) > 1:
                for commit in packed:
                    commit.error = None
                    self._commit([commit])

    def _pack(self, commit: Commit, into: Batch) -> bool:
        batch = Batch()  # of its own, so that a commit which fails half way leaves no rows among the others'
        try:
            commit.pack(batch, self._packer)
        except Exception as error:  # what is packed holds an author's values, with methods of their own
            self._packer.forget()
            commit.error = StorageFailed(
                f"run file {self._path}: an episode cannot be stored ({type(error).__name__}: {error})."
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
        except RuntimeError:  # the loop is gone; what it sent is committed all the same
            return

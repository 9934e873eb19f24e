"""Feeds a run with tasks: takes them from their source and begins their episodes, as slots become free."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from runner.concurrency.threads import Job
from runner.concurrency.user_code import describe_error
from runner.environment.checks import common_system_prompt
from runner.environment.task_feed import TaskFeed
from runner.episode.hooks import check_system_prompts
from runner.episode.key import EpisodeKey
from runner.episode.shared import RunShared
from runner.errors import BadTask, DeltarunnerError
from runner.messages import as_messages
from runner.runs.group_scoring import GroupScoring
from runner.runs.player import Player
from runner.runs.state import RunState
from runner.store.claims import Claimed
from runner.store.writer import RunWriter
from runner.tasks import Task

__all__ = ["Slots", "TaskFeeder"]


class Slots:
    """As many as there should be episodes in flight; each has one from before its task is asked for until it ends.

    Whoever plays the episodes says how many there are, also while the run plays: workers come and go.
    """

    def __init__(self, player: Player) -> None:
        self.width = 0
        """How many slots there are now."""
        self._taken = 0
        self._one_is_free = anyio.Event()
        player.tell_width(self._set_width)

    async def take(self) -> None:
        """Wait until a slot is free, and take it. One task alone asks for slots."""
        await anyio.lowlevel.checkpoint()  # also where a slot is free: a run that drains begins no further episode
        while self._taken >= self.width:
            self._one_is_free = anyio.Event()
            await self._one_is_free.wait()
        self._taken += 1

    def give_back(self) -> None:
        """Let a further episode begin."""
        self._taken -= 1
        self._one_is_free.set()

    def _set_width(self, width: int) -> None:
        self.width = width
        self._one_is_free.set()


@dataclass(eq=False, kw_only=True)
class TaskFeeder:
    """Begins the episodes of a run, so many at once as there are slots."""

    feed: TaskFeed
    """The source of the tasks."""
    shared: RunShared
    """What all episodes share."""
    writer: RunWriter
    """The run file, which knows what earlier runs finished."""
    scoring: GroupScoring
    """The scoring of groups; it is told how many episodes each will have."""
    state: RunState
    """The state of the run, where a failure ends it."""
    indices: Sequence[int]
    """The episodes of each group that are played."""
    slots: Slots
    """The slots of the episodes in flight."""

    def __post_init__(self) -> None:
        self._given = 0  # tasks

    async def begin_episodes(self, episodes: TaskGroup, play: Callable[[EpisodeKey], Awaitable[None]]) -> None:
        """Begin every episode of every task.

        A task that cannot be had ends the run; what was begun is played to its end.
        """

        async def play_in_slot(key: EpisodeKey) -> None:
            try:
                await play(key)
            finally:
                self.slots.give_back()

        try:
            while True:
                # The slot before the task: a source decides on the next task only when it can be played.
                await self.slots.take()
                task = await self.feed.next()
                if task is None:
                    return
                for number, key in enumerate(await self._episodes_of(task, episodes)):
                    if number:
                        await self.slots.take()
                    episodes.start_soon(play_in_slot, key, name=f"episode {key.id}")
        except DeltarunnerError as error:
            self.state.fail(error)
        except (Exception, SystemExit) as error:
            self.state.fail(BadTask(f"tasks() raised {describe_error(error)}"))

    async def _episodes_of(self, task: Task, episodes: TaskGroup) -> list[EpisodeKey]:
        """The episodes of a task that no earlier run finished; where there is none, its slot is given back."""
        self._check_system_prompt(task)
        claimed = await self._claim(task)
        missing = [index for index in self.indices if index not in claimed.finished]
        if missing:
            self.scoring.open(task, claimed.visit, len(missing))
        else:
            self.slots.give_back()
            if self.scoring.has_rewards and not claimed.group_scored:
                episodes.start_soon(self._score_stored, task, claimed.visit)
        return [
            EpisodeKey(task=task, index=index, visit=claimed.visit, attempt=claimed.attempts.get(index, 0))
            for index in missing
        ]

    async def _claim(self, task: Task) -> Claimed:
        self._given += 1
        position, repeatable = self._given, self.feed.repeatable
        if not self.writer.resumed:
            return self.writer.claim(task, position, repeatable=repeatable)
        # Only what an earlier run left has to be read from the file, which may make the loop wait.
        job = Job(lambda: self.writer.claim(task, position, repeatable=repeatable), "run file")
        claimed: Claimed = await self.shared.workers.call(job)
        return claimed

    async def _score_stored(self, task: Task, visit: int) -> None:
        try:
            await self.scoring.score_stored(task, visit)
        except DeltarunnerError as error:
            self.state.fail(error, cancel=True)

    def _check_system_prompt(self, task: Task) -> None:
        """Refuse a second system prompt before anything is sampled, where that can be known without an episode."""
        environment = self.shared.environment
        system_prompt = common_system_prompt(environment)
        if system_prompt is not None and not environment.overrides("prompt"):
            check_system_prompts(environment, system_prompt, task, as_messages(task.prompt))

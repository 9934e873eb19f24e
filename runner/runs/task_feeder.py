"""The task feeder: it takes tasks from their source and begins their episodes as slots become free."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from runner.concurrency.threads import Job
from runner.concurrency.user_code import describe_error
from runner.environment.checks import common_system_prompt
from runner.environment.task_feed import TaskFeed
from runner.environment.task_requests import TaskRequest, TaskRequests
from runner.episode.hooks import check_system_prompts
from runner.episode.key import EpisodeKey
from runner.episode.shared import RunShared
from runner.errors import BadTask, DeltarunnerError
from runner.messages import as_messages
from runner.runs.group_scoring import GroupScoring
from runner.runs.player import EpisodePlayer
from runner.runs.state import RunState
from runner.store.claims import Claimed
from runner.store.writer import RunWriter
from runner.tasks import Task

__all__ = ["Slots", "TaskFeeder"]


class Slots:
    """Slots of the episodes in flight. A slot is taken before its task is requested, and freed when the episode ends.

    The player sets the number of slots, and changes it as workers come and go.
    """

    def __init__(self, player: EpisodePlayer) -> None:
        self.width = 0
        self._taken = 0
        self._one_is_free = anyio.Event()
        player.watch_width(self._set_width)

    async def take(self) -> None:
        """Wait for a free slot and take it; called by one task only."""
        await anyio.lowlevel.checkpoint()  # this runs with a free slot too, so that draining can stop the feeder
        while self._taken >= self.width:
            self._one_is_free = anyio.Event()
            await self._one_is_free.wait()
        self._taken += 1

    def release(self) -> None:
        self._taken -= 1
        self._one_is_free.set()

    def _set_width(self, width: int) -> None:
        self.width = width
        self._one_is_free.set()


@dataclass(eq=False, kw_only=True)
class TaskFeeder:
    """A feeder that begins the episodes of a run; the number of slots limits how many episodes run at once."""

    feed: TaskFeed
    shared: RunShared
    """The objects that all episodes share."""
    writer: RunWriter
    """The run file, with the episodes that earlier runs finished."""
    scoring: GroupScoring
    """The scoring of groups, which needs the size of each group."""
    state: RunState
    """The state of the run, for errors that end it."""
    indices: Sequence[int]
    """The episodes of each group that are played."""
    slots: Slots

    def __post_init__(self) -> None:
        self._tasks_taken = 0

    async def begin_episodes(self, episodes: TaskGroup, play: Callable[[EpisodeKey], Awaitable[None]]) -> None:
        """Begin every episode of every task.

        A failing task source ends the run; episodes in flight finish.
        """

        async def play_in_slot(key: EpisodeKey) -> None:
            try:
                await play(key)
            finally:
                self.state.forget(key)
                self.slots.release()

        if self.feed.requests is not None:
            await self._begin_requested(self.feed.requests, episodes, play_in_slot)
            return
        try:
            while True:
                await self.state.quota.wait()
                # The slot comes first: a source should choose a task only when it can be played at once.
                await self.slots.take()
                with self.state.waiting_for("tasks()"):
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
        """Return the episodes of a task that no earlier run finished. If there are none, free the slot."""
        self._check_system_prompt(task)
        claimed = await self._claim(task)
        missing = [index for index in self.indices if index not in claimed.finished]
        if missing:
            self.scoring.open(task, claimed.visit, len(missing))
            self.state.quota.begin()
        else:
            self.slots.release()
            if self.scoring.has_rewards and not claimed.group_scored:
                episodes.start_soon(self._score_stored, task, claimed.visit)
        return [
            EpisodeKey(task=task, index=index, visit=claimed.visit, attempt=claimed.attempts.get(index, 0))
            for index in missing
        ]

    async def _begin_requested(
        self, requests: TaskRequests, episodes: TaskGroup, play: Callable[[EpisodeKey], Coroutine[Any, Any, None]]
    ) -> None:
        """Begin the episodes of each request. A task that cannot be played is an error of its request only."""
        async for request in requests:
            try:
                keys = await self._requested_episodes(request, requests)
            except DeltarunnerError as error:
                request.fail(error)
                continue
            for key in keys:
                await self.slots.take()
                if request.cancelled:
                    self.state.cancel_episodes([key])
                episodes.start_soon(play, key, name=f"episode {key.id}")

    async def _requested_episodes(self, request: TaskRequest, requests: TaskRequests) -> list[EpisodeKey]:
        self._check_system_prompt(request.task)
        visit = requests.next_visit(request)
        while (claimed := await self._claim(request.task, visit)).finished.intersection(request.indices):
            visit += requests.visit_step
        requests.begin(request, visit)
        self.scoring.open(request.task, visit, len(request.indices))
        keys = [
            EpisodeKey(
                task=request.task,
                index=index,
                visit=visit,
                attempt=claimed.attempts.get(index, 0),
                sampling=request.sampling,
            )
            for index in request.indices
        ]
        request.cancel_begun = partial(self.state.cancel_episodes, keys)
        return keys

    async def _claim(self, task: Task, visit: int | None = None) -> Claimed:
        self._tasks_taken += 1
        claim = partial(self.writer.claim, task, self._tasks_taken, repeatable=self.feed.repeatable, visit=visit)
        if not self.writer.resumed:
            return claim()
        # A thread is needed only in a resumed run, since reading the file may block.
        job = Job(claim, "run file")
        claimed: Claimed = await self.shared.workers.call(job)
        return claimed

    async def _score_stored(self, task: Task, visit: int) -> None:
        try:
            await self.scoring.score_stored(task, visit)
        except DeltarunnerError as error:
            self.state.fail(error, cancel=True)

    def _check_system_prompt(self, task: Task) -> None:
        """Raise BadTask if the task has a second system prompt, unless a hook builds the prompt."""
        environment = self.shared.part_of(task).environment
        system_prompt = common_system_prompt(environment)
        if system_prompt is not None and not environment.overrides("prompt"):
            check_system_prompts(environment, system_prompt, task, as_messages(task.prompt))

"""Tasks that callers request one by one while a run plays, and the episodes for which the callers wait."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import anyio

from runner.options import Sampling
from runner.tasks import Task
from runner.trajectory import Trajectory

__all__ = ["TaskRequest", "TaskRequests"]


def _ignore() -> None:
    """Do nothing: no episode of the request has begun."""


@dataclass(eq=False, slots=True)
class TaskRequest:
    """A request for some episodes of one task. The caller waits for these episodes."""

    task: Task
    indices: Sequence[int]
    """The indices of the episodes within the task's group."""
    sampling: Sampling | None = None
    """The sampling of these episodes, which overrides the run's."""
    visit: int = 0
    """The visit number of the episodes; set when they begin."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """The finished trajectories of trained agents, or of `main` if no agent is trained."""
    cancelled: bool = False
    """True once the caller no longer waits."""
    cancel_begun: Callable[[], None] = _ignore
    done: anyio.Event = field(default_factory=anyio.Event)
    """Set after the last episode, or with `error`."""
    error: BaseException | None = None
    """The error because of which the episodes were not played."""
    _missing: int = field(init=False)

    def __post_init__(self) -> None:
        self._missing = len(self.indices)

    def deliver(self, trajectories: Iterable[Trajectory]) -> None:
        """Take the trajectories of one finished episode."""
        self.trajectories.extend(trajectories)
        self._missing -= 1
        if not self._missing:
            self.done.set()

    def fail(self, error: BaseException) -> None:
        """End the wait with an error."""
        self.error = error
        self.done.set()

    def cancel(self) -> None:
        """Cancel the episodes, including episodes that have not begun."""
        self.cancelled = True
        self.cancel_begun()


class TaskRequests:
    """A task source for episodes that callers request. Each caller receives the episodes of its request.

    The same task may be requested again. Episodes that were played before are then played as a later visit, with other
    seeds. Requests of other tasks do not change the visit. A visit whose episode is in the resumed run file is skipped.
    """

    def __init__(self) -> None:
        self.first_visit = 0
        self.visit_step = 1
        """The step between this process's visits: each of n processes that share tasks plays every n-th visit."""
        self._waiting: deque[TaskRequest] = deque()
        self._changed = anyio.Event()
        self._closed = False
        self._visits: dict[tuple[str, int], int] = {}
        self._playing: dict[tuple[str, int, int], TaskRequest] = {}

    async def __aiter__(self) -> AsyncIterator[TaskRequest]:
        """Yield the requests in order of arrival, except cancelled requests. The iteration ends after `close`."""
        while True:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.cancelled:
                    yield request
            if self._closed:
                return
            self._changed = anyio.Event()
            await self._changed.wait()

    def add(self, request: TaskRequest) -> None:
        self._waiting.append(request)
        self._changed.set()

    def close(self) -> None:
        """Accept no further request. Waiting requests are still played."""
        self._closed = True
        self._changed.set()

    @property
    def closed(self) -> bool:
        """True if no further request is accepted."""
        return self._closed

    def next_visit(self, request: TaskRequest) -> int:
        """Return the first visit of the task in which none of the requested episodes was played."""
        return max(self._visits.get((request.task.id, index), self.first_visit) for index in request.indices)

    def begin(self, request: TaskRequest, visit: int) -> None:
        """Record that the episodes of a request begin, with `visit` as their visit number."""
        request.visit = visit
        for index in request.indices:
            self._visits[request.task.id, index] = visit + self.visit_step
            self._playing[request.task.id, visit, index] = request

    def deliver(self, trajectories: Sequence[Trajectory]) -> None:
        """Deliver the trajectories of one episode to the request that it belongs to, if any."""
        first = trajectories[0]
        request = self._playing.pop((first.task.id, first.visit, first.index), None)
        if request is not None:
            request.deliver(trajectories)

    def end(self, error: BaseException) -> None:
        """End every wait with an error, since nothing is played any more."""
        self.close()
        for request in (*self._waiting, *self._playing.values()):
            if not request.done.is_set():
                request.fail(error)
        self._waiting.clear()
        self._playing.clear()

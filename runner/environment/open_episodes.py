"""Episodes for agent programs that somebody else starts: a key each, which ends when it is told to, or with the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.endpoint.endpoint import Endpoint
from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.options import Limits
from runner.scoring import reward
from runner.tasks import Task

__all__ = ["OpenEpisodes"]


class OpenEpisodes(Environment):
    """One key, one episode: it ends with `POST base_url/end`, whose body may have a reward, or with the run.

    An episode of which nobody says a reward has none.
    """

    limits = Limits(seconds=None)

    def __init__(self, tell: Callable[[str, Endpoint, Path], None], train: bool | None = None) -> None:
        """Say who is told of a new key.

        Args:
            tell: is given the episode's id, its endpoint, and the folder with settings of clients.
            train: whether all threads are trained; None trains those that are offered tools.
        """
        self.tell = tell
        self.train = train
        self.reported: float | None = None

    def tasks(self) -> Iterator[Task]:
        """A task a key."""
        return (Task(id=f"key-{number}", prompt="") for number in itertools.count())

    async def rollout(self, conversation: Conversation) -> None:
        """Serve until somebody says that it is over."""
        async with self.episode.serve(train=self.train) as endpoint:
            self.tell(self.episode.id, endpoint, await endpoint.home())
            self.reported = (await endpoint.wait()).get("reward")

    @reward
    def reported_reward(self) -> float | None:
        """What the client reported."""
        return self.reported

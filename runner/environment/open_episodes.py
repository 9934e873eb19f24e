"""Episodes for agent programs that somebody else starts: a key each, which ends when it is told to, or with the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.endpoint.endpoint import Endpoint
from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.episode.serving import check_serving
from runner.options import Limits
from runner.scoring import reward
from runner.tasks import Task

__all__ = ["OpenEpisodes"]


class OpenEpisodes(Environment):
    """One key, one episode: it ends with `POST base_url/end`, with `POST end_url`, or with the run.

    Only `end_url` takes a reward, since whatever program was given the key could reward itself. An episode of which
    nobody says a reward has none.
    """

    limits = Limits(seconds=None)

    def __init__(
        self,
        tell: Callable[[str, Endpoint, Path], None],
        train: bool | None = None,
        system_as_user: bool = False,
        overflow: str = "tell",
        sent_history: str = "append",
    ) -> None:
        """Say who is told of a new key.

        Args:
            tell: is given the episode's id, its endpoint, and the folder with settings of clients.
            train: whether all threads are trained; None trains those that are offered tools.
            system_as_user: system messages after the beginning are put before the model as a user's.
            overflow: "tell" a client that its history does not fit, or "end" the episode.
            sent_history: "append" goes on from what the model said, "client" from what the client sends.

        Raises:
            BadOption: a value cannot be.
        """
        check_serving(overflow=overflow, history=sent_history, names=("--overflow", "--sent-history"))
        self.tell = tell
        self.train = train
        self.system_as_user = system_as_user
        self.overflow = overflow
        self.sent_history = sent_history
        self.reported: float | None = None

    def tasks(self) -> Iterator[Task]:
        """A task a key."""
        return (Task(id=f"key-{number}", prompt="") for number in itertools.count())

    async def rollout(self, conversation: Conversation) -> None:
        """Serve until somebody says that it is over."""
        serving = self.episode.serve(
            train=self.train,
            system_as_user=self.system_as_user,
            overflow=self.overflow,
            history=self.sent_history,
        )
        async with serving as endpoint:
            self.tell(self.episode.id, endpoint, await endpoint.home())
            self.reported = (await endpoint.wait()).get("reward")

    @reward
    def reported_reward(self) -> float | None:
        """What the client reported."""
        return self.reported

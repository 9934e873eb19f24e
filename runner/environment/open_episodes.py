"""Episodes for agent programs that others start: each episode has a key, and ends by a request or with the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.endpoint.endpoint import Endpoint
from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.episode.serving import serving_options
from runner.options import Limits
from runner.scoring import reward
from runner.tasks import Task

__all__ = ["OpenEpisodes"]


class OpenEpisodes(Environment):
    """Episodes with one key each. An episode ends with `POST base_url/end`, with `POST end_url`, or with the run.

    Only `end_url` accepts a reward, so that a program with only the key cannot reward itself. An episode without a
    reported reward has no reward.
    """

    limits = Limits(seconds=None)

    def __init__(
        self,
        notify: Callable[[str, Endpoint, Path], None],
        train: bool | None = None,
        system_as_user: bool = False,
        overflow: str = "tell",
        sent_history: str = "append",
    ) -> None:
        """Create the environment.

        Args:
            notify: a function that is called for each new key with the episode's id, the episode's endpoint, and the
                folder of settings for clients.
            train: True to train on all threads, False on none, None on threads with tools.
            system_as_user: True to turn later system messages into user messages.
            overflow: if a history does not fit: "tell" returns an error to the client, "end" ends the episode.
            sent_history: "append" continues the sampled history, "client" the history that the client sends.

        Raises:
            BadOption: a value is invalid.
        """
        names = ("--overflow", "--sent-history")
        self._serving = serving_options(train, system_as_user, overflow, sent_history, names=names)
        self.notify = notify
        self.reported: float | None = None

    def tasks(self) -> Iterator[Task]:
        """Yield one task for each key, without end."""
        return (Task(id=f"key-{number}", prompt="") for number in itertools.count())

    async def rollout(self, conversation: Conversation) -> None:
        """Serve until a request ends the episode."""
        async with self.episode.serve(**self._serving) as endpoint:
            self.notify(self.episode.id, endpoint, await endpoint.home())
            self.reported = (await endpoint.wait()).get("reward")

    @reward
    def reported_reward(self) -> float | None:
        """The reward that `end_url` received; None if it received no reward."""
        return self.reported

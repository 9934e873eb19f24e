"""The key of an episode: which play of which task it is, and the random numbers that follow from that."""

from __future__ import annotations

import random
from dataclasses import dataclass

from runner.seeds import derive_seed
from runner.tasks import Task

__all__ = ["MAIN", "EpisodeKey", "task_rng"]

MAIN = "main"
"""The agent that `rollout` gets; it is there in every episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Which play of which task an episode is."""

    task: Task
    """The task that is played."""
    index: int = 0
    """The episode's number within the task's group."""
    visit: int = 0
    """How often a source that repeats its tasks gave this one before."""
    attempt: int = 0
    """How often this episode was played before: the engine failed, or its weights were too old in the end."""

    @property
    def id(self) -> str:
        """The id of the episode; its attempts share it."""
        visit = f"@{self.visit}" if self.visit else ""
        return f"{self.task.id}{visit}#{self.index}"

    def seed(self, run_seed: int) -> int:
        """The seed of the episode's sampling. It differs within a group, and attempts share it."""
        return derive_seed(run_seed, self.task.id, self.visit, self.index)


def task_rng(run_seed: int, task_id: str, visit: int) -> random.Random:
    """The random numbers of a task, shared by its group."""
    return random.Random(derive_seed(run_seed, "task", task_id, visit))

"""The key of an episode: its task, index, visit and attempt, and the seeds derived from the key."""

from __future__ import annotations

import random
from dataclasses import dataclass

from runner.options import Sampling
from runner.seeds import derive_seed
from runner.tasks import Task

__all__ = ["MAIN", "EpisodeKey", "task_rng"]

MAIN = "main"
"""Name of the agent whose conversation `rollout` receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """The identity of an attempt at an episode of a run."""

    task: Task
    index: int = 0
    """Number of the episode within the task's group."""
    visit: int = 0
    """Number of earlier visits to the task, for a source that repeats its tasks."""
    attempt: int = 0
    """Number of earlier attempts, after an engine failed or its weights became too old."""
    sampling: Sampling | None = None
    """Sampling of this episode's trained or evaluated agents; takes precedence over the run's sampling."""

    @property
    def id(self) -> str:
        """Id of the episode; all attempts have the same id."""
        visit = f"@{self.visit}" if self.visit else ""
        return f"{self.task.id}{visit}#{self.index}"

    def seed(self, run_seed: int) -> int:
        """Return the seed of the episode's sampling. It differs within a group, and is the same for all attempts."""
        return derive_seed(run_seed, self.task.id, self.visit, self.index)


def task_rng(run_seed: int, task_id: str, visit: int) -> random.Random:
    """Return the random number generator of a task. All episodes of its group draw the same numbers."""
    return random.Random(derive_seed(run_seed, "task", task_id, visit))

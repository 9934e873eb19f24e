"""Environments for benchmarks: three tool calls and an answer."""

from __future__ import annotations

from collections.abc import Iterator

from runner import Environment, Task, reward, tool

__all__ = ["REPLIES", "AsyncSums", "SyncSums"]

REPLIES = ["[add(a=17, b=25)]"] * 3 + ["The answer is 42."]
"""Replies of the model in the four turns of an episode."""


class _Sums(Environment):
    system_prompt = "Use the tool for every addition."

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes

    def tasks(self) -> Iterator[Task]:
        for number in range(self.episodes):
            yield Task(id=str(number), prompt=f"What is {number} + 25?", answer="42")


class AsyncSums(_Sums):
    """Environment whose code runs on the event loop."""

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    @reward
    async def correct(self) -> bool:
        return self.task.answer in self.episode.text


class SyncSums(_Sums):
    """Environment whose code runs in worker threads."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    @reward
    def correct(self) -> bool:
        return self.task.answer in self.episode.text

"""Environments in which one episode misbehaves, in a given hook and way. All hooks are sync, or all are async."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

import anyio
import anyio.lowlevel

from runner import Conversation, Environment, Task, Turn, metric, reward, tool
from runner.engines.scripted.script import Answer, ModelCall, call

BAD = "13"
EPISODE_COUNT = 64
SWALLOW_COUNT = 100
LARGE_CHARS = 100_000_000

HOOKS = ["setup", "prompt", "tool", "step", "reward", "metric", "close"]


def speak(turn: ModelCall) -> Answer:
    """The model: two calls in one turn, then their sum, then yes. The numbers are random: all episodes differ."""
    a, b = turn.rng.randrange(1000), turn.rng.randrange(1000)
    match turn.turn:
        case 0:
            return [call("add", a=a, b=b), call("add", a=b, b=a)]
        case 1:
            return f"It is {a + b}."
        case _:
            return f"yes, {a} times"


# --- misbehaviour


class Weird(BaseException):
    """An error that `except Exception` does not catch."""


released = threading.Event()
"""An event that releases hanging threads."""


def raises() -> Any:
    raise ValueError("this episode is bad")


def raises_at_length() -> Any:
    raise ValueError("x" * LARGE_CHARS)


def raises_no_exception() -> Any:
    raise Weird("this episode is weird")


def exits() -> Any:
    sys.exit(3)


def recurses() -> Any:
    return recurses()


def returns_100_mb() -> Any:
    return "x" * LARGE_CHARS


def hangs() -> Any:
    released.wait()


async def waits_for_ever() -> Any:
    await anyio.sleep_forever()


async def swallows_cancellation() -> Any:
    """Swallow a hundred cancellations, and wait again after each."""
    for _ in range(SWALLOW_COUNT):
        try:
            await anyio.sleep_forever()
        except BaseException:
            continue


Deed = Callable[[], Any]
AT_ONCE: list[Deed] = [raises, raises_at_length, raises_no_exception, exits, recurses, returns_100_mb]
TOO_LONG_SYNC: list[Deed] = [hangs]
TOO_LONG_ASYNC: list[Deed] = [waits_for_ever, swallows_cancellation]


# --- environments


class Pupils(Environment):
    """Environment in which each episode adds two numbers, is asked whether it is sure, and answers yes."""

    def __init__(self, hook: str = "", deed: Deed = raises) -> None:
        self.hook, self.deed = hook, deed
        self.asked = False

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt=f"Task {number}: add two numbers.") for number in range(EPISODE_COUNT)]

    def act(self, hook: str) -> Any:
        return self.deed() if self.task.id == BAD and self.hook == hook else None

    def luck(self) -> int:
        # A new generator each time, since two async tools of a turn run in any order.
        return random.Random(self.episode.seed).randrange(1000)

    def doubt(self) -> str | None:
        self.asked, asked = True, self.asked
        return None if asked else "Are you sure?"

    def sure(self) -> bool:
        return self.episode.text.startswith("yes")


class SyncPupils(Pupils):
    def setup(self) -> None:
        self.act("setup")

    def prompt(self) -> Any:
        return self.act("prompt") or self.task.prompt

    @tool
    def add(self, a: int, b: int) -> Any:
        """Add two integers."""
        return self.act("tool") or a + b + self.luck()

    def step(self, turn: Turn) -> Any:
        return self.act("step") or self.doubt()

    @reward
    def said_yes(self) -> Any:
        return self.act("reward") or self.sure()

    @metric
    def turns(self) -> Any:
        return self.act("metric") or len(self.episode.turns)

    def close(self) -> None:
        self.act("close")


class AsyncPupils(Pupils):
    async def rollout(self, conversation: Conversation) -> None:
        await self.act_async("rollout")
        await super().rollout(conversation)

    async def act_async(self, hook: str) -> Any:
        await anyio.lowlevel.checkpoint()
        result = self.act(hook)
        return await result if isawaitable(result) else result

    async def setup(self) -> None:
        await self.act_async("setup")

    async def prompt(self) -> Any:
        return await self.act_async("prompt") or self.task.prompt

    @tool
    async def add(self, a: int, b: int) -> Any:
        """Add two integers."""
        return await self.act_async("tool") or a + b + self.luck()

    async def step(self, turn: Turn) -> Any:
        return await self.act_async("step") or self.doubt()

    @reward
    async def said_yes(self) -> Any:
        return await self.act_async("reward") or self.sure()

    @metric
    async def turns(self) -> Any:
        return await self.act_async("metric") or len(self.episode.turns)

    async def close(self) -> None:
        await self.act_async("close")

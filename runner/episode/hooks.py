"""The hooks of an environment, as its episode calls them.

`Environment`, which authors subclass, is in a layer above. The episode and the conversation that the hooks receive are
in layers above too, so their type in this module is Any. A protocol could not replace Any: the type of a parameter or
of an assigned attribute must not be wider here than in `Environment`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol, Self

from runner.concurrency.exit_stack import is_empty
from runner.errors import BadTask
from runner.messages import Message, Prompt
from runner.options import Limits, Sampling, ToolChoice
from runner.scoring import Scorer
from runner.tasks import Task
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["Hooks", "check_reply", "check_system_prompts", "unclosed"]


class Hooks(Protocol):
    """The part of `Environment` that an episode uses."""

    system_prompt: str | None
    tool_choice: ToolChoice
    limits: Limits
    sampling: Sampling

    # The episode sets these attributes before `setup()`.
    task: Any
    episode: Any
    shared: Any
    tools: list[Tool]

    def setup(self) -> Awaitable[None] | None: ...

    def prompt(self) -> Prompt | Awaitable[Prompt]: ...

    async def rollout(self, conversation: Any) -> None: ...

    def step(self, turn: Turn) -> Prompt | Awaitable[Prompt | None] | None: ...

    def close(self) -> Awaitable[None] | None: ...

    def fresh(self) -> Self:
        """Return a new environment, constructed with the same arguments as this one."""

    @property
    def made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the constructor."""

    def parts(self) -> Mapping[str, Hooks]:
        """Return the environments that play, by the prefix of their task ids.

        An environment that is not a mixture has the prefix "".
        """

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The rewards and metrics of all parts."""

    def overrides(self, hook: str) -> bool:
        """Return True if the author overrode this hook."""

    def bound_tools(self) -> list[Tool]:
        """Return the tools of `@tool`, bound to this object."""


def check_reply(hook: str, reply: Any) -> None:
    """Refuse a return value of a Gymnasium environment, such as a tuple, where messages are expected.

    Args:
        hook: name of the hook, `step` or `prompt`.
        reply: the returned value.

    Raises:
        TypeError: the value is not text, a message, a list or None, or it has items as Gymnasium returns them.
    """
    if reply is None or isinstance(reply, str):
        return
    ends = "; None ends the episode" if hook == "step" else ""
    expected = f"return the observation for the model: a string, a message, or a list of messages{ends}"
    if isinstance(reply, list | tuple) and not all(isinstance(each, Mapping) and "role" in each for each in reply):
        kinds = ", ".join(type(each).__name__ for each in reply)
        if isinstance(reply, tuple) or any(isinstance(each, bool | int | float) for each in reply):
            raise TypeError(
                f"{hook}() returned a {type(reply).__name__} of {len(reply)} ({kinds:.80}), as Gymnasium environments "
                f"do. Here, {expected}. Return the observation alone; keep the reward on self, and return it from "
                f"a @reward method."
            )
        return
    if not isinstance(reply, list | tuple | Mapping):
        raise TypeError(f"{hook}() returned {reply!r:.60}, of type {type(reply).__name__}: {expected}.")


def check_system_prompts(environment: Hooks, system_prompt: str | None, task: Task, prompt: Sequence[Message]) -> None:
    """Refuse a conversation that would begin with two system messages.

    Raises:
        BadTask: the prompt begins with a system message, and the environment has a `system_prompt`.
    """
    if system_prompt is not None and prompt and prompt[0]["role"] == "system":
        raise BadTask(
            f"the prompt of task {task.id!r} begins with a system message, and {type(environment).__name__} has a "
            f"system_prompt: set system_prompt = None, or leave the message out."
        )


def unclosed(environment: Hooks) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
    """Yield the name and the closing call of each open resource in an attribute of the environment, latest first.

    Resources that the constructor or `lifespan()` provided are left out, since episodes share them.
    """
    own = list(vars(environment).items())
    theirs: list[object] = []
    for name, value in reversed(own):
        if not hasattr(type(value), "__aexit__"):
            continue
        close: Callable[[], Awaitable[object]]
        generator = getattr(value, "gen", None)
        if isinstance(value, asyncio.TaskGroup) and _is_of_this_task(value):
            error = RuntimeError("the episode is over")
            close = partial(value.__aexit__, type(error), error, None)
        elif isinstance(value, AsyncExitStack) and not is_empty(value):
            close = value.aclose
        elif isinstance(generator, AsyncGenerator) and _is_suspended(generator):  # a generator of @asynccontextmanager
            close = partial(value.__aexit__, None, None, None)
        else:
            continue
        theirs = theirs or list(_of_others(environment))
        if not any(value is each for each in theirs):
            yield name, close


def _of_others(environment: Hooks) -> Iterator[object]:
    arguments, keywords = environment.made_with
    yield from arguments
    yield from keywords.values()
    shared = environment.shared
    yield shared
    if isinstance(shared, dict | list | tuple):
        yield from shared.values() if isinstance(shared, dict) else shared
    yield from getattr(shared, "__dict__", {}).values()


def _is_of_this_task(group: asyncio.TaskGroup) -> bool:
    """Return True if the current task opened the task group, and the group has tasks."""
    return bool(getattr(group, "_tasks", ())) and getattr(group, "_parent_task", None) is asyncio.current_task()


def _is_suspended(generator: Any) -> bool:
    """Return True if a generator has begun, and waits at a `yield`."""
    frame = getattr(generator, "ag_frame", None)
    return frame is not None and frame.f_lasti > 0 and not generator.ag_running

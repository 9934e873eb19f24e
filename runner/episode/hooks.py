"""The hooks of an environment, as its episode calls them.

`Environment`, which authors subclass, stands above the episode and is not known here. What the hooks are given that
stands above this module, the episode and its conversation, is Any: a protocol in its stead would have to be the very
type that `Environment` names, since attributes that are assigned, and parameters, take no wider one.
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
from runner.tasks import Task
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["Hooks", "check_reply", "check_system_prompts", "unclosed"]


class Hooks(Protocol):
    """As much of an `Environment` as an episode needs."""

    system_prompt: str | None
    tool_choice: ToolChoice
    limits: Limits
    sampling: Sampling

    # Set by the episode, before `setup()`.
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
        """Another environment, made by the call that made this one."""

    @property
    def made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call that made it."""

    def overrides(self, hook: str) -> bool:
        """Tell whether the author wrote this hook."""

    def bound_tools(self) -> list[Tool]:
        """The tools of `@tool`, bound to this object."""


def check_reply(hook: str, reply: Any) -> None:
    """Refuse what the methods of a Gymnasium environment return, where the messages for the model belong.

    Args:
        hook: the name of the hook, `step` or `prompt`.
        reply: what it returned.

    Raises:
        TypeError: it is a tuple of something else than messages, or no kind of message at all.
    """
    if reply is None or isinstance(reply, str):
        return
    ends = "; None ends the episode" if hook == "step" else ""
    told = f"return what the model is told: a string, a message, or a list of messages{ends}"
    if isinstance(reply, list | tuple) and not all(isinstance(each, Mapping) and "role" in each for each in reply):
        kinds = ", ".join(type(each).__name__ for each in reply)
        if isinstance(reply, tuple) or any(isinstance(each, bool | int | float) for each in reply):
            raise TypeError(
                f"{hook}() returned a {type(reply).__name__} of {len(reply)} ({kinds:.80}), as Gymnasium environments "
                f"do. Here, {told}. Give the observation alone; keep what earns a reward on self, and return it from a "
                f"@reward method."
            )
        return
    if not isinstance(reply, list | tuple | Mapping):
        raise TypeError(f"{hook}() returned {reply!r:.60}, of type {type(reply).__name__}: {told}.")


def check_system_prompts(environment: Hooks, system_prompt: str | None, task: Task, prompt: Sequence[Message]) -> None:
    """Refuse a conversation that would begin with two system messages."""
    if system_prompt is not None and prompt and prompt[0]["role"] == "system":
        raise BadTask(
            f"the prompt of task {task.id!r} begins with a system message, and {type(environment).__name__} has a "
            f"system_prompt: set system_prompt = None, or leave the message out."
        )


def unclosed(environment: Hooks) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
    """What hangs on the environment and can be seen to be open: its name and what closes it, what came last first.

    What it has from its constructor or from `lifespan()` belongs to others too.
    """
    own = list(vars(environment).items())
    theirs: list[object] = []
    for name, value in reversed(own):
        close: Callable[[], Awaitable[object]]
        generator = getattr(value, "gen", None)
        if isinstance(value, asyncio.TaskGroup) and _is_of_this_task(value):
            error = RuntimeError("the episode is over")
            close = partial(value.__aexit__, type(error), error, None)
        elif isinstance(value, AsyncExitStack) and not is_empty(value):
            close = value.aclose
        elif isinstance(generator, AsyncGenerator) and _is_suspended(generator):  # of an @asynccontextmanager
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
    """It was opened in this task, and has tasks."""
    return bool(getattr(group, "_tasks", ())) and getattr(group, "_parent_task", None) is asyncio.current_task()


def _is_suspended(generator: Any) -> bool:
    """It has begun, and waits at a `yield`."""
    frame = getattr(generator, "ag_frame", None)
    return frame is not None and frame.f_lasti > 0 and not generator.ag_running

"""The hooks of an environment, as its episode calls them.

`Environment`, which authors subclass, stands above the episode and is not known here. What the hooks are given that
stands above this module, the episode and its conversation, is Any: a protocol in its stead would have to be the very
type that `Environment` names, since attributes that are assigned, and parameters, take no wider one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, Self

from runner.errors import BadTask
from runner.messages import Message, Prompt
from runner.options import Limits, Sampling, ToolChoice
from runner.tasks import Task
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["Hooks", "check_system_prompts"]


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

    def overrides(self, hook: str) -> bool:
        """Tell whether the author wrote this hook."""

    def bound_tools(self) -> list[Tool]:
        """The tools of `@tool`, bound to this object."""


def check_system_prompts(environment: Hooks, system_prompt: str | None, task: Task, prompt: Sequence[Message]) -> None:
    """Refuse a conversation that would begin with two system messages."""
    if system_prompt is not None and prompt and prompt[0]["role"] == "system":
        raise BadTask(
            f"the prompt of task {task.id!r} begins with a system message, and {type(environment).__name__} has a "
            f"system_prompt: set system_prompt = None, or leave the message out."
        )

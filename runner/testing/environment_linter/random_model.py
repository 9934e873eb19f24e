"""The model of the environment linter: calls every tool with random arguments that fit, then sends a text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from runner.engines.scripted.script import ModelCall, Reply
from runner.messages import ToolCall
from runner.options import ConstraintKind
from runner.parsing.ebnf import literal
from runner.testing.environment_linter.random_values import random_arguments, random_text, random_value
from runner.tools.tool import Tool

__all__ = ["MAX_TURNS", "RandomModel"]

MAX_TURNS = 8
"""Turns of an episode; the last one calls no tool unless it has to."""


class RandomModel:
    """Calls the tools one after another with arguments that fit, and replies with a text in the last turn.

    A turn that is constrained to a schema, a pattern, a choice or a call satisfies the constraint.

    Replies depend only on the task, the agent and the turn, so all episodes of a group get the same ones.

    Args:
        tools_of: returns the tools that the agent of a call may use.
        two_calls: call two asynchronous tools in one turn.
    """

    def __init__(self, tools_of: Callable[[ModelCall], Sequence[Tool]], *, two_calls: bool = False) -> None:
        self.known_tools: dict[str, Tool] = {}
        """All tools that could be called so far, by name."""
        self._tools_of = tools_of
        self._two_calls = two_calls

    def __call__(self, call: ModelCall) -> Reply:
        task = call.episode.rpartition("#")[0]
        rng = random.Random(f"{task} {call.agent} {call.turn}")
        tools = self._tools_of(call)
        self.known_tools |= {tool.name: tool for tool in tools if tool.name not in self.known_tools}
        text = _constrained(call, rng)
        if text is not None:
            return Reply(text)
        must = _must_call(call, tools)
        tools = must or tools
        if not tools or (call.turn >= MAX_TURNS - 1 and not must):
            return Reply(rng.choice(("42", "7", "yes", "I do not know.", "hello")))
        # All tools in rotation; each task begins with another one.
        first = call.turn + random.Random(task).randrange(len(tools))
        chosen = [tools[first % len(tools)]]
        two_calls = self._two_calls and all(tool.parallel for tool in must)
        concurrent = [tool for tool in tools if tool.is_async and tool.parallel] if two_calls else []
        if concurrent:
            one = first - call.turn + call.turn // 2  # on even turns the same tool twice, on odd turns with the next
            chosen = [concurrent[number % len(concurrent)] for number in (one, one + call.turn % 2)]
        return Reply(calls=tuple(ToolCall("", tool.name, random_arguments(tool.parameters, rng)) for tool in chosen))


def _constrained(call: ModelCall, rng: random.Random) -> str | None:
    """A text that satisfies the sampling's constraint; None without one."""
    sampling = call.request.sampling
    if sampling.choice is not None:
        return rng.choice(sampling.choice)
    if sampling.regex is not None:
        return random_text(f"^(?:{sampling.regex})$", rng)
    return None if sampling.schema is None else json.dumps(random_value(sampling.schema, rng))


def _must_call(call: ModelCall, tools: Sequence[Tool]) -> list[Tool]:
    """The tools of which one must be called; empty if no call is required."""
    constraint = call.request.constraint
    if constraint is None or constraint.kind is not ConstraintKind.GRAMMAR:
        return []
    return [tool for tool in tools if literal(tool.name) in constraint.value]

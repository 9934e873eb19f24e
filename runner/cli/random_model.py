"""What plays the model in `deltarunner check`: it calls every tool with arguments that fit, and says something."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from runner.cli.random_values import random_arguments, random_text, random_value
from runner.engines.scripted.script import ModelCall, Reply
from runner.messages import ToolCall
from runner.options import ConstraintKind
from runner.parsing.ebnf import literal
from runner.tools.tool import Tool

__all__ = ["TURNS", "RandomModel"]

TURNS = 8
"""After so many turns it has said enough."""


class RandomModel:
    """Plays the model: calls the tools in turn with arguments that fit, and says something at the end.

    A turn that is held to a schema, a pattern, a choice or a call says something that these allow.

    What it says follows from the task, the agent and the turn alone: episodes of a group are told the same.

    Args:
        tools_of: what the agent that is asked may call now.
        together: call two asynchronous tools in one turn.
    """

    def __init__(self, tools_of: Callable[[ModelCall], Sequence[Tool]], *, together: bool = False) -> None:
        self.known: dict[str, Tool] = {}
        """The tools that it could have called, by name."""
        self._tools_of = tools_of
        self._together = together

    def __call__(self, call: ModelCall) -> Reply:
        task = call.episode.rpartition("#")[0]
        rng = random.Random(f"{task} {call.agent} {call.turn}")
        tools = self._tools_of(call)
        self.known |= {tool.name: tool for tool in tools if tool.name not in self.known}
        text = _constrained(call, rng)
        if text is not None:
            return Reply(text)
        must = _must_call(call, tools)
        tools = must or tools
        if not tools or (call.turn >= TURNS - 1 and not must):
            return Reply(rng.choice(("42", "7", "yes", "I do not know.", "hello")))
        # Every tool has its turn, from task to task another one first.
        first = call.turn + random.Random(task).randrange(len(tools))
        chosen = [tools[first % len(tools)]]
        together = self._together and all(tool.parallel for tool in must)
        beside = [tool for tool in tools if tool.is_async and tool.parallel] if together else []
        if beside:
            one = first - call.turn + call.turn // 2  # with itself at one turn, with the next tool at the other
            chosen = [beside[number % len(beside)] for number in (one, one + call.turn % 2)]
        return Reply(calls=tuple(ToolCall("", tool.name, random_arguments(tool.parameters, rng)) for tool in chosen))


def _constrained(call: ModelCall, rng: random.Random) -> str | None:
    """A text that the sampling allows; None where it allows any."""
    asked = call.request.sampling
    if asked.choice is not None:
        return rng.choice(asked.choice)
    if asked.regex is not None:
        return random_text(f"^(?:{asked.regex})$", rng)
    return None if asked.schema is None else json.dumps(random_value(asked.schema, rng))


def _must_call(call: ModelCall, tools: Sequence[Tool]) -> list[Tool]:
    """The tools of which a call is required."""
    constraint = call.request.constraint
    if constraint is None or constraint.kind is not ConstraintKind.GRAMMAR:
        return []
    return [tool for tool in tools if literal(tool.name) in constraint.value]

"""Renders of short probe conversations, from which the format of a template's turns is learnt."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runner.messages import canonical_json
from runner.parsing.cut_points import CutPoints
from runner.parsing.notations import type_of
from runner.tokens.probe_messages import AGAIN_ASKED, ASKED, QUESTION, call_id
from runner.tokens.template import Renderer, TemplateRaised

__all__ = ["FormatProber", "FormatRequirement", "ProbeCall", "UnlearnableFormat"]

MAX_RENDERS: Final = 400
"""Maximum number of renders per template. Learning and checking usually take 60 to 90 together."""


class FormatRequirement(enum.StrEnum):
    """A condition that a template must meet for its calls to be learnt."""

    SHOWN = "calls_shown"  # name and arguments of a call are written
    SEPARABLE = "calls_separable"  # the beginning and the end of a call can be found
    VALUES = "values_told_apart"  # each type of value is written in a form that can be read
    REPEATED = "calls_alike"  # a second call is written like the first
    INVERTED = "calls_read_back"  # written calls are read with the same values
    BOUNDED = "renders_bounded"  # at most `MAX_RENDERS` renders are needed


class UnlearnableFormat(Exception):
    """The calls of a template cannot be learnt."""

    def __init__(self, missing: FormatRequirement, why: str) -> None:
        super().__init__(why)
        self.requirement = missing


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A call in a probe conversation."""

    name: str
    arguments: Mapping[str, Any]


@dataclass
class FormatProber:
    """Renderer of probe messages. It returns the text after the user's message, and caches it."""

    renderer: Renderer
    cut_points: CutPoints
    """Cut points of rendered text."""
    special: frozenset[str] = frozenset()
    """Special tokens of the vocabulary, which may end a turn."""
    answered: bool = False
    """True to put a result after every call, for templates that raise on unanswered calls or drop them."""
    named_ids: bool = False
    """True to put the name of a call in its id, for templates such as Kimi's that show the name only in the id."""
    renders: int = 0
    _known: dict[str, str | None] = field(default_factory=dict)

    def id_of(self, said: ProbeCall, number: int, ids: str | None = None) -> str:
        """Return the id of the call with this number, made from the format string `ids` if it is given."""
        if ids is not None:
            return ids.format(number=number)
        return f"functions.{said.name}:{number}" if self.named_ids else call_id(number)

    def prompt(self) -> str | None:
        """Return the text after the user's message in a prompt, or the whole prompt if the message is not in it.

        The result is None if the template raises, or if the prompt contains no text except the message.
        """
        return self._after_question([], [], asking=True)

    def turn(
        self,
        *calls: ProbeCall,
        content: str = "",
        thought: Mapping[str, Any] | None = None,
        followed: bool = False,
        ids: str | None = None,
    ) -> str | None:
        """Return the text after the user's message in a history, or the whole text if the message is not in it.

        The result is None if the template raises, or if the render contains no text except the message.

        Args:
            calls: calls of the assistant.
            content: content of the assistant.
            thought: message fields with the reasoning.
            ids: format string of call ids with {number}; None for ids that strict templates accept.
            followed: add results after the turn, or a user message if it has no calls.

        Raises:
            UnlearnableFormat: more than `MAX_RENDERS` renders would be needed.
        """
        message: dict[str, Any] = {"role": "assistant", "content": content, **(thought or {})}
        messages = [message]
        if calls:
            message["tool_calls"] = [
                {
                    "id": self.id_of(said, number, ids),
                    "type": "function",
                    "function": {"name": said.name, "arguments": said.arguments},
                }
                for number, said in enumerate(calls)
            ]
        if calls and (followed or self.answered):
            messages += [
                {"role": "tool", "content": _RESULT, "tool_call_id": self.id_of(said, number, ids), "name": said.name}
                for number, said in enumerate(calls)
            ]
        elif followed:
            messages.append(dict(AGAIN_ASKED))
        return self._after_question(messages, calls)

    def _after_question(
        self, messages: Sequence[Mapping[str, Any]], calls: Sequence[ProbeCall], *, asking: bool = False
    ) -> str | None:
        key = canonical_json([messages, asking])
        if key not in self._known:
            self._known[key] = self._rendered(messages, calls, asking)
        return self._known[key]

    def _rendered(self, messages: Sequence[Mapping[str, Any]], calls: Sequence[ProbeCall], asking: bool) -> str | None:
        # Some templates raise on types that they cannot describe, although they write values of these types correctly.
        for typed in (True, False):
            self.renders += 1
            if self.renders > MAX_RENDERS:
                why = f"{MAX_RENDERS} renders did not show how calls are written"
                raise UnlearnableFormat(FormatRequirement.BOUNDED, why)
            tools = _tools(calls, typed=typed)
            try:
                text = self.renderer.render([QUESTION, *messages], tools=tools, generation_prompt=asking)
            except TemplateRaised:
                continue
            before, _, after = text.rpartition(ASKED)
            return after if before or after else None
        return None


_RESULT: Final = "zqreturnedz"
_NO_CALL: Final = ProbeCall("zqtoolz", {"zqkeyz": "zqvaluez"})


def _tools(calls: Sequence[ProbeCall], *, typed: bool) -> list[dict[str, Any]]:
    """Return tools for the calls, since a template may look up their schemas.

    With `typed`, each argument has the type of its value. Otherwise, all arguments are declared as strings.
    """
    properties: dict[str, dict[str, Any]] = {}
    for said in calls or [_NO_CALL]:
        declared = properties.setdefault(said.name, {})
        declared |= {
            key: {"type": type_of(value) if typed else "string", "description": "A key."}
            for key, value in said.arguments.items()
        }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "zqdescribedz",
                "parameters": {"type": "object", "properties": declared, "required": list(declared)},
            },
        }
        for name, declared in properties.items()
    ]

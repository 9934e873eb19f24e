"""Asks a template how it writes a turn: renders of one question and one answer, counted, each made once."""

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

__all__ = ["FormatRequirement", "ProbeCall", "ProbeRenderer", "UnlearnableFormat"]

MOST_RENDERS: Final = 400
"""A template takes some forty to be learnt, and twice as many to be checked."""


class FormatRequirement(enum.StrEnum):
    """What a template must do for its calls to be learnt."""

    SHOWN = "calls_shown"  # the name and the arguments of a call are written
    SEPARABLE = "calls_separable"  # where a call begins and ends can be told
    VALUES = "values_told_apart"  # each type of value is written in a way that can be read again
    REPEATED = "calls_alike"  # a second call is written as the first
    INVERTED = "calls_read_back"  # what is written is read as what was meant
    BOUNDED = "renders_bounded"


class UnlearnableFormat(Exception):
    """The template's calls cannot be learnt."""

    def __init__(self, missing: FormatRequirement, why: str) -> None:
        super().__init__(why)
        self.requirement = missing


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """One call that the assistant is said to have made."""

    name: str
    """The tool that it calls."""
    arguments: Mapping[str, Any]
    """The arguments by name."""


@dataclass
class ProbeRenderer:
    """Puts assistant messages before a template and gives back what it wrote behind the user's words."""

    renderer: Renderer
    """The template that is asked."""
    cut_points: CutPoints
    """How its text is cut."""
    special: frozenset[str] = frozenset()
    """The special tokens of its vocabulary, which may end a turn."""
    answered: bool = False
    """Results stand behind every call, since the template raises or drops calls that nothing answers."""
    named_ids: bool = False
    """The id of a call says its name, as Kimi's do, since the template writes nothing else of it."""
    renders: int = 0
    """How often the template was rendered."""
    _known: dict[str, str | None] = field(default_factory=dict)

    def id_of(self, said: ProbeCall, number: int, ids: str | None = None) -> str:
        """The id that the call of that number has."""
        if ids is not None:
            return ids.format(number=number)
        return f"functions.{said.name}:{number}" if self.named_ids else call_id(number)

    def prompt(self) -> str | None:
        """What stands behind the user's words while the model is asked."""
        return self._behind_question([], [], asking=True)

    def turn(
        self,
        *calls: ProbeCall,
        content: str = "",
        thought: Mapping[str, Any] | None = None,
        followed: bool = False,
        ids: str | None = None,
    ) -> str | None:
        """What stands behind the user's words, or None where the template raises.

        Args:
            calls: what the assistant called.
            content: what it said beside that.
            thought: fields of the message that hold what it thought.
            ids: how the ids of calls look, with {number} in them; else as templates want them that are strict.
            followed: results, and where there are no calls a user, stand behind it.
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
        return self._behind_question(messages, calls)

    def _behind_question(
        self, messages: Sequence[Mapping[str, Any]], calls: Sequence[ProbeCall], *, asking: bool = False
    ) -> str | None:
        key = canonical_json([messages, asking])
        if key not in self._known:
            self._known[key] = self._rendered(messages, calls, asking)
        return self._known[key]

    def _rendered(self, messages: Sequence[Mapping[str, Any]], calls: Sequence[ProbeCall], asking: bool) -> str | None:
        # Some templates raise on types that they cannot describe, and are right with them in a call.
        for typed in (True, False):
            self.renders += 1
            if self.renders > MOST_RENDERS:
                why = f"more than {MOST_RENDERS} renders did not tell how calls are written"
                raise UnlearnableFormat(FormatRequirement.BOUNDED, why)
            tools = _tools(calls, typed=typed)
            try:
                text = self.renderer.render([QUESTION, *messages], tools=tools, generation_prompt=asking)
            except TemplateRaised:
                continue
            before, _, behind = text.rpartition(ASKED)
            return behind if before or behind else None
        return None


_RESULT: Final = "zqreturnedz"
_NO_CALL: Final = ProbeCall("zqtoolz", {"zqkeyz": "zqvaluez"})


def _tools(calls: Sequence[ProbeCall], *, typed: bool) -> list[dict[str, Any]]:
    """Schemas under which the calls are right, as a template may look up what it writes; or all of strings."""
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

"""Tool formats: how a model family writes tool calls, how they are read, and how they can be enforced."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeAlias

from runner.errors import BadOption
from runner.messages import ToolCall
from runner.options import Constraint, ConstraintKind, ToolChoice
from runner.tools.tool import Tool

__all__ = ["CallParameters", "Parsed", "ToolFormat"]

CallParameters: TypeAlias = Mapping[str, Sequence[str]]
"""The names of every known tool's parameters, in order."""

Signatures: TypeAlias = tuple[tuple[str, str], ...]
"""(name, JSON schema of the parameters as text) of each tool that may be called."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn's text taken apart."""

    content: str
    """What was said beside the calls; the whole text where there is none."""
    calls: list[ToolCall]
    """The calls in order; one that was opened and does not parse has its `error` set."""


class ToolFormat(ABC):
    """One way of writing tool calls as text. Formats have no state: one object serves every conversation."""

    name: ClassVar[str]
    """The short name of the format, such as "hermes"."""

    def parse(
        self, text: str, ids_start: int = 0, tools: Sequence[Tool] | None = None, tool_choice: ToolChoice = "auto"
    ) -> Parsed:
        """The calls in `text`, and the content beside them.

        Args:
            text: what the model said, without its reasoning.
            ids_start: calls are numbered from here: how many the conversation already had.
            tools: what may be called; None where that is not known. With none of them, or a `tool_choice` of
                "none", text is never read as a call.
            tool_choice: what the turn was allowed to do.
        """
        if tool_choice == "none" or (tools is not None and not tools):
            return Parsed(text, [])
        parameters = (
            None if tools is None else {tool.name: tuple(tool.parameters.get("properties", ())) for tool in tools}
        )
        content, calls = self._parse(text, parameters)
        # Only an escape can make half of a surrogate pair: what is decoded from ids has whole characters.
        numbered = [
            dataclasses.replace(_writable(call) if "\\" in text else call, id=f"call_{ids_start + index}")
            for index, call in enumerate(calls)
        ]
        return Parsed(content, numbered)

    def constraint(self, tools: Sequence[Tool], tool_choice: ToolChoice, *, parallel: bool = True) -> Constraint | None:
        """What enforces `tool_choice`, or None where nothing has to be enforced.

        Several calls in one turn are allowed only with `parallel`, and where every tool in question may run beside
        others.

        Raises:
            BadOption: a call is required and there is no tool, or none of that name.
        """
        if tool_choice in ("auto", "none"):
            return None
        allowed = [tool for tool in tools if tool_choice in ("required", tool.name)]
        if not allowed:
            names = ", ".join(tool.name for tool in tools) or "there are none"
            raise BadOption(f"tool_choice={tool_choice!r}: no such tool may be called here. Tools: {names}.")
        signatures = tuple((tool.name, json.dumps(tool.parameters)) for tool in allowed)
        many = parallel and all(tool.parallel for tool in allowed)
        return Constraint(ConstraintKind.GRAMMAR, _grammar(type(self), signatures, many))

    @abstractmethod
    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls as a chat template of this format writes them."""

    @abstractmethod
    def _parse(self, text: str, parameters: CallParameters | None) -> tuple[str, list[ToolCall]]: ...

    @abstractmethod
    def _grammar(self, signatures: Signatures, many: bool) -> str: ...


def _writable(call: ToolCall) -> ToolCall:
    """The call, or an error where an escape in it makes half of a surrogate pair, which no file can hold."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ToolCall(call.id, "", error="a string in it holds half of a surrogate pair")
    return call


# Every turn of every episode asks for one of the same few grammars.
@lru_cache(maxsize=256)
def _grammar(tool_format: type[ToolFormat], signatures: Signatures, many: bool) -> str:
    return tool_format()._grammar(signatures, many)

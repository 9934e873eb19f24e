"""Tool formats: how a model family writes tool calls, how they are read, and how they can be enforced."""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

from jinja2 import TemplateError

from runner.errors import BadOption, BadTemplate
from runner.messages import Message, ToolCall
from runner.options import Constraint, ConstraintKind, ToolChoice
from runner.tools import Tool

__all__ = ["CallParameters", "Parsed", "Render", "ToolFormat", "detect_format"]

Render: TypeAlias = Callable[[list[Message], list[dict[str, Any]]], str]
"""A chat template as a function of messages and OpenAI tools, without a generation prompt."""

CallParameters: TypeAlias = Mapping[str, Sequence[str]]
"""The names of every known tool's parameters, in order."""

Signatures: TypeAlias = tuple[tuple[str, str], ...]
"""(name, JSON schema of the parameters as text) of each tool that may be called."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn's text taken apart.

    Attributes:
        content: what was said beside the calls; the whole text where there is none.
        calls: in order; one that was opened and does not parse has `error` set.
    """

    content: str
    calls: list[ToolCall]


class ToolFormat(ABC):
    """One way of writing tool calls as text. Formats have no state: one object serves every conversation."""

    name: ClassVar[str]

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


@lru_cache(maxsize=256)
def _grammar(tool_format: type[ToolFormat], signatures: Signatures, many: bool) -> str:
    return tool_format()._grammar(signatures, many)


_TOOL, _PARAMETER, _VALUE = "probe_tool", "probe_parameter", "q7probe7value"
_PROBES: tuple[Any, ...] = ({_PARAMETER: _VALUE}, json.dumps({_PARAMETER: _VALUE}))  # some take arguments as text only
_PYTHONIC = re.compile(rf"\[{_TOOL}\({_PARAMETER}=(['\"]){_VALUE}\1\)\]")
_HERMES = re.compile(rf"<tool_call>\s*(\{{[^<>]*{_VALUE}[^<>]*\}})\s*</tool_call>")


def detect_format(render: Render) -> ToolFormat | None:
    """The format in which a chat template writes the calls of an assistant message, or None if we know it not.

    Args:
        render: the template; it is asked for one message with a call and its output is looked at, not its source.
    """
    from runner.parsing.hermes import Hermes
    from runner.parsing.pythonic import Pythonic

    for arguments in _PROBES:
        text = _rendered_call(render, arguments)
        calls = _PYTHONIC.search(text)
        if calls is not None and _stand_alone(render, text, calls):
            return Pythonic()
        if any(_is_hermes_call(match[1]) for match in _HERMES.finditer(text)):
            return Hermes()
    return None


def _rendered_call(render: Render, arguments: Any) -> str:
    call: Any = {"id": "call_0", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return _rendered(
        render,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "call_0", "name": _TOOL},
    )


def _rendered(render: Render, *messages: Message) -> str:
    parameters = {"type": "object", "properties": {_PARAMETER: {"type": "string"}}, "required": [_PARAMETER]}
    function = {"name": _TOOL, "description": "A tool.", "parameters": parameters}
    try:
        return render([{"role": "user", "content": "Go on."}, *messages], [{"type": "function", "function": function}])
    # A template is a program of its own: these are what one raises on a message that it does not know.
    except (BadTemplate, TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return ""


def _stand_alone(render: Render, text: str, calls: re.Match[str]) -> bool:
    """The calls stand where content would; LFM2 puts tokens of its own around them, which is another format."""
    content = _rendered(render, {"role": "assistant", "content": _VALUE}, {"role": "user", "content": "done"})
    before, _, after = content.partition(_VALUE)
    left, right = text[: calls.start()], text[calls.end() :]
    return left.rstrip() == before.rstrip() and right.lstrip()[:4] == after.lstrip()[:4]


def _is_hermes_call(text: str) -> bool:
    try:
        call = json.loads(text)
    except ValueError:
        return False
    return call.get("name") == _TOOL and "arguments" in call

"""Parser that reads, writes and constrains assistant turns, in the learnt format or in a format that the user named."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import orjson

from runner.errors import BadOption
from runner.messages import ToolCall
from runner.options import Constraint, ToolChoice
from runner.parsing.call_grammar import constraint, harmony_constraint
from runner.parsing.call_reader import ReadCall, Schemas
from runner.parsing.call_writer import WrittenCall, id_for, write_calls
from runner.parsing.events import TurnReading
from runner.parsing.external_reader import ExternalReader
from runner.parsing.harmony import HarmonyStream, read_harmony
from runner.parsing.response_template import ResponseTemplateReader
from runner.parsing.streaming import TurnStream
from runner.parsing.turn_format import CallFormat, IdStyle, ReasoningFormat, TurnFormat
from runner.parsing.turn_reader import USUAL, TurnReader, ends_in_thought, split_thought
from runner.tools.tool import Tool

__all__ = ["CallNumbers", "ParsedText", "TurnParser"]

MAX_CONSTRAINTS = 256
"""Maximum number of constraints that a parser caches."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """The parts of a turn's text."""

    content: str
    """Text beside reasoning and calls."""
    reasoning: str
    """The reasoning; "" if missing."""
    calls: list[ToolCall]
    """Calls in order; an unreadable call has its `error` set."""


@dataclass(frozen=True)  # no slots: cached properties need a dict
class TurnParser:
    """Parser for one turn format. It is stateless: one object serves every conversation."""

    format: TurnFormat
    control_tokens: Mapping[str, int] = field(default_factory=dict)
    """Control tokens that occur in the format, with their ids."""
    named: ExternalReader | None = None
    """Reader of calls in a format that the user named; None if the user named no format.

    Required calls are read in the learnt format instead, if there is one.
    """
    stops: tuple[str, ...] = ()
    """Control tokens that end a turn."""

    @property
    def reads_calls(self) -> bool:
        return self.named is not None or self.format.calls is not None or self.format.response is not None

    @property
    def writes_as_read(self) -> bool:
        """True if calls are read in the format in which they can be written and enforced."""
        return self.named is None and self.format.calls is not None

    @property
    def reasoning(self) -> ReasoningFormat:
        return self.format.reasoning or USUAL

    def parse(
        self,
        text: str,
        tools: Sequence[Tool],
        tool_choice: ToolChoice = "auto",
        *,
        before: int = 0,
        ids: Sequence[int] = (),
    ) -> ParsedText:
        """Return the reasoning, the content and the calls of `text`.

        Args:
            text: output of the model.
            tools: tools that may be called. Without tools, or with `tool_choice` "none", nothing is read as a call.
            tool_choice: the `tool_choice` of the turn.
            before: number of earlier calls in the conversation, from which the numbers in new ids continue.
            ids: token ids of `text`, for a named format; further ids, such as a stop token, may follow.
        """
        called = tools if tool_choice != "none" else ()
        if self.named is not None and self._by_name(called, tool_choice):
            reading = self.read_named(text, _schemas(called), ids)
        else:
            reading = self._read(text, called)
        number = CallNumbers(self.format, before)
        return ParsedText(reading.content, reading.reasoning, [number(call) for call in reading.calls])

    def streams(self, tools: Sequence[Tool], tool_choice: ToolChoice = "auto") -> bool:
        """Return whether a turn can be read while it is sampled."""
        called = tools if tool_choice != "none" else ()
        return not called or not (self._by_name(called, tool_choice) or self.format.response is not None)

    def stream(self, tools: Sequence[Tool], tool_choice: ToolChoice = "auto") -> TurnStream | HarmonyStream:
        """Return a reader for a turn that is being sampled. Its final `reading` has the parts that `parse` reads.

        The calls have no generated ids; `CallNumbers` adds them.

        Raises:
            BadOption: calls can only be read in complete turns.
        """
        called = tools if tool_choice != "none" else ()
        if not self.streams(tools, tool_choice):
            raise BadOption(
                f"conversation.stream(): {self._reads_by} reads calls only in complete turns: use "
                "generate(), or a template whose calls can be learnt and no tool format; or stream(tool_choice='none')."
            )
        if self.format.harmony:
            return HarmonyStream(calls=bool(called))
        reader = self._reader if called else self._without_calls
        return TurnStream(reader, _schemas(called))

    def _by_name(self, called: Sequence[Tool], tool_choice: ToolChoice) -> bool:
        """Return True if the named format reads the calls. The learnt format, if there is one, reads required calls."""
        return self.named is not None and bool(called) and (tool_choice == "auto" or self.format.calls is None)

    def _read(self, text: str, tools: Sequence[Tool]) -> TurnReading:
        if self.format.harmony:
            return read_harmony(text, calls=bool(tools))
        if not tools:
            return self._without_calls.read(text)
        if self._response is not None:
            return self._response.read(text, _schemas(tools))
        return self._reader.read(text, _schemas(tools))

    def read_named(self, text: str, schemas: Schemas, ids: Sequence[int]) -> TurnReading:
        """Return the parts of a turn in the format that the user named."""
        assert self.named is not None, "the caller checks that there is a named format"
        reasoning, content = split_thought(text, self.reasoning)
        reading = self.named.read(text, ids, len(text) - len(content), schemas)
        return TurnReading(reasoning, reading.content, reading.calls)

    def ends_in_thought(self, text: str) -> bool:
        """Return whether a turn's text ends inside its reasoning."""
        # In a turn with channels, any message may be reasoning, not only the first one.
        said = text.rpartition(self.reasoning.close)[2] if self.format.harmony else text
        return ends_in_thought(said.removeprefix("<|start|>assistant") if self.format.harmony else said, self.reasoning)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return the calls as the template writes them.

        Raises:
            Unwritable: the template cannot write the calls.
        """
        form = self.format.calls
        assert form is not None, "the caller checks that calls can be written"
        named = ((call, call.id or id_for(form, call.name, number)) for number, call in enumerate(calls))
        return write_calls(form, [WrittenCall(call.name, call.arguments, call_id) for call, call_id in named])

    def constraint(self, tools: Sequence[Tool], tool_choice: ToolChoice, *, parallel: bool = True) -> Constraint | None:
        """Return the constraint for `tool_choice`, or None if nothing has to be enforced.

        Raises:
            BadOption: a call is required, and no tool is allowed or can be called; or the calls have no form that can
                be enforced.
        """
        form = self.format.calls
        if tool_choice == "none" or (tool_choice == "auto" and not any(tool.strict for tool in tools)):
            return None
        if form is None and tool_choice == "auto" and not self.reads_calls:
            return None
        if form is None or (tool_choice == "auto" and self.named is not None):
            raise BadOption(self._unenforceable(tool_choice))
        if self.format.harmony:
            return harmony_constraint(form, tools, tool_choice, self.control_tokens)
        # Constraints are cached, since the turns of all episodes have only a few different ones.
        key = tool_choice, parallel, *[(tool.name, tool.parameters_text, tool.parallel) for tool in tools]
        if key not in self._constraints:
            if len(self._constraints) >= MAX_CONSTRAINTS:
                self._constraints.clear()
            self._constraints[key] = constraint(
                form,
                tools,
                tool_choice,
                parallel=parallel,
                thought=self.format.reasoning,
                control_tokens=self.control_tokens,
                stops=self.stops,
            )
        return self._constraints[key]

    def _unenforceable(self, tool_choice: ToolChoice) -> str:
        what, leave = f"tool_choice={tool_choice!r}", "give 'auto'"
        fix = "a template whose calls can be learnt (--template pythonic, hermes, or a file)"
        if tool_choice == "auto":
            what, leave = "@tool(strict=True)", "leave it out"
            fix = "no tool format, since the template's own can be enforced" if self.format.calls else fix
        if not self.reads_calls:
            return f"{what}: the chat template writes calls in a form that cannot be read: give {fix}."
        by = self._reads_by
        return f"{what}: {by} reads calls, but their written form is unknown: {leave}, or give {fix}."

    @property
    def _reads_by(self) -> str:
        return self.named.name if self.named is not None else "the model's response_template"

    @cached_property
    def _constraints(self) -> dict[tuple[object, ...], Constraint | None]:
        return {}

    @cached_property
    def _response(self) -> ResponseTemplateReader | None:
        return None if self.format.response is None else ResponseTemplateReader(self.format.response)

    @cached_property
    def marker_tokens(self) -> Mapping[str, int]:
        """Control tokens in the marks of reasoning and in the text that begins calls, with their ids.

        In Harmony, all control tokens of the format are included. All other control tokens are read as text. The
        mapping is empty if the user named a format, since the reader of such a format receives the ids.
        """
        if self.named is not None:
            return {}
        if self.format.harmony:
            return self.control_tokens
        trigger = self.format.calls.trigger if self.format.calls else ""
        opens = self._response.opens if self._response is not None else ()
        marks = (trigger, self.reasoning.open, self.reasoning.close, *opens)
        return {name: each for name, each in self.control_tokens.items() if any(name in mark for mark in marks)}

    @cached_property
    def _reader(self) -> TurnReader:
        return TurnReader(self.format)

    @cached_property
    def _without_calls(self) -> TurnReader:
        return TurnReader(replace(self.format, calls=None))


class CallNumbers:
    """Assignment of ids to the calls of one turn, in order. A model's id is kept if it is valid and new in the turn."""

    def __init__(self, form: TurnFormat, before: int) -> None:
        """Begin a turn after `before` calls of its conversation."""
        self._form: CallFormat | None = form.calls
        self._ids: IdStyle = form.ids if form.calls is None else form.calls.ids
        self._number = before
        self._taken: set[str] = set()

    def __call__(self, call: ReadCall) -> ToolCall:
        """Return the next call of the turn with its id."""
        call = _named(_writable(call))
        # Later prompts contain the id as template text, so control text in the id would become control ids.
        plain = call.id is not None and re.fullmatch(self._ids.pattern(), call.id)
        own = call.id if plain and call.id not in self._taken else None
        call_id = own or self._made(call.name)
        self._taken.add(call_id)
        self._number += 1
        return ToolCall(call_id, call.name, call.arguments, error=call.error)

    def _made(self, name: str) -> str:
        """Return a new id that no earlier call of the turn has."""
        for number in itertools.count(self._number):
            made = self._ids.format(number=number) if self._form is None else id_for(self._form, name, number)
            if made not in self._taken:
                return made
        raise AssertionError("unreachable: itertools.count() does not end")


def _schemas(tools: Sequence[Tool]) -> Schemas:
    return {tool.name: tool.parameters for tool in tools}


def _writable(call: ReadCall) -> ReadCall:
    """Return the call, or a call with an error if a string in it has an unpaired surrogate, which no file can store."""
    if call.error is None and not _is_text([call.name, call.arguments, call.id]):
        name = call.name if _is_text(call.name) else ""
        return ReadCall(name, error="a string in it contains half of a surrogate pair")
    return call


def _named(call: ReadCall) -> ReadCall:
    if call.error is None and not call.name.strip():
        return ReadCall("", error="the name of a tool is missing")
    return call


def _is_text(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:  # orjson also rejects integers of more than 64 bits
        return _is_text_however_large(value)
    return True


def _is_text_however_large(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

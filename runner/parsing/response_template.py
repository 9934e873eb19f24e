"""Reader of turns by the response template of a checkpoint, with the parser of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from runner.errors import first_line
from runner.parsing.call_reader import ReadCall, Schemas
from runner.parsing.events import TurnReading
from runner.parsing.external_reader import external_call
from runner.parsing.turn_format import ResponseFormat

__all__ = ["NoParser", "ResponseTemplateReader"]

THOUGHTS: Final = ("thinking", "reasoning_content", "reasoning")
CONTENT: Final = "content"
CALLS: Final = "tool_calls"


class NoParser(Exception):
    """No parser exists for this response template; the message is a clause with the reason."""


@dataclass(frozen=True)  # no slots: cached properties need a dict
class ResponseTemplateReader:
    """Stateless reader of turns by one `ResponseFormat`: one object serves every turn."""

    format: ResponseFormat

    def load(self) -> None:
        """Import the parser, which takes a second, and load the template.

        Raises:
            NoParser: transformers is missing or too old, or refuses the template.
        """
        _ = self._loaded

    def read(self, text: str, schemas: Schemas | None = None) -> TurnReading:
        """Return the parts of a turn's text.

        The parser stops at the first call that it cannot read. The result then has the earlier calls and one call with
        the error, and later text is not read. The parser reads a truncated call as if it were complete, so such a call
        receives an error too.
        """
        tools = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name, parameters in (schemas or {}).items()
        ]
        parser = self._parser(tools)
        try:
            parser.feed(text)
            message, ended = parser.finalize()
        except Exception as error:  # a template of a third party may raise anything
            return self._until(text, tools, error)
        calls = _calls(message.get(CALLS))
        at_the_end = [each["value"] for each in ended if each["type"] == "region_close" and each["field"] == CALLS]
        if at_the_end and self.format.closed and not self.ends_closed(text):
            cut = _calls(at_the_end)
            name = cut[0].name if cut else ""
            calls = [*calls[: len(calls) - len(cut)], ReadCall(name, error=f"{self._close} is missing after it")]
        return _reading(message, calls)

    @cached_property
    def opens(self) -> tuple[str, ...]:
        """Texts and regular expressions that open a part of a turn in the template."""
        fields = [each for each in self.format.template.get("fields", {}).values() if isinstance(each, Mapping)]
        given = [each[key] for each in fields for key in ("open", "open_pattern") if key in each]
        return tuple(text for each in given for text in (each if isinstance(each, list) else [each]))

    def ends_closed(self, text: str) -> bool:
        """Return True if the turn ends with the close of a call, or if calls have no close."""
        field = self._loaded[1].fields.get(CALLS)
        if field is None or field.close_re is None:
            return True
        length = len(text.rstrip())
        return any(match.end() >= length for match in field.close_re.finditer(text))

    @property
    def _close(self) -> str:
        literals = self._loaded[1].fields[CALLS].close_literals
        return repr(literals[0]) if literals else "the close of a call"

    def _until(self, text: str, tools: Sequence[Mapping[str, Any]], error: Exception) -> TurnReading:
        """Return the parts before the position at which the parser raised, and a call with the error."""
        message: dict[str, list[Any]] = {}
        # The text is fed character by character, since the exception discards all events of the piece that raises it.
        parser = self._parser(tools)
        try:
            for letter in text:
                for event in parser.feed(letter):
                    if event["type"] == "region_close":
                        message.setdefault(event["field"], []).append(event["value"])
        except Exception as raised:  # this is the same error, or an error about the shorter text
            error = raised
        cause = error.__cause__ or error
        calls = [each for value in message.get(CALLS, []) for each in _calls(value)]
        return _reading(message, [*calls, ReadCall("", error=first_line(cause))])

    def _parser(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        parser_class, template = self._loaded
        return parser_class(template, prefix=self.format.prompt, tools=tools)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        try:
            from transformers.utils.chat_parsing import ResponseParser
            from transformers.utils.chat_parsing.response_templates import load_response_template
        except ImportError:
            raise NoParser(
                "the response template needs transformers 5.19 or newer: pip install -U transformers"
            ) from None
        try:
            return ResponseParser, load_response_template(dict(self.format.template))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NoParser(f"transformers refuses the response template: {first_line(error)}") from None


def _reading(message: Mapping[str, Any], calls: list[ReadCall]) -> TurnReading:
    content = _text(message.get(CONTENT))
    thought = next((_text(message[name]) for name in THOUGHTS if name in message), "")
    return TurnReading(thought, content.strip() if calls else content, calls)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    return "" if value is None else str(value)


def _calls(value: Any) -> list[ReadCall]:
    return list(_each_call(value))


def _each_call(value: Any) -> Iterator[ReadCall]:
    if isinstance(value, list):
        for each in value:
            yield from _each_call(each)
    elif isinstance(value, Mapping):
        function = value.get("function", value)
        fields = function if isinstance(function, Mapping) else {}
        yield external_call(fields.get("name"), fields.get("arguments"), value.get("id"))
    elif value is not None:
        yield ReadCall("", error=f"{value!r:.40} is not a call")

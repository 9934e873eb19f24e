"""The traits of a chat template, each with its name, value and meaning."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import orjson

__all__ = [
    "Arguments",
    "Bos",
    "Literals",
    "NullContent",
    "ParallelResults",
    "PromptReasoning",
    "Reasoning",
    "SystemMidRun",
    "SystemPosition",
    "TemplateProfile",
    "ToolsPosition",
    "TraitValue",
]

TraitValue: TypeAlias = "str | bool | tuple[str, ...]"
"""The value of a trait: a member of an enum, a string, True or False, or several names."""


class Bos(enum.StrEnum):
    """The template's treatment of the BOS token, which begins a text."""

    WRITTEN = "written"
    TWICE = "twice"
    NOT_WRITTEN = "not_written"
    MISSING = "missing"  # the tokenizer begins every text with a BOS token, and the template writes none


class PromptReasoning(enum.StrEnum):
    """The generation prompt's treatment of reasoning."""

    LEFT_OPEN = "left_to_the_model"
    OPENED = "opened"
    EMPTY = "empty_block"  # a block that is opened and closed at once


class Reasoning(enum.StrEnum):
    """The template's treatment of earlier reasoning."""

    KEPT = "kept"
    ONLY_LAST = "only_last"  # reasoning is dropped once a user message follows
    NOT_SHOWN = "not_shown"


class ToolsPosition(enum.StrEnum):
    """The position of the tools' definitions."""

    FIRST = "first"
    MOVES = "moves"  # they are before the last user message, and move with each new one
    NOT_SHOWN = "not_shown"


class ParallelResults(enum.StrEnum):
    """The template's treatment of the results of parallel calls."""

    ONE_BY_ONE = "one_by_one"  # each result may be appended by itself
    TOGETHER = "together"  # the results share a block, so they are appended at once
    NOT_SHOWN = "not_shown"


class Arguments(enum.StrEnum):
    """The form in which the template needs the arguments of a call."""

    EITHER = "either"
    OBJECT = "object"
    STRING = "string"
    NEITHER = "neither"  # the arguments are not shown


class Literals(enum.StrEnum):
    """The form of true, false and null in the arguments of a call."""

    JSON = "json"
    PYTHON = "python"
    NOT_SHOWN = "not_shown"


class NullContent(enum.StrEnum):
    """The effect of a message whose content is null, as OpenAI's clients send it with calls."""

    ACCEPTED = "accepted"
    RAISES = "raises"
    WRITTEN = "written"  # the template writes the word None
    NEEDED = "needed"  # calls are shown only with null content


class SystemPosition(enum.StrEnum):
    """The position of the system message at the beginning of a conversation."""

    FIRST = "first"
    MOVES = "moves"  # it is before the last user message, and moves with each new one
    DROPPED = "dropped"
    REFUSED = "refused"


class SystemMidRun(enum.StrEnum):
    """The template's treatment of a system message between the turns."""

    KEPT = "kept"
    DROPPED = "dropped"
    MOVED = "moved"  # the template writes the message before the turns
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """The traits of a template, found only by rendering. Each attribute is a trait."""

    bos: Bos
    """The treatment of the token that begins a text."""
    default_system: str
    """The words that the template writes before the first user message if there is no system message, or ""."""
    clock: bool
    """True if the text depends on the date."""
    options: tuple[str, ...]
    """Names that the template reads in addition to the names that are always set."""
    generation_prompt: str
    """The text that begins the model's turn in a prompt, or ""."""
    prompt_reasoning: PromptReasoning
    """The generation prompt's treatment of reasoning."""
    opened_twice: bool
    """True if the assistant's turn is opened twice after some kind of message."""
    close: str
    """The control text that ends an answer if a message follows, or ""."""
    close_at_end: str
    """The control text that ends an answer if nothing follows, or ""."""
    close_after_call: str
    """The text that ends a turn with a call if nothing follows, or ""."""
    separator: str
    """The text between the close and the next message, or ""."""
    stop_opens_next: tuple[str, ...]
    """Control tokens that open the next message and with which a turn stops; () if a turn has a close."""
    reasoning: Reasoning
    """The treatment of `reasoning_content`."""
    inline_reasoning: Reasoning
    """The treatment of a `<think>` block inside a content."""
    tools: ToolsPosition
    calls_shown: bool
    """True if an assistant turn shows its calls."""
    results_shown: bool
    """True if the results of tools are shown."""
    parallel_results: ParallelResults
    """The treatment of the results of parallel calls."""
    arguments: Arguments
    literals: Literals
    null_content: NullContent
    system: SystemPosition
    system_mid_run: SystemMidRun
    """The treatment of a system message between the turns."""
    trimmed: tuple[str, ...]
    """The roles whose contents lose white space at their ends."""

    @property
    def carries_tools(self) -> bool:
        """True if definitions, calls and results are all shown."""
        return self.tools is not ToolsPosition.NOT_SHOWN and self.calls_shown and self.results_shown

    def traits(self) -> Iterator[tuple[str, TraitValue, str]]:
        """Yield the name of each trait, its value, and one sentence on its meaning."""
        for name, sentences in _EXPLANATIONS.items():
            value: TraitValue = getattr(self, name)
            yield name, value, sentences[value if isinstance(value, enum.Enum | bool) else bool(value)]

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = orjson.loads(orjson.dumps(self))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the profile from the values of `as_json`."""
        from pydantic import TypeAdapter  # imported here, so that the probing process starts fast

        return TypeAdapter(cls).validate_python(values)


_REASONING_KEPT = "Reasoning of earlier turns stays in the text, as the model saw it."
_EXPLANATIONS: Mapping[str, Mapping[Any, str]] = {
    "bos": {
        Bos.WRITTEN: "The text begins with its BOS token; nothing is added to it.",
        Bos.TWICE: "The text begins with two BOS tokens, which no model was trained on: remove one from the template.",
        Bos.NOT_WRITTEN: "The template begins without a BOS token, and none is added.",
        Bos.MISSING: "The tokenizer begins every text with a BOS token, but the template writes none: prompts of "
        "deltarunner have none, unlike prompts of servers that add one.",
    },
    "default_system": {
        True: "The template writes this text before the first user message; a system message replaces or follows it.",
        False: "Without a system message there is no text before the first user message.",
    },
    "clock": {
        True: "The text contains the date. A run keeps the date of its start, so that no prompt changes at midnight.",
        False: "The text is the same on every day.",
    },
    "options": {
        True: "Names that the template reads: set them with --template-option NAME=VALUE.",
        False: "The template reads no options.",
    },
    "generation_prompt": {
        True: "The text that begins the model's turn; it is in every prompt, with loss mask 0.",
        False: "add_generation_prompt changes nothing: the model begins its own turn.",
    },
    "prompt_reasoning": {
        PromptReasoning.LEFT_OPEN: "The model decides whether a turn begins with reasoning.",
        PromptReasoning.OPENED: "The prompt ends inside a reasoning block, so every turn begins with reasoning, whose "
        "opening the model did not sample.",
        PromptReasoning.EMPTY: "The prompt ends with an empty reasoning block, which turns reasoning off.",
    },
    "opened_twice": {
        True: "After some messages the assistant's turn is opened twice, which no model was trained on; such prompts "
        "are refused.",
        False: "The assistant's turn is opened once, after any message.",
    },
    "close": {
        True: "The text that ends an answer if a message follows.",
        False: "An answer has no end mark: the opening of the next message ends it.",
    },
    "close_at_end": {
        True: "The text that ends an answer if nothing follows, as the model was trained to write it. If it differs "
        "from the close before a message, the sampled close is kept and replaces that close.",
        False: "If nothing follows, an answer has no end mark.",
    },
    "close_after_call": {
        True: "The text that ends a turn with calls: it must be one of the model's stop ids.",
        False: "A turn with calls has no end mark, or the template shows no calls.",
    },
    "separator": {
        True: "The text between the close and the next message. The model never samples this text: the bridge adds it, "
        "also after a stop that is not the close. Without a close, the stop replaces the text.",
        False: "The next message follows the close directly.",
    },
    "stop_opens_next": {
        True: "A turn stops with the token that opens the next message. The bridge leaves this token out, since the "
        "prompt would have it twice.",
        False: "The stop of a turn does not open the next message.",
    },
    "reasoning": {
        Reasoning.KEPT: _REASONING_KEPT,
        Reasoning.ONLY_LAST: "Reasoning is dropped once a user message follows, so a full render does not begin with "
        "the sampled ids any more: append keeps it, fork follows the template.",
        Reasoning.NOT_SHOWN: "Reasoning in reasoning_content is not written.",
    },
    "inline_reasoning": {
        Reasoning.KEPT: _REASONING_KEPT,
        Reasoning.ONLY_LAST: "A <think> block in a content is removed once a user message follows; sampled ids are "
        "kept in any case.",
        Reasoning.NOT_SHOWN: "A <think> block in a content is always removed; sampled ids are kept in any case.",
    },
    "tools": {
        ToolsPosition.FIRST: "The tools are before the conversation and stay there.",
        ToolsPosition.MOVES: "The tools are written before the last user message, and move with every new one, so no "
        "prompt can begin with the previous prompt.",
        ToolsPosition.NOT_SHOWN: "The model is not shown the tools: no environment with tools can be played.",
    },
    "calls_shown": {
        True: "A turn's calls are written with it.",
        False: "A turn's calls are not written: no environment with tools can be played.",
    },
    "results_shown": {
        True: "The results of tools are written.",
        False: "The results of tools are not written: no environment with tools can be played.",
    },
    "parallel_results": {
        ParallelResults.ONE_BY_ONE: "Results of parallel calls may be appended one after the other.",
        ParallelResults.TOGETHER: "Results of parallel calls share a block, and would be another text if they were "
        "appended one by one: they are appended together.",
        ParallelResults.NOT_SHOWN: "The template shows no parallel results.",
    },
    "arguments": {
        Arguments.EITHER: "A call's arguments may be an object or JSON text.",
        Arguments.OBJECT: "A call's arguments must be an object; as JSON text they would be quoted once more.",
        Arguments.STRING: "A call's arguments must be JSON text; they are converted.",
        Arguments.NEITHER: "A call's arguments are not shown.",
    },
    "literals": {
        Literals.JSON: "true and null are written in a call as in JSON.",
        Literals.PYTHON: "true and null are written as Python's True and None: if the model writes JSON, a call in a "
        "later render differs from the text that the model sampled.",
        Literals.NOT_SHOWN: "A call's arguments are not shown.",
    },
    "null_content": {
        NullContent.ACCEPTED: "A message with content null renders like an empty one.",
        NullContent.RAISES: "A message with content null makes the template fail; deltarunner only renders text.",
        NullContent.NEEDED: "Calls are shown only in messages whose content is null, so an empty content beside a call "
        "becomes null.",
        NullContent.WRITTEN: "A message with content null is shown as the word None; deltarunner only renders text.",
    },
    "system": {
        SystemPosition.FIRST: "A system message is before the conversation and stays there.",
        SystemPosition.MOVES: "The system message is written before the last user message, and moves with every new "
        "one, so no prompt can begin with the previous prompt. Put its text into the first user message.",
        SystemPosition.DROPPED: "A system message is dropped without an error: put it into the first user message.",
        SystemPosition.REFUSED: "A system message makes the template fail: put it into the first user message.",
    },
    "system_mid_run": {
        SystemMidRun.KEPT: "A system message between the turns stays where it is.",
        SystemMidRun.DROPPED: "A system message between the turns is dropped without an error: send it as a user "
        "message.",
        SystemMidRun.MOVED: "A system message between the turns is written before the turns, so no prompt can begin "
        "with the previous prompt: send it as a user message.",
        SystemMidRun.REFUSED: "A system message between the turns makes the template fail: send it as a user message.",
    },
    "trimmed": {
        True: "Messages of these roles lose white space at their ends; sampled text is never trimmed.",
        False: "Contents are written unchanged.",
    },
}

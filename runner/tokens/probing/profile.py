"""TemplateProfile: the traits of a chat template, each with its name, value and meaning."""

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
"""The value of a trait: a member of an enum, a text, yes or no, or several names."""


class Bos(enum.StrEnum):
    """The token that begins a text."""

    WRITTEN = "written"
    TWICE = "twice"
    NOT_WRITTEN = "not_written"
    MISSING = "missing"  # the tokenizer would begin every text with one


class PromptReasoning(enum.StrEnum):
    """The generation prompt's treatment of reasoning."""

    LEFT_OPEN = "left_to_the_model"
    OPENED = "opened"
    EMPTY = "empty_block"  # opened and closed again


class Reasoning(enum.StrEnum):
    """The template's treatment of earlier reasoning."""

    KEPT = "kept"
    ONLY_LAST = "only_last"  # dropped once a user follows
    NOT_SHOWN = "not_shown"


class ToolsPosition(enum.StrEnum):
    """The position of the tools' definitions."""

    FIRST = "first"
    MOVES = "moves"  # before the last user message, wherever that is
    NOT_SHOWN = "not_shown"


class ParallelResults(enum.StrEnum):
    """The results of parallel calls."""

    ONE_BY_ONE = "one_by_one"  # each may be appended by itself
    TOGETHER = "together"
    NOT_SHOWN = "not_shown"


class Arguments(enum.StrEnum):
    """The form in which the template needs the arguments of a call."""

    EITHER = "either"
    OBJECT = "object"
    STRING = "string"
    NEITHER = "neither"


class Literals(enum.StrEnum):
    """The form of true, false and null in the arguments of a call."""

    JSON = "json"
    PYTHON = "python"
    NOT_SHOWN = "not_shown"


class NullContent(enum.StrEnum):
    """The effect of a message with null content, as OpenAI's clients send with calls."""

    ACCEPTED = "accepted"
    RAISES = "raises"
    WRITTEN = "written"  # as the word None
    NEEDED = "needed"  # calls are shown only beside it


class SystemPosition(enum.StrEnum):
    """The position of the system message at the beginning of a conversation."""

    FIRST = "first"
    MOVES = "moves"  # before the last user message, wherever that is
    DROPPED = "dropped"
    REFUSED = "refused"


class SystemMidRun(enum.StrEnum):
    """A system message between the turns."""

    KEPT = "kept"
    DROPPED = "dropped"
    MOVED = "moved"  # to the front
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """The traits of a template, found only by rendering. Each attribute is a trait."""

    bos: Bos
    """True if the token that begins a text is written."""
    default_system: str
    """The words before the first question without a system message, or ""."""
    clock: bool
    """True if the text depends on the date."""
    options: tuple[str, ...]
    """Names that the template reads beyond those that it always gets."""
    generation_prompt: str
    """The text that asks the model to speak, or ""."""
    prompt_reasoning: PromptReasoning
    """True if the generation prompt begins a thought."""
    opened_twice: bool
    """True if the assistant's turn is opened twice after some kind of message."""
    close: str
    """The control text that ends an answer once something follows, or ""."""
    close_at_end: str
    """The control text that ends an answer while nothing follows, or ""."""
    close_after_call: str
    """The text that ends a turn with a call, while nothing follows."""
    separator: str
    """The text between the close and the next message."""
    stop_opens_next: tuple[str, ...]
    """Control tokens that open the next message and that a turn stops with."""
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
    """True if the results of parallel calls may be appended one by one."""
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
        """The name of each trait, its value, and one sentence on its meaning."""
        for name, sentences in _EXPLANATIONS.items():
            value: TraitValue = getattr(self, name)
            yield name, value, sentences[value if isinstance(value, enum.Enum | bool) else bool(value)]

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = orjson.loads(orjson.dumps(self))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The profile from the values of `as_json`."""
        from pydantic import TypeAdapter  # here, since the process that probes must start fast and does not need it

        return TypeAdapter(cls).validate_python(values)


_REASONING_KEPT = "Thoughts of earlier turns stay in the text, so it is what the model itself had before it."
_EXPLANATIONS: Mapping[str, Mapping[Any, str]] = {
    "bos": {
        Bos.WRITTEN: "The text begins with its BOS token; nothing is added to it.",
        Bos.TWICE: "The text begins with two BOS tokens, which no model was trained on: take one out of the template.",
        Bos.NOT_WRITTEN: "The template begins without a BOS token, and none is added.",
        Bos.MISSING: "The tokenizer would begin every text with a BOS token and the template writes none: prompts here "
        "have none, unlike those of servers that add it.",
    },
    "default_system": {
        True: "The template writes these words before the first question; a system message of yours "
        "replaces them, or follows them.",
        False: "Without a system message nothing stands before the first question.",
    },
    "clock": {
        True: "The text has the date in it, which a run freezes at its start, so that no prompt changes at midnight.",
        False: "The text is the same on every day.",
    },
    "options": {
        True: "Names that the template reads: set them with --template-option NAME=VALUE.",
        False: "The template reads nothing that could be set.",
    },
    "generation_prompt": {
        True: "What asks the model to speak; it is in every prompt, with loss mask 0.",
        False: "add_generation_prompt changes nothing: the model begins its own turn.",
    },
    "prompt_reasoning": {
        PromptReasoning.LEFT_OPEN: "Whether a turn begins with a thought is up to the model.",
        PromptReasoning.OPENED: "The prompt ends inside a reasoning block, so every turn begins with a thought, whose "
        "opening the model did not sample.",
        PromptReasoning.EMPTY: "The prompt ends with an empty reasoning block, which turns thinking off.",
    },
    "opened_twice": {
        True: "After some messages the assistant's turn is opened twice, which no model was trained on; such prompts "
        "are refused.",
        False: "The assistant's turn is opened once, whatever came before.",
    },
    "close": {
        True: "What ends an answer once something follows it.",
        False: "Nothing of its own ends an answer: the next message's opening does.",
    },
    "close_at_end": {
        True: "What ends an answer while nothing follows it, as the model was trained to write it; where it is not the "
        "close above, the sampled one stays and stands in its place.",
        False: "While nothing follows, nothing ends an answer.",
    },
    "close_after_call": {
        True: "What ends a turn that called a tool: it has to be among the model's stop ids.",
        False: "Nothing of its own ends a turn that called a tool, or the template shows no calls.",
    },
    "separator": {
        True: "The text between the close and the next message. The model never samples it; the bridge adds it, "
        "also after another stop. Without a close, a stop takes its place.",
        False: "The next message follows the close directly.",
    },
    "stop_opens_next": {
        True: "A turn stops with the token that opens the next message, so that appending the whole message would "
        "write it twice; the bridge leaves it out.",
        False: "What ends a turn is not what opens the next message.",
    },
    "reasoning": {
        Reasoning.KEPT: _REASONING_KEPT,
        Reasoning.ONLY_LAST: "Thoughts are dropped once a user follows, so a full render no longer begins with what "
        "was sampled: append keeps them, fork follows the template.",
        Reasoning.NOT_SHOWN: "Thoughts given as reasoning_content are not written at all.",
    },
    "inline_reasoning": {
        Reasoning.KEPT: _REASONING_KEPT,
        Reasoning.ONLY_LAST: "A <think> block inside a content is cut out once a user follows; ids that were sampled "
        "are kept all the same.",
        Reasoning.NOT_SHOWN: "A <think> block inside a content is cut out at once; ids that were sampled are kept all "
        "the same.",
    },
    "tools": {
        ToolsPosition.FIRST: "The tools stand before the conversation and stay there.",
        ToolsPosition.MOVES: "The tools are written before the last user message, so they move when a user speaks "
        "again: then no prompt can begin with the one before.",
        ToolsPosition.NOT_SHOWN: "The model is not shown the tools: no environment with tools can be played.",
    },
    "calls_shown": {
        True: "A turn's calls are written with it.",
        False: "A turn's calls are not written: no environment with tools can be played.",
    },
    "results_shown": {
        True: "The model is shown what a tool returned.",
        False: "The model is not shown what a tool returned: no environment with tools can be played.",
    },
    "parallel_results": {
        ParallelResults.ONE_BY_ONE: "Results of parallel calls may be appended one after the other.",
        ParallelResults.TOGETHER: "Results of parallel calls share a block: appended one by one they would give "
        "another text, so they are appended together.",
        ParallelResults.NOT_SHOWN: "The template shows no parallel results.",
    },
    "arguments": {
        Arguments.EITHER: "A call's arguments may be an object or JSON text.",
        Arguments.OBJECT: "A call's arguments must be an object; as JSON text they would be quoted once more.",
        Arguments.STRING: "A call's arguments must be JSON text; they are converted.",
        Arguments.NEITHER: "A call's arguments are not shown.",
    },
    "literals": {
        Literals.JSON: "true and null stand in a call as JSON has them.",
        Literals.PYTHON: "true and null are written as Python's True and None: a call that is rendered again is not "
        "what a model wrote that speaks JSON, and trains on text that it never sampled.",
        Literals.NOT_SHOWN: "A call's arguments are not shown.",
    },
    "null_content": {
        NullContent.ACCEPTED: "A message with content null renders like an empty one.",
        NullContent.RAISES: "A message with content null makes the template fail; here it is always given as text.",
        NullContent.NEEDED: "Calls are shown only in messages whose content is null, so an empty content beside a call "
        "is given as null.",
        NullContent.WRITTEN: "A message with content null is shown as the word None; here it is always given as text.",
    },
    "system": {
        SystemPosition.FIRST: "A system message stands before the conversation and stays there.",
        SystemPosition.MOVES: "The system message is written before the last user message, so it moves when a user "
        "speaks again: then no prompt can begin with the one before. Say it in the first user message.",
        SystemPosition.DROPPED: "A system message is dropped without a word: say it in the first user message.",
        SystemPosition.REFUSED: "A system message makes the template fail: say it in the first user message.",
    },
    "system_mid_run": {
        SystemMidRun.KEPT: "A system message between the turns stays where it is.",
        SystemMidRun.DROPPED: "A system message between the turns is dropped without a word: say it as a user.",
        SystemMidRun.MOVED: "A system message between the turns is written before them, so no prompt can begin with "
        "the one before: say it as a user.",
        SystemMidRun.REFUSED: "A system message between the turns makes the template fail: say it as a user.",
    },
    "trimmed": {
        True: "Messages of these roles lose white space at their ends; what was sampled is never trimmed.",
        False: "Contents are written as they are.",
    },
}

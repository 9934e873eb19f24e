"""The scenarios: the messages between two turns of a model, after histories of several kinds."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from runner.messages import Message
from runner.tokens.template import ToolSchema

__all__ = ["TOOLS", "Case", "Cut", "Filler", "Past", "Scenario", "case"]


Filler: TypeAlias = Callable[[random.Random], str]
"""Function that writes some text without the words that must occur only once."""


class Scenario(enum.StrEnum):
    """The last step of the model, and the messages after it."""

    TOOL_RESULT = "tool result"
    TEXT_AND_CALL = "text + tool call"
    PARALLEL_RESULTS = "parallel tool results"
    RESULT_AND_USER = "tool result + user"
    SECOND_ROUND = "second tool round"
    AFTER_ROUND_WITH_REASONING = "user after a tool round with reasoning"
    AFTER_REASONING = "user after a reasoning answer"
    AFTER_ANSWER = "user after a plain answer"
    CUT_ANSWER = "cut answer"
    CUT_IN_CALL = "cut inside a call"
    CUT_AFTER_CALL = "cut after a call"
    SYSTEM = "system message mid-run"

    @property
    def needs_tools(self) -> bool:
        """True if the scenario contains calls or results after any history."""
        return self not in _WITHOUT_TOOLS


class Past(enum.StrEnum):
    """The messages before the last turn."""

    SHORT = "short"  # one user message
    TURNS = "turns"  # a system message and an earlier answer, both long
    ROUNDS = "rounds"  # tool rounds with reasoning, text beside a call and two calls at once, in two user turns

    def has_tools(self) -> bool:
        return self is Past.ROUNDS


class Cut(enum.Enum):
    """The place where the last turn ends without a stop."""

    NO = enum.auto()
    IN_TEXT = enum.auto()
    IN_CALL = enum.auto()
    AFTER_CALL = enum.auto()


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation at the point where a bridge is needed."""

    scenario: Scenario
    """The scenario."""
    past: Past
    """The earlier messages."""
    history: tuple[Message, ...]
    """The messages up to the assistant message of the last turn. If the turn is cut inside a call, the message has the
    whole call, and `expected` takes a part of it.
    """
    new: tuple[Message, ...]
    """The appended messages. Each content begins and ends with a word that occurs nowhere else."""
    tools: tuple[ToolSchema, ...]
    """The tools in OpenAI's form."""
    last_word: str
    """The last word of the last turn, in its content or in the last argument of its last call."""
    cut: Cut
    """The place where the turn is cut."""


_WITHOUT_TOOLS = frozenset({Scenario.AFTER_REASONING, Scenario.AFTER_ANSWER, Scenario.CUT_ANSWER, Scenario.SYSTEM})
_CUTS = {
    Scenario.CUT_ANSWER: Cut.IN_TEXT,
    Scenario.CUT_IN_CALL: Cut.IN_CALL,
    Scenario.CUT_AFTER_CALL: Cut.AFTER_CALL,
}


def case(scenario: Scenario, past: Past, seed: int = 0, *, tools: bool = True, filler: Filler | None = None) -> Case:
    """Return the case of this scenario and this past. All of its words are drawn from `seed`.

    `filler` writes the text between the first and the last word of a content or an argument.

    With `tools`, the model has the same tools in every case, so that a bridger can use what it learnt from earlier
    histories. Only a scenario without calls after a short past is played without tools.
    """
    writer = _Writer(random.Random(f"{scenario}/{past}/{seed}"), filler)
    before = _PASTS[past](writer)
    turn, new = _SCENARIOS[scenario](writer)
    return Case(
        scenario,
        past,
        (*before, *turn),
        tuple(new),
        TOOLS if scenario.needs_tools or (tools and past is not Past.SHORT) else (),
        writer.last_words[id(turn[-1])],
        _CUTS.get(scenario, Cut.NO),
    )


class _Writer:
    """Writes messages whose words occur nowhere else."""

    def __init__(self, source: random.Random, filler: Filler | None) -> None:
        self._source = source
        self._filler = filler
        self._names = source.sample(_NAMES, 2)
        self._calls = 0
        self.last_words: dict[int, str] = {}

    def word(self) -> str:
        return self._source.choice(("kestrel", "Willow", "ember", "Granit")) + "".join(
            self._source.choices("bcdfghjklmnpqrstvwxz", k=9)
        )

    def sentence(self, words: int = 2) -> str:
        return f"{self.word()} {self._inner(words)} {self.word()}"

    def _inner(self, words: int) -> str:
        return self._filler(self._source) if self._filler else " ".join(self._source.choices(_COMMON, k=words))

    def says(self, role: Any, words: int = 2, **more: Any) -> Message:
        content = self.sentence(words)
        message: Message = {"role": role, "content": content, **more}  # type: ignore[typeddict-item]  # built by parts
        self.last_words[id(message)] = content.rsplit(" ", 1)[1]
        return message

    def answers(self, words: int = 2, *, reasons: bool = False) -> Message:
        return self.says("assistant", words, **({"reasoning_content": self.sentence(5)} if reasons else {}))

    def calls(self, count: int = 1, *, text: bool = False, reasons: bool = False) -> Message:
        calls, last = [], ""
        for _ in range(count):
            self._calls += 1
            last = self.word()
            name = self._names[self._calls % 2]
            arguments = {"amount": self._source.randrange(100), "query": f"{self._inner(1)} {last}"}
            function = {"name": name, "arguments": arguments}
            calls.append({"id": self._id(self._calls), "type": "function", "function": function})
        # also built by parts
        message: Message = {"role": "assistant", "content": self.sentence() if text else "", "tool_calls": calls}  # type: ignore[typeddict-item]
        if reasons:
            message["reasoning_content"] = self.sentence(5)
        self.last_words[id(message)] = last
        return message

    def results(self, calling: Message, words: int = 2) -> list[Message]:
        return [
            self.says("tool", words, tool_call_id=call["id"], name=call["function"]["name"])
            for call in calling["tool_calls"]
        ]

    @staticmethod
    def _id(number: int) -> str:
        return f"call{number:05}"  # nine letters and digits, since Mistral's templates require this


_NAMES = ("look_up", "measure", "convert_units")
_PROPERTIES = {
    "amount": {"type": "integer", "description": "How many."},
    "query": {"type": "string", "description": "What to look for."},
}
TOOLS: tuple[ToolSchema, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["query"]},
        },
    }
    for name in _NAMES
)
"""The tools of every case with tools."""

_COMMON = ("rivers", "run", "blue", "twelve", "stones", "north", "of", "here", "and", "slowly", "over", "a", "bridge")


def _short(writer: _Writer) -> list[Message]:
    return [writer.says("user")]


def _turns(writer: _Writer) -> list[Message]:
    return [
        writer.says("system", 30), writer.says("user", 40), writer.answers(60), writer.says("user", 10),
    ]  # fmt: skip


def _rounds(writer: _Writer) -> list[Message]:
    first = writer.calls(text=True, reasons=True)
    second = writer.calls(2, reasons=True)
    third = writer.calls()
    return [
        writer.says("system"), writer.says("user"),
        first, *writer.results(first, 30), second, *writer.results(second), writer.answers(reasons=True),
        writer.says("user"),
        third, *writer.results(third), writer.answers(8),
        writer.says("user"),
    ]  # fmt: skip


_PASTS: dict[Past, Callable[[_Writer], list[Message]]] = {
    Past.SHORT: _short, Past.TURNS: _turns, Past.ROUNDS: _rounds,
}  # fmt: skip

_Turn = tuple[Sequence[Message], Sequence[Message]]


def _tool_result(writer: _Writer) -> _Turn:
    call = writer.calls()
    return [call], writer.results(call)


def _text_and_call(writer: _Writer) -> _Turn:
    call = writer.calls(text=True)
    return [call], writer.results(call)


def _parallel_results(writer: _Writer) -> _Turn:
    call = writer.calls(2)
    return [call], writer.results(call)


def _result_and_user(writer: _Writer) -> _Turn:
    call = writer.calls()
    return [call], [*writer.results(call), writer.says("user")]


def _second_round(writer: _Writer) -> _Turn:
    first, second = writer.calls(), writer.calls()
    return [first, *writer.results(first), second], writer.results(second)


def _after_round_with_reasoning(writer: _Writer) -> _Turn:
    call = writer.calls(reasons=True)
    return [call, *writer.results(call), writer.answers(reasons=True)], [writer.says("user")]


def _after_reasoning(writer: _Writer) -> _Turn:
    return [writer.answers(reasons=True)], [writer.says("user")]


def _after_answer(writer: _Writer) -> _Turn:
    return [writer.answers()], [writer.says("user")]


def _cut_in_call(writer: _Writer) -> _Turn:
    return [writer.calls()], [writer.says("user")]


def _system(writer: _Writer) -> _Turn:
    return [writer.answers()], [writer.says("system"), writer.says("user")]


_SCENARIOS: dict[Scenario, Callable[[_Writer], _Turn]] = {
    Scenario.TOOL_RESULT: _tool_result,
    Scenario.TEXT_AND_CALL: _text_and_call,
    Scenario.PARALLEL_RESULTS: _parallel_results,
    Scenario.RESULT_AND_USER: _result_and_user,
    Scenario.SECOND_ROUND: _second_round,
    Scenario.AFTER_ROUND_WITH_REASONING: _after_round_with_reasoning,
    Scenario.AFTER_REASONING: _after_reasoning,
    Scenario.AFTER_ANSWER: _after_answer,
    Scenario.CUT_ANSWER: _after_answer,
    Scenario.CUT_IN_CALL: _cut_in_call,
    Scenario.CUT_AFTER_CALL: _tool_result,
    Scenario.SYSTEM: _system,
}

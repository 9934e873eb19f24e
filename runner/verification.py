"""Verification: every prompt of a trajectory made again from its messages and its sampled ids, and compared.

Messages and sampled ids are what a trajectory is made from; everything else of it follows. The first prompt of a
segment is the render of its first messages, a bridge is what the template puts between a turn and the messages after
it, and a turn says what its ids decode to. Whatever does not follow is a `Difference`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias, cast

from runner.chat import ChatModel
from runner.engines.base import Engine, FinishReason
from runner.messages import Message, ToolCall, as_messages
from runner.options import ToolChoice
from runner.parsing.reasoning import split_reasoning
from runner.sampling import StopStrings
from runner.store.plain import encode_json
from runner.tokens.bridge import Unbridgeable
from runner.tokens.log import Source
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer
from runner.tools import Tool
from runner.trajectory import Segment, Trajectory, Turn

__all__ = ["Difference", "Kind", "closing_stop", "first_difference", "stored_chat"]

AROUND = 12
"""Ids on each side of a difference that are shown."""

TEXT_AROUND = 40
"""The same in characters, where texts are compared."""

RETRY = "retry"
"""The cause of a segment that samples a turn of an earlier one anew, from the same prompt."""

Ids: TypeAlias = Sequence[int]


class Kind(enum.StrEnum):
    """What it is that does not follow from the rest."""

    HEADER = "header"  # the run's configuration is not the one that it was begun with
    UNREADABLE = "unreadable"  # a row holds no trajectory
    LAYOUT = "layout"  # turns, ids, sources and messages do not fit one another
    FIRST_PROMPT = "first_prompt"  # the render of the first messages
    BRIDGE = "bridge"  # what stands between two turns
    STOP = "stop"  # what ended a turn is not where it was sampled
    TURN = "turn"  # the sampled ids say something else than the turn
    MESSAGE = "message"  # or than the assistant message


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing of a trajectory that does not follow from its messages and its sampled ids.

    Attributes:
        kind: what it is.
        explanation: the same for people.
        episode: its id.
        agent: whose trajectory.
        attempt: of the episode.
        segment: of the trajectory, or None where it is in none.
        turn: the turn that it belongs to, as in `Turn.number`, or None.
        index: the first id that differs, as an index into the segment's ids, or None.
        stored: what the file holds around it, decoded.
        derived: what was made again.
        stored_ids: the ids behind `stored`, where ids were compared.
        derived_ids: those behind `derived`.
    """

    kind: Kind
    explanation: str
    episode: str = ""
    agent: str = ""
    attempt: int = 0
    segment: int | None = None
    turn: int | None = None
    index: int | None = None
    stored: str = ""
    derived: str = ""
    stored_ids: tuple[int, ...] = ()
    derived_ids: tuple[int, ...] = ()


def closing_stop(turn: Turn, stop_ids: Collection[int]) -> int | None:
    """The stop id that `turn` ended with, or None where its template has to close it like one that was cut.

    A stop string, or a stop id of the author's own, closes no turn of a template.

    Args:
        turn: the turn.
        stop_ids: the model's own.
    """
    stop = turn.stop
    return stop if turn.finish is FinishReason.STOP and isinstance(stop, int) and stop in stop_ids else None


def stored_chat(
    tokenizer: Tokenizer, template: ChatTemplate, *, stop_ids: Iterable[int], options: Mapping[str, Any], now: datetime
) -> ChatModel:
    """The chat model of a run whose engine is not running: it makes prompts and reads turns, and samples nothing."""
    engine = _Vocabulary(tokenizer, template, tuple(stop_ids))
    return ChatModel(cast("Engine", engine), options=options, now=now)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """As much of an engine as prompts are made with."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: tuple[int, ...]


def first_difference(trajectory: Trajectory, chat: ChatModel) -> Difference | None:
    """The first thing of `trajectory` that does not follow from its messages and its sampled ids, or None.

    Every prompt is rendered whole. Messages at the end that the model never saw are not looked at.

    Args:
        trajectory: of any agent, with any outcome.
        chat: the model that spoke for this agent; see `stored_chat`.
    """
    try:
        _Check(trajectory, chat).run()
    except _Found as found:
        return found.difference
    return None


class _Found(Exception):
    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.explanation)
        self.difference = difference


@dataclass(frozen=True, slots=True)
class _View:
    """What ids say: as it stands in a turn, and the text that it was read from."""

    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    spoken: str

    def matches(self, turn: Turn) -> bool:
        mine, stored = [self.text, self.reasoning, self.tool_calls], [turn.text, turn.reasoning, turn.tool_calls]
        return encode_json(mine) == encode_json(stored)


@dataclass(slots=True)
class _Part:
    """A segment as it is checked.

    Attributes:
        number: of the segment.
        segment: the segment.
        turns: that were sampled in it, in order.
        spoken: where its assistant messages are that were sampled here, as indices into `seen`.
        seen: the messages that were put before the model, and those that it said.
    """

    number: int
    segment: Segment
    turns: list[Turn]
    seen: list[Message]
    spoken: list[int]

    @property
    def prompt(self) -> list[Message]:
        """The messages of the first prompt."""
        return self.seen[: self.spoken[0]]


class _Check:
    """One trajectory, from its first id to its last; raises `_Found` at the first difference."""

    def __init__(self, trajectory: Trajectory, chat: ChatModel) -> None:
        self._trajectory = trajectory
        self._chat = chat
        self._calls = 0
        self._done: list[_Part] = []
        self._place: dict[str, Any] = {}

    def run(self) -> None:
        for number, segment in enumerate(self._trajectory.segments):
            self._place = {"segment": number}
            turns = [turn for turn in self._trajectory.turns if turn.segment == number]
            self._check_layout(segment, turns)
            part = _Part(number, segment, turns, *self._seen(segment, turns))
            if turns:
                self._check_first_prompt(part)
                self._check_turns(part)
            self._done.append(part)

    # --- what stands where

    def _check_layout(self, segment: Segment, turns: Sequence[Turn]) -> None:
        ids, length = segment.log.ids, len(segment.log)
        ends = [0, *(turn.end for turn in turns)]
        for turn, before in zip(turns, ends, strict=False):
            self._place["turn"] = turn.number
            if not before <= turn.start <= turn.end <= length or not turn.start:
                self._differ(Kind.LAYOUT, f"ids {turn.start} to {turn.end} of {length} cannot follow id {before}")
        if ends[-1] != length:
            self._differ(Kind.LAYOUT, f"{length - ends[-1]} ids belong to no turn", index=ends[-1])
        below = next((index for index, token_id in enumerate(ids) if token_id < 0), None)
        if below is not None:
            self._differ(Kind.LAYOUT, f"{ids[below]} is no token id", index=below)
        self._check_sources(segment, turns)
        self._place.pop("turn", None)

    def _check_sources(self, segment: Segment, turns: Sequence[Turn]) -> None:
        sources = array("b")
        for turn in turns:
            given = Source.BRIDGE if sources else Source.PROMPT
            sources.extend(array("b", [given]) * (turn.start - len(sources)))
            sources.extend(array("b", [Source.SAMPLED]) * (turn.end - turn.start))
        if segment.log.sources != sources:
            at = _first_other(segment.log.sources, sources)
            stored, derived = (_source(each, at) for each in (segment.log.sources, sources))
            self._place["turn"] = next((turn.number for turn in turns if at < turn.end), None)
            self._differ(Kind.LAYOUT, "the source of an id", index=at, stored=stored, derived=derived)

    def _seen(self, segment: Segment, turns: Sequence[Turn]) -> tuple[list[Message], list[int]]:
        """The messages that the model saw or said, and which of them it said in this segment.

        No assistant message comes to a segment but by a turn, so those of the turns are the last ones.
        """
        try:
            messages = as_messages(segment.messages)
        except TypeError as error:
            self._differ(Kind.MESSAGE, str(error))
        seen = messages[: len(messages) - segment.unseen]
        said = [index for index, message in enumerate(seen) if message["role"] == "assistant"]
        speeches = sum(not _continues(before, turn) for before, turn in pairwise([None, *turns]))
        if len(said) < speeches:
            self._differ(Kind.LAYOUT, f"{speeches} turns have {len(said)} assistant messages")
        return seen, said[len(said) - speeches :]

    # --- prompts

    def _check_first_prompt(self, part: _Part) -> None:
        first = part.turns[0]
        self._place["turn"] = first.number
        if part.segment.cause == RETRY:
            derived: Ids = self._retried(part)
        else:
            make = self._chat.bridger.first_prompt
            derived = self._made(Kind.FIRST_PROMPT, lambda: make(part.prompt, part.segment.tools))
        self._compare(Kind.FIRST_PROMPT, part.segment.log.ids[: first.start], derived, 0)

    def _retried(self, part: _Part) -> Ids:
        """The prompt of the turn that this segment samples anew."""
        wanted = encode_json(part.prompt)
        tried = (turn for turn, messages in self._prompted() if encode_json(messages) == wanted)
        found = next(tried, None)
        if found is None:
            self._differ(Kind.FIRST_PROMPT, "no earlier turn had the prompt that this segment tries again")
        return found.prompt_ids

    def _prompted(self) -> Iterator[tuple[Turn, list[Message]]]:
        """The turns of earlier segments, the latest first, and the messages that each was prompted with."""
        for part in reversed(self._done):
            begun = [turn for before, turn in pairwise([None, *part.turns]) if turn and not _continues(before, turn)]
            for turn, said in reversed(list(zip(begun, part.spoken, strict=True))):
                yield turn, part.seen[:said]

    def _bridge(self, part: _Part, before: Turn, said: int, next_said: int) -> Ids:
        history, new = part.seen[: said + 1], part.seen[said + 1 : next_said]
        if not new:
            self._differ(Kind.LAYOUT, "no message stands between this turn and the one before it")
        stop, bridger = closing_stop(before, self._chat.stop_ids), self._chat.bridger
        tools, sampled = part.segment.tools, before.token_ids
        return self._made(Kind.BRIDGE, lambda: bridger.bridge(history, new, tools, sampled=sampled, stop=stop).ids)

    def _made(self, kind: Kind, make: Callable[[], Ids]) -> Ids:
        try:
            return make()
        except Unbridgeable as error:
            self._differ(kind, f"no prompt can be made of the messages: {error}")
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:  # messages that no author could have added
            self._differ(Kind.MESSAGE, f"the messages cannot be rendered: {type(error).__name__}: {error}")

    def _compare(self, kind: Kind, stored: Ids, derived: Ids, start: int) -> None:
        """Both are ids from `start` of the segment on."""
        if list(stored) == list(derived):
            return
        at = _first_other(stored, derived)
        window = slice(max(0, at - AROUND), at + AROUND)
        decode = self._chat.tokenizer.decode
        one, other = (_named(ids, at, decode) for ids in (stored, derived))
        self._differ(
            kind,
            f"the file has {one} where {other} follows",
            index=start + at,
            stored=decode(stored[window]),
            derived=decode(derived[window]),
            stored_ids=tuple(stored[window]),
            derived_ids=tuple(derived[window]),
        )

    # --- what was said

    def _check_turns(self, part: _Part) -> None:
        speech, begin, calls_before = -1, 0, self._calls
        for before, turn, after in zip([None, *part.turns], part.turns, [*part.turns[1:], None], strict=False):
            self._place["turn"] = turn.number
            if _continues(before, turn):
                self._calls = calls_before
            else:
                speech, begin, calls_before = speech + 1, turn.start, self._calls
                if before is not None:
                    derived = self._bridge(part, before, part.spoken[speech - 1], part.spoken[speech])
                    self._compare(Kind.BRIDGE, turn.log.ids[before.end : turn.start], derived, before.end)
            view = self._check_view(part, turn, begin)
            self._calls += len(view.tool_calls)
            if not _continues(turn, after):
                self._check_message(part.seen[part.spoken[speech]], turn, view, begin)

    def _check_view(self, part: _Part, turn: Turn, begin: int) -> _View:
        text = self._said(turn, begin)
        views = [self._view(text, part.segment, choice) for choice in _choices(part.segment)]
        for view in views:
            if view.matches(turn):
                return view
        view = views[0]
        for name in ("text", "reasoning"):
            self._compare_text(Kind.TURN, f"its {name}", getattr(turn, name), getattr(view, name), turn, view, begin)
        stored, derived = encode_json(turn.tool_calls), encode_json(view.tool_calls)
        self._compare_text(Kind.TURN, "its tool calls", stored, derived, turn, view, begin)
        raise AssertionError("views that differ differ in one of their parts")

    def _said(self, turn: Turn, begin: int) -> str:
        """The text of what was said from `begin` on, without the stop."""
        ids, decode = turn.log.ids, self._chat.tokenizer.decode
        if turn.finish is not FinishReason.STOP or turn.stop is None:
            return decode(ids[begin : turn.end])
        if isinstance(turn.stop, int):
            if turn.start == turn.end or ids[turn.end - 1] != turn.stop:
                at = max(turn.start, turn.end - 1)
                self._compare(Kind.STOP, ids[at : turn.end], [turn.stop], at)
            return decode(ids[begin : turn.end - 1])
        stops = StopStrings(self._chat.tokenizer, [turn.stop])
        if stops.feed(turn.token_ids) != turn.end - turn.start:
            said = decode(turn.token_ids)
            self._differ(Kind.STOP, "the stop string does not end it", index=turn.start, stored=turn.stop, derived=said)
        return decode(ids[begin : turn.start]) + stops.text

    def _view(self, spoken: str, segment: Segment, tool_choice: ToolChoice) -> _View:
        chat = self._chat
        reasoning, content = split_reasoning(spoken, opened=chat.opens_reasoning)
        if chat.tool_format is None or not segment.tools:
            return _View(content, reasoning, [], spoken)
        parsed = chat.tool_format.parse(content, self._calls, _as_tools(segment), tool_choice)
        return _View(parsed.content, reasoning, parsed.calls, spoken)

    def _check_message(self, stored: Message, turn: Turn, view: _View, begin: int) -> None:
        derived = _assistant_message(view)
        if encode_json(stored) == encode_json(derived):
            return
        for key, name in (("content", "its text"), ("reasoning_content", "its reasoning")):
            one, other = str(stored.get(key, "")), str(derived.get(key, ""))
            self._compare_text(Kind.MESSAGE, f"{name} in the message", one, other, turn, view, begin)
        self._compare_text(Kind.MESSAGE, "the message", encode_json(stored), encode_json(derived), turn, view, begin)

    def _compare_text(
        self, kind: Kind, what: str, stored: str, derived: str, turn: Turn, view: _View, begin: int
    ) -> None:
        if stored == derived:
            return
        at = _first_other(stored, derived)
        window = slice(max(0, at - TEXT_AROUND), at + TEXT_AROUND)
        self._differ(
            kind,
            f"{what} is not what the sampled ids say, from character {at} on",
            index=self._index_of(view.spoken, derived, at, turn, begin),
            stored=stored[window],
            derived=derived[window],
        )

    def _index_of(self, spoken: str, part: str, at: int, turn: Turn, begin: int) -> int:
        """The id that character `at` of `part`, which is read from `spoken`, came from; `begin` where it is not."""
        offset = spoken.find(part) if part else -1
        if offset < 0:
            return begin
        ids, wanted = turn.log.ids, offset + at
        return next(
            (i for i in range(begin, turn.end) if len(self._chat.tokenizer.decode(ids[begin : i + 1])) > wanted),
            max(begin, turn.end - 1),
        )

    def _differ(self, kind: Kind, explanation: str, **fields: Any) -> NoReturn:
        trajectory = self._trajectory
        named = {"episode": trajectory.id, "agent": trajectory.agent, "attempt": trajectory.attempt, **self._place}
        raise _Found(Difference(kind=kind, explanation=explanation, **named, **fields))


@dataclass(frozen=True, slots=True)
class _StoredTool:
    """As much of a tool as reading a call takes."""

    name: str
    parameters: Mapping[str, Any]


def _as_tools(segment: Segment) -> list[Tool]:
    functions = [tool["function"] for tool in segment.tools]
    tools = [_StoredTool(function["name"], function.get("parameters") or {}) for function in functions]
    return cast("list[Tool]", tools)


def _choices(segment: Segment) -> tuple[ToolChoice, ...]:
    # Which of the two a turn was sampled with is not in the file; a turn that may not call says what it says.
    return ("auto", "none") if segment.tools else ("none",)


def _assistant_message(view: _View) -> Message:
    message: Message = {"role": "assistant", "content": view.text}
    if view.reasoning:
        message["reasoning_content"] = view.reasoning
    calls = [call.as_message() for call in view.tool_calls if call.error is None]
    if calls:
        message["tool_calls"] = calls
    return message


def _continues(before: Turn | None, turn: Turn | None) -> bool:
    """The turn went on with one that was cut, with nothing put in between."""
    return before is not None and turn is not None and before.end == turn.start


def _first_other(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def _named(ids: Ids, at: int, decode: Any) -> str:
    return f"id {ids[at]} ({decode(ids[at : at + 1])!r})" if at < len(ids) else "nothing more"


def _source(sources: array[int], at: int) -> str:
    if at >= len(sources):
        return "none"
    return Source(sources[at]).name.lower() if sources[at] in list(Source) else str(sources[at])

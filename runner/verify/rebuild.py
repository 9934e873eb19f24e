"""Verification: each prompt is built again from messages and sampled ids, and compared with the stored prompt.

All parts of a trajectory follow from its messages and its sampled ids. The first prompt of a segment is the render of
its first messages. A bridge consists of the ids that the template inserts after a turn, up to the next turn. A turn's
text is its decoded ids. A part that does not follow is a `Difference`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

from runner.engines.base import Engine, FinishReason
from runner.episode.model import ChatModel
from runner.episode.parsed_turn import ParsedTurn, text_of
from runner.episode.prompting import followed_junction, forked_junction
from runner.episode.sample import StopStrings
from runner.messages import Message, as_messages
from runner.options import History, HistoryPolicy
from runner.parsing.external_reader import ExternalReader
from runner.parsing.learning.learnt_format import LearntFormat
from runner.store.json_values import encode_json
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.junction import Junction
from runner.tokens.log import Source
from runner.tokens.template import ChatTemplate
from runner.tokens.token_diff import first_mismatch
from runner.tokens.tokenizer import Tokenizer
from runner.tokens.turn_shape import AnsweredTurn
from runner.tools.tool import Tool
from runner.trajectory import AGAIN, BRANCH, RETRY, Origin, Segment, Trajectory, Turn
from runner.verify.differences import Comparison, Difference, DifferenceFound, Ids, Kind, SpokenText

__all__ = ["first_difference", "stored_chat"]


def stored_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    stop_ids: Iterable[int],
    options: Mapping[str, Any],
    now: datetime,
    history: History,
    turns: LearntFormat | None = None,
    named: Callable[[Tokenizer], ExternalReader] | None = None,
    fit_tools: bool = False,
) -> ChatModel:
    """Return the chat model of a stored run, without a running engine, to build prompts and parse turns.

    The arguments are those of `ChatModel`; tokenizer, template and stop ids are those of the run's engine.
    """
    # Prompts depend only on the tokenizer, the template and the stop ids of an engine.
    engine = SimpleNamespace(tokenizer=tokenizer, template=template, stop_ids=tuple(stop_ids))
    return ChatModel(
        cast("Engine", engine),
        options=options,
        now=now,
        history=history,
        turns=turns,
        named=named,
        fit_tools=fit_tools,
    )


def first_difference(
    trajectory: Trajectory, chat: ChatModel, others: Callable[[str], Trajectory] | None = None
) -> Difference | None:
    """Return the first part of `trajectory` that does not follow from its messages and its sampled ids, or None.

    Every prompt is rendered whole. Messages at the end of a segment that the model never saw are not checked.

    Args:
        trajectory: the trajectory to check.
        chat: the model of its agent; see `stored_chat`.
        others: function that returns the trajectory of another agent of the same episode, by its name, since a segment
            may continue that trajectory; None if the other trajectories are not available.
    """
    try:
        _TrajectoryCheck(trajectory, chat, others).run()
    except DifferenceFound as found:
        return found.difference
    return None


@dataclass(slots=True)
class _CheckedSegment:
    """A segment during its check."""

    segment: Segment
    turns: list[Turn]
    """The turns of the segment, in order."""
    seen: list[Message]
    """The messages that the model saw or wrote."""
    spoken: list[int]
    """The indices into `seen` of the assistant messages that were sampled in this segment."""

    @property
    def prompt(self) -> list[Message]:
        """The messages of the first prompt."""
        return self.seen[: self.spoken[0]]

    def speech_of(self, turn: Turn) -> int:
        """Return the index in `spoken` of the message of a turn."""
        return len(_speeches([each for each in self.turns if each.start <= turn.start])) - 1


@dataclass(frozen=True, slots=True)
class _Begun:
    """The state at the first turn of a segment."""

    calls: int = 0
    """Number of tool calls on the segment's path, before its first turn."""
    begin: int | None = None
    """Index of the first id of the first turn's message, if a turn of another segment began this message; else None."""


class _TrajectoryCheck:
    """The check of one trajectory, from its first id to its last; raises `DifferenceFound` at the first difference."""

    def __init__(
        self, trajectory: Trajectory, chat: ChatModel, others: Callable[[str], Trajectory] | None = None
    ) -> None:
        self._trajectory = trajectory
        self._chat = chat
        self._others = others
        self._calls = 0  # number of tool calls so far on the path; the ids of the next calls follow from it
        self._made_calls: dict[tuple[str, int], tuple[int, int]] = {}
        self._junction: Junction | None = None  # the junction of the latest bridge
        self._done: list[_CheckedSegment] = []
        self._compare = Comparison(trajectory, chat.tokenizer.decode)
        self._retried = _played_again(trajectory)

    def run(self) -> None:
        for number, segment in enumerate(self._trajectory.segments):
            self._compare.segment, self._compare.turn = number, None
            turns = [turn for turn in self._trajectory.turns if turn.segment == number]
            self._check_layout(segment, turns)
            part = _CheckedSegment(segment, turns, *self._seen(segment, turns))
            if turns:
                self._check_turns(part, self._check_first_prompt(part))
            self._done.append(part)

    # --- layout

    def _check_layout(self, segment: Segment, turns: Sequence[Turn]) -> None:
        ids, length = segment.log.ids, len(segment.log)
        ends = [0, *(turn.end for turn in turns)]
        for turn, before in zip(turns, ends, strict=False):
            self._compare.turn = turn.number
            if not before <= turn.start <= turn.end <= length or not turn.start:
                self._compare.differ(
                    Kind.LAYOUT, f"ids {turn.start} to {turn.end} of {length} cannot follow id {before}"
                )
        if ends[-1] != length:
            self._compare.differ(Kind.LAYOUT, f"{length - ends[-1]} ids belong to no turn", index=ends[-1])
        below = next((index for index, token_id in enumerate(ids) if token_id < 0), None)
        if below is not None:
            self._compare.differ(Kind.LAYOUT, f"{ids[below]} is not a token id", index=below)
        self._check_sources(segment, turns)
        self._compare.turn = None

    def _check_sources(self, segment: Segment, turns: Sequence[Turn]) -> None:
        sources = array("b")
        for turn in turns:
            given = Source.BRIDGE if sources else Source.PROMPT
            sources.extend(array("b", [given]) * (turn.start - len(sources)))
            said = Source.RETRIED if turn.left_out or turn.number in self._retried else Source.SAMPLED
            sources.extend(array("b", [said]) * (turn.end - turn.start))
        if segment.log.sources != sources:
            at = first_mismatch(segment.log.sources, sources)
            stored, derived = (_source_name(each, at) for each in (segment.log.sources, sources))
            self._compare.turn = next((turn.number for turn in turns if at < turn.end), None)
            self._compare.differ(Kind.LAYOUT, "the source of an id differs", index=at, stored=stored, derived=derived)

    def _seen(self, segment: Segment, turns: Sequence[Turn]) -> tuple[list[Message], list[int]]:
        """Return the messages that the model saw or sampled, and the indices of the messages of this segment's turns.

        The messages of the segment's turns are the last assistant messages.
        """
        try:
            messages = as_messages(segment.messages)
        except TypeError as error:
            self._compare.differ(Kind.MESSAGE, str(error))
        seen = messages[: len(messages) - segment.unseen]
        last = len(self._done) == len(self._trajectory.segments) - 1
        if segment.unseen and not last:
            self._compare.differ(Kind.MESSAGE, "only the last segment may have messages that the model never saw")
        said = [index for index, message in enumerate(seen) if message["role"] == "assistant"]
        speeches = len(_speeches(turns))
        if len(said) < speeches:
            self._compare.differ(Kind.LAYOUT, f"{speeches} turns have {len(said)} assistant messages")
        if len(seen) > (said[-1] + 1 if speeches else 0):
            self._compare.differ(Kind.MESSAGE, "messages after the last turn are not marked as never seen by the model")
        return seen, said[len(said) - speeches :]

    # --- prompts

    def _check_first_prompt(self, part: _CheckedSegment) -> _Begun:
        first, segment = part.turns[0], part.segment
        self._compare.turn = first.number
        begun = _Begun()
        junction = None if segment.cause == "start" else forked_junction(segment.cause)
        shares = segment.cause in (RETRY, AGAIN, BRANCH)
        if shares and segment.origin is None:
            self._compare.differ(Kind.LAYOUT, "the segment repeats or continues a turn, but has no origin")
        origin = self._origin(segment.origin) if segment.origin is not None else None
        if not shares or origin is None:
            make = self._chat.bridger.first_prompt
            derived: Ids = self._made(Kind.FIRST_PROMPT, lambda: make(part.prompt, segment.tools))
            if origin is not None:
                begun = _Begun(self._calls_of(*origin)[1])
        elif segment.cause == BRANCH:
            derived, begun = self._branched(part, *origin)
            going_on = begun.begin is not None
            junction = None if going_on else self._made_junction(first, origin[1], len(derived) - segment.shared)
        else:
            derived = self._once_more(part, *origin)
            begun = _Begun(self._calls_of(*origin)[0])
        self._compare.ids(Kind.FIRST_PROMPT, segment.log.ids[: first.start], derived, 0)
        shared = 0 if origin is None or not shares else origin[1].end if segment.cause == BRANCH else origin[1].start
        if segment.shared != shared:
            self._compare.differ(
                Kind.LAYOUT, "the number of copied ids differs", stored=str(segment.shared), derived=str(shared)
            )
        self._check_junction(first, junction)
        return begun

    def _check_junction(self, turn: Turn, made: Junction | None) -> None:
        stored = turn.junction
        if made != stored:
            was, becomes = ("none" if each is None else "/".join(map(str, astuple(each))) for each in (stored, made))
            self._compare.differ(Kind.JUNCTION, "the record of a junction differs", stored=was, derived=becomes)

    def _origin(self, origin: Origin) -> tuple[_CheckedSegment, Turn]:
        """Return the turn that `origin` names, as (the segment of the turn, the turn)."""
        parts, turns = self._done, self._trajectory.turns
        if origin.agent != self._trajectory.agent:
            other = self._others(origin.agent) if self._others is not None else None
            turns = other.turns if other is not None else []
            parts = _parts_of(other) if other is not None else []
        turn = next((turn for turn in turns if turn.number == origin.number), None)
        if turn is None or turn.segment >= len(parts):
            self._compare.differ(Kind.LAYOUT, f"there is no turn {origin.number} of {origin.agent!r} to continue")
        return parts[turn.segment], turn

    def _once_more(self, part: _CheckedSegment, before: _CheckedSegment, turn: Turn) -> Ids:
        """Return the prompt of a turn that is played again."""
        asked = before.seen[: before.spoken[before.speech_of(turn)]]
        if encode_json(asked) != encode_json(part.prompt):
            self._compare.differ(Kind.MESSAGE, "the turn that is played again has other messages before it")
        return turn.prompt_ids

    def _branched(self, part: _CheckedSegment, before: _CheckedSegment, turn: Turn) -> tuple[Ids, _Begun]:
        """Return the prompt of a segment that continues after another segment's turn, and the state at its start."""
        first, speech = part.turns[0], before.speech_of(turn)
        begin = _speeches([each for each in before.turns if each.start <= turn.start])[-1].start
        calls = self._calls_of(before, turn)
        history = [*before.seen[: before.spoken[speech]], self._message_of(before, turn, begin, calls[0])]
        going_on = first.start == turn.end
        shared = history[: len(history) - going_on]
        if encode_json(part.prompt[: len(shared)]) != encode_json(shared):
            self._compare.differ(Kind.MESSAGE, "the segment begins with other messages than the turn that it continues")
        ids = turn.log.ids[: turn.end]
        if going_on:
            return ids, _Begun(calls[0], begin)
        return ids + array("i", self._joined(part, turn, history, part.prompt[len(history) :])), _Begun(calls[1])

    def _message_of(self, part: _CheckedSegment, turn: Turn, begin: int, calls: int) -> Message:
        """Return the message of a turn; if a later turn continues the message, only the part up to this turn's end."""
        last = [each for each in part.turns if part.speech_of(each) == part.speech_of(turn)][-1]
        if last is turn:
            return part.seen[part.spoken[part.speech_of(turn)]]
        ids, tools = turn.log.ids[begin : turn.end], _as_tools(part.segment)
        return ParsedTurn.of(
            self._said(turn, begin), ids, self._chat, tools, before=calls, tool_choice=turn.tool_choice
        ).as_message()

    def _calls_of(self, part: _CheckedSegment, turn: Turn) -> tuple[int, int]:
        """Return the number of tool calls on the path before a turn's message, and after it."""
        key = turn.agent, turn.number
        if key not in self._made_calls:
            self._count_calls(part, turn.agent)
        return self._made_calls[key]

    def _count_calls(self, part: _CheckedSegment, agent: str) -> None:
        origin, after = part.segment.origin, 0
        before = 0
        if origin is not None:
            counted = self._calls_of(*self._origin(origin))
            before, after = counted if part.segment.cause in (RETRY, AGAIN) else (counted[1], counted[1])
            if part.segment.cause in (RETRY, AGAIN):
                after = before
            elif part.turns and part.turns[0].start == part.segment.shared:
                before = counted[0]
        for previous, turn in zip([None, *part.turns], part.turns, strict=False):
            going_on = _continues(previous, turn) or (previous is None and turn.start == part.segment.shared)
            before = before if going_on else after
            after = before + len(turn.tool_calls)
            self._made_calls[agent, turn.number] = before, after

    def _bridge(self, part: _CheckedSegment, before: Turn, said: int, next_said: int) -> Ids:
        return self._joined(part, before, part.seen[: said + 1], part.seen[said + 1 : next_said])

    def _joined(self, part: _CheckedSegment, before: Turn, history: Sequence[Message], new: Sequence[Message]) -> Ids:
        if not new:
            self._compare.differ(Kind.LAYOUT, "there is no message between this turn and the turn before it")
        if self._chat.history.policy is HistoryPolicy.FORK:
            return self._followed(part, before, [*history, *new])
        return self._made(Kind.BRIDGE, lambda: self._appended(part.segment, before, history, new))

    def _appended(self, segment: Segment, before: Turn, history: Sequence[Message], new: Sequence[Message]) -> Ids:
        # A run may render a short stand-in for the history, if the stand-in is proven to have the same bridge.
        # Verification checks this, so it renders the history itself.
        tail = self._chat.bridger.locality.whole_tail(AnsweredTurn(history, new, segment.tools), real=True)
        bridge = self._chat.bridge(before, tail)
        self._junction = bridge.junction
        return bridge.ids

    def _made_junction(self, turn: Turn, before: Turn, inserted: int) -> Junction:
        junction = self._junction
        if junction is None:  # the prompt follows the template, without a bridge
            junction = followed_junction(self._chat, turn.log.ids, before, inserted)
        if before.dropped and self._chat.history.policy is not HistoryPolicy.FORK:
            junction = replace(junction, dropped=before.dropped, cause="stop_string")
        return junction

    def _followed(self, part: _CheckedSegment, before: Turn, messages: Sequence[Message]) -> Ids:
        """Return the ids after the turn in a render of all messages, for a run whose prompts follow the template."""
        bridger, tools = self._chat.bridger, part.segment.tools
        whole = self._made(Kind.BRIDGE, lambda: bridger.first_prompt(messages, tools))
        self._compare.ids(Kind.BRIDGE, part.segment.log.ids[: before.end], whole[: before.end], 0)
        return whole[before.end :]

    def _made(self, kind: Kind, make: Callable[[], Ids]) -> Ids:
        try:
            return make()
        except Unbridgeable as error:
            self._compare.differ(kind, f"no prompt can be made of the messages: {error}")
        # Malformed messages cause these errors. A run refuses such messages, so the file was changed.
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._compare.differ(Kind.MESSAGE, f"the messages cannot be rendered: {type(error).__name__}: {error}")

    # --- texts of turns

    def _check_turns(self, part: _CheckedSegment, begun: _Begun) -> None:
        speech, begin, self._calls = -1, 0, begun.calls
        calls_before = self._calls
        for before, turn, after in zip([None, *part.turns], part.turns, [*part.turns[1:], None], strict=False):
            self._compare.turn = turn.number
            if _continues(before, turn):
                self._calls = calls_before
            elif before is None and begun.begin is not None:
                speech, begin = 0, begun.begin
            else:
                speech, begin, calls_before = speech + 1, turn.start, self._calls
                if before is not None:
                    derived = self._bridge(part, before, part.spoken[speech - 1], part.spoken[speech])
                    self._compare.ids(Kind.BRIDGE, turn.log.ids[before.end : turn.start], derived, before.end)
                    self._check_junction(turn, self._made_junction(turn, before, len(derived)))
            spoken = SpokenText(turn, begin, self._said(turn, begin))
            view = self._check_view(part.segment, spoken)
            self._calls += len(view.tool_calls)
            self._made_calls[turn.agent, turn.number] = calls_before, self._calls
            if not _continues(turn, after):
                self._check_message(part.seen[part.spoken[speech]], view, spoken)

    def _check_view(self, segment: Segment, spoken: SpokenText) -> ParsedTurn:
        turn, chat = spoken.turn, self._chat
        tools = _as_tools(segment)
        ids = turn.log.ids[spoken.begin : turn.end]
        view = ParsedTurn.of(spoken.text, ids, chat, tools, before=self._calls, tool_choice=turn.tool_choice)
        thinking = view.cut_in_reasoning(turn, chat)
        if thinking != turn.thinking:
            cut = "was" if thinking else "was not"
            self._compare.differ(Kind.TURN, f"by its ids, the turn {cut} cut inside its reasoning", index=spoken.begin)
        stored = _parts(ParsedTurn(turn.text, turn.reasoning, turn.tool_calls))
        for name, derived in _parts(view).items():
            self._compare.text(Kind.TURN, f"the turn's {name}", stored[name], derived, spoken)
        return view

    def _said(self, turn: Turn, begin: int) -> str:
        """Return the text of the ids from `begin` to the end of the turn, without the stop."""
        ids, decode = turn.log.ids, self._chat.tokenizer.decode
        if turn.finish is not FinishReason.STOP or turn.stop is None:
            ends = () if turn.sampling is not None and turn.sampling.ignore_eos else self._chat.stop_ids
            if turn.start < turn.end and ids[turn.end - 1] in ends:
                why = f"{turn.finish.value}, although its last id is a stop id"
                self._compare.differ(Kind.STOP, f"the turn ended by {why}", index=turn.end - 1)
            return text_of(ids[begin : turn.end], self._chat, stopped=False)
        if isinstance(turn.stop, int):
            if turn.start == turn.end or ids[turn.end - 1] != turn.stop:
                at = max(turn.start, turn.end - 1)
                self._compare.ids(Kind.STOP, ids[at : turn.end], [turn.stop], at)
            return text_of(ids[begin : turn.end], self._chat, stopped=True)
        least = turn.sampling.min_tokens if turn.sampling is not None else 0
        stops = StopStrings(self._chat.tokenizer, [turn.stop], after=least)
        if stops.feed(turn.token_ids) != turn.end - turn.start:
            said = decode(turn.token_ids)
            self._compare.differ(
                Kind.STOP, "the stop string does not end the turn", index=turn.start, stored=turn.stop, derived=said
            )
        return decode(ids[begin : turn.start]) + stops.text

    def _check_message(self, stored: Message, view: ParsedTurn, spoken: SpokenText) -> None:
        derived = view.as_message()
        for key in ("content", "reasoning_content"):
            one, other = str(stored.get(key, "")), str(derived.get(key, ""))
            self._compare.text(Kind.MESSAGE, f"the message's {key}", one, other, spoken)
        self._compare.text(Kind.MESSAGE, "the message", encode_json(stored), encode_json(derived), spoken)


def _as_tools(segment: Segment) -> list[Tool]:
    """Return the tools of a segment, with only the parts that the parser of calls needs."""
    functions = [tool["function"] for tool in segment.tools]
    tools = [SimpleNamespace(name=each["name"], parameters=each.get("parameters") or {}) for each in functions]
    return cast("list[Tool]", tools)


def _parts_of(trajectory: Trajectory) -> list[_CheckedSegment]:
    """Return the segments of another agent's trajectory, unchecked."""
    parts = []
    for number, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == number]
        seen = list(as_messages(segment.messages))[: len(segment.messages) - segment.unseen]
        said = [index for index, message in enumerate(seen) if message["role"] == "assistant"]
        parts.append(_CheckedSegment(segment, turns, seen, said[len(said) - len(_speeches(turns)) :]))
    return parts


def _played_again(trajectory: Trajectory) -> set[int]:
    """Return the numbers of the turns that were played again, and of the turns that continue their messages."""
    found = set()
    for segment in trajectory.segments:
        if segment.cause != RETRY or segment.origin is None:
            continue
        number = segment.origin.number
        first = next((turn for turn in trajectory.turns if turn.number == number), None)
        of_segment = [turn for turn in trajectory.turns if first is not None and turn.segment == first.segment]
        for before, turn in zip([None, *of_segment], of_segment, strict=False):
            if turn is first or (before is not None and before.number in found and _continues(before, turn)):
                found.add(turn.number)
    return found


def _speeches(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that begin an assistant message. A turn that continues a cut message is left out."""
    return [turn for before, turn in zip([None, *turns], turns, strict=False) if not _continues(before, turn)]


def _continues(before: Turn | None, turn: Turn | None) -> bool:
    """Return True if `turn` continues the cut message of `before`: no ids are between them."""
    return before is not None and turn is not None and before.end == turn.start


def _source_name(sources: array[int], at: int) -> str:
    if at >= len(sources):
        return "none"
    return Source(sources[at]).name.lower() if sources[at] in list(Source) else str(sources[at])


def _parts(view: ParsedTurn) -> dict[str, str]:
    """Return text, reasoning and tool calls (as JSON, without their marks of failure) of a parsed turn.

    The keys are the names that explanations use.
    """
    calls = [replace(call, failed=False) for call in view.tool_calls]  # the ids do not show whether a tool failed
    return {"text": view.text, "reasoning": view.reasoning, "tool calls": encode_json(calls)}

"""Learning of a template's call format: the texts before, between and after calls, and the form of one call."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runner.parsing.learning.call_spans import CallSpan, find_object_call, named
from runner.parsing.learning.probe_renders import FormatProber, FormatRequirement, ProbeCall, UnlearnableFormat
from runner.parsing.learning.tagged_arguments import TaggedLearner
from runner.parsing.notations import Json, JsonText, Notation, object_notations
from runner.parsing.turn_format import (
    ArgumentsFormat,
    CallFormat,
    Container,
    IdStyle,
    LiteralText,
    Piece,
    Slot,
    WholeArguments,
    merged,
)
from runner.tokens.probe_messages import ANSWERED

__all__ = ["accepted_ids", "end_of_turn", "find_form", "learn_calls"]

FIRST: Final = ProbeCall("zqfirstz", {"zqkeyaz": "zqvalueaz"})
SECOND: Final = ProbeCall("zqsecondz", {"zqkeybz": "zqvaluebz"})
THIRD: Final = ProbeCall("zqthirdz", {"zqkeycz": "zqvaluecz"})
RICH: Final[dict[str, Any]] = {
    "zqkeyaz": "é \"q\" 'r' \\ / <b> & \n z",
    "zqkeybz": [1, {"zqkeycz": True, "zqkeydz": None}, []],
    "zqkeyez": -1.5,
    "zqkeyfz": {},
}

FindCall = Callable[[str, ProbeCall, str, int], CallSpan | None]


@dataclass(frozen=True, slots=True)
class _CallShape:
    """A way to find a call in a render, and the form of the call's arguments."""

    find: FindCall
    probes: tuple[ProbeCall, ProbeCall, ProbeCall]
    """Calls that are rendered to learn their form."""
    arguments: ArgumentsFormat
    container: Container | None
    tail: str = ""


def learn_calls(prober: FormatProber) -> CallFormat:
    """Learn how the template writes calls.

    Raises:
        UnlearnableFormat: no form was found in which calls can be read and distinguished from an answer.
    """
    find_form(prober)
    shape = _shape(prober)
    first = shape.probes[0]
    text = _asked(prober, first)
    one = _found(shape, text, first, prober, 0)
    followed = prober.turn(first, followed=True)
    pieces, between = _several(prober, shape, one)
    turn_ends = _ends_of_turn(prober)
    close, stop = _close(prober, text[one.end :], _after_call(shape, followed, one, prober), between)
    begin, after_content, before_content = _front(prober, shape, text[: one.start], turn_ends)
    if before_content is not None:
        before_content = before_content.removeprefix(close)
    arguments = shape.arguments
    if isinstance(shape.find, TaggedLearner):
        arguments, close, between = shape.find.ended(close, between)
    trigger = _trigger(prober, begin)
    if trigger and (prober.prompt() or "").rstrip().endswith(trigger.rstrip()):
        why = f"the prompt ends with {trigger!r} already, so calls could not be distinguished from an answer"
        raise UnlearnableFormat(FormatRequirement.SEPARABLE, why)
    if not trigger and "\n" not in (after_content or ""):
        # Such content cannot be distinguished from the calls.
        after_content = before_content = None
    return CallFormat(
        begin=begin,
        call=pieces,
        between=between,
        close=close,
        arguments=arguments,
        container=shape.container,
        trigger=trigger,
        after_content=after_content,
        before_content=before_content,
        id_pieces=(LiteralText("functions."), Slot.NAME, LiteralText(":"), Slot.INDEX) if prober.named_ids else None,
        ids=accepted_ids(prober, first),
        stop=stop,
    )


def accepted_ids(prober: FormatProber, said: ProbeCall = FIRST) -> IdStyle:
    """Return the first style of generated ids that the template accepts; `IdStyle.ANY` if it accepts none."""
    return next((each for each in IdStyle if _accepted(prober, said, each)), IdStyle.ANY)


def _accepted(prober: FormatProber, said: ProbeCall, style: IdStyle) -> bool:
    text = prober.turn(said, ids=style, followed=True)
    return text is not None and said.name in text


def _asked(prober: FormatProber, *calls: ProbeCall, **more: Any) -> str:
    text = prober.turn(*calls, **more)
    if text is None:
        raise UnlearnableFormat(FormatRequirement.SHOWN, "the template raises on a history with a call")
    return text


def find_form(prober: FormatProber) -> None:
    """Set `answered` and `named_ids` of the prober so that the template shows a call.

    Raises:
        UnlearnableFormat: the template does not show calls.
    """
    for answered in (False, True):
        for named_ids in (False, True):
            prober.answered, prober.named_ids = answered, named_ids
            text = prober.turn(FIRST)
            if text and FIRST.name in text and FIRST.arguments["zqkeyaz"] in text:
                return
    raise UnlearnableFormat(FormatRequirement.SHOWN, "the template writes no name and arguments of a call")


def _shape(prober: FormatProber) -> _CallShape:
    text = _asked(prober, FIRST)
    for find in (find_object_call, named):
        span = find(text, FIRST, prober.id_of(FIRST, 0))
        if span is not None:
            notation = _notation(prober, find)
            return _CallShape(find, (FIRST, SECOND, THIRD), WholeArguments(notation), span.container)
    tagged = TaggedLearner.learn(prober)
    return _CallShape(tagged, tagged.probes, tagged.arguments, None)


def _notation(prober: FormatProber, find: FindCall) -> Notation:
    rich = ProbeCall(FIRST.name, RICH)
    span = find(_asked(prober, rich), rich, prober.id_of(rich, 0), 0)
    if span is None:
        raise UnlearnableFormat(
            FormatRequirement.VALUES,
            "lists, objects and quotes in a call's arguments are written neither as JSON nor as in Python",
        )
    for notation in object_notations(span.before_arguments):
        if notation.encode(RICH) == span.arguments:
            return notation
        if isinstance(notation, Json) and JsonText(notation).encode(RICH) == span.arguments:
            return JsonText(notation)
    raise UnlearnableFormat(
        FormatRequirement.VALUES, "the object of a call's arguments is written neither as JSON nor as in Python"
    )


def _found(
    shape: _CallShape, text: str, said: ProbeCall, prober: FormatProber, number: int, start: int = 0
) -> CallSpan:
    span = shape.find(text, said, prober.id_of(said, number), start)
    if span is None:
        raise UnlearnableFormat(
            FormatRequirement.SEPARABLE, "a call could not be found in the text that the template wrote for it"
        )
    return span


def _several(prober: FormatProber, shape: _CallShape, one: CallSpan) -> tuple[tuple[Piece, ...], str | None]:
    """Return the pieces of a call, with its number as a slot, and the text between two calls.

    The text is None if the template does not write several calls in one form.
    """
    text = prober.turn(*shape.probes)
    if text is None or any(said.name not in text for said in shape.probes):
        return one.pieces, None
    spans: list[CallSpan] = []
    for number, said in enumerate(shape.probes):
        span = shape.find(text, said, prober.id_of(said, number), spans[-1].end if spans else 0)
        if span is None:
            # The names may occur elsewhere in the render, such as in a list of tools.
            return one.pieces, None
        spans.append(span)
    between = {text[a.end : b.start] for a, b in itertools.pairwise(spans)}
    # Some templates omit the separator between later calls. One call per turn is still correct.
    return (_counted(spans), between.pop()) if len(between) == 1 else (one.pieces, None)


def _counted(spans: Sequence[CallSpan]) -> tuple[Piece, ...]:
    """Return the pieces that all calls share, with a slot at the place of the call's number."""
    pieces = spans[0].pieces
    if all(span.pieces == pieces for span in spans):
        return pieces
    for first in (0, 1):
        counted = [_with_index(span.pieces, str(first + number)) for number, span in enumerate(spans)]
        if all(each == counted[0] for each in counted):
            return counted[0]
    raise UnlearnableFormat(FormatRequirement.REPEATED, "a second call is not written like the first")


def _with_index(pieces: Sequence[Piece], number: str) -> tuple[Piece, ...]:
    result: list[Piece] = []
    for piece in pieces:
        if not isinstance(piece, LiteralText):
            result.append(piece)
            continue
        for index, part in enumerate(re.split(rf"(?<!\d){number}(?!\d)", piece.text)):
            if index:
                result.append(Slot.INDEX)
            result.append(LiteralText(part))
    return merged(result)


def end_of_turn(prober: FormatProber) -> str:
    ends = _ends_of_turn(prober)
    return next((mark for mark in prober.cut_points.split(ends) if prober.cut_points.is_tag(mark)), ends.strip())


def _ends_of_turn(prober: FormatProber) -> str:
    """Return the text at the end of turns: the common beginning of the texts after two answers.

    One answer is the last message, and a user message follows the other. If the template raises on one of the two, the
    result is the text after the other answer; if it raises on both, "".
    """
    after = [
        text.partition(ANSWERED)[2]
        for text in (prober.turn(content=ANSWERED), prober.turn(content=ANSWERED, followed=True))
        if text is not None
    ]
    return prober.cut_points.common_prefix(after) if after else ""


def _after_call(shape: _CallShape, text: str | None, one: CallSpan, prober: FormatProber) -> str | None:
    """Return the text after the call in `text`, a render in which a result follows; None if no call is found there.

    `one` is the same call in the first render; its pieces show whether calls have ids.
    """
    said = shape.probes[0]
    # If calls have no id, an id after a call belongs to the result.
    call_id = prober.id_of(said, 0) if Slot.ID in one.pieces else NO_ID
    span = None if text is None else shape.find(text, said, call_id, 0)
    return None if span is None or text is None else text[span.end :]


NO_ID: Final = "zqnoidz"


def _close(prober: FormatProber, last: str, followed: str | None, between: str | None) -> tuple[str, str]:
    """Return the close of the calls, and the token that ends only turns with calls; "" if there is none."""
    marks = prober.cut_points
    shared = marks.common_prefix([last, followed]) if followed is not None else last
    # Some templates write more of a call, such as its id, before a result. The common text is then empty.
    close = shared or last
    end = end_of_turn(prober)
    # `close` may contain ends of turns, if results follow the end of the turn. The first end belongs to the turn.
    if end and end in close:
        return close[: close.index(end)].rstrip(), ""
    # An answer may have a mark of its own before the end of the turn, as in Command R7B.
    for mark in marks.split(_ends_of_turn(prober)):
        if mark in prober.special and mark in close:
            return close[: close.index(mark)].rstrip(), ""
    tags = [mark for mark in marks.split(close) if marks.is_tag(mark)]
    if tags and tags[-1] in prober.special and tags[-1] not in (between or ""):
        return close[: close.rindex(tags[-1])].rstrip(), tags[-1]
    return close.rstrip(), ""


def _header(prober: FormatProber) -> str:
    """Return the text before a plain answer; "" if the template does not show it."""
    answer = prober.turn(content=ANSWERED)
    return "" if answer is None or ANSWERED not in answer else answer.partition(ANSWERED)[0]


def _front(prober: FormatProber, shape: _CallShape, before: str, turn_ends: str) -> tuple[str, str | None, str | None]:
    """Return three texts: before the first call, between content and calls, and between calls and content.

    The second is None if a turn has no content before its calls; the third, if it has no content after its calls.
    """
    marks = prober.cut_points
    said = shape.probes[0]
    header = _header(prober)
    begin = before[len(marks.common_prefix([before, header])) :].lstrip()
    text = prober.turn(said, content=ANSWERED)
    if text is None or ANSWERED not in text:
        return begin, None, None
    span = _found(shape, text, said, prober, 0)
    content = text.index(ANSWERED)
    if content > span.start:
        return begin, None, text[span.end : content]
    in_between = text[content + len(ANSWERED) : span.start]
    shared = marks.common_suffix([before, in_between]).lstrip()
    around = marks.split(begin.removesuffix(shared)) if shared else ()
    if any(marks.is_tag(mark) and mark not in header for mark in around):
        # The content is between two parts of the text that begins the calls.
        return begin, None, None
    begin = shared if len(shared) < len(begin) or not begin else begin
    after_content = in_between[: len(in_between) - len(begin)]
    # If the template writes content as a turn of its own, the turn of the calls has no content.
    own_turn = any(mark in after_content for mark in marks.split(turn_ends) if marks.is_tag(mark))
    return begin, None if own_turn else after_content, None


_JSON_SIGNS: Final = frozenset("[{\"' \n")


def _trigger(prober: FormatProber, begin: str) -> str:
    """Return the trigger of calls: the tag with which `begin` starts, or else all of `begin`.

    The trigger is "" if all characters of `begin` may also begin JSON that is not a call.
    """
    marks = prober.cut_points.split(begin)
    if marks and prober.cut_points.is_tag(marks[0]):
        return marks[0]
    return "" if set(begin) <= _JSON_SIGNS else begin

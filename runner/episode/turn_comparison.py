"""Comparison of a turn with a client's message that has its ids, which finds the changes that the client made."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

from runner.chat_requests import Tolerated
from runner.episode.client_messages import UNPARSED, ReadMessage
from runner.messages import Message
from runner.tokens.bridging.history import canonical

__all__ = ["changed_around", "is_prefix"]

_MARKUP: Final = re.compile(r"</?[a-zA-Z][^<>]*>")
_WORD: Final = re.compile(r"\w+")


def changed_around(ours: ReadMessage, theirs: ReadMessage) -> frozenset[Tolerated] | None:
    """Return the differences that a client made to a turn; None if the client edited the turn.

    The message still counts as the turn after these changes: text was left out or reformatted, some calls were left
    out, calls were renamed or reordered, arguments were cut, or reasoning changed. The message is an edit if its text
    has other words, an argument has another value, it lacks all calls of the turn, or it has other calls.

    Args:
        ours: the turn's message as it was delivered.
        theirs: the message that came back with the ids of the turn.
    """
    calls, text = _calls(ours, theirs), _text(ours.message["content"], theirs.message["content"])
    if calls is None or text is None:
        return None
    return frozenset(calls | text | _reasoning(ours, theirs))


def _calls(ours: ReadMessage, theirs: ReadMessage) -> set[Tolerated] | None:
    made = {call["id"]: call["function"] for call in ours.message.get("tool_calls", ())}
    returned = theirs.message.get("tool_calls", ())
    if not set(theirs.call_ids) <= set(made) or len(set(theirs.call_ids)) < len(returned) or (made and not returned):
        return None
    found = set[Tolerated]()
    for call in returned:
        own, function = made[call["id"]], call["function"]
        if canonical(own["arguments"]) != canonical(function["arguments"]):
            if function["arguments"] and list(function["arguments"]) != [UNPARSED]:
                return None
            found.add(Tolerated.ARGUMENTS_CUT)
        if own["name"] != function["name"]:
            found.add(Tolerated.CALLS_RENAMED)
    kept = [each for each in made if each in theirs.call_ids]
    if len(kept) < len(made):
        found.add(Tolerated.CALLS_LEFT_OUT)
    if kept != list(theirs.call_ids):
        found.add(Tolerated.REORDERED)
    return found


def _text(ours: str, theirs: str) -> set[Tolerated] | None:
    if ours == theirs:
        return set()
    if ours.strip() == theirs.strip():
        return {Tolerated.WHITE_SPACE}
    if not theirs.strip():
        return {Tolerated.TEXT_LEFT_OUT}
    sampled, received = _words(ours), _words(theirs)
    if sampled == received:
        return {Tolerated.TEXT_REFORMATTED}
    return {Tolerated.TEXT_LEFT_OUT} if received and _in_order(received, sampled) else None


def _reasoning(ours: ReadMessage, theirs: ReadMessage) -> set[Tolerated]:
    sampled, received = (each.message.get("reasoning_content", "") for each in (ours, theirs))
    if sampled == received:
        return set()
    if not received:
        return {Tolerated.REASONING_LEFT_OUT}
    return {Tolerated.REASONING_STRIPPED if sampled.strip() == received.strip() else Tolerated.REASONING_REWRITTEN}


def _words(text: str) -> list[str]:
    """Return the words of a text without markup, punctuation, case and compatibility forms of letters."""
    plain = html.unescape(_MARKUP.sub(" ", text))
    return _WORD.findall(unicodedata.normalize("NFKC", plain).casefold())


def _in_order(few: Sequence[str], many: Sequence[str]) -> bool:
    """Return True if all items of `few` occur in `many`, in that order."""
    rest = iter(many)
    return all(word in rest for word in few)


def is_prefix(received: Message, sampled: Message) -> bool:
    """Return True if a message is the beginning of a turn, as a client has it after an interrupted stream."""
    for name in ("content", "reasoning_content"):
        if not str(sampled.get(name, "")).strip().startswith(str(received.get(name, "")).strip()):
            return False
    names = [call["function"]["name"] for call in received.get("tool_calls", ())]
    return names == [call["function"]["name"] for call in sampled.get("tool_calls", ())][: len(names)]

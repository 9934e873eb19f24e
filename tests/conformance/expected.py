"""The expected text between two turns, taken from full renders of the real conversation, without the bridger.

Every content of a case ends with a word that occurs nowhere else. So the end of the last turn and the beginning of the
next message are found in the render itself, with the model's real words in it. Three renders are compared: the prompt
before the turn, the conversation up to the turn, and the conversation with the new messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from runner.messages import Message
from runner.tokens.template import Renderer, TemplateRaised
from tests.conformance.corpus import control_tokens, is_special
from tests.conformance.scenarios import Case, Cut

__all__ = ["Expected", "NotApplicable", "expected"]


class NotApplicable(Exception):
    """Error that a case has no tail in the template's own renders. Its text is the reason."""

    def __init__(self, why: str, *, must_refuse: bool = False) -> None:
        super().__init__(why)
        self.must_refuse = must_refuse
        """True if any bridge is wrong, for any turn."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected junction, from the template's own output."""

    history: tuple[Message, ...]
    """The case's history, up to the last sampled token."""
    said: str
    """The text of the turn after its prompt, without the stop."""
    stop: str
    """The control token that ends the turn, or "" for a cut turn."""
    text: str
    """The text after the stop, up to the end of the next generation prompt."""
    anchored: bool
    """True if the stop occurs in the render with the new messages; else `text` follows the template's own close."""


def expected(case: Case, renderer: Renderer, end_of_text: str) -> Expected:
    """Return the junction of `case`. If the template never ends a turn, the model samples `end_of_text`.

    Raises:
        NotApplicable: the template raises, hides a part of the conversation, or writes it in another order.
    """
    prompt = _render(renderer, case, case.history[:-1], prompting=True)
    if case.cut is Cut.IN_CALL:
        case, said = _cut_in_call(case, renderer, prompt)
    else:
        said = ""
    whole = _render(renderer, case, [*case.history, *case.new], prompting=True)
    begin, first_new = _borders(case, whole)
    _check_new(case, whole[begin:])
    _check_asks(case, renderer, whole)
    tail = whole[begin:]
    shown = [tool["function"]["description"] for tool in case.tools]
    if any(words in tail and words not in whole[:begin] for words in shown):
        raise NotApplicable("the tools are printed after the turn", must_refuse=True)
    if case.cut is Cut.IN_CALL:
        return Expected(case.history, said, "", tail, anchored=False)
    spoken, rest = _said(case, renderer, prompt)
    if case.cut is Cut.IN_TEXT:
        return Expected(case.history, spoken, "", tail, anchored=False)
    between = tail[: first_new - begin]
    stop = _stop(case, renderer, rest, between) or end_of_text
    close = rest[: rest.index(stop)] if stop in rest else rest
    if stop in spoken:
        raise NotApplicable("the turn is closed more than once")
    if _own_words(rest) > (30 if case.history[-1].get("tool_calls") else 3):
        raise NotApplicable("the template's own words stand after the conversation")
    if case.cut is Cut.AFTER_CALL:
        return Expected(case.history, spoken + close.rstrip(), "", _after_call(stop, between, tail), anchored=False)
    close = _common(close, tail)
    at = tail.find(stop, 0, first_new - begin + len(stop))
    if at >= 0:
        return Expected(case.history, spoken + close, stop, tail[at + len(stop) :], anchored=True)
    return Expected(case.history, spoken + close, stop, _without_close(tail[len(close) :]), anchored=False)


def _own_words(rest: str) -> int:
    """Number of words after the last turn: the name of a role, the end of a call, or a guard's instructions."""
    for token in control_tokens(rest):
        rest = rest.replace(token, " ")
    return len(rest.split())


def _render(renderer: Renderer, case: Case, messages: Sequence[Message], *, prompting: bool) -> str:
    try:
        return renderer.render(list(messages), tools=list(case.tools), generation_prompt=prompting)
    except TemplateRaised as error:
        raise NotApplicable("raises") from error


def _borders(case: Case, whole: str) -> tuple[int, int]:
    """Index of the end of the last turn's words, and of the beginning of the first new content."""
    word = case.new[0]["content"].split(" ", 1)[0]
    # Some templates also print a system message at the top.
    first_new = whole.find(word, max(0, whole.find(case.last_word)))
    if first_new < 0:
        first_new = whole.find(word)
    if first_new < 0:
        raise NotApplicable("a new message is not shown", must_refuse=True)
    end = _end_of_turn(case, whole[:first_new])
    if end < 0:
        moved = case.last_word in whole
        raise NotApplicable(
            "a new message stands before the turn" if moved else "the turn is not shown", must_refuse=moved
        )
    if any(word in whole[first_new:] for word in _words(case.history[-1])):
        raise NotApplicable("the turn is repeated after a new message", must_refuse=True)
    return end, first_new


def _end_of_turn(case: Case, text: str) -> int:
    """Index after the last of the turn's words, in a call or beside it; -1 if the last word is missing."""
    if case.last_word not in text:
        return -1
    words = [case.last_word, *_words(case.history[-1])]
    return max(text.rfind(word) + len(word) for word in words if word in text)


def _words(message: Message) -> list[str]:
    """The words of a message that occur nowhere else."""
    calls: Sequence[Any] = message.get("tool_calls") or ()
    texts = [message["content"], message.get("reasoning_content", "")]
    texts += [str(value) for call in calls for value in call["function"]["arguments"].values()]
    return re.findall(r"(?:kestrel|Willow|ember|Granit)[b-z]{9}", " ".join(texts))


def _check_new(case: Case, tail: str) -> None:
    """Raise if a new message is missing before its last word, or in another order."""
    at = 0
    for message in case.new:
        words = message["content"].split(" ")
        at = tail.find(words[0], at)
        at = tail.find(words[-1], at) if at >= 0 else at
        if at < 0:
            raise NotApplicable("a new message is not shown", must_refuse=True)


def _check_asks(case: Case, renderer: Renderer, whole: str) -> None:
    """Raise if the render does not end where the model's words begin.

    There are two ways to end there. In the first, the render ends with a generation prompt, which a render without one
    lacks. In the second, the template needs no prompt: either only white space is between the render and an appended
    answer, or an appended answer shares a longer prefix with the render than with a render of an appended question.
    """
    messages = [*case.history, *case.new]
    last = case.new[-1]["content"].rsplit(" ", 1)[1]
    prompt = whole.rpartition(last)[2]
    silent = _render(renderer, case, messages, prompting=False).rpartition(last)[2]
    if len(prompt) > len(_common(prompt, silent)):
        return
    answered = _render(renderer, case, [*messages, _ANSWER], prompting=False).rpartition(last)[2]
    opener, shown, _ = answered.rpartition(_ANSWER["content"])
    if shown and prompt.startswith(opener.rstrip()):
        return
    asked = _render(renderer, case, [*messages, _QUESTION], prompting=False).rpartition(last)[2]
    if not shown or len(_common(prompt, answered)) <= len(_common(answered, asked)):
        raise NotApplicable("it does not ask for an answer", must_refuse=True)


_ANSWER: Message = {"role": "assistant", "content": "Willowanswering"}
_QUESTION: Message = {"role": "user", "content": "Willowasking"}


def _said(case: Case, renderer: Renderer, prompt: str) -> tuple[str, str]:
    """Return the last turn as the template writes it, up to the last word, and the text that follows it."""
    said = _render(renderer, case, case.history, prompting=False)
    end = _end_of_turn(case, said)
    if end < 0:
        raise NotApplicable("the turn is not shown")
    if said.startswith(prompt):
        return said[len(prompt) : end], said[end:]
    # Earlier messages are written differently now. The turn begins where the render no longer agrees with the prompt's
    # end.
    word = case.history[-2]["content"].rsplit(" ", 1)[-1]
    begin = max(0, said.rfind(word, 0, end))
    return said[begin + len(_common(said[begin:end], prompt[max(0, prompt.rfind(word)) :])) : end], said[end:]


def _after_call(stop: str, between: str, tail: str) -> str:
    """Return the tail after the visible end of the last call: the close of the turn, with the white space before it."""
    close = stop if stop in between else next((token for token in _in_order(between) if not _of_call(token)), "")
    if not close:
        raise NotApplicable("nothing shows where the call ends")
    return tail[len(between[: between.index(close)].rstrip()) :]


def _common(one: str, other: str) -> str:
    """The common prefix of two texts, without a part of a control token."""
    common = os.path.commonprefix([one, other])  # noqa: RUF071  # these are texts
    last = _control_at(one, len(common))
    return common[:last]


def _control_at(text: str, index: int) -> int:
    """Index of the beginning of the control token around `index`, else `index`."""
    near = max(0, index - 40)
    for token in control_tokens(text[near : index + 40]):
        at = text.find(token, near)
        if at < index < at + len(token):
            return at
    return index


def _cut_in_call(case: Case, renderer: Renderer, prompt: str) -> tuple[Case, str]:
    """Return the case whose turn is cut inside its last argument, so that it is text and not a call."""
    said, _ = _said(case, renderer, prompt)
    half = case.last_word[:-3]
    said = said[: said.rindex(case.last_word)] + half
    last = cast("Message", {"role": "assistant", "content": said})
    cut = Case(case.scenario, case.past, (*case.history[:-1], last), case.new, case.tools, half, case.cut)
    return cut, said


def _stop(case: Case, renderer: Renderer, rest: str, between: str) -> str | None:
    """Return the control token that ends the turn.

    After a call, this is the token that ends an answer, if it is in the rest of the render. Else it is the first token
    at the end of the conversation that is not part of a call. Else it is the token that opens the next message.
    """
    if case.history[-1].get("tool_calls"):
        try:
            said = _render(renderer, case, [*case.history[:-1], _ANSWER], prompting=False)
        except NotApplicable:
            said = ""
        written = _in_order(said.rpartition(_ANSWER["content"])[2])
        if written and written[0] in rest:
            return written[0]
    written = [token for token in _in_order(rest) if not _of_call(token)]
    if written:
        return written[0]
    following = [token for token in _in_order(between[len(rest) :]) if not _of_call(token)]
    return following[0] if following else None


def _in_order(text: str) -> list[str]:
    tokens = [token for token in control_tokens(text) if is_special(token)]
    return sorted(tokens, key=text.index)


def _of_call(token: str) -> bool:
    return re.search(r"tool.?call|call.?end|action|arg[:_]|argument|\"|ARGS|CALL_ID", token, re.IGNORECASE) is not None


def _without_close(tail: str) -> str:
    """Return `tail` without its first control token, if it begins with one."""
    token = next(iter(_in_order(tail)), "")
    return tail.removeprefix(token)

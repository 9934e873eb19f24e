"""Learning of the reasoning format and the content format of a template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from runner.parsing.learning.probe_renders import FormatProber, ProbeCall
from runner.parsing.turn_format import ContentFormat, ReasoningFormat
from runner.tokens.probe_messages import ANSWERED, THOUGHT

__all__ = ["learn_content", "learn_reasoning"]

OTHER_THOUGHT: Final = "First this, then that.\n\nSo: 42."
OTHER_ANSWER: Final = "It is 42."
CALL: Final = ProbeCall("zqfirstz", {"zqkeyaz": "zqvaluez"})
FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
TAGS: Final = ("<think>", "[THINK]", "<thinking>")
"""Tags that are tried around reasoning in the content, if the template takes no separate reasoning. A reasoning tag at
the end of the prompt is tried before them.
"""


def learn_reasoning(prober: FormatProber) -> ReasoningFormat | None:
    """Return the reasoning format of the template, or None if it does not show reasoning."""
    for ways in (_by_field, _by_part, _inline):
        for thought in ways(prober):
            learnt = _learnt(prober, thought)
            if learnt is not None and _holds(prober, thought, learnt):
                return learnt
    return None


def learn_content(prober: FormatProber, reasoning: ReasoningFormat | None) -> ContentFormat:
    """Return the texts around the content, which are empty for most templates.

    Args:
        prober: prober of the template.
        reasoning: reasoning format of the template. A prompt may open reasoning that an answer in the history lacks.
    """
    prompt, answer = prober.prompt(), prober.turn(content=ANSWERED)
    if prompt is not None and reasoning is not None and reasoning.opened_by_prompt:
        prompt = prompt.rstrip().removesuffix(reasoning.open.rstrip())
    if prompt is None or answer is None or not answer.startswith(prompt):
        return ContentFormat("", "")
    front = answer.partition(ANSWERED)[0][len(prompt) :].strip()
    marks = prober.cut_points.split(front)
    return ContentFormat(front if len(marks) == 1 and marks[0] in prober.special else "", "")


@dataclass(frozen=True, slots=True)
class _Thought:
    """A way to pass reasoning to a template."""

    field: str | None
    """Field of the message; None if the reasoning is part of the content."""
    open: str = ""
    """Opening tag of reasoning in the content."""
    close: str = ""
    """Closing tag of reasoning in the content."""
    with_call: bool = False
    """True if reasoning is shown only beside a call."""

    def render(self, prober: FormatProber, thought: str, answer: str, *, followed: bool = False) -> str | None:
        """Return the render of a turn with reasoning and an answer, or with a call if `with_call` is true.

        The result is None if the template raises.
        """
        calls = [CALL] if self.with_call else []
        content = "" if self.with_call else answer
        if self.field is not None:
            return prober.turn(*calls, content=content, thought={self.field: thought}, followed=followed)
        if self.open:
            return prober.turn(*calls, content=f"{self.open}{thought}{self.close}{answer}", followed=followed)
        parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": answer}]
        return prober.turn(*calls, thought={"content": parts}, followed=followed)

    def text_after(self, answer: str) -> str:
        """Return a text that follows the reasoning in a render: the name of the call, or the answer."""
        return CALL.name if self.with_call else answer


def _by_field(prober: FormatProber) -> Iterator[_Thought]:
    for with_call in (False, True):
        for field in FIELDS:
            yield _Thought(field, with_call=with_call)


def _by_part(prober: FormatProber) -> Iterator[_Thought]:
    thought = _Thought(None)
    text = thought.render(prober, THOUGHT, ANSWERED)
    # Some templates print the whole list as text. Then the thought appears, but not as reasoning.
    if text is not None and "type" not in text:
        yield thought


def _inline(prober: FormatProber) -> Iterator[_Thought]:
    prompt = (prober.prompt() or "").rstrip()
    last = next((mark for mark in reversed(prober.cut_points.split(prompt)) if prober.cut_points.is_tag(mark)), "")
    opened = last.replace("/", "", 1) if last[1:2] == "/" else last
    known = bool(last) and prompt.endswith(last) and _is_thought(prober, opened, prompt)
    for tag in dict.fromkeys((opened, *TAGS) if opened and known else TAGS):
        thought = _Thought(None, open=tag, close=_closing(tag))
        if (known and tag == opened) or _dropped(prober, thought):
            yield thought


def _is_thought(prober: FormatProber, opened: str, prompt: str) -> bool:
    """Return True if a mark at the end of a prompt opens reasoning or closes it, and is not a role's mark."""
    header = (prober.turn(content=ANSWERED, followed=True) or "").partition(ANSWERED)[0]
    closing = _closing(opened)
    begun = opened in prompt and not prompt.rpartition(opened)[2].replace(closing, "").strip()
    # The mark of a role has no close in the template, or the header of every answer has the mark without its close.
    known = opened in TAGS or closing in prober.renderer.template.text
    return begun and known and (opened not in header or closing in header)


def _closing(tag: str) -> str:
    return f"{tag[:1]}/{tag[1:]}"


def _dropped(prober: FormatProber, thought: _Thought) -> bool:
    """Return whether the template removes reasoning in these tags from an earlier turn."""
    text = thought.render(prober, THOUGHT, ANSWERED, followed=True)
    return text is not None and ANSWERED in text and THOUGHT not in text


def _learnt(prober: FormatProber, thought: _Thought) -> ReasoningFormat | None:
    text = thought.render(prober, THOUGHT, ANSWERED)
    after = thought.text_after(ANSWERED)
    if text is None or not 0 <= text.find(THOUGHT) < text.rfind(after):
        return None if not thought.open else _inline_format(prober, thought)
    front, _, rest = text.partition(THOUGHT)
    close = _close(prober, rest[: rest.rfind(after)])
    if not close:
        return None
    opening = _opening(prober, front, close)
    if opening and not any(prober.cut_points.is_tag(mark) for mark in prober.cut_points.split(opening)):
        return None
    return ReasoningFormat(opening, close, _opened(prober, opening))


def _inline_format(prober: FormatProber, thought: _Thought) -> ReasoningFormat:
    return ReasoningFormat(thought.open, thought.close, _opened(prober, thought.open))


def _close(prober: FormatProber, between: str) -> str:
    """Return the first line after the reasoning, without the text after the first tag in this line."""
    line = between.strip().partition("\n")[0]
    tag = next((mark for mark in prober.cut_points.split(line) if prober.cut_points.is_tag(mark)), "")
    return line[: line.find(tag) + len(tag)] if tag else line.strip()


def _opening(prober: FormatProber, front: str, close: str) -> str:
    """Return the opening mark of reasoning: the text that an answer without reasoning lacks, or else the last tag."""
    marks = prober.cut_points
    plain = prober.turn(content=ANSWERED, followed=True) or ""
    header = plain.partition(ANSWERED)[0]
    opening = front[len(marks.common_prefix([front, header])) :].strip()
    if not opening and close in header:
        opening = front.strip()
        tags = [mark for mark in marks.split(opening) if marks.is_tag(mark)]
        opening = opening[opening.rindex(tags[-1]) :] if tags else ""
    # Earlier lines are the header of the turn, or empty reasoning.
    return opening.rpartition("\n")[2]


def _opened(prober: FormatProber, opening: str) -> bool:
    prompt = prober.prompt()
    return bool(opening) and prompt is not None and prompt.rstrip().endswith(opening)


def _holds(prober: FormatProber, thought: _Thought, learnt: ReasoningFormat) -> bool:
    """Return True if the template writes other reasoning between the same marks, or drops reasoning in tags."""
    text = thought.render(prober, OTHER_THOUGHT, OTHER_ANSWER)
    if text is None:
        return False
    at = text.find(OTHER_THOUGHT)
    if at < 0:
        return bool(thought.open)
    before, after = text[:at].rstrip(), text[at + len(OTHER_THOUGHT) :].lstrip()
    return before.endswith(learnt.open) and after.startswith(learnt.close)

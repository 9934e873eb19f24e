"""Check of a reader that was not learnt, such as the reader of a format that the user named, against a template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from runner.parsing.events import TurnReading
from runner.parsing.learning.calls import end_of_turn
from runner.parsing.learning.format_check import CaseDifference, FormatCase, ReadText, common_cases, misread, schemas_of
from runner.parsing.learning.probe_renders import FormatProber, FormatRequirement, ProbeCall, UnlearnableFormat
from runner.parsing.learning.reasoning import FIELDS, OTHER_THOUGHT
from runner.parsing.limitations import CallLimitation
from runner.parsing.response_template import NoParser, ResponseTemplateReader
from runner.parsing.turn_format import ReasoningFormat, ResponseFormat

__all__ = ["ReaderCheck", "RenderedTurns", "check_reader", "learn_response"]

ONE: Final = ProbeCall("look_up", {"limit": 3, "query": "what it is"})
TWO: Final = (ONE, ProbeCall("refresh", {"hard": True}))


@dataclass(frozen=True, slots=True)
class ReaderCheck:
    """The cases that a reader misread in a check against a template, and its limitations."""

    cases: int
    """Number of checked cases."""
    differences: tuple[CaseDifference, ...]
    """Cases that are misread and that no limitation explains."""
    limitations: frozenset[CallLimitation]
    """Limitations of the reader, or of the template."""


def learn_response(
    prober: FormatProber, template: Mapping[str, Any], reasoning: ReasoningFormat | None
) -> tuple[ResponseFormat, frozenset[CallLimitation]]:
    """Return the checkpoint's own response template as a format, and its limitations.

    Args:
        prober: prober of the template, with its settings for calls determined.
        template: response template of the checkpoint.
        reasoning: reasoning format of the template.

    Raises:
        UnlearnableFormat: the response template cannot be loaded, or misreads text of the chat template; or the chat
            template raises on a call.
    """
    form = ResponseFormat(template, prober.prompt() or "")
    try:
        reader = ResponseTemplateReader(form)
        reader.load()
    except NoParser as error:
        raise UnlearnableFormat(FormatRequirement.INVERTED, str(error)) from None
    said = RenderedTurns(prober, reasoning).said(ONE)
    if said is None:
        raise UnlearnableFormat(FormatRequirement.VALUES, "the template raises on a call with a string and a number")
    reader = ResponseTemplateReader(replace(form, closed=reader.ends_closed(said)))
    checked = check_reader(prober, reader.read, reasoning)
    if checked.differences:
        raise UnlearnableFormat(FormatRequirement.INVERTED, checked.differences[0].sentence)
    return reader.format, checked.limitations


def check_reader(prober: FormatProber, read: ReadText, reasoning: ReasoningFormat | None) -> ReaderCheck:
    """Check whether a reader reads the calls that the template writes, and return the result.

    The check of a learnt format reads text that is composed from its literals; this check reads complete renders, cut
    into turns. A misread case is read again with tools that declare all parameter types, since some readers need them.
    """
    return _ReaderChecker(prober, read, RenderedTurns(prober, reasoning)).checked()


@dataclass(frozen=True)  # no slots: cached properties need a dict
class RenderedTurns:
    """Texts of turns that a model would have sampled, cut out of renders."""

    prober: FormatProber
    reasoning: ReasoningFormat | None
    """Reasoning format of the template."""

    def said(self, *calls: ProbeCall, content: str = "", thought: dict[str, str] | None = None) -> str | None:
        """Return the text that the model would have sampled; None if the template raises."""
        text = self.prober.turn(*calls, content=content, thought=thought)
        return None if text is None else self._cut(self._after_prompt(text))

    def _after_prompt(self, text: str) -> str:
        if text.startswith(self._prompt):
            return text[len(self._prompt) :]
        end, only_asked = self._shared(text)
        rest = text[end:]
        if not only_asked or self.reasoning is None or not self.reasoning.opened_by_prompt:
            return rest
        # The history omits an empty thought, but if the prompt opens one, the model has to close it.
        return f"{self.reasoning.close}\n\n{rest.lstrip()}"

    def _shared(self, text: str) -> tuple[int, bool]:
        """Return the end of the prefix that `text` shares with the prompt, and True if the prompt continues after it.

        White space is ignored.
        """
        wanted = [mark for mark in self.prober.cut_points.split(self._prompt) if mark.strip()]
        at = end = 0
        for mark in self.prober.cut_points.split(text):
            at += len(mark)
            if not mark.strip():
                continue
            if not wanted or mark != wanted[0]:
                break
            wanted.pop(0)
            end = at
        return end, bool(wanted)

    def _cut(self, text: str) -> str:
        if self._end and self._end in text:
            return text.partition(self._end)[0]
        body = text.rstrip()
        # Some templates write another token at the end of turns with calls.
        stop = next((token for token in self.prober.special if body.endswith(token)), "")
        return body.removesuffix(stop)

    @cached_property
    def _prompt(self) -> str:
        return self.prober.prompt() or ""

    @cached_property
    def _end(self) -> str:
        return end_of_turn(self.prober)


@dataclass(frozen=True)  # no slots: cached properties need a dict
class _ReaderChecker:
    prober: FormatProber
    read: ReadText
    turns: RenderedTurns

    def checked(self) -> ReaderCheck:
        cases, found, limitations = 0, list[CaseDifference](), set(self._limits)
        for case in self._cases():
            cases += 1
            difference, limitation = self._tried(case)
            found += [difference] if difference is not None else []
            limitations |= {limitation} if limitation is not None else set()
        return ReaderCheck(cases, tuple(found), frozenset(limitations))

    def _cases(self) -> Iterator[FormatCase]:
        for case in common_cases():
            if len(case.calls) > 1 and CallLimitation.ONE_CALL in self._limits:
                continue
            yield replace(case, content="") if CallLimitation.CONTENT_DROPPED in self._limits else case
        yield from self._marks
        yield THINKING

    def _tried(self, case: FormatCase) -> tuple[CaseDifference | None, CallLimitation | None]:
        """Return the difference in a case, or the limitation that explains it. A correct reading has neither."""
        said = self._thinking() if case is THINKING else self.turns.said(*case.calls, content=case.content)
        if said is None:
            return None, None if case is THINKING else CallLimitation.SOME_VALUES_REFUSED
        if not self._wrong(said, case, typed=False):
            return None, None
        wrong = self._wrong(said, case, typed=True)
        if not wrong:
            return None, CallLimitation.UNTYPED
        if case in self._marks:
            return None, CallLimitation.MARKS_IN_STRING
        return CaseDifference(case, wrong), None

    def _wrong(self, said: str, case: FormatCase, *, typed: bool) -> str:
        reading = self.read(said, schemas_of(case.calls, typed=typed))
        wrong = misread(reading, case)
        if case is THINKING and not wrong and isinstance(reading, TurnReading) and reading.reasoning != OTHER_THOUGHT:
            wrong = f"the thought is read as {reading.reasoning!r}"
        return wrong

    def _thinking(self) -> str | None:
        """Return a turn with reasoning and a call; None if the template does not show the reasoning."""
        for field in FIELDS if self.turns.reasoning is not None else ():
            said = self.turns.said(ONE, thought={field: OTHER_THOUGHT})
            if said is not None and OTHER_THOUGHT in said:
                return said
        return None

    @cached_property
    def _marks(self) -> tuple[FormatCase, ...]:
        """Cases with a mark of a call in a string, one for each mark."""
        said = self.turns.said(ONE) or ""
        marks = dict.fromkeys(
            mark for mark in self.prober.cut_points.split(said) if self.prober.cut_points.is_tag(mark)
        )
        return tuple(
            FormatCase(f"{mark!r} in a string", (ProbeCall("look_up", {"query": f"a {mark} b"}),)) for mark in marks
        )

    @cached_property
    def _limits(self) -> frozenset[CallLimitation]:
        """Limitations of the template itself."""
        limits: set[CallLimitation] = set()
        several = self.turns.said(*TWO)
        if several is None or any(each.name not in several for each in TWO):
            limits.add(CallLimitation.ONE_CALL)
        content = "zqcontentz"
        beside = self.turns.said(ONE, content=content)
        if beside is None or content not in beside:
            limits.add(CallLimitation.CONTENT_DROPPED)
        elif beside.index(content) > beside.index(ONE.name):
            limits.add(CallLimitation.CONTENT_BEHIND)
        return frozenset(limits)


THINKING: Final = FormatCase("a thought beside a call", (ONE,))

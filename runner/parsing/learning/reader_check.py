"""Checks a reader of calls that was not learnt against a template, by the cases that a learnt format has to pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from runner.parsing.events import TurnReading
from runner.parsing.learning.calls import end_of_turn
from runner.parsing.learning.format_check import CaseDifference, FormatCase, ReadText, common_cases, misread, schemas_of
from runner.parsing.learning.probe_renders import FormatRequirement, ProbeCall, ProbeRenderer, UnlearnableFormat
from runner.parsing.learning.reasoning import FIELDS, OTHER_THOUGHT
from runner.parsing.limitations import CallLimitation
from runner.parsing.response_template import NoParser, ResponseTemplateReader
from runner.parsing.turn_format import ReasoningFormat, ResponseFormat

__all__ = ["ReaderCheck", "RenderedTurns", "check_reader", "learn_response"]

ONE: Final = ProbeCall("look_up", {"limit": 3, "query": "what it is"})
TWO: Final = (ONE, ProbeCall("refresh", {"hard": True}))


@dataclass(frozen=True, slots=True)
class ReaderCheck:
    """What came of the cases."""

    cases: int
    """How many there were."""
    differences: tuple[CaseDifference, ...]
    """Those in which something else is read than was said, and no trait says why."""
    traits: frozenset[CallLimitation]
    """What the reader, or the template, cannot do."""


def learn_response(
    prober: ProbeRenderer, template: Mapping[str, Any], reasoning: ReasoningFormat | None
) -> tuple[ResponseFormat, frozenset[CallLimitation]]:
    """The checkpoint's own response template as a way to read turns, and what it cannot do.

    Args:
        prober: has found out how the template wants to be asked for a call.
        template: what the checkpoint says.
        reasoning: how the template writes thoughts.

    Raises:
        UnlearnableFormat: it reads something else than the template writes.
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
    return reader.format, checked.traits


def check_reader(prober: ProbeRenderer, read: ReadText, reasoning: ReasoningFormat | None) -> ReaderCheck:
    """Reads what the template writes of the battery's calls.

    What a learnt format writes is put together from its literals; here the renders themselves are read, cut as turns
    are. Tools describe their parameters as tools do, since that is what such readers tell types by.
    """
    return _ReaderChecker(prober, read, RenderedTurns(prober, reasoning)).checked()


@dataclass(frozen=True)  # without slots, since what ends a turn is kept in it
class RenderedTurns:
    """Cuts renders as a run cuts turns: what the model would have said for them."""

    prober: ProbeRenderer
    """What renders them."""
    reasoning: ReasoningFormat | None
    """How the template writes thoughts."""

    def said(self, *calls: ProbeCall, content: str = "", thought: dict[str, str] | None = None) -> str | None:
        """What the model says; None where the template refuses it."""
        text = self.prober.turn(*calls, content=content, thought=thought)
        return None if text is None else self._cut(self._behind_prompt(text))

    def _behind_prompt(self, text: str) -> str:
        if text.startswith(self._prompt):
            return text[len(self._prompt) :]
        end, only_asked = self._shared(text)
        rest = text[end:]
        if not only_asked or self.reasoning is None or not self.reasoning.opened_by_prompt:
            return rest
        # The history leaves an empty thought out, which the model has to close where the prompt opens it.
        return f"{self.reasoning.close}\n\n{rest.lstrip()}"

    def _shared(self, text: str) -> tuple[int, bool]:
        """Where `text` goes on behind what it shares with the prompt, however spaced; whether the prompt has more."""
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
        # Some templates end turns with calls in a way of their own.
        stop = next((token for token in self.prober.special if body.endswith(token)), "")
        return body.removesuffix(stop)

    @cached_property
    def _prompt(self) -> str:
        return self.prober.prompt() or ""

    @cached_property
    def _end(self) -> str:
        return end_of_turn(self.prober)


@dataclass(frozen=True)  # without slots, since what was found is kept in it
class _ReaderChecker:
    prober: ProbeRenderer
    read: ReadText
    turns: RenderedTurns

    def checked(self) -> ReaderCheck:
        cases, found, traits = 0, list[CaseDifference](), set(self._limits)
        for case in self._cases():
            cases += 1
            difference, trait = self._tried(case)
            found += [difference] if difference is not None else []
            traits |= {trait} if trait is not None else set()
        return ReaderCheck(cases, tuple(found), frozenset(traits))

    def _cases(self) -> Iterator[FormatCase]:
        for case in common_cases():
            if len(case.calls) > 1 and CallLimitation.ONE_CALL in self._limits:
                continue
            yield replace(case, content="") if CallLimitation.CONTENT_DROPPED in self._limits else case
        yield from self._marks
        yield THINKING

    def _tried(self, case: FormatCase) -> tuple[CaseDifference | None, CallLimitation | None]:
        """What is wrong, if no trait says so, or that trait."""
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
        """A turn that thinks and calls; None where the template shows no thought there."""
        for field in FIELDS if self.turns.reasoning is not None else ():
            said = self.turns.said(ONE, thought={field: OTHER_THOUGHT})
            if said is not None and OTHER_THOUGHT in said:
                return said
        return None

    @cached_property
    def _marks(self) -> tuple[FormatCase, ...]:
        """Each mark of a call in a string."""
        said = self.turns.said(ONE) or ""
        marks = dict.fromkeys(
            mark for mark in self.prober.cut_points.split(said) if self.prober.cut_points.is_tag(mark)
        )
        return tuple(
            FormatCase(f"{mark!r} in a string", (ProbeCall("look_up", {"query": f"a {mark} b"}),)) for mark in marks
        )

    @cached_property
    def _limits(self) -> frozenset[CallLimitation]:
        """What the template itself does not write."""
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

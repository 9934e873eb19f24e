"""Learning of the format of a template's turns, and its check against the template."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import orjson

from runner.parsing.cut_points import CutPoints
from runner.parsing.harmony import THOUGHT, learn_harmony, read_harmony
from runner.parsing.learning.calls import accepted_ids, learn_calls
from runner.parsing.learning.format_check import check_calls
from runner.parsing.learning.probe_renders import FormatProber, FormatRequirement, UnlearnableFormat
from runner.parsing.learning.reader_check import learn_response
from runner.parsing.learning.reasoning import learn_content, learn_reasoning
from runner.parsing.limitations import CallLimitation
from runner.parsing.turn_format import ContentFormat, TurnFormat
from runner.tokens.control_text import special_tokens, tag_tokens
from runner.tokens.template import Renderer

__all__ = ["FormatSource", "FormatVerdict", "LearntFormat", "learn_format", "prober_of"]


class FormatSource(enum.StrEnum):
    """Source of a format. The members are in the order in which the sources are tried."""

    HARMONY = "harmony"  # the format is known, and has its own reader
    LEARNT = "learnt"
    RESPONSE_TEMPLATE = "response_template"  # the checkpoint has a response template


class FormatVerdict(enum.StrEnum):
    """Quality of a call format."""

    EXACT = "exact"
    LIMITED = "limited"  # calls are read exactly, except for the limitations
    REFUSED = "refused"  # calls cannot be read


@dataclass(frozen=True, slots=True)
class LearntFormat:
    """The learnt format of a template's turns."""

    format: TurnFormat
    limitations: tuple[CallLimitation, ...]
    missing: FormatRequirement | None
    """The unmet condition if calls cannot be read; otherwise None."""
    why: str
    """Description of the unmet condition; "" if there is none."""
    renders: int
    """Number of renders for learning and checking."""

    @property
    def verdict(self) -> FormatVerdict:
        """Quality of the call format."""
        if not self.reads_calls:
            return FormatVerdict.REFUSED
        return FormatVerdict.LIMITED if self.limitations else FormatVerdict.EXACT

    @property
    def reads_calls(self) -> bool:
        """True if calls can be read."""
        return self.format.calls is not None or self.format.response is not None

    @property
    def source(self) -> FormatSource:
        """Source of the call format."""
        if self.format.response is not None:
            return FormatSource.RESPONSE_TEMPLATE
        return FormatSource.HARMONY if self.format.harmony else FormatSource.LEARNT

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with verdict and source. The response template is included only if there is one."""
        values: dict[str, Any] = orjson.loads(orjson.dumps(self))
        # None is omitted, so that run files of versions without response templates can be resumed
        if self.format.response is None:
            del values["format"]["response"]
        return {"source": self.source.value, "verdict": self.verdict.value, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        learnt: Self = _adapter().validate_python(values)
        return learnt


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # this import is late, since the probing process has to start fast

    return TypeAdapter(LearntFormat)


def prober_of(renderer: Renderer) -> FormatProber:
    """Return a prober whose settings for calls are not determined yet."""
    written = renderer.written()
    special = frozenset(special_tokens(written))
    return FormatProber(renderer, CutPoints(special | {*tag_tokens(written)}), special)


def learn_format(renderer: Renderer) -> LearntFormat:
    """Learn the turn format of a template, usually from 10 to 35 renders, and check the format with about 50.

    If the form of calls cannot be learnt, a response template of the checkpoint is used, provided that it passes a
    check.
    """
    prober = prober_of(renderer)
    form = TurnFormat(None, None, ContentFormat("", ""))
    try:
        harmony = learn_harmony(renderer)
        if harmony is not None:
            limitations = check_calls(prober, harmony, lambda text, schemas: read_harmony(text))
            form = replace(form, calls=harmony, reasoning=THOUGHT, harmony=True)
        else:
            form = replace(form, reasoning=learn_reasoning(prober))
            form = replace(form, content=learn_content(prober, form.reasoning))
            calls = learn_calls(prober)
            limitations = check_calls(prober, calls)
            form = replace(form, calls=calls)
    except UnlearnableFormat as error:
        return _by_response(prober, form, error)
    return LearntFormat(form, tuple(sorted(limitations)), None, "", prober.renders)


def _by_response(prober: FormatProber, form: TurnFormat, unlearnt: UnlearnableFormat) -> LearntFormat:
    """Return the format of a template whose form of calls could not be learnt.

    If the template shows calls, and the checkpoint has a response template that passes a check, the response template
    reads the calls. Otherwise, no calls are read.
    """
    template, why = prober.renderer.template.response_template, str(unlearnt)
    try:
        form = replace(form, ids=accepted_ids(prober))
        if template is not None and unlearnt.requirement is not FormatRequirement.SHOWN:
            response, limitations = learn_response(prober, template, form.reasoning)
            form = replace(form, response=response)
            return LearntFormat(form, tuple(sorted(limitations)), None, "", prober.renders)
    except UnlearnableFormat as error:  # the response template is unusable, or too many renders were needed
        if template is not None:
            why = f"{why}; the model's response_template cannot read its calls either: {error}"
    return LearntFormat(form, (), unlearnt.requirement, why, prober.renders)

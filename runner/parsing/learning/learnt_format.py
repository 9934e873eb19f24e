"""Learns the format of a template's turns, checks it against the template, and says what it can do."""

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
from runner.parsing.learning.probe_renders import FormatRequirement, ProbeRenderer, UnlearnableFormat
from runner.parsing.learning.reader_check import learn_response
from runner.parsing.learning.reasoning import learn_content, learn_reasoning
from runner.parsing.limitations import CallLimitation
from runner.parsing.turn_format import ContentFormat, TurnFormat
from runner.tokens.control_text import special_tokens, tag_tokens
from runner.tokens.template import Renderer

__all__ = ["FormatSource", "FormatVerdict", "LearntFormat", "learn_format", "prober_of"]


class FormatSource(enum.StrEnum):
    """Where a format comes from, in the order in which they are tried."""

    HARMONY = "harmony"  # known, and read by hand
    LEARNT = "learnt"
    RESPONSE_TEMPLATE = "response_template"  # of the checkpoint


class FormatVerdict(enum.StrEnum):
    """How good a format of calls is."""

    EXACT = "exact"
    LIMITED = "limited"  # all but what its traits name
    REFUSED = "refused"  # calls cannot be read


@dataclass(frozen=True, slots=True)
class LearntFormat:
    """What was learnt of a template's turns."""

    format: TurnFormat
    """How it writes them."""
    traits: tuple[CallLimitation, ...]
    """What its calls cannot do."""
    missing: FormatRequirement | None
    """What the template does not do for its calls to be read; None where they are."""
    why: str
    """The same in words, or ""."""
    renders: int
    """How often the template was rendered for it."""

    @property
    def verdict(self) -> FormatVerdict:
        """How good it is."""
        if not self.reads_calls:
            return FormatVerdict.REFUSED
        return FormatVerdict.LIMITED if self.traits else FormatVerdict.EXACT

    @property
    def reads_calls(self) -> bool:
        """Whether calls can be read by what is known of the template."""
        return self.format.calls is not None or self.format.response is not None

    @property
    def source(self) -> FormatSource:
        """Where it comes from."""
        if self.format.response is not None:
            return FormatSource.RESPONSE_TEMPLATE
        return FormatSource.HARMONY if self.format.harmony else FormatSource.LEARNT

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the verdict and the source; of a response template only where there is one."""
        values: dict[str, Any] = orjson.loads(orjson.dumps(self))
        if self.format.response is None:  # a run file from before there were any can be gone on with
            del values["format"]["response"]
        return {"source": self.source.value, "verdict": self.verdict.value, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """What `as_json` described."""
        learnt: Self = _adapter().validate_python(values)
        return learnt


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # here, since the process that probes has to start fast

    return TypeAdapter(LearntFormat)


def prober_of(renderer: Renderer) -> ProbeRenderer:
    """What asks a template, before it is known how it wants to be asked for calls."""
    written = renderer.written()
    special = frozenset(special_tokens(written))
    return ProbeRenderer(renderer, CutPoints(special | {*tag_tokens(written)}), special)


def learn_format(renderer: Renderer) -> LearntFormat:
    """What a template writes for a turn of the assistant, learnt from some thirty renders and checked with sixty.

    Calls that cannot be learnt are read as the checkpoint's own response template says, where that passes the check.
    """
    prober = prober_of(renderer)
    harmony = learn_harmony(renderer)
    if harmony is not None:
        form = TurnFormat(harmony, THOUGHT, ContentFormat("", ""), harmony=True)
        traits = check_calls(prober, harmony, lambda text, schemas: read_harmony(text))
        return LearntFormat(form, tuple(sorted(traits)), None, "", prober.renders)
    reasoning = learn_reasoning(prober)
    content = learn_content(prober, reasoning)
    try:
        calls = learn_calls(prober)
        traits = check_calls(prober, calls)
    except UnlearnableFormat as error:
        return _by_response(prober, TurnFormat(None, reasoning, content), error)
    return LearntFormat(TurnFormat(calls, reasoning, content), tuple(sorted(traits)), None, "", prober.renders)


def _by_response(prober: ProbeRenderer, form: TurnFormat, unlearnt: UnlearnableFormat) -> LearntFormat:
    """What the checkpoint itself says of its turns, whose calls could not be learnt."""
    template, why = prober.renderer.template.response_template, str(unlearnt)
    form = replace(form, ids=accepted_ids(prober))
    if template is not None and unlearnt.requirement is not FormatRequirement.SHOWN:
        try:
            response, traits = learn_response(prober, template, form.reasoning)
        except UnlearnableFormat as error:
            why = f"{why}; nor can they by the model's response_template: {error}"
        else:
            form = replace(form, response=response)
            return LearntFormat(form, tuple(sorted(traits)), None, "", prober.renders)
    return LearntFormat(form, (), unlearnt.requirement, why, prober.renders)

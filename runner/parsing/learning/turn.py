"""Learns the format of a template's turns, checks it against the template, and says what it can do."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import orjson

from runner.parsing.harmony import THOUGHT, learn_harmony, read_harmony
from runner.parsing.learning.asking import Asker, FormatProperty, Unlearnt
from runner.parsing.learning.calls import learn_calls
from runner.parsing.learning.checking import check_calls
from runner.parsing.learning.reasoning import learn_content, learn_reasoning
from runner.parsing.marks import Marks
from runner.parsing.traits import CallTrait
from runner.parsing.turn_format import ContentFormat, TurnFormat
from runner.tokens.control_text import special_tokens, tag_tokens
from runner.tokens.template import Renderer

__all__ = ["LearntTurn", "Verdict", "learn_turn"]


class Verdict(enum.StrEnum):
    """How good a learnt format of calls is."""

    EXACT = "exact"
    LIMITED = "limited"  # all but what its traits name
    REFUSED = "refused"  # calls cannot be read


@dataclass(frozen=True, slots=True)
class LearntTurn:
    """What was learnt of a template's turns."""

    format: TurnFormat
    """How it writes them."""
    traits: tuple[CallTrait, ...]
    """What its calls cannot do."""
    missing: FormatProperty | None
    """What the template does not do for its calls to be read; None where they are."""
    why: str
    """The same in words, or ""."""
    renders: int
    """How often the template was rendered for it."""

    @property
    def verdict(self) -> Verdict:
        """How good it is."""
        if self.format.calls is None:
            return Verdict.REFUSED
        return Verdict.LIMITED if self.traits else Verdict.EXACT

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        values: dict[str, Any] = orjson.loads(orjson.dumps(self))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """What `as_json` described."""
        learnt: Self = _adapter().validate_python(values)
        return learnt


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # here, since the process that probes has to start fast

    return TypeAdapter(LearntTurn)


def learn_turn(renderer: Renderer) -> LearntTurn:
    """What a template writes for a turn of the assistant, learnt from some thirty renders and checked with sixty."""
    written = renderer.written()
    special = frozenset(special_tokens(written))
    asker = Asker(renderer, Marks(special | {*tag_tokens(written)}), special)
    harmony = learn_harmony(renderer)
    if harmony is not None:
        form = TurnFormat(harmony, THOUGHT, ContentFormat("", ""), harmony=True)
        traits = check_calls(asker, harmony, lambda text, schemas: read_harmony(text))
        return LearntTurn(form, tuple(sorted(traits)), None, "", asker.renders)
    reasoning = learn_reasoning(asker)
    content = learn_content(asker, reasoning)
    try:
        calls = learn_calls(asker)
        traits = check_calls(asker, calls)
    except Unlearnt as error:
        return LearntTurn(TurnFormat(None, reasoning, content), (), error.property, str(error), asker.renders)
    return LearntTurn(TurnFormat(calls, reasoning, content), tuple(sorted(traits)), None, "", asker.renders)

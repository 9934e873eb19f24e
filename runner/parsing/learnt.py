"""What was learnt of templates in this process: each once, or handed over by the process that probed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.messages import canonical_json
from runner.parsing.learning.turn import LearntTurn, learn_turn
from runner.parsing.responses import ResponseReader
from runner.tokens.template import ChatTemplate, Renderer

__all__ = ["learnt_turn", "remember"]

_known: dict[str, LearntTurn] = {}


def learnt_turn(renderer: Renderer) -> LearntTurn:
    """What the template writes for a turn, under its options."""
    key = _key(renderer.template, renderer.options)
    if key not in _known:
        _known[key] = learn_turn(renderer)
    return _known[key]


def remember(template: ChatTemplate, options: Mapping[str, Any], learnt: LearntTurn) -> None:
    """Take what another process has learnt of a template. Blocks where it takes a parser that has to be imported."""
    if learnt.format.response is not None:
        ResponseReader(learnt.format.response).load()
    _known[_key(template, options)] = learnt


def _key(template: ChatTemplate, options: Mapping[str, Any]) -> str:
    # The clock is left out: no format depends on the day.
    return canonical_json([template.fingerprint, options])

"""What was learnt of templates in this process: each once, or handed over by the process that probed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.messages import canonical_json
from runner.parsing.learning.learnt_format import LearntFormat, learn_format
from runner.parsing.response_template import ResponseTemplateReader
from runner.tokens.template import ChatTemplate, Renderer

__all__ = ["cache_format", "cached_format"]

_known: dict[str, LearntFormat] = {}


def cached_format(renderer: Renderer) -> LearntFormat:
    """What the template writes for a turn, under its options."""
    key = _key(renderer.template, renderer.options)
    if key not in _known:
        _known[key] = learn_format(renderer)
    return _known[key]


def cache_format(template: ChatTemplate, options: Mapping[str, Any], learnt: LearntFormat) -> None:
    """Take what another process has learnt of a template. Blocks where it takes a parser that has to be imported."""
    if learnt.format.response is not None:
        ResponseTemplateReader(learnt.format.response).load()
    _known[_key(template, options)] = learnt


def _key(template: ChatTemplate, options: Mapping[str, Any]) -> str:
    # The clock is left out: no format depends on the day.
    return canonical_json([template.fingerprint, options])

"""Cache of learnt formats in this process. Formats that another process has learnt can be stored in it."""

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
    """Return the format of the template's turns under its options, learnt on first use."""
    key = _key(renderer.template, renderer.options)
    if key not in _known:
        _known[key] = learn_format(renderer)
    return _known[key]


def cache_format(template: ChatTemplate, options: Mapping[str, Any], learnt: LearntFormat) -> None:
    """Store a learnt format, such as a format that another process has learnt.

    If the format has a response template, the function blocks until the parser for this template is imported.

    Raises:
        NoParser: the parser for the format's response template cannot be imported, or refuses the template.
    """
    if learnt.format.response is not None:
        ResponseTemplateReader(learnt.format.response).load()
    _known[_key(template, options)] = learnt


def _key(template: ChatTemplate, options: Mapping[str, Any]) -> str:
    # The clock is not part of the key: no format depends on the date.
    return canonical_json([template.fingerprint, options])

"""Detection of a template's support for system messages at the beginning, and for several user messages in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runner.messages import Message
from runner.tokens.probe_messages import AGAIN, AGAIN_ASKED, ASKED, CALL, INSTRUCTED, QUESTION, SYSTEM, TOOLS, result
from runner.tokens.template import Renderer, TemplateRaised

__all__ = ["TAKES_ALL", "SystemSupport", "system_support"]

_FURTHER: Final = ("zqfurtherz", "zqbesidesz")
_MORE: Final[Sequence[Message]] = [{"role": "system", "content": text} for text in _FURTHER]
"""Two more system messages, since some templates show only the first two."""


@dataclass(frozen=True, slots=True)
class SystemSupport:
    """A template's support for system messages at the beginning, and for several user messages in a row."""

    one: bool
    """True if the template shows a system message at the beginning, also if the last message is a tool's result."""
    several: bool
    """True if the template shows three system messages at the beginning, in their order."""
    user_rows: bool
    """True if the template shows two user messages in a row."""


TAKES_ALL: Final = SystemSupport(one=True, several=True, user_rows=True)
"""The support of a chat API, whose template is not known."""


def system_support(renderer: Renderer) -> SystemSupport:
    """Return a template's `SystemSupport`, found by rendering with and without tools."""
    one = {tools: _shows(renderer, [SYSTEM, QUESTION], [INSTRUCTED, ASKED], tools) for tools in (False, True)}
    # A template that shows no system message together with tools does not show a second one either.
    several = any(one.values()) and all(
        _shows(renderer, [SYSTEM, *_MORE, QUESTION], [INSTRUCTED, *_FURTHER, ASKED], tools)
        for tools, shown in one.items()
        if shown
    )
    return SystemSupport(
        one=one[False] and _lasts(renderer),
        several=several,
        user_rows=_shows(renderer, [QUESTION, AGAIN_ASKED], [ASKED, AGAIN], tools=False),
    )


def _lasts(renderer: Renderer) -> bool:
    """Return False if a render that ends with a tool result lacks only the system message, as in Mistral Nemo."""
    try:
        text = renderer.render([SYSTEM, QUESTION, CALL, result()], tools=TOOLS)
    except TemplateRaised:
        return True
    return INSTRUCTED in text or ASKED not in text


def _shows(renderer: Renderer, messages: Sequence[Message], words: Sequence[str], tools: bool) -> bool:
    try:
        text = renderer.render(messages, tools=TOOLS if tools else ())
    except TemplateRaised:
        return False
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)

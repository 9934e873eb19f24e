"""A template under examination: renders of probe messages, where one that raises is an answer too."""

from __future__ import annotations

from runner.tokens.probe_messages import TOOLS, View
from runner.tokens.template import Renderer, TemplateRaised

__all__ = ["ProbeRenderer"]


class ProbeRenderer:
    """One template under examination."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def text(self, *messages: View, tools: bool = False, asking: bool = False) -> str | None:
        """The render, or None where the template raises."""
        try:
            return self.renderer.render(messages, tools=TOOLS if tools else [], generation_prompt=asking)
        except TemplateRaised:
            return None

    def shows(self, word: str, *messages: View, tools: bool = False, asking: bool = False) -> bool:
        return word in (self.text(*messages, tools=tools, asking=asking) or "")

    def between(self, before: str, after: str, *messages: View, asking: bool = False) -> str:
        """What stands between two words, or behind the first where the second is ""; "" where it is not there."""
        _, found, rest = (self.text(*messages, asking=asking) or "").rpartition(before)
        if not found:
            return ""
        return rest.partition(after)[0] if after else rest

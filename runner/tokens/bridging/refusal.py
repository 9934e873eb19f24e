"""Refusals: the property of a template, a vocabulary or a turn that is missing for an exact bridge."""

from __future__ import annotations

import enum

__all__ = ["Property", "Unbridgeable"]


class Property(enum.StrEnum):
    """A property that an exact bridge needs. `Unbridgeable` names the missing property.

    The comment at each property describes the case in which it is missing.
    """

    TEMPLATE_RENDERS = "template_raises"  # the template raised on these messages
    SENTINEL_SHOWN = "no_sentinel"  # the render does not show the text or the calls of the last assistant turn
    TURN_STAYS_BEFORE = "marker_in_tail"  # the model's words would occur again after the turn
    TOOLS_STAY = "tools_move"  # tools are printed after the turn, so the prompt has them at the wrong place
    # the system message is printed after the turn, so the prompt has it at the wrong place
    SYSTEM_STAYS = "system_moves"
    CONTENT_LOCATED = "content_not_located"  # control text of a content looks like the template's own text
    CONTENT_SHOWN = "content_missing"  # the render does not show a new message
    STOP_IN_TAIL = "stop_not_in_tail"  # the sampled stop cannot replace the template's close
    STOP_OPENS_NEXT = "stop_opens_wrong_role"  # the sampled stop opens a message of another role than the next message
    CLOSE_KNOWN = "close_not_found"  # the position of the template's close after a cut turn is unknown
    REASONING_CLOSED = "reasoning_open"  # the turn was cut inside its reasoning
    TEXT_KEPT = "text_not_kept"  # the tail is another text after encoding and decoding
    PROMPTS_ANSWER = "generation_prompt_missing"  # the render does not end with a generation prompt
    OPENED_ONCE = "assistant_opened_twice"  # the generation prompt occurs twice
    TURNS_SAMPLED = "assistant_in_new"  # an assistant message that was not sampled was appended


class Unbridgeable(Exception):
    """Refusal of a bridge, since a property of the template, the vocabulary or the turn is missing."""

    def __init__(self, property: Property, explanation: str) -> None:
        super().__init__(f"{property}: {explanation}")
        self.property = property
        self.explanation = explanation
        """The description of the missing property, for people."""

"""The messages of a trajectory's turns, for traces that record messages and turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.episode.parsed_turn import ParsedTurn
from runner.messages import Message
from runner.trajectory import Segment, Turn

__all__ = ["arguments_as_text", "reply_of", "reply_places"]


def reply_of(turn: Turn) -> Message:
    """Return the assistant message of a turn. If it continues a cut turn, return only the text that it added."""
    return ParsedTurn(turn.text, turn.reasoning, turn.tool_calls).as_message()


def reply_places(segment: Segment, turns: Sequence[Turn]) -> list[int]:
    """Return the index of each turn's message among the messages of its segment.

    A turn that continues a cut turn shares the message of that turn. If the message of a turn is missing, for example
    because the episode ended in the turn, the index is the number of messages that were in a prompt.

    Args:
        segment: the segment.
        turns: the turns that were sampled in the segment, in order.
    """
    begins = [not number or turns[number - 1].end != turn.start for number, turn in enumerate(turns)]
    seen = segment.messages[: len(segment.messages) - segment.unseen]
    said = [index for index, message in enumerate(seen) if message["role"] == "assistant"]
    own = said[max(0, len(said) - sum(begins)) :]
    # If an episode was cut in a turn, the message of this turn may be missing.
    own += [len(seen)] * (sum(begins) - len(own))
    return [own[sum(begins[: number + 1]) - 1] for number in range(len(turns))]


def arguments_as_text(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text, as OpenAI's API has them."""
    shown: dict[str, Any] = dict(message)
    if shown.get("tool_calls"):
        shown["tool_calls"] = [_call_as_text(call) for call in shown["tool_calls"]]
    return shown


def _call_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": function}

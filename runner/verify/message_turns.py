"""Checks for a chat API as the engine: the turns are in the messages, and there are no ids."""

from __future__ import annotations

from runner.episode.parsed_turn import ParsedTurn
from runner.trajectory import Trajectory
from runner.verify.differences import Comparison, Difference, DifferenceFound, Kind

__all__ = ["first_message_mismatch"]


def first_message_mismatch(trajectory: Trajectory) -> Difference | None:
    """Return the first turn that is not in the messages, or that has ids although the engine has none; or None."""
    compare = Comparison(trajectory, repr)
    try:
        for number, segment in enumerate(trajectory.segments):
            compare.segment = number
            if len(segment.log):
                compare.differ(Kind.LAYOUT, "it has ids, and its server returns none", stored=str(len(segment.log)))
            said = iter(segment.messages[: len(segment.messages) - segment.unseen])
            for turn in trajectory.turns:
                if turn.segment != number:
                    continue
                compare.turn = turn.number
                reply = ParsedTurn(turn.text, turn.reasoning, turn.tool_calls).as_message()
                if not any(message == reply for message in said):  # each after the one before
                    compare.differ(Kind.MESSAGE, "what it says is in no message", stored="", derived=str(reply))
            compare.turn = None
    except DifferenceFound as found:
        return found.difference
    return None

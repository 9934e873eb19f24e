"""The rule that everything serves, as an assertion: prompts extend one another, and only sampled ids are trained on."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from runner.engines.base import Engine, FinishReason
from runner.messages import Message
from runner.tokens.log import Source
from runner.tokens.tokenizer import Tokenizer
from runner.trajectory import Segment, Trajectory, Turn

__all__ = ["assert_exact"]

_SHOWN: Final = 24
"""Ids on each side of a seam that a failure shows."""


def assert_exact(trajectory: Trajectory, engine: Engine | None = None) -> None:
    """Check that a trajectory is exactly what the model saw and sampled.

    Within a segment every prompt begins with the prompt before it and what was sampled on it, bit for bit; the loss
    mask covers the sampled ids and no other; log-probabilities stand where ids were sampled; every tool call that is
    followed by anything was answered once, in order.

    Args:
        trajectory: of any agent, with any outcome.
        engine: decodes: what was sampled must say what the turn says. A `ScriptedEngine(record=True)` also knows
            which ids were sent, and those are compared.

    Raises:
        AssertionError: names the episode and the turn, and shows both sides of the seam.
    """
    for number, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == number]
        _check_arrays(trajectory, segment)
        _check_extends(trajectory, segment, turns, engine)
        _check_mask(trajectory, segment, turns)
        _check_answers(trajectory, segment.messages)
        if engine is not None and turns:
            _check_text(trajectory, segment, turns, engine.tokenizer)
    if engine is not None:
        _check_sent(trajectory, engine)


def _check_arrays(trajectory: Trajectory, segment: Segment) -> None:
    log = segment.log
    lengths = len(log.ids), len(log.logprobs), len(log.sources)
    assert len(set(lengths)) == 1, f"{trajectory.id}: ids, log-probabilities and sources have lengths {lengths}"
    for source, logprob in zip(log.sources, log.logprobs, strict=True):
        given = not math.isnan(logprob)
        assert source == Source.SAMPLED or not given, f"{trajectory.id}: an id that nobody sampled has {logprob}"
        assert not given or logprob <= 0, f"{trajectory.id}: a log-probability of {logprob}"


def _check_extends(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn], engine: Engine | None) -> None:
    for turn in turns:
        assert turn.log is segment.log, f"{_name(trajectory, turn)}: its ids are in the log of another segment"
        assert 0 < turn.start <= turn.end <= len(segment.log), f"{_name(trajectory, turn)}: {turn.start}-{turn.end}"
    for before, turn in pairwise(turns):
        prompt, prefix = turn.prompt_ids, before.prompt_ids + before.token_ids
        assert prompt[: len(prefix)] == prefix, (
            f"{_name(trajectory, turn)}: its prompt does not extend the turn before\n{_seam(before, turn, engine)}"
        )
        bridged = segment.log.sources[before.end : turn.start]
        assert set(bridged) <= {Source.BRIDGE}, (
            f"{_name(trajectory, turn)}: what stands before it is no bridge\n{_seam(before, turn, engine)}"
        )


def _check_mask(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn]) -> None:
    sampled = array("b", bytes(len(segment.log)))
    for turn in turns:
        sampled[turn.start : turn.end] = array("b", b"\1" * (turn.end - turn.start))
    mask = segment.log.mask()
    wrong = [index for index, (one, other) in enumerate(zip(mask, sampled, strict=True)) if one != other]
    assert not wrong, f"{trajectory.id} {trajectory.agent}: the loss mask is wrong at {wrong[:8]}"
    spans = [(span.start, span.end) for span in segment.log.versions]
    known = [(turn.start, turn.end) for turn in turns]
    for start, end in spans:
        inside = any(first <= start <= end <= last for first, last in known)
        assert inside, f"{trajectory.id}: weight versions of {start}-{end}, which is in no turn"


def _check_answers(trajectory: Trajectory, messages: Sequence[Message]) -> None:
    """Every call that is followed by anything has one answer, and the answers come in the order of the calls."""
    for index, message in enumerate(messages):
        calls = [call["id"] for call in message.get("tool_calls", ())]
        answers = [answer.get("tool_call_id") for answer in _tool_messages(messages[index + 1 :])]
        if message["role"] == "assistant" and index + 1 < len(messages):
            assert answers == calls, f"{trajectory.id}: calls {calls} of message {index} were answered by {answers}"


def _tool_messages(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        if message["role"] != "tool":
            return
        yield message


def _check_text(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn], tokenizer: Tokenizer) -> None:
    begin = turns[0].start
    for before, turn in pairwise([None, *turns]):
        assert turn is not None
        if before is None or turn.start > before.end:  # else the turn goes on with the one before
            begin = turn.start
        ids = segment.log.ids[begin : turn.end]
        said = tokenizer.decode(ids)
        for part in (turn.text, turn.reasoning):
            assert part.strip() in said, f"{_name(trajectory, turn)}: {part!r} is not what was sampled: {said!r}"
        if turn.finish is FinishReason.STOP and isinstance(turn.stop, int):
            assert ids[-1] == turn.stop, (
                f"{_name(trajectory, turn)}: it stopped at {turn.stop}, its last id is {ids[-1]}"
            )
    spoken = [message for message in segment.messages if message["role"] == "assistant"]
    assert spoken, f"{trajectory.id}: turns and no assistant message"
    assert spoken[-1]["content"] == turns[-1].text, f"{trajectory.id}: the view's last words are not the last turn's"


def _check_sent(trajectory: Trajectory, engine: Engine) -> None:
    """What a recording engine was sent and gave, by the name of the request."""
    calls: Any = getattr(engine, "calls", ())
    by_name = {call.name: call for call in calls}  # of several attempts the last
    for turn in trajectory.turns:
        call = by_name.get(f"{trajectory.id}/{turn.agent}/{turn.number}")
        if call is None:
            continue
        name = _name(trajectory, turn)
        assert call.prompt == turn.prompt_ids, (
            f"{name}: the engine was sent another prompt\n{_sent(call, turn, engine)}"
        )
        sampled = array("i", call.sampled)
        assert sampled[: turn.end - turn.start] == turn.token_ids, f"{name}: the engine sampled {list(sampled)}"
        assert len(sampled) == turn.end - turn.start + turn.dropped, f"{name}: {len(sampled)} ids were sampled"


def _name(trajectory: Trajectory, turn: Turn) -> str:
    return f"{trajectory.id} {turn.agent} turn {turn.number}"


def _seam(before: Turn, turn: Turn, engine: Engine | None) -> str:
    log = turn.log
    pieces = {
        "sampled": before.token_ids[-_SHOWN:],
        "then": log.ids[before.end : before.end + _SHOWN],
        "prompt": log.ids[max(0, turn.start - _SHOWN) : turn.start],
    }
    return "\n".join(f"  {name}: {_shown(ids, engine)}" for name, ids in pieces.items())


def _sent(call: Any, turn: Turn, engine: Engine) -> str:
    sent, kept = call.prompt, turn.prompt_ids
    at = next((i for i, (one, other) in enumerate(zip(sent, kept, strict=False)) if one != other), -1)
    first = max(0, (at if at >= 0 else min(len(sent), len(kept))) - _SHOWN)
    return f"  sent: {_shown(sent[first:][: 2 * _SHOWN], engine)}\n  kept: {_shown(kept[first:][: 2 * _SHOWN], engine)}"


def _shown(ids: array[int], engine: Engine | None) -> str:
    return repr(engine.tokenizer.decode(ids)) if engine is not None else str(list(ids))

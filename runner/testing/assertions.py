"""The assertion `assert_exact`: prompts extend one another, and only sampled ids are trained on."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, Final

from runner.engines.base import Engine, FinishReason
from runner.episode.key import MAIN
from runner.episode.prompting import REENCODED
from runner.errors import BadOption
from runner.messages import Message
from runner.tokens.log import Source
from runner.tokens.token_diff import first_mismatch
from runner.tokens.tokenizer import Tokenizer
from runner.trajectory import AGAIN, BRANCH, RETRY, Segment, Trajectory, Turn
from runner.verify.records import LIMITS_OF

__all__ = ["assert_exact"]

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

_MAX_SHOWN_IDS: Final = 24
"""Maximum number of ids that the message of a failure shows on each side of the fault."""


def assert_exact(trajectory: Trajectory, engine: Engine | None = None) -> None:
    """Check that a trajectory contains exactly the ids that the model saw and sampled.

    - Within a segment, every prompt begins with the previous prompt and the ids sampled from it.
    - A segment that continues or repeats a turn of another segment begins with the same ids as that segment.
    - The loss mask covers exactly the sampled ids of turns that were not withdrawn. Only sampled ids have
      log-probabilities.
    - Every tool call before the last message has one answer, in order, except with external agents.
    - The messages contain the calls of the turns; outcome, limit, error and reward agree.

    Turns from chat APIs have no ids; only the last two rules apply to them.

    Args:
        trajectory: the trajectory of any agent, with any outcome.
        engine: the engine that sampled the turns. With it, the texts of turns are compared with their decoded ids;
            with a `ScriptedEngine(record=True)`, ids are also compared with the requests that it received.

    Raises:
        BadOption: `trajectory` is not a trajectory.
        AssertionError: a rule is broken. The message names the episode, and the turn if the fault is in one turn.
            It shows the ids around the fault, decoded if an engine is given.
    """
    if not isinstance(trajectory, Trajectory):
        raise BadOption(f"assert_exact({trajectory!r:.60}): give a trajectory, as play(...) returns it.")
    _check_begun(trajectory)
    for number, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == number]
        if turns and not any(turn.has_ids for turn in turns):  # turns of chat APIs have no ids
            _require(not len(segment.log), f"{trajectory.id}: ids in a segment whose turns have none")
            _check_answers(trajectory, segment.messages)
            _check_calls(trajectory, segment, turns)
            continue
        _check_arrays(trajectory, segment)
        _check_origin(trajectory, segment, turns, engine)
        _check_extends(trajectory, segment, turns, engine)
        _check_mask(trajectory, segment, turns, engine)
        _check_answers(trajectory, segment.messages)
        _check_calls(trajectory, segment, turns)
        if engine is not None and turns:
            _check_text(trajectory, segment, turns, engine.tokenizer)
    _check_turns(trajectory)
    _check_ending(trajectory)
    if engine is not None:
        _check_sent(trajectory, engine)


def _require(true: object, message: str) -> None:
    # This is not an `assert`: pytest would add to its message, and `python -O` would skip it.
    if not true:
        raise AssertionError(message)


def _check_begun(trajectory: Trajectory) -> None:
    again = trajectory.trained and trajectory.turns and trajectory.segments[0].cause == REENCODED
    _require(
        not again,
        f"{trajectory.id} {trajectory.agent}: its first prompt contains text that this episode sampled, encoded again, "
        f"which may have other ids. Open this conversation with train=False.",
    )


def _check_arrays(trajectory: Trajectory, segment: Segment) -> None:
    log = segment.log
    lengths = len(log.ids), len(log.logprobs), len(log.sources)
    _require(len(set(lengths)) == 1, f"{trajectory.id}: ids, log-probabilities and sources have lengths {lengths}")
    for source, logprob in zip(log.sources, log.logprobs, strict=True):
        given = not math.isnan(logprob)
        said = source in (Source.SAMPLED, Source.RETRIED)
        _require(said or not given, f"{trajectory.id}: an id that was not sampled has log-probability {logprob}")
        _require(not given or logprob <= 0, f"{trajectory.id}: log-probability {logprob} is above 0")
    for turn in (turn for turn in trajectory.turns if turn.log is log):
        top, length = turn.top, turn.end - turn.start
        fits = top is None or len(top) == length
        _require(fits, f"{_name(trajectory, turn)}: {length} ids, but top log-probabilities of {len(top or ())}")


def _check_origin(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn], engine: Engine | None) -> None:
    """Raise AssertionError if a segment that continues or repeats a turn does not begin with the same ids."""
    name = f"{trajectory.id} {trajectory.agent} segment {trajectory.segments.index(segment)} ({segment.cause})"
    origin, shares = segment.origin, segment.cause in (AGAIN, BRANCH, RETRY)
    if not turns or not shares:
        has_origin = origin is not None and segment.cause in ("start", REENCODED)
        _require(
            not has_origin and not segment.shared,
            f"{name}: the segment follows {origin}, but its prompt was encoded again",
        )
        return
    _require(origin is not None, f"{name}: it continues no turn")
    turn = origin.turn if origin is not None else None
    if turn is None:  # the turn belongs to another agent, whose trajectory is not available here
        return
    end = turn.end if segment.cause == BRANCH else turn.start
    ids, kept = segment.log.ids[:end], turn.log.ids[:end]
    if ids != kept or segment.shared != end:
        first = max(0, first_mismatch(ids, kept) - _MAX_SHOWN_IDS)
        raise AssertionError(
            f"{name}: it was encoded again, and does not have the ids of {origin}\n"
            f"  there: {_shown(ids[first:][: 2 * _MAX_SHOWN_IDS], engine)}\n"
            f"  kept: {_shown(kept[first:][: 2 * _MAX_SHOWN_IDS], engine)}"
        )


def _check_extends(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn], engine: Engine | None) -> None:
    for turn in turns:
        name = _name(trajectory, turn)
        _require(turn.log is segment.log, f"{name}: its ids are in the log of another segment")
        length = len(segment.log)
        fits = 0 < turn.start <= turn.end <= length
        _require(fits, f"{name}: {turn.start}-{turn.end} is not a range of ids after a prompt in {length} ids")
    for before, turn in pairwise(turns):
        prompt, prefix = turn.prompt_ids, before.prompt_ids + before.token_ids
        if prompt[: len(prefix)] != prefix:
            text = "its prompt does not extend the turn before"
            raise AssertionError(f"{_name(trajectory, turn)}: {text}\n{_seam(before, turn, engine)}")
        if not set(segment.log.sources[before.end : turn.start]) <= {Source.BRIDGE}:
            text = "the ids before it are not a bridge"
            raise AssertionError(f"{_name(trajectory, turn)}: {text}\n{_seam(before, turn, engine)}")


def _check_mask(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn], engine: Engine | None) -> None:
    sampled = array("b", bytes(len(segment.log)))
    for turn in (turn for turn in turns if not turn.retried):
        sampled[turn.start : turn.end] = array("b", b"\1" * (turn.end - turn.start))
    mask = segment.log.mask()
    wrong = [index for index, (one, other) in enumerate(zip(mask, sampled, strict=True)) if one != other]
    if wrong:
        ids, at = segment.log.ids, wrong[0]
        before = _shown(ids[max(0, at - _MAX_SHOWN_IDS) : at], engine)
        raise AssertionError(
            f"{trajectory.id} {trajectory.agent}: the loss mask must be True for exactly the sampled ids, but differs "
            f"at {wrong[:8]}\n  ids before: {before}\n  ids from there: {_shown(ids[at : at + _MAX_SHOWN_IDS], engine)}"
        )
    for span in segment.log.versions:
        inside = any(turn.start <= span.start <= span.end <= turn.end for turn in turns)
        _require(inside, f"{trajectory.id}: weight versions of {span.start}-{span.end}, which is in no turn")


def _check_answers(trajectory: Trajectory, messages: Sequence[Message]) -> None:
    """Raise AssertionError unless every call before the last message has one answer, in the order of the calls."""
    if trajectory.requests:
        return  # external agents may answer in any way
    for index, message in enumerate(messages):
        calls = [call["id"] for call in message.get("tool_calls", ())]
        following = takewhile(lambda answer: answer["role"] == "tool", messages[index + 1 :])
        answers = [answer.get("tool_call_id") for answer in following]
        if message["role"] == "assistant" and index + 1 < len(messages):
            text = f"{trajectory.id}: calls {calls} of message {index} were answered by {answers}"
            _require(answers == calls, text)


def _check_calls(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn]) -> None:
    """Raise AssertionError unless the last calls of the messages are the valid calls of the turns.

    The messages may have earlier calls, such as calls in a prompt.
    """
    made = [call.as_message() for turn in turns for call in turn.tool_calls if call.error is None]
    written = [call for message in segment.messages for call in message.get("tool_calls", ())]
    if made and written[-len(made) :] != made:
        raise AssertionError(f"{trajectory.id}: the turns called {made}, but the messages contain {written}")


def _check_text(trajectory: Trajectory, segment: Segment, turns: Sequence[Turn], tokenizer: Tokenizer) -> None:
    begin = turns[0].start
    for before, turn in pairwise([None, *turns]):
        assert turn is not None
        if before is None or turn.start > before.end:  # a turn that starts where the previous one ended continues it
            begin = turn.start
        ids = segment.log.ids[begin : turn.end]
        said = tokenizer.decode(ids)
        name = _name(trajectory, turn)
        for part in (turn.text, turn.reasoning):
            _require(_said(part.strip(), said), f"{name}: {part!r} is not what was sampled: {said!r}")
        if turn.finish is FinishReason.STOP and isinstance(turn.stop, int):
            _require(ids[-1] == turn.stop, f"{name}: it stopped at {turn.stop}, but its last id is {ids[-1]}")
    spoken = [message for message in segment.messages if message["role"] == "assistant"]
    _require(spoken, f"{trajectory.id}: turns, but no assistant message")
    last = turns[-1].text
    _require(spoken[-1]["content"] == last, f"{trajectory.id}: the last message is not the last turn's text, {last!r}")


def _said(part: str, said: str) -> bool:
    """Return True if the sampled text `said` contains `part`, or all lines of `part` in their order."""
    if part in said:
        return True
    at = 0
    for line in part.split("\n"):
        at = said.find(line, at)
        if at < 0:
            return False
        at += len(line)
    return True


def _check_turns(trajectory: Trajectory) -> None:
    numbers = [turn.number for turn in trajectory.turns]
    ascending = numbers == sorted(set(numbers)) if trajectory.branched else numbers == list(range(len(numbers)))
    _require(ascending, f"{trajectory.id}: its turns are numbered {numbers}")
    segments = [turn.segment for turn in trajectory.turns]
    begun = list(dict.fromkeys(segments))
    _require(begun == sorted(begun), f"{trajectory.id}: its turns are in segments {segments}, out of order")
    known = range(len(trajectory.segments))
    text = f"{trajectory.id}: its turns are in segments {segments}, but it has {len(known)}"
    _require(set(segments) <= set(known), text)


def _check_ending(trajectory: Trajectory) -> None:
    """Raise AssertionError if outcome, limit, error and reward do not agree."""
    name, outcome = f"{trajectory.id} {trajectory.agent}", trajectory.outcome
    limits = LIMITS_OF.get(outcome)
    if limits is not None and trajectory.limit not in limits:
        raise AssertionError(f"{name}: outcome {outcome.value}, but its limit is {trajectory.limit!r}")
    _require(trajectory.error or not outcome.failed, f"{name}: outcome {outcome.value} without an error text")
    reward = trajectory.reward
    evaluated = trajectory.agent == MAIN and not any(turn.has_ids for turn in trajectory.turns)
    scored = trajectory.trained or evaluated
    if reward is not None and not (outcome.scored and trajectory.turns and scored):
        what = f"{outcome.value}, {len(trajectory.turns)} turns, {'' if trajectory.trained else 'not '}trained"
        raise AssertionError(f"{name}: a reward of {reward}, but {what}")
    credits = [reward or 0.0, *(turn.reward for turn in trajectory.turns)]
    _require(all(map(math.isfinite, credits)), f"{name}: a reward that is not a finite number, among {credits}")


def _check_sent(trajectory: Trajectory, engine: Engine) -> None:
    """Raise AssertionError if a turn differs from its request, as an engine with `record=True` received it."""
    calls: Any = getattr(engine, "calls", ())
    by_name = {call.name: call for call in calls}  # a later attempt replaces an earlier one's calls
    for turn in trajectory.turns:
        call = by_name.get(f"{trajectory.id}/{trajectory.thread or turn.agent}/{turn.number}")
        if call is None:
            continue
        name = _name(trajectory, turn)
        if call.prompt != turn.prompt_ids:
            raise AssertionError(f"{name}: the engine received another prompt\n{_sent(call, turn, engine)}")
        sampled = array("i", call.sampled)
        _require(sampled[: turn.end - turn.start] == turn.token_ids, f"{name}: the engine sampled {list(sampled)}")
        _check_logprobs(name, call.logprobs, turn)
        _require(len(sampled) == turn.end - turn.start + turn.dropped, f"{name}: {len(sampled)} ids were sampled")


def _check_logprobs(name: str, given: Sequence[float] | None, turn: Turn) -> None:
    kept = turn.logprobs
    sent = array("f", [math.nan] * len(kept) if given is None else given[: len(kept)])
    for at, (one, other) in enumerate(zip(sent, kept, strict=False)):
        if one != other and not (math.isnan(one) and math.isnan(other)):
            raise AssertionError(
                f"{name}: the log-probability of its id {at} is {other:g}, but the engine returned {one:g}"
            )


def _name(trajectory: Trajectory, turn: Turn) -> str:
    return f"{trajectory.id} {turn.agent} turn {turn.number}"


def _seam(before: Turn, turn: Turn, engine: Engine | None) -> str:
    log = turn.log
    pieces = {
        "sampled": before.token_ids[-_MAX_SHOWN_IDS:],
        "then": log.ids[before.end : before.end + _MAX_SHOWN_IDS],
        "prompt": log.ids[max(0, turn.start - _MAX_SHOWN_IDS) : turn.start],
    }
    return "\n".join(f"  {name}: {_shown(ids, engine)}" for name, ids in pieces.items())


def _sent(call: Any, turn: Turn, engine: Engine) -> str:
    sent, kept = call.prompt, turn.prompt_ids
    first = max(0, first_mismatch(sent, kept) - _MAX_SHOWN_IDS)
    end = first + 2 * _MAX_SHOWN_IDS
    return f"  sent: {_shown(sent[first:end], engine)}\n  kept: {_shown(kept[first:end], engine)}"


def _shown(ids: array[int], engine: Engine | None) -> str:
    return repr(engine.tokenizer.decode(ids)) if engine is not None else str(list(ids))

"""Episodes as traces of verifiers, version 1: a node for each message, with the ids that it adds to its path.

Checked with verifiers 0.4.0, which is not imported.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from runner.engines.base import FinishReason
from runner.errors import BadBatch
from runner.messages import Message
from runner.trainers.turn_messages import reply_of, reply_places
from runner.training.selection import NO_LOGPROBS, lacks_logprobs
from runner.trajectory import Outcome, Segment, Trajectory, Turn

__all__ = ["VERIFIERS", "episode_head", "trace_delta", "trace_summary"]

VERIFIERS: Final = "0.4.0"
"""The version of verifiers whose schema is written."""

_FINISH: Final[Mapping[FinishReason, str]] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def trace_delta(trajectory: Trajectory, *, task: Mapping[str, Any], weights: Mapping[str, float]) -> dict[str, Any]:
    """Return a trajectory as one delta in the stream of an episode. The delta opens the trace and contains all of it.

    If a sampled id has no finite log-probability, no id is trained. The trace of a scored episode then has an error
    "no_logprobs".

    Args:
        trajectory: the trajectory.
        task: the data of the task, as the client sent it.
        weights: the weight of each reward.

    Raises:
        BadBatch: a turn has no ids.
    """
    trace_id = uuid.uuid4().hex  # an episode's id is unique only within its player
    nodes, calls = _nodes(trajectory)
    outcome = trajectory.outcome
    return {
        "trace": trace_id,
        "open": {"version": 1, "id": trace_id, "verifiers": {"version": VERIFIERS}, "task": _task(task)},
        "nodes": nodes,
        "calls": calls,
        "errors": _errors(trajectory),
        "set": {
            "agent": {"config": {}, "name": trajectory.agent, "trainable": trajectory.trained},
            "rewards": {
                name: None if score is None else {"score": float(score), "weight": weights.get(name, 1.0)}
                for name, score in trajectory.rewards.items()
            },
            "metrics": {name: float(value) for name, value in trajectory.metrics.items() if value is not None},
            "info": _info(trajectory),
            "is_completed": True,
            "ok": not _errors(trajectory),
            "stop_condition": trajectory.reason or trajectory.limit or outcome.value,
            "is_timeout": outcome is Outcome.TIME_LIMIT,
        },
    }


def trace_summary(delta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the id and the sizes of a trace; the client compares them with the received trace."""
    return {"id": delta["trace"], "nodes": len(delta["nodes"]), "calls": len(delta["calls"])}


def episode_head(
    trajectories: Sequence[Trajectory], *, task: Mapping[str, Any], environment: str, number: str
) -> dict[str, Any]:
    """Return the fields of an episode other than its traces.

    Args:
        trajectories: the trajectories of its agents.
        task: the data of the task, as the client sent it.
        environment: the name of the environment.
        number: the id of the episode.
    """
    return {
        "id": number,
        "env": {"id": environment},
        "task": _task(task),
        "ok": not any(map(_errors, trajectories)),
        "is_timeout": any(each.outcome is Outcome.TIME_LIMIT for each in trajectories),
        "errors": next(filter(None, map(_errors, trajectories)), []),
    }


def _task(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Task", "data": dict(data)}


def _errors(trajectory: Trajectory) -> list[dict[str, Any]]:
    if trajectory.outcome.scored:
        cause = "the engine gave no finite log-probability for an id that it sampled"
        return [{"type": NO_LOGPROBS, "message": cause}] if lacks_logprobs(trajectory) else []
    return [{"type": trajectory.outcome.value, "message": trajectory.error or trajectory.outcome.value}]


def _info(trajectory: Trajectory) -> dict[str, Any]:
    """Return the values for which the schema of verifiers has no field."""
    turns = trajectory.turns
    kinds = {turn.number: turn.constraint.kind.value for turn in turns if turn.constraint is not None}
    return {
        "episode": trajectory.id,
        "outcome": trajectory.outcome.value,
        "limit": trajectory.limit,
        "causes": [segment.cause for segment in trajectory.segments],
        "versions": list(dict.fromkeys(span.version for each in trajectory.segments for span in each.log.versions)),
        "constraints": {str(number): kind for number, kind in kinds.items()},
    }


def _nodes(trajectory: Trajectory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the nodes and the calls of all segments. The nodes of a segment are a path with its own root.

    Raises:
        BadBatch: a turn has no token ids.
    """
    nodes: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    trained = not lacks_logprobs(trajectory)
    for number, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == number and turn.tokens]
        if any(not turn.has_ids for turn in turns):
            raise BadBatch(
                f"{trajectory.id}: its turns were sampled by a message engine and have no token ids. Play the episode "
                "on an engine of token ids."
            )
        _add_path(nodes, calls, segment, turns, trained=trained)
    return nodes, calls


def _add_path(
    nodes: list[dict[str, Any]],
    calls: list[dict[str, Any]],
    segment: Segment,
    turns: Sequence[Turn],
    *,
    trained: bool,
) -> None:
    mask, ids = segment.log.mask(), segment.log.ids
    parent: int | None = None
    done, end = 0, 0  # numbers of messages and ids that already have a node

    def add(message: dict[str, Any], own: Sequence[int], trains: Sequence[bool], logprobs: Sequence[float]) -> None:
        nonlocal parent
        root = {"tools": [_tool(tool) for tool in segment.tools]} if parent is None and segment.tools else {}
        node = {"parent": parent, "message": message, "sampled": bool(logprobs), "token_ids": [*own]}
        nodes.append({**node, "mask": [*trains], "logprobs": [*logprobs], **root})
        parent = len(nodes) - 1

    for turn, place in zip(turns, reply_places(segment, turns), strict=True):
        before = segment.messages[done:place]
        scaffold = ids[end : turn.start].tolist()
        for position, message in enumerate(before):  # the prompt's ids belong to its last message
            own = scaffold if position == len(before) - 1 else []
            add(_message(message), own, [False] * len(own), [])
        lead = [] if before else scaffold
        trains = [trained and not turn.left_out and bool(each) for each in mask[turn.start : turn.end]]
        sampled = turn.token_ids.tolist()
        logprobs = turn.logprobs.tolist()
        add(_message(reply_of(turn)), [*lead, *sampled], [*([False] * len(lead)), *trains], logprobs)
        nodes[-1]["logprobs"] = [value for value, kept in zip(logprobs, trains, strict=True) if kept]
        calls.append(_call(len(nodes) - 1, turn))
        done, end = place + 1, turn.end


def _call(node: int, turn: Turn) -> dict[str, Any]:
    finish = "tool_calls" if turn.tool_calls and turn.finish is FinishReason.STOP else _FINISH.get(turn.finish)
    usage = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.tokens}
    return {"node": node, "finish_reason": finish, "usage": usage}


def _message(message: Message) -> dict[str, Any]:
    role = message["role"]
    shown: dict[str, Any] = {"role": role, "content": message["content"]}
    if role == "tool":
        shown |= {"tool_call_id": message.get("tool_call_id") or "", "name": message.get("name")}
    if role == "assistant":
        shown["reasoning_content"] = message.get("reasoning_content")
        shown["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            }
            for call in message.get("tool_calls") or ()
        ] or None
    return shown


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", **tool["function"]}

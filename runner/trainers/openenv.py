"""OpenEnv: trajectories as its `TrainingTrace`, schema version 1, and such traces read back.

Checked with openenv 0.10.0, which is not imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runner.episode.parsed_turn import ParsedTurn
from runner.errors import BadBatch
from runner.messages import Message
from runner.training.selection import absence, name_of
from runner.trajectory import Trajectory, Turn

__all__ = ["TracedCall", "read_training_trace", "training_trace"]

SCHEMA_VERSION: Final = 1
"""The version of OpenEnv's schema that is written and read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One engine call of a trace."""

    node_id: str
    """Its id, unique in the trace."""
    prompt_ids: tuple[int, ...]
    """Ids of the prompt."""
    token_ids: tuple[int, ...]
    """Sampled ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id in nats."""
    mask: tuple[bool, ...]
    """True if the sampled id is trained."""
    metadata: Mapping[str, Any]
    """Further fields of the producer."""


def training_trace(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as the fields of OpenEnv's `TrainingTrace`; each turn is one of its turns.

    Turns that were retried or left out, and all turns of a failed episode, have mask 0. Weight versions, temperature,
    constraint and segment are in `metadata`. The reward is not part of a trace.

    Raises:
        BadBatch: a turn has no ids, or an id has no log-probability.
    """
    failed = absence(trajectory)
    return {
        "schema_version": SCHEMA_VERSION,
        "turns": [_turn(trajectory, turn, trains=not failed) for turn in trajectory.turns if turn.tokens],
    }


def read_training_trace(text: str | bytes | Mapping[str, Any], *, vocabulary: int | None = None) -> list[TracedCall]:
    """Read a `TrainingTrace`: its JSON, or its fields.

    Args:
        text: the trace.
        vocabulary: the number of ids of the model; every id is compared with it.

    Raises:
        BadBatch: the trace has another schema version, or a turn is malformed: it lacks a field, its arrays have
            different lengths, an id is not in the vocabulary, a log-probability is not finite or above 0, the mask
            trains on the prompt, or an id of a turn occurs twice. The message names the turn and the field.
    """
    try:
        trace = text if isinstance(text, Mapping) else json.loads(text)
    except ValueError as error:
        raise BadBatch(f"the trace is not JSON: {error}.") from None
    if not isinstance(trace, Mapping) or not isinstance(trace.get("turns"), Sequence):
        raise BadBatch("the trace has no list of turns: give the JSON object of a TrainingTrace.")
    version = trace.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise BadBatch(f"the trace has schema_version {version!r:.30}, and only version {SCHEMA_VERSION} can be read.")
    calls: list[TracedCall] = []
    seen: set[str] = set()
    for number, turn in enumerate(trace["turns"]):
        call = _call(number, turn, vocabulary)
        if call.node_id in seen:
            raise BadBatch(f"turn {number}: the node_id {call.node_id!r:.60} occurs twice.")
        seen.add(call.node_id)
        calls.append(call)
    return calls


def _turn(trajectory: Trajectory, turn: Turn, *, trains: bool) -> dict[str, Any]:
    name = f"{trajectory.id}/{turn.agent}/{turn.number}"
    if not turn.has_ids:
        raise BadBatch(f"turn {name} was sampled by a message engine: it has no token ids.")
    logprobs = turn.logprobs.tolist()
    if any(math.isnan(value) for value in logprobs):
        raise BadBatch(f"turn {name} of {name_of(trajectory)} has no log-probabilities, which a trace needs.")
    trained = int(trains and not turn.retried and not turn.left_out)
    kept = turn.log.mask()[turn.start : turn.end]
    reply = ParsedTurn(turn.text, turn.reasoning, turn.tool_calls).as_message()
    return {
        "node_id": name,
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "completion_token_ids": turn.token_ids.tolist(),
        "per_token_logps": logprobs,
        "loss_mask": [0] * turn.start + [int(bool(each)) * trained for each in kept],
        "request": {"messages": [_in_openai_shape(each) for each in _messages_before(trajectory, turn, reply)]},
        "response": {"choices": [{"message": _in_openai_shape(reply), "finish_reason": turn.finish.value}]},
        "metadata": {
            "segment": turn.segment,
            "versions": _versions(turn),
            "temperature": None if turn.sampling is None else turn.sampling.temperature,
            "constraint": None if turn.constraint is None else turn.constraint.kind.value,
        },
    }


def _messages_before(trajectory: Trajectory, turn: Turn, reply: Message) -> list[Message]:
    """The messages of the prompt: those of the segment before the turn's reply, found in the order of its turns."""
    messages = trajectory.segments[turn.segment].messages
    start = 0
    for each in trajectory.turns:
        if each.segment == turn.segment:
            said = ParsedTurn(each.text, each.reasoning, each.tool_calls).as_message()
            place = next((n for n in range(start, len(messages)) if messages[n] == said), None)
            if each is turn:
                return list(messages[: len(messages) if place is None else place])
            start = start if place is None else place + 1
    return list(messages)


def _in_openai_shape(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = dict(message)
    if shown.get("tool_calls"):
        shown["tool_calls"] = [_call_as_text(call) for call in shown["tool_calls"]]
    return shown


def _call_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": function}


def _versions(turn: Turn) -> list[str]:
    spans = (span for span in turn.log.versions if span.start < turn.end and span.end > turn.start)
    return list(dict.fromkeys(span.version for span in spans))


def _call(number: int, turn: Any, vocabulary: int | None) -> TracedCall:
    if not isinstance(turn, Mapping):
        raise BadBatch(f"turn {number} is {turn!r:.40}: give an object.")
    prompt, sampled = (_ids(number, turn, name, vocabulary) for name in ("prompt_token_ids", "completion_token_ids"))
    logprobs, mask = (_list(number, turn, name) for name in ("per_token_logps", "loss_mask"))
    node_id = turn.get("node_id")
    if not isinstance(node_id, str) or not node_id:
        raise BadBatch(f"turn {number}: node_id is {node_id!r:.40}: give a text that is unique in the trace.")
    if len(logprobs) != len(sampled):
        raise BadBatch(f"turn {number}: per_token_logps has {len(logprobs)} values for {len(sampled)} sampled ids.")
    bad = next((value for value in logprobs if not _is_logprob(value)), None)
    if bad is not None:
        raise BadBatch(f"turn {number}: per_token_logps has {bad!r:.30}: a log-probability is finite and at most 0.")
    if len(mask) != len(prompt) + len(sampled):
        raise BadBatch(
            f"turn {number}: loss_mask has {len(mask)} values for {len(prompt)} + {len(sampled)} ids of prompt and "
            "completion."
        )
    if any(type(value) is not int or value not in (0, 1) for value in mask) or any(mask[: len(prompt)]):
        raise BadBatch(f"turn {number}: loss_mask holds 0 and 1, and 0 for every id of the prompt.")
    return TracedCall(
        node_id=node_id,
        prompt_ids=tuple(prompt),
        token_ids=tuple(sampled),
        logprobs=tuple(map(float, logprobs)),
        mask=tuple(map(bool, mask[len(prompt) :])),
        metadata=dict(turn.get("metadata") or {}),
    )


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= 0


def _list(number: int, turn: Mapping[str, Any], name: str) -> list[Any]:
    value = turn.get(name)
    if not isinstance(value, list):
        raise BadBatch(f"turn {number}: {name} is {value!r:.40}: give a list.")
    return value


def _ids(number: int, turn: Mapping[str, Any], name: str, vocabulary: int | None) -> list[int]:
    ids = _list(number, turn, name)
    for place, value in enumerate(ids):
        if type(value) is not int or value < 0 or (vocabulary is not None and value >= vocabulary):
            limit = "" if vocabulary is None else f" below {vocabulary}"
            raise BadBatch(
                f"turn {number}: {name}[{place}] is {value!r:.30}: an id is a whole number from 0 on{limit}."
            )
    return ids

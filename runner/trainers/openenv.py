"""Trajectories as traces of OpenEnv (`TrainingTrace`, schema version 1), and a reader of such traces.

Checked with openenv 0.10.0, which is not imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from runner.errors import BadBatch
from runner.store.export import whole_or_nothing
from runner.store.header import Header
from runner.store.json_values import encode_standard_json
from runner.store.reader import RunFile
from runner.store.trajectory_filter import ALL, TrajectoryFilter
from runner.trainers.traced_call import TracedCall, ids_of, logprobs_of, mask_of
from runner.trainers.turn_messages import arguments_as_text, reply_of, reply_places
from runner.training.selection import absence, name_of
from runner.trajectory import Trajectory, Turn

__all__ = ["export_openenv", "read_training_trace", "training_trace"]

SCHEMA_VERSION: Final = 1
"""The version of OpenEnv's schema that is written and read."""


def training_trace(trajectory: Trajectory, *, header: Header | None = None) -> dict[str, Any]:
    """Return a trajectory as the fields of OpenEnv's `TrainingTrace`, with one turn for each turn that sampled tokens.

    The mask is 0 for turns that were retried or left out, and for all turns of a trajectory that is not trained, for
    example because its episode failed. Weight versions, temperature, constraint and segment are in each turn's
    `metadata`. The reward is not part of a trace.

    Args:
        trajectory: the trajectory.
        header: the header of the trajectory's run file. With it, the trace also has the template's variables and time.

    Raises:
        BadBatch: a turn has no ids, or an id has no finite log-probability.
    """
    failed = absence(trajectory)
    turns = [_turn(trajectory, turn, trains=not failed) for turn in trajectory.turns if turn.tokens]
    if header is not None:
        for each in turns:
            each["metadata"]["clock"] = header.clock.isoformat()
            each["request"]["chat_template_kwargs"] = dict(header.template_options)
    return {"schema_version": SCHEMA_VERSION, "turns": turns}


def export_openenv(run_file: RunFile, target: str | Path | IO[bytes], *, chosen: TrajectoryFilter = ALL) -> int:
    """Write each trained trajectory as a line of JSON: its id, agent, outcome, reward and `TrainingTrace`.

    Args:
        run_file: the run file to export.
        target: a path, where the file appears once it is complete, or a binary stream.
        chosen: the filter of the trajectories.

    Returns:
        The number of written trajectories.

    Raises:
        BadBatch: a turn has no ids, or an id has no finite log-probability.
        StorageFailed: the target cannot be written.
    """
    if isinstance(target, str | Path):
        with whole_or_nothing(Path(target)) as file:
            return export_openenv(run_file, file, chosen=chosen)
    count = 0
    for trajectory in run_file.trajectories(chosen):
        line = {
            "id": trajectory.id,
            "agent": trajectory.agent,
            "outcome": trajectory.outcome.value,
            "reward": trajectory.reward,
            "trace": training_trace(trajectory, header=run_file.header),
        }
        target.write(encode_standard_json(line) + b"\n")
        count += 1
    return count


def read_training_trace(text: str | bytes | Mapping[str, Any], *, vocabulary: int | None = None) -> list[TracedCall]:
    """Return the calls of a `TrainingTrace`.

    Args:
        text: the trace, as JSON or as a mapping of its fields.
        vocabulary: the number of ids of the model; an id at or above it is an error. None for no maximum.

    Raises:
        BadBatch: the trace is not JSON or has another schema version, or a turn is malformed: a field is missing,
            arrays have different lengths, an id is not in the vocabulary, a log-probability is not finite or is above
            0, the mask trains on the prompt, or two turns have the same id. The message names the turn and the field.
    """
    try:
        trace = text if isinstance(text, Mapping) else json.loads(text)
    except ValueError as error:
        raise BadBatch(f"the trace is not JSON ({error}): give the JSON object of a TrainingTrace.") from None
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
            raise BadBatch(f"turn {number}: the node_id {call.node_id!r:.60} occurs twice: give each turn its own.")
        seen.add(call.node_id)
        calls.append(call)
    return calls


def _turn(trajectory: Trajectory, turn: Turn, *, trains: bool) -> dict[str, Any]:
    name = f"{trajectory.id}/{turn.agent}/{turn.number}"
    if not turn.has_ids:
        raise BadBatch(
            f"turn {name} was sampled by a message engine, which returns no token ids: use an engine of token ids."
        )
    logprobs = turn.logprobs.tolist()
    if not all(map(math.isfinite, logprobs)):
        raise BadBatch(f"turn {name} of {name_of(trajectory)} has no finite log-probabilities: leave the episode out.")
    trained = int(trains and not turn.retried and not turn.left_out)
    kept = turn.log.mask()[turn.start : turn.end]
    return {
        "node_id": name,
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "completion_token_ids": turn.token_ids.tolist(),
        "per_token_logps": logprobs,
        "loss_mask": [0] * turn.start + [int(bool(each)) * trained for each in kept],
        "request": _request(trajectory, turn),
        "response": {"choices": [{"message": arguments_as_text(reply_of(turn)), "finish_reason": turn.finish.value}]},
        "metadata": {
            "segment": turn.segment,
            "versions": _versions(turn),
            "temperature": None if turn.sampling is None else turn.sampling.temperature,
            "constraint": None if turn.constraint is None else turn.constraint.kind.value,
        },
    }


def _request(trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    segment = trajectory.segments[turn.segment]
    turns = [each for each in trajectory.turns if each.segment == turn.segment]
    place = reply_places(segment, turns)[turns.index(turn)]
    messages = [arguments_as_text(each) for each in segment.messages[:place]]
    ignores_stops = turn.sampling is not None and turn.sampling.ignore_eos
    return {
        "messages": messages,
        **({"tools": [*segment.tools]} if segment.tools else {}),
        **({"ignore_eos": True} if ignores_stops else {}),
    }


def _versions(turn: Turn) -> list[str]:
    spans = (span for span in turn.log.versions if span.start < turn.end and span.end > turn.start)
    return list(dict.fromkeys(span.version for span in spans))


def _call(number: int, turn: Any, vocabulary: int | None) -> TracedCall:
    where = f"turn {number}"
    if not isinstance(turn, Mapping):
        raise BadBatch(f"{where} is {turn!r:.40}: give an object.")
    prompt, sampled = (ids_of(where, turn, name, vocabulary) for name in ("prompt_token_ids", "completion_token_ids"))
    node_id = turn.get("node_id")
    if not isinstance(node_id, str) or not node_id:
        raise BadBatch(f"{where}: node_id is {node_id!r:.40}: give a string that is unique in the trace.")
    logprobs = logprobs_of(where, turn, "per_token_logps", len(sampled))
    both = f"{len(prompt)} + {len(sampled)} ids of prompt and completion"
    mask = mask_of(where, turn, "loss_mask", len(prompt) + len(sampled), both)
    if any(mask[: len(prompt)]):
        raise BadBatch(f"{where}: loss_mask has 1 for an id of the prompt: give 0 for these ids.")
    request, response, metadata = (_object(where, turn, name) for name in ("request", "response", "metadata"))
    return TracedCall(
        node_id=node_id,
        prompt_ids=tuple(prompt),
        token_ids=tuple(sampled),
        logprobs=tuple(logprobs),
        mask=tuple(mask[len(prompt) :]),
        metadata=metadata,
        messages=tuple(request.get("messages") or ()),
        reply=_reply(response),
        tools=tuple(request.get("tools") or ()),
        template_options=dict(request.get("chat_template_kwargs") or {}),
        ignores_stops=request.get("ignore_eos") is True,
    )


def _object(where: str, turn: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = turn.get(name) or {}
    if not isinstance(value, Mapping):
        raise BadBatch(f"{where}: {name} is {value!r:.40}: give an object.")
    return dict(value)


def _reply(response: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    return message if isinstance(message, Mapping) else None

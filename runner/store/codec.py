"""Lossless conversion of trajectories to row values and back."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from pathlib import Path
from typing import Any

from runner.attachments import Attachment
from runner.chat_requests import ChatRequest
from runner.engines.message_engine import Usage
from runner.errors import RunFileError
from runner.options import Constraint, ConstraintKind, Sampling
from runner.store.columns import Row, decode_text, encode_text, read_fields, row_maker
from runner.store.json_values import decode_json
from runner.store.packing import sources_of, unpack, unpacked_logprobs
from runner.store.schema import ATTACHMENT, JUNCTION, REQUEST, SEGMENT, TIMINGS, TRAJECTORY, TURN, USAGE
from runner.store.stored_tasks import TaskDecoder
from runner.store.stored_turn_data import StoredSideData, StoredTopLogprobs
from runner.tasks import Task
from runner.tokens.junction import Junction
from runner.tokens.log import TokenLog, VersionSpan
from runner.trajectory import Origin, Segment, Timings, Trajectory, Turn

__all__ = [
    "attachment_values",
    "episode_row",
    "load_trajectory",
    "origin_values",
    "request_values",
    "segment_values",
    "trajectory_values",
    "turn_values",
]

# --- writing

# These functions return the column values of an object, in column order.
trajectory_values = row_maker(TRAJECTORY)
segment_values = row_maker(SEGMENT)
request_values = row_maker(REQUEST)
attachment_values = row_maker(ATTACHMENT)
_turn_values = row_maker(TURN)
_timings_values = row_maker(TIMINGS)
_junction_values = row_maker(JUNCTION)
_usage_values = row_maker(USAGE)
_NO_JUNCTION = [None] * len(JUNCTION)
_NO_USAGE = [None] * len(USAGE)


def origin_values(segment: Segment) -> tuple[str | bytes | None, int | None]:
    """The agent and the number of the turn that a segment follows; (None, None) if it follows no turn."""
    origin = segment.origin
    return (None, None) if origin is None else (encode_text(origin.agent), origin.number)


def turn_values(turn: Turn) -> list[Any]:
    """The values of the columns `TURN`, `TIMINGS`, `JUNCTION` and `USAGE`, in order."""
    junction = _NO_JUNCTION if turn.junction is None else _junction_values(turn.junction)
    usage = _NO_USAGE if turn.usage is None else _usage_values(turn.usage)
    return [*_turn_values(turn), *_timings_values(turn.timings), *junction, *usage]


def episode_row(trajectory: Trajectory) -> dict[str, Any]:
    """The values of the columns `TRAJECTORY` by name."""
    return dict(zip((column.name for column in TRAJECTORY), trajectory_values(trajectory), strict=True))


# --- reading

_TURNS = """
    SELECT turns.*, constraints.kind, constraints.value, samplings.sampling
    FROM turns LEFT JOIN constraints ON constraints.key = turns.constrained
    LEFT JOIN samplings ON samplings.key = turns.sampled
    WHERE turns.episode = ? ORDER BY turns.position
"""
_SEGMENTS = """
    SELECT segments.*, tools.tools AS schemas
    FROM segments LEFT JOIN tools ON tools.key = segments.tools
    WHERE segments.episode = ? ORDER BY segments.number
"""
_WITH_SIDE_DATA = """
    SELECT DISTINCT turns.segment FROM side_data JOIN turns USING (episode, position) WHERE side_data.episode = ?
"""


def load_trajectory(connection: sqlite3.Connection, episode: Row, decode_task: TaskDecoder) -> Trajectory:
    """The trajectory of a row of `episodes`.

    Raises:
        RunFileError: the rows are damaged, or the task does not fit its class; the message has the cause.
    """
    task = connection.execute(
        "SELECT task FROM tasks WHERE id = ? AND visit = ?", (episode["task_id"], episode["visit"])
    ).fetchone()
    try:
        if task is None:
            raise LookupError(f"its task {decode_text(episode['task_id'])!r:.80} (visit {episode['visit']}) is missing")
        return _trajectory(connection, episode, decode_task(task[0]))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise RunFileError(
            f"run file {_path(connection)}: episode {decode_text(episode['id'])!r} of agent "
            f"{decode_text(episode['agent'])!r} is damaged, its rows are not a trajectory "
            f"({type(error).__name__}: {error}). Play it again with another file."
        ) from error


def _path(connection: sqlite3.Connection) -> Path:
    (_, _, path) = connection.execute("PRAGMA database_list").fetchone()
    return Path(path)


def _trajectory(connection: sqlite3.Connection, episode: Row, task: Task) -> Trajectory:
    key = (episode["key"],)
    trajectory = Trajectory(task=task, **read_fields(TRAJECTORY, episode))
    trajectory.segments = segments = [_segment(row) for row in connection.execute(_SEGMENTS, key).fetchall()]
    trajectory.turns = [
        _turn(row, trajectory.agent, segments[row["segment"]].log) for row in connection.execute(_TURNS, key).fetchall()
    ]
    requests = connection.execute("SELECT * FROM requests WHERE episode = ? ORDER BY number", key).fetchall()
    trajectory.requests = [ChatRequest(**read_fields(REQUEST, row)) for row in requests]
    attached = connection.execute("SELECT * FROM attachments WHERE episode = ? ORDER BY number", key).fetchall()
    trajectory.attachments = [Attachment(**read_fields(ATTACHMENT, row)) for row in attached]
    own = {turn.number: turn for turn in trajectory.turns}
    for segment in segments:
        if segment.origin is not None and segment.origin.agent == trajectory.agent:
            segment.origin.turn = own[segment.origin.number]
    asked = {turn.segment for turn in trajectory.turns if turn.sampling is not None and turn.sampling.logprobs}
    for number in asked:
        segments[number].log.top_logprobs = StoredTopLogprobs(_path(connection), episode["key"], number)
    for (number,) in connection.execute(_WITH_SIDE_DATA, key).fetchall():
        segments[number].log.side_data = StoredSideData(_path(connection), episode["key"], number)
    return trajectory


def _segment(row: Row) -> Segment:
    sources, ids = sources_of(decode_json(row["sources"])), unpack("i", row["ids"])
    # Arrays of different lengths would be paired wrongly.
    if len(ids) != len(sources):
        raise ValueError(f"segment {row['number']} has {len(ids)} ids, but its column `sources` is for {len(sources)}")
    logprobs = unpacked_logprobs(row["logprobs"], sources, row["number"])
    versions = [VersionSpan(*span) for span in decode_json(row["versions"])]
    return Segment(
        log=TokenLog(ids=ids, logprobs=logprobs, sources=sources, versions=versions),
        tools=() if row["schemas"] is None else decode_json(row["schemas"]),
        origin=None if row["origin_agent"] is None else Origin(decode_text(row["origin_agent"]), row["origin_turn"]),
        **read_fields(SEGMENT, row),
    )


def _turn(row: Row, agent: str, log: TokenLog) -> Turn:
    return Turn(
        agent=agent,
        log=log,
        sampling=None if row["sampling"] is None else _sampling(row["sampling"]),
        constraint=None if row["kind"] is None else Constraint(ConstraintKind(row["kind"]), row["value"]),
        junction=None if row["junction_result"] is None else Junction(**read_fields(JUNCTION, row)),
        timings=Timings(**read_fields(TIMINGS, row)),
        usage=None if row["usage_model"] is None else Usage(**read_fields(USAGE, row)),
        **read_fields(TURN, row),
    )


@lru_cache(maxsize=64)  # thousands of turns share a few objects, and each construction checks every field
def _sampling(stored: str) -> Sampling:
    fields = decode_json(stored)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    if fields.get("logit_bias"):  # in JSON, keys are always text
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    return Sampling(**{**fields, **lists}).over(Sampling.defaults())

"""Trajectories as rows and back again, without loss."""

from __future__ import annotations

import math
import re
import sqlite3
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from runner.engines.base import FinishReason
from runner.errors import RunFileError
from runner.messages import ToolCall
from runner.options import Constraint, ConstraintKind, Sampling
from runner.store.json_values import TaskDecoder, decode_json, decode_text, encode_json, encode_text
from runner.tasks import Task
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.log import Source, TokenLog, VersionSpan
from runner.trajectory import Outcome, Segment, Timings, Trajectory, Turn

__all__ = [
    "Rows",
    "decode_trajectory",
    "encode_trajectory",
    "episode_row",
    "load_trajectory",
    "pack",
    "source_spans",
    "unpack",
]

Row: TypeAlias = dict[str, Any]
"""The values of one row by column."""

StoredRow: TypeAlias = sqlite3.Row | Mapping[str, Any]


@dataclass(slots=True)
class Rows:
    """What one trajectory becomes.

    Attributes:
        episode: its row of `episodes`, without what only the writer knows (key, superseded, committed, launch).
        segments: without the episode's key, and with the JSON itself in `tools`.
        turns: likewise, and with the `Constraint` itself in `constrained`.
    """

    episode: Row
    segments: list[Row] = field(default_factory=list)
    turns: list[Row] = field(default_factory=list)


def encode_trajectory(trajectory: Trajectory) -> Rows:
    """The rows of `trajectory`."""
    return Rows(
        episode=episode_row(trajectory),
        segments=[_segment_row(number, segment) for number, segment in enumerate(trajectory.segments)],
        turns=[_turn_row(position, turn) for position, turn in enumerate(trajectory.turns)],
    )


def episode_row(trajectory: Trajectory) -> Row:
    """The values of its row of `episodes` that follow from the trajectory."""
    cached = [turn.cached_tokens for turn in trajectory.turns if turn.cached_tokens is not None]
    return {
        "id": encode_text(trajectory.id),
        "task_id": encode_text(trajectory.task.id),
        "visit": trajectory.visit,
        "group_index": trajectory.index,
        "agent": encode_text(trajectory.agent),
        "attempt": trajectory.attempt,
        "trained": int(trajectory.trained),
        "outcome": trajectory.outcome.value,
        "limit_name": trajectory.limit,
        "limit_agent": encode_text(trajectory.limit_agent),
        "reason": encode_text(trajectory.reason),
        "error": encode_text(trajectory.error),
        "reward": trajectory.reward,
        "rewards": encode_json(trajectory.rewards),
        "metrics": encode_json(trajectory.metrics),
        "turns": len(trajectory.turns),
        "segments": len(trajectory.segments),
        "tokens": sum(len(segment.log) for segment in trajectory.segments),
        "sampled": trajectory.sampled,
        "prompted": sum(turn.start for turn in trajectory.turns),
        "cached": sum(cached) if cached else None,
        "seed": trajectory.seed,
        "seconds": trajectory.seconds,
        "waited": trajectory.waited,
    }


def _segment_row(number: int, segment: Segment) -> Row:
    log = segment.log
    return {
        "number": number,
        "cause": segment.cause,
        "unseen": segment.unseen,
        "messages": encode_json(segment.messages),
        "ids": pack(log.ids),
        "logprobs": _packed_logprobs(log),
        "sources": encode_json(list(source_spans(log.sources))),
        "versions": encode_json([(span.version, span.start, span.end) for span in log.versions]),
        "tools": encode_json(segment.tools) if segment.tools else None,
    }


def _turn_row(position: int, turn: Turn) -> Row:
    junction = turn.junction
    return {
        "position": position,
        "number": turn.number,
        "segment": turn.segment,
        "start": turn.start,
        "end": turn.end,
        "finish": turn.finish.value,
        "stop": encode_text(turn.stop) if isinstance(turn.stop, str) else turn.stop,
        "text": encode_text(turn.text),
        "reasoning": encode_text(turn.reasoning),
        "tool_calls": encode_json(turn.tool_calls),
        "seed": turn.seed,
        "constrained": turn.constraint,
        "sampled": None if turn.sampling is None else encode_json(turn.sampling.given()),
        "cached": turn.cached_tokens,
        "dropped": turn.dropped,
        "resampled": turn.resampled,
        "thinking": int(turn.thinking),
        "tool_choice": turn.tool_choice,
        "reward": turn.reward,
        "queued": turn.timings.queued,
        "first_token": turn.timings.first_token,
        "decode": turn.timings.decode,
        "environment": turn.timings.environment,
        "junction_result": junction and junction.result.value,
        "junction_anchor": junction and junction.anchor.value,
        "junction_close": junction and junction.close.value,
        "junction_seam": junction and junction.seam.value,
        "junction_inserted": junction and junction.inserted,
        "junction_dropped": junction and junction.dropped,
        "junction_cause": junction and junction.cause,
    }


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Sampling(**{**fields, **lists}).over(Sampling.defaults())


def decode_trajectory(
    episode: StoredRow,
    task: Task,
    segments: Iterable[StoredRow],
    turns: Iterable[StoredRow],
) -> Trajectory:
    """The trajectory that these rows were made of.

    `turns` come with their constraint's `kind` and `value`, `segments` with the JSON of their tools in `schemas`.
    """
    decoded = [_segment(row) for row in segments]
    agent = decode_text(episode["agent"])
    return Trajectory(
        id=decode_text(episode["id"]),
        task=task,
        index=episode["group_index"],
        agent=agent,
        seed=episode["seed"],
        visit=episode["visit"],
        attempt=episode["attempt"],
        trained=bool(episode["trained"]),
        segments=decoded,
        turns=[_turn(row, agent, decoded[row["segment"]].log) for row in turns],
        outcome=Outcome(episode["outcome"]),
        limit=episode["limit_name"],
        limit_agent=decode_text(episode["limit_agent"]),
        reason=decode_text(episode["reason"]),
        error=decode_text(episode["error"]),
        reward=episode["reward"],
        rewards=decode_json(episode["rewards"]),
        metrics=decode_json(episode["metrics"]),
        seconds=episode["seconds"],
        waited=episode["waited"],
    )


def _segment(row: StoredRow) -> Segment:
    sources = array("b")
    for source, length in decode_json(row["sources"]):
        sources.extend(array("b", [source]) * length)
    ids = unpack("i", row["ids"])
    if len(ids) != len(sources):
        raise ValueError(f"segment {row['number']} has {len(ids)} ids and the sources of {len(sources)}")
    log = TokenLog(
        ids=ids,
        logprobs=_unpacked_logprobs(row, sources),
        sources=sources,
        versions=[VersionSpan(*span) for span in decode_json(row["versions"])],
    )
    return Segment(
        log=log,
        messages=decode_json(row["messages"]),
        cause=row["cause"],
        unseen=row["unseen"],
        tools=() if row["schemas"] is None else decode_json(row["schemas"]),
    )


def _turn(row: StoredRow, agent: str, log: TokenLog) -> Turn:
    stop = row["stop"]
    return Turn(
        agent=agent,
        number=row["number"],
        log=log,
        start=row["start"],
        end=row["end"],
        text=decode_text(row["text"]),
        reasoning=decode_text(row["reasoning"]),
        tool_calls=[ToolCall(**call) for call in decode_json(row["tool_calls"])],
        finish=FinishReason(row["finish"]),
        stop=stop if stop is None or isinstance(stop, int) else decode_text(stop),
        segment=row["segment"],
        seed=row["seed"],
        sampling=None if row["sampling"] is None else _sampling(decode_json(row["sampling"])),
        constraint=None if row["kind"] is None else Constraint(ConstraintKind(row["kind"]), row["value"]),
        cached_tokens=row["cached"],
        junction=_junction(row),
        timings=Timings(row["queued"], row["first_token"], row["decode"], row["environment"]),
        dropped=row["dropped"],
        resampled=row["resampled"],
        thinking=bool(row["thinking"]),
        tool_choice=row["tool_choice"],
        reward=row["reward"],
    )


def _junction(row: StoredRow) -> Junction | None:
    if row["junction_result"] is None:
        return None
    return Junction(
        result=Result(row["junction_result"]),
        anchor=Anchor(row["junction_anchor"]),
        close=Close(row["junction_close"]),
        seam=Seam(row["junction_seam"]),
        inserted=row["junction_inserted"],
        dropped=row["junction_dropped"],
        cause=row["junction_cause"],
    )


# --- packed arrays


def pack(values: array[Any]) -> bytes:
    """The values one after the other, little-endian on every machine."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpack(typecode: str, data: bytes) -> array[Any]:
    """What `pack` was given, with the type code of `array`."""
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


_SAME = re.compile(rb"(?s)(.)\1*")


def source_spans(sources: array[int]) -> Iterator[tuple[int, int]]:
    """Runs of ids from one source, in order: (source, length)."""
    for run in _SAME.finditer(sources.tobytes()):
        yield run[0][0], run.end() - run.start()


def _sampled_slices(sources: array[int]) -> Iterator[slice]:
    start = 0
    for source, length in source_spans(sources):
        if source in (Source.SAMPLED, Source.RETRIED):
            yield slice(start, start + length)
        start += length


_NAN = array("f", [math.nan])


def _packed_logprobs(log: TokenLog) -> bytes | None:
    sampled = array("f")
    for place in _sampled_slices(log.sources):
        sampled.extend(log.logprobs[place])
    data = pack(sampled)
    return None if data == pack(_NAN * len(sampled)) else data


def _unpacked_logprobs(row: StoredRow, sources: array[int]) -> array[float]:
    logprobs = _NAN * len(sources)
    if row["logprobs"] is None:
        return logprobs
    sampled, places = unpack("f", row["logprobs"]), list(_sampled_slices(sources))
    ids = sum(place.stop - place.start for place in places)
    if len(sampled) != ids:
        raise ValueError(f"segment {row['number']} has {len(sampled)} log-probabilities of {ids} sampled ids")
    taken = 0
    for place in places:
        length = place.stop - place.start
        logprobs[place] = sampled[taken : taken + length]
        taken += length
    return logprobs


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


def load_trajectory(connection: sqlite3.Connection, episode: StoredRow, decode_task: TaskDecoder) -> Trajectory:
    """The trajectory of a row of `episodes`.

    Raises:
        RunFileError: the rows hold none; the message names the episode and what is damaged.
    """
    task = connection.execute(
        "SELECT task FROM tasks WHERE id = ? AND visit = ?", (episode["task_id"], episode["visit"])
    ).fetchone()
    try:
        if task is None:
            raise LookupError("its task is not there")
        return _decoded(connection, episode, decode_task(task[0]))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        (_, _, path) = connection.execute("PRAGMA database_list").fetchone()
        raise RunFileError(
            f"run file {path}: episode {decode_text(episode['id'])!r} of agent {decode_text(episode['agent'])!r} is "
            f"damaged, its rows hold no trajectory ({type(error).__name__}: {error}). Play it again, in another file."
        ) from error


def _decoded(connection: sqlite3.Connection, episode: StoredRow, task: Task) -> Trajectory:
    key = episode["key"]
    segments = connection.execute(_SEGMENTS, (key,)).fetchall()
    turns = connection.execute(_TURNS, (key,)).fetchall()
    return decode_trajectory(episode, task, segments, turns)

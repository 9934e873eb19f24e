"""Episodes, turns and tokens of a run file as Arrow tables, which pandas and polars take."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from runner.store.json_values import encode_json
from runner.tokens.log import Source
from runner.trajectory import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FrameKind", "episodes_frame", "tokens_frame", "turns_frame"]


class FrameKind(enum.StrEnum):
    """The kind of rows that an Arrow table of a run file has."""

    EPISODES = "episodes"
    """A row per trajectory, without its tokens."""
    TURNS = "turns"
    """A row per turn."""
    TOKENS = "tokens"
    """A row per token id."""


_HIDDEN = ("key", "rewards", "metrics", "superseded", "launch", "thread")


def episodes_frame(rows: Iterable[Any]) -> pa.Table:
    """Episode rows as a table, with a column `rewards.NAME` or `metrics.NAME` for each score."""
    import pyarrow as pa

    listed = [
        {
            **{name: getattr(row, name) for name in row.__slots__ if name not in _HIDDEN},
            "outcome": row.outcome.value,
            **{f"rewards.{name}": value for name, value in row.rewards.items()},
            **{f"metrics.{name}": value for name, value in row.metrics.items()},
        }
        for row in rows
    ]
    names = list(dict.fromkeys(name for row in listed for name in row))
    return pa.table({name: _column([row.get(name) for row in listed]) for name in names})


def turns_frame(trajectories: Iterable[Trajectory]) -> pa.Table:
    """The turns of trajectories as a table; tool calls are JSON."""
    import pyarrow as pa

    listed = [
        {
            **_episode(trajectory),
            "number": turn.number,
            "segment": turn.segment,
            "prompt_tokens": turn.prompt_tokens,
            "sampled": turn.tokens,
            "cached_tokens": turn.cached_tokens,
            "finish": turn.finish.value,
            "text": turn.text,
            "reasoning": turn.reasoning,
            "tool_calls": encode_json(
                [
                    {"name": each.name, "arguments": dict(each.arguments), "error": each.error, "failed": each.failed}
                    for each in turn.tool_calls
                ]
            ),
            "turn_reward": turn.reward,
            "left_out": turn.left_out,
            "junction": None if turn.junction is None else turn.junction.result.value,
            "junction_cause": None if turn.junction is None else turn.junction.cause,
            "queued": turn.timings.queued,
            "first_token": turn.timings.first_token,
            "decode": turn.timings.decode,
            "environment": turn.timings.environment,
        }
        for trajectory in trajectories
        for turn in trajectory.turns
    ]
    names = list(dict.fromkeys(name for row in listed for name in row))
    return pa.table({name: _column([row[name] for row in listed]) for name in names})


def tokens_frame(trajectories: Iterable[Trajectory]) -> pa.Table:
    """The ids of trajectories in order, as a table; `logprob` and `version` are null for ids that were not sampled."""
    import numpy as np
    import pyarrow as pa

    names = {source.value: source.name.lower() for source in Source}
    tables = []
    for trajectory in trajectories:
        for number, segment in enumerate(trajectory.segments):
            log, count = segment.log, len(segment.log)
            versions: list[str | None] = [None] * count
            for span in log.versions:
                versions[span.start : span.end] = [span.version] * (span.end - span.start)
            logprobs = np.asarray(log.logprobs, np.float32)
            tables.append(
                pa.table(
                    {
                        **{name: _column([value] * count) for name, value in _episode(trajectory).items()},
                        "segment": pa.array(np.full(count, number, np.int32)),
                        "index": pa.array(np.arange(count, dtype=np.int32)),
                        "token_id": pa.array(np.asarray(log.ids, np.int32)),
                        "logprob": pa.array(logprobs, mask=np.isnan(logprobs)),
                        "source": pa.array([names[source] for source in log.sources], pa.string()),
                        "mask": pa.array(np.asarray(log.mask(), np.int8)),
                        "version": pa.array(versions, pa.string()),
                    }
                )
            )
    return pa.concat_tables(tables) if tables else pa.table({})


def _episode(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "id": trajectory.id,
        "task_id": trajectory.task.id,
        "agent": trajectory.agent,
        "attempt": trajectory.attempt,
    }


def _column(values: list[Any]) -> Any:
    import pyarrow as pa

    # Arrow refuses half of a surrogate pair. The half becomes "?" here, and is unchanged in the run file.
    return pa.array([_text(value) if isinstance(value, str) else value for value in values])


def _text(value: str) -> str:
    return value if value.isascii() else value.encode("utf-8", "replace").decode() if _has_surrogate(value) else value


def _has_surrogate(value: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in value)

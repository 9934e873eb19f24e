"""Export of run files to JSONL and Parquet, in constant memory."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from runner.errors import BadOption, StorageFailed
from runner.messages import as_messages
from runner.store.columns import Column, encode_text
from runner.store.json_values import decode_json, encode_json, encode_standard_json
from runner.store.parquet_columns import (
    as_array,
    message_type,
    message_values,
    sampling_type,
    sampling_values,
    scores_type,
    task_type,
    task_values,
    tools_value,
)
from runner.store.reader import RunFile
from runner.store.schema import TRAJECTORY
from runner.store.stored_tasks import encode_task
from runner.store.trajectory_filter import ALL, TrajectoryFilter
from runner.tokens.log import TokenLog
from runner.trajectory import Segment, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PARQUET_COLUMNS", "Exporter", "export_jsonl", "export_parquet"]


class Exporter(Protocol):
    """Function that writes the chosen trajectories of a run file, and returns their number.

    The target is a path; line-based formats also accept a binary stream.
    """

    def __call__(self, run_file: RunFile, target: Any, /, *, chosen: TrajectoryFilter = ALL) -> int: ...


MAX_ROW_GROUP_TOKENS: Final = 1_000_000
"""The number of token ids that completes a Parquet row group, which bounds memory."""
MAX_ROW_GROUP_ROWS: Final = 2_000
"""The number of rows that completes a row group with few ids."""


@contextlib.contextmanager
def whole_or_nothing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, which replaces `path` if the block ends without an error.

    Raises:
        StorageFailed: `path` exists and is not a file, or cannot be written.
    """
    if path.exists() and not path.is_file():
        raise StorageFailed(f"{path} is not a file. Give the path of a file.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise StorageFailed(
            f"{path} cannot be written ({error.strerror or error}); nothing was changed. "
            f"Give a path in a writable folder with space."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # another error here would hide the first one
            partial.unlink(missing_ok=True)


# --- JSONL


def export_jsonl(run_file: RunFile, target: str | Path | IO[bytes], *, chosen: TrajectoryFilter = ALL) -> int:
    """Write the trained trajectories, one JSON object per line.

    A trajectory that failed, or was not scored, has `reward: null`. `logprobs` are null for ids that were not sampled,
    and if the engine returned none. `mask` is 1 for sampled ids that were not withdrawn. In a turn, `sampling` is null
    if no run sampled the turn. `top_ids` and `top_logprobs` are null if the turn did not request them. An item of
    `top_logprobs` is null if the id could not be sampled. `sampling_masks` and `routed_experts` are null if the engine
    returned none.

    Args:
        run_file: the run file to export.
        target: a path, where the file appears once it is complete, or a binary stream.
        chosen: the filter of the trajectories.

    Returns:
        The number of written trajectories.

    Raises:
        BadOption: a chosen agent or task is not in the file.
        StorageFailed: the target cannot be written.
    """
    if isinstance(target, str | Path):
        with whole_or_nothing(Path(target)) as file:
            return export_jsonl(run_file, file, chosen=chosen)
    count = 0
    for trajectory in run_file.trajectories(chosen):
        target.write(encode_standard_json(_as_object(trajectory)) + b"\n")
        count += 1
    return count


# The fields of a trajectory that are columns of `episodes`. `trained` is left out, since it is always true here.
_FIELDS: Final = tuple(
    column.attribute or column.name
    for column in TRAJECTORY
    if column.is_field and column.name not in ("id", "trained", "limit_agent")
)
_TURN_FIELDS: Final = (
    *("number", "segment", "start", "end", "text", "reasoning", "tool_calls", "finish", "stop", "reward", "seed"),
    *("constraint", "junction", "timings"),
)


def _as_object(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "id": trajectory.id,
        "task": decode_json(encode_task(trajectory.task)),
        **{name: getattr(trajectory, name) for name in _FIELDS},
        "segments": [_segment_object(segment) for segment in trajectory.segments],
        "turns": [
            {
                **{name: getattr(turn, name) for name in _TURN_FIELDS},
                "sampling": _sampling(turn),
                **_top_object(turn),
                **_side_object(turn),
            }
            for turn in trajectory.turns
        ],
    }


def _sampling(turn: Turn) -> dict[str, Any] | None:
    return None if turn.sampling is None else turn.sampling.given()


def _top_object(turn: Turn) -> dict[str, Any]:
    top = turn.top
    return {
        "top_ids": None if top is None else top.id_rows().tolist(),
        "top_logprobs": None if top is None else top.logprob_rows().tolist(),  # minus infinity becomes null
    }


def _side_object(turn: Turn) -> dict[str, Any]:
    masks, experts = turn.sampling_masks, turn.routed_experts
    routed = None if experts is None else {"first": experts.start, "experts": experts.numbers().tolist()}
    return {"sampling_masks": None if masks is None else masks.rows(), "routed_experts": routed}


def _segment_object(segment: Segment) -> dict[str, Any]:
    log = segment.log
    return {
        "cause": segment.cause,
        "messages": segment.messages,
        "unseen": segment.unseen,
        "token_ids": log.ids.tolist(),
        "logprobs": log.logprobs.tolist(),  # NaN becomes null
        "mask": log.mask().tolist(),
        "weight_versions": log.versions,
    }


# --- Parquet


def _value_of(column: Column) -> Callable[[Trajectory], Any]:
    write, take = column.form.write, attrgetter(column.path)
    # Text stays text, since only SQLite may need bytes, and Arrow encodes text itself. Scores become structs.
    return take if write in (None, encode_text, encode_json) else lambda trajectory: write(take(trajectory))


_IN_PARQUET: Final = tuple(column for column in TRAJECTORY if column.arrow)
_VALUES: Final[dict[str, tuple[Any, Callable[[Trajectory], Any]]]] = {
    **{column.attribute or column.name: (column.arrow, _value_of(column)) for column in _IN_PARQUET},
    "task": ("", lambda t: task_values(t.task, as_messages(t.task.prompt))),
    "messages": ("", lambda t: message_values(t.messages)),
    "earlier_messages": ("", lambda t: [message_values(segment.messages) for segment in t.segments[:-1]]),
    "tools": ("string", lambda t: tools_value(t.segments[-1].tools if t.segments else ())),
    "sampling": ("", lambda t: [sampling_values(turn) for turn in t.turns]),
}
"""The columns with one value per trajectory, by name: the name of the Arrow type, and a function that returns the
value. `_parquet_schema` sets the types of nested columns."""

_PER_TOKEN: Final = (
    *("token_ids", "logprobs", "mask", "weight_versions", "top_ids", "top_logprobs"),
    *("sampling_masks", "routed_experts"),
)

PARQUET_COLUMNS: Final = (*_VALUES, *_PER_TOKEN)
"""The columns of a Parquet export; see docs/run-file.md."""


def export_parquet(
    run_file: RunFile, path: str | Path, *, columns: Sequence[str] = PARQUET_COLUMNS, chosen: TrajectoryFilter = ALL
) -> int:
    """Write the trained trajectories as Parquet, one row each.

    `token_ids`, `logprobs`, `mask` and `weight_versions` are lists of lists: one list per segment, and an episode has
    one segment unless its history was rewritten. In `top_ids`, `top_logprobs`, `sampling_masks` and `routed_experts`
    each id has a list of values, or null if there are none. The list of an id in `routed_experts` has the experts of
    the first layer, then of the second layer, and so on. `reward` is null if a trajectory failed or was not scored.

    Args:
        run_file: the run file to export.
        path: the path where the file appears once it is complete.
        columns: a selection of `PARQUET_COLUMNS`.
        chosen: the filter of the trajectories.

    Returns:
        The number of written rows.

    Raises:
        BadOption: a column is unknown, or a chosen agent or task is not in the file.
        StorageFailed: the path cannot be written.
    """
    import pyarrow.parquet as parquet

    unknown = [name for name in columns if name not in PARQUET_COLUMNS]
    if unknown:
        raise BadOption(f"columns: unknown {', '.join(unknown)}; the columns are {', '.join(PARQUET_COLUMNS)}.")
    schema = _parquet_schema(columns, run_file)
    count = 0
    with whole_or_nothing(Path(path)) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for rows in _row_groups(run_file.trajectories(chosen)):
            writer.write_table(_table(rows, schema), row_group_size=len(rows))
            count += len(rows)
    return count


def _parquet_schema(columns: Sequence[str], run_file: RunFile) -> pa.Schema:
    import pyarrow as pa

    def nested(value: pa.DataType) -> pa.DataType:
        return pa.list_(pa.list_(value))

    types = {name: pa.type_for_alias(alias) for name, (alias, _) in _VALUES.items() if alias} | {
        **{name: scores_type(run_file.score_names(name)) for name in ("rewards", "metrics")},
        "task": task_type(),
        "messages": pa.list_(message_type()),
        "earlier_messages": nested(message_type()),
        "sampling": pa.list_(sampling_type()),
        "token_ids": nested(pa.int32()),
        "logprobs": nested(pa.float32()),
        "mask": nested(pa.int8()),
        "weight_versions": nested(pa.dictionary(pa.int32(), pa.string())),
        "top_ids": nested(pa.list_(pa.int32())),
        "top_logprobs": nested(pa.list_(pa.float32())),
        "sampling_masks": nested(pa.list_(pa.int32())),
        "routed_experts": nested(pa.list_(pa.int16())),
    }
    schema = pa.schema([(name, types[name]) for name in columns])
    return schema.with_metadata({"deltarunner.header": run_file.header.to_json()})


def _row_groups(trajectories: Iterator[Trajectory]) -> Iterator[list[Trajectory]]:
    rows: list[Trajectory] = []
    tokens = 0
    for trajectory in trajectories:
        rows.append(trajectory)
        tokens += sum(len(segment.log) for segment in trajectory.segments)
        if tokens >= MAX_ROW_GROUP_TOKENS or len(rows) >= MAX_ROW_GROUP_ROWS:
            yield rows
            rows, tokens = [], 0
    if rows:
        yield rows


def _table(rows: Sequence[Trajectory], schema: pa.Schema) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    # An Arrow column of nested lists is made from one flat array with the ids of all rows, without an object per id.
    logs = [segment.log for trajectory in rows for segment in trajectory.segments]
    segment_ends = np.cumsum([0, *map(len, logs)], dtype=np.int32)
    row_ends = np.cumsum([0, *(len(trajectory.segments) for trajectory in rows)], dtype=np.int32)
    names: dict[str, int] = {}
    versions = np.full(segment_ends[-1], -1, dtype=np.int32)
    for begin, log in zip(segment_ends, logs, strict=False):
        for span in log.versions:
            versions[begin + span.start : begin + span.end] = names.setdefault(span.version, len(names))
    numbers: Any = pa.array(versions, mask=versions < 0)

    nested: Any = pa.ListArray.from_arrays  # the type hints omit numpy arrays, which the function accepts

    def joined(kind: str, parts: Iterable[array[Any]]) -> Any:
        # The first part is empty, since rows may have no segments, and np.concatenate refuses an empty list.
        return np.concatenate([np.empty(0, kind), *parts])

    def finite(values: Any) -> Any:
        """Return the values, with null for NaN and infinities, as in JSON."""
        return pa.array(values, mask=~np.isfinite(values))

    per_token: dict[str, Callable[[], Any]] = {
        "token_ids": lambda: pa.array(joined("int32", (log.ids for log in logs))),
        "logprobs": lambda: finite(joined("float32", (log.logprobs for log in logs))),
        "mask": lambda: pa.array(joined("int8", (log.mask() for log in logs))),
        "weight_versions": lambda: pa.DictionaryArray.from_arrays(numbers, pa.array(list(names), pa.string())),
        "top_ids": lambda: _lists(logs, "int32", _top_parts, lambda top: top.ids),
        "top_logprobs": lambda: _lists(logs, "float32", _top_parts, lambda top: top.logprobs),
        "sampling_masks": lambda: _lists(logs, "int32", _mask_parts, lambda masks: masks.ids),
        "routed_experts": lambda: _lists(logs, "int16", _expert_parts, lambda experts: experts.experts),
    }

    def column(name: str) -> Any:
        if name not in per_token:
            return as_array(list(map(_VALUES[name][1], rows)), schema.field(name).type)
        return nested(row_ends, nested(segment_ends, per_token[name]()))

    return pa.Table.from_arrays([column(name) for name in schema.names], schema=schema)


_Parts: TypeAlias = Iterator[tuple[int, Any, Any]]
"""For each turn: the index of the first id with data, the number of values for each id from there, and the data."""


def _top_parts(log: TokenLog) -> _Parts:
    return ((start, [top.count] * len(top), top) for start, top in sorted(log.top_logprobs.items()))


def _mask_parts(log: TokenLog) -> _Parts:
    sides = sorted(log.side_data.items())
    return ((start, side.masks.counts, side.masks) for start, side in sides if side.masks is not None)


def _expert_parts(log: TokenLog) -> _Parts:
    experts = [side.experts for _, side in sorted(log.side_data.items()) if side.experts is not None]
    return ((each.start, [each.layers * each.top] * len(each), each) for each in experts)


def _lists(
    logs: Sequence[TokenLog], kind: str, parts: Callable[[TokenLog], _Parts], take: Callable[[Any], array[Any]]
) -> Any:
    """Return an Arrow array with the data of turns: a list for each id of the logs, null for an id without data."""
    import numpy as np
    import pyarrow as pa

    values = [np.empty(0, kind)]  # rows may have no segments, and np.concatenate refuses an empty list
    counts = [np.zeros(len(log), np.int32) for log in logs]
    for log, of_log in zip(logs, counts, strict=True):
        for start, lengths, data in parts(log):
            of_log[start : start + len(lengths)] = lengths
            values.append(np.asarray(take(data), kind))
    ends = np.cumsum(np.concatenate([np.zeros(1, np.int32), *counts]), dtype=np.int32)
    flat = pa.array(np.concatenate(values))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, mask=pa.array(np.diff(ends) == 0, pa.bool_()))

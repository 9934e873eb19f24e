"""Checks of a whole run file: no episode is missing or stored twice, and the summary matches the rows."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from runner.episode.parsed_turn import ParsedTurn
from runner.store.columns import decode_text
from runner.store.database import open_reader, storage_faults
from runner.store.header import Header
from runner.store.json_values import decode_json
from runner.trajectory import Outcome, Trajectory
from runner.verify.differences import Comparison, Difference, DifferenceFound, Kind

__all__ = ["first_message_mismatch", "first_misfit", "launch_difference"]


def _names(outcomes: Iterator[Outcome]) -> str:
    return ", ".join(f"'{outcome.value}'" for outcome in outcomes)


_AGAIN: Final = _names(outcome for outcome in Outcome if outcome.played_again(failed=True))
_UNFINISHED: Final = _names(outcome for outcome in Outcome if outcome.cut_short)

_SAME_EPISODE: Final = (
    "other.task_id = this.task_id AND other.visit = this.visit AND other.group_index = this.group_index"
)
_OF_ALL_AGENTS: Final = ("outcome", "limit_name", "limit_agent", "reason", "error", "metrics", "seed", "superseded")
_DISAGREE: Final = " OR ".join(f"count(DISTINCT {column}) > 1" for column in _OF_ALL_AGENTS)

# Each query selects faulty episodes or tasks. SQL is used, since a run may have more episodes than fit into memory.
_MISFITS: Final = (
    (
        "SELECT '' AS id FROM segments WHERE episode NOT IN (SELECT key FROM episodes)",
        "the file has segments that belong to no episode",
    ),
    (
        "SELECT '' AS id FROM turns WHERE episode NOT IN (SELECT key FROM episodes)",
        "the file has turns that belong to no episode",
    ),
    (
        "SELECT '' AS id FROM requests WHERE episode NOT IN (SELECT key FROM episodes)",
        "the file has requests that belong to no episode",
    ),
    (
        "SELECT '' AS id FROM top_logprobs AS top WHERE NOT EXISTS "
        "(SELECT 1 FROM turns WHERE turns.episode = top.episode AND turns.position = top.position)",
        "the file has most likely ids that belong to no turn",
    ),
    (
        "SELECT '' AS id FROM side_data AS side WHERE NOT EXISTS "
        "(SELECT 1 FROM turns WHERE turns.episode = side.episode AND turns.position = side.position)",
        "the file has side data that belong to no turn",
    ),
    (
        "SELECT episodes.id FROM top_logprobs AS top JOIN turns USING (episode, position) "
        "JOIN episodes ON episodes.key = turns.episode LEFT JOIN samplings ON samplings.key = turns.sampled "
        "WHERE json_extract(samplings.sampling, '$.logprobs') IS NOT top.count",
        "the file has most likely ids of a turn whose sampling options request none, or another number",
    ),
    (
        "SELECT id FROM tasks AS task WHERE NOT EXISTS "
        "(SELECT 1 FROM episodes WHERE task_id = task.id AND episodes.visit = task.visit)",
        "a task was begun, but the file has none of its episodes",
    ),
    (
        "SELECT id FROM episodes WHERE group_index NOT BETWEEN 0 AND :group_size - 1",
        "the episode's index is not below the run's group size",
    ),
    (
        "SELECT id FROM episodes GROUP BY task_id, visit, group_index "
        "HAVING min(attempt) > 0 OR count(DISTINCT attempt) <= max(attempt)",
        "an earlier attempt is missing",
    ),
    (
        "SELECT id FROM episodes AS this WHERE NOT superseded AND EXISTS "
        f"(SELECT 1 FROM episodes AS other WHERE {_SAME_EPISODE} AND other.attempt > this.attempt)",
        "two of the episode's attempts are results of the run",
    ),
    (
        f"SELECT id FROM episodes WHERE superseded AND outcome NOT IN ({_AGAIN})",
        "the episode is not a result of the run, although it did not fail",
    ),
    (
        "SELECT id FROM episodes AS this WHERE superseded AND (SELECT complete FROM run) AND NOT EXISTS "
        f"(SELECT 1 FROM episodes AS other WHERE {_SAME_EPISODE} AND NOT other.superseded)",
        "the run is complete, but none of the episode's attempts is a result",
    ),
    (
        f"SELECT id FROM episodes GROUP BY task_id, visit, group_index, attempt HAVING {_DISAGREE}",
        "the records of the episode's agents differ",
    ),
    (
        "SELECT id FROM episodes WHERE launch NOT IN (SELECT number FROM launches)",
        "the episode was written by a launch that the file does not list",
    ),
)

_COUNTED: Final = f"FROM episodes WHERE NOT superseded AND outcome NOT IN ({_UNFINISHED})"


def first_misfit(path: Path, header: Header) -> Difference | None:
    """Return the first inconsistency between the episodes of the file at `path`, or None.

    All checks read the same state of the file, also while a run writes it.

    Raises:
        RunFileError: the file is not a run file.
        StorageFailed: the file cannot be read.
    """
    with storage_faults(path), closing(open_reader(path)) as connection:
        connection.execute("BEGIN")  # one transaction, so that all statements read the same state
        for statement, explanation in _MISFITS:
            row = connection.execute(f"{statement} LIMIT 1", {"group_size": header.group_size}).fetchone()
            if row is not None:
                return Difference(kind=Kind.EPISODES, explanation=explanation, episode=decode_text(row["id"]))
        return _miscount(connection)


def _miscount(connection: sqlite3.Connection) -> Difference | None:
    """Return the first figure of a complete run's summary that differs from the rows, or None."""
    complete, text = connection.execute("SELECT complete, summary FROM run").fetchone()
    if not complete:
        return None
    try:
        summary = decode_json(text)
        for keys, held in _counts(connection, summary):
            stored = _stored(summary, keys)
            if not math.isclose(stored, held, rel_tol=1e-6, abs_tol=1e-9):
                what = f"the summary of the complete run has another value for {' '.join(keys)!r}"
                return _of_the_summary(what, stored, held)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return _of_the_summary(f"a complete run has no summary that can be read ({error})", text, "")
    return None


def _of_the_summary(explanation: str, stored: object, derived: object) -> Difference:
    return Difference(kind=Kind.EPISODES, explanation=explanation, stored=str(stored), derived=str(derived))


def _counts(connection: sqlite3.Connection, summary: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Count the rows. Yield each figure, with its keys in a summary."""
    episodes = f"SELECT DISTINCT task_id, visit, group_index, outcome {_COUNTED}"
    outcomes = dict(connection.execute(f"SELECT outcome, count(*) FROM ({episodes}) GROUP BY outcome").fetchall())
    yield ("episodes",), sum(outcomes.values())
    for outcome in sorted({*outcomes, *summary["outcomes"]}):
        yield ("outcomes", outcome), outcomes.get(outcome, 0)
    totals = connection.execute(f"SELECT total(turns), total(sampled), total(prompted) {_COUNTED}").fetchone()
    yield from zip((("turns",), ("tokens", "sampled"), ("tokens", "prompt")), totals, strict=True)
    rewards = f"SELECT agent, count(reward), avg(reward) {_COUNTED} AND trained GROUP BY agent HAVING count(reward)"
    for agent, count, mean in connection.execute(rewards) if "agents" in summary else ():
        yield ("agents", decode_text(agent), "count"), count
        yield ("agents", decode_text(agent), "mean"), mean


def _stored(summary: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    """Return the figure at these keys of the summary; 0 if it is missing."""
    value: Any = summary
    for key in keys:
        value = value.get(key, {})
    return value or 0


def launch_difference(path: Path, header: Header) -> Difference | None:
    """Return a difference for the first launch whose configuration is damaged or cannot continue the run, or None."""
    with storage_faults(path), closing(open_reader(path)) as connection:
        for number, text in connection.execute("SELECT number, header FROM launches ORDER BY number"):
            try:
                changes = header.refused(Header.from_json(text))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                damaged = f"the header of launch {number} is damaged ({error})"
                return Difference(kind=Kind.HEADER, explanation=damaged, stored=text)
            if changes:
                return Difference(
                    kind=Kind.HEADER,
                    explanation=f"launch {number} had another configuration than the run: {changes[0].path}",
                    stored=str(changes[0].new),
                    derived=str(changes[0].old),
                )
    return None


def first_message_mismatch(trajectory: Trajectory) -> Difference | None:
    """Return the first difference in a trajectory of a message engine, or None.

    A difference is a segment that has ids, which such an engine does not return, or a turn whose answer is not among
    the messages.
    """
    compare = Comparison(trajectory, repr)
    try:
        for number, segment in enumerate(trajectory.segments):
            compare.segment = number
            if len(segment.log):
                problem = "the segment has ids, but the engine returns none"
                compare.differ(Kind.LAYOUT, problem, stored=str(len(segment.log)))
            said = iter(segment.messages[: len(segment.messages) - segment.unseen])
            for turn in trajectory.turns:
                if turn.segment != number:
                    continue
                compare.turn = turn.number
                reply = ParsedTurn(turn.text, turn.reasoning, turn.tool_calls).as_message()
                # `said` is an iterator, so the search begins after the message of the previous turn.
                if not any(message == reply for message in said):
                    problem = "no message has the content of the turn"
                    compare.differ(Kind.MESSAGE, problem, stored="", derived=str(reply))
            compare.turn = None
    except DifferenceFound as found:
        return found.difference
    return None

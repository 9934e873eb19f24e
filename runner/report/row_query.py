"""Selection of a run file's episodes in SQL, one page at a time, for files that are too large to be read whole."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final
from urllib.parse import urlencode

from runner.errors import BadOption
from runner.report.labels import Labels
from runner.report.row_conditions import number_of
from runner.store.columns import decode_text, encode_text
from runner.store.json_values import encode_json
from runner.store.reader import EpisodeRow, RunFile
from runner.trajectory import Outcome

__all__ = ["ORDERS", "PAGE_ROWS", "RowQuery", "TextSearches", "agents_of", "neighbours", "select_rows"]

PAGE_ROWS: Final = 100
MAX_KEPT_SEARCHES: Final = 16
"""Maximum number of texts whose episodes are cached for later requests."""

ORDERS: Final[Mapping[str, str]] = {
    "": "as played",
    "newest": "newest first",
    "reward": "reward, lowest first",
    "-reward": "reward, highest first",
    "-turns": "most turns",
    "-sampled": "most sampled ids",
    "-seconds": "slowest",
    "task": "task",
}
"""Orders of a list of episodes, with the words that a page shows for each."""
_ORDER_BY: Final[Mapping[str, str]] = {
    "": "key",
    "newest": "key DESC",
    "reward": "reward IS NULL, reward, key",
    "-reward": "reward IS NULL, reward DESC, key",
    "-turns": "turns DESC, key",
    "-sampled": "sampled DESC, key",
    "-seconds": "seconds DESC, key",
    "task": "task_id, visit, group_index, key",
}

_MAIN_ROW: Final = """NOT EXISTS (
    SELECT 1 FROM episodes AS other WHERE other.id = episodes.id AND other.attempt = episodes.attempt
    AND (other.trained > episodes.trained OR other.trained = episodes.trained AND other.key < episodes.key))"""
"""The condition for one row of each episode: of its first trained agent, or of its first agent if none is trained."""

_HAS_TEXT: Final = """(id LIKE :find ESCAPE '\\' OR task_id LIKE :find ESCAPE '\\' OR error LIKE :find ESCAPE '\\'
    OR EXISTS (SELECT 1 FROM turns WHERE episode = episodes.key AND (
        text LIKE :find ESCAPE '\\' OR reasoning LIKE :find ESCAPE '\\' OR tool_calls LIKE :find ESCAPE '\\'))
    OR EXISTS (SELECT 1 FROM segments WHERE episode = episodes.key AND messages LIKE :find ESCAPE '\\'))"""


@dataclass(frozen=True, slots=True)
class RowQuery:
    """A selection of episodes, as a form sends it. An empty field selects all."""

    find: str = ""
    """Text in the id, the task's id, the error, the turns, the messages or the labels; case does not matter for ASCII
    letters."""
    outcome: str = ""
    """An outcome, or "failed" for all that failed."""
    task: str = ""
    low: str = ""
    """The lowest reward."""
    high: str = ""
    sort: str = ""
    """A key of `ORDERS`."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> RowQuery:
        """The query in the fields of a form; unknown fields are ignored.

        Raises:
            BadOption: an outcome or an order does not exist, or a reward is not a number.
        """
        query = cls(**{each.name: given[each.name].strip() for each in fields(cls) if each.name in given})
        if query.sort not in ORDERS:
            raise BadOption(f"sort={query.sort!r:.60}: give one of {', '.join(filter(None, ORDERS))}.")
        if query.outcome not in ("", "failed", *(each.value for each in Outcome)):
            raise BadOption(f"outcome={query.outcome!r:.60}: give one of failed, {', '.join(Outcome)}.")
        for name in ("low", "high"):
            if (text := getattr(query, name)) and number_of(text) is None:
                raise BadOption(f"{name}={text!r:.60}: give a number.")
        return query

    def address(self, **more: object) -> str:
        """The query and the fields `more` as the part of an address after `?`."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return urlencode({name: value for name, value in {**given, **more}.items() if value != ""}, errors="replace")

    def condition(self, found: Sequence[int] | None, *, several_agents: bool) -> tuple[str, dict[str, Any]]:
        """The SQL condition on rows of `episodes`, and the values of its parameters.

        Args:
            found: the keys of the rows with the text `find`; None without such a text.
            several_agents: True to select only one row of each episode.
        """
        parts, values = ["NOT superseded", *([_MAIN_ROW] if several_agents else [])], dict[str, Any]()
        if self.outcome == "failed":
            failed = ", ".join(f"'{each.value}'" for each in Outcome if each.failed)
            parts.append(f"outcome IN ({failed})")
        elif self.outcome:
            parts.append("outcome = :outcome")
            values["outcome"] = self.outcome
        if self.task:
            parts.append("task_id = :task")
            values["task"] = encode_text(self.task)
        for name, sign in (("low", ">="), ("high", "<=")):
            if (text := getattr(self, name)) != "":
                parts.append(f"reward {sign} :{name}")
                values[name] = number_of(text)
        if found is not None:
            parts.append("key IN (SELECT value FROM json_each(:found))")
            values["found"] = encode_json(list(found))
        return " AND ".join(parts), values


class TextSearches:
    """Searches of a file for texts. Each search reads an episode once, however often a page repeats the request."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[int, list[int]]] = OrderedDict()
        """The last key that was searched, and the keys of the episodes with the text."""
        self._lock = threading.Lock()

    def keys(self, run_file: RunFile, text: str, labels: Labels) -> list[int]:
        """The keys of the episodes that have a text, or labels with it."""
        escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        with self._lock:  # pages that request the same text at the same time share one search
            last, found = self._found.pop(text, (0, []))
            newest = int(run_file.select("SELECT coalesce(max(key), 0) FROM episodes")[0][0])
            if newest < last:  # another file has this name now
                last, found = 0, []
            if newest > last:
                values = {"find": encode_text(f"%{escaped}%"), "last": last, "newest": newest}
                statement = f"SELECT key FROM episodes WHERE key > :last AND key <= :newest AND {_HAS_TEXT}"
                found = [*found, *(key for (key,) in run_file.select(statement, values))]
            self._found[text] = newest, found
            while len(self._found) > MAX_KEPT_SEARCHES:
                self._found.popitem(last=False)
        labelled = labels.with_text(text)
        return [
            *found,
            *(
                key
                for id in labelled
                for (key,) in run_file.select("SELECT key FROM episodes WHERE id = ?", encode_text(id))
            ),
        ]


def select_rows(
    run_file: RunFile, query: RowQuery, found: Sequence[int] | None = None, *, first: int = 0
) -> tuple[list[EpisodeRow], int]:
    """Return at most `PAGE_ROWS` of the selected episodes, one row each, and the number of all selected episodes.

    Args:
        run_file: the file.
        query: the selection.
        found: the keys of the episodes with the text `query.find`; None without such a text.
        first: the number of episodes to skip.
    """
    # Most files have one agent, so that each row is an episode.
    several = run_file.select("SELECT count(DISTINCT agent) FROM episodes")[0][0] > 1
    condition, values = query.condition(found, several_agents=several)
    statement = f"SELECT key FROM episodes WHERE {condition} ORDER BY {_ORDER_BY[query.sort]} LIMIT :most OFFSET :first"
    keys = run_file.select(statement, {**values, "most": PAGE_ROWS, "first": first})
    (total,) = run_file.select(f"SELECT count(*) FROM episodes WHERE {condition}", values)[0]
    return run_file.rows_of([key for (key,) in keys]), total


def neighbours(run_file: RunFile, row: EpisodeRow) -> tuple[str | None, str | None]:
    """The ids of the episodes that were committed before and after an episode; None at the ends."""
    found = [
        run_file.select(
            f"SELECT id FROM episodes WHERE key {sign} ? AND id != ? AND NOT +superseded ORDER BY key {order} LIMIT 1",
            *(row.key, encode_text(row.id)),
        )
        for sign, order in (("<", "DESC"), (">", "ASC"))
    ]
    before, after = (decode_text(rows[0][0]) if rows else None for rows in found)
    return before, after


def agents_of(run_file: RunFile, id: str) -> list[EpisodeRow]:
    """The rows of the agents of an episode's last attempt, trained agents first.

    Raises:
        RunFileError: the file has no such episode.
    """
    first = run_file.row(id)
    attempt = run_file.rows(task_id=first.task_id, trained=None, superseded=None)
    agents = [row for row in attempt if (row.id, row.attempt) == (first.id, first.attempt)]
    return sorted(agents, key=lambda row: (not row.trained, row.key))

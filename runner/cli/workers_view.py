"""Workers in the live display: a row for each worker if they fit, else for workers with problems or extreme values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from rich.cells import cell_len
from rich.text import Text

from runner.runs.fleet_stats import FleetStats, Trouble, outdated_in_words, versions_in_words
from runner.runs.player import FleetWorker, IdleReason
from runner.transcript import shown_line

__all__ = ["joined_line", "workers_view"]

MIN_TABLE_WIDTH: Final = 70
"""Width of the terminal, in characters, below which the table has only its most important columns."""

MAX_NODE_CHARS: Final = 20
"""Maximum length of a shown name of a node."""

MAX_VERSION_CHARS: Final = 12
"""Maximum length of a shown version of weights."""

_COLUMNS: Final = ("worker", "node", "playing", "weights", "lag", "silent", "longest wait")
_FEWER_COLUMNS: Final = ("worker", "playing", "longest wait")
_LEFT_ALIGNED: Final = ("node", "weights", "longest wait")
"""Left-aligned columns; the others are numbers."""

Cell: TypeAlias = tuple[str, str]
"""A text and its style."""


def workers_view(fleet: FleetStats, *, width: int, room: int) -> list[Text]:
    """The workers as lines of text: at most `room` lines, but at least one.

    Args:
        fleet: statistics of the workers.
        width: width of the terminal, in characters.
        room: number of free lines.
    """
    counts = _counts(fleet, width)[: max(1, room)]
    room -= len(counts)
    if len(fleet.workers) < room:  # one line is for the column names
        return [*counts, *_table(fleet.workers, fleet, width)]
    rows = fleet.worth_a_look(max(0, room - 2))  # one line is for the column names, one for all other workers
    shown = {worker.number for worker in rows}
    rest = [worker for worker in fleet.workers if worker.number not in shown]
    return [
        *counts,
        *_table(rows, fleet, width),
        *([_others_line(rest, fleet, more=bool(rows))] if rest and room > 0 else []),
    ]


def _counts(fleet: FleetStats, width: int) -> list[Text]:
    """The number of playing workers, and the numbers of absent ones by reason, on as many lines as needed."""
    playing = len(fleet.workers)
    style = "yellow" if fleet.few else "" if playing == fleet.most else "bold"
    lines = [[(f"{playing} of {fleet.most} workers", style)]]
    parts = [(outdated, "yellow") for outdated in outdated_in_words(fleet)]
    for why, count in fleet.absent.items():
        parts.append((f"{count} {why.value}", "yellow" if why is IdleReason.RESTING else ""))
    for part in parts:
        if joined_line([*lines[-1], part]).cell_len <= width:
            lines[-1].append(part)
        else:
            lines.append([("  " + part[0], part[1])])
    return [joined_line(line, no_wrap=True) for line in lines]


def _table(workers: Sequence[FleetWorker], fleet: FleetStats, width: int) -> list[Text]:
    if not workers:
        return []
    whole = width >= MIN_TABLE_WIDTH
    columns = _COLUMNS if whole else _FEWER_COLUMNS
    rows: list[Sequence[Cell]] = [[(name, "dim") for name in columns]]
    rows += [(_cells if whole else _fewer_cells)(worker, fleet.troubles(worker), width) for worker in workers]
    # The columns are aligned here, because a table of Rich takes seven times as long, and each frame has one.
    widths = [max(cell_len(text) for text, _ in column) for column in zip(*rows, strict=True)]
    return [_aligned(row, columns, widths) for row in rows]


def _cells(worker: FleetWorker, troubles: Collection[Trouble], width: int) -> list[Cell]:
    def styled(trouble: Trouble, calm: str = "dim") -> str:
        return "yellow" if trouble in troubles else calm

    return [
        (str(worker.number), "yellow" if troubles else ""),
        (_short(worker.node, min(MAX_NODE_CHARS, width // 6)), ""),
        (f"{worker.playing}/{worker.width}", ""),
        (_short(worker.version, min(MAX_VERSION_CHARS, width // 8)), styled(Trouble.OUTDATED)),
        (_lag(worker.lag), styled(Trouble.LATE)),
        (f"{worker.silent:.0f} s", styled(Trouble.SILENT)),
        (_longest_wait(worker), styled(Trouble.STUCK, "")),
    ]


def _fewer_cells(worker: FleetWorker, troubles: Collection[Trouble], _: int) -> list[Cell]:
    # Values without a column are shown if they are a problem.
    problems = [f"silent for {worker.silent:.0f} s"] if Trouble.SILENT in troubles else []
    problems += [f"weights {_short(worker.version, MAX_VERSION_CHARS)}"] if Trouble.OUTDATED in troubles else []
    problems += [f"lag {_lag(worker.lag)}"] if Trouble.LATE in troubles else []
    wait = _longest_wait(worker)
    style = "yellow" if troubles else ""
    return [
        (str(worker.number), style),
        (f"{worker.playing}/{worker.width}", ""),
        (", ".join([*problems, wait.lstrip()]) if problems else wait, style),
    ]


def _aligned(row: Sequence[Cell], columns: Sequence[str], widths: Sequence[int]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for (text, style), column, wide in zip(row, columns, widths, strict=True):
        pad = " " * (wide - cell_len(text))
        line.append("  " if line else "").append(text + pad if column in _LEFT_ALIGNED else pad + text, style or None)
    line.rstrip()  # otherwise Rich would cut trailing spaces and mark the line as cut
    return line


def _longest_wait(worker: FleetWorker) -> str:
    return f"{worker.waited:4.0f} s for {shown_line(worker.oldest)}" if worker.oldest else ""


def _lag(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _others_line(workers: Sequence[FleetWorker], fleet: FleetStats, *, more: bool) -> Text:
    """One line for all workers without a row."""
    nodes = {worker.node for worker in workers}
    where = shown_line(next(iter(nodes))) if len(nodes) == 1 else f"{len(nodes)} nodes"
    parts = [(f"{len(workers)}{' more' if more else ''} on {where}", "")]
    troubled = sum(bool(fleet.troubles(worker)) for worker in workers)
    if troubled:
        parts.append((f"{troubled} in trouble", "yellow"))
    playing = [worker.playing for worker in workers]
    parts.append((_range(min(playing), max(playing)) + " playing", ""))
    parts.append((f"lag up to {_lag(max(worker.lag for worker in workers))}", "dim"))
    if len({worker.version for worker in workers}) > 1:
        parts.append((f"weights {versions_in_words(workers)}", ""))
    return joined_line(parts, no_wrap=True)


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least}-{most}"


def _short(name: str, most: int) -> str:
    """Cut the middle out of a long name: names of machines often begin alike, and differ at the end."""
    name = shown_line(name)
    if len(name) <= most:
        return name
    end = (most - 1) * 2 // 3
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def joined_line(parts: Sequence[Cell], *, no_wrap: bool = False) -> Text:
    """Join styled texts into one line. With `no_wrap` a long line is cut, else it wraps."""
    line = Text(no_wrap=no_wrap, overflow="ellipsis" if no_wrap else None)
    for text, style in parts:
        line.append(" · " if line else "", "dim").append(text, style)
    return line

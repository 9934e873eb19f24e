"""A table of the chat requests of an external agent, and how each was matched to the episode's history."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.chat_requests import ChatRequest, Delivery
from runner.store.json_values import encode_json
from runner.store.reader import EpisodeRow, RunFile
from runner.trajectory import Trajectory, Turn
from runner.transcript import headline, printable_line

__all__ = ["show_requests"]

FIGURES = ("", "messages", "ms")
COLUMNS = ("", "form", "client", "label", "verdict", "continues", "answered by", *FIGURES[1:], "notes")


def show_requests(run_file: RunFile, console: Console, episode: EpisodeRow | str) -> None:
    """Print the requests of all threads of an episode, in order of arrival."""
    first = run_file.trajectory(episode)
    rows = run_file.rows(task_id=first.task.id, trained=None, superseded=None)
    threads = [run_file.trajectory(row) for row in rows if (row.id, row.attempt) == (first.id, first.attempt)]
    requests = sorted(((request, thread) for thread in threads for request in thread.requests), key=_number)
    console.print(headline(first), soft_wrap=True)
    if not requests:
        console.print("No requests: its environment neither uses Episode.chat nor serves a program.", style="dim")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in FIGURES else "left")
    for request, thread in requests:
        table.add_row(*_cells(request, thread))
    console.print(table)


def _number(pair: tuple[ChatRequest, Trajectory]) -> int:
    return pair[0].number


def _cells(request: ChatRequest, thread: Trajectory) -> list[Text]:
    verdict = request.verdict.value + (f" ({request.again})" if request.again else "")
    parent = "" if request.parent_turn is None else f"{request.parent_agent} {request.parent_turn}"
    turn = next((turn for turn in thread.turns if turn.number == request.turn), None)
    answered = f"{thread.agent} {request.turn}" if request.turn is not None else thread.agent
    notes = [each.value for each in request.tolerated]
    if request.purpose:
        notes.append(f"purpose: {request.purpose}")
    if request.volatile:
        notes.append(f"{request.volatile} lines removed")
    if request.not_granted:
        notes.append(f"not granted {encode_json(dict(request.not_granted))}")
    if request.delivery is not Delivery.DELIVERED:
        notes.append(request.delivery.value)
    if request.error:
        notes.append(request.error.partition("\n")[0])
    cells = [
        str(request.number),
        request.form,
        request.client.partition(" ")[0],
        request.label,
        verdict,
        parent,
        answered,
        str(request.messages),
        _milliseconds(request, turn),
    ]
    return [Text(printable_line(cell)) for cell in [*cells, " · ".join(notes)]]


def _milliseconds(request: ChatRequest, turn: Turn | None) -> str:
    """Milliseconds of the alignment, and until the first id, the last id, and the end of delivery."""
    if turn is None:
        return f"{1e3 * request.align_seconds:.1f}"
    first = turn.timings.queued + turn.timings.first_token
    seconds = (request.align_seconds, first, first + turn.timings.decode, request.seconds)
    return " / ".join(f"{1e3 * each:.1f}" for each in seconds)

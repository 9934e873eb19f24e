"""`deltarunner run`: play an environment's episodes, show how it goes, and say what came of it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from runner.cli.display import Display, PlainDisplay, display_for
from runner.cli.quiet_output import quiet_output
from runner.cli.report import lag_lines, make_console, own_command, quoted, summary_table
from runner.cli.resuming import check_resumable, is_begun
from runner.cli.values import limits_of, pairs, plain_value
from runner.engines.base import Engine
from runner.environment.checks import check_playable
from runner.environment.environment import Environment
from runner.environment.loading import construct, find_environment, short_name
from runner.environment.task_selection import at_once, own_tasks, select
from runner.errors import BadOption, DeltarunnerError, TooManyFailures
from runner.options import UNSET, Concurrency, Sampling
from runner.runs.console import discard
from runner.runs.process import Reporter, on_event_loop
from runner.runs.run import Run
from runner.store.header import Header, OnChange
from runner.store.reader import RunFile
from runner.store.run_folder import next_run_file
from runner.tokens.template import ChatTemplate
from runner.trajectory import Outcome, Trajectory
from runner.transcript import transcript

__all__ = ["RunSettings", "run_command", "vllm_engine"]

FOLDER = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The options of `deltarunner run`, as they were given."""

    environment: str
    episodes: int | None = None
    model: str = "smollm2-135m"
    template: str | None = None
    template_options: tuple[str, ...] = ()
    engine_options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    tasks: Path | None = None
    group_size: int = 1
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    history: str = "append"
    concurrency: int | None = None
    file: Path | None = None
    retry_failed: bool = False
    task: str | None = None
    index: int | None = None
    show: int = 0
    debug: bool = False
    json: bool = False


def vllm_engine(settings: RunSettings) -> Engine:
    """The real engine on the model that was asked for."""
    from runner.engines.vllm.engine import VllmEngine
    from runner.engines.vllm.start import require_vllm

    require_vllm()
    arguments = {name: plain_value(value) for name, value in pairs(settings.engine_options, "--engine-option").items()}
    for name in arguments.keys() & {"model", "template"}:
        raise BadOption(f"--engine-option {name}=...: give --{name}.")
    interval = arguments.get("stream_interval")
    if not isinstance(interval, int | None):
        raise BadOption(f"--engine-option stream_interval={interval}: give a whole number of ids.")
    return VllmEngine(settings.model, template=settings.template, **arguments)


def run_command(settings: RunSettings, make_engine: Callable[[RunSettings], Engine] = vllm_engine) -> int:
    """Play, and return the exit code: 128 and the signal's number where one ended the run early.

    Raises:
        DeltarunnerError: why it could not begin, or ended before its work did.
    """
    told = Told(settings)
    try:
        code = _play(settings, make_engine, told)
    except DeltarunnerError as error:
        told.print(error)
        raise
    told.print()
    return code


def _play(settings: RunSettings, make_engine: Callable[[RunSettings], Engine], told: Told) -> int:
    with redirect_stdout(sys.stderr) if settings.json else nullcontext():
        plan = Plan.of(settings, make_engine)
    with ExitStack() as output:
        # Not while debugging: then what the environment prints belongs on the terminal.
        terminal = None if settings.debug else output.enter_context(quiet_output(told.log))
        stdout = terminal.stdout if terminal else sys.stdout
        stderr = terminal.stderr if terminal else sys.stderr
        show = told.show = Show(plan, make_console(stderr if settings.json else stdout, lasting=True), told.log)
        try:
            code = show.play()
        except DeltarunnerError as error:
            show.results(error)
            raise
        show.results()
    return code


class Told:
    """The last line of `--json`, also of a run that was refused before anything could be shown.

    Attributes:
        log: where the run's log is, or would be.
        show: the run, once there is one.
    """

    def __init__(self, settings: RunSettings) -> None:
        name = settings.file or FOLDER / f"{short_name(settings.environment)}.db"
        self.log = name.with_name(f"{name.stem}.log") if name.name else Path(".log")
        self.show: Show | None = None
        self._settings = settings

    def print(self, failure: DeltarunnerError | None = None) -> None:
        """Print it, if it was asked for."""
        if self._settings.json:
            line = orjson.dumps(self._as_dict(failure), option=orjson.OPT_NON_STR_KEYS)
            try:
                print(line.decode(), flush=True)
            except BrokenPipeError:  # a reader who left changes nothing of what the run came to
                discard(sys.stdout)

    def _as_dict(self, failure: DeltarunnerError | None) -> dict[str, Any]:
        run = self.show.run if self.show else None
        received = self.show.received if self.show else None
        return {
            "environment": self._settings.environment,
            "model": self._settings.model,
            "file": str(run.file) if run and run.file else None,
            "log": str(self.log),
            "stored_before": self.show.earlier if self.show else 0,
            "signal": received.name if received else None,
            "error": {"kind": type(failure).__name__, "message": str(failure)} if failure else None,
            "exit_code": failure.exit_code if failure else (128 + received if received else 0),
            "summary": run.summary.as_dict() if run else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be played: everything that can be checked before the engine is started."""

    settings: RunSettings
    environment: Environment[Any]
    engine: Engine
    options: Mapping[str, Any]
    total: int | None

    @classmethod
    def of(cls, settings: RunSettings, make_engine: Callable[[RunSettings], Engine]) -> Plan:
        """The plan.

        Raises:
            BadInput: something given cannot be used; the message names it and the fix.
        """
        environment = construct(find_environment(settings.environment), pairs(settings.settings, "--set"))
        check_playable(environment)
        if settings.template is not None:
            ChatTemplate.load(settings.template)
        limits = limits_of(settings.limits)
        tasks, total = _tasks(settings, environment)
        options = {
            "tasks": tasks,
            "group_size": settings.group_size,
            "sampling": Sampling(**{k: UNSET if v is None else v for k, v in settings.sampling.items()}),
            "limits": limits.over(limits.defaults()).lifted() if settings.debug else limits,
            "concurrency": Concurrency(episodes=settings.concurrency or (1 if settings.debug else None)),
            "seed": settings.seed,
            "history": settings.history,
            "template_options": {
                name: plain_value(value)
                for name, value in pairs(settings.template_options, "--template-option").items()
            },
        }
        if settings.file is not None:
            check_resumable(settings.file, environment, options, model=settings.model)
        return cls(
            settings=settings, environment=environment, engine=make_engine(settings), options=options, total=total
        )

    @property
    def title(self) -> str:
        return f"{short_name(self.settings.environment)} on {self.settings.model}"


def _tasks(settings: RunSettings, environment: Environment[Any]) -> tuple[Any, int | None]:
    """The tasks, and how many episodes that makes where it is known."""
    size = settings.group_size
    if settings.retry_failed and settings.task is not None and settings.file is None:
        raise BadOption("--retry-failed --task: a single task is kept only where --file names a file; give one.")
    if settings.index is not None and settings.index >= size:
        raise BadOption(f"--index {settings.index}: a group has the episodes 0 to {size - 1} (--group-size {size}).")
    source: Any = settings.tasks if settings.tasks is not None else own_tasks(environment)
    each = 1 if settings.index is not None else size
    if settings.task is not None:
        return at_once(select(source, environment.task_class(), only=settings.task), source, environment), each
    if settings.episodes is None:
        known = len(source) * each if hasattr(source, "__len__") else None
        return select(source, environment.task_class()), known
    if settings.episodes % each:
        raise BadOption(
            f"--episodes {settings.episodes} is no multiple of --group-size {size}; groups are played whole."
        )
    chosen = select(source, environment.task_class(), most=settings.episodes // each)
    return at_once(chosen, source, environment) if settings.tasks is not None else chosen, settings.episodes


class Show(Reporter):
    """One run of the command line, from its first line to its last.

    Attributes:
        run: what is played; None until it could be made.
        received: the signal that ended it early.
        earlier: episodes that the run file had already.
    """

    def __init__(self, plan: Plan, console: Console, log: Path) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._console = console
        self._log = log
        self._display = self._make_display()
        self.run: Run | None = None
        self._kept: list[Trajectory] = []
        self.received: signal.Signals | None = None
        self.earlier = 0

    def _make_display(self) -> Display:
        kind = PlainDisplay if self._settings.debug else display_for
        display = kind(self._console, self._plan.title)
        display.total = self._plan.total
        return display

    def play(self) -> int:
        """Play the run and return the exit code."""
        self._console.print(Text(f"log   {self._log} (what vLLM and the environment print)"), soft_wrap=True)
        _begin_log(self._log)
        self._resolve_model()
        self.received = on_event_loop(self._play)
        if self.received is not None:
            return 128 + self.received
        self._raise_if_nothing_succeeded()
        return 0

    def _resolve_model(self) -> None:
        """Now, since it may take long and says so: the demo model is converted once, and files may be fetched."""
        from runner.engines.vllm.engine import VllmEngine
        from runner.models import resolve_model

        if isinstance(self._plan.engine, VllmEngine):
            resolve_model(self._settings.model, say=self.say)

    async def _play(self) -> signal.Signals | None:
        async with AsyncExitStack() as stack:
            if self._settings.debug:
                await self._start_quietly(stack)
            plan, again = self._plan, self._settings.retry_failed
            self.run = run = Run(plan.environment, plan.engine, file=self._file(), retry_failed=again, **plan.options)
            if self._settings.index is not None:
                run.indices = (self._settings.index,)
            return await self._display.supervise(run, self)

    async def _start_quietly(self, stack: AsyncExitStack) -> None:
        self.say(f"{self._plan.title}: starting the engine")
        with quiet_output(self._log):
            await stack.enter_async_context(self._plan.engine)

    def finished(self, trajectory: Trajectory) -> None:
        """Keep it, if it is one of those that are shown at the end."""
        wanted = self._settings.show or (self._settings.group_size if self._settings.task is not None else 0)
        # By id and not by time: the first to finish are the shortest, which are not typical.
        self._kept = sorted([*self._kept, trajectory], key=_by_id)[:wanted]
        self._display.finished(trajectory)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._display.say(line)

    def restore(self) -> None:
        """Leave the terminal as it was found."""
        self._display.restore()

    def _file(self) -> Path | Callable[[Header], Path] | None:
        if self._settings.task is not None and self._settings.file is None:
            return None
        return self._name_file

    def _name_file(self, header: Header) -> Path:
        name, again = short_name(self._settings.environment), self._settings.retry_failed
        path = self._settings.file or next_run_file(FOLDER, name, header, also_complete=again)
        if not is_begun(path):
            self.say(f"file  {path}")
            return path
        with RunFile(path) as stored:
            self.earlier = sum(n for outcome, n in stored.outcomes().items() if not outcome.played_again(failed=again))
            changes = [str(change) for change in stored.header.changes(header) if change.meaning is OnChange.WARN]
        self._display.before = self.earlier
        self.say(f"file  {path}, which has {self.earlier} episodes already: going on")
        for change in changes:
            self.say(f"      not as it was: {change}")
        return path

    def _raise_if_nothing_succeeded(self) -> None:
        assert self.run is not None
        summary = self.run.summary
        unplayable = summary.failed + (summary.outcomes[Outcome.CONTEXT_LIMIT] if not summary.turns else 0)
        if not summary.episodes or unplayable < summary.episodes:
            return
        last = self._display.last_fault or ", ".join(summary.outcomes)
        raise TooManyFailures(f"none of the {summary.episodes} episodes could be scored; the last one: {last}")

    # --- afterwards

    def results(self, failure: DeltarunnerError | None = None) -> None:
        """Print what came of it."""
        run = self.run
        if run is None or not run.summary.elapsed:
            return
        for trajectory in self._kept:
            self._console.print()
            for line in transcript(trajectory, run.engine.tokenizer.decode, brief=self._settings.task is None):
                self._console.print(line, soft_wrap=not self._console.is_terminal)
        self._console.print()
        self._console.print(summary_table(run.summary.as_dict(), earlier=self.earlier))
        for line in lag_lines(run.lag):
            self._console.print(line, soft_wrap=True)
        if run.file is not None:
            self._console.print()
            self._next(run.file, failed=failure is not None)

    def _next(self, file: Path, *, failed: bool) -> None:
        command = own_command()
        with RunFile(file) as stored:
            complete = stored.complete
            example = self._kept[0].id if self._kept else next((row.id for row in stored), None)
        lines = []
        if not complete or failed:
            lines.append(("the same command again", "goes on from here"))
        if self.run is not None and self.run.summary.failed:
            lines.append(("the same command with --retry-failed", "plays the failed ones again"))
        if example is not None:
            lines.append((f"{command} show {quoted(file)}", "all episodes"))
            lines.append((f"{command} show {quoted(file)} {quoted(example)}", "one of them, to the last token"))
            lines.append((f"{command} export {quoted(file)} --format parquet", "to train on"))
        lines.append((f"{command} list", "other environments; README.md: one of your own"))
        width = max(len(line) for line, _ in lines)
        for number, (line, what) in enumerate(lines):
            label = "" if number else "next"
            shown = Text.assemble(f"{label:6}", (line.ljust(width), "bold"), (f"  {what}", "dim"))
            self._console.print(shown, soft_wrap=True)


def _by_id(trajectory: Trajectory) -> list[tuple[int, str]]:
    """Numbers by their value: task 9 comes before task 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", trajectory.id)]


def _begin_log(log: Path) -> None:
    """Tell the launches in a log apart."""
    with quiet_output(log):
        print(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {' '.join(sys.argv)}")

"""`deltarunner run`: play an environment's episodes, show the progress, and print the results."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from runner.cli.display import PlainDisplay, display_for
from runner.cli.name_values import parse_limits, parse_logit_bias, parse_pairs, parse_values
from runner.cli.quiet_output import quiet_output
from runner.cli.report import lag_lines, make_console, naming_slow_code, own_command, quoted, summary_table
from runner.cli.run_engines import agent_engines, engine_with_workers
from runner.cli.settings import RunSettings
from runner.engines.base import BaseEngine, Engine
from runner.environment.checks import check_playable
from runner.environment.environment import Environment
from runner.environment.loading import construct_named, short_name
from runner.environment.task_checks import TaskChecks
from runner.environment.task_feed import Tasks, environment_tasks
from runner.environment.task_selection import check_ahead, find_selected, select
from runner.errors import BadOption, DeltarunnerError, TooManyFailures
from runner.interop.mixture import Mixture
from runner.logs import check_level, log_to_file
from runner.options import Concurrency, Sampling
from runner.quantities import counted
from runner.report.row_conditions import check_threshold_names, require_thresholds
from runner.runs.event_loop import on_event_loop, supervise
from runner.runs.options import RunOptions
from runner.runs.reporter import Reporter, discard
from runner.runs.run import Run
from runner.runs.run_header import check_resumable, describe_configuration, restore_choices
from runner.store.header import Header, OnChange
from runner.store.reader import RunFile
from runner.store.run_folder import header_to_resume, holds_run, next_run_file, stored_header
from runner.tokens.template import ChatTemplate
from runner.trajectory import Outcome, Trajectory
from runner.transcript import transcript

__all__ = ["ConsoleRun", "RunPlan", "play_plan", "real_engine", "run_command", "run_options"]

FOLDER = Path("runs")

_SERVER_OPTIONS = ("dialect", "name", "places", "stream_interval", "timeout")
"""Names of the arguments of `RemoteEngine` that --engine-option can set."""

_API_OPTIONS = frozenset(
    {"context", "places", "max_tokens_field", "reasoning_field", "leave_out", "extra_body", "timeout"}
)
"""Names of the arguments of `ChatEngine` that --engine-option can set."""


def real_engine(settings: RunSettings) -> BaseEngine:
    """Return the engine of the settings: vLLM, a server or a chat API. Raise BadInput if it cannot be constructed."""
    arguments = parse_values(settings.engine_options, "--engine-option")
    if settings.api_model is not None:
        return _chat_engine(settings, arguments)
    if settings.api_url is not None:
        raise BadOption(f"--api-url {settings.api_url}: give --api-model as well, the model's name in that API.")
    for name in arguments.keys() & {"model", "template"}:
        raise BadOption(f"--engine-option {name}=...: give --{name} instead.")
    return _vllm_engine(settings, arguments) if settings.server is None else _remote_engine(settings, arguments)


def _remote_engine(settings: RunSettings, arguments: dict[str, Any]) -> Engine:
    from runner.engines.remote.engine import RemoteEngine
    from runner.engines.remote.server import require_aiohttp

    require_aiohttp()
    unknown = sorted(arguments.keys() - _SERVER_OPTIONS)
    if unknown:
        raise BadOption(
            f"--engine-option {unknown[0]}=...: with --server the options are {', '.join(_SERVER_OPTIONS)}; give the "
            "arguments of vLLM where the server is started."
        )
    assert settings.server is not None
    key = settings.server_key or None
    return RemoteEngine(settings.server, settings.model, template=settings.template, api_key=key, **arguments)


def _chat_engine(settings: RunSettings, arguments: dict[str, Any]) -> BaseEngine:
    from runner.engines.chat.engine import ChatEngine
    from runner.engines.chat.server import require_openai

    require_openai()
    for name in ("server", "template", "template_options", "tool_format"):
        if getattr(settings, name):
            raise BadOption(
                f"--{name.replace('_', '-')} and --api-model: the API applies its own template; leave this option out."
            )
    unknown = sorted(arguments.keys() - _API_OPTIONS)
    if unknown:
        raise BadOption(
            f"--engine-option {unknown[0]}=...: unknown with --api-model; give one of "
            f"{', '.join(sorted(_API_OPTIONS))}."
        )
    assert settings.api_model is not None
    return ChatEngine(settings.api_model, base_url=settings.api_url, api_key=settings.api_key or None, **arguments)


def _vllm_engine(settings: RunSettings, arguments: dict[str, Any]) -> Engine:
    from runner.engines.vllm.engine import VllmEngine
    from runner.engines.vllm.start import require_vllm

    if settings.workers is None or not (settings.cluster or os.environ.get("RAY_ADDRESS")):
        require_vllm()  # workers on a cluster have their own installation
    interval = arguments.get("stream_interval")
    if not isinstance(interval, int | None):
        raise BadOption(f"--engine-option stream_interval={interval}: give a whole number of ids.")
    return VllmEngine(settings.model, template=settings.template, **arguments)


def run_command(settings: RunSettings, make_engine: Callable[[RunSettings], BaseEngine] = real_engine) -> int:
    """Play the run, and return the exit code; after a signal, it is 128 plus the number of the signal."""
    return play_plan(settings, lambda: RunPlan.of(settings, make_engine))


def play_plan(
    settings: RunSettings, make_plan: Callable[[], RunPlan], on_start: Callable[[ConsoleRun], None] | None = None
) -> int:
    """Play a plan and return the exit code; `on_start` is called before anything is played."""
    check_level(settings.log_level)
    log = log_path(settings)
    shown: ConsoleRun | None = None
    try:
        with naming_slow_code(), redirect_stdout(sys.stderr) if settings.json else nullcontext():
            plan = make_plan()
        with _console(settings, log) as console:
            shown = ConsoleRun(plan, console, log)
            if on_start is not None:
                on_start(shown)
            code = shown.play()
    except DeltarunnerError as error:
        _print_json(settings, log, shown, error)
        raise
    _print_json(settings, log, shown, None)
    return code


def log_path(settings: RunSettings) -> Path:
    """The path of the run's log. It has no number, since the run file gets its number later, with its header."""
    name = settings.file or FOLDER / f"{short_name(settings.environment_name)}.db"
    return name.with_name(f"{name.stem}.log") if name.name else Path(".log")


@contextmanager
def _console(settings: RunSettings, log: Path) -> Iterator[Console]:
    """The console for the user; all other output goes to the log."""
    # With --debug the terminal shows what the environment prints.
    with nullcontext() if settings.debug else quiet_output(log) as terminal:
        stdout, stderr = (terminal.stdout, terminal.stderr) if terminal else (sys.stdout, sys.stderr)
        yield make_console(stderr if settings.json else stdout, reader_optional=True)


def _print_json(settings: RunSettings, log: Path, shown: ConsoleRun | None, failure: DeltarunnerError | None) -> None:
    """With `--json`, print the results as one line of JSON, also if an error ended the run before its start."""
    if not settings.json:
        return
    run, received = (shown.run, shown.received) if shown else (None, None)
    outcome = {
        "environment": settings.environment,
        "model": settings.model_name,
        "file": str(run.file) if run and run.file else None,
        "log": str(log),
        "stored_before": shown.earlier if shown else 0,
        "signal": received.name if received else None,
        "error": {"kind": type(failure).__name__, "message": str(failure)} if failure else None,
        "exit_code": failure.exit_code if failure else (128 + received if received else 0),
        "summary": run.summary.as_dict() if run else None,
    }
    try:
        print(orjson.dumps(outcome, option=orjson.OPT_NON_STR_KEYS).decode(), flush=True)
    except BrokenPipeError:  # a closed pipe does not change the result of the run
        discard(sys.stdout)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run before its engine starts, checked as far as possible."""

    settings: RunSettings
    environment: Environment[Any]
    engine: BaseEngine
    """The engine, which is not entered yet."""
    options: RunOptions
    """The options without `file` and `retry_failed`; the file name depends on the run's header."""
    total: int | None
    """The number of episodes; None if unknown."""

    @classmethod
    def of(cls, settings: RunSettings, make_engine: Callable[[RunSettings], BaseEngine]) -> RunPlan:
        """Return the plan for these settings. Raise an error such as BadOption if they are invalid."""
        given = parse_pairs(settings.settings, "--set")
        if settings.others:
            environment: Environment[Any] = _mixture(settings, given)
        else:
            environment = construct_named(settings.environment_name, given)
        return cls.of_environment(settings, environment, make_engine)

    @classmethod
    def of_environment(
        cls, settings: RunSettings, environment: Environment[Any], make_engine: Callable[[RunSettings], BaseEngine]
    ) -> RunPlan:
        """Return the plan for an environment object; raise the same errors as `of`."""
        check_playable(environment)
        if settings.template is not None:
            ChatTemplate.load(settings.template)
        options = run_options(settings)
        check_threshold_names(settings.fail_under or (), environment.scorers, options.group_size)
        tasks, total = _tasks(settings, environment, options.group_size)
        options = replace(options, tasks=tasks)
        if settings.file is not None:
            # The file is checked before the engine starts, since the start takes long.
            check_resumable(settings.file, environment, options, model=settings.model_name)
        return cls(
            settings=settings,
            environment=environment,
            engine=engine_with_workers(settings, make_engine),
            options=options,
            total=total,
        )

    @property
    def title(self) -> str:
        settings = self.settings
        where = settings.server if settings.api_model is None else settings.api_url
        at = "" if where is None else f" at {where}"
        given = settings.engine_options or ()
        sizes = "".join(f", {option}" for option in given if option.partition("=")[0].endswith("_parallel_size"))
        workers = "" if settings.workers is None else f", {settings.workers} workers"
        return f"{short_name(settings.environment_name)} on {settings.model_name}{at}{sizes}{workers}"


def _mixture(settings: RunSettings, given: Mapping[str, str]) -> Mixture:
    """The mixture of several environments. A setting names its environment first: `--set calculator.examples=1`."""
    own: dict[str, dict[str, str]] = {name: {} for name, _, _ in settings.mixed()}
    for name, value in given.items():
        part, dot, rest = name.partition(".")
        if not dot or part not in own:
            named = ", ".join(f"{each}.NAME" for each in own)
            raise BadOption(f"--set {name}: begin with an environment of the mixture: {named}.")
        own[part][rest] = value
    return Mixture({name: (construct_named(full, own[name]), weight) for name, full, weight in settings.mixed()})


def run_options(settings: RunSettings) -> RunOptions:
    """The options of the run without tasks and file; raise BadOption if one is invalid."""
    limits = parse_limits(settings.limits)
    given: dict[str, Any] = {name: getattr(settings, name) for name in ("group_size", "seed", "history", "listen")}
    options = RunOptions(
        **{name: value for name, value in given.items() if value is not None},
        sampling=_sampling(settings),
        engines=agent_engines(settings),
        limits=limits.over(limits.defaults()).lifted() if settings.debug else limits,
        concurrency=Concurrency(episodes=settings.concurrency or (1 if settings.debug else None)),
        template_options=parse_values(settings.template_options, "--template-option"),
        tool_format=settings.tool_format,
    )
    if settings.index is None:
        return options
    size = options.group_size
    if settings.index >= size:
        raise BadOption(f"--index {settings.index}: the episodes of a group are 0 to {size - 1}; raise --group-size.")
    return replace(options, indices=(settings.index,))


def _sampling(settings: RunSettings) -> Sampling:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in (settings.sampling or {}).items()
    }
    if "logit_bias" in given:
        given["logit_bias"] = parse_logit_bias(given["logit_bias"])
    return Sampling(**given)


def _tasks(settings: RunSettings, environment: Environment[Any], size: int) -> tuple[Tasks, int | None]:
    """The tasks, checked as far as possible before the engine starts, and the number of episodes.

    Each task has `size` episodes, or one episode with --index. The number of episodes is None if it is unknown.
    """
    if settings.retry_failed and settings.task is not None and settings.file is None:
        raise BadOption("--retry-failed --task: a single task is stored only with --file; give a file.")
    source: Any = settings.tasks if settings.tasks is not None else environment_tasks(environment)
    each = 1 if settings.index is not None else size
    task_class = environment.task_class()
    checks = TaskChecks(environment, is_kept=settings.task is None or settings.file is not None)
    if settings.task is not None:
        return find_selected(select(source, task_class, only=settings.task), source, environment, checks), each
    if settings.episodes is None:
        chosen, known = check_ahead(select(source, task_class), source, environment, checks)
        return chosen, None if known is None else known * each
    if settings.episodes % each:
        raise BadOption(
            f"--episodes {settings.episodes} is not a multiple of --group-size {size}: give a multiple of it."
        )
    most = settings.episodes // each
    chosen, _ = check_ahead(select(source, task_class, most=most), source, environment, checks, most=most)
    return chosen, settings.episodes


class ConsoleRun(Reporter):
    """A run of the command line, with everything that it prints."""

    def __init__(self, plan: RunPlan, console: Console, log: Path) -> None:
        self.run: Run | None = None
        """The run; None until it is created."""
        self.received: signal.Signals | None = None
        """The signal that ended the run early; None if no signal did."""
        self.earlier = 0
        """The number of episodes in the run file that earlier launches finished."""
        self._plan = plan
        self._settings = plan.settings
        self._console = console
        self._log = log
        self._display = (PlainDisplay if plan.settings.debug else display_for)(console, plan.title)
        self._display.total = plan.total
        self._kept: list[Trajectory] = []

    def play(self) -> int:
        """Play the run, print the results, and return the exit code. Errors are raised once the results are printed."""
        try:
            self.say(f"log   {self._log} (what vLLM and the environment print)")
            with quiet_output(self._log):  # a line that separates the launches in one log
                print(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {self._command()}")
            with log_to_file(self._log, self._settings.log_level, secrets=self._settings.keys):
                self._require_tool_format()
                self._resolve_model()
                self.received = on_event_loop(self._play)
            if self.received is None:
                self._raise_if_nothing_succeeded()
        except DeltarunnerError as error:
            self._print_results(error)
            raise
        self._print_results()
        if self.received is None and self.run is not None:
            require_thresholds(self.run.summary.as_dict(), self._settings.fail_under or ())
        return 0 if self.received is None else 128 + self.received

    def _command(self) -> str:
        """The command line with keys hidden, for the log."""
        command = " ".join(sys.argv)
        for key in self._settings.keys:
            command = command.replace(key, "***")
        return command

    def _resolve_model(self) -> None:
        """Download or convert the model if an engine needs it here. This may take long, and prints progress."""
        from runner.engines.remote.engine import RemoteEngine
        from runner.engines.vllm.engine import VllmEngine
        from runner.models import resolve_model
        from runner.runs.player import PlayingEngine

        engine = self._plan.engine
        if isinstance(engine, PlayingEngine):  # workers on this machine need the model
            engine = engine.engine
        if isinstance(engine, VllmEngine | RemoteEngine):
            resolve_model(self._settings.model, say=self.say)

    def _require_tool_format(self) -> None:
        """Raise BadOption if the tool format is unknown, before anything is downloaded."""
        if self._plan.options.tool_format is not None:
            from runner.engines.vllm.call_reader import require_format

            with quiet_output(self._log):
                require_format(self._plan.options.tool_format)

    async def _play(self) -> signal.Signals | None:
        # A single task is for inspection, so it is stored only with --file.
        kept = self._settings.task is None or self._settings.file is not None
        if kept:
            self._restore_stored_choices()
        async with AsyncExitStack() as stack:
            if self._settings.debug:  # the output of a starting engine still goes to the log
                self.say(f"{self._plan.title}: starting the engine")
                with quiet_output(self._log):
                    await stack.enter_async_context(self._plan.engine)
                for note in self._plan.engine.notes:
                    self.say(note)
            plan, again = self._plan, self._settings.retry_failed
            options = replace(plan.options, file=self._name_file if kept else None, retry_failed=again)
            self.run = Run(plan.environment, plan.engine, **options.by_name())
            return await supervise(self.run, self)

    def _restore_stored_choices(self) -> None:
        """Before the engine starts, restore the choices that it made when the run to be resumed began."""
        plan, settings = self._plan, self._settings
        if settings.file is not None:
            stored = stored_header(settings.file)
        else:
            given = describe_configuration(plan.environment, plan.options, now=datetime.now().astimezone())
            name, again = short_name(settings.environment_name), settings.retry_failed
            stored = header_to_resume(FOLDER, name, given, model=settings.model_name, also_complete=again)
        if stored is not None:
            restore_choices(stored, plan.engine, {})

    async def watch(self, run: Run) -> None:
        await self._display.watch(run)

    def finished(self, trajectory: Trajectory) -> None:
        """Keep the trajectory if its transcript may be shown at the end."""
        wanted = self._settings.show or (self._plan.options.group_size if self._settings.task is not None else 0)
        # The transcripts are chosen by id and not by time, since the shortest episodes finish first.
        self._kept = sorted([*self._kept, trajectory], key=_by_id)[:wanted]
        self._display.finished(trajectory)

    def say(self, line: str) -> None:
        self._display.say(line)

    def restore(self) -> None:
        self._display.restore()

    def _name_file(self, header: Header) -> Path:
        name, again = short_name(self._settings.environment_name), self._settings.retry_failed
        path = self._settings.file or next_run_file(FOLDER, name, header, also_complete=again)
        if not holds_run(path):
            self.say(f"file  {path}")
            return path
        with RunFile(path) as stored:
            self.earlier = sum(n for outcome, n in stored.outcomes().items() if not outcome.played_again(failed=again))
            changes = [str(change) for change in stored.header.changes(header) if change.meaning is OnChange.WARN]
        self._display.before = self.earlier
        self.say(f"file  {path}: resuming, {counted(self.earlier, 'episode')} done")
        for change in changes:
            self.say(f"      changed: {change}")
        return path

    def _raise_if_nothing_succeeded(self) -> None:
        assert self.run is not None
        summary = self.run.summary
        unplayable = summary.failed + (summary.outcomes[Outcome.CONTEXT_LIMIT] if not summary.turns else 0)
        if not summary.episodes or unplayable < summary.episodes:
            return
        last = self._display.last_fault or ", ".join(summary.outcomes)
        raise TooManyFailures(f"no episode of {summary.episodes} was scored; correct the last fault: {last}")

    # --- afterwards

    def _print_results(self, failure: DeltarunnerError | None = None) -> None:
        run = self.run
        if run is None or not run.summary.elapsed:
            return
        decode = run.engine.tokenizer.decode if isinstance(run.engine, Engine) else None
        for trajectory in self._kept:
            self._console.print()
            for line in transcript(trajectory, decode, brief=self._settings.task is None):
                self._console.print(line, soft_wrap=not self._console.is_terminal)
        self._console.print()
        table = summary_table(run.summary.as_dict(), earlier=self.earlier, verbose=self._settings.verbose)
        self._console.print(table)
        for line in lag_lines(run.lag):
            self._console.print(line, soft_wrap=True)
        if run.file is not None:
            self._console.print()
            self._print_next(run.file, failed=failure is not None)

    def _print_next(self, file: Path, *, failed: bool) -> None:
        command = own_command()
        with RunFile(file) as stored:
            complete, trains = stored.complete, len(stored) > 0
            example = self._kept[0].id if self._kept else next((row.id for row in stored.rows(trained=None)), None)
        lines = []
        if (not complete or failed) and example is not None:  # without episodes there is nothing to resume
            lines.append(("the same command again", "resumes this run"))
        if self.run is not None and self.run.summary.failed:
            lines.append(("the same command with --retry-failed", "plays the failed episodes again"))
        if example is not None:
            lines.append((f"{command} show {quoted(file)}", "all episodes"))
            lines.append((f"{command} show {quoted(file)} {quoted(example)}", "one of them, to the last token"))
            if trains:
                lines.append((f"{command} export {quoted(file)} --format parquet", "training data"))
        lines.append((f"{command} list", "other environments"))
        lines.append((f"{command} new NAME", "a project for an environment of your own"))
        width = max(len(line) for line, _ in lines)
        for number, (line, what) in enumerate(lines):
            label = "" if number else "next"
            shown = Text.assemble(f"{label:6}", (line.ljust(width), "bold"), (f"  {what}", "dim"))
            self._console.print(shown, soft_wrap=True)


def _by_id(trajectory: Trajectory) -> list[tuple[int, str]]:
    """A sort key with which task 9 comes before task 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", trajectory.id)]

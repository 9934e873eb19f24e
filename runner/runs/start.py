"""The start of a run: engines, run file, shared objects and tasks, in the order of their dependencies."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from runner.concurrency.loop_lag import LagMonitor
from runner.concurrency.threads import Job
from runner.concurrency.user_code import describe_error
from runner.engines.base import BaseEngine, width_of
from runner.engines.sharing import ensure_running
from runner.environment.task_checks import TaskChecks
from runner.environment.task_feed import TaskFeed, environment_tasks
from runner.environment.task_selection import SelectedTasks
from runner.episode.shared import RunShared
from runner.errors import BadTask, DeltarunnerError
from runner.logs import logger_for
from runner.runs.active_run import ActiveRun
from runner.runs.player import EpisodePlayer, LocalPlayer, PlayingEngine, WorkerSetup
from runner.runs.preflight import require_sampling
from runner.runs.run_header import describe_run, restore_choices
from runner.runs.run_setup import RunSetup
from runner.runs.staleness import Staleness
from runner.runs.state import RunState
from runner.store.header import Header
from runner.store.json_values import class_name
from runner.store.run_folder import stored_header
from runner.store.writer import RunWriter

__all__ = ["Start"]

log = logger_for("runs")

LOOK_AHEAD_SECONDS = 10
"""Longest time for which the start waits for the first task of an asynchronous `tasks()`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Start:
    """The start of a run, which `enter` carries out."""

    setup: RunSetup
    """Environment, engines and options."""
    lag: LagMonitor
    """The monitor of the event loop, entered after the engines."""
    state: RunState
    """The state of the run, for faults and the path of the file."""

    async def enter(self, exit_stack: AsyncExitStack) -> ActiveRun:
        """Enter engines, file and shared objects, and return a run that is ready to play."""
        setup = self.setup
        options, engine = setup.options, setup.engines[0]
        exit_stack.callback(setup.workers.close)
        log.info("run of %s with %s", class_name(type(setup.environment)), options.summary())
        await setup.check_options()
        await self._restore_choices()
        await self._check_given_tasks()
        with self.state.waiting_for("lifespan()"):
            resources = await setup.open_resources(exit_stack)
        with self.state.waiting_for("tasks()"):
            feed = await exit_stack.enter_async_context(await self._feed())
            await self._look_ahead(feed)
        sent = engine.sent(setup) if isinstance(engine, PlayingEngine) else None
        # The engines start first, since the header and the adapters come from running engines.
        for each in setup.engines:
            if sent is None or each not in sent.worker_engines:
                await self._enter_engine(exit_stack, each)
        if sent is not None:
            setup = setup.with_others(await exit_stack.enter_async_context(sent.engines()))
        staleness = Staleness(engine, options.max_version_lag)
        for part in setup.environment.parts().values():
            require_sampling(engine, options.sampling.over(part.sampling))
        await exit_stack.enter_async_context(self.lag)
        now = datetime.now().astimezone()
        # The templates are checked before the header is made, since the header's turn format comes from rendering them.
        await setup.check_templates(now)
        writer = await exit_stack.enter_async_context(await self._writer(setup, now))
        self._log_file(writer)
        # Templates of a resumed run get the time of its first launch.
        clock = writer.header.clock
        shared, faults = await setup.share(clock, *resources)
        self.state.add_faults(faults)
        self.state.summary.repeats_tasks = feed.repeatable
        player = await self._player(exit_stack, sent, shared, clock)
        exit_stack.enter_context(staleness.cancelling(self.state.in_flight))
        return ActiveRun(
            options=setup.options,
            engines=setup.engines,
            shared=shared,
            player=player,
            writer=writer,
            feed=feed,
            state=self.state,
            staleness=staleness,
        )

    async def _enter_engine(self, exit_stack: AsyncExitStack, engine: BaseEngine) -> None:
        name = type(engine).__name__
        if engine.running:
            log.info("engine %s is already running", name)
        began = time.monotonic()
        try:
            await exit_stack.enter_async_context(ensure_running(engine))
        except Exception as error:
            log.error("engine %s failed to start after %.1f s: %s", name, time.monotonic() - began, error)
            raise
        log.info("engine %s entered after %.1f s", name, time.monotonic() - began)
        for note in engine.notes:
            log.info("engine %s: %s", name, note)

    def _log_file(self, writer: RunWriter) -> None:
        if writer.path is None:
            log.info("no run file")
        else:
            log.info("run file %s: %s", writer.path, "resumed" if writer.resumed else "new")
        if log.isEnabledFor(logging.INFO):
            log.info("header: %s", _without_templates(writer.header).to_json())
        for change in writer.warnings:
            log.warning("run file %s: changed since it was begun: %s", writer.path, change)

    async def _restore_choices(self) -> None:
        """Restore the choices that the engines made in the run that is resumed."""
        options = self.setup.options
        # If `file` is a function, the caller has restored the choices.
        if options.file is None or callable(options.file):
            return
        look = partial(stored_header, Path(options.file))
        stored = await self.setup.workers.call(Job(look, "run header"))
        if stored is not None:
            restore_choices(stored, self.setup.engines[0], options.engines)

    async def _player(
        self, exit_stack: AsyncExitStack, sent: WorkerSetup | None, shared: RunShared, clock: datetime
    ) -> EpisodePlayer:
        width = self.setup.options.concurrency.episodes
        if sent is not None:
            return await exit_stack.enter_async_context(sent.player(shared, clock, width, self.state.add_fault))
        return LocalPlayer(shared, width or width_of(self.setup.engines[0]))

    async def _writer(self, setup: RunSetup, now: datetime) -> RunWriter:
        state = self.state
        options = setup.options
        describe = partial(describe_run, setup.environment, setup.engines[0], options, now=now)
        # With a file, the header calls git, which takes milliseconds, so it is created in a thread.
        header = describe() if options.file is None else await setup.workers.call(Job(describe, "run header"))
        if callable(options.file):
            state.file = options.file(header)
        classes = {name: part.task_class() for name, part in setup.environment.parts().items()}
        return RunWriter(state.file, header, task_class=classes, retry_failed=options.retry_failed)

    async def _check_given_tasks(self) -> None:
        """Check the tasks of a file or a list that was given to the run."""
        setup = self.setup
        checks = TaskChecks(setup.environment, is_kept=setup.options.file is not None)
        await setup.workers.call(Job(partial(checks.check_known, setup.options.tasks), "tasks()"))

    async def _feed(self) -> TaskFeed:
        """Return the feed of tasks. `tasks()` may read the resources that `lifespan()` opened."""
        setup, tasks = self.setup, self.setup.options.tasks
        is_kept = setup.options.file is not None
        if tasks is None:
            # `tasks()` is called in a thread, since it may load all tasks.
            own = partial(environment_tasks, setup.environment)
            tasks = await setup.workers.call(Job(own, "tasks()"))
            checks = TaskChecks(setup.environment, is_kept=is_kept)
            await setup.workers.call(Job(partial(checks.check_known, tasks), "tasks()"))
        return TaskFeed(tasks, setup.environment, workers=setup.workers, is_kept=is_kept)

    async def _look_ahead(self, feed: TaskFeed) -> None:
        """Take the first task of `tasks()`, so that its error appears before an engine starts."""
        given = self.setup.options.tasks
        # A source that the caller passed may wait for an action that the caller takes only after the start.
        if given is not None and not isinstance(given, SelectedTasks):
            return
        try:
            await feed.look_ahead(LOOK_AHEAD_SECONDS)
        except DeltarunnerError:
            raise
        except (Exception, SystemExit) as error:
            raise BadTask(f"tasks() raised {describe_error(error)}") from error


def _without_templates(header: Header) -> Header:
    """Return the header without the text of chat templates, which would fill a log."""

    def short(template: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in template.items() if name in ("name", "fingerprint")}

    engines = {name: {**engine, "template": short(engine["template"])} for name, engine in header.engines.items()}
    return replace(header, template=short(header.template), engines=engines)

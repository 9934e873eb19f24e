"""Starts a run: its engines, its file, what its episodes share, and its tasks, each when what it needs is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from runner.concurrency.loop_lag import LagMonitor
from runner.concurrency.threads import Job, Workers
from runner.endpoint.server import EndpointServer
from runner.engines.base import BaseEngine, Engine
from runner.engines.message_engine import MessageEngine
from runner.engines.sharing import running
from runner.environment.checks import check_tools
from runner.environment.environment import Environment
from runner.environment.lifespan import lifespan_of
from runner.environment.task_feed import TaskFeed, own_tasks
from runner.episode.key import MAIN
from runner.episode.model import ChatModel, MessageModel, Model
from runner.episode.shared import RunShared
from runner.errors import BadOption
from runner.options import Limits
from runner.parsing.foreign import NamedReader
from runner.runs.describe import describe_run
from runner.runs.options import RunOptions
from runner.runs.preflight import check_appends, check_templates, require_sampling
from runner.runs.staleness import Staleness
from runner.runs.started import StartedRun
from runner.runs.state import RunState
from runner.scoring import Scorer
from runner.store.writer import RunWriter
from runner.tokens.tokenizer import Tokenizer

__all__ = ["Start"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Start:
    """What a run is started with."""

    environment: Environment[Any]
    engines: Sequence[BaseEngine]
    """All engines of the run, each once; that of agents without one of their own comes first."""
    options: RunOptions
    limits: Limits
    """What every episode may use, every field set."""
    scorers: tuple[Scorer, ...]
    workers: Workers
    lag: LagMonitor
    state: RunState

    async def enter(self, exit_stack: AsyncExitStack) -> StartedRun:
        """Enter what has to be left again, and give what plays the run; nothing plays yet."""
        engine, workers = self.engines[0], self.workers
        exit_stack.callback(workers.close)
        self._check_templates_are_ours()
        await self._check_tool_format()
        # Engines before all else: what the header says, and which adapters there are, only a running one knows.
        for each in self.engines:
            await exit_stack.enter_async_context(running(each))
        staleness = Staleness(engine, self.options.max_version_lag)
        require_sampling(engine, self.options.sampling.over(self.environment.sampling))
        await exit_stack.enter_async_context(self.lag)
        now = datetime.now().astimezone()
        await self._check_templates(now)  # before the header says how they write turns, which takes renders
        writer = await exit_stack.enter_async_context(await self._writer(now))
        # A resumed run goes on with the clock that its templates saw first.
        shared = await self._shared(writer.header.clock)
        lifespan = lifespan_of(self.environment, workers, close_seconds=self.limits.close_seconds)
        # Outermost but for what it serves from: it is left once no episode is played any more.
        await exit_stack.enter_async_context(shared.endpoints)
        shared.resources = await exit_stack.enter_async_context(lifespan)
        feed = await self._feed()  # after lifespan(), whose resources tasks() may read
        exit_stack.push_async_callback(feed.aclose)
        started = StartedRun(
            options=self.options,
            engines=self.engines,
            shared=shared,
            writer=writer,
            feed=feed,
            state=self.state,
            staleness=staleness,
        )
        exit_stack.enter_context(staleness.cutting(self.state.plays))
        return started

    def _check_templates_are_ours(self) -> None:
        """Refuse options of chat templates in a run that has none: they would change nothing."""
        options = self.options
        if isinstance(self.engines[0], MessageEngine) and options.tool_format is not None:
            raise BadOption(
                f"tool_format={options.tool_format!r}: the engine's server reads calls itself; leave it out."
            )
        if options.template_options and not any(isinstance(engine, Engine) for engine in self.engines):
            raise BadOption(
                f"template_options={options.template_options!r:.60}: the chat template is the server's; what it takes "
                "of that goes into ChatEngine(extra_body=), such as {'chat_template_kwargs': {...}} for vLLM."
            )

    async def _check_tool_format(self) -> None:
        """Refuse a tool format that there is not, before an engine takes its time to start."""
        if self.options.tool_format is not None:
            from runner.engines.vllm.call_reader import require_format

            await self.workers.call(Job(partial(require_format, self.options.tool_format), "vLLM's tool parser"))

    def _named(self) -> Callable[[Tokenizer], NamedReader] | None:
        """Makes what reads calls in the format that the user named."""
        if self.options.tool_format is None:
            return None
        from runner.engines.vllm.call_reader import named_reader

        return partial(named_reader, self.options.tool_format)

    async def _check_templates(self, now: datetime) -> None:
        await check_templates(
            [each.template for each in self.engines if isinstance(each, Engine)], self.options.template_options, now
        )

    async def _writer(self, now: datetime) -> RunWriter:
        options, state = self.options, self.state
        describe = partial(describe_run, self.environment, self.engines[0], options, now=now)
        # In a thread where a file is kept: only then git is asked, which takes some milliseconds.
        header = describe() if options.file is None else await self.workers.call(Job(describe, "run header"))
        if callable(options.file):
            state.file = options.file(header)
        task_class = self.environment.task_class()
        return RunWriter(state.file, header, task_class=task_class, retry_failed=options.retry_failed)

    async def _shared(self, now: datetime) -> RunShared:
        """What all episodes share; templates that cannot serve them are refused before anything is sampled."""
        environment, options = self.environment, self.options
        await self._check_templates(now)
        chat = self._model(self.engines[0], now, named=self._named())
        other_models = {name: self._model(engine, now) for name, engine in options.engines.items()}
        main = other_models.get(MAIN, chat)
        faults = self.state.summary.faults
        if isinstance(main, ChatModel):
            faults.extend(check_tools(environment, main))
            tools = bool(environment.bound_tools())
            system = getattr(type(environment), "system_prompt", None) is not None
            faults.extend(await check_appends(main, now, self.workers, tools=tools, system=system))
        return RunShared(
            environment=environment,
            chat=chat,
            other_models=other_models,
            sampling=options.sampling,
            limits=self.limits,
            own_limits=options.limits,
            scorers=self.scorers,
            seed=options.seed,
            workers=self.workers,
            endpoints=EndpointServer(options.listen),
        )

    def _model(
        self, engine: BaseEngine, now: datetime, *, named: Callable[[Tokenizer], NamedReader] | None = None
    ) -> Model:
        if isinstance(engine, MessageEngine):
            return MessageModel(engine)
        assert isinstance(engine, Engine), "an engine takes ids or messages"
        options = self.options
        return ChatModel(engine, options=options.template_options, now=now, history=options.history, named=named)

    async def _feed(self) -> TaskFeed:
        tasks = self.options.tasks
        if tasks is None:  # in a thread, since it may load them all
            tasks = await self.workers.call(Job(partial(own_tasks, self.environment), "tasks()"))
        return TaskFeed(tasks, task_class=self.environment.task_class(), workers=self.workers)

"""The setup of a run: environment, engines and options, prepared in each process that plays episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Self

from runner.concurrency.threads import Job, Workers
from runner.endpoint.server import EndpointServer
from runner.engines.base import BaseEngine, Engine
from runner.engines.message_engine import MessageEngine
from runner.environment.checks import check_tools
from runner.environment.environment import Environment
from runner.environment.lifespan import lifespan_of
from runner.environment.uncalled_methods import uncalled_methods
from runner.episode.key import MAIN
from runner.episode.model import ChatModel, MessageModel, Model
from runner.episode.shared import RunShared
from runner.errors import BadOption
from runner.options import Limits
from runner.parsing.external_reader import ExternalReader
from runner.runs.options import RunOptions
from runner.runs.preflight import check_appends, check_templates
from runner.scoring import Scorer, with_weights
from runner.store.storable import first_unstorable
from runner.tokens.tokenizer import Tokenizer

__all__ = ["RunSetup"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSetup:
    """Environment, engines and options of a run, with their checks."""

    environment: Environment[Any]
    """The environment object. Every episode gets its own, constructed in the same way."""
    engines: Sequence[BaseEngine]
    """All engines of the run, each once; the run's own comes first."""
    options: RunOptions
    limits: Limits
    """The limits of an episode, with every field set."""
    scorers: tuple[Scorer, ...]
    """The environment's rewards and metrics, with the run's weights."""
    workers: Workers
    """The threads in which the author's synchronous code runs."""

    @classmethod
    def of(cls, environment: Environment[Any], engine: BaseEngine, options: RunOptions, workers: Workers) -> Self:
        """The setup of a run with these options; agents without a separate engine sample from `engine`."""
        return cls(
            environment=environment,
            engines=list(dict.fromkeys((engine, *options.engines.values()))),
            options=options,
            limits=options.limits_of(environment),
            scorers=with_weights(environment.scorers, options.weights),
            workers=workers,
        )

    def with_others(self, others: Mapping[BaseEngine, BaseEngine]) -> RunSetup:
        """Return the same setup with some engines replaced: `others` maps an engine to its replacement."""
        engines = {name: others.get(engine, engine) for name, engine in self.options.engines.items()}
        return replace(
            self,
            engines=[others.get(engine, engine) for engine in self.engines],
            options=replace(self.options, engines=engines),
        )

    async def check_options(self) -> None:
        """Check the options that can be checked before an engine starts.

        Raises:
            BadOption: an option does not fit the engine, or cannot be stored in the run file.
            BadModel: `tool_format` is given, and vLLM is not installed.
        """
        options = self.options
        if isinstance(self.engines[0], MessageEngine) and options.tool_format is not None:
            raise BadOption(
                f"tool_format={options.tool_format!r}: the engine's server reads calls itself; leave it out."
            )
        if options.template_options and not any(isinstance(engine, Engine) for engine in self.engines):
            raise BadOption(
                f"template_options={options.template_options!r:.60}: the server has the chat template; its options "
                "go into ChatEngine(extra_body=), such as {'chat_template_kwargs': {...}} for vLLM."
            )
        unkept = first_unstorable(options.template_options, "template_options")
        if unkept is not None and options.file is not None:  # verification renders the prompts again with these values
            raise BadOption(f"{unkept}.")
        if options.tool_format is not None:
            from runner.engines.vllm.call_reader import require_format

            await self.workers.call(Job(partial(require_format, options.tool_format), "vLLM's tool parser"))

    async def check_templates(self, now: datetime) -> None:
        """Check the chat templates of the running engines; raise BadTemplate if one cannot be used."""
        await check_templates(
            [each.template for each in self.engines if isinstance(each, Engine)], self.options.template_options, now
        )

    async def open_resources(self, exit_stack: AsyncExitStack) -> tuple[EndpointServer, Any]:
        """Open and return the HTTP server and the environment's `lifespan()`; neither needs an engine.

        Raises:
            BadEnvironment: `lifespan()` raised.
        """
        lifespan = lifespan_of(self.environment, self.workers, close_seconds=self.limits.close_seconds)
        # The server is entered before the lifespan, so that it closes after the lifespan, when no episode plays.
        endpoints = await exit_stack.enter_async_context(EndpointServer(self.options.listen))
        return endpoints, await exit_stack.enter_async_context(lifespan)

    async def share(self, now: datetime, endpoints: EndpointServer, resources: Any) -> tuple[RunShared, list[str]]:
        """Return the objects that all episodes share, and messages about faults. The engines must be running.

        Raises:
            BadTemplate: a template cannot be used, or does not support the tools or the appends of the run.
            BadOption: `tool_choice` cannot be enforced.
        """
        environment, options = self.environment, self.options
        await self.check_templates(now)
        chat = self._model(self.engines[0], now, named=self._named())
        other_models = {name: self._model(engine, now) for name, engine in options.engines.items()}
        shared = RunShared(
            environment=environment,
            chat=chat,
            other_models=other_models,
            sampling=options.sampling,
            limits=self.limits,
            own_limits=options.limits,
            scorers=self.scorers,
            seed=options.seed,
            workers=self.workers,
            endpoints=endpoints,
        )
        shared.resources = resources
        uncalled = (fault for part in environment.parts().values() for fault in uncalled_methods(part))
        return shared, [*uncalled, *await self._find_faults(other_models.get(MAIN, chat), now)]

    async def _find_faults(self, main: Model, now: datetime) -> list[str]:
        if not isinstance(main, ChatModel):
            return []
        parts = list(self.environment.parts().values())
        tools = any(part.bound_tools() for part in parts)
        system = any(getattr(type(part), "system_prompt", None) is not None for part in parts)
        faults = [fault for part in parts for fault in check_tools(part, main)]
        return [*faults, *await check_appends(main, now, self.workers, tools=tools, system=system)]

    def _named(self) -> Callable[[Tokenizer], ExternalReader] | None:
        """Return a factory for the reader of calls in the format that the user named; None if no format was named."""
        if self.options.tool_format is None:
            return None
        from runner.engines.vllm.call_reader import named_reader

        return partial(named_reader, self.options.tool_format)

    def _model(
        self, engine: BaseEngine, now: datetime, *, named: Callable[[Tokenizer], ExternalReader] | None = None
    ) -> Model:
        if isinstance(engine, MessageEngine):
            return MessageModel(engine)
        assert isinstance(engine, Engine), "an engine takes ids or messages"
        options = self.options
        return ChatModel(engine, options=options.template_options, now=now, history=options.history, named=named)

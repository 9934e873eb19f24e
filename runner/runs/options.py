"""The options of a run: what may be given by name, what each of them means, and what it has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypedDict

from runner import checked
from runner.endpoint.server import parse_listen
from runner.engines.base import BaseEngine
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks
from runner.errors import BadOption
from runner.options import Concurrency, History, Limits, Sampling, check_tool_format
from runner.store.header import Header

__all__ = ["RunKeywords", "RunOptions", "check_engine"]

OF_THE_TEMPLATE: Final = ("messages", "tools", "add_generation_prompt")
"""What the runner itself gives to a chat template."""


class RunKeywords(TypedDict, total=False):
    """The options of a run by name, as editors and type checkers see them; `RunOptions` says what each means.

    Keywords are typed by a TypedDict, and no type checker derives one from a dataclass: so both stand here, and a test
    compares their fields. `tasks` is not among them: the testing kit has a `tasks` of its own, so every door names it
    itself.
    """

    group_size: int
    indices: Sequence[int] | None
    engines: Mapping[str, BaseEngine] | None
    sampling: Sampling | None
    limits: Limits | None
    concurrency: Concurrency | None
    seed: int
    template_options: Mapping[str, Any] | None
    tool_format: str | None
    file: str | Path | Callable[[Header], Path] | None
    weights: Mapping[str, float] | None
    retries: int
    breaker: float
    max_version_lag: int | None
    retry_failed: bool
    listen: str
    history: History | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run, checked and settled: where None was given for a default, the default stands here.

    They are given by name to `Run`, to `run()`, and to the players of `runner.testing`.

    Raises:
        BadOption: an option is not what it has to be; the message names it and the fix.
    """

    tasks: Tasks | None = None
    """The tasks to play instead of the environment's own: an iterable, an async iterable, a source that hears of
    results, or the path of a JSONL file."""

    group_size: int = 1
    """How many episodes of each task are played."""

    indices: Sequence[int] | None = None
    """The episodes of each group that are played, by index, to look at single ones; None plays whole groups."""

    engines: Mapping[str, BaseEngine] = field(default_factory=dict)
    """Engines of their own for some agents, by the agent's name; what those agents say is not trained on."""

    sampling: Sampling = Sampling()
    """How trained agents sample. Each field that is set goes over the environment's."""

    limits: Limits = Limits()
    """What an episode may use. Each field that is set goes over the environment's."""

    concurrency: Concurrency = Concurrency()
    """How wide the run is; that never changes a result."""

    seed: int = 0
    """All random numbers of the run follow from it."""

    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Names that the chat template reads, such as `enable_thinking`, with their values."""

    tool_format: str | None = None
    """What reads the calls of agents that have no engine of their own: "vllm:NAME" is a tool parser of vLLM's. It goes
    over what is learnt of the chat template, which None reads by."""

    file: Path | Callable[[Header], Path] | None = None
    """The run file's path, or a function that names it by the run's header. A file that holds a run of the same
    configuration is resumed; None keeps no file."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of rewards by name; they go over those in the environment's class."""

    retries: int = 2
    """How often an episode is played again after a failure of the engine. A request that the engine refuses is no
    such failure."""

    breaker: float = 0.5
    """The run stops when more than this share of the recent episodes failed; 1 never stops it."""

    max_version_lag: int | None = None
    """How many weight updates an episode's oldest sampled id may be behind the engine, when an update lands or the
    episode ends. An older episode is dropped and counted, and its task is played again; None keeps any."""

    retry_failed: bool = False
    """Whether episodes are played again that earlier runs of the file left failed (`env_error`, `token_error`)."""

    listen: str = "127.0.0.1:0"
    """Where episodes are served to agent programs, as HOST:PORT; port 0 is any that is free. Nothing listens before an
    episode is served. Whoever can reach another address than the default one, and has a key, can use the model."""

    history: History = History()
    """How the past of a conversation is kept: append, fork or refuse, or a `History` with further options."""

    def __post_init__(self) -> None:
        # By hand and not by pydantic: each message names the option as it was written, and the fix.
        _check_engines(self.engines)
        checked.whole(f"group_size={self.group_size!r:.60}", self.group_size, least=1)
        checked.whole(f"retries={self.retries!r:.60}", self.retries, least=0)
        checked.whole(f"seed={self.seed!r:.60}", self.seed)
        self._check_indices()
        self._check_breaker()
        for name, kind in (("sampling", Sampling), ("limits", Limits), ("concurrency", Concurrency)):
            self._check_kind(name, kind)
        _check_template_options(self.template_options)
        check_tool_format(self.tool_format)
        parse_listen(self.listen)
        self._check_file()
        if self.max_version_lag is not None:
            checked.whole(
                f"max_version_lag={self.max_version_lag!r:.60}",
                self.max_version_lag,
                least=0,
                otherwise=", or None for any age",
            )
        self._settle()

    def by_name(self) -> dict[str, Any]:
        """The options as they are given to a run."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _settle(self) -> None:
        """Replace what stands for something else: None for a default, a policy's name for a `History`."""
        settled = {
            "engines": dict(self.engines or {}),
            "sampling": self.sampling or Sampling(),
            "limits": self.limits or Limits(),
            "concurrency": self.concurrency or Concurrency(),
            "template_options": dict(self.template_options or {}),
            "weights": self.weights or {},
            "history": History.of(self.history),
            "file": Path(self.file) if isinstance(self.file, str) else self.file,
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)  # the only way into a frozen dataclass

    def limits_of(self, environment: Environment[Any]) -> Limits:
        """The limits of an episode, every field set: these, over the environment's, over the defaults."""
        return self.limits.over(environment.limits).over(Limits.defaults())

    def _check_indices(self) -> None:
        if self.indices is None:
            return
        for index in self.indices:
            checked.whole(f"indices={index!r:.60}", index, least=0)
            if index >= self.group_size:
                raise BadOption(f"indices={self.indices!r:.60}: a group has the episodes 0 to {self.group_size - 1}.")

    def _check_breaker(self) -> None:
        share: Any = self.breaker
        if not checked.is_number(share) or not 0 < share <= 1:
            raise BadOption(f"breaker={share!r:.60}: give a share above 0 and at most 1 (1 never stops the run).")

    def _check_kind(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind | None):
            raise BadOption(f"{name}={value!r:.60}: give {kind.__name__}(...).")

    def _check_file(self) -> None:
        file: Any = self.file
        if file == "" or (not isinstance(file, str | Path | None) and not callable(file)):
            raise BadOption(f"file={file!r:.60}: give a path such as 'runs/one.db', or None to keep none.")
        if not isinstance(self.retry_failed, bool):
            raise BadOption(f"retry_failed={self.retry_failed!r:.60}: give True or False.")
        if self.retry_failed and file is None:
            raise BadOption("retry_failed=True: without a run file nothing says what failed; give file=.")


def check_engine(where: str, engine: Any) -> None:
    """Refuse what is no engine object."""
    if isinstance(engine, type) and issubclass(engine, BaseEngine):
        raise BadOption(f"{where}={engine.__name__} is the class: give an engine object, {engine.__name__}(...).")
    if not isinstance(engine, BaseEngine):
        raise BadOption(f"{where}={engine!r:.60} is no engine: give an engine object, such as VllmEngine('MODEL').")


def _check_engines(engines: Any) -> None:
    if not isinstance(engines, Mapping | None):
        raise BadOption(
            f"engines={engines!r:.60}: give a dict of agent names and engines, such as {{'judge': engine}}."
        )
    for name, engine in (engines or {}).items():
        if not isinstance(name, str):
            raise BadOption(f"engines={{{name!r:.60}: ...}}: the name of an agent is a string.")
        check_engine(f"engines[{name!r}]", engine)


def _check_template_options(options: Any) -> None:
    if not isinstance(options, Mapping | None):
        raise BadOption(f"template_options={options!r:.60}: give a dict, such as {{'enable_thinking': False}}.")
    for name in options or {}:
        if not isinstance(name, str) or name in OF_THE_TEMPLATE:
            raise BadOption(
                f"template_options={{{name!r}: ...}}: give names that only the template reads, such as "
                f"enable_thinking; {', '.join(OF_THE_TEMPLATE)} are given to it by the run."
            )
